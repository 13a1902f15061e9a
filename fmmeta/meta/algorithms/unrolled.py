"""MAML and what differs from it in a detail: the query gradient at phi_K, taken back through the inner loop.

    phi_{k+1} = phi_k - alpha g(phi_k)                                          k = 0 .. K-1
    g = (I - alpha H(phi_0)) ... (I - alpha H(phi_{K-1})) grad L_query(phi_K)   H: Hessian of the support loss

The code is second_order/unroll.py: the backward recursion, with differences of gradients for H (Fallah et al.
2020). Nothing but first-order passes is needed, so it works where autograd cannot differentiate twice: under
ZeRO 3, in pipelines, with flash attention.

FOMAML      g = grad L_query(phi_K): without second derivatives. Finn, Abbeel, Levine, "Model-Agnostic
            Meta-Learning", 2017 (arXiv 1703.03400), section 5.2. Cost per task: K + 1 forward and backward
            passes, no memory beyond theta and the sum of directions.
MAML        exact. The same paper, equation 1. Cost per task: 3 K + 3 passes (K inner steps, 1 query gradient,
            2 K differences, 2 for the probe), K - 1 shards of trajectory and 5 of working memory.
            `--first_order_steps` begins with FOMAML (derivative-order annealing, Antoniou et al. 2019,
            section 4), here and below.
BOIL        phi_{k+1}[head] = theta[head]: the inner loop changes the body, and the head is meta-learned
            (head_init=learned). Oh, Yoo, Kim, Yun, "BOIL: Towards Representation Change for Few-shot
            Learning", 2021 (arXiv 2008.08882), section 3. Cost as MAML.
Proto-MAML  the head starts as a nearest-mean classifier over the support set: w_c = 2 mu_c, b_c = -|mu_c|^2.
            Triantafillou et al., "Meta-Dataset", 2020 (arXiv 1903.03096), section 3.
            `--prototype_gradient` lets the gradient flow through the means as in the paper; without it they
            are constants. `--first_order_steps` as large as the run makes it fo-Proto-MAML. Cost as MAML, and
            a forward of the support set for the means, one pass more with `--prototype_gradient`.
Meta-SGD    alpha is a vector like theta and learned: dL/dalpha = - sum_k v_{k+1} * g(phi_k), with v_{k+1} =
            dL_query/dphi_{k+1}, which the backward recursion has anyway. Li, Zhou, Chen, Li, "Meta-SGD:
            Learning to Learn Quickly for Few-Shot Learning", 2017 (arXiv 1707.09835), section 3.2 (there with
            one inner step). Cost as MAML; K shards more of trajectory (the gradients g(phi_k)), one for
            alpha, one for its sum, two for its moments. The rates are exported as model/inner_lr.safetensors.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from fmmeta.config.algorithms import AlgorithmSpec
from fmmeta.config.settings import Config
from fmmeta.meta import costs, reference
from fmmeta.meta.algorithms.setup import Setup
from fmmeta.meta.costs import Passes
from fmmeta.meta.second_order.unroll import FINAL_ONLY, Unrolled


def rule(setup: Setup, outer_step: int, order: int = 2) -> Unrolled:
    """The meta-gradient through the inner loop at an outer step; of first order in the first_order_steps."""
    config = setup.config
    if outer_step < config.first_order_steps:
        order = 1
    gib = config.trajectory_memory_gib
    budget = 2**62 if gib is None else int(gib * 2**30)
    weights = step_loss_weights(config.inner_steps, outer_step, config.multi_step_loss_steps)
    return Unrolled(setup.inner, order, weights, setup.hvp, budget)


def step_loss_weights(inner_steps: int, outer_step: int, multi_step_loss_steps: int) -> tuple[float, ...]:
    """Weights of the query loss at phi_1 .. phi_K: 1/K each at outer step 0, all on phi_K from
    `multi_step_loss_steps` on.

    Linear in between (Antoniou et al. 2019, section 4, "multi-step loss optimization": annealed towards the
    last step).
    """
    if outer_step >= multi_step_loss_steps:
        return FINAL_ONLY
    early = (1 - outer_step / multi_step_loss_steps) / inner_steps
    return (*[early] * (inner_steps - 1), 1 - early * (inner_steps - 1))


def query_passes(config: Config) -> int:
    """One, or one after every inner step with a multi-step loss."""
    return config.inner_steps if config.multi_step_loss_steps else 1


def first_order_passes(config: Config, forwards: int) -> Passes:
    return Passes(config.inner_steps + int(config.prototype_gradient), query_passes(config), forwards)


def passes(config: Config, forwards: int) -> Passes:
    k, every = config.inner_steps, query_passes(config)
    return Passes(3 * k + 2 + int(config.prototype_gradient), every, forwards, 0, 2 * k + 2 + every)


def adds_directly(config: Config) -> bool:
    """FOMAML without extras; tensor ranks do not agree on what is finite."""
    return (
        config.inner_lr_learned == "no"
        and not config.multi_step_loss_steps
        and not config.prototype_gradient
        and config.tensor_parallel_size == 1
    )


def rates_per_element(config: Config) -> Iterator[str]:
    if config.inner_lr_learned != "element":
        yield (
            f"inner_lr_learned={config.inner_lr_learned} contradicts algorithm={config.algorithm}, which"
            " learns every element's; leave it out"
        )


FOMAML = AlgorithmSpec(
    "fomaml",
    partial(rule, order=1),
    partial(reference.unrolled, order=1),
    multi_task="query",
    supports=frozenset({"multi_step_loss_steps", "prototype_gradient", "inner_lr_learned", "offload_outer"}),
    passes=first_order_passes,
    adds_directly=adds_directly,
)
MAML = AlgorithmSpec(
    "maml",
    rule,
    reference.unrolled,
    order=2,
    supports=(FOMAML.supports - {"offload_outer"})
    | {"first_order_steps", "check_meta_gradient", "trajectory_memory_gib"},
    passes=passes,
    work_shards=costs.WORK,
)
BOIL = replace(
    MAML,
    name="boil",
    adapts="body",
    task_type="classification",
    defaults={"head_init": "learned"},
    supports=MAML.supports - {"inner_lr_learned"},
)
PROTO_MAML = replace(MAML, name="proto_maml", task_type="classification", defaults={"head_init": "prototype"})
META_SGD = replace(
    MAML, name="meta_sgd", defaults={"inner_lr_learned": "element"}, conflicts=rates_per_element
)
