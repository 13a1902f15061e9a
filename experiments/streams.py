"""streams.yaml: documents out of packages, blocks below the adapters that are run once for each row, and test
cells at the rates that were best on validation documents.
"""

import hashlib
import os
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.run import Cell, Study
from fmmeta import evaluate
from fmmeta.config.learners import STREAM
from fmmeta.learners.stream import StreamLearner


class Cached(StreamLearner):
    """The learner of streams for a model whose first blocks are frozen: a file holds what they make of a row.

    blocks: how many are frozen. kept: the folder of the files.
    """

    blocks, kept = 23, Path()

    def forward(self, places: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Of one row without padding: the same numbers as without files."""
        ids = inputs.pop("input_ids")
        body: Any = next(
            one for one in self.hf.modules() if isinstance(getattr(one, "layers", 0), nn.ModuleList)
        )
        layers, norm = body.layers, body.norm
        file = self.kept / f"{hashlib.sha256(ids.numpy().tobytes()).hexdigest()}.pt"
        written = file.with_suffix(f".{os.getpid()}")  # until it is whole, as for documents
        try:
            if not file.is_file():
                body.layers, body.norm = layers[: self.blocks], nn.Identity()
                with torch.no_grad():
                    torch.save(body(input_ids=ids, use_cache=False).last_hidden_state, written)
                written.rename(file)
            body.layers, body.norm = layers[self.blocks :], norm
            return super().forward(places, inputs_embeds=torch.load(file), **inputs)
        finally:
            body.layers, body.norm = layers, norm


STREAMS = replace(STREAM, learner=Cached)


def documents(study: Study, cell: Cell) -> dict[str, Any]:
    """Write the texts of `documents` (stratum: files of packages) again; their numbers and digests."""
    shutil.rmtree(Path(study.folder, "documents"), ignore_errors=True)
    return unpacked(study, cell)


def unpacked(study: Study, cell: Cell) -> dict[str, Any]:
    """Write the texts to a folder that appears when it is whole: other processes may work on other cells.

    Raises:
        ValueError: the results are of other texts. No folder is left that the next cell would take.
    """
    found: dict[str, Any] = {}
    written, whole = Path(study.folder, f"documents.{os.getpid()}"), Path(study.folder, "documents")
    shutil.rmtree(written, ignore_errors=True)
    for stratum, pattern in cell.settings["documents"].items():
        folder, digest = written / stratum, hashlib.sha256()
        folder.mkdir(parents=True)
        files = sorted(Path(study.data).glob(pattern))
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        for file, text in zip(files, texts, strict=True):
            name = "_".join(file.parts[-2:]).removesuffix(".txt") + ".txt"
            (folder / name).write_text(text, encoding="utf-8")
            digest.update(f"{name}\n{text}".encode())
        found[stratum] = {
            "documents": len(files),
            "characters": sum(map(len, texts)),
            "sha256": digest.hexdigest(),
        }
    known = study.results().get("documents", found)
    if others := [stratum for stratum in found if found[stratum] != known[stratum]]:
        raise ValueError(
            f"{study.data}: the texts of {', '.join(others)} are not those of the results; unpack the "
            "versions of packages that streams.yaml names"
        )
    try:
        written.rename(whole)
    except OSError:  # another process was first: the texts are the same
        shutil.rmtree(written)
    return found


def measure(study: Study, cell: Cell) -> dict[str, Any]:
    """Bits per byte of each document, also by position."""
    if not Path(study.folder, "documents").is_dir():
        unpacked(study, cell)
    Cached.kept = Path(study.folder, "kept")
    Cached.kept.mkdir(exist_ok=True)
    settings = cell.settings
    model, seconds = study.trained(cell)
    began = time.process_time()
    (result,) = evaluate(model, **settings["evaluate"])["cells"]
    scores = [score["metrics"] for score in result["scores"]]
    return {
        **{name: " ".join(f"{score[name]:.5f}" for score in scores) for name in scores[0]},
        "strata": Counter(score["stratum"] for score in result["scores"]),
        "rates": {
            "outer": settings.get("train", {}).get("outer_lr"),
            "inner": settings["evaluate"].get("inner_lr"),
        },
        "cpu_minutes": {
            "training": round(seconds / 60, 2),
            "scoring": round((time.process_time() - began) / 60, 2),
        },
    }
