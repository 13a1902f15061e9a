"""The outer step: finishes the mean meta-gradient, clips it over the whole model, updates meta-parameters.

    reduce across groups (parameters.py) -> per bucket: wait, divide, norm -> optimizer on the shard

Every vector is this rank's shard: theta, the sum, the optimizer's moments. Nothing is gathered, so the
optimizer must act element by element (config/algorithms.py). Learned inner rates are meta-parameters
too (not clipped, not decayed, with the rate `inner_lr_outer_lr`); kept inner moments are replaced by their
mean over the tasks. With --offload_outer everything but the learned rates is in host memory
(parallel/param_map.py) and is copied to the device in pieces, once per outer step.

A meta-gradient is applied at once, or (--outer_delay 1) after the inner loops of the next outer step:

    at once    theta_{t+1} = U(theta_t, G_t(theta_t); lr_t)
    delayed    theta_1 = theta_0;   theta_{t+1} = U(theta_t, G_{t-1}(theta_{t-1}); lr_{t-1})
               after the last outer step, the last meta-gradient is applied as well

G_t: the mean meta-gradient of meta-batch t; U: clipping, optimizer, weight decay. With a delay the reduction
of G_t across the groups runs during the inner loops of step t + 1; the price is a gradient that is one update
old, as in pipelined and asynchronous SGD (Langford, Smola, Zinkevich 2009, arXiv 0911.0491). One reduction is
pending at any time, every rank starts it at the same place between two steps, and nothing else uses the cross
communicator meanwhile. A pending meta-gradient is part of the state of a run: a checkpoint stores it, summed.
A save never changes later steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmmeta.config.algorithms import find_outer
from fmmeta.config.settings import Config
from fmmeta.meta.noise_scale import NoiseScale, TaskSquares
from fmmeta.meta.parameters import KEPT_MOMENTS, MetaGradient, MetaParameters, PendingMean, StateDict
from fmmeta.parallel.collectives import Communicator, Reduction
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
        self.spec = find_outer(config.outer_optimizer)
        self.memory = OuterMemory(worker.storage_device, config.offload_outer)
        self.head = worker.params.groups.get("head", slice(0, 0))
        self.pieces = [
            (piece, config.weight_decay if name == "decay" else 0.0)
            for name, group in worker.params.groups.items()
            if name != "head"
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
        norm, gradient = self._finish_theta(mean), mean.sums["theta"]
        if meta.rates is not None:
            nonfinite = (~torch.isfinite(extra["rates"].sum())).double()
            norm = math.nan if self.worker.group.sum_(nonfinite) else norm
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
            rates_lr = self.config.inner_lr_outer_lr * self.config.outer_lr_factor * self.factor(outer_step)
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
        more = dict[str, Any]()
        if self.spec.torch_class == "AdamW" and value.device.type == "cpu":
            more["fused"] = True  # one pass over memory instead of nine; on GPUs foreach is the default
        value.mul_(1 - lr * weight_decay)
        state = {**{name: torch.tensor(x) for name, x in scalars.items()}, **moments}
        vectors, self.scalar_state = self.spec.step(value, grad, state, lr, self.config, **more)
        return vectors

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
        self.scalar_state = {name: x for name, x in state.numbers.items() if name != "kept.count"}
        if rates is not None:
            self.rate_moments = {name: value.to(rates.device, copy=True) for name, value in saved.items()}


PREFIX = "pending "  # of the names of vectors and tables in a checkpoint


@dataclass
class PendingUpdate:
    """The meta-gradient of an outer step that has not been applied. buffer: its sums; mean: None if no task
    was finite; no_data: all tasks of its step failed to load; squares: of its tasks' gradients, if measured.
    """

    buffer: MetaGradient
    mean: PendingMean | None
    outer_step: int
    no_data: bool
    squares: TaskSquares | None = None


class DelayedUpdate:
    """Collects the meta-gradients of an outer step in `meta` and applies them, now or a step later."""

    def __init__(self, outer: OuterOptimizer, cross: Communicator, config: Config) -> None:
        self.outer, self.cross, self.delay = outer, cross, config.outer_delay
        self.comm_dtype = torch.bfloat16 if config.reduce_dtype == "bf16" else torch.float32
        self.meta = self._buffer()
        self.spare_buffer = self._buffer() if self.delay else None
        self.pending: PendingUpdate | None = None
        self.noise_scale = NoiseScale()

    def _buffer(self) -> MetaGradient:
        return MetaGradient(self.outer.meta_params.theta, self.outer.meta_params.extra)

    def step(
        self, weight: float, outer_step: int, no_data: bool, last: bool, squares: TaskSquares | None = None
    ) -> OuterStep | None:
        """Reduce what is in `meta`, which is empty afterwards, and apply it or the pending meta-gradient.

        weight: of the finite tasks of all groups; no_data: all tasks failed to load; last: of the run, so
        that nothing may stay pending; squares: of these tasks, for the noise scale. Returns the update, None
        if there was none. If `last` applies two, it is the second, and `applied` says whether one of them
        moved theta. Collective: cross, group.
        """
        update = self.flush()
        mean = self.meta.begin_reduce(self.cross, weight, self.comm_dtype)
        pending = PendingUpdate(self.meta, mean, outer_step, no_data, squares)
        if self.spare_buffer is None or last:
            final = self._apply(pending)
            moved = update is not None and update.applied  # by the pending meta-gradient
            return replace(final, applied=final.applied or moved)
        self.pending, self.meta, self.spare_buffer = pending, self.spare_buffer, self.meta
        return update

    def flush(self) -> OuterStep | None:
        """Apply the pending meta-gradient, if there is one. Collective: cross, group."""
        pending, self.pending = self.pending, None
        return pending and self._apply(pending)

    def _apply(self, pending: PendingUpdate) -> OuterStep:
        update = self.outer.step(pending.mean, pending.outer_step)
        pending.buffer.clear()
        if pending.squares is not None:
            self.noise_scale.add(pending.squares, update.grad_norm)
        return replace(update, no_data=pending.no_data)

    def add_state(self, state: StateDict) -> None:
        """Add the pending meta-gradient, reduced, to what a checkpoint holds. Collective: cross."""
        state.facts["pending"], state.facts["noise_scale"] = None, self.noise_scale.state
        if self.pending is not None:
            mean, step, no_data = self.pending.mean, self.pending.outer_step, self.pending.no_data
            if mean is not None:
                self.pending.mean = PendingMean({name: mean.finish(name) for name in mean.sums})
                state.add(PREFIX, mean.sums)
            squares = self.pending.squares
            state.facts["pending"] = {
                "outer_step": step,
                "unread": no_data,
                "finite": mean is not None,
                **({} if squares is None else {"squares": list(squares)}),
            }

    def vectors_to_save(self) -> dict[str, Tensor]:
        """Vectors of the sizes that `add_state` may add, to allocate buffers."""
        sums = self.meta.sums if self.delay else {}
        return {PREFIX + name: vector for name, vector in sums.items() if vector.ndim == 1}

    def load_state(self, state: StateDict) -> None:
        """Restore the pending meta-gradient that `add_state` gave, if there is one."""
        self.noise_scale = NoiseScale(state.facts.get("noise_scale"))  # absent in checkpoints of 0.1.0
        saved = state.facts.get("pending")
        if saved is None:
            return
        buffer, mean = self.spare_buffer or self._buffer(), None
        if saved["finite"]:
            for name, value in state.tensors(PREFIX).items():
                if name in buffer.sums and buffer.sums[name].shape == value.shape:  # else of other rates
                    buffer.sums[name].copy_(value)
            mean = PendingMean(buffer.sums)
        squares = TaskSquares(*saved["squares"]) if saved.get("squares") else None
        self.pending = PendingUpdate(buffer, mean, saved["outer_step"], saved["unread"], squares)
