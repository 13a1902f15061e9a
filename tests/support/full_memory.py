"""Loads episodes in a /dev/shm with room for some semaphores; test_loader.py mounts it for this process."""

import os
import pickle
import sys
import time
from contextlib import suppress
from pathlib import Path

from fmmeta.tasks.batching import Batcher
from fmmeta.tasks.loader import EpisodeLoader, LoadEpisode
from tests.support.episodes import same_episodes

if __name__ == "__main__":
    folder, full, semaphores = sys.argv[1:]
    source, tasks, transforms = pickle.loads((Path(folder) / "made.pickle").read_bytes())
    load = LoadEpisode(source, Batcher(0), transforms)
    loader, expected = (
        EpisodeLoader(load, lambda task: tasks[tasks.index(task) :], number) for number in "10"
    )
    found, held = [], []
    if full == "later":
        found = loader.fetch(tasks[:2])
        while len(held := list(Path("/dev/shm").glob("fmmeta-loader-*/[!_]*"))) < loader.prefetch_factor or (
            any("_" in file.name for file in held)
        ):
            time.sleep(0.01)  # until the loader process has prepared all that it may
    held = [file.open("rb") for file in held]  # reading them frees no room
    with Path("/dev/shm/ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(bytes(4096)):
            pass
    os.truncate("/dev/shm/ballast", os.stat("/dev/shm/ballast").st_size - 4096 * int(semaphores))
    found += loader.fetch(tasks[len(found) :])
    print("same episodes" if same_episodes(found, expected.fetch(tasks)) else "other episodes")
    print("\n".join(loader.warnings))
    loader.close()
