"""Inner optimizers: the direction u in phi <- phi - alpha * u, element-wise, with state per task.

    sgd       u = g
    momentum  m <- mu m + g;  u = m                          (Sutskever et al. 2013, torch's SGD)
    adamw     m <- b1 m + (1-b1) g;  s <- b2 s + (1-b2) g^2  (Kingma, Ba 2015; Loshchilov, Hutter 2019)
              u = (m / (1-b1^t)) / (sqrt(s / (1-b2^t)) + eps) + decay * phi

An optimizer gets one shard, its gradient and its slice of the vector; it never communicates.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fmmeta.config.settings import Config
from fmmeta.meta.inner_lrs import Rates
from fmmeta.parallel.workers.base import Update

GradientChange = Callable[[Tensor, Tensor, slice], Tensor]
"""(shard, gradient of the loss, slice of the vector) -> gradient that the optimizer uses."""


@dataclass
class InnerState:
    """Vectors [S] by name, and the number of steps taken."""

    vectors: dict[str, Tensor]
    count: int = 0


@dataclass(frozen=True)
class InnerOptimizer:
    """One of the optimizers above.

    state_names: of the vectors that it stores. direction: (g, phi, state vectors, step number from 1) -> u.
    kept: the state that every task starts with, changed by the outer step alone; None: every task starts with
    zeros.
    """

    name: str
    state_names: tuple[str, ...]
    direction: Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]
    momentum: float = 0.0
    kept: InnerState | None = field(default=None, compare=False)

    def initial_state(self, numel: int, device: torch.device) -> InnerState:
        """The state that a task starts with."""
        if self.kept is not None and self.kept.vectors:
            vectors = {name: vector.clone() for name, vector in self.kept.vectors.items()}
            return InnerState(vectors, self.kept.count)
        return InnerState({name: torch.zeros(numel, device=device) for name in self.state_names})

    def update(
        self,
        k: int,
        state: InnerState,
        rates: Rates,
        record: Tensor | None = None,
        change_gradient: GradientChange | None = None,
    ) -> Update:
        """The update of inner step k, counted from 0; `record` [S] receives u."""
        state.count += 1
        alpha = rates.uniform(k)

        def apply(shard: Tensor, grad: Tensor, where: slice) -> None:
            if change_gradient is not None:
                grad = change_gradient(shard, grad, where)
            vectors = {name: vector[where] for name, vector in state.vectors.items()}
            u = self.direction(grad, shard, vectors, state.count)
            if record is not None:
                record[where] = u
            if alpha is not None:
                shard.sub_(u, alpha=alpha)
            else:
                shard.sub_(rates.scale_(k, u.clone(), where))

        return apply


def proximal(anchor: Tensor, weight: float) -> GradientChange:
    """Add the gradient of weight / 2 |phi - anchor|^2."""
    return lambda shard, grad, where: grad + weight * (shard - anchor[where])


def inner_optimizer(config: Config) -> InnerOptimizer:
    """The optimizer of the settings inner_optimizer, inner_momentum, inner_beta1, ..."""
    if config.inner_optimizer == "sgd":
        return InnerOptimizer("sgd", (), lambda grad, shard, state, count: grad)
    if config.inner_optimizer == "momentum":
        mu = config.inner_momentum
        return InnerOptimizer(
            "momentum", ("momentum",), lambda g, _, s, __: s["momentum"].mul_(mu).add_(g), momentum=mu
        )
    b1, b2, eps = config.inner_beta1, config.inner_beta2, config.inner_epsilon
    decay = config.inner_weight_decay

    def adamw(grad: Tensor, shard: Tensor, state: dict[str, Tensor], count: int) -> Tensor:
        first = state["exp_avg"].mul_(b1).add_(grad, alpha=1 - b1)
        second = state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        u = first / (1 - b1**count)
        u.div_((second / (1 - b2**count)).sqrt_().add_(eps))
        return u.add_(shard, alpha=decay) if decay else u

    kept = InnerState({}) if config.inner_optimizer_state == "kept" else None
    return InnerOptimizer("adamw", ("exp_avg", "exp_avg_sq"), adamw, kept=kept)
