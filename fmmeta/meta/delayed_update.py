"""Applies a meta-gradient at once, or (--outer_delay 1) after the inner loops of the next outer step.

    at once    theta_{t+1} = U(theta_t, G_t(theta_t); lr_t)
    delayed    theta_1 = theta_0;   theta_{t+1} = U(theta_t, G_{t-1}(theta_{t-1}); lr_{t-1})
               after the last outer step, the last meta-gradient is applied as well

G_t: the mean meta-gradient of meta-batch t; U: clipping, optimizer, weight decay. With a delay the reduction
of G_t across the groups runs during the inner loops of step t + 1; the price is a gradient that is one update
old, as in pipelined and asynchronous SGD (Langford, Smola, Zinkevich 2009, arXiv 0911.0491). One
reduction is pending at any time, every rank starts it at the same place between two steps, and nothing else
uses the cross communicator meanwhile.

A pending meta-gradient is part of the state of a run: a checkpoint stores it, summed. A save never changes
later steps.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fmmeta.config.settings import Config
from fmmeta.meta.meta_gradient import MetaGradient, PendingMean
from fmmeta.meta.outer_step import OuterOptimizer, OuterStep
from fmmeta.meta.parameters import StateDict
from fmmeta.parallel.collectives import Communicator

PREFIX = "pending "  # of the names of vectors and tables in a checkpoint
COMM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class PendingUpdate:
    """The meta-gradient of an outer step that has not been applied. buffer: its sums; mean: None if no task
    was finite; no_data: all tasks of its step failed to load.
    """

    buffer: MetaGradient
    mean: PendingMean | None
    outer_step: int
    no_data: bool


class DelayedUpdate:
    """Collects the meta-gradients of an outer step in `meta` and applies them, now or a step later."""

    def __init__(self, outer: OuterOptimizer, cross: Communicator, config: Config) -> None:
        self.outer, self.cross, self.delay = outer, cross, config.outer_delay
        self.comm_dtype = COMM_DTYPES[config.reduce_dtype]
        self.meta = self._buffer()
        self.spare_buffer = self._buffer() if self.delay else None
        self.pending: PendingUpdate | None = None

    def _buffer(self) -> MetaGradient:
        return MetaGradient(self.outer.meta_params.theta, self.outer.meta_params.extra)

    def step(self, weight: float, outer_step: int, no_data: bool, last: bool) -> OuterStep | None:
        """Reduce what is in `meta`, which is empty afterwards, and apply it or the pending meta-gradient.

        weight: of the finite tasks of all groups; no_data: all tasks failed to load; last: of the run, so
        that nothing may stay pending. Returns the update, None if there was none, and the second if `last`
        applies two. Collective: cross, group.
        """
        update = self.flush()
        mean = self.meta.begin_reduce(self.cross, weight, self.comm_dtype)
        pending = PendingUpdate(self.meta, mean, outer_step, no_data)
        if self.spare_buffer is None or last:
            return self._apply(pending)
        self.pending, self.meta, self.spare_buffer = pending, self.spare_buffer, self.meta
        return update

    def flush(self) -> OuterStep | None:
        """Apply the pending meta-gradient, if there is one. Collective: cross, group."""
        pending, self.pending = self.pending, None
        return pending and self._apply(pending)

    def _apply(self, pending: PendingUpdate) -> OuterStep:
        update = self.outer.step(pending.mean, pending.outer_step)
        pending.buffer.clear()
        return replace(update, no_data=pending.no_data)

    def add_state(self, state: StateDict) -> None:
        """Add the pending meta-gradient, reduced, to what a checkpoint holds. Collective: cross."""
        state.facts["pending"] = None
        if self.pending is None:
            return
        mean = self.pending.mean
        if mean is not None:
            self.pending.mean = PendingMean({name: mean.finish(name) for name in mean.sums})
            state.add(PREFIX, mean.sums)
        state.facts["pending"] = {
            "outer_step": self.pending.outer_step,
            "unread": self.pending.no_data,
            "finite": mean is not None,
        }

    def vectors_to_save(self) -> dict[str, Tensor]:
        """Vectors of the sizes that `add_state` may add, to allocate buffers."""
        state = StateDict()
        state.add(PREFIX, self.meta.sums if self.delay else {})
        return state.vectors

    def load_state(self, state: StateDict) -> None:
        """Restore the pending meta-gradient that `add_state` gave, if there is one."""
        saved = state.facts.get("pending")
        if saved is None:
            return
        buffer, mean = self.spare_buffer or self._buffer(), None
        if saved["finite"]:
            for name, value in state.tensors(PREFIX).items():
                buffer.sums[name].copy_(value)
            mean = PendingMean(buffer.sums)
        self.pending = PendingUpdate(buffer, mean, saved["outer_step"], saved["unread"])
