"""How far is the memory that `fmmeta plan` computes from the peak memory of ranks?

    # one layout after the other, minutes each
    python -m benchmarks.plan memory FOLDER --json benchmarks/results/plan.json
    # a random Llama of 69 M parameters
    python -m benchmarks.plan model FOLDER
    # the table of mixtures in docs/explanation/memory-and-time.md, of FOLDER/*/config.json
    python -m benchmarks.plan mixtures benchmarks/shapes

benchmarks/memory.py measures (VmHWM of the fullest rank, libraries left out). The last line is the largest
ratio of what was measured to what was planned, and the smallest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from dataclasses import asdict, replace
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


def make_model(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fmmeta.learners.tiny import byte_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=12,
        intermediate_size=2048,
        vocab_size=8000,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def planned(folder: str, size: int, stage: int, split: int | tuple[int, int], bf16: bool) -> Any:
    """The memory that the plan computes for these settings."""
    from fmmeta.planning.layouts import Planner
    from fmmeta.planning.machines import PROFILES
    from fmmeta.planning.settings import PlanConfig

    stages, tensor = split if isinstance(split, tuple) else (split, 1)
    plan = PlanConfig(
        model_name_or_path=folder,
        gpus=size,
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
        dataset=["pairs"],
        **TASK,
    )
    # memory does not depend on the rates, but on the device
    (layout,) = Planner(plan, replace(PROFILES["a100"], device="cpu")).layouts()
    return layout.memory


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
        f"--bf16={bf16}",
    ]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)
    if ran.returncode:
        raise SystemExit(ran.stderr[-2000:])
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == size
    return max(line["train_gb"] for line in lines) * 1e9


MIXTURES = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-120b": "gpt-oss-120b", "glm-4.5-air": "GLM-4.5-Air"}


def plan_of_mixture(folder: str, gpus: int) -> Any:
    """What `fmmeta plan` gets for a row of the table of mixtures."""
    from fmmeta.planning.settings import PlanConfig

    return PlanConfig(
        model_name_or_path=folder,
        gpus=gpus,
        gpu_memory_gib=80.0,
        host_memory_gib=2000.0,
        task_type="causal_lm",
        k_shot=16,
        num_query=16,
        max_length=1024,
        row_tokens=512,
        meta_batch_size=2 * gpus,
        dataset=["tasks.jsonl"],
    )


def rows_of_mixtures(folder: str, names: Any = MIXTURES, gpus: Any = (8, 64, 256)) -> list[str]:
    """The fastest layout with all weights and with adapters, as lines of a table in Markdown."""
    from fmmeta.common.text import three_digits
    from fmmeta.parallel.memory import GIB
    from fmmeta.planning.command import best
    from fmmeta.planning.layouts import Planner
    from fmmeta.planning.machines import find

    lines = []
    for name in names:
        for many in gpus:
            planner = Planner(plan_of_mixture(f"{folder}/{name}", many), find("h100"))
            layouts, products = planner.layouts(), planner.counts(0, 1, 1)[1]
            total = sum(param.numel() for param in planner.learner(0).parameters())
            title = f"{MIXTURES[name]}: {total / 1e9:.1f} B, {products.whole / 1e9:.1f} B at work"
            found = {trained: ways[0] for trained, ways in best(layouts).items()}
            for trained in ("all weights", "adapters (LoRA)"):
                cells = [title, str(many), trained, "-", "does not fit", *"----"]
                if one := found.get(trained):
                    cells[3:] = [str(one.strategy.group_size), str(one.strategy)]
                    cells += [f"{one.memory.total / GIB:.1f}", f"{one.host_bytes / GIB:,.0f}"]
                    cells += [three_digits(one.step.total), f"{100 * one.efficiency:.0f} %"]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def compare(folder: str, out: str | None, only: str | None) -> None:
    """All layouts, or one that is given by name; results of others stay in the file."""
    from benchmarks.common import table, write_json

    kept = json.loads(Path(out).read_text()) if out and Path(out).is_file() else {}
    found: dict[str, Any] = {row["layout"]: row for row in kept.get("memory", [])}
    for name, size, stage, split, bf16 in LAYOUTS:
        title = f"{name}, group of {size}"
        if only and only != title:
            continue
        memory, peak = planned(folder, size, stage, split, bf16), measured(folder, size, stage, split, bf16)
        found[title] = {
            "layout": title,
            "planned_gb": memory.total / 1e9,
            "measured_gb": peak / 1e9,
            "ratio": peak / memory.total,
            "kinds": asdict(memory),
        }
        print(f"{title}: {peak / 1e9:.3f} measured, {memory.total / 1e9:.3f} planned", flush=True)
        kept.pop("machine", None)
        write_json(out, {**kept, "memory": list(found.values())})
    cells = [
        [title, f"{row['planned_gb']:.2f}", f"{row['measured_gb']:.2f}", f"{row['ratio']:.3f}"]
        for title, row in found.items()
    ]
    print(table(["layout", "planned GB", "measured GB", "ratio"], cells))
    ratios = [row["ratio"] for row in found.values()]
    print(f"{max(ratios):.3f} {min(ratios):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["model", "memory", "mixtures"])
    parser.add_argument("folder")
    parser.add_argument("--json")
    parser.add_argument("--only", help="one layout, such as 'ZeRO 1, group of 2'")
    known = parser.parse_args()
    if known.what == "model":
        make_model(known.folder)
    elif known.what == "mixtures":
        print(*rows_of_mixtures(known.folder), sep="\n")
    else:
        compare(known.folder, known.json, known.only)
