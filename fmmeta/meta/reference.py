"""The oracle: the same mathematics in one process of plain PyTorch, written for reading and not for speed.

Autograd differentiates the inner loop as it stands, twice where the algorithm is of second order. No flat
buffers, no micro-batches, no padding (each row goes through the model by itself), no finite differences, no
shared code with the workers, rules or outer step that are tested against it. bf16: a bf16 copy computes, fp32
masters are updated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import IGNORE, Example
from fmmeta.tasks.sources.base import EpisodeRows

Weights = dict[str, Tensor]


@dataclass
class Reference:
    """theta after every outer step (by parameter name), the unclipped meta-gradient of each, and learned
    rates at the end.
    """

    thetas: list[Weights]
    meta_grads: list[Weights]
    rates: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ReferenceTask:
    """What an algorithm's reference gets: a task, and theta by parameter name. The model is not changed."""

    learner: Any
    theta: Weights
    episode: EpisodeRows
    config: Config
    bf16: bool
    rates: dict[str, Tensor]
    outer_step: int
    memory: "Memory"


@dataclass
class Memory:
    """Adam's moments of the inner loop, by name, and its number of steps."""

    first: Weights
    second: Weights
    count: int = 0


Gradients = tuple[Weights, Weights, Memory]  # of theta, of learned rates; inner moments afterwards


def reference_run(
    learner: Any, steps: Sequence[Sequence[EpisodeRows]], config: Config, bf16: bool = False
) -> Reference:
    """Meta-train a copy of `learner` on the given episodes, a list per outer step."""
    from transformers import get_scheduler

    theta = nn.ParameterDict()  # keys may not hold dots
    names = [name for name, param in learner.named_parameters() if param.requires_grad]
    for name in names:
        theta[name.replace(".", "/")] = nn.Parameter(learner.get_parameter(name).detach().clone())
    per_task = learner.head_names if config.head_init != "learned" and not config.joint_head else ()
    meta_params = {name: theta[name.replace(".", "/")] for name in names if name not in per_task}
    rates = starting_rates(learner, names, config)
    optimizer = outer_optimizer(meta_params, rates, config)
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, config.outer_steps)
    result, memory = Reference([], []), None
    due: list[tuple[Weights, Weights]] = []  # mean meta-gradients that have not moved theta yet
    for outer_step, episodes in enumerate(steps):
        start = {name: theta[name.replace(".", "/")].detach() for name in names}
        told = [
            direction(learner, start, episode, config, bf16, rates, outer_step, memory)
            for episode in episodes
        ]
        if told:
            mean = {name: torch.stack([d[name] for d, *_ in told]).mean(0) for name in meta_params}
            result.meta_grads.append({name: g.clone() for name, g in mean.items()})
            due.append(
                (
                    mean,
                    {
                        n: torch.stack([r[n] for _, r, _ in told]).mean(0)
                        for n in rates
                        if rates[n].requires_grad
                    },
                )
            )
            if config.inner_optimizer_state == "kept":
                memory = mean_memory([m for *_, m in told])
        else:
            due.append(({}, {}))  # no task counts: theta is unchanged, the schedule continues
        while len(due) > (0 if outer_step + 1 == len(steps) else config.outer_delay):
            mean, of_rates = due.pop(0)
            if mean:
                clip(mean, config.max_grad_norm)
                for name, param in meta_params.items():
                    param.grad = mean[name]
                for name, rate in rates.items():
                    rate.grad = of_rates.get(name)
                optimizer.step()
            scheduler.step()
        result.thetas.append({name: theta[name.replace(".", "/")].detach().clone() for name in names})
    result.rates = {name: rate.detach() for name, rate in rates.items()}
    return result


def clip(gradient: Weights, most: float) -> None:
    """To a norm over the whole model, in place; 0: leave it."""
    norm = torch.stack([g.double().norm() for g in gradient.values()]).norm()
    if most and norm > most:
        for g in gradient.values():
            g.mul_(most / norm)


def outer_optimizer(
    meta_params: dict[str, nn.Parameter], rates: Weights, config: Config
) -> torch.optim.Optimizer:
    decayed = [p for p in meta_params.values() if p.ndim > 1]
    rest = [p for p in meta_params.values() if p.ndim <= 1]
    lr = config.outer_lr
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    if any(rate.requires_grad for rate in rates.values()):
        groups.append(
            {
                "params": list({id(rate): rate for rate in rates.values()}.values()),
                "weight_decay": 0.0,
                "lr": config.inner_lr_outer_lr,
            }
        )
    if config.outer_optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=lr, eps=config.adam_epsilon)
    if config.outer_optimizer == "nesterov":
        assert config.weight_decay == 0, "torch decays through the momentum, fmmeta does not"
        return torch.optim.SGD(groups, lr=lr, momentum=config.outer_momentum, nesterov=True)
    return torch.optim.SGD(groups, lr=lr)


def starting_rates(learner: Any, names: Sequence[str], config: Config) -> Weights:
    """By parameter: one rate per inner step [K, 1, ...], or per element (Meta-SGD).

    Shared by the parameters of a layer (LSLR).
    """
    rates: Weights = {}
    learned, layers = config.inner_lr_learned, {}
    for name in names:
        param, head = learner.get_parameter(name), name in learner.head_names
        layer = "head" if head else layer_name(name)
        factor = next(
            (
                float(f)
                for p, f in (item.rsplit("=", 1) for item in config.inner_lr_groups)
                if fnmatchcase(layer, p)
            ),
            1.0,
        )
        adapts = find(config.algorithm).adapts
        if adapts != "all":
            factor = float(head == (adapts == "head"))
        if learned == "element":
            rates[name] = torch.full_like(param, config.inner_lr * factor).detach().requires_grad_()
            continue
        if layer not in layers:
            shape = {
                "constant": lambda d: 1.0,
                "linear": lambda d: 1 - d,
                "cosine": lambda d: (1 + math.cos(math.pi * d)) / 2,
            }
            steps = [
                config.inner_lr * factor * shape[config.inner_lr_schedule](k / config.inner_steps)
                for k in range(config.inner_steps)
            ]
            layers[layer] = torch.tensor(steps, dtype=param.dtype).requires_grad_(learned == "layer")
        rates[name] = layers[layer]
    return rates


def layer_name(name: str) -> str:
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


def direction(
    learner: Any,
    theta: Weights,
    episode: EpisodeRows,
    config: Config,
    bf16: bool,
    rates: Weights | None = None,
    outer_step: int = 0,
    memory: Memory | None = None,
) -> Gradients:
    """The meta-gradient of one task, that of the rates, and the inner optimizer's moments afterwards."""
    rates = starting_rates(learner, list(theta), config) if rates is None else rates
    memory = memory or Memory(zeros(theta), zeros(theta))
    reference = find(config.algorithm).reference
    assert reference is not None, f"{config.algorithm} has no reference"
    return reference(ReferenceTask(learner, theta, episode, config, bf16, rates, outer_step, memory))


def joint(task: ReferenceTask) -> Gradients:
    """The mean gradient of both sets, over the classes of all tasks."""
    theta, episode = task.theta, task.episode
    sums = [
        set_gradient(task.learner, theta, rows, task.bf16, classes=len(episode.classes))
        for rows in (episode.support, episode.query)
    ]
    return {name: (sums[0][name] + sums[1][name]) / 2 for name in theta}, {}, task.memory


def displacement(task: ReferenceTask) -> Gradients:
    """Reptile: theta - phi_K."""
    phi, _, memory = inner_loop(task, task.theta, order=1)
    return {name: (task.theta[name] - phi[name]).detach() for name in phi}, {}, memory


def unrolled(
    task: ReferenceTask, order: int = 2, steps: int | None = None, through_means: bool | None = None
) -> Gradients:
    """The gradient of the query loss at phi_K, or of its weighted sum over steps, with respect to theta."""
    if task.outer_step < task.config.first_order_steps:
        order = 1
    leaf = {name: value.detach().clone().requires_grad_() for name, value in task.theta.items()}
    _, loss, memory = inner_loop(task, leaf, order, steps, through_means, asks=True)
    asked = {name: rate for name, rate in task.rates.items() if rate.requires_grad}
    inputs = [*leaf.values(), *asked.values()]
    found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return dict(zip(leaf, found, strict=False)), dict(zip(asked, found[len(leaf) :], strict=True)), memory


def inner_loop(
    task: ReferenceTask,
    leaf: Weights,
    order: int,
    steps: int | None = None,
    through_means: bool | None = None,
    asks: bool = False,
) -> tuple[Weights, Tensor, Memory]:
    """phi_K from `leaf`, with its graph; if `asks` also the query loss, over steps as `counted` says."""
    config, learner, episode, bf16, rates = task.config, task.learner, task.episode, task.bf16, task.rates
    phi = head_start(learner, leaf, episode, config, bf16, through_means)
    memory = Memory(dict(task.memory.first), dict(task.memory.second), task.memory.count)
    loss, counts = torch.zeros(()), counted(config, task.outer_step)
    steps = config.inner_steps if steps is None else steps
    for k in range(steps):
        gradient = set_gradient(learner, phi, episode.support, bf16, create_graph=order == 2)
        u = inner_direction(gradient, phi, memory, config)
        rate = rates if config.inner_lr_learned == "element" else {name: rates[name][k] for name in phi}
        phi = {name: phi[name] - rate[name] * u[name] for name in phi}
        if asks and counts[k]:
            loss = loss + counts[k] * set_loss(learner, phi, episode.query, bf16)
    if asks and steps == 0:
        loss = set_loss(learner, phi, episode.query, bf16)
    return phi, loss, memory


def counted(config: Config, outer_step: int) -> list[float]:
    """Weight of the query loss after each inner step: equal at first, all on the last in the end (MAML++)."""
    left = max(0.0, 1 - outer_step / config.multi_step_loss_steps) if config.multi_step_loss_steps else 0.0
    early = [left / config.inner_steps] * (config.inner_steps - 1) if config.inner_steps else []
    return [*early, 1 - sum(early)]


def inner_direction(gradient: Weights, phi: Weights, memory: Memory, config: Config) -> Weights:
    memory.count += 1
    if config.inner_optimizer == "momentum":
        memory.first = {name: config.inner_momentum * memory.first[name] + g for name, g in gradient.items()}
        return memory.first
    if config.inner_optimizer == "adamw":
        b1, b2, t = config.inner_beta1, config.inner_beta2, memory.count
        memory.first = {
            name: (b1 * memory.first[name] + (1 - b1) * g).detach() for name, g in gradient.items()
        }
        memory.second = {
            name: (b2 * memory.second[name] + (1 - b2) * g * g).detach() for name, g in gradient.items()
        }
        return {
            name: (
                memory.first[name]
                / (1 - b1**t)
                / ((memory.second[name] / (1 - b2**t)).sqrt() + config.inner_epsilon)
                + config.inner_weight_decay * phi[name].detach()
            )
            for name in phi
        }
    return gradient


def mean_memory(memories: Sequence[Memory]) -> Memory:
    first = {name: torch.stack([m.first[name] for m in memories]).mean(0) for name in memories[0].first}
    second = {name: torch.stack([m.second[name] for m in memories]).mean(0) for name in memories[0].second}
    return Memory(first, second, memories[0].count)


def head_start(
    learner: Any,
    theta: Weights,
    episode: EpisodeRows,
    config: Config,
    bf16: bool,
    through_means: bool | None = None,
) -> Weights:
    """phi_0: theta, with a head of class means if asked; the means keep their graph if gradients shall flow
    through them.
    """
    phi = {
        name: value.clone() for name, value in theta.items()
    }  # separate nodes: a head of means is no path to the body
    if config.head_init == "prototype" and learner.head_names:
        means = class_means(learner, theta, episode, config.most_classes, bf16)
        if not (config.prototype_gradient if through_means is None else through_means):
            means = means.detach()
        for name, value in zip(learner.head_names, (2 * means, -(means**2).sum(1)), strict=False):
            phi[name] = value + 0 * theta[name]
    return phi


def zeros(weights: Weights) -> Weights:
    return {name: torch.zeros_like(value) for name, value in weights.items()}


def set_gradient(
    learner: Any,
    weights: Weights,
    rows: Sequence[Example],
    bf16: bool,
    create_graph: bool = False,
    classes: int = 0,
) -> Weights:
    """Gradient of the mean loss over a set."""
    if not create_graph:
        weights = {name: value.detach().requires_grad_() for name, value in weights.items()}
    loss = set_loss(learner, weights, rows, bf16, classes)
    found = torch.autograd.grad(loss, list(weights.values()), create_graph=create_graph, allow_unused=True)
    return {
        name: torch.zeros_like(w) if g is None else g
        for (name, w), g in zip(weights.items(), found, strict=True)
    }


def set_loss(learner: Any, weights: Weights, rows: Sequence[Example], bf16: bool, classes: int = 0) -> Tensor:
    """Mean over rows, or over label tokens.

    Row by row, so that bf16 gradients are added in fp32. `classes`: that a row may have; 0: those of the set,
    since each of an episode's classes has a row in each of its sets.
    """
    total = sum(1 if isinstance(row.labels, int) else sum(x != IGNORE for x in row.labels) for row in rows)
    losses = []
    for row in rows:
        logits = forward(learner, weights, row, bf16)
        logits = logits.float() if bf16 else logits
        if isinstance(row.labels, int):
            known = classes or 1 + max(r.labels for r in rows if isinstance(r.labels, int))
            losses.append(F.cross_entropy(logits[:, :known], torch.tensor([row.labels])))
        else:
            losses.append(
                F.cross_entropy(
                    logits[0, :-1], torch.tensor(row.labels)[1:], ignore_index=IGNORE, reduction="sum"
                )
            )
    return torch.stack(losses).sum() / total


def class_means(learner: Any, weights: Weights, episode: EpisodeRows, classes: int, bf16: bool) -> Tensor:
    """Mean feature of each class over the support set."""
    features = torch.cat([forward(learner, weights, row, bf16, want="features") for row in episode.support])
    features = features.float() if bf16 else features
    labels = torch.tensor([row.labels for row in episode.support])
    means = [features[labels == c].mean(0) for c in range(classes)]
    return torch.stack(
        [torch.zeros_like(mean) if mean.isnan().any() else mean for mean in means]
    )  # classes of other episodes


def forward(learner: Any, weights: Weights, row: Example, bf16: bool, want: str = "logits") -> Tensor:
    """The model with these weights, differentiable twice."""
    ids = torch.tensor([list(row.input_ids)])
    if bf16:
        frozen = {name: p for name, p in learner.named_parameters() if name not in weights}
        weights = {name: value.bfloat16() for name, value in {**weights, **frozen}.items()}
    with sdpa_kernel(SDPBackend.MATH):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return torch.func.functional_call(learner, weights, (), {**inputs, "want": want})


def implicit(task: ReferenceTask) -> Gradients:
    """iMAML: ((1 + damping) I + H / weight)^-1 grad L_query at the end of a proximal inner loop, by conjugate
    gradients in which autograd multiplies by the Hessian.
    """
    learner, episode, config, bf16, rates = task.learner, task.episode, task.config, task.bf16, task.rates
    leaf = {name: value.detach().clone().requires_grad_() for name, value in task.theta.items()}
    began = head_start(learner, leaf, episode, config, bf16)
    phi = phi0 = {name: value.detach() for name, value in began.items()}
    for k in range(config.inner_steps):
        gradient = set_gradient(learner, phi, episode.support, bf16)
        phi = {
            n: phi[n] - rates[n][k] * (gradient[n] + config.proximal_weight * (phi[n] - phi0[n])) for n in phi
        }
    phi = {name: value.detach().requires_grad_() for name, value in phi.items()}
    loss = set_loss(learner, phi, episode.support, bf16)
    gradient = torch.autograd.grad(loss, list(phi.values()), create_graph=True, materialize_grads=True)

    def matrix(v: list[Tensor]) -> list[Tensor]:
        product = torch.autograd.grad(
            gradient, list(phi.values()), v, retain_graph=True, materialize_grads=True
        )
        return [
            (1 + config.cg_damping) * x + h / config.proximal_weight for x, h in zip(v, product, strict=True)
        ]

    residual = list(set_gradient(learner, phi, episode.query, bf16).values())
    solution, search = [torch.zeros_like(r) for r in residual], residual
    for _ in range(config.cg_steps):
        image = matrix(search)
        size = inner_product(residual, residual)
        step = size / inner_product(search, image)
        solution = [x + step * s for x, s in zip(solution, search, strict=True)]
        residual = [r - step * a for r, a in zip(residual, image, strict=True)]
        search = [
            r + inner_product(residual, residual) / size * s for r, s in zip(residual, search, strict=True)
        ]
    back = torch.autograd.grad(list(began.values()), list(leaf.values()), solution, materialize_grads=True)
    return dict(zip(leaf, back, strict=True)), {}, task.memory


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()
