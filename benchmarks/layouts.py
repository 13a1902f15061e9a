"""Do outer steps of a language model end at the same theta on every layout, in the planned memory?

    python -m benchmarks.layouts --model SMOLLM2 [--trained LoRA] [--layouts "2 stages" ...]

FOMAML, two outer steps, five examples and five queries, two inner steps; all weights, and LoRA. Rows are
answers that fill `max_length`, as the plan assumes: only tokens of answers have logits. Every layout is a
launch of real ranks (memory.py).

off       |theta - theta of one rank in fp32| / |that theta - theta_0|; in bf16 of outer steps of SGD, since
          the first step of AdamW is as long for the smallest gradients, whose sign is rounding
measured  the peak of the fullest rank, without libraries; glibc returns freed blocks from 256 KiB on, with
          LoRA, where most blocks are small, from 64 KiB on
planned   the estimate that `fmmeta plan` makes

Rows that the JSON file holds are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.common import read, table, write_json
from fmmeta.parallel.network import unused_port

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/layouts.json"
RANKS = {  # ranks and flags
    "1 rank": (1, []),
    "2 ranks, ZeRO 2": (2, ["--group_size=2", "--deepspeed=ds_configs/zero2.json"]),
    "2 ranks, ZeRO 3": (2, ["--group_size=2", "--deepspeed=ds_configs/zero3.json"]),
    "2 stages": (2, ["--group_size=2", "--pipeline_stages=2"]),
    "3 tensor ranks": (3, ["--group_size=3", "--tensor_parallel_size=3"]),
}
BLOCKS = {"all weights": "262144", "LoRA": "65536"}
TRAINED = {"all weights": ["--inner_lr=1e-3"], "LoRA": ["--lora_r=8", "--inner_lr=0.1"]}
OUTER = {"fp32": list[str](), "bf16": ["--outer_optimizer=sgd", "--outer_lr=0.1"]}
FLAGS = [
    "--outer_steps=2",  # the moments of the outer optimizer exist from the first one on
    "--meta_batch_size=1",
    "--k_shot=5",
    "--num_query=5",
    "--inner_steps=2",
    "--max_length=60",
    "--attn_implementation=eager",
    "--prompt_template=plain",
]
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


def measured(
    asked: argparse.Namespace, trained: str, ranks: int, flags: list[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Memory of the fullest rank, and what was trained: all weights, or adapters."""
    with tempfile.TemporaryDirectory() as work:
        model = Path(work, "model")
        model.symlink_to(Path(asked.model).resolve())
        write_rows(Path(work, "rows.jsonl"))
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        words = [*launcher, f"--nproc_per_node={ranks}", f"--master_port={unused_port()}"]
        words += ["benchmarks/memory.py", "run", str(model), f"--dataset={work}/rows.jsonl", *FLAGS]
        words += [*TRAINED[trained], *flags]
        blocks = {"MALLOC_MMAP_THRESHOLD_": BLOCKS[trained], "MALLOC_TRIM_THRESHOLD_": BLOCKS[trained]}
        ran = subprocess.run(
            words, cwd=ROOT, env={**os.environ, **blocks}, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise SystemExit(ran.stderr[-3000:])
        lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        assert len(lines) == ranks
        fullest = max(lines, key=lambda line: line["train_gb"])
        return fullest, theta_of(Path(f"{model}-exported"))


def write_rows(file: Path) -> None:
    rng, rows = random.Random(0), []
    for task in range(4):
        for _ in range(16):
            words = rng.choices(WORDS, k=60)
            rows.append({"task": f"t{task}", "input": words[0], "output": " ".join(words)})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def theta_of(folder: Path) -> dict[str, Tensor]:
    adapters = folder / "adapter_model.safetensors"
    return {
        name: one.double()
        for file in ([adapters] if adapters.is_file() else sorted(folder.glob("model*.safetensors")))
        for name, one in load_file(file).items()
    }


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--layouts", nargs="+", default=list(RANKS), choices=list(RANKS))
    parser.add_argument("--trained", nargs="+", default=list(TRAINED), choices=list(TRAINED))
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    cells = read(asked.json)
    for trained, (dtype, of_dtype) in product(asked.trained, OUTER.items()):
        wanted = [(name, f"{trained}, {name}, {dtype}") for name in asked.layouts]
        if all(title in cells for _, title in wanted):
            continue
        _, start = measured(asked, trained, 1, [*of_dtype, "--bf16=false", "--outer_lr=1e-12"])
        _, end = measured(asked, trained, 1, [*of_dtype, "--bf16=false"])
        travelled = distance(end, start)
        for name, title in wanted:
            if title in cells:
                continue
            ranks, flags = RANKS[name]
            bf16 = f"--bf16={dtype == 'bf16'}"
            fullest, theta = measured(asked, trained, ranks, [*of_dtype, *flags, bf16])
            cells[title] = {
                "off": distance(theta, end) / travelled,
                "measured_gb": fullest["train_gb"],
                "planned_gb": fullest["estimate_gb"],
            }
            print(title, cells[title], flush=True)
            write_json(asked.json, {"cells": cells})
    print(show(cells))


def show(cells: dict[str, Any]) -> str:
    titles = [f"{trained}, {name}, {dtype}" for trained, dtype, name in product(TRAINED, OUTER, RANKS)]
    known = [(title, cells[title]) for title in titles if title in cells]
    rows = [
        [
            title,
            f"{cell['off']:.1e}",
            f"{cell['measured_gb']:.2f}",
            f"{cell['planned_gb']:.2f}",
            f"{cell['measured_gb'] / cell['planned_gb']:.3f}",
        ]
        for title, cell in known
    ]
    return table(["layout", "off", "measured GB", "planned GB", "ratio"], rows)


if __name__ == "__main__":
    main()
