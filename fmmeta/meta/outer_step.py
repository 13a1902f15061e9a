"""The outer step: finishes the mean meta-gradient, clips it over the whole model, updates meta-parameters.

    reduce across groups (meta_gradient.py) -> per bucket: wait, divide, norm -> optimizer on the shard

Every vector is this rank's shard: theta, the sum, the optimizer's moments. Nothing is gathered, so the
optimizer must act element by element (config/algorithms.py). Learned inner rates are meta-parameters
too (not clipped, not decayed, with the rate `inner_lr_outer_lr`); kept inner moments are replaced by their
mean over the tasks. With --offload_outer everything but the learned rates is in host memory
(parallel/param_map.py) and is copied to the device in pieces, once per outer step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmmeta.config.algorithms import OUTER_OPTIMIZERS
from fmmeta.config.settings import Config
from fmmeta.meta.meta_gradient import PendingMean
from fmmeta.meta.parameters import KEPT_MOMENTS, MetaParameters, StateDict
from fmmeta.parallel.collectives import Reduction
from fmmeta.parallel.param_map import OuterMemory, overlap
from fmmeta.parallel.workers.base import Worker, add_local_dot, over_group


@dataclass(frozen=True)
class OuterStep:
    """Result of an outer step. grad_norm: before clipping; applied: whether the meta-parameters moved;
    no_data: they did not, because all tasks failed to load.
    """

    grad_norm: float
    lr: float
    applied: bool
    no_data: bool = False


class OuterOptimizer:
    """An element-by-element optimizer of the meta-parameters, with clipping over the whole model and a
    schedule of transformers.

    The learning rate is a function of the step's number alone, so a resumed run needs no scheduler state.
    Weight decay is decoupled (Loshchilov, Hutter 2019) whatever the optimizer. A head that every task
    initialises is no meta-parameter: its slice is not updated.
    """

    def __init__(self, meta_params: MetaParameters, worker: Worker, config: Config) -> None:
        from transformers import get_scheduler

        self.meta_params, self.worker, self.config = meta_params, worker, config
        self.spec = OUTER_OPTIMIZERS[config.outer_optimizer]
        self.memory = OuterMemory(worker.device, config.offload_outer)
        self.head = worker.params.groups.get("head", slice(0, 0))
        self.pieces = [
            (piece, config.weight_decay if name == "decay" else 0.0)
            for name, group in worker.params.groups.items()
            if name != "head"
            for piece in self.memory.pieces(group)
        ]
        self.moments: dict[str, Tensor] = {}  # by torch's names, [S] on the storage device
        self.rate_moments: dict[str, Tensor] = {}
        self.scalar_state: dict[str, float] = {}  # step counts and the like, equal for every piece
        schedule: Any = get_scheduler(
            config.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1)], lr=config.outer_lr),
            config.warmup_steps,
            config.outer_steps,
        )
        self.factor = schedule.lr_lambdas[0]

    def lr(self, outer_step: int) -> float:
        """Learning rate of the outer step with this number, counted from 0."""
        return self.config.outer_lr * self.factor(outer_step)

    def step(self, mean: PendingMean | None, outer_step: int) -> OuterStep:
        """Move the meta-parameters against the mean meta-gradient, unless it is None or not finite.

        The tensors of `mean` are used up. Collective: group.
        """
        lr, meta = self.lr(outer_step), self.meta_params
        if mean is None:
            return OuterStep(math.nan, lr, applied=False)
        extra = {name: mean.finish(name) for name in meta.extra}
        norm, gradient = self._finish_theta(mean), mean.sums["theta"]
        if meta.rates is not None and not self._finite(extra["rates"]):
            norm = math.nan
        if not math.isfinite(norm):
            return OuterStep(norm, lr, applied=False)
        if 0 < self.config.max_grad_norm < norm:
            gradient.mul_(self.config.max_grad_norm / norm)
        scalars, moments = dict(self.scalar_state), dict(self.moments)  # from before the first piece
        for piece, weight_decay in self.pieces:
            value = self.memory.load(meta.theta[piece])
            stored = {name: self.memory.load(moment[piece]) for name, moment in moments.items()}
            grad = self.memory.load(gradient[piece])
            for name, moment in self._update(value, grad, scalars, stored, lr, weight_decay).items():
                if name not in self.moments:
                    self.moments[name] = self.memory.zeros(meta.theta)
                self.memory.write_back(self.moments[name][piece], moment)
            self.memory.write_back(meta.theta[piece], value)
        if meta.rates is not None:
            rates_lr = self.config.inner_lr_outer_lr * self.factor(outer_step)
            grad = extra["rates"].clone()
            self.rate_moments = self._update(meta.rates, grad, scalars, self.rate_moments, rates_lr, 0.0)
        if meta.kept is not None:
            meta.kept.vectors = {name: extra[name].clone() for name in KEPT_MOMENTS}
            meta.kept.count += self.config.inner_steps
        return OuterStep(norm, lr, applied=True)

    def _finish_theta(self, mean: PendingMean) -> float:
        """Finish the mean of theta without a head, bucket by bucket; return its norm over the whole model.

        The norm of one bucket is computed while later buckets are in flight. Collective: group.
        """
        gradient, square = mean.sums["theta"], torch.zeros((), dtype=torch.float64, device=self.worker.device)
        reduction = mean.reductions.get("theta") or Reduction([slice(0, len(gradient))])
        for number, bucket in enumerate(reduction.buckets):
            reduction.wait(number)
            gradient[bucket].div_(mean.weight)
            gradient[overlap(bucket, self.head)] = 0
            add_local_dot(self.worker, square, gradient, gradient, bucket)
        return math.sqrt(float(over_group(self.worker, square)))

    def _finite(self, gradient: Tensor) -> bool:
        """Whether the gradient of the rates is finite on every rank of the group. Collective: group."""
        bad = (~torch.isfinite(gradient.sum())).to(torch.float64)
        return float(self.worker.group.sum_(bad)) == 0

    def _update(
        self,
        value: Tensor,
        grad: Tensor,
        scalars: Mapping[str, float],
        moments: Mapping[str, Tensor],
        lr: float,
        weight_decay: float,
    ) -> dict[str, Tensor]:
        """One step of torch's optimizer on a tensor, in place; return its moments, store its scalars."""
        options: dict[str, Any] = {name: getattr(self.config, key) for name, key in self.spec.options.items()}
        if self.spec.torch_class == "AdamW" and value.device.type == "cpu":
            options["fused"] = True  # one pass over memory instead of nine; on GPUs foreach is the default
        make = getattr(torch.optim, self.spec.torch_class)
        optimizer = make([value], lr=lr, weight_decay=0.0, **options, **self.spec.fixed)
        if scalars or moments:
            optimizer.state[value] = {**{name: torch.tensor(x) for name, x in scalars.items()}, **moments}
        value.mul_(1 - lr * weight_decay)
        value.grad = grad
        optimizer.step()
        value.grad = None
        state = {name: item for name, item in optimizer.state[value].items() if item is not None}
        vectors = {name: item for name, item in state.items() if torch.is_tensor(item) and item.ndim > 0}
        self.scalar_state = {name: float(item) for name, item in state.items() if name not in vectors}
        return vectors

    def add_state(self, state: StateDict) -> None:
        """Add moments and step counts, uncopied, to what a checkpoint holds."""
        state.add("", self.moments)
        state.add("rates.", self.rate_moments)
        state.numbers.update(self.scalar_state)

    def load_state(self, state: StateDict) -> None:
        """Continue from what `add_state` gave, on this layout or another, on any device."""
        known = {name: state.vectors[name] for name in self.spec.moments if name in state.vectors}
        self.moments = {name: self.memory.store(vector.clone()) for name, vector in known.items()}
        self.scalar_state = {name: x for name, x in state.numbers.items() if name != "kept.count"}
        if self.meta_params.rates is not None:
            device, saved = self.meta_params.rates.device, state.tensors("rates.")
            self.rate_moments = {name: value.to(device, copy=True) for name, value in saved.items()}
