"""Meta-gradient rules: one file each, one signature, chosen by name.

A rule turns one task into a direction for theta: `direction(worker, theta, episode)` (fmmeta/meta/direction.py). A file has
one function, `rule(setup, outer_step)`: which rule holds at an outer step, since some begin as another.
"""

from __future__ import annotations

from collections.abc import Callable

from fmmeta.meta.algorithms import fomaml, maml, reptile
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.direction import Rule

RULES: dict[str, Callable[[Setup, int], Rule]] = {
    "fomaml": fomaml.rule,
    "maml": maml.rule,
    "reptile": reptile.rule,
}
"""Name of the algorithm -> rule at an outer step."""
