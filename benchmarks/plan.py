"""How far is `fmmeta plan` from what runs do? Peak memory of ranks, and seconds of outer steps, beside what
was planned.

    # one layout after the other, minutes each
    python -m benchmarks.plan memory FOLDER --json benchmarks/results/plan.json
    # calibrates, trains, calibrates, trains
    torchrun --nproc_per_node 2 -m benchmarks.plan time FOLDER [flags of a run]
    # a random Llama of 69 M or 16 M parameters
    python -m benchmarks.plan model FOLDER [small]

memory: benchmarks/memory.py measures (VmHWM of the fullest rank, libraries left out). The last line is the
largest ratio of what was measured to what was planned, and the smallest. time: the profile is measured in the
processes that train, in seconds of the clock and of the CPU (which other work on the machine does not
stretch), and the prediction made with each is compared with the median outer step by the same clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent.parent
TASK = {
    "task_type": "causal_lm",
    "max_length": 24,
    "k_shot": 4,
    "num_query": 4,
    "inner_steps": 1,
    "meta_batch_size": 1,
}
# name, group size, ZeRO stage, pipeline stages (with tensor ranks: both), bf16
LAYOUTS: list[tuple[str, int, int, int | tuple[int, int], bool]] = [
    ("plain", 1, 0, 1, False),
    *((f"ZeRO {stage}", size, stage, 1, False) for size in (2, 4) for stage in (0, 1, 2, 3)),
    *(
        (f"{stages} stages, ZeRO {stage}", size, stage, stages, False)
        for size, stages, stage in ((2, 2, 0), (4, 4, 0), (4, 2, 0), (4, 2, 1))
    ),
    ("plain, bf16", 1, 0, 1, True),
    *((f"ZeRO {stage}, bf16", 2, stage, 1, True) for stage in (0, 1, 2, 3)),
    ("2 stages, bf16", 2, 0, 2, True),
    *((f"2 tensor ranks, ZeRO {stage}", size, stage, (1, 2), False) for size, stage in ((2, 0), (4, 1))),
    *(
        (f"2 stages of 2 tensor ranks, ZeRO {stage}", size, stage, (2, 2), False)
        for size, stage in ((4, 0), (8, 1))
    ),
]


def make_model(folder: str, size: str = "") -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    hidden, layers, vocab = (512, 4, 2000) if size == "small" else (768, 8, 8000)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        vocab_size=vocab,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def cpu_profile() -> Any:
    """Some rates; memory does not depend on them, but on the device."""
    from fmmeta.planning.machines import PROFILES

    return replace(PROFILES["a100"], device="cpu")


def planned(
    folder: str,
    size: int,
    stage: int,
    split: int | tuple[int, int],
    bf16: bool,
    profile: Any = None,
    gpus: int = 0,
    **task: Any,
) -> Any:
    """The layout that the plan makes of these settings."""
    from fmmeta.planning.layouts import Planner
    from fmmeta.planning.settings import PlanConfig

    stages, tensor = split if isinstance(split, tuple) else (split, 1)
    plan = PlanConfig(
        model_name_or_path=folder,
        gpus=gpus or size,
        gpu_memory_gib=1e3,
        group_size=str(size),
        zero_stage=[stage],
        pipeline_stages=stages,
        tensor_parallel_size=tensor,
        lora_r=0,
        gradient_checkpointing=False,
        offload=False,
        offload_outer=False,
        micro_batch_size=32,
        bf16=bf16,
        simulate_steps=1,
        dataset=["pairs"],
        **{**TASK, **task},
    )
    (layout,) = Planner(plan, profile or cpu_profile()).layouts()
    return layout


def measured(folder: str, size: int, stage: int, split: int | tuple[int, int], bf16: bool) -> float:
    """Bytes of the fullest rank."""
    stages, tensor = split if isinstance(split, tuple) else (split, 1)
    words = [
        "torchrun",
        "--nproc_per_node",
        str(size),
        "--master_port",
        str(20000 + os.getpid() % 20000),
        "benchmarks/memory.py",
        "run",
        folder,
        "--group_size",
        str(size),
        "--deepspeed",
        f"ds_configs/zero{stage}.json",
        "--pipeline_stages",
        str(stages),
        "--tensor_parallel_size",
        str(tensor),
        *(["--bf16"] if bf16 else []),
    ]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)
    if ran.returncode:
        raise SystemExit(ran.stderr[-2000:])
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == size
    return max(line["train_gb"] for line in lines) * 1e9


def memory(folder: str, out: str | None, only: str | None) -> None:
    """All layouts, or one that is given by name; results of others stay in the file."""
    from benchmarks.common import table, write_json

    kept = json.loads(Path(out).read_text()) if out and Path(out).is_file() else {}
    found: dict[str, Any] = {row["layout"]: row for row in kept.get("memory", [])}
    for name, size, stage, split, bf16 in LAYOUTS:
        title = f"{name}, group of {size}"
        if only and only != title:
            continue
        layout, peak = planned(folder, size, stage, split, bf16), measured(folder, size, stage, split, bf16)
        found[title] = {
            "layout": title,
            "planned_gb": layout.memory.total / 1e9,
            "measured_gb": peak / 1e9,
            "ratio": peak / layout.memory.total,
            "kinds": asdict(layout.memory),
        }
        print(f"{title}: {peak / 1e9:.3f} measured, {layout.memory.total / 1e9:.3f} planned", flush=True)
        kept.pop("machine", None)
        write_json(out, {**kept, "memory": list(found.values())})
    cells = [
        [title, f"{row['planned_gb']:.2f}", f"{row['measured_gb']:.2f}", f"{row['ratio']:.3f}"]
        for title, row in found.items()
    ]
    print(table(["layout", "planned GB", "measured GB", "ratio"], cells))
    ratios = [row["ratio"] for row in found.values()]
    print(f"{max(ratios):.3f} {min(ratios):.3f}")


TIMED = {"max_length": 64, "k_shot": 8, "num_query": 8, "inner_steps": 2, "meta_batch_size": 1}
CLOCKS = {"clock": time.perf_counter, "cpu": time.process_time}


def seconds(folder: str, rounds: int, flags: list[str], out: str | None = None) -> None:
    """One of the ranks that calibrate and train in turn. out: JSON file whose line for these flags is written
    anew.
    """
    from fmmeta.cli import parse
    from fmmeta.common.progress import Progress
    from fmmeta.parallel import deepspeed_config
    from fmmeta.parallel.layout import Launch
    from fmmeta.parallel.process_groups import World, pick_device
    from fmmeta.training import build
    from fmmeta.training.loop import Run
    from fmmeta.training.run_folder import RunStart

    launch, work = Launch.from_env(os.environ), Path(tempfile.mkdtemp())
    rows = [
        {"task": f"t{t}", "input": "where " * 9 + f"{t} {i}", "output": "there " * 5}
        for t in range(4)
        for i in range(32)
    ]
    (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        **TASK,
        **TIMED,
        "dataset": str(work / "pairs.jsonl"),
        "outer_steps": 1000,
        "eval_episodes": 0,
        "save_steps": 0,
        "group_size": str(launch.world_size),
        "outer_lr": 1e-6,
        "inner_lr": 1e-3,
        "check_replicas_steps": 0,
    }
    config = parse(
        [*(f"--{key}={value}" for key, value in given.items()), f"--model_name_or_path={folder}", *flags]
    )
    world = World(launch, pick_device(launch))
    inputs = build.read_inputs(config, world, lambda text: None)
    plan = build.plan_parallel(config, inputs, world, lambda text: None)
    ranks = world.split(plan.group_size, plan.engine == "deepspeed")
    parts = build.build(config, inputs, plan, ranks)
    run = Run(config, inputs, ranks, parts, RunStart(work, None, False), Progress(enabled=False))
    run.resume()
    found = {clock: {"profiles": [], "steps": []} for clock in CLOCKS}
    for _ in range(rounds):
        for clock in CLOCKS:
            found[clock]["profiles"].append(calibrated(folder, clock, bool(config.bf16), ranks))
        for clock, took in train(run).items():
            found[clock]["steps"] += took
    size, bf16 = int(config.group_size), plan.deepspeed.bf16
    stage = deepspeed_config.read(config.deepspeed, bf16).zero_stage
    line: dict[str, Any] = {"flags": flags, "ranks": launch.world_size}
    for clock, each in found.items():
        profile = middle(each["profiles"])
        task = {**TIMED, "meta_batch_size": config.meta_batch_size}
        layout = planned(
            folder,
            size,
            stage,
            (config.pipeline_stages, config.tensor_parallel_size),
            bf16,
            profile,
            launch.world_size,
            **task,
        )
        took = world.comm.sum_(torch_tensor(statistics.median(each["steps"]))) / launch.world_size
        line[clock] = {
            "planned_s": layout.step_seconds,
            "measured_s": float(took),
            "ratio": float(took) / layout.step_seconds,
            "gflops": profile.matmul(bf16) / 1e9,
            "kinds": asdict(layout.step),
        }
    if launch.global_rank == 0:
        print(json.dumps(line), flush=True)
        keep(out, line)
    world.close()


def keep(out: str | None, line: dict[str, Any]) -> None:
    """Put a line of `time` beside the others of the results file."""
    from benchmarks.common import write_json

    kept = json.loads(Path(out).read_text()) if out and Path(out).is_file() else {}
    kept.pop("machine", None)
    others = [one for one in kept.get("seconds", []) if one["flags"] != line["flags"]]
    write_json(out, {**kept, "seconds": [*others, line]})


def calibrated(folder: str, clock: str, bf16: bool, ranks: Any) -> Any:
    """The machine's profile by one of the clocks."""
    from types import SimpleNamespace

    from fmmeta.models import pipeline_split
    from fmmeta.parallel.collectives import Communicator
    from fmmeta.planning import machines
    from fmmeta.planning.settings import PlanConfig

    plan = PlanConfig(
        model_name_or_path=folder,
        gpus=ranks.world.size,
        gpu_memory_gib=1e3,
        bf16=bf16,
        dataset=["pairs"],
        **{**TASK, **TIMED},
    )
    given = SimpleNamespace(perf_counter=CLOCKS[clock])
    ordinary = pipeline_split.time, machines.time
    pipeline_split.time = machines.time = given  # type: ignore[assignment]
    try:
        link: Communicator = ranks.group if ranks.group.size > 1 else ranks.cross
        return machines.measure_together(
            plan, SimpleNamespace(world=ranks.world, group=link, device=ranks.device)
        )
    finally:
        pipeline_split.time, machines.time = ordinary


def train(run: Any, steps: int = 3) -> dict[str, list[float]]:
    """Seconds of some outer steps, the first of them left out."""
    from fmmeta.training.callbacks import Callback

    marks: list[dict[str, float]] = []
    built_in = run.callbacks.built_in

    class Marks(Callback):
        def on_step_end(self, run: Any, outcome: Any) -> None:
            marks.append({name: clock() for name, clock in CLOCKS.items()})

    run.callbacks.built_in = [*built_in, Marks()]
    run.config.outer_steps = run.state.outer_step + steps
    run.loop()
    run.callbacks.built_in = built_in
    return {name: [late[name] - early[name] for early, late in pairwise(marks)] for name in CLOCKS}


def middle(profiles: list[Any]) -> Any:
    """The median of each number."""
    numbers = [name for name, value in asdict(profiles[0]).items() if isinstance(value, float)]
    return replace(
        profiles[0], **{name: statistics.median(getattr(one, name) for one in profiles) for name in numbers}
    )


def torch_tensor(value: float) -> Any:
    import torch

    return torch.tensor([value], dtype=torch.float64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["model", "memory", "time"])
    parser.add_argument("folder")
    parser.add_argument("size", nargs="?", default="")
    parser.add_argument("--json")
    parser.add_argument("--only", help="one layout, such as 'ZeRO 1, group of 2'")
    parser.add_argument("--rounds", type=int, default=3)
    known, rest = parser.parse_known_args()
    if known.what == "model":
        make_model(known.folder, known.size)
    elif known.what == "memory":
        memory(known.folder, known.json, known.only)
    else:
        seconds(known.folder, known.rounds, rest, known.json)
