"""The outer step: sums the tasks' meta-gradients, reduces once across groups, clips, updates theta.

    add (per task) -> reduce over cross (once per outer step) -> mean -> norm over the whole model
        -> optimizer on the shard

Every vector is this rank's shard: theta, the sum, the optimizer's moments. Nothing is gathered, so the
optimizer must act element by element. Learned inner rates are meta-parameters too (not clipped, not decayed,
with the rate `inner_lr_outer_lr`); kept inner moments are replaced by their mean over the tasks. With
--offload_outer everything but the learned rates is in host memory (parallel/offload.py) and is copied to the
device in pieces, once per outer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmmeta.config.settings import Config
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.parallel.offload import OuterMemory
from fmmeta.parallel.param_map import overlap
from fmmeta.parallel.workers.base import Worker


@dataclass(frozen=True)
class OuterStep:
    """What an outer step did: norm of the meta-gradient before clipping, learning rate, whether theta moved.

    `unread`: it did not, because all tasks failed to load.
    """

    grad_norm: float
    lr: float
    applied: bool
    unread: bool = False


class Outer:
    """An element-by-element optimizer on this rank's slice of theta and on learned inner rates, clipping over
    the whole model, and an HF schedule.

    theta and rates are updated in place. The learning rate is a function of the step's number alone, so a
    resumed run needs no scheduler state. Weight decay is decoupled (Loshchilov, Hutter 2019) whatever the
    optimizer. A head that every task initialises is no meta-parameter: its slice is not updated.
    """

    def __init__(self, theta: Tensor, worker: Worker, config: Config, inner: InnerLoop | None = None) -> None:
        from transformers import get_scheduler

        self.theta, self.worker, self.config = theta, worker, config
        self.rates = None if inner is None else inner.rates.meta_parameter
        self.kept = None if inner is None else inner.optimizer.kept
        self.inner_steps = 0 if inner is None else inner.steps
        self.home = OuterMemory(worker.device, config.offload_outer)
        self.head = worker.params.groups.get("head")
        self.parts = [
            (place, config.weight_decay if name == "decay" else 0.0)
            for name, whole in worker.params.groups.items()
            if name != "head"
            for place in self.home.pieces(whole)
        ]
        self.moments: dict[str, Tensor] = {}  # by torch's names, [S] at home
        self.rate_moments: dict[str, Tensor] = {}
        self.numbers: dict[str, float] = {}  # steps and the like, equal for every piece
        peak = config.outer_lr
        schedule = get_scheduler(
            config.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1)], lr=peak),
            config.warmup_steps,
            config.outer_steps,
        )
        self.factor, self.peak = schedule.lr_lambdas[0], peak  # type: ignore[attr-defined]

    @property
    def extras(self) -> dict[str, Tensor]:
        """What MetaGradient has to sum besides theta: tensors of these shapes by name."""
        kept = {} if self.kept is None else {name: self.theta for name in ("exp_avg", "exp_avg_sq")}
        return kept if self.rates is None else {"rates": self.rates, **kept}

    def lr(self, outer_step: int) -> float:
        """Learning rate of the outer step with this number, counted from 0."""
        return self.peak * self.factor(outer_step)

    def step(
        self,
        meta_grad: Tensor | None,
        outer_step: int,
        extra: Mapping[str, Tensor] | None = None,
        places: Iterator[slice] | None = None,
    ) -> OuterStep:
        """Move theta against `meta_grad` [S], and the rest as `extra` says, unless one is None or not finite.

        `places`: where they come bucket by bucket (MetaGradient.begin); the norm of one is taken while later
        ones travel. Collective: group.
        """
        extra = extra or {}
        lr = self.lr(outer_step)
        if meta_grad is None:
            return OuterStep(math.nan, lr, False)
        norm = math.sqrt(self.worker.dot(meta_grad, meta_grad, self._without_head(meta_grad, places)))
        if self.rates is not None and not self._finite(extra["rates"]):
            norm = math.nan
        if not math.isfinite(norm):
            return OuterStep(norm, lr, False)
        if 0 < self.config.max_grad_norm < norm:
            meta_grad.mul_(self.config.max_grad_norm / norm)
        before, known = dict(self.numbers), list(self.moments)
        for place, weight_decay in self.parts:
            value, gradient = self.home.load(self.theta[place]), self.home.load(meta_grad[place])
            moments = {name: self.home.load(self.moments[name][place]) for name in known}
            moved = self._move(value, gradient, {**tensors(before), **moments}, lr, weight_decay)
            self.home.write_back(self.theta[place], value)
            for name, moment in moved.items():
                if name not in self.moments:
                    self.moments[name] = self.home.zeros(self.theta)
                self.home.write_back(self.moments[name][place], moment)
        if self.rates is not None:
            state = {**tensors(before), **self.rate_moments}
            self.rate_moments = self._move(
                self.rates,
                extra["rates"].clone(),
                state,
                self.config.inner_lr_outer_lr * self.factor(outer_step),
            )
        if self.kept is not None:
            self.kept.vectors = {name: extra[name].clone() for name in ("exp_avg", "exp_avg_sq")}
            self.kept.count += self.inner_steps
        return OuterStep(norm, lr, True)

    def _move(
        self, value: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, weight_decay: float = 0.0
    ) -> dict[str, Tensor]:
        """One step of torch's optimizer on a tensor, in place; return its moments, store its scalars."""
        optimizer = OPTIMIZERS[self.config.outer_optimizer]([{"params": [value]}], self.config)
        optimizer.param_groups[0]["lr"] = lr
        if state:
            optimizer.state[value] = state
        value.mul_(1 - lr * weight_decay)
        value.grad = gradient
        optimizer.step()
        value.grad = None
        moved = {name: item for name, item in optimizer.state[value].items() if item is not None}
        self.numbers = {name: float(item) for name, item in moved.items() if not is_vector(item)}
        return {name: item for name, item in moved.items() if is_vector(item)}

    def _without_head(self, meta_grad: Tensor, places: Iterator[slice] | None) -> Iterator[slice]:
        for place in places or [slice(0, len(meta_grad))]:
            if self.head is not None:
                meta_grad[overlap(place, self.head)] = 0
            yield place

    def _finite(self, gradient: Tensor) -> bool:
        """Whether the gradient of the rates is finite on every rank of the group. Collective: group."""
        bad = (~torch.isfinite(gradient.sum())).to(torch.float64)
        return float(self.worker.group.sum_(bad)) == 0

    def state(self) -> OuterState:
        """All that a continuation needs besides theta, apart from the schedule."""
        state = OuterState(dict(self.moments), {}, dict(self.numbers))
        if self.rates is not None:
            of_rates = {f"rates.{name}": value for name, value in self.rate_moments.items()}
            self._of_rates(state).update({"rates": self.rates, **of_rates})
        if self.kept is not None:
            state.vectors |= {f"kept.{name}": vector for name, vector in self.kept.vectors.items()}
            state.numbers["kept.count"] = self.kept.count
        return state

    def load_state(self, state: OuterState) -> None:
        """Continue from what `state` returned, on this layout or another, on any device."""
        moments = {
            name: vector for name, vector in state.vectors.items() if not name.startswith(("rates", "kept."))
        }
        self.moments = {name: self.home.store(vector.clone()) for name, vector in moments.items()}
        self.numbers = {name: value for name, value in state.numbers.items() if name != "kept.count"}
        if self.rates is not None:
            saved = self._of_rates(state)
            self.rates.copy_(saved["rates"])
            self.rate_moments = {
                name.removeprefix("rates."): v.to(self.rates.device, copy=True)
                for name, v in saved.items()
                if name.startswith("rates.")
            }
        if self.kept is not None:
            kept = {name: v for name, v in state.vectors.items() if name.startswith("kept.")}
            self.kept.vectors = {
                name.removeprefix("kept."): v.to(self.theta.device, copy=True) for name, v in kept.items()
            }
            self.kept.count = int(state.numbers.get("kept.count", 0))

    def _of_rates(self, state: OuterState) -> dict[str, Tensor]:
        """Rates per element are vectors like theta; a table of rates is whole on every rank."""
        return state.tables if self.rates is not None and self.rates.ndim == 2 else state.vectors


def tensors(numbers: Mapping[str, float]) -> dict[str, Tensor]:
    """As torch's optimizers hold them."""
    return {name: torch.tensor(value) for name, value in numbers.items()}


def is_vector(item: Tensor | float) -> bool:
    return isinstance(item, Tensor) and item.ndim > 0


@dataclass
class OuterState:
    """vectors: [S], by name; tables: the same on every rank; numbers: steps and the like, equal for every
    parameter.
    """

    vectors: dict[str, Tensor]
    tables: dict[str, Tensor]
    numbers: dict[str, float]


def _with_epsilon(kind: Any, **more: Any) -> Callable[[list[dict[str, Any]], Config], torch.optim.Optimizer]:
    return lambda groups, config: kind(
        groups, lr=config.outer_lr, eps=config.adam_epsilon, weight_decay=0.0, **more
    )


def _adamw(groups: list[dict[str, Any]], config: Config) -> torch.optim.Optimizer:
    """On CPUs one pass over memory in place of nine; on GPUs its scalars would have to be on the device, and
    foreach is the default.
    """
    on_cpu = groups[0]["params"][0].device.type == "cpu"
    return _with_epsilon(torch.optim.AdamW, fused=True if on_cpu else None)(groups, config)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], Config], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": lambda groups, config: torch.optim.SGD(groups, lr=config.outer_lr),
    "nesterov": lambda groups, config: torch.optim.SGD(
        groups, lr=config.outer_lr, momentum=config.outer_momentum, nesterov=True
    ),
    "adagrad": _with_epsilon(torch.optim.Adagrad),
    "adamax": _with_epsilon(torch.optim.Adamax),
    "nadam": _with_epsilon(torch.optim.NAdam),
    "radam": _with_epsilon(torch.optim.RAdam),
    "rmsprop": _with_epsilon(torch.optim.RMSprop),
}
"""Optimizers of torch that act element by element, so that they work on shards."""
