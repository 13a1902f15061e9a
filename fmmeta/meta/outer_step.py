"""The outer step: finishes the mean meta-gradient, clips it over the whole model, updates meta-parameters.

    reduce across groups (parameters.py) -> per bucket: wait, divide, norm -> optimizer on the shard

Every vector is this rank's shard: theta, the sum, the optimizer's moments. Nothing is gathered, so the
optimizer must act element by element (config/algorithms.py). Learned inner rates are meta-parameters
too (not clipped, not decayed, with the rate `inner_lr_outer_lr`). With --offload_outer everything but the
learned rates is in host memory (parallel/param_map.py) and is copied to the device in pieces, once per outer
step.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmmeta.config.algorithms import find_outer
from fmmeta.config.settings import Config
from fmmeta.meta.noise_scale import NoiseScale, TaskSquares
from fmmeta.meta.parameters import MetaGradient, MetaParameters, PendingMean, StateDict
from fmmeta.parallel.collectives import Communicator, Reduction
from fmmeta.parallel.param_map import INNER_ONLY, OuterMemory, overlap
from fmmeta.parallel.workers.base import Worker, add_local_dot, over_group


class Outcome(enum.Enum):
    """What an outer step did to theta."""

    APPLIED = "theta moved"
    SKIPPED_NONFINITE = "no task was finite, or the meta-gradient was not"
    NO_DATA = "no task was loaded"
    STOP = "the step was abandoned"


@dataclass(frozen=True)
class OuterStep:
    """Result of an outer step. grad_norm: before clipping; applied: whether the meta-parameters moved."""

    grad_norm: float
    lr: float
    applied: bool


class OuterOptimizer:
    """An element-by-element optimizer of the meta-parameters, with clipping over the whole model and a
    schedule of transformers.

    The learning rate is a function of the step's number alone, so a resumed run needs no scheduler state.
    Weight decay is decoupled (Loshchilov, Hutter 2019) whatever the optimizer. What only the inner loop
    changes, such as a head that every task initialises, is no meta-parameter: its slice is not updated.
    """

    def __init__(self, meta_params: MetaParameters, worker: Worker, config: Config) -> None:
        from transformers import get_scheduler

        self.meta_params, self.worker, self.config = meta_params, worker, config
        self.spec = find_outer(config.outer_optimizer)
        self.memory = OuterMemory(worker.storage_device, config.offload_outer)
        self.inner_only = worker.params.groups.get(INNER_ONLY, slice(0, 0))
        self.pieces = [
            (piece, config.weight_decay if name == "decay" else 0.0)
            for name, group in worker.params.groups.items()
            if name != INNER_ONLY
            for piece in self.memory.pieces(group)
        ]
        if not self.pieces:  # a stage that trains a head alone stores the same moments as the others
            self.pieces = [(slice(0, 0), 0.0)]
        self.moments: dict[str, Tensor] = {}  # by torch's names, [S] on the storage device
        self.rate_moments: dict[str, Tensor] = {}
        self.scalar_state: dict[str, float] = {}  # step counts and the like, equal for every piece
        schedule: Any = get_scheduler(
            config.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1)], lr=config.outer_lr),
            config.warmup,
            config.outer_steps,
        )
        self.factor = schedule.lr_lambdas[0]

    def lr(self, outer_step: int) -> float:
        """Learning rate of the outer step with this number, counted from 0."""
        return self.config.outer_lr * self.config.outer_lr_factor * self.factor(outer_step)

    def step(self, mean: PendingMean | None, outer_step: int) -> OuterStep:
        """Move the meta-parameters against the mean meta-gradient, unless it is None or not finite.

        The tensors of `mean` are used up. Collective: group.
        """
        lr, meta = self.lr(outer_step), self.meta_params
        if mean is None:
            return OuterStep(math.nan, lr, applied=False)
        extra = {name: mean.finish(name) for name in meta.extra}
        for value in extra.values():
            # Ranks of a group that hold the same values sum them over different communicators. A table of
            # rates by layer is the same on all ranks; rates by element are divided like theta.
            if self.worker.params.replicated or value.ndim == 2:
                self.worker.group.broadcast_(value)
        norm, gradient = self._finish_theta(mean), mean.sums["theta"]
        if meta.rates is not None:
            nonfinite = (~torch.isfinite(extra["rates"].sum())).double()
            norm = math.nan if self.worker.group.sum_(nonfinite) else norm
        if not math.isfinite(norm):
            return OuterStep(norm, lr, applied=False)
        if 0 < self.config.max_grad_norm < norm:
            gradient.mul_(self.config.max_grad_norm / norm)
        moments = dict(self.moments)  # those before the first piece
        numbers = dict[str, Any]()  # the optimizer's scalars after the step
        for piece, weight_decay in self.pieces:
            numbers = self._step_piece(piece, gradient, moments, lr, weight_decay)
        if meta.rates is not None:
            rates_lr = self.config.inner_lr_outer_lr * self.config.outer_lr_factor * self.factor(outer_step)
            grad = extra["rates"].clone()
            self.rate_moments, numbers = self._update(meta.rates, grad, self.rate_moments, rates_lr, 0.0)
        self.scalar_state = {name: float(number) for name, number in numbers.items()}
        self.memory.settle()
        return OuterStep(norm, lr, applied=True)

    def _step_piece(
        self, piece: slice, gradient: Tensor, moments: Mapping[str, Tensor], lr: float, weight_decay: float
    ) -> dict[str, Any]:
        """The step of one piece of theta; the optimizer's scalars after it. What it loads is freed here."""
        load, theta = self.memory.load, self.meta_params.theta
        value, stored = load(theta[piece]), {name: load(moment[piece]) for name, moment in moments.items()}
        updated, numbers = self._update(value, load(gradient[piece]), stored, lr, weight_decay)
        for name, moment in updated.items():
            if name not in self.moments:
                self.moments[name] = self.memory.zeros(theta)
            self.memory.write_back(self.moments[name][piece], moment)
        self.memory.write_back(theta[piece], value)
        return numbers

    def _finish_theta(self, mean: PendingMean) -> float:
        """Finish the mean of theta without INNER_ONLY, bucket by bucket; return its norm over the model.

        The norm of one bucket is computed while later buckets are in flight. Collective: group.
        """
        gradient, square = mean.sums["theta"], torch.zeros((), dtype=torch.float64, device=self.worker.device)
        reduction = mean.reductions.get("theta") or Reduction([slice(0, len(gradient))])
        for number, bucket in enumerate(reduction.buckets):
            reduction.wait(number)
            if self.worker.params.replicated:
                self.worker.group.broadcast_(gradient[bucket])
            gradient[bucket].div_(mean.weight)
            gradient[overlap(bucket, self.inner_only)] = 0
            add_local_dot(self.worker, square, gradient, gradient, bucket)
        return math.sqrt(float(over_group(self.worker, square)))

    def _update(
        self,
        value: Tensor,
        grad: Tensor,
        moments: Mapping[str, Tensor],
        lr: float,
        weight_decay: float,
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One step of torch's optimizer on a tensor, in place; its moments and its scalars."""
        more, device = dict[str, Any](), torch.device("cpu")
        if self.spec.torch_class == "AdamW":  # one pass over memory instead of nine
            more["fused"], device = True, value.device
        value.mul_(1 - lr * weight_decay)
        scalars = {name: torch.full((), x, device=device) for name, x in self.scalar_state.items()}
        return self.spec.step(value, grad, {**scalars, **moments}, lr, self.config, **more)

    def add_state(self, state: StateDict) -> None:
        """Add moments and step counts, uncopied, to what a checkpoint holds."""
        state.add("", self.moments)
        state.add("rates.", self.rate_moments)
        state.numbers.update(self.scalar_state)

    def load_state(self, state: StateDict) -> None:
        """Continue from what `add_state` gave, on this layout or another, on any device.

        Nothing is continued of another optimizer, or where rates were not learned in this shape
        (--accept_changed_settings).
        """
        rates = self.meta_params.rates
        saved = {} if rates is None else state.tensors("rates.")
        stored = {name: state.vectors[name] for name in self.spec.moments if name in state.vectors}
        before = state.facts.get("settings", {}).get("outer_optimizer", self.config.outer_optimizer)
        shapes = {name: one.shape for name, one in saved.items()}
        wanted = {} if rates is None else dict.fromkeys(stored, rates.shape)
        if before != self.config.outer_optimizer or shapes != wanted:
            self.moments, self.rate_moments, self.scalar_state = {}, {}, {}
            return
        self.moments = {name: self.memory.store(vector.clone()) for name, vector in stored.items()}
        self.scalar_state = dict(state.numbers)
        if rates is not None:
            self.rate_moments = {name: value.to(rates.device, copy=True) for name, value in saved.items()}


class OuterUpdate:
    """Collects the meta-gradients of an outer step in `meta` and applies their mean."""

    def __init__(self, outer: OuterOptimizer, cross: Communicator, config: Config) -> None:
        self.outer, self.cross = outer, cross
        self.comm_dtype = torch.bfloat16 if config.reduce_dtype == "bf16" else torch.float32
        self.meta = MetaGradient(outer.meta_params.theta, outer.meta_params.extra)
        self.noise_scale = NoiseScale()

    def step(self, weight: float, outer_step: int, squares: TaskSquares | None = None) -> OuterStep:
        """Reduce what is in `meta`, which is empty afterwards, and apply it.

        weight: of the finite tasks of all groups; squares: of the tasks' gradients, for the noise scale.
        Collective: cross, group.
        """
        mean = self.meta.begin_reduce(self.cross, weight, self.comm_dtype)
        update = self.outer.step(mean, outer_step)
        self.meta.clear()
        if squares is not None:
            self.noise_scale.add(squares, update.grad_norm)
        return update

    def add_state(self, state: StateDict) -> None:
        """Add what later noise scales need to what a checkpoint holds."""
        state.facts["noise_scale"] = self.noise_scale.state

    def load_state(self, state: StateDict) -> None:
        """Restore what `add_state` gave."""
        self.noise_scale = NoiseScale(state.facts["noise_scale"])
