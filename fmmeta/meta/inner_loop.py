"""The inner loop: from theta to a task's phi, by a few steps on its support set.

Vectors are a rank's shards, fp32 [S].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fmmeta.learners.base import on_device
from fmmeta.meta.classifier_head import ClassMeans, FeatureRows, Head, HeadInit, all_gather_features
from fmmeta.meta.inner_optimizers import HEAD, InnerOptimizer, InnerState, Rates
from fmmeta.parallel.workers.base import PassStats, SavedForward, Worker
from fmmeta.parallel.workers.full_model import TaskBatch
from fmmeta.tasks.batching import Episode, MicroBatch, SupportSet, batches_of_step, each_batch

STATE = "state "  # before the names of the optimizer's vectors, which are the user's choice


class Trajectory:
    """What the backward recursion needs of each inner step k = 0 .. K-1, stored without copies.

        phi    phi_k, from step `first` on; phi_0 is the caller's vector and costs nothing
        u      the direction, with `keeps_directions`; with `sums` from step `first` on, and `total` is the
               sum of those before; of a step whose gradient is clipped, the gradient before
        clips  the factors of clipped gradients, 1 of others
        state  the optimizer's state before the step, with `keeps_states`, from step `first` on

    Vectors beyond `budget_bytes` are stored in host memory.
    """

    def __init__(
        self,
        budget_bytes: int,
        keeps_directions: bool,
        keeps_states: bool = False,
        first: int = 0,
        sums: bool = False,
    ) -> None:
        self.keeps_directions, self.keeps_states, self.first = keeps_directions, keeps_states, first
        self.left, self.steps = budget_bytes, list[dict[str, Tensor]]()
        self.sums, self.total, self.clips = sums, None, dict[int, float]()

    def before_step(self, k: int, worker: Worker | TaskBatch, phi0: Tensor, state: "InnerState") -> None:
        """Store phi_k, which the worker (or the batch of tasks) holds, and the optimizer's state. Local."""
        self.device = worker.storage_device
        self.steps.append({} if k else {"phi": phi0})
        if k and k >= self.first:
            self._store(k, "phi", worker.read())
        if self.keeps_states and k >= self.first:
            for name, vector in state.vectors.items():
                self._store(k, STATE + name, vector.clone())

    def after_step(self, k: int, direction: Tensor | None, clip: float = 1.0) -> None:
        """Store u_k. clip: the factor of the gradient, before which u_k is stored."""
        self.clips[k] = clip
        if direction is not None and self.sums and k < self.first:
            self.total = direction if self.total is None else self.total.add_(direction)
        elif direction is not None:
            self._store(k, "u", direction)

    def phi(self, k: int) -> Tensor:
        """phi_k on the device of the shards."""
        return self.steps[k]["phi"].to(self.device, non_blocking=True)

    def take_direction(self, k: int) -> Tensor | None:
        """u_k on the device of the shards, if it is stored; its storage here is released."""
        found = self.steps[k].pop("u", None)
        return None if found is None else found.to(self.device, non_blocking=True)

    def state(self, k: int) -> dict[str, Tensor]:
        """The optimizer's state before step k on the device of the shards."""
        stored = {name: vector for name, vector in self.steps[k].items() if name.startswith(STATE)}
        return {
            name.removeprefix(STATE): vector.to(self.device, non_blocking=True)
            for name, vector in stored.items()
        }

    def drop(self, k: int) -> None:
        """Release all that is stored of step k."""
        self.steps[k] = {}

    def _store(self, k: int, name: str, vector: Tensor) -> None:
        if vector.nbytes <= self.left:
            self.left -= vector.nbytes
        else:
            room = torch.empty_like(vector, device="cpu", pin_memory=vector.is_cuda)
            vector = room.copy_(vector, non_blocking=True)  # only the device reads it
        self.steps[k][name] = vector


class EvaluationMethod(Protocol):
    """How evaluation learns a task."""

    def score(self, worker: Worker, theta: Tensor, episode: Episode) -> tuple[PassStats, PassStats]:
        """Statistics of the query set before and after learning the support set.

        The worker holds theta before; its weights afterwards are undefined. Collective: group.
        """
        ...


def no_poll() -> None:
    """`between_passes` of a caller that has nothing to do between passes."""


@dataclass(frozen=True)
class InnerResult:
    """A finished inner loop, the worker at phi_K: class means, a pass per step, and what each step learned
    from, as `InnerSteps.sets`.
    """

    means: ClassMeans | None
    passes: list[PassStats]
    sets: Sequence[Sequence[MicroBatch] | None] = ()


@dataclass(frozen=True)
class InnerStart:
    """The state after the head is initialised: phi_0 (loaded in the worker), the class means that it is made
    of, and the forward pass over the support set, if there was one.

    rows: features of the support set, if the body is frozen, so that the steps need nothing else.
    """

    phi0: Tensor
    means: ClassMeans | None
    saved: SavedForward | None
    rows: FeatureRows | None


@dataclass(frozen=True)
class InnerLoop:
    """`steps` steps of `optimizer` with the learning rates `rates`, from the head that `head` initialises.

    proximal: weight of |phi - phi_0|^2 / 2. max_grad_norm: of the gradient of a step; 0: any. Where only the
    head is adapted, the support set goes through the body once, however many steps follow. Where class means
    initialise the head and the support set is one micro-batch, the first step reuses the pass that computed
    them.
    """

    steps: int
    rates: Rates
    optimizer: InnerOptimizer
    head: HeadInit
    proximal: float = 0.0
    max_grad_norm: float = 0.0

    @property
    def changes_head_only(self) -> bool:
        """Whether the steps need the body's features only, and no state by element of theta."""
        return self.steps > 0 and self.rates.only_head and not self.proximal

    def adapt(
        self,
        worker: Worker,
        theta: Tensor,
        support: Sequence[MicroBatch],
        path: Trajectory | None = None,
        between_passes: Callable[[], None] = no_poll,
    ) -> InnerResult:
        """Take the worker from theta, which it holds, to phi_K; `path` receives phi_0 to phi_{K-1}.

        between_passes: called after every pass, the last one included. Collective: group.
        """
        start = self.begin(worker, theta, support, path is not None)
        if start.rows is not None or (start.means is not None and start.saved is None):
            between_passes()  # the support set's features took a pass
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
        saved = rows = features = None
        sampled = isinstance(support, SupportSet)
        if not tracked and self.changes_head_only and not sampled:
            features = worker.features(support)
            rows = all_gather_features(worker, support, features, self.head.loss)
        elif self.head.uses_support_features and self.steps and len(support) == 1 and not sampled:
            saved = worker.forward_features(support)
            features = saved.features
        phi0, means = self.head.start(worker, theta, support, features)
        return InnerStart(phi0, means, saved, rows)

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
        if start.rows is not None:
            return self._run_head(worker, start, start.rows, after_step)
        steps = InnerSteps(self, worker, start, support, path)
        for _ in range(self.steps):
            steps.take()
            after_step([])
        return InnerResult(start.means, steps.passes, steps.sets)

    def _run_head(
        self, worker: Worker, start: InnerStart, rows: FeatureRows, after_step: Callable[[Head], Any]
    ) -> InnerResult:
        """The same steps on the head alone; one write at the end. Collective: group."""
        head = self.head.read(worker, start.phi0, rows.features.shape[1])
        head, passes = self.learn_head(head, rows, after_step=after_step)
        phi = start.phi0.clone()
        for name, part in zip(self.head.names, head, strict=True):
            worker.params.put(phi, name, part.float())
        worker.write(phi)
        return InnerResult(start.means, passes)

    def learn_head(
        self,
        head: Head,
        rows: FeatureRows,
        exact: bool = False,
        after_step: Callable[[Head], Any] = lambda head: None,
    ) -> tuple[Head, list[PassStats]]:
        """The head after the steps on the support set's rows, and a pass per step. Local.

        exact: the result has the graph of the gradients too, for meta-gradients of second order.
        """
        table, column = self.rates.table, self.rates.layers.names.index(HEAD)
        states = [{name: torch.zeros_like(part) for name in self.optimizer.state_names} for part in head]
        passes = []
        for k in range(self.steps):
            leaves = head if exact else [part.detach().requires_grad_() for part in head]
            loss, stats = rows.loss(leaves)
            passes.append(stats)
            gradient = torch.autograd.grad(loss, leaves, create_graph=exact)
            found = [
                self.optimizer.new_state(g, leaf if exact else leaf.detach(), state, k + 1)
                for g, leaf, state in zip(gradient, leaves, states, strict=True)
            ]
            head = [part - float(table[k, column]) * u for part, (u, _) in zip(head, found, strict=True)]
            states = [state for _, state in found]
            after_step(head)
        return head, passes

    def scores_after_each_step(self, worker: Worker, theta: Tensor, episode: Episode) -> list[PassStats]:
        """Statistics of the query set after 0, 1, ... K steps.

        The worker holds theta before and phi_K afterwards. Collective: group.
        """
        support, query = episode.support, episode.query
        start = self.begin(worker, theta, support)
        if start.rows is None:
            passes = [worker.forward(query)]
            self.run(worker, start, support, after_step=lambda head: passes.append(worker.forward(query)))
            return passes
        rows = all_gather_features(worker, query, worker.features(query), self.head.loss)
        heads = [self.head.read(worker, start.phi0, rows.features.shape[1])]
        self.run(worker, start, support, after_step=heads.append)
        return [rows.loss(head)[1] for head in heads]


class InnerSteps:
    """The steps of an inner loop one by one, from phi_0, which the worker holds; `path` receives phi_k.

    rates: of the steps that were taken, row by row. sets: what each learned from; None: the support set.
    """

    def __init__(
        self,
        loop: InnerLoop,
        worker: Worker,
        start: InnerStart,
        support: Sequence[MicroBatch],
        path: Trajectory | None = None,
    ) -> None:
        self.loop, self.worker, self.start, self.path, self.rates = loop, worker, start, path, loop.rates
        device = worker.storage_device
        # once, and not in every step
        learner = getattr(worker, "learner", None)  # a stage of a pipeline has none
        self.support = each_batch(support, lambda batch: on_device(batch, learner, worker.device))
        self.state = loop.optimizer.zero_state(start.phi0.numel(), device)
        self.anchor = start.phi0.to(device) if loop.proximal else None
        self.passes, self.sets = list[PassStats](), list[Sequence[MicroBatch] | None]()

    def take(self, batches: Sequence[MicroBatch] | None = None, rate_factor: float = 1.0) -> PassStats:
        """Take a step on the support set, or its sample, or on other `batches`. Collective: group.

        rate_factor: of the rates of this step; steps beyond the last row of the table repeat it.
        """
        k, loop, worker, path = len(self.passes), self.loop, self.worker, self.path
        if rate_factor != 1 or k >= len(self.rates.table):
            self.rates = self.rates.with_factor(k, rate_factor)
        if path is not None:
            path.before_step(k, worker, self.start.phi0, self.state)
        keeps, most, clip = path is not None and path.keeps_directions, loop.max_grad_norm, 1.0
        direction = worker.zeros() if keeps or most else None
        record = None if most else direction
        update = loop.optimizer.update(k, self.state, self.rates, record, self.anchor, loop.proximal)
        sample, saved = batches, None
        if sample is None:
            sample, saved = batches_of_step(self.support, k), self.start.saved if k == 0 else None
        self.sets.append(None if sample is self.support else sample)
        if most and direction is not None:  # an update is local, and the norm is that of the whole model
            self.passes.append(worker.gradient(sample, direction))
            clip, phi = self.rates.clip(k, worker, direction, most), worker.read()
            update(phi, direction * clip, slice(0, phi.numel()))
            worker.write(phi)
        else:
            self.passes.append(worker.step(sample, update, saved=saved))
        if path is not None:
            path.after_step(k, direction if keeps else None, clip)
        return self.passes[-1]
