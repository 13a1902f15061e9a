"""Meta-gradient rules: one file each, one signature, chosen by name.

A rule turns one task into a direction for theta: `direction(worker, theta, episode)`. It finds theta in the worker, leaves
theta in the worker, and talks to nobody outside its group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fmmeta.meta.inner import InnerLoop
from fmmeta.parallel.worker import Pass, Worker
from fmmeta.tasks.batch import Batches


@dataclass(frozen=True)
class Direction:
    """What one task says of theta: a descent direction's negative (a gradient), fp32 [S], and how much it counts.

    finite: every pass was, on every rank of the group; a direction that is not must not be used.
    """

    shards: Tensor
    weight: float
    finite: bool
    support: Pass  # first inner step: theta on the support set
    query: Pass


class Rule(Protocol):
    """A meta-gradient rule."""

    def direction(self, worker: Worker, theta: Tensor, episode: Batches) -> Direction:
        """Meta-gradient of one task. Collective: group."""
        ...


def make_rule(name: str, inner: InnerLoop) -> Rule:
    from fmmeta.meta.algorithms.fomaml import Fomaml
    from fmmeta.meta.algorithms.reptile import Reptile

    rules: dict[str, Callable[[InnerLoop], Rule]] = {"fomaml": Fomaml, "reptile": Reptile}
    return rules[name](inner)
