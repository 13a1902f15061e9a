"""Applies a meta-gradient at once, or (--outer_delay 1) after the inner loops of the next outer step.

    at once    theta_{t+1} = U(theta_t, G_t(theta_t); lr_t)
    delayed    theta_1 = theta_0;   theta_{t+1} = U(theta_t, G_{t-1}(theta_{t-1}); lr_{t-1})
               after the last outer step, the last meta-gradient is applied as well

G_t: the mean meta-gradient of meta-batch t; U: clipping, optimizer, weight decay. Delayed, the reduction of
G_t across the groups has the inner loops of step t + 1 to hide behind; the price is a gradient that is one
update old, as in pipelined and asynchronous SGD (Langford, Smola, Zinkevich 2009, arXiv 0911.0491). One
reduction is pending at any time, every rank starts it at the same place between two steps, and nothing else
uses the cross communicator meanwhile.

A pending meta-gradient is part of the state of a run: a checkpoint stores it, summed. A save never changes
later steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmmeta.config.settings import Config
from fmmeta.meta.meta_gradient import MetaGradient
from fmmeta.meta.outer_step import Outer, OuterState, OuterStep
from fmmeta.parallel.process_groups import Communicator

MARK = "pending "  # before the names of vectors and tables in a checkpoint
WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class PendingUpdate:
    """The pending meta-gradient of an outer step: `means` as MetaGradient.begin gave it, None if no task
    was finite. `unread`: all tasks of its step failed to load.
    """

    meta: MetaGradient
    means: Iterator[slice] | None
    outer_step: int
    unread: bool


class DelayedUpdate:
    """Collects the directions of an outer step in `meta` and moves theta by them, now or a step later."""

    def __init__(self, outer: Outer, cross: Communicator, config: Config) -> None:
        self.outer, self.cross = outer, cross
        self.delay, self.wire = config.outer_delay, WIRES[config.reduce_dtype]
        self.meta = MetaGradient(outer.theta, outer.extras)
        self.spare = MetaGradient(outer.theta, outer.extras) if self.delay else None
        self.pending: PendingUpdate | None = None

    def move(self, weight: float, outer_step: int, unread: bool, last: bool) -> OuterStep | None:
        """End the outer step with what is in `meta`, which is empty afterwards. Returns what moved theta,
        None if nothing did.

        weight: of all groups' finite tasks; unread: all of its tasks failed to load; last: of the run, so
        that nothing may stay pending. If `last` moves theta twice, the second is returned. Collective: cross,
        group.
        """
        moved = self.drain()
        begun = PendingUpdate(self.meta, self.meta.begin(self.cross, weight, self.wire), outer_step, unread)
        if self.delay and not last:
            assert self.spare is not None
            self.pending, self.meta, self.spare = begun, self.spare, self.meta
            return moved
        return self._finish(begun)

    def drain(self) -> OuterStep | None:
        """Apply what is pending, if there is something. Collective: cross, group."""
        waited, self.pending = self.pending, None
        return self._finish(waited) if waited else None

    def _finish(self, due: PendingUpdate) -> OuterStep:
        moved = self.outer.step(
            None if due.means is None else due.meta.sum, due.outer_step, due.meta.extra, due.means
        )
        due.meta.clear()
        return replace(moved, unread=due.unread)

    def state(self) -> tuple[OuterState, dict[str, Any] | None]:
        """What is pending as vectors and tables, and what else there is to know of it (None: nothing is).

        Collective: cross.
        """
        kept = OuterState({}, {}, {})
        if self.pending is None:
            return kept, None
        of = self.pending
        if of.means is not None:
            mean = of.meta.end(of.means)
            of.means = whole(mean)
            for name, value in {"theta": mean, **of.meta.extra}.items():
                (kept.vectors if value.shape == mean.shape else kept.tables)[f"{MARK}{name}"] = value
        return kept, {"outer_step": of.outer_step, "unread": of.unread, "finite": of.means is not None}

    def shape(self) -> dict[str, Tensor]:
        """Vectors of the size of those that `state` may give, to make room for."""
        return {
            f"{MARK}{name}": value
            for name, value in {"theta": self.meta.sum, **self.meta.extra}.items()
            if self.delay and value.shape == self.meta.sum.shape
        }

    def load_state(
        self, vectors: dict[str, Tensor], tables: dict[str, Tensor], known: dict[str, Any] | None
    ) -> None:
        """Take what a checkpoint kept out of its vectors and tables."""
        kept = {
            name.removeprefix(MARK): source.pop(name)
            for source in (vectors, tables)
            for name in list(source)
            if name.startswith(MARK)
        }
        if known is None:
            return
        meta = self.spare or MetaGradient(self.outer.theta, self.outer.extras)
        for name, value in {"theta": meta.sum, **meta.extra}.items():
            if known["finite"]:
                value.copy_(kept[name])
        means = whole(meta.sum) if known["finite"] else None
        self.pending = PendingUpdate(meta, means, known["outer_step"], known["unread"])


def whole(vector: Tensor) -> Iterator[slice]:
    """All places of what has arrived."""
    return iter([slice(0, len(vector))])
