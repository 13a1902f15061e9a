"""Proto-MAML: MAML whose head starts as a nearest-mean classifier over the support set.

    w_c = 2 mu_c, b_c = -|mu_c|^2;  then MAML

Triantafillou et al., "Meta-Dataset", 2020 (arXiv 1903.03096), section 3. `--prototype_gradient` lets the
gradient flow through the means as in the paper; without it they are constants. `--first_order_steps` as large
as the run makes it the paper's fo-Proto-MAML. Cost per task: MAML's 3 K + 3 passes, a forward of the support
set for the means, one pass more with `--prototype_gradient`.
"""

from __future__ import annotations

from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.task_gradient import Rule


def rule(setup: Setup, outer_step: int) -> Rule:
    return setup.unrolled(outer_step)
