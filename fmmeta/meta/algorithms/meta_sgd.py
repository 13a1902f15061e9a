"""Meta-SGD: a learned inner rate for every element, initial values and rates trained together.

    phi_{k+1} = phi_k - alpha * g(phi_k), alpha a vector like theta;  dL/dalpha = - sum_k v_{k+1} * g(phi_k)

Li, Zhou, Chen, Li, "Meta-SGD: Learning to Learn Quickly for Few-Shot Learning", 2017 (arXiv 1707.09835),
section 3.2 (there with one inner step). v_{k+1} = dL_query/dphi_{k+1} is what the way back of MAML carries
anyway. Cost per task: that of MAML, 3 K + 3 passes; K shards more of trajectory (the gradients g(phi_k)), one
for alpha, one for its sum, two for its moments. The rates are exported as model/inner_lr.safetensors.
"""

from __future__ import annotations

from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.task_gradient import Rule


def rule(setup: Setup, outer_step: int) -> Rule:
    return setup.unrolled(outer_step)
