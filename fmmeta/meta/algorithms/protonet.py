"""Prototypical networks, a baseline: the query loss of a nearest-mean classifier over the support set, no
inner steps.

    g = d/dtheta L_query,  logits -|f(x) - mu_c|^2,  mu_c the mean feature of class c of the support set

Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", 2017 (arXiv 1703.05175), equations 1 and
2. It is Proto-MAML with K = 0 and the gradient through the means, or ANIL without inner steps, whose code it
uses (anil.py): the weights are never written. Evaluation classifies by the means, after `--inner_steps` of
fine-tuning if set. Cost per task: a forward and backward pass of either set, and a forward of the support set
more where a rank may not keep the activations of both (costs.keeps_support); no shards.
"""

from dataclasses import replace
from functools import partial

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.meta import reference
from fmmeta.meta.algorithms.anil import Anil, adds_directly, passes
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.rule import Rule


def rule(setup: Setup, outer_step: int) -> Rule:
    return Anil(
        replace(setup.inner, steps=0, head=replace(setup.inner.head, backprop_through_means=True)),
        1,
        setup.config,
    )


spec = AlgorithmSpec(
    "protonet",
    rule,
    partial(reference.unrolled, order=1, steps=0, through_means=True),
    frozen_body=True,
    task_type="classification",
    defaults={"head_init": "prototype", "inner_steps": 0},
    passes=passes,
    adds_directly=adds_directly,
)
