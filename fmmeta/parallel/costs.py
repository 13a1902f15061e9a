"""The cost of each algorithm per task: passes over its sets and shards that it stores, counted.

The table of docs/how-to/choose-an-algorithm.md as functions of a Config. Tests count the passes of the real
rules.
"""

from typing import NamedTuple

from fmmeta.common.errors import UsageError
from fmmeta.config.algorithms import find, find_inner, find_outer
from fmmeta.config.settings import Config

WORK = 5  # vectors that a Hessian-vector product and the backward recursion need besides v


class Passes(NamedTuple):
    """Passes of one task: forward and backward, forward only, and whole vectors written to the worker."""

    support: int
    query: int
    support_forwards: int = 0
    query_forwards: int = 0
    writes: int = 0
    second_order: int = 0  # over the support set: of the gradient, and through its graph

    @property
    def training(self) -> int:
        return self.support + self.query + 2 * self.second_order


def rows_of(config: Config) -> tuple[int, int]:
    """Rows of the largest support set, and of a query set; of streams those of a step."""
    if config.learner.ordered:
        return 1, 1
    return config.most_support * config.largest_way, config.num_query * config.largest_way


def trained_rows(config: Config) -> tuple[int, ...]:
    """Rows of each set that goes through the model in training."""
    return rows_of(config)[find(config.algorithm).rows_before_query(config) > 0 :]


def query_tokens(config: Config, tokens: int, most: int) -> int:
    """Tokens of a query where a row has `tokens`, with the rows before it; `most`: positions."""
    return max(tokens, min(most, tokens * (1 + find(config.algorithm).rows_before_query(config))))


def keeps_support(config: Config, data: int) -> bool:
    """Whether one of `data` ranks that share a set's rows may keep the activations of the support set during
    the query set's pass: a micro-batch may have the rows of both.
    """
    return sum(-(-rows // data) for rows in rows_of(config)) <= config.micro_batch_size


def passes(config: Config, data: int = 1, keeps: bool = True, twice: bool = True) -> Passes:
    """The most passes of an outer step: after any `--first_order_steps`, within `--multi_step_loss_steps`.

    data: ranks that share the rows of a set. keeps: whether the worker can defer a backward pass; twice:
    whether it can differentiate twice (parallel/layout.py).
    """
    spec = find(config.algorithm)
    if spec.trains_nothing:
        return Passes(0, 0)
    if spec.frozen_body:
        forwards = not (keeps and keeps_support(config, data))
    else:  # class means, whose features the first inner step reuses if the support set is one micro-batch
        one_batch = -(-rows_of(config)[0] // data) <= config.micro_batch_size
        forwards = config.head_init == "prototype" and not (keeps and config.inner_steps > 0 and one_batch)
    if spec.passes is None:  # as FOMAML
        return Passes(config.inner_steps, 1, int(forwards))
    by_autograd = {"by_autograd": True} if second_order_by_autograd(config, twice) else {}
    return spec.passes(config, int(forwards), **by_autograd)


def second_order_by_autograd(config: Config, whole: bool, only_head: bool = False) -> bool:
    """Whether Hessian-vector products are computed by autograd and not from differences (hessian.py).

    whole: whether each rank runs the whole model and holds its weights in the backward pass. only_head:
    whether nothing but a head moves. Raises `UsageError` where the settings leave none of the two.
    """
    if "second_order" not in find(config.algorithm).supports:
        return False
    twice = whole and not config.compile and config.attn_implementation in (None, "sdpa", "eager")
    asked = config.second_order == "autograd"
    if not twice and (asked or config.inner_optimizer not in ("sgd", "momentum")):
        name = "second_order=autograd" if asked else f"inner_optimizer={config.inner_optimizer}"
        raise UsageError(
            f"{name} with algorithm={config.algorithm} needs ranks that run the whole model and hold its"
            " weights, without --compile and with sdpa or eager attention: ZeRO 3, pipeline stages and tensor"
            " ranks do not; use ZeRO 2, or --second_order differences with --inner_optimizer sgd or momentum"
        )
    by_default = bool(config.lora_r) or only_head or config.learner.make is not None
    return twice and (asked or (config.second_order == "auto" and by_default))


def task_vectors(config: Config) -> int:
    """Vectors for the meta-gradient of a task, next to the sum over tasks.

    One where the rule computes it as a vector, one where it is separate before it is added: to measure the
    noise scale, or until its outer step is known (--max_staleness).
    """
    spec = find(config.algorithm)
    is_separate = config.gradient_noise_scale or config.max_staleness > 0
    return int(is_separate) + int(not (spec.trains_nothing or spec.adds_directly(config)))


class ShardCounts(NamedTuple):
    """Vectors as long as theta that a rank stores, besides theta, the meta-gradient and `task_vectors`."""

    work: int
    trajectory: int  # steps of the inner loop, which --trajectory_memory_gib may send to host memory


def shards(config: Config) -> ShardCounts:
    spec, k, trajectory = find(config.algorithm), config.inner_steps, 0
    inner = config.inner_optimizer
    vectors = {"sgd": 0, "momentum": 1, "adamw": 2}
    states = vectors[inner] if inner in vectors else len(find_inner(inner).state_names)
    work = spec.work_shards + states
    work += config.max_staleness > 0  # the theta with which a task began
    work += 3 * (config.inner_max_grad_norm > 0)  # a gradient, clipped, and phi
    if "trajectory_memory_gib" in spec.supports or config.multi_step_loss_steps:
        kept = k if config.truncate_steps is None or config.multi_step_loss_steps else config.truncate_steps
        of_step = 1 + (states if spec.order > 1 and inner not in ("sgd", "momentum") else 0)
        trajectory = min(k, kept) * of_step
        trajectory -= kept >= k and config.head_init != "prototype"  # phi_0 is theta
    if config.inner_lr_learned != "no" or spec.needs == "ordered":
        trajectory += k  # u of every step
    if config.inner_lr_learned == "element":
        work += 2 + len(find_outer(config.outer_optimizer).moments)  # rates, their gradient, its moments
    return ShardCounts(work, trajectory)
