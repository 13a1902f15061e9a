"""MAML and what differs from it in a detail: the query gradient at phi_K, taken back through the inner loop.

    phi_{k+1} = phi_k - alpha g(phi_k)                                          k = 0 .. K-1
    g = (I - alpha H(phi_0)) ... (I - alpha H(phi_{K-1})) grad L_query(phi_K)   H: Hessian of the support loss

The inner loop and the backward recursion, whose gradient at phi_0 continues through the initial head
(classifier_head.py):

    u_k = u(g(phi_k), phi_k, state_k),   phi_{k+1} = phi_k - alpha_k u_k    for k = 0 .. K-1; then
    v = dL_query/dphi_K, and for k = K-1 .. 0:
        dL/dalpha_k = -v u_k                where rates are learned
        w = du_k/dg (-alpha_k v)            and what follows by the state: inner_optimizers.py
        v <- v + H(phi_k) w                 order 2; at order 1 v is unchanged
        v <- v + c_k dL_query/dphi_k        multi-step loss: the query loss counts at phi_k too, k > 0

`--truncate_steps T`: of order 2 for the last T steps only (Shaban, Cheng, Hatch, Boots, "Truncated
Back-propagation for Bilevel Optimization", 2019, arXiv 1810.10667). u and its derivative are element by
element, so every vector is a rank's shard. H w (hessian.py) is computed by autograd for adapters and heads,
with the graph of one step at a time: memory grows by K shards only. Else it comes from differences of
gradients: the Hessian-free form of Fallah, Mokhtari, Ozdaglar, "On the Convergence Theory of Gradient-Based
Model-Agnostic Meta-Learning Algorithms", 2020 (arXiv 1908.10400), for K steps. Those need first-order passes
only, so that they work where autograd cannot differentiate twice: under ZeRO 3, in pipelines, with flash
attention.

FOMAML      g = grad L_query(phi_K): without second derivatives. Finn, Abbeel, Levine, "Model-Agnostic
            Meta-Learning", 2017 (arXiv 1703.03400), section 5.2. Cost per task: K + 1 forward and backward
            passes, no memory beyond theta and the sum of meta-gradients.
MAML        exact. The same paper, equation 1. Cost per task: 3 K + 3 passes (K inner steps, 1 query gradient,
            2 K differences, 2 for the probe), K - 1 shards of trajectory and 5 of working memory. By autograd
            2 K + 1, of which K compute second derivatives.
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
from fmmeta.meta import reference
from fmmeta.meta.task import TaskResult, TaskRun
from fmmeta.parallel import costs
from fmmeta.parallel.costs import Passes


def unrolled(task: TaskRun, order: int = 2) -> TaskResult:
    """The meta-gradient through the inner loop; of first order in the `first_order_steps`.

    Of order 1 and with nothing else to differentiate it is the query gradient at phi_K. Collective: group.
    """
    config = task.config
    order = 1 if task.outer_step < config.first_order_steps else order
    weights = step_loss_weights(config.inner_steps, task.outer_step, config.multi_step_loss_steps)
    task.adapt(task.trajectory(order, task.inner.steps, any(weights[:-1])))
    return task.backward(task.query, order, step_weights=weights)


def step_loss_weights(inner_steps: int, outer_step: int, multi_step_loss_steps: int) -> tuple[float, ...]:
    """Weights of the query loss at phi_1 .. phi_K: 1/K each at outer step 0, all on phi_K from
    `multi_step_loss_steps` on.

    Linear in between (Antoniou et al. 2019, section 4, "multi-step loss optimization": annealed towards the
    last step).
    """
    if outer_step >= multi_step_loss_steps:
        return ()
    early = (1 - outer_step / multi_step_loss_steps) / inner_steps
    return (*[early] * (inner_steps - 1), 1 - early * (inner_steps - 1))


def passes(config: Config, forwards: int, order: int = 2, by_autograd: bool = False) -> Passes:
    k, through_means = config.inner_steps, int(config.prototype_gradient)
    back = min(k, k if config.truncate_steps is None else config.truncate_steps)
    query = k if config.multi_step_loss_steps else 1  # one after every inner step with a multi-step loss
    if order == 1:
        return Passes(k + through_means, query, forwards)
    if by_autograd:
        return Passes(k + through_means, query, forwards, 0, back + query, back)
    return Passes(k + 2 * back + 2 + through_means, query, forwards, 0, 2 * back + 2 + query)


def adds_directly(config: Config) -> bool:
    """FOMAML without extras."""
    return (
        config.inner_lr_learned == "no" and not config.multi_step_loss_steps and not config.prototype_gradient
    )


def rates_per_element(config: Config) -> Iterator[str]:
    if config.inner_lr_learned != "element":
        yield (
            f"inner_lr_learned={config.inner_lr_learned} contradicts algorithm={config.algorithm}, which"
            " learns every element's; leave it out"
        )


FOMAML = AlgorithmSpec(
    "fomaml",
    partial(unrolled, order=1),
    partial(reference.unrolled, order=1),
    multi_task="query",
    supports=frozenset(
        {
            "inner_lr_learned",
            "inner_parameters",
            "multi_step_loss_steps",
            "offload_outer",
            "outer_parameters",
            "prototype_gradient",
        }
    ),
    passes=partial(passes, order=1),
    adds_directly=adds_directly,
)
MAML = AlgorithmSpec(
    "maml",
    unrolled,
    reference.unrolled,
    order=2,
    multi_task="query",
    supports=(FOMAML.supports - {"offload_outer"})
    | {
        "first_order_steps",
        "check_meta_gradient",
        "trajectory_memory_gib",
        "second_order",
        "truncate_steps",
    },
    passes=passes,
    work_shards=costs.WORK,
)
BOIL = replace(
    MAML,
    name="boil",
    adapts="all except head",
    needs="of_classes",
    defaults={"head_init": "learned"},
    supports=MAML.supports - {"inner_lr_learned", "inner_parameters"},
)
PROTO_MAML = replace(MAML, name="proto_maml", needs="of_classes", defaults={"head_init": "prototype"})
META_SGD = replace(
    MAML, name="meta_sgd", defaults={"inner_lr_learned": "element"}, conflicts=rates_per_element
)
