"""Workers of the conformance tests, and what they share."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.support.nan_memory import fill
from tests.support.ranks import begin
from tests.workers.exercise import exercise

Results = dict[str, Tensor]
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, settings; stage: of ZeRO
    "ZeRO 0": (2, {"stage": 0}),
    "ZeRO 1": (2, {"stage": 1}),
    "ZeRO 2": (2, {"stage": 2}),
    "ZeRO 3": (2, {"stage": 3}),
    "pipeline": (2, {"stage": 1, "pipeline_stages": 2}),
    "tensor": (2, {"stage": 0, "tensor_parallel_size": 2}),
    "tensor with LoRA": (2, {"stage": 1, "tensor_parallel_size": 2, "lora_r": 2}),
    "pipeline of tensor ranks": (4, {"stage": 1, "pipeline_stages": 2, "tensor_parallel_size": 2}),
    "ZeRO 3 with LoRA": (2, {"stage": 3, "lora_r": 2}),
}
EXACT = ("write", "nonfinite step", "nonfinite gradient", "dot")  # no pass of the model changes their vectors


def engine(folder: Path, stage: int | None) -> dict[str, Any]:
    """The settings of DeepSpeed with a ZeRO stage, or (None) of the plain worker."""
    if stage is None:
        return {"engine": "plain"}
    file = folder / f"zero{stage}.json"
    zero = {"stage": stage, "reduce_bucket_size": 10**6}  # memory is filled: DeepSpeed's default is 2 GB
    file.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    return {"engine": "deepspeed", "deepspeed": str(file)}


def launch(ranks: int, listed: dict[str, dict[str, Any]]) -> dict[str, Results]:
    """Run cases in one launch, in which memory that is not written gives NaN; results of rank 0 by case."""
    grouped = {case: {**config, "group_size": str(ranks)} for case, config in listed.items()}
    return begin(exercise, ranks, grouped, timeout_s=240, rules=True, before=fill)()[0]


def relative_error(found: Results, wanted: Results, operation: str) -> float:
    """The largest relative error among an operation's tensors, vectors over the whole model."""
    names = [name for name in wanted if name.split("/")[0] in (operation, f"{operation}, theta")]
    assert names == [name for name in found if name.split("/")[0] in (operation, f"{operation}, theta")]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name if name.endswith("/stats") else name.split("/")[0], []).append(name)
    errors = []
    for members in groups.values():
        off = sum(float((found[name] - wanted[name]).double().square().sum()) for name in members)
        size = sum(float(wanted[name].double().square().sum()) for name in members)
        errors.append((off / (size or 1.0)) ** 0.5)  # the numbers of a pass that is not finite are zeros
    return max(errors)
