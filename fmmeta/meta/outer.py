"""The outer step: directions of tasks summed, reduced across groups once, clipped, and given to a torch optimizer.

    add (per task) -> reduce over cross (once per outer step) -> mean -> norm over the whole model -> optimizer on the shard

Everything lives on the rank's own shard: theta, the sum, the optimizer's moments. Nothing is gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fmmeta.config import Config
from fmmeta.meta.algorithms import Direction
from fmmeta.parallel.communicator import Communicator
from fmmeta.parallel.worker import Worker


class MetaGradient:
    """Weighted sum of the directions of this group's tasks, then of all groups'."""

    def __init__(self, theta: Tensor) -> None:
        self.sum, self.weight = torch.zeros_like(theta), 0.0

    def add(self, direction: Direction) -> None:
        """Add a task, unless it is not finite: then neither its direction nor its weight counts."""
        if direction.finite:
            self.sum.add_(direction.shards, alpha=direction.weight)
            self.weight += direction.weight

    def reduce(self, cross: Communicator, weight: float) -> Tensor | None:
        """Mean over the tasks of all groups, or None if none was finite. `weight`: summed over all groups.

        One reduction of the rank's shard, whatever the number of tasks and inner steps. Collective: cross.
        """
        if weight == 0:
            return None
        return cross.sum_(self.sum).div_(weight)

    def clear(self) -> None:
        self.sum.zero_()
        self.weight = 0.0


@dataclass(frozen=True)
class OuterStep:
    """What an outer step did: norm of the meta-gradient before clipping, learning rate, whether theta moved."""

    grad_norm: float
    lr: float
    applied: bool


def pieces(place: slice, longest: int = 2**22) -> list[slice]:
    """A slice as short ones: AdamW makes two temporaries of the size of each tensor that it is given."""
    return [slice(begin, min(begin + longest, place.stop)) for begin in range(place.start, place.stop, longest)]


class Outer:
    """AdamW or SGD on this rank's slice of theta, with clipping over the whole model and an HF schedule.

    `theta` is updated in place. The learning rate is a function of the step's number alone, so a resumed run needs
    no scheduler state. A head that starts anew in every task is no meta-parameter: its slice stays as it is.
    """

    def __init__(self, theta: Tensor, worker: Worker, config: Config) -> None:
        from transformers import get_scheduler

        self.theta, self.worker, self.config = theta, worker, config
        self.head = worker.params.groups.get("head")
        slices = {name: place for name, place in worker.params.groups.items() if name != "head"}
        parts = {name: [(theta[piece], piece) for piece in pieces(place)] for name, place in slices.items()}
        self.parts = [part for group in parts.values() for part in group]
        groups = [{"params": [part for part, _ in group], "weight_decay": config.weight_decay if name == "decay" else 0.0}
                  for name, group in parts.items()]  # fmt: skip
        peak = config.outer_lr
        if config.outer_optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=peak, eps=config.adam_epsilon)
        else:
            self.optimizer = torch.optim.SGD(groups, lr=peak)
        schedule = get_scheduler(config.lr_scheduler_type, torch.optim.SGD([torch.zeros(1)], lr=peak),
                                 config.warmup_steps, config.outer_steps)  # fmt: skip
        self.factor, self.peak = schedule.lr_lambdas[0], peak  # type: ignore[attr-defined]

    def lr(self, outer_step: int) -> float:
        """Learning rate of the outer step with this number, counted from 0."""
        return self.peak * self.factor(outer_step)

    def step(self, meta_grad: Tensor | None, outer_step: int) -> OuterStep:
        """Move theta against `meta_grad` [S], unless that is None or not finite. Collective: group."""
        lr = self.lr(outer_step)
        if meta_grad is None:
            return OuterStep(math.nan, lr, False)
        if self.head is not None:
            meta_grad[self.head] = 0
        norm = math.sqrt(self.worker.dot(meta_grad, meta_grad))
        if not math.isfinite(norm):
            return OuterStep(norm, lr, False)
        if 0 < self.config.max_grad_norm < norm:
            meta_grad.mul_(self.config.max_grad_norm / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for part, place in self.parts:
            part.grad = meta_grad[place]
        self.optimizer.step()
        for part, _ in self.parts:
            part.grad = None
        return OuterStep(norm, lr, True)

    def state(self) -> tuple[dict[str, Tensor], int]:
        """Moments as vectors [S] by name, and the number of steps taken."""
        vectors: dict[str, Tensor] = {}
        steps = 0
        for part, place in self.parts:
            for name, value in self.optimizer.state.get(part, {}).items():
                if name == "step":
                    steps = int(value)
                elif isinstance(value, Tensor):
                    vectors.setdefault(name, torch.zeros_like(self.theta))[place] = value
        return vectors, steps

    def load_state(self, vectors: dict[str, Tensor], steps: int) -> None:
        """Continue from what `state` returned, on this layout or another."""
        for part, place in self.parts:
            if vectors:
                moments = {name: vector[place].clone() for name, vector in vectors.items()}
                self.optimizer.state[part] = {"step": torch.tensor(float(steps)), **moments}
