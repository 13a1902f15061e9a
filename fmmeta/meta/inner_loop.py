"""The inner loop: from theta to a task's phi, by a few steps on its support set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fmmeta.meta.classifier_head import ClassMeans, HeadInit
from fmmeta.meta.inner_lrs import Rates
from fmmeta.meta.inner_optimizers import InnerRule, InnerState, proximal
from fmmeta.meta.linear_probe import FeatureRows, Head, all_gather_features, head_of
from fmmeta.meta.second_order.trajectory import Trajectory
from fmmeta.parallel.workers.base import PassStats, SavedForward, Worker
from fmmeta.tasks.batching import Episode, MicroBatch


class Learning(Protocol):
    """A way to learn a task, as evaluation sees it."""

    def score(self, worker: Worker, theta: Tensor, episode: Episode) -> tuple[PassStats, PassStats]:
        """The query set before and after the support set was learned; the worker holds theta before, anything
        afterwards.

        Collective: group.
        """
        ...


@dataclass(frozen=True)
class InnerResult:
    """What an inner loop leaves besides the worker at phi_K: where it began, the optimizer's state, a pass
    per step.
    """

    phi0: Tensor
    means: ClassMeans | None
    state: InnerState
    passes: list[PassStats]


@dataclass(frozen=True)
class InnerStart:
    """phi_0, which the worker holds, what it was made of, and the support set's pass so far.

    on_features: the body stays; its features are all that the steps need.
    """

    phi0: Tensor
    means: ClassMeans | None
    ahead: SavedForward | None
    on_features: bool


@dataclass(frozen=True)
class InnerLoop:
    """`steps` steps of `rule` at `rates` from the head that `head` starts; `proximal`: weight of |phi -
    phi_0|^2 / 2.

    Where the head alone moves, the support set goes through the body once, however many steps follow. Where
    class means start the head and the support set is one micro-batch, the first step reuses the pass
    that computed them.
    """

    steps: int
    rates: Rates
    rule: InnerRule
    head: HeadInit
    proximal: float = 0.0

    def adapt(
        self, worker: Worker, theta: Tensor, support: Sequence[MicroBatch], path: Trajectory | None = None
    ) -> InnerResult:
        """Take the worker from theta, which it holds, to phi_K; `path` receives phi_0 to phi_{K-1}.

        Collective: group.
        """
        begun = self.begin(worker, theta, support, path is not None)
        return self.run(worker, begun, support, path)

    def score(self, worker: Worker, theta: Tensor, episode: Episode) -> tuple[PassStats, PassStats]:
        """See Learning. Before: theta with the head as the task starts it; leaves the worker at phi_K.
        Collective: group.
        """
        begun = self.begin(worker, theta, episode.support)
        before = worker.forward(episode.query)
        self.run(worker, begun, episode.support)
        return before, worker.forward(episode.query) if self.steps else before

    def variant(
        self, learned: Tensor | None = None, scale: float = 1.0, steps: int | None = None
    ) -> InnerLoop:
        """The same loop at other rates (see Rates.variant), and of another number of steps."""
        steps = self.steps if steps is None else steps
        return replace(self, steps=steps, rates=self.rates.variant(learned, scale, steps))

    def begin(
        self, worker: Worker, theta: Tensor, support: Sequence[MicroBatch], tracked: bool = False
    ) -> InnerStart:
        """Take the worker from theta to phi_0. tracked: every phi_k is needed. Collective: group."""
        on_features = not tracked and self._only_head()
        ahead = None
        if on_features:
            ahead = SavedForward(worker.features(support))
        elif self.head.uses_support_features and self.steps and len(support) == 1:
            ahead = worker.ahead(support)
        phi0, means = self.head.start(worker, theta, support, None if ahead is None else ahead.features)
        return InnerStart(phi0, means, ahead, on_features)

    def run(
        self,
        worker: Worker,
        begun: InnerStart,
        support: Sequence[MicroBatch],
        path: Trajectory | None = None,
        after: Callable[[Head], None] = lambda head: None,
    ) -> InnerResult:
        """The steps on the support set, from phi_0, which the worker holds. Collective: group.

        after: called after each, with the head where the body stays and the worker waits for the last, else
        with nothing.
        """
        phi0, ahead = begun.phi0, begun.ahead
        if begun.on_features and ahead is not None:
            return self._run_head(worker, begun, all_gather_features(worker, support, ahead.features), after)
        support = [batch.to(worker.device) for batch in support]  # once, and not in every step
        state = self.rule.fresh(phi0.numel(), phi0.device)
        pull = proximal(phi0, self.proximal) if self.proximal else None
        passes = []
        for k in range(self.steps):
            record = torch.zeros_like(phi0) if path is not None and path.keeps_directions else None
            update = self.rule.update(k, state, self.rates, record, pull)
            passes.append(worker.step(support, update, ahead=ahead if k == 0 else None))
            if path is not None:
                path.add(worker.read() if k + 1 < self.steps else None, record)
            after([])
        return InnerResult(phi0, begun.means, state, passes)

    def _only_head(self) -> bool:
        """Whether the steps are a small problem on features, without anything that is kept by element of
        theta.
        """
        return self.steps > 0 and self.rates.only_head and not self.proximal and self.rule.kept is None

    def _run_head(
        self, worker: Worker, begun: InnerStart, rows: FeatureRows, after: Callable[[Head], None]
    ) -> InnerResult:
        """The same steps on the head alone; one write at the end. Collective: group."""
        head = self._head(worker, begun, rows)
        flat = torch.cat([part.reshape(-1) for part in head])
        parts = [
            part.view_as(like) for part, like in zip(flat.split([p.numel() for p in head]), head, strict=True)
        ]
        rates, state, passes = (
            self.rates.of_head(flat.numel()),
            self.rule.fresh(flat.numel(), flat.device),
            [],
        )
        for k in range(self.steps):
            leaves = [part.detach().requires_grad_() for part in parts]
            loss, told = rows.losses(leaves)
            gradient = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, leaves)])
            self.rule.update(k, state, rates)(flat, gradient, slice(0, flat.numel()))
            passes.append(PassStats(told))
            after(parts)
        phi = begun.phi0.clone()
        for name, part in zip(self.head.names, parts, strict=True):
            worker.params.put(phi, name, part.float())
        worker.write(phi)
        return InnerResult(begun.phi0, begun.means, InnerState({}), passes)

    def path(
        self, worker: Worker, theta: Tensor, support: Sequence[MicroBatch], query: Sequence[MicroBatch]
    ) -> list[PassStats]:
        """The query set after 0, 1, ...

        K steps; the worker holds theta before and phi_K afterwards. Collective: group.
        """
        begun = self.begin(worker, theta, support)
        if not begun.on_features:
            passes = [worker.forward(query)]
            self.run(worker, begun, support, after=lambda head: passes.append(worker.forward(query)))
            return passes
        rows = all_gather_features(worker, query, worker.features(query))
        heads = [self._head(worker, begun, rows)]
        self.run(worker, begun, support, after=lambda head: heads.append([part.clone() for part in head]))
        return [PassStats(rows.losses(head)[1]) for head in heads]

    def _head(self, worker: Worker, begun: InnerStart, rows: FeatureRows) -> Head:
        """The head of phi_0. Collective: group."""
        return head_of(worker, begun.phi0, self.head.names, self.head.classes, rows.features.shape[1])
