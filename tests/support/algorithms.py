"""Models and settings for tests of algorithms, and the number of passes of a task."""

from __future__ import annotations

import torch

from fmmeta.config.algorithms import find
from fmmeta.models.learner import Learner
from tests.support.learners import (
    batches_of,
    bert,
    config_of,
    episode_of,
    llama,
    setup_of,
    task_gradient,
    worker_of,
)

LEARNERS = {"bert": bert(), "classifier": bert("model"), "llama": llama()}
PROTOTYPE = {"head_init": "prototype", "inner_lr": 0.02}


def identity(value):
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value


def passes_of(learner: Learner, monkeypatch, **settings) -> tuple[int, int]:
    """Count passes with a gradient, and passes without, that one task makes."""
    config = config_of(learner, **settings)
    worker, episode = worker_of(learner, config), batches_of(episode_of(learner), micro_batch_size=32)
    rule = find(config.algorithm).rule(setup_of(worker, config), 0)
    counted = {True: 0, False: 0}
    call, worker.answers = worker._call, None  # which would share what rows have in common

    def counting(batch, want="logits"):
        counted[torch.is_grad_enabled()] += 1
        return call(batch, want)

    monkeypatch.setattr(worker, "_call", counting)
    task_gradient(rule, worker, episode)
    return counted[True], counted[False]
