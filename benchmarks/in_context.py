"""How much faster are in-context episodes whose queries share the computation of the support set?

    python -m benchmarks.in_context --model FOLDER --data ../shared/data/function_vectors \
        ../shared/data/instruction_induction [--episodes 12]

Each episode is scored in three ways in one process, which take turns at being the first:

    strided   every query behind its own support set, logits of all tokens, softmax over a strided dimension
    complete  the same rows and logits with a softmax over the last dimension
    shared    the support set computed once for all queries, and logits of the tokens before answers only

`strided` is how fmmeta scored before this benchmark. Processor seconds, so that other processes do not count.
Beside the ratios stands their bound, tokens of complete rows over tokens with the support set once; it leaves
the logits out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import table, write_json
from fmmeta.common.progress import Progress
from fmmeta.evaluation.command import EvaluatedModel
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.meta.algorithms.baselines import prompted
from fmmeta.models.answers import common_prefix, rows_of
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.parallel.workers.full_model import FullModelWorker, PlainWorker
from fmmeta.tasks.batching import IGNORE, MicroBatch

RESULTS = Path(__file__).parent / "results" / "in_context.json"
SIZES = ((5, 5), (10, 10))  # shots, queries


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, nargs="+")
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--json", default=str(RESULTS))
    asked = parser.parse_args()
    cells = {f"{shots} x {queries}": measured(asked, shots, queries) for shots, queries in SIZES}
    print(show(cells))
    write_json(asked.json, {"episodes": asked.episodes, "cells": cells})


def measured(asked: argparse.Namespace, shots: int, queries: int) -> dict[str, Any]:
    settings = EvaluateConfig(
        model_name_or_path=asked.model,
        dataset=asked.data,
        task_type="causal_lm",
        method=["in_context"],
        k_shot=[shots],
        num_query=queries,
        max_length=asked.max_length,
        episodes=asked.episodes,
    )
    model = EvaluatedModel(
        settings, World(Launch(), pick_device(Launch())), Progress(False), lambda text: None, [asked.model]
    )
    worker, episodes = model.parts.worker, model.episodes[shots]
    assert isinstance(worker, PlainWorker)
    assert worker.answers is not None
    assert worker.answers.can_share, "a model that can share prefixes"
    load = model.parts.load(episodes.source)
    load.prompt = partial(prompted, bos_token_id=model.inputs.tokenizer.bos_token_id, positions=None)
    ways = {
        "strided": lambda batches: strided_loss(worker, batches),
        "complete": lambda batches: FullModelWorker.forward(worker, batches).loss,
        "shared": lambda batches: worker.forward(batches).loss,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    bounds, differences = [], []
    for number, task in enumerate([episodes.tasks[0], *episodes.tasks]):  # the first one warms up
        batches = load.batches(task).prompted
        found = {}
        for name in (*ways,)[number % 3 :] + (*ways,)[: number % 3]:
            began = time.process_time()
            found[name] = ways[name](batches)
            if number:
                seconds[name].append(time.process_time() - began)
        if number:
            bounds.append(tokens_bound(batches))
            differences.append({name: abs(found[name] - found["shared"]) for name in ways})
    total = {name: sum(values) for name, values in seconds.items()}
    return {
        "episodes_per_second": {name: len(seconds[name]) / total[name] for name in ways},
        "ratio": {name: total[name] / total["shared"] for name in ways},
        "bound_in_tokens": statistics.mean(bounds),
        "largest_loss_difference": {name: max(one[name] for one in differences) for name in ways},
        "seconds": seconds,
    }


@torch.no_grad()
def strided_loss(worker: PlainWorker, batches: Sequence[MicroBatch]) -> float:
    """The loss from logits of all tokens, softmax over dimension 1 of [B, V, T]; argmax for accuracy."""
    total = 0.0
    for batch in batches:
        logits, labels = worker.model(**batch.inputs)[:, :-1], batch.labels[:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
        _ = ((logits.argmax(-1) != labels) & (labels != IGNORE)).sum()
        total += float((each.sum(1) * batch.weights).sum())
    return total


def tokens_bound(batches: Sequence[MicroBatch]) -> float:
    """Tokens of complete rows over tokens with the common prefix of the rows once."""
    rows = [row.ids for row in rows_of(batches)]
    prefix, complete = common_prefix(rows), sum(map(len, rows))
    return complete / (complete - prefix * (len(rows) - 1))


def show(cells: dict[str, Any]) -> str:
    header = [
        "shots x queries",
        *(f"{name}, episodes / CPU s" for name in ("strided", "complete", "shared")),
        "shared / strided",
        "shared / complete",
        "bound in tokens",
        "largest difference of a loss (complete)",
    ]
    lines = []
    for name, cell in cells.items():
        speed = cell["episodes_per_second"]
        lines.append(
            [
                name,
                *(f"{speed[way]:.3f}" for way in ("strided", "complete", "shared")),
                *(f"{cell['ratio'][way]:.2f}" for way in ("strided", "complete")),
                f"{cell['bound_in_tokens']:.2f}",
                f"{cell['largest_loss_difference']['complete']:.1e}",
            ]
        )
    return table(header, lines)


if __name__ == "__main__":
    main()
