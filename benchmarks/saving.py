"""How long does training wait for a checkpoint? The copy into host memory, beside the write that it stands
for.

    python -m benchmarks.saving --params 60000000 --saves 5 --json benchmarks/results/saving.json

The floor is the same save as of a run's last checkpoint, measured in the same run: there training waits for
all of it. Theta and two moments are written, 12 bytes per parameter.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import spread, table, write_json
from fmmeta.checkpoint.write import Saver
from fmmeta.config.settings import Config
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.param_map import Fragment, ParamMap
from fmmeta.parallel.process_groups import World, pick_device


def measure(params: int, saves: int, asynchronous: bool, folder: Path) -> dict[str, Any]:
    launch = Launch()
    ranks = World(launch, pick_device(launch)).split(1, default_group=False)
    size = params // 8
    fragments = tuple(Fragment(f"p{n}", (size,), n * size, 0, size) for n in range(8))
    vectors = {name: torch.randn(8 * size) for name in ("theta", "exp_avg", "exp_avg_sq")}
    saver = Saver(ParamMap(fragments, 8 * size, {}, True), Config(), ranks, print)
    if asynchronous:
        saver.warm(vectors)
    waits, writes = [], []
    for step in range(saves):
        state = {"outer_step": step}
        began = time.perf_counter()
        saver.save(folder / f"checkpoint-{step}", vectors, state, {}, last=not asynchronous)
        saved = time.perf_counter()
        saver.wait()  # training would continue here
        waits.append(saved - began)
        writes.append(time.perf_counter() - (saved if asynchronous else began))
    return {"wait_s": spread(waits), "write_s": spread(writes), "first_wait_s": waits[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=int, default=60_000_000)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    results = {}
    for name, asynchronous in (("thread", True), ("no thread", False)):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(args.params, args.saves, asynchronous, Path(folder))
    rows = [
        [
            name,
            f"{one['wait_s']['median']:.3f}",
            f"{one['write_s']['median']:.3f}",
            f"{100 * one['wait_s']['median'] / one['write_s']['median']:.1f} %",
        ]
        for name, one in results.items()
    ]
    print(table(["save", "training waits (s)", "write (s)", "ratio"], rows))
    write_json(args.json, {"params": args.params, "saves": args.saves, **results})


if __name__ == "__main__":
    main()
