"""MAML, exactly: the gradient of the query loss at phi_K with respect to theta, second derivatives and all.

    g = (I - alpha H(phi_0)) ... (I - alpha H(phi_{K-1})) grad L_query(phi_K)   H: Hessian of the support loss

Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning", 2017 (arXiv 1703.03400), equation 1, by the backward
recursion and the differences of gradients of unroll.py and curvature.py (Fallah et al. 2020). Nothing but
first-order passes is needed, so it works where autograd cannot differentiate twice: under ZeRO 3, in
pipelines, with flash attention. Cost per task: 3 K + 3 forward and backward passes (K inner steps, 1 query
gradient, 2 K differences, 2 for the probe), K - 1 shards of trajectory and 5 of working memory.
`--first_order_steps` begins with FOMAML (derivative-order annealing, Antoniou et al. 2019, section 4).
"""

from __future__ import annotations

from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.task_gradient import Rule


def rule(setup: Setup, outer_step: int) -> Rule:
    return setup.unrolled(outer_step)
