"""Rank 0 of a large launch, without the launch: that a configuration starts, what its rank sends, how much
memory its GPU needs beside the estimate of fmmeta/parallel/memory.py.

    python -m tests.gpu.dry_run 64 -- --group_size=64 --deepspeed=ds_configs/zero3.json --bf16

    covered        the real code, from reading the checkpoint to the second outer step: sizes of shards and
                   buffers, devices, the order and the bytes of collectives, waits
    not covered    the other ranks, which are made up (lone_rank.py): numbers, stages of a pipeline, what
                   differs by rank; NCCL's buffers and the context of CUDA; fragments of memory; speed

Weights are zeros, in a checkpoint without blocks on the disk. Rows are short (ROWS), because each kernel is
computed by this machine's CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.budgets import counted_by, record

ROWS = "--k_shot=1 --num_query=1 --max_length=16 --micro_batch_size=1"
QUIET = "--inner_steps=2 --outer_steps=2 --meta_batch_size=1 --eval_episodes=0 --save_steps=0 --num_workers=0"
GIB = 2**30
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": {  # Llama 3.1 8B
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "llama-20m": {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1408,
        "vocab_size": 2000,
    },
    "mixture-40m": {
        "model_type": "qwen3_moe",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "vocab_size": 2000,
    },
}


def save_zeros(folder: Path, sizes: dict[str, Any]) -> None:
    """A checkpoint of these sizes in bf16 whose tensors are a hole in its file. model_type: Llama if not
    given.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fmmeta.learners.tiny import byte_tokenizer

    fixed = {"model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": False}
    config: Any = AutoConfig.for_model(**{**fixed, **sizes})
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    header, end = dict[str, Any](), 0
    for name, value in model.state_dict().items():
        begin, end = end, end + 2 * value.numel()
        header[name] = {"dtype": "BF16", "shape": [*value.shape], "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def run(ranks: int, model: str, flags: Sequence[str], file: Path) -> None:
    """Train in this process, which has the device; write what was counted after the second outer step."""
    from fmmeta.cli import main as fmmeta
    from fmmeta.parallel.memory import needed_at
    from fmmeta.training import build
    from fmmeta.training.schedules import OpenStep
    from tests.support.nccl_rules import replace
    from tests.support.pretended_cuda.events import device
    from tests.support.pretended_cuda.lone_rank import be_rank_0_of

    if ranks > 1:
        be_rank_0_of(ranks)
    found, estimated, folder = dict[str, Any](), dict[str, Any](), file.parent

    def estimate(original: Any, config: Any, inputs: Any, plan: Any, world: Any, *args: Any) -> None:
        sizes_at = build.sizes_of(config, inputs, world.device)
        model_ranks = config.pipeline_stages * config.tensor_parallel_size
        needed = needed_at(sizes_at, inputs.deepspeed, plan.group_size, model_ranks)
        estimated.update(kinds=needed.peak, total=needed.total, host=needed.host)
        original(config, inputs, plan, world, *args)

    def update(original: Any, step: Any) -> Any:
        result = original(step)
        if step.number == 1:
            numbers = {name: vars(counted) for name, counted in found.items()}
            numbers |= {"peak": device.pretended_peak(), "estimate": estimated}
            file.write_text(json.dumps(numbers))
            os._exit(0)  # nothing is evaluated or saved
        return result

    record(found)
    replace(build, "log_layout", estimate)
    replace(OpenStep, "update", update)
    save_zeros(folder / "model", MODELS[model])
    fmmeta(
        [
            *("train", "--task_type=causal_lm", f"--output_dir={folder}/run"),
            *(f"--model_name_or_path={folder}/model", *ROWS.split(), *QUIET.split(), *flags),
        ]
    )


def dry_run(ranks: int, model: str, flags: Sequence[str], limit_s: float = 300) -> dict[str, Any]:
    """What rank 0 does: the counts of the last inner and outer step, peak and estimated bytes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "numbers.json")
        words = ["-m", "tests.gpu.dry_run", str(ranks), "--model", model, "--file", str(file), "--", *flags]
        return counted_by(words, file, limit_s=limit_s)


def report(found: dict[str, Any]) -> str:
    """The numbers as text."""
    kinds = {kind: size for kind, size in found["estimate"]["kinds"].items() if size}
    lines = [
        f"peak {found['peak'] / GIB:.3f} GiB; estimated {found['estimate']['total'] / GIB:.3f}: "
        + ", ".join(f"{kind} {size / GIB:.3f}" for kind, size in kinds.items())
    ]
    for step in ("inner step", "outer step"):
        counted = found[step]
        lines.append(f"{step}: {counted['kernels']} kernels, {sum(counted['waits'].values())} waits")
        lines += [
            f"    {number} x {name}, {counted['sent'][name] / GIB:.3f} GiB given by this rank"
            for name, number in counted["collectives"].items()
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    own, flags = sys.argv[1:], list[str]()
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    args = parser.parse_args(own)
    if args.file:
        run(args.ranks, args.model, flags, args.file)
    else:
        print(report(dry_run(args.ranks, args.model, flags, limit_s=10_000)))


if __name__ == "__main__":
    main()
