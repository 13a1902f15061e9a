"""Backward recursion through an unrolled inner loop: the meta-gradient of MAML and its variants.

Forward, k = 0 .. K-1 (the inner loop):   u_{k+1} = mu u_k + g(phi_k),   phi_{k+1} = phi_k - alpha_k u_{k+1}
Backward, from v = dL_query/dphi_K, w = 0, for k = K-1 .. 0:

    dL/dalpha_k = -v u_{k+1}            where rates are learned
    w <- w - alpha_k v                  gradient with respect to u_{k+1}
    v <- v + H(phi_k) w                 order 2; at order 1 v is unchanged
    w <- mu w
    v <- v + c_k dL_query/dphi_k        multi-step loss: the query loss counts at phi_k too, k > 0

then v = dL/dphi_0, and the gradient through the initial head (classifier_head.py). Products alpha v are
element by element, so every vector is a rank's shard. H v comes from ordinary gradients (hessian.py); this
is the Hessian-free form of Fallah, Mokhtari, Ozdaglar, "On the Convergence Theory of Gradient-Based
Model-Agnostic Meta-Learning Algorithms", 2020 (arXiv 1908.10400), for K steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fmmeta.meta.inner_loop import InnerLoop, InnerResult
from fmmeta.meta.second_order.hessian import HvpOptions
from fmmeta.meta.second_order.trajectory import Trajectory
from fmmeta.meta.task_gradient import TaskGradient
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.tasks.batching import Episode

FINAL_ONLY: tuple[float, ...] = ()


@dataclass(frozen=True)
class Unrolled:
    """A meta-gradient through the inner loop.

    order: of the derivatives, 1 or 2. counts: weights of the query loss at phi_1 .. phi_K, summing to 1;
    FINAL_ONLY is 0 .. 0, 1. budget_bytes: of trajectory on the device.
    """

    inner: InnerLoop
    order: int = 2
    counts: tuple[float, ...] = FINAL_ONLY
    curvature: HvpOptions = field(default_factory=HvpOptions)
    budget_bytes: int = 2**62

    def checked(self, scale: float) -> Unrolled:
        """The same with finite differences taken at another step."""
        return replace(self, curvature=replace(self.curvature, scale=scale))

    def direction(
        self, worker: Worker, theta: Tensor, episode: Episode, total: Tensor | None = None
    ) -> TaskGradient:
        """Meta-gradient of one task; see Rule. Collective: group."""
        keeps = self.order > 1 or any(self.counts[:-1]) or self.inner.rates.learned != "no"
        if not keeps:
            return self._short(worker, theta, episode, None if self.inner.head.through else total)
        begun = self.inner.begin(worker, theta, episode.support, tracked=True)
        path = Trajectory(begun.phi0, self.budget_bytes, self.inner.rates.learned != "no")
        adapted = self.inner.run(worker, begun, episode.support, path)
        v, query = worker.gradient(episode.query)
        if self.counts:
            v.mul_(self.counts[-1])
        extra, passes = self._backward(worker, episode, path, v)
        v, more = self.inner.head.back(worker, v, theta, episode.support, adapted.means)
        worker.write(theta)
        finite = all([step.finite for step in [*adapted.passes, query, *passes, *more]])
        return TaskGradient(v, 1.0, finite, adapted.passes[0], query, extra)

    def _short(self, worker: Worker, theta: Tensor, episode: Episode, total: Tensor | None) -> TaskGradient:
        """Order 1 and nothing else: the query gradient at phi_K; restoring theta costs no separate pass."""
        adapted: InnerResult = self.inner.adapt(worker, theta, episode.support)
        passes, v, more = adapted.passes, None, []
        if total is not None:
            counts = 1.0 if all([step.finite for step in passes]) else 0.0
            query = worker.add_gradient(total, counts, episode.query, theta)
        else:
            v, query = worker.gradient(episode.query, restore=theta)
            v, more = self.inner.head.back(worker, v, theta, episode.support, adapted.means)
        finite = all([step.finite for step in [*passes, query, *more]])
        return TaskGradient(v, 1.0, finite, passes[0], query)

    def _backward(
        self, worker: Worker, episode: Episode, path: Trajectory, v: Tensor
    ) -> tuple[dict[str, Tensor], Sequence[PassStats]]:
        """Turn v = dL/dphi_K into dL/dphi_0 in place; return the gradient of learned rates, and the passes it
        took.
        """
        rates, momentum = self.inner.rates, self.inner.rule.momentum
        learned = rates.meta_parameter
        extra = {} if learned is None else {"rates": torch.zeros_like(learned)}
        hessian = self.curvature.of(worker, episode.support)
        passes: list[PassStats] = []
        w: Tensor | None = None
        whole = slice(0, v.numel())
        for k in reversed(range(self.inner.steps)):
            if extra:
                rates.add_gradient_(extra["rates"], worker, k, v, path.take_direction(k))
            if self.order > 1:
                through = rates.scale_(k, v.clone(), whole).neg_()
                w = through if w is None else w.mul_(momentum).add_(through)
                v += hessian.times(path.phi(k), w)
            if k > 0 and self.counts and self.counts[k - 1]:
                worker.write(path.phi(k))
                gradient, result = worker.gradient(episode.query)
                passes.append(result)
                v.add_(gradient, alpha=self.counts[k - 1])
            path.drop(k)
        return extra, [*passes, *hessian.passes]
