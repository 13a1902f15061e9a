"""The oracle: the same mathematics in one process of plain PyTorch, written for reading and not for speed.

Autograd differentiates the inner loop as it stands, twice where the algorithm is of second order. No shards,
no micro-batches, no padding (each row goes through the model by itself), no finite differences, no shared
code with the workers, rules or outer step that are tested against it. bf16: a bf16 copy computes, fp32
masters are updated.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fmmeta.config.algorithms import find, find_inner, find_outer
from fmmeta.config.settings import Config
from fmmeta.learners.base import Learner
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.classification import Classifier
from fmmeta.tasks.batching import IGNORE, Example, MicroBatch, map_tensors
from fmmeta.tasks.sources.base import EpisodeRows

Weights = dict[str, Tensor]  # by parameter name


@dataclass(frozen=True)
class Reference:
    """theta after every outer step, and learned rates at the end."""

    thetas: list[Weights]
    rates: Weights


@dataclass
class Memory:
    """Moments of the inner optimizer, and its number of steps."""

    first: Weights
    second: Weights
    count: int = 0
    own: dict[str, Weights] = field(default_factory=dict)  # state of an optimizer of the user, by parameter


@dataclass(frozen=True)
class ReferenceTask:
    """The input of an algorithm's reference: a task, and theta. The model is not changed."""

    learner: Any
    theta: Weights
    episode: EpisodeRows
    config: Config
    bf16: bool
    rates: Weights
    outer_step: int


Gradients = tuple[Weights, Weights]  # of theta, of learned rates


def reference_run(
    learner: Any,
    steps: Sequence[Sequence[EpisodeRows]],
    config: Config,
    bf16: bool = False,
    versions: Sequence[Sequence[int]] | None = None,
) -> Reference:
    """Meta-train a copy of `learner` on the given episodes, a list per outer step.

    versions: for each episode the number of updates of the theta that its task begins with, at most that of
    its outer step; default: the newest.
    """
    from transformers import get_scheduler

    theta = {
        name: param.detach().clone().requires_grad_()
        for name, param in learner.named_parameters()
        if param.requires_grad
    }
    head = learner.head_names if config.head_init != "learned" and not config.joint_head else ()
    per_task = {*head, *learner.inner_only}
    meta_params = {name: param for name, param in theta.items() if name not in per_task}
    rates = starting_rates(learner, theta, config)
    optimizer = outer_optimizer(meta_params, rates, config)
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup, config.outer_steps)
    thetas = []
    history: list[tuple[Weights, Weights]] = []  # theta and rates of every version
    for outer_step, episodes in enumerate(steps):
        history.append((copies_of(theta), copies_of(rates)))
        begun = versions[outer_step] if versions else [outer_step] * len(episodes)
        tasks = []
        for episode, version in zip(episodes, begun, strict=True):
            start, alpha = history[version]
            tasks.append(reference_gradient(learner, start, episode, config, bf16, alpha, version))
        if tasks:
            gradients, rate_gradients = zip(*tasks, strict=True)
            mean = {name: g for name, g in mean_of(gradients).items() if name in meta_params}
            of_rates = mean_of(rate_gradients)
        else:
            mean, of_rates = {}, {}  # no finite task: theta is unchanged, the schedule continues
        if mean:
            norm = torch.stack([g.double().norm() for g in mean.values()]).norm()
            clip = config.max_grad_norm / norm if 0 < config.max_grad_norm < norm else 1.0
            for name, param in meta_params.items():
                param.grad = mean[name] * clip
            for name, rate in rates.items():
                rate.grad = of_rates.get(name)
            optimizer.step()
        scheduler.step()
        thetas.append({name: param.detach().clone() for name, param in theta.items()})
    return Reference(thetas, {name: rate.detach() for name, rate in rates.items()})


def copies_of(table: Weights) -> Weights:
    """Separate values; parameters that share a tensor, as those of a layer share rates, still do."""
    copies = {id(value): value.detach().clone() for value in table.values()}
    return {name: copies[id(value)].requires_grad_(value.requires_grad) for name, value in table.items()}


def mean_of(tables: Sequence[Weights]) -> Weights:
    return {name: torch.stack([table[name] for table in tables]).mean(0) for name in tables[0]}


def outer_optimizer(meta_params: Weights, rates: Weights, config: Config) -> torch.optim.Optimizer:
    learned = {id(rate): rate for rate in rates.values() if rate.requires_grad}  # each once
    power = 1.0 if config.outer_optimizer in ("sgd", "nesterov") else 0.5
    tasks = config.meta_batch_size * config.meta_accumulation_steps
    scale = (tasks / (config.base_meta_batch_size or tasks)) ** power
    lr, params = config.outer_lr * scale, meta_params.values()
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
        {"params": list(learned.values()), "weight_decay": 0.0, "lr": config.inner_lr_outer_lr * scale},
    ]
    if config.outer_optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=lr, eps=config.adam_epsilon)
    if config.outer_optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr)
    assert config.weight_decay == 0, "torch decays through the moments, fmmeta does not"
    spec = find_outer(config.outer_optimizer)
    given = spec.torch_class
    make = getattr(torch.optim, given) if isinstance(given, str) else given
    return make(
        groups, lr=lr, **{name: getattr(config, key) for name, key in spec.options.items()}, **spec.fixed
    )


def starting_rates(learner: Any, names: Iterable[str], config: Config) -> Weights:
    """By parameter: one rate per inner step [K], or per element (Meta-SGD).

    Parameters of a layer share theirs (LSLR).
    """
    rates, layers = {}, {}
    patterns = [item.rsplit("=", 1) for item in config.inner_lr_groups]
    for name in names:
        param, head = learner.get_parameter(name), name in learner.head_names
        layer = "head" if head else layer_name(name)
        factor = next((float(f) for pattern, f in patterns if fnmatchcase(layer, pattern)), 1.0)
        if name in learner.outer_only:
            by_element = config.inner_lr_learned == "element"
            rates[name] = torch.zeros(param.shape if by_element else [config.inner_steps], dtype=param.dtype)
        elif config.inner_lr_learned == "element":
            rates[name] = torch.full_like(param, config.inner_lr * factor).detach().requires_grad_()
        else:
            steps = torch.tensor([config.inner_lr * factor] * config.inner_steps, dtype=param.dtype)
            rates[name] = layers.setdefault(layer, steps.requires_grad_(config.inner_lr_learned == "layer"))
    return rates


def layer_name(name: str) -> str:
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


def reference_gradient(
    learner: Any,
    theta: Weights,
    episode: EpisodeRows,
    config: Config,
    bf16: bool,
    rates: Weights | None = None,
    outer_step: int = 0,
) -> Gradients:
    """The meta-gradient of one task, and that of the rates."""
    rates = starting_rates(learner, theta, config) if rates is None else rates
    reference = find(config.algorithm).reference
    assert reference is not None, f"{config.algorithm} has no reference"
    return reference(ReferenceTask(learner, theta, episode, config, bf16, rates, outer_step))


def joint(task: ReferenceTask) -> Gradients:
    """The mean gradient of both sets, over the classes of all tasks."""
    support, query = (
        set_gradient(task.learner, task.theta, rows, task.bf16, classes=len(task.episode.classes))
        for rows in (task.episode.support, task.episode.query)
    )
    return {name: (support[name] + query[name]) / 2 for name in task.theta}, {}


def in_prompt(task: ReferenceTask) -> Gradients:
    """MetaICL: the gradient of the query loss at theta, with the support set before each query.

    A prompt that is longer than the model's positions loses its first pairs. With loss_on_support a pair goes
    from the front to the back after each query, and answers after the first pair have labels.
    """
    config, rows = task.learner.hf.config, []
    begin, support = config.bos_token_id, [*task.episode.support]
    for query in task.episode.query:
        starts = query.input_ids[0] == begin
        pairs = [
            [*zip(row.input_ids, row.token_labels, strict=True)][row.input_ids[0] == begin :]
            for row in (*support, query)
        ]
        while starts + sum(map(len, pairs)) > config.max_position_embeddings:
            pairs.pop(0)
        ids, labels = [begin] * starts, [IGNORE] * starts
        for place, pair in enumerate(pairs, 1):
            learned = place == len(pairs) or (task.config.loss_on_support and place > 1)
            ids += [token for token, _ in pair]
            labels += [label if learned else IGNORE for _, label in pair]
        rows.append(Example(ids, labels))
        if task.config.loss_on_support:
            support.append(support.pop(0))
    return set_gradient(task.learner, task.theta, rows, task.bf16), {}


def displacement(task: ReferenceTask) -> Gradients:
    """Reptile: theta - phi_K."""
    phis = inner_loop(task, task.theta, order=1)
    return {name: (theta - phis[-1][name]).detach() for name, theta in task.theta.items()}, {}


def unrolled(
    task: ReferenceTask, order: int = 2, steps: int | None = None, through_means: bool | None = None
) -> Gradients:
    """The gradient of the query loss at phi_K, or of its weighted sum over steps, with respect to theta.

    The weights of the sum are equal at first, and all on the last step in the end (MAML++).
    """
    config, steps = task.config, task.config.inner_steps if steps is None else steps
    if task.outer_step < config.first_order_steps:
        order = 1
    leaf = {name: value.detach().clone().requires_grad_() for name, value in task.theta.items()}
    phis = inner_loop(task, leaf, order, steps, through_means)
    left = max(0.0, 1 - task.outer_step / config.multi_step_loss_steps) if config.multi_step_loss_steps else 0
    early = [left / steps] * (steps - 1) if steps else []
    weights = [*early, 1 - sum(early)]
    losses = [
        weight * set_loss(task.learner, phi, task.episode.query, task.bf16, len(task.episode.classes))
        for weight, phi in zip(weights, phis[-len(weights) :], strict=True)
        if weight
    ]
    learned = {name: rate for name, rate in task.rates.items() if rate.requires_grad}
    inputs = [*leaf.values(), *learned.values()]
    found = torch.autograd.grad(torch.stack(losses).sum(), inputs, materialize_grads=True)
    return dict(zip(leaf, found, strict=False)), dict(zip(learned, found[len(leaf) :], strict=True))


def online(task: ReferenceTask) -> Gradients:
    """The gradient of the mean over the inner steps of each chunk's loss before the step on it."""
    order = 1 if task.outer_step < task.config.first_order_steps else 2
    leaf = {name: value.detach().clone().requires_grad_() for name, value in task.theta.items()}
    phis = inner_loop(task, leaf, order)
    losses = [
        set_loss(task.learner, phi, rows, task.bf16)
        for phi, rows in zip(phis[:-1], task.episode.samples, strict=True)
    ]
    learned = {name: rate for name, rate in task.rates.items() if rate.requires_grad}
    inputs = [*leaf.values(), *learned.values()]
    found = torch.autograd.grad(torch.stack(losses).mean(), inputs, materialize_grads=True)
    return dict(zip(leaf, found, strict=False)), dict(zip(learned, found[len(leaf) :], strict=True))


def inner_loop(
    task: ReferenceTask,
    theta: Weights,
    order: int,
    steps: int | None = None,
    through_means: bool | None = None,
    proximal: float = 0.0,
) -> list[Weights]:
    """phi_0 to phi_K from `theta`, with their graph. proximal: weight of |phi - phi_0|^2 / 2."""
    config, rates, zeros = task.config, task.rates, {n: torch.zeros_like(v) for n, v in theta.items()}
    memory = Memory(zeros, zeros)
    phi = phi0 = initial_weights(task, theta, through_means)
    phis, steps = [phi], config.inner_steps if steps is None else steps
    last = steps if config.truncate_steps is None else config.truncate_steps
    for k in range(steps):
        of_step = order if k >= steps - last else 1
        rows, classes = support_of_step(task, k), len(task.episode.classes)
        g = set_gradient(task.learner, phi, rows, task.bf16, of_step == 2, classes)
        if proximal:
            g = {name: (g[name] + proximal * (phi[name] - phi0[name])).detach() for name in phi}
        rate = rates if config.inner_lr_learned == "element" else {name: rates[name][k] for name in phi}
        if config.inner_max_grad_norm:
            norm = flat(g[name] for name in phi if rate[name].any()).norm()
            g = {name: g[name] * (config.inner_max_grad_norm / norm).clamp(max=1.0) for name in phi}
        u = inner_update(g, phi, memory, config, of_step)
        phi = {name: phi[name] - rate[name] * u[name] for name in phi}
        phis.append(phi)
    return phis


def support_of_step(task: ReferenceTask, k: int) -> Sequence[Example]:
    """The support rows of inner step k; with support_batch_size part of a shuffled pass over all of them."""
    if task.episode.samples:
        return task.episode.samples[k]
    rows, size = task.episode.support, task.config.support_batch_size
    if size == 0 or size >= len(rows):
        return rows
    parts = math.ceil(len(rows) / size)
    order = np.random.default_rng([*task.episode.task.seed, k // parts]).permutation(len(rows))
    begin, end = (len(rows) * (k % parts + i) // parts for i in (0, 1))
    return [rows[index] for index in order[begin:end]]


def inner_update(gradient: Weights, phi: Weights, memory: Memory, config: Config, order: int = 1) -> Weights:
    """u in phi <- phi - alpha u, with its graph at order 2. The moments in `memory` are replaced.

    Where all gradients so far were zero, AdamW's u is a constant 0 before decay.
    """
    memory.count += 1
    if config.inner_optimizer == "momentum":
        memory.first = {name: config.inner_momentum * memory.first[name] + g for name, g in gradient.items()}
        return memory.first
    if ":" in config.inner_optimizer:
        spec, grads = find_inner(config.inner_optimizer), {name: g.detach() for name, g in gradient.items()}
        for name, g in grads.items():
            memory.own.setdefault(name, {key: torch.zeros_like(g) for key in spec.state_names})
        return {
            name: spec.direction(g, phi[name].detach(), memory.own[name], memory.count)
            for name, g in grads.items()
        }
    if config.inner_optimizer == "adamw":
        b1, b2, t = 0.9, 0.999, memory.count
        memory.first = {name: b1 * memory.first[name] + (1 - b1) * g for name, g in gradient.items()}
        memory.second = {name: b2 * memory.second[name] + (1 - b2) * g * g for name, g in gradient.items()}
        u = {}
        for name, s in memory.second.items():
            root = torch.where(s == 0, 1.0, s / (1 - b2**t)).sqrt()
            step = memory.first[name] / (1 - b1**t) / (root + config.inner_epsilon)
            decayed = phi[name] if order == 2 else phi[name].detach()
            u[name] = torch.where(s == 0, 0.0, step) + config.inner_weight_decay * decayed
        return u
    return gradient


def initial_weights(task: ReferenceTask, theta: Weights, through_means: bool | None = None) -> Weights:
    """phi_0: theta, with a head of class means where `head_init` is "prototype".

    through_means: gradients flow through the means; None: as `prototype_gradient` is set.
    """
    learner, config = task.learner, task.config
    phi = {name: value.clone() for name, value in theta.items()}  # a head of means is no path to the body
    if config.head_init == "prototype" and learner.head_names:
        rows = task.episode.support
        features = torch.cat([forward(learner, theta, row, task.bf16)[0] for row in rows])
        labels = torch.tensor([row.labels for row in rows])
        means = torch.stack(  # 0 for classes of other episodes
            [features[labels == c].mean(0).nan_to_num() for c in range(config.most_classes)]
        )
        if not (config.prototype_gradient if through_means is None else through_means):
            means = means.detach()
        for name, value in zip(learner.head_names, (2 * means, -(means**2).sum(1)), strict=False):
            phi[name] = value + 0 * theta[name]
    return phi


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
    found = torch.autograd.grad(
        set_loss(learner, weights, rows, bf16, classes),
        list(weights.values()),
        create_graph=create_graph,
        materialize_grads=True,
    )
    return dict(zip(weights, found, strict=True))


def set_loss(learner: Any, weights: Weights, rows: Sequence[Example], bf16: bool, classes: int = 0) -> Tensor:
    """Mean over rows, or over label tokens; of other learners over what their losses are sums of.

    Row by row, so that bf16 gradients are added in fp32. `classes`: that a row may have; 0: those of the set,
    since each of an episode's classes has a row in each of its sets.
    """
    kind = type(learner)
    plain = kind.losses in (Classifier.losses, CausalLearner.losses)
    if not plain or kind.collate.__func__ is not Learner.collate.__func__:
        found = [own_loss(learner, weights, row, bf16, classes) for row in rows]
        return torch.stack(found).sum() / sum(row.label_tokens for row in rows)
    known = classes or 1 + max((row.labels for row in rows if isinstance(row.labels, int)), default=0)
    total = sum(1 if isinstance(row.labels, int) else sum(x != IGNORE for x in row.labels) for row in rows)
    losses = []
    for row in rows:
        found = forward(learner, weights, row, bf16)
        if isinstance(row.labels, int):
            logits, labels = found[1][:, :known], torch.tensor([row.labels])
        else:
            logits, labels = found[0, :-1], torch.tensor(row.labels)[1:]
        wanted = labels != IGNORE
        loss = learner.own_loss or partial(F.cross_entropy, reduction="none")
        losses.append(loss(logits[wanted], labels[wanted]).sum())
    return torch.stack(losses).sum() / total


def own_loss(learner: Any, weights: Weights, row: Example, bf16: bool, classes: int) -> Tensor:
    """The loss of a row alone, by the learner that reads rows."""
    inputs, targets = learner.collate([row], 0)
    batch = MicroBatch(inputs, {**targets, "classes": torch.tensor([classes])}, torch.ones(1))
    return learner.losses(outputs_of(learner, weights, inputs, bf16), batch).loss.sum()


def forward(learner: Any, weights: Weights, row: Example, bf16: bool) -> Any:
    """The outputs of the model for tokens; see `outputs_of`."""
    ids = torch.tensor([list(row.input_ids)])
    return outputs_of(learner, weights, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, bf16)


def outputs_of(learner: Any, weights: Weights, inputs: dict[str, Any], bf16: bool) -> Any:
    """The outputs of the model with these weights, differentiable twice."""
    if bf16:
        frozen = {name: p for name, p in learner.named_parameters() if name not in weights}
        weights = {name: value.bfloat16() for name, value in {**weights, **frozen}.items()}
    with sdpa_kernel(SDPBackend.MATH):
        found = torch.func.functional_call(learner, weights, (), inputs)
    return map_tensors(found, Tensor.float) if bf16 else found


def implicit(task: ReferenceTask) -> Gradients:
    """iMAML: (I + H / weight)^-1 grad L_query at the end of a proximal inner loop, by conjugate
    gradients in which autograd multiplies by the Hessian.
    """
    learner, episode, config, bf16 = task.learner, task.episode, task.config, task.bf16
    leaf = {name: value.detach().clone().requires_grad_() for name, value in task.theta.items()}
    phis = inner_loop(task, leaf, order=1, proximal=config.proximal_weight)
    phi = {name: value.detach().requires_grad_() for name, value in phis[-1].items()}
    weights = list(phi.values())
    classes = len(episode.classes)
    loss = set_loss(learner, phi, episode.support, bf16, classes)
    gradient = flat(torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True))
    residual = flat(set_gradient(learner, phi, episode.query, bf16, classes=classes).values())
    solution, search = torch.zeros_like(residual), residual
    for _ in range(config.cg_steps):
        product = torch.autograd.grad(gradient @ search, weights, retain_graph=True, materialize_grads=True)
        image = search + flat(product) / config.proximal_weight
        size = residual @ residual
        step = size / (search @ image)
        solution, residual = solution + step * search, residual - step * image
        search = residual + residual @ residual / size * search
    start = flat(phis[0].values())
    back = torch.autograd.grad(start @ solution, list(leaf.values()), materialize_grads=True)
    return dict(zip(leaf, back, strict=True)), {}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
