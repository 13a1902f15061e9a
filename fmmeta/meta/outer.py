"""The outer step: directions of tasks summed, reduced across groups once, clipped, and given to a torch optimizer.

    add (per task) -> reduce over cross (once per outer step) -> mean -> norm over the whole model -> optimizer on the shard

Everything lives on the rank's own shard: theta, the sum, the optimizer's moments. Nothing is gathered. With --offload_outer they
lie in host memory (parallel/home.py) and come to the device in pieces, once per outer step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fmmeta.config import Config
from fmmeta.meta.algorithms import Direction
from fmmeta.parallel.communicator import Communicator
from fmmeta.parallel.home import Home
from fmmeta.parallel.worker import Worker


class MetaGradient:
    """Weighted sum of the directions of this group's tasks, then of all groups'."""

    def __init__(self, theta: Tensor) -> None:
        self.sum, self.weight = torch.zeros_like(theta, pin_memory=theta.is_pinned()), 0.0  # at home, where theta is

    def add(self, direction: Direction) -> None:
        """Add a task, unless it is not finite: then neither its direction nor its weight counts."""
        if direction.finite:
            self.sum.add_(direction.shards.to(self.sum.device), alpha=direction.weight)
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


class Outer:
    """AdamW or SGD on this rank's slice of theta, with clipping over the whole model and an HF schedule.

    `theta` is updated in place. The learning rate is a function of the step's number alone, so a resumed run needs
    no scheduler state. A head that starts anew in every task is no meta-parameter: its slice stays as it is.
    """

    def __init__(self, theta: Tensor, worker: Worker, config: Config) -> None:
        from transformers import get_scheduler

        self.theta, self.worker, self.config = theta, worker, config
        self.home = Home(worker.device, config.offload_outer)
        self.head = worker.params.groups.get("head")
        self.parts = [(place, config.weight_decay if name == "decay" else 0.0)
                      for name, whole in worker.params.groups.items() if name != "head"
                      for place in self.home.pieces(whole)]  # fmt: skip
        self.moments: dict[str, Tensor] = {}  # by torch's names, [S] at home
        self.steps = 0
        schedule = get_scheduler(config.lr_scheduler_type, torch.optim.SGD([torch.zeros(1)], lr=config.outer_lr),
                                 config.warmup_steps, config.outer_steps)  # fmt: skip
        self.factor, self.peak = schedule.lr_lambdas[0], config.outer_lr  # type: ignore[attr-defined]

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
        for place, weight_decay in self.parts:
            self._move(place, weight_decay, meta_grad, lr)
        self.steps += 1
        return OuterStep(norm, lr, True)

    def _move(self, place: slice, weight_decay: float, meta_grad: Tensor, lr: float) -> None:
        """One step of torch's optimizer on a piece of theta, with its moments from home and back."""
        value = self.home.fetch(self.theta[place])
        value.grad = self.home.fetch(meta_grad[place])
        group = [{"params": [value], "weight_decay": weight_decay}]
        if self.config.outer_optimizer == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(group, lr=lr, eps=self.config.adam_epsilon)
        else:
            optimizer = torch.optim.SGD(group, lr=lr)
        if self.steps:
            moments = {name: self.home.fetch(vector[place]) for name, vector in self.moments.items()}
            optimizer.state[value] = {"step": torch.tensor(float(self.steps)), **moments} if moments else {}
        optimizer.step()
        self.home.put(self.theta[place], value)
        for name, moment in optimizer.state[value].items():
            if name != "step" and isinstance(moment, Tensor):
                if name not in self.moments:
                    self.moments[name] = self.home.zeros(self.theta)
                self.home.put(self.moments[name][place], moment)

    def state(self) -> tuple[dict[str, Tensor], int]:
        """Moments as vectors [S] by name, and the number of steps taken."""
        return self.moments, self.steps

    def load_state(self, vectors: dict[str, Tensor], steps: int) -> None:
        """Continue from what `state` returned, on this layout or another."""
        self.moments, self.steps = {name: self.home.keep(vector) for name, vector in vectors.items()}, steps
