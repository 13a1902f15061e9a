"""First-order MAML: the query gradient at phi, taken as the gradient at theta.

    g = grad L_query(phi_K),  phi_K = K inner steps from theta

Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning", 2017 (arXiv 1703.03400), section 5.2: MAML without the
second derivatives. Cost per task: K + 1 forward and backward passes, no memory beyond theta and the sum of
directions.
"""

from __future__ import annotations

from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.task_gradient import Rule


def rule(setup: Setup, outer_step: int) -> Rule:
    return setup.unrolled(outer_step, order=1)
