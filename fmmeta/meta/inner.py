"""The inner loop: from theta to a task's phi, by a few steps on its support set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fmmeta.meta.head import HeadStart, Means
from fmmeta.meta.inner_rules import InnerRule, State, proximal
from fmmeta.meta.rates import Rates
from fmmeta.meta.trajectory import Trajectory
from fmmeta.parallel.worker import Pass, Worker
from fmmeta.tasks.batch import Batches, MicroBatch


class Learning(Protocol):
    """A way to learn a task, as evaluation sees it."""

    def score(self, worker: Worker, theta: Tensor, episode: Batches) -> tuple[Pass, Pass]:
        """The query set before and after the support set was learned; the worker holds theta before, anything afterwards.

        Collective: group.
        """
        ...


@dataclass(frozen=True)
class Adapted:
    """What an inner loop leaves besides the worker at phi_K: where it began, the optimizer's state, a pass per step."""

    phi0: Tensor
    means: Means | None
    state: State
    passes: list[Pass]


@dataclass(frozen=True)
class InnerLoop:
    """`steps` steps of `rule` at `rates` from the head that `head` starts; `proximal`: weight of |phi - phi_0|^2 / 2."""

    steps: int
    rates: Rates
    rule: InnerRule
    head: HeadStart
    proximal: float = 0.0

    def adapt(self, worker: Worker, theta: Tensor, support: Sequence[MicroBatch], path: Trajectory | None = None) -> Adapted:
        """Take the worker from theta, which it holds, to phi_K; `path` receives phi_0 to phi_{K-1}. Collective: group."""
        phi0, means = self.head.start(worker, theta, support)
        return self.run(worker, phi0, means, support, path)

    def score(self, worker: Worker, theta: Tensor, episode: Batches) -> tuple[Pass, Pass]:
        """See Learning. Before: theta with the head as the task starts it; leaves the worker at phi_K. Collective: group."""
        phi0, means = self.head.start(worker, theta, episode.support)
        before = worker.forward(episode.query)
        self.run(worker, phi0, means, episode.support)
        return before, worker.forward(episode.query) if self.steps else before

    def run(self, worker: Worker, phi0: Tensor, means: Means | None, support: Sequence[MicroBatch],
            path: Trajectory | None = None) -> Adapted:  # fmt: skip
        """The steps on the support set, from phi_0, which the worker holds. Collective: group."""
        state = self.rule.fresh(phi0.numel(), phi0.device)
        pull = proximal(phi0, self.proximal) if self.proximal else None
        passes = []
        for k in range(self.steps):
            record = torch.zeros_like(phi0) if path is not None and path.keeps_directions else None
            passes.append(worker.step(support, self.rule.update(k, state, self.rates, record, pull)))
            if path is not None:
                path.add(worker.read() if k + 1 < self.steps else None, record)
        return Adapted(phi0, means, state, passes)

    def path(self, worker: Worker, theta: Tensor, support: Sequence[MicroBatch], query: Sequence[MicroBatch]) -> list[Pass]:
        """The query set after 0, 1, ... K steps; the worker holds theta before and phi_K afterwards. Collective: group."""
        phi0, _ = self.head.start(worker, theta, support)
        state = self.rule.fresh(phi0.numel(), phi0.device)
        passes = [worker.forward(query)]
        for k in range(self.steps):
            worker.step(support, self.rule.update(k, state, self.rates, None, None))
            passes.append(worker.forward(query))
        return passes
