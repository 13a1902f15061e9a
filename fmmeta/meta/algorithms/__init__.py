"""Meta-gradient rules: one file each, one signature, chosen by name.

A rule turns one task into a direction for theta: `direction(worker, theta, episode)`
(fmmeta/meta/task_gradient.py). A file has one function, `rule(setup, outer_step)`: which rule holds at an
outer step, since some begin as another.
"""

from __future__ import annotations

from collections.abc import Callable

from fmmeta.meta.algorithms import (
    anil,
    boil,
    fomaml,
    imaml,
    joint,
    maml,
    meta_sgd,
    proto_maml,
    protonet,
    reptile,
)
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.task_gradient import Rule

RULES: dict[str, Callable[[Setup, int], Rule]] = {
    "fomaml": fomaml.rule,
    "maml": maml.rule,
    "reptile": reptile.rule,
    "imaml": imaml.rule,
    "anil": anil.rule,
    "boil": boil.rule,
    "proto_maml": proto_maml.rule,
    "meta_sgd": meta_sgd.rule,
    "joint": joint.rule,
    "protonet": protonet.rule,
}
"""Name of the algorithm -> rule at an outer step.

Algorithms without a rule train nothing: none, in_context.
"""

NUMBERS: dict[str, tuple[str, ...]] = {"imaml": imaml.NUMBERS}
"""Names of `Direction.numbers` by algorithm."""
