"""Forward and backward passes of several tasks at a time: adapters and a head over a frozen base.

    phi    the adapters of N tasks, complete on every rank, fp32, one flat buffer: [N, *shape] per parameter
    step   the m-th micro-batches of all tasks in one forward and backward pass,
           then one sum of N x P numbers over the group

The worker holds theta throughout: its own adapters are bypassed (models/multi_task_layers.py), and no engine
runs its backward pass or optimizer. Under ZeRO 3 the base is gathered once per pass instead of once per pass
and task; the gradients of all tasks are reduced as one tensor. Tasks are independent: a non-finite gradient
of one does not change the others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmmeta.models.losses import per_row
from fmmeta.models.multi_task_layers import TaskAxis
from fmmeta.parallel.workers.base import PassStats, Update
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import MicroBatch, Sets, merge_task_batches


class TaskBatch:
    """N tasks that begin at `theta`, which the worker holds. Collective: group."""

    def __init__(self, worker: FullModelWorker, axis: TaskAxis, theta: Tensor, tasks: int) -> None:
        self.worker, self.axis, self.tasks = worker, axis, tasks
        shapes = {f.name: f.shape for f in worker.params.fragments}
        for told in worker.group.gather_bytes(
            json.dumps(shapes).encode()
        ):  # a rank may hold no part of a small one
            shapes |= {name: tuple(shape) for name, shape in json.loads(told).items()}
        self.shapes = {name: shapes[name] for name in axis.names}
        sizes = [tasks * torch.Size(shape).numel() for shape in self.shapes.values()]
        self.numel = sum(sizes)
        device = worker.device
        self.phi, self.grad = torch.zeros(self.numel, device=device), torch.zeros(self.numel, device=device)
        self.blocks = self._blocks(self.phi, sizes)
        self._fill(theta)
        bf16 = next(p.dtype for p in worker.model.parameters() if p.is_floating_point()) == torch.bfloat16
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        for block, grad in zip(self.blocks.values(), self._blocks(self.grad, sizes).values(), strict=True):
            block.requires_grad_()
            block.grad = grad

    def set(self, name: str, task: int, value: Tensor) -> None:
        """Let a task begin elsewhere in one parameter."""
        with torch.no_grad():
            self.blocks[name][task] = value

    def step(self, sets: Sets, update: Update) -> list[PassStats]:
        """One step of every task on the mean loss over its own set. Collective: group."""
        stats = self._passes(sets)
        with torch.no_grad():
            update(self.phi, self.grad, slice(0, self.numel))
        return [PassStats(row) for row in stats]

    def gradient(self, sets: Sets) -> list[PassStats]:
        """Leave the gradient of every task's mean loss in `grad`. Collective: group."""
        return [PassStats(row) for row in self._passes(sets)]

    @torch.no_grad()
    def forward(self, sets: Sets) -> list[PassStats]:
        """Collective: group."""
        stats = self._stats()
        with self.axis.of(self._values()):
            for together in merge_task_batches(sets):
                self._loss(together, stats)
        return [PassStats(row) for row in self.worker.group.sum_(stats)]

    def vector(self, flat: Tensor, task: int) -> Tensor:
        """One task's part of `flat` (phi or grad) as this rank's vector [S]."""
        vector, params = torch.zeros(self.worker.params.numel, device=self.worker.home), self.worker.params
        for name, block in self._blocks(
            flat, [self.tasks * torch.Size(s).numel() for s in self.shapes.values()]
        ).items():
            params.put(vector, name, block[task].reshape(-1))
        return vector

    def _passes(self, sets: Sets) -> Tensor:
        """Gradients into `grad`; [N, 4] as a Pass has them."""
        self.grad.zero_()
        stats = self._stats()
        for together in merge_task_batches(sets):
            with self.axis.of(self._values()):
                self._loss(together, stats).backward()
        self.worker.group.sum_(self.grad)
        self.worker.group.sum_(stats)
        finite = torch.zeros(self.tasks, device=stats.device)
        for block in self.blocks.values():
            finite += block.grad.reshape(self.tasks, -1).sum(1)  # type: ignore[union-attr]
        stats[:, 3] = ~torch.isfinite(finite)
        return stats

    def _loss(self, together: MicroBatch, stats: Tensor) -> Tensor:
        batch = together.to(self.worker.device)
        learner: Any = getattr(self.worker.model, "module", self.worker.model)
        logits = learner(**batch.inputs)
        losses, right, rows = (each.reshape(self.tasks, -1).sum(1) for each in per_row(logits, batch))
        stats[:, :3] += torch.stack([losses.detach().double(), right.double(), rows.double()], 1)
        return losses.sum()

    def _values(self) -> dict[str, Tensor]:
        """What a pass computes with: as the worker's own weights, rounded where those are."""
        return {name: block.to(self.dtype) for name, block in self.blocks.items()}

    def _stats(self) -> Tensor:
        return torch.zeros(self.tasks, 4, dtype=torch.float64, device=self.worker.device)

    def _blocks(self, flat: Tensor, sizes: Sequence[int]) -> dict[str, Tensor]:
        parts = flat.split(list(sizes))
        return {
            name: part.view(self.tasks, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def _fill(self, theta: Tensor) -> None:
        """Every task's phi from the group's shards of theta: one reduction of what a task holds."""
        params = self.worker.params
        whole = [
            params.whole(theta, name, shape, lambda part: part).reshape(-1).to(self.phi.device)
            for name, shape in self.shapes.items()
        ]
        flat = torch.cat(whole)
        if not params.replicated:
            self.worker.group.sum_(flat)
        for block, part in zip(
            self.blocks.values(), flat.split([each.numel() for each in whole]), strict=True
        ):
            block.copy_(part.view(1, *block.shape[1:]).expand_as(block))
