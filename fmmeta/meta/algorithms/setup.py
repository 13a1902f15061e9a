"""From settings to the parts that rules are made of: the inner loop, and meta-gradients through it."""

from fnmatch import fnmatchcase

import torch

from fmmeta.common.errors import UsageError
from fmmeta.config.algorithms import find
from fmmeta.config.fields import shown
from fmmeta.config.settings import Config
from fmmeta.learners.base import loss_of
from fmmeta.meta.algorithms.ttt import OnlineLoop
from fmmeta.meta.classifier_head import HeadInit
from fmmeta.meta.hessian import HvpOptions
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.inner_optimizers import FIXED, HEAD, Layers, Rates, inner_optimizer
from fmmeta.meta.task import Setup
from fmmeta.parallel.costs import second_order_by_autograd
from fmmeta.parallel.workers.base import Worker


def setup(config: Config, worker: Worker, head_names: tuple[str, ...], classes: int, bf16: bool) -> Setup:
    """Build the inner loop that `config` describes for the worker's model. Collective: group."""
    layers = Layers.of(worker, head_names)
    of_layers = [config.inner_lr * factor for factor in layer_factors(config, layers.names)]
    table = torch.tensor([of_layers] * max(1, config.inner_steps), dtype=torch.float64)
    rates = Rates(layers, table, learned=config.inner_lr_learned)
    if config.inner_lr_learned == "element":  # begins with those of the layers
        element = torch.ones(worker.params.numel, device=worker.storage_device)
        rates.scale_(0, element, slice(0, element.numel()))
        rates = Rates(layers, layers.moving.expand(rates.table.shape).clone(), element, "element")
    head = HeadInit(
        config.head_init,
        head_names,
        classes,
        config.prototype_gradient,
        config.joint_head,
        loss_of(config.learner),
    )
    inner = (OnlineLoop if config.learner.ordered else InnerLoop)(
        config.inner_steps,
        rates,
        inner_optimizer(config),
        head,
        config.proximal_weight if "proximal_weight" in find(config.algorithm).supports else 0.0,
        config.inner_max_grad_norm,
    )
    by_autograd = second_order_by_autograd(config, worker.differentiates_twice, rates.only_head)
    return Setup(config, inner, HvpOptions("bf16" if bf16 else "fp32", by_autograd=by_autograd))


def refuse_still_head(config: Config, inner: InnerLoop, worker: Worker) -> None:
    """Raise `UsageError` where the inner loop does not change a head that begins with zeros: it stays so,
    and gives no other weight a gradient.
    """
    head, rates = inner.head, inner.rates
    if head.kind != "zero" or head.reset_to_zero or not head.names:
        return
    moves = HEAD in rates.layers.names and rates.table[:, rates.layers.names.index(HEAD)].any()
    if not moves or head.names[0] in worker.outer_only:
        raise UsageError(
            "head_init=zero: the inner loop does not change the head (inner_parameters="
            f"{shown(config.inner_parameters)}, inner_lr_groups={shown(config.inner_lr_groups)}), and from"
            " zeros nothing is learned; add head, or give --head_init prototype, or --head_init learned with"
            " tasks of as many classes as the model's head has"
        )


def refuse_jumps(config: Config, worker: Worker, hvp: HvpOptions) -> None:
    """Raise `UsageError` for a mixture of experts that would be trained by differences of gradients, unless
    the settings ask for them: they err by as much as 8 % of the distance travelled, where their step changes
    the experts of a token.
    """
    by_default = "second_order" in find(config.algorithm).supports and config.second_order == "auto"
    if worker.routers and by_default and not hvp.by_autograd:
        raise UsageError(
            f"algorithm={config.algorithm} and second_order=auto take differences of gradients here, which"
            " jump where the experts of a token change; use --second_order autograd on whole models (plain,"
            " ZeRO 0 to 2), --algorithm fomaml, or --second_order differences all the same"
        )


def layer_factors(config: Config, names: tuple[str, ...]) -> list[float]:
    """Factors of inner_lr by layer; the first pattern that fits counts.

    Raises `UsageError` for a pattern that fits no layer.
    """
    factors = {name: float(name != FIXED) for name in names}
    for item in reversed(config.inner_lr_groups):
        pattern, _, factor = item.rpartition("=")
        fitting = [name for name in names if name != FIXED and fnmatchcase(name, pattern)]
        if not fitting:
            known = ", ".join(name for name in names if name != FIXED)
            raise UsageError(f"inner_lr_groups={item} fits no layer; the layers are {known}")
        factors |= dict.fromkeys(fitting, float(factor))
    return list(factors.values())
