"""Small checkpoints: three parameters, whole on one rank or cut into slices, and folders that hold them."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta import checkpoint
from fmmeta.checkpoint import write
from fmmeta.parallel.param_map import Fragment, ParamMap
from tests.support.helpers import one_rank

SHAPES = {"a": (4, 3), "b": (5,), "c": (2, 2)}


def param_map(*pieces: tuple[str, int, int], gap: int = 0, replicated: bool = False) -> ParamMap:
    """A map of consecutive pieces (name, offset, length), each followed by `gap` elements of padding."""
    fragments, begin = [], 0
    for name, offset, length in pieces:
        fragments.append(Fragment(name, SHAPES[name], begin, offset, length))
        begin += length + gap
    return ParamMap(tuple(fragments), begin, {"no_decay": slice(0, begin)}, replicated)


WHOLE = param_map(("a", 0, 12), ("b", 0, 5), ("c", 0, 4), replicated=True)
CUT = param_map(("c", 0, 1), ("b", 3, 2), ("a", 7, 5), ("b", 0, 3), ("c", 1, 3), ("a", 0, 7), gap=2)


def parameters(seed: float) -> dict[str, Tensor]:
    return {
        name: seed + torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
        for name, shape in SHAPES.items()
    }


def laid_out(params: ParamMap, values: dict[str, Tensor]) -> Tensor:
    vector = torch.full((params.numel,), -1.0)
    for name, value in values.items():
        params.put(vector, name, value)
    return vector


def state_of(step: int, vectors: Iterable[str] = (), **settings) -> dict[str, Any]:
    return {
        "outer_step": step,
        "vectors": list(vectors),
        "numbers": {},
        "bad_steps": 0,
        "tasks": {},
        "settings": settings,
    }


def write_manifest(folder: Path) -> None:
    """Write the manifest of the files that are in the folder now."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in folder.iterdir()
        if file.name != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps({"files": files}))


def save(
    folder: Path, vectors: dict[str, Tensor], params: ParamMap, state: dict[str, Any], keep: int, tables=None
) -> None:
    """Write a checkpoint on one rank."""
    ranks = one_rank()
    pieces, shapes = write.rank_slices(vectors, params, ranks), write.param_shapes(params)
    write.write(folder, pieces, shapes, state, tables or {}, keep, ranks.world)


def saved(tmp_path: Path, params: ParamMap, step: int = 3, keep: int = 2) -> Path:
    vectors = {"theta": laid_out(params, parameters(100)), "exp_avg": laid_out(params, parameters(500))}
    folder = tmp_path / f"checkpoint-{step}"
    save(folder, vectors, params, state_of(step, vectors), keep)
    return folder


def assert_holds(folder: Path, params: ParamMap) -> None:
    found = checkpoint.load(folder, ["theta", "exp_avg"], params, torch.zeros(params.numel))
    for name, seed in (("theta", 100), ("exp_avg", 500)):
        wanted = laid_out(params, parameters(seed))
        assert torch.equal(found[name], torch.where(wanted < 0, 0.0, wanted))  # padding stays zero
