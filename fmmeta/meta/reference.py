"""The oracle: the same mathematics in one process of plain PyTorch, written for reading and not for speed.

No flat buffers, no micro-batches, no padding (each row goes through the model by itself), no shared code with the
workers, rules or outer step that are tested against it. bf16: a bf16 copy computes, fp32 masters are updated.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmmeta.config import Config
from fmmeta.tasks.batch import IGNORE, Example
from fmmeta.tasks.source import Episode

Weights = dict[str, Tensor]


@dataclass
class Reference:
    """theta after every outer step (fp32, by parameter name) and the unclipped meta-gradient of each."""

    thetas: list[Weights]
    meta_grads: list[Weights]


def reference_run(learner: Any, steps: Sequence[Sequence[Episode]], config: Config, bf16: bool = False) -> Reference:
    """Meta-train a copy of `learner` on the given episodes, a list per outer step."""
    from transformers import get_scheduler

    theta = nn.ParameterDict()  # keys may not hold dots
    names = [name for name, param in learner.named_parameters() if param.requires_grad]
    for name in names:
        theta[name.replace(".", "/")] = nn.Parameter(learner.get_parameter(name).detach().clone())
    per_task = learner.head_names if config.head_init != "learned" else ()
    meta_params = {name: theta[name.replace(".", "/")] for name in names if name not in per_task}
    decayed = [p for p in meta_params.values() if p.ndim > 1]
    rest = [p for p in meta_params.values() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    lr = config.outer_lr
    adamw = config.outer_optimizer == "adamw"
    optimizer = torch.optim.AdamW(groups, lr=lr, eps=config.adam_epsilon) if adamw else torch.optim.SGD(groups, lr=lr)
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, config.outer_steps)
    result = Reference([], [])
    for episodes in steps:
        start = {name: theta[name.replace(".", "/")].detach() for name in names}
        if not episodes:  # no task counts: theta stays, the schedule goes on
            scheduler.step()
            result.thetas.append(start)
            continue
        directions = [direction(learner, start, episode, config, bf16) for episode in episodes]
        mean = {name: torch.stack([d[name] for d in directions]).mean(0) for name in meta_params}
        result.meta_grads.append({name: g.clone() for name, g in mean.items()})
        for name, param in meta_params.items():
            param.grad = mean[name]
        if config.max_grad_norm:
            norm = torch.stack([g.double().norm() for g in mean.values()]).norm()
            if norm > config.max_grad_norm:
                for param in meta_params.values():
                    param.grad.mul_(config.max_grad_norm / norm)  # type: ignore[union-attr]
        optimizer.step()
        scheduler.step()
        result.thetas.append({name: theta[name.replace(".", "/")].detach().clone() for name in names})
    return result


def direction(learner: Any, theta: Weights, episode: Episode, config: Config, bf16: bool) -> Weights:
    """FOMAML: the query gradient at phi. Reptile: theta - phi."""
    phi = {name: value.clone() for name, value in theta.items()}
    if config.head_init == "prototype" and learner.head_names:
        means = class_means(learner, phi, episode, config.most_classes, bf16)
        phi[learner.head_names[0]] = 2 * means
        if len(learner.head_names) > 1:
            phi[learner.head_names[1]] = -(means**2).sum(1)
    for _ in range(config.inner_steps):
        gradient = set_gradient(learner, phi, episode.support, len(episode.classes), bf16)
        phi = {name: phi[name] - config.inner_lr * gradient[name] for name in phi}
    if config.algorithm == "reptile":
        return {name: theta[name] - phi[name] for name in phi}
    return set_gradient(learner, phi, episode.query, len(episode.classes), bf16)


def at(learner: Any, weights: Weights, bf16: bool) -> Any:
    """A copy of the model with these weights."""
    model = copy.deepcopy(learner)
    with torch.no_grad():
        for name, value in weights.items():
            model.get_parameter(name).copy_(value)
    if bf16:
        for param in model.parameters():
            param.data = param.data.bfloat16()
    return model


def set_gradient(learner: Any, weights: Weights, rows: Sequence[Example], classes: int, bf16: bool) -> Weights:
    """Gradient of the mean loss over a set: over rows (whose `classes` are all there is), or over label tokens."""
    model = at(learner, weights, bf16)
    total = sum(1 if isinstance(row.labels, int) else sum(x != IGNORE for x in row.labels) for row in rows)
    sums = {name: torch.zeros_like(value) for name, value in weights.items()}
    for row in rows:
        logits = forward(model, row).float()
        if isinstance(row.labels, int):
            loss = F.cross_entropy(logits[:, : classes or None], torch.tensor([row.labels]))
        else:
            loss = F.cross_entropy(logits[0, :-1], torch.tensor(row.labels)[1:], ignore_index=IGNORE, reduction="sum")
        (loss / total).backward()
        for name in sums:  # row by row, so that bf16 gradients are added in fp32
            grad = model.get_parameter(name).grad
            if grad is not None:
                sums[name] += grad.float()
        model.zero_grad()
    return sums


def class_means(learner: Any, weights: Weights, episode: Episode, classes: int, bf16: bool) -> Tensor:
    """Mean feature of each class over the support set."""
    model = at(learner, weights, bf16)
    with torch.no_grad():
        features = torch.cat([forward(model, row, want="features").float() for row in episode.support])
    labels = torch.tensor([row.labels for row in episode.support])
    means = [features[labels == c].mean(0) for c in range(classes)]
    return torch.stack([torch.zeros_like(mean) if mean.isnan().any() else mean for mean in means])  # classes of other episodes


def forward(model: Any, row: Example, want: str = "logits") -> Tensor:
    ids = torch.tensor([list(row.input_ids)])
    return model(ids, torch.ones_like(ids), want=want)
