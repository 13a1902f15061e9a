"""Compares loaded episodes."""

from __future__ import annotations

import torch

from fmmeta.tasks.loader import LoadResult


def same_episodes(a: list[LoadResult], b: list[LoadResult]) -> bool:
    """Whether the tasks and all tensors of their batches are equal."""

    def tensors(loaded: LoadResult):
        assert loaded.batches is not None, loaded.error
        return [
            t
            for batch in (*loaded.batches.support, *loaded.batches.query)
            for t in (*batch.inputs.values(), batch.labels, batch.weights)
        ]

    return all(
        x.task == y.task and all(map(torch.equal, tensors(x), tensors(y))) for x, y in zip(a, b, strict=True)
    )
