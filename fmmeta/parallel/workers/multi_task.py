"""Forward and backward passes of several tasks at a time: adapters and a head over a frozen base.

    phi    the adapters of N tasks, complete on every rank, fp32, one flat buffer: [N, *shape] per parameter
    step   the m-th micro-batches of all tasks in one forward and backward pass,
           then one sum of N x P numbers over the group

The worker holds theta throughout: its own adapters are bypassed (models/lora.py), and no engine
runs its backward pass or optimizer. Under ZeRO 3 the base is gathered once per pass instead of once per pass
and task; the gradients of all tasks are reduced as one tensor. Tasks are independent: a non-finite gradient
of one task does not change the others.
"""

import json
from typing import Any

import torch
from torch import Tensor

from fmmeta.models.learner import per_row
from fmmeta.models.lora import TaskAxis
from fmmeta.parallel.workers.base import PassStats, Update
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import MicroBatch, Sets, merge_task_batches


class TaskBatch:
    """N tasks that start from `theta`, which the worker holds. Collective: group.

    phi, grad: the adapters of all tasks and their gradients, fp32, flat; blocks: views of phi by name,
    [N, *shape].
    """

    def __init__(self, worker: FullModelWorker, axis: TaskAxis, theta: Tensor, tasks: int) -> None:
        self.worker, self.axis, self.tasks = worker, axis, tasks
        own = {fragment.name: fragment.shape for fragment in worker.params.fragments}
        shapes: dict[str, Any] = {}
        for text in worker.group.gather_bytes(
            json.dumps(own).encode()
        ):  # a rank may hold no part of a small one
            shapes |= json.loads(text)
        self.shapes = {name: torch.Size(shapes[name]) for name in axis.names}
        numel = tasks * sum(shape.numel() for shape in self.shapes.values())
        self.phi, self.grad = (torch.zeros(numel, device=worker.device) for _ in range(2))
        self.blocks = self._blocks(self.phi)
        self._fill(theta)
        bf16 = next(p.dtype for p in worker.model.parameters() if p.is_floating_point()) == torch.bfloat16
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        for name, grad in self._blocks(self.grad).items():
            self.blocks[name].requires_grad_().grad = grad

    def set(self, name: str, task: int, value: Tensor) -> None:
        """Change the initial value of one parameter of a task."""
        with torch.no_grad():
            self.blocks[name][task] = value

    def step(self, sets: Sets, update: Update) -> list[PassStats]:
        """One step of every task on the mean loss over its own set. Collective: group."""
        stats = self.gradient(sets)
        with torch.no_grad():
            update(self.phi, self.grad, slice(0, self.phi.numel()))
        return stats

    def gradient(self, sets: Sets) -> list[PassStats]:
        """Set `grad` to the gradient of every task's mean loss. Collective: group."""
        self.grad.zero_()
        stats = self._stats()
        for merged in merge_task_batches(sets):
            with self.axis.of(self._values()):
                self._loss(merged, stats).backward()
        self.worker.group.sum_(self.grad)
        self.worker.group.sum_(stats)
        sums = [grad.reshape(self.tasks, -1).sum(1) for grad in self._blocks(self.grad).values()]
        stats[:, 3] = ~torch.isfinite(torch.stack(sums).sum(0))
        return [PassStats(row) for row in stats]

    @torch.no_grad()
    def forward(self, sets: Sets) -> list[PassStats]:
        """Loss and accuracy of every task. Collective: group."""
        stats = self._stats()
        with self.axis.of(self._values()):
            for merged in merge_task_batches(sets):
                self._loss(merged, stats)
        return [PassStats(row) for row in self.worker.group.sum_(stats)]

    def vector(self, flat: Tensor, task: int) -> Tensor:
        """One task's part of `flat` (phi or grad) as this rank's vector, fp32 [S]."""
        vector = self.worker.zeros()
        for name, block in self._blocks(flat).items():
            self.worker.params.put(vector, name, block[task].reshape(-1))
        return vector

    def _loss(self, merged: MicroBatch, stats: Tensor) -> Tensor:
        batch = merged.to(self.worker.device)
        logits = self.worker.learner(**batch.inputs)
        losses, num_correct, num_rows = (
            each.reshape(self.tasks, -1).sum(1) for each in per_row(logits, batch)
        )
        stats[:, :3] += torch.stack([losses.detach().double(), num_correct.double(), num_rows.double()], 1)
        return losses.sum()

    def _values(self) -> dict[str, Tensor]:
        """The adapters in the precision that the model computes with."""
        return {name: block.to(self.dtype) for name, block in self.blocks.items()}

    def _stats(self) -> Tensor:
        """PassStats of each task: [N, 4]."""
        return torch.zeros(self.tasks, 4, dtype=torch.float64, device=self.worker.device)

    def _blocks(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([self.tasks * shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(self.tasks, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def _fill(self, theta: Tensor) -> None:
        """Set every task's phi from the group's shards of theta, by one reduction of the size of a task."""
        params = self.worker.params
        parts = [
            params.assemble(theta, name, shape, lambda part: part).reshape(-1).to(self.phi.device)
            for name, shape in self.shapes.items()
        ]
        flat = torch.cat(parts)
        if not params.replicated:
            self.worker.group.sum_(flat)
        sizes = [shape.numel() for shape in self.shapes.values()]
        for block, part in zip(self.blocks.values(), flat.split(sizes), strict=True):
            block.copy_(part.view(1, *block.shape[1:]).expand_as(block))
