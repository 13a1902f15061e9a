"""Short runs of a few seconds that something happens to, and how they are compared; conftest.py has their
fixtures.
"""

import gc
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from fmmeta.common.errors import UsageError
from harness.fork_server import Rank, shared

QUICK = {
    "n_way": 2,
    "k_shot": 1,
    "num_query": 1,
    "meta_batch_size": 4,
    "inner_steps": 1,
    "max_length": 16,
    "num_workers": 0,
    "eval_episodes": 0,
    "logging_steps": 1,
}
QUICK_PAIRS = {name: value for name, value in QUICK.items() if name != "n_way"}  # without classes
LONG = {"outer_steps": 12, "save_steps": 5, "episode_transforms": "tests.support.short_runs:slow_episode"}


def slow_episode(episode, rng):
    """A transform: an episode takes as long as the environment says, after the first outer step."""
    if episode.task.seed[2]:
        time.sleep(float(os.environ.get("EPISODE_S", "0.05")))
    return episode


def noisy_episode(episode, rng):
    """A transform: it prints, in a loader process."""
    print("noise", flush=True)
    return episode


def slow_rank(episode, rng):
    """A transform: episodes take EPISODE_S seconds on the rank SLOW_RANK; each is noted in the folder TASKS.

    A task that fails is the slot FAILS of every outer step.
    """
    step, slot = episode.task.seed[2:]
    rank = os.environ["FMMETA_GLOBAL_RANK"]
    if rank == os.environ.get("SLOW_RANK"):
        time.sleep(float(os.environ["EPISODE_S"]))
    with (Path(os.environ["TASKS"]) / f"rank-{rank}").open("a") as file:
        file.write(f"{step} {slot}\n")
    if str(slot) == os.environ.get("FAILS"):
        raise UsageError("rows.jsonl:3 is bad; fix it")
    return episode


def fault(episode, rng):
    """A transform: in the eighth outer step rank 1 fails once, as FAULT says: it ends (exit), its theta
    changes (theta), or the end of the step raises (error). The file FAULTED is written then.
    """
    mark = Path(os.environ["FAULTED"])
    if os.environ["FMMETA_GLOBAL_RANK"] == "1" and episode.task.seed[2] == 7 and not mark.exists():
        mark.touch()
        if os.environ["FAULT"] == "exit":
            os._exit(70)
        run = next(one for one in gc.get_objects() if type(one).__name__ == "Run")
        if os.environ["FAULT"] == "error":
            run.outer_schedule.end_step = None
        run.theta[0] += os.environ["FAULT"] == "theta"
    return episode


def hold(episode, rng):
    """A transform: from the third outer step on an episode waits for the file that the environment names."""
    while episode.task.seed[2] >= 2 and not Path(os.environ["HOLD"]).exists():
        time.sleep(0.05)
    return episode


@dataclass
class Job:
    """A run in a folder, and its ranks."""

    run: Path
    ranks: list[Rank]

    @classmethod
    def start(cls, argv: Sequence[str], ranks: int, folder: Path, **env: str) -> "Job":
        """Begin launch/train.py with these flags, which name FOLDER/run; logs go to `folder`."""
        return cls(folder / "run", shared().train(argv, ranks, folder, **env))

    def reach(self, step: int, timeout_s: float = 60.0) -> "Job":
        """Wait for the line of an outer step."""
        until(lambda: steps_of(self.run) >= step, timeout_s)
        return self

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.ranks[rank].pid, number)

    def end(self, codes: int | list[int] = 0, timeout_s: float = 100) -> str:
        """Wait for the exit codes, or one of all ranks; returns what the first rank has printed."""
        wanted = [codes] * len(self.ranks) if isinstance(codes, int) else codes
        assert shared().wait(self.ranks, timeout_s) == wanted, [rank.text for rank in self.ranks]
        return self.ranks[0].text


def theta_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    one, other = theta_of(a), theta_of(b)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def metrics_of(run: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> int:
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except OSError:
        return 0


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def handles(pid: int, number: int) -> bool:
    """Whether a process has installed a handler for a signal."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def model_of(run: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in (run / "model").glob("model*.safetensors")
        for name, value in load_file(file).items()
    }


def off(found, whole: Path, begin, wanted) -> float:
    """The error over the distance travelled since the first checkpoint (which is less than that since the
    start).
    """
    want = theta_of(whole)
    assert found.keys() == want.keys()
    error = sum(float((found[name] - want[name]).double().square().sum()) for name in want)
    way = sum(
        float((wanted[key] - begin[key]).double().square().sum())
        for key in wanted
        if key.startswith("theta/")
    )
    return (error / way) ** 0.5


def tensorboard_of(run: Path) -> dict[str, dict[int, float]]:
    """What a run has logged to TensorBoard: tag -> step -> number."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
