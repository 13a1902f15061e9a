"""How often a GPU waits for its host in each layout, and what is launched, copied and sent: budgets.json.

    python -m tests.gpu.budgets                  compare with the table; exit code 1 if a number differs
    python -m tests.gpu.budgets --write          write the table
    python -m tests.gpu.budgets --lines NAME     print one layout, its origins with numbers of lines

A process is rank 0 of as many as the layout has (lone_rank.py); ranks of a pipeline are real, since they
exchange shapes. `inner step`: the last one; `outer step`: the last one, its inner steps and queries included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.fork_server import environment, places, shared
from tests.support import pretended_cuda

TABLE = Path(__file__).with_name("budgets.json")
BASE = "--outer_steps=2 --inner_steps=3 --meta_batch_size=2 --eval_episodes=0 --save_steps=0 --num_workers=0"
SHARDED = "--meta_batch_size=2 --group_size=8 --bf16"
LAYOUTS: dict[str, tuple[int, str]] = {  # ranks, flags; negative: real ranks
    "plain fp32": (1, "--bf16=false"),
    "plain bf16": (1, "--bf16"),
    "plain bf16 llama": (1, "--bf16 --task_type=causal_lm"),
    "images": (1, "--bf16 --dataset=digits"),
    "LoRA": (1, "--bf16 --lora_r=2"),
    "LoRA, two tasks per pass": (1, "--bf16 --lora_r=2 --tasks_per_pass=2"),
    "maml": (1, "--bf16 --algorithm=maml --lora_r=2"),
    "maml, path in host memory": (
        1,
        "--bf16 --algorithm=maml --lora_r=2 --trajectory_memory_gib=0",
    ),
    "imaml": (1, "--bf16=false --algorithm=imaml"),
    "offload_outer": (1, "--bf16 --algorithm=reptile --inner_optimizer=adamw --offload_outer"),
    **{f"ZeRO {n} of 8": (8, f"{SHARDED} --deepspeed=ds_configs/zero{n}.json") for n in range(4)},
    "ZeRO 3 of 8 llama": (8, f"{SHARDED} --task_type=causal_lm --deepspeed=ds_configs/zero3.json"),
    "ZeRO 3 of 8, offload": (8, f"{SHARDED} --deepspeed=ds_configs/zero3_offload.json"),
    "8 groups": (8, "--group_size=1 --meta_batch_size=16 --bf16"),
    "4 groups of 2, ZeRO 1": (
        8,
        "--group_size=2 --meta_batch_size=8 --bf16 --deepspeed=ds_configs/zero1.json",
    ),
    "tensor 4": (4, "--group_size=4 --tensor_parallel_size=4 --task_type=causal_lm --bf16"),
    "2 ranks, ZeRO 1": (-2, "--group_size=2 --bf16 --deepspeed=ds_configs/zero1.json"),
    "pipeline 2": (
        -2,
        "--bf16=false --group_size=2 --pipeline_stages=2 --deepspeed=ds_configs/zero1.json",
    ),
}


def record(found: dict[str, Any]) -> None:
    """Count every inner and every outer step of this process from now on; `found` has the last of each."""
    from fmmeta.meta.inner_loop import InnerSteps
    from fmmeta.parallel.workers.full_model import TaskBatch
    from fmmeta.training.schedules import OpenStep, StaticSchedule
    from tests.support.nccl_rules import replace
    from tests.support.pretended_cuda.events import count

    open_step = contextlib.ExitStack()

    def inner(original: Any, *args: Any, **kwargs: Any) -> Any:
        with count() as found["inner step"]:
            return original(*args, **kwargs)

    def begin(original: Any, schedule: Any) -> Any:
        open_step.close()
        found["outer step"] = open_step.enter_context(count())
        return original(schedule)

    def update(original: Any, step: Any) -> Any:
        with open_step:
            return original(step)

    replace(InnerSteps, "take", inner)
    replace(TaskBatch, "step", inner)
    replace(StaticSchedule, "begin_step", begin)
    replace(OpenStep, "update", update)


def measure(name: str, file: Path) -> None:
    """Train in this process, which has the device, and write what was counted."""
    from fmmeta.cli import main as fmmeta
    from tests.support.pretended_cuda.lone_rank import be_rank_0_of

    (ranks, flags), rank = LAYOUTS[name], os.environ["RANK"]
    if ranks > 1:
        be_rank_0_of(ranks)
    found: dict[str, Any] = {}
    record(found)
    with tempfile.TemporaryDirectory() as folder:
        words = shlex.split(f"{BASE} {flags}")
        folder = f"{file}.run" if ranks < 0 else folder
        with contextlib.suppress(SystemExit):
            fmmeta(["train", f"--output_dir={folder}/run", *words])
    if rank == "0":
        numbers = {step: vars(counted) for step, counted in found.items()}
        file.write_text(json.dumps(numbers, sort_keys=True))


def counted_by(words: Sequence[str], file: Path, ranks: int = 1, limit_s: float = 300) -> dict[str, Any]:
    """What `python WORDS` writes to a file in processes with the device."""
    with pretended_cuda.on_device():
        started = [
            shared().start(words, Path(f"{file}.{place['RANK']}.log"), environment(**place))
            for place in places(ranks)
        ]
        codes = shared().wait(started, limit_s)
    assert (set(codes), file.exists()) == ({0}, True), f"exit codes {codes}: {started[0].text[-6000:]}"
    return json.loads(file.read_text())


def measured(names: Sequence[str], lines: bool = False) -> dict[str, Any]:
    """The numbers of layouts, each from its own processes."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            file = Path(folder, f"{list(LAYOUTS).index(name)}.json")
            words = ["-m", "tests.gpu.budgets", "--measure", str(file), *(["--lines"] if lines else []), name]
            found[name] = counted_by(words, file, max(1, -LAYOUTS[name][0]))
    return found


def versions() -> dict[str, str]:
    """Of the packages on which the numbers depend."""
    from importlib.metadata import version

    return {name: version(name).partition("+")[0] for name in ("torch", "deepspeed", "transformers", "peft")}


def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def shown(value: Any, depth: int = 0) -> str:
    """JSON with a line for every kind of number of a step."""
    if depth == 4 or not isinstance(value, dict):
        return json.dumps(value)
    inside = [
        f"{' ' * (depth + 1)}{json.dumps(key)}: {shown(each, depth + 1)}" for key, each in value.items()
    ]
    return "{\n" + ",\n".join(inside) + f"\n{' ' * depth}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.names or list(LAYOUTS)
    if args.measure:
        from tests.support.pretended_cuda import events

        events.LINES[0] = args.lines
        measure(names[0], args.measure)
        return
    found = measured(names, args.lines)
    if args.lines:
        print(json.dumps(found, indent=1))
    elif args.write:
        known = table()["layouts"] if TABLE.exists() and args.names else {}
        layouts = {name: {**known, **found}[name] for name in LAYOUTS if name in {**known, **found}}
        TABLE.write_text(shown({"versions": versions(), "layouts": layouts}) + "\n")
    else:
        differ = [name for name in names if found[name] != table()["layouts"].get(name)]
        print(*(differ or ["the same"]), sep="\n")
        sys.exit(bool(differ))


if __name__ == "__main__":
    main()
