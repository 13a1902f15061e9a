"""BOIL: the inner loop changes the body and leaves the head alone.

    phi_{k+1}[body] = phi_k[body] - alpha g(phi_k)[body],   phi_{k+1}[head] = theta[head]
    g = dL_query(phi_K) / dtheta

Oh, Yoo, Kim, Yun, "BOIL: Towards Representation Change for Few-shot Learning", 2021 (arXiv 2008.08882),
section 3: MAML with an inner rate of zero on the head, which is meta-learned (head_init=learned). The rates
of setup.py say so; evaluation adapts alike. Cost per task: that of MAML, 3 K + 3 passes; with
`--first_order_steps` that of FOMAML.
"""

from __future__ import annotations

from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.task_gradient import Rule


def rule(setup: Setup, outer_step: int) -> Rule:
    return setup.unrolled(outer_step)
