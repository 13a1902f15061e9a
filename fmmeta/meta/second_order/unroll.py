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

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fmmeta.meta.rule import InnerLoop, MetaGradient, MetaParameters, TaskResult, no_poll
from fmmeta.meta.second_order.hessian import Hessian, HvpOptions
from fmmeta.meta.second_order.trajectory import Trajectory
from fmmeta.parallel.workers.base import Worker
from fmmeta.tasks.batching import Episode

FINAL_ONLY: tuple[float, ...] = ()


@dataclass(frozen=True)
class Unrolled:
    """A meta-gradient through the inner loop.

    order: of the derivatives, 1 or 2. step_loss_weights: of the query loss at phi_1 .. phi_K, summing to 1;
    FINAL_ONLY is 0 .. 0, 1. budget_bytes: of trajectory on the device.
    """

    inner: InnerLoop
    order: int = 2
    step_loss_weights: tuple[float, ...] = FINAL_ONLY
    hvp: HvpOptions = field(default_factory=HvpOptions)
    budget_bytes: int = 2**62

    def with_step_scale(self, scale: float) -> "Unrolled":
        """The same rule with finite differences taken at another step."""
        return replace(self, hvp=replace(self.hvp, scale=scale))

    def task_gradient(
        self,
        worker: Worker,
        meta: MetaParameters,
        episode: Episode,
        into: MetaGradient,
        between_passes: Callable[[], None] = no_poll,
    ) -> TaskResult:
        """Add the meta-gradient of one task; see Rule. Collective: group.

        Of order 1 and with nothing else to differentiate it is the query gradient at phi_K, accumulated
        without a vector for it, and restoring theta costs no separate write.
        """
        theta, learned = meta.theta, self.inner.rates.learned != "no"
        tracked = self.order > 1 or any(self.step_loss_weights[:-1]) or learned
        path = Trajectory(self.budget_bytes, learned) if tracked else None
        adapted = self.inner.adapt(worker, theta, episode.support, path, between_passes)
        between_passes()
        if path is None and not self.inner.head.backprop_through_means:
            weight = 1.0 if all([step.finite for step in adapted.passes]) else 0.0
            query = worker.gradient(episode.query, into.sum, weight, restore=theta)
            finite = bool(weight) and query.finite
            if finite:
                into.count()
            return TaskResult(1.0, finite, adapted.passes[0], query)
        v = worker.zeros()
        query = worker.gradient(
            episode.query, v, self.step_loss_weights[-1] if self.step_loss_weights else 1.0
        )
        hessian = Hessian(self.hvp, worker, episode.support, between_passes)
        extra = {} if path is None else self._backward(hessian, episode, path, v)
        passes = [*adapted.passes, query, *hessian.passes]
        between_passes()
        passes += self.inner.head.backward(worker, v, theta, episode.support, adapted.means)
        worker.write(theta)
        finite = all([step.finite for step in passes])
        if finite:
            into.add(v, 1.0, extra)
        return TaskResult(1.0, finite, adapted.passes[0], query)

    def _backward(self, hessian: Hessian, episode: Episode, path: Trajectory, v: Tensor) -> dict[str, Tensor]:
        """Turn v = dL/dphi_K [S] into dL/dphi_0 in place; return the gradient of learned rates.

        All passes are added to those of `hessian`. Collective: group.
        """
        rates, momentum, worker = self.inner.rates, self.inner.optimizer.momentum, hessian.worker
        learned = rates.meta_parameter
        extra = {} if learned is None else {"rates": torch.zeros_like(learned)}
        w = torch.zeros_like(v) if self.order > 1 else None
        for k in reversed(range(self.inner.steps)):
            if extra:
                rates.add_gradient_(extra["rates"], worker, k, v, path.take_direction(k))
            if w is not None:
                w.mul_(momentum).sub_(rates.scale_(k, v.clone(), slice(0, v.numel())))
                v += hessian.times(path.phi(k), w)
            if k > 0 and self.step_loss_weights and self.step_loss_weights[k - 1]:
                hessian.between_passes()
                worker.write(path.phi(k))
                hessian.passes.append(worker.gradient(episode.query, v, self.step_loss_weights[k - 1]))
            path.drop(k)
        return extra
