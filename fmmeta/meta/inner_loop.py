"""The inner loop: from theta to a task's phi, by a few steps on its support set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fmmeta.meta.classifier_head import ClassMeans, HeadInit
from fmmeta.meta.inner_lrs import Rates
from fmmeta.meta.inner_optimizers import InnerOptimizer, InnerState, proximal
from fmmeta.meta.linear_probe import FeatureRows, Head, all_gather_features, head_of
from fmmeta.meta.second_order.trajectory import Trajectory
from fmmeta.parallel.workers.base import PassStats, SavedForward, Worker
from fmmeta.tasks.batching import Episode, MicroBatch


class EvaluationMethod(Protocol):
    """How evaluation learns a task."""

    def score(self, worker: Worker, theta: Tensor, episode: Episode) -> tuple[PassStats, PassStats]:
        """Statistics of the query set before and after learning the support set.

        The worker holds theta before; its weights afterwards are undefined. Collective: group.
        """
        ...


def no_poll() -> None:
    """`between_passes` of a caller that has nothing to check between passes."""


@dataclass(frozen=True)
class InnerResult:
    """A finished inner loop, with the worker at phi_K: its start, the optimizer's state, a pass per step."""

    phi0: Tensor
    means: ClassMeans | None
    state: InnerState
    passes: list[PassStats]


@dataclass(frozen=True)
class InnerStart:
    """The state after the head is initialised: phi_0 (loaded in the worker), the class means that it is made
    of, and the forward pass over the support set, if there was one.

    on_features: the body is frozen, so that the steps need its features only.
    """

    phi0: Tensor
    means: ClassMeans | None
    saved: SavedForward | None
    on_features: bool


@dataclass(frozen=True)
class InnerLoop:
    """`steps` steps of `optimizer` with the learning rates `rates`, from the head that `head` initialises.

    proximal: weight of |phi - phi_0|^2 / 2. Where only the head is adapted, the support set goes through the
    body once, however many steps follow. Where class means initialise the head and the support set is one
    micro-batch, the first step reuses the pass that computed them.
    """

    steps: int
    rates: Rates
    optimizer: InnerOptimizer
    head: HeadInit
    proximal: float = 0.0

    @property
    def changes_head_only(self) -> bool:
        """Whether the steps need the body's features only, and no state by element of theta."""
        return self.steps > 0 and self.rates.only_head and not self.proximal and self.optimizer.kept is None

    def adapt(
        self,
        worker: Worker,
        theta: Tensor,
        support: Sequence[MicroBatch],
        path: Trajectory | None = None,
        between_passes: Callable[[], None] = no_poll,
    ) -> InnerResult:
        """Take the worker from theta, which it holds, to phi_K; `path` receives phi_0 to phi_{K-1}.

        Collective: group.
        """
        start = self.begin(worker, theta, support, path is not None)
        return self.run(worker, start, support, path, lambda head: between_passes())

    def score(self, worker: Worker, theta: Tensor, episode: Episode) -> tuple[PassStats, PassStats]:
        """See EvaluationMethod.

        Before: theta with the head as the task initialises it. Leaves the worker at phi_K. Collective: group.
        """
        start = self.begin(worker, theta, episode.support)
        before = worker.forward(episode.query)
        self.run(worker, start, episode.support)
        return before, worker.forward(episode.query) if self.steps else before

    def variant(
        self, learned: Tensor | None = None, scale: float = 1.0, steps: int | None = None
    ) -> "InnerLoop":
        """The same loop with other rates (see Rates.variant) and another number of steps."""
        steps = self.steps if steps is None else steps
        return replace(self, steps=steps, rates=self.rates.variant(learned, scale, steps))

    def begin(
        self, worker: Worker, theta: Tensor, support: Sequence[MicroBatch], tracked: bool = False
    ) -> InnerStart:
        """Take the worker from theta to phi_0. tracked: every phi_k is needed. Collective: group."""
        on_features = not tracked and self.changes_head_only
        saved = None
        if on_features:
            saved = SavedForward(worker.features(support))
        elif self.head.uses_support_features and self.steps and len(support) == 1:
            saved = worker.forward_features(support)
        phi0, means = self.head.start(worker, theta, support, None if saved is None else saved.features)
        return InnerStart(phi0, means, saved, on_features)

    def run(
        self,
        worker: Worker,
        start: InnerStart,
        support: Sequence[MicroBatch],
        path: Trajectory | None = None,
        after_step: Callable[[Head], Any] = lambda head: None,
    ) -> InnerResult:
        """The steps on the support set, from phi_0, which the worker holds. Collective: group.

        after_step: called after each step with the head where the steps need features only (the worker then
        gets phi_K after the last step), else with an empty list.
        """
        phi0, saved = start.phi0, start.saved
        if start.on_features and saved is not None:
            return self._run_head(
                worker, start, all_gather_features(worker, support, saved.features), after_step
            )
        support = [batch.to(worker.device) for batch in support]  # once, and not in every step
        state = self.optimizer.initial_state(phi0.numel(), phi0.device)
        change_gradient = proximal(phi0, self.proximal) if self.proximal else None
        passes = []
        if path is not None:
            path.begin(phi0)
        for k in range(self.steps):
            direction = torch.zeros_like(phi0) if path is not None and path.keeps_directions else None
            update = self.optimizer.update(k, state, self.rates, direction, change_gradient)
            passes.append(worker.step(support, update, saved=saved if k == 0 else None))
            if path is not None:
                path.add(worker.read() if k + 1 < self.steps else None, direction)
            after_step([])
        return InnerResult(phi0, start.means, state, passes)

    def _run_head(
        self, worker: Worker, start: InnerStart, rows: FeatureRows, after_step: Callable[[Head], Any]
    ) -> InnerResult:
        """The same steps on the head alone; one write at the end. Collective: group."""
        head = self._head(worker, start, rows)
        flat, sizes = torch.cat([part.reshape(-1) for part in head]), [part.numel() for part in head]
        parts = [part.view_as(like) for part, like in zip(flat.split(sizes), head, strict=True)]
        rates = self.rates.of_head(flat.numel())
        state, passes = self.optimizer.initial_state(flat.numel(), flat.device), []
        for k in range(self.steps):
            leaves = [part.detach().requires_grad_() for part in parts]
            loss, stats = rows.loss(leaves)
            gradient = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, leaves)])
            self.optimizer.update(k, state, rates)(flat, gradient, slice(0, flat.numel()))
            passes.append(stats)
            after_step(parts)
        phi = start.phi0.clone()
        for name, part in zip(self.head.names, parts, strict=True):
            worker.params.put(phi, name, part.float())
        worker.write(phi)
        return InnerResult(start.phi0, start.means, InnerState({}), passes)

    def scores_after_each_step(
        self, worker: Worker, theta: Tensor, support: Sequence[MicroBatch], query: Sequence[MicroBatch]
    ) -> list[PassStats]:
        """Statistics of the query set after 0, 1, ... K steps.

        The worker holds theta before and phi_K afterwards. Collective: group.
        """
        start = self.begin(worker, theta, support)
        if not start.on_features:
            passes = [worker.forward(query)]
            self.run(worker, start, support, after_step=lambda head: passes.append(worker.forward(query)))
            return passes
        rows = all_gather_features(worker, query, worker.features(query))
        heads = [self._head(worker, start, rows)]
        self.run(
            worker, start, support, after_step=lambda head: heads.append([part.clone() for part in head])
        )
        return [rows.loss(head)[1] for head in heads]

    def _head(self, worker: Worker, start: InnerStart, rows: FeatureRows) -> Head:
        """The head of phi_0. Collective: group."""
        return head_of(worker, start.phi0, self.head.names, self.head.classes, rows.features.shape[1])
