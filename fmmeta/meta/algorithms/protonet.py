"""Prototypical networks, a baseline: the query loss of a nearest-mean classifier over the support set, no inner steps.

    g = d/dtheta L_query,  logits -|f(x) - mu_c|^2,  mu_c the mean feature of class c of the support set

Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", 2017 (arXiv 1703.05175), equations 1 and 2. It is Proto-MAML
with K = 0 and the gradient through the means. Evaluation classifies by the means, after `--inner_steps` of fine-tuning if asked.
Cost per task: 2 forward and backward passes (query, and back through the support set), 2 forwards.
"""

from __future__ import annotations

from dataclasses import replace

from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.direction import Rule
from fmmeta.meta.unroll import Unrolled


def rule(setup: Setup, outer_step: int) -> Rule:
    return Unrolled(replace(setup.inner, steps=0, head=replace(setup.inner.head, through=True)), order=1)
