"""The host waits for a GPU where a number of the device is read: not inside a pass, and seldom in a task.

Tensors on the device `meta` have no values, so that reading one raises.
"""

from __future__ import annotations

import pytest
import torch

from fmmeta.config.algorithms import find
from fmmeta.learners.classification import PooledClassifier
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.workers.base import PassStats
from fmmeta.parallel.workers.full_model import PlainWorker
from fmmeta.tasks.batching import Batcher, Example
from fmmeta.training.step_metrics import StepMetrics
from tests.support.learners import (
    RuleOn,
    batches_of,
    bert,
    config_of,
    episode_of,
    llama,
    setup_of,
    task_gradient,
    worker_of,
)
from tests.support.models import tiny

META = torch.device("meta")


@pytest.mark.parametrize("lengths", [(4, 4, 4), (4, 2, 3)], ids=["equal", "padded"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "llama", "mistral", "qwen3", "gpt2", "gpt_neox", "classifier", "causal"]
)
def test_a_pass_reads_nothing_from_the_device(kind, bf16, lengths):
    made = {"classifier": lambda: bert("model"), "causal": llama}
    learner = (
        made[kind]() if kind in made else PooledClassifier(tiny(kind, auto="AutoModel"), 3, "mean")
    ).to(META)
    worker = PlainWorker(learner, param_groups(learner, (), weight_decay=True), META, bf16)
    rows = [Example([5] * n, i if learner.head_names else [5] * n) for i, n in enumerate(lengths)]
    batches = Batcher(0, 4).split(rows)
    stats = worker.step(batches, lambda shard, grad, where: shard.sub_(grad))
    assert stats.stats.device == META
    with pytest.raises(RuntimeError):
        _ = stats.numbers
    with torch.no_grad():
        assert worker.logits(batches)[0].device == META


@pytest.mark.parametrize("algorithm", ["fomaml", "reptile", "maml"])
def test_a_task_reads_its_passes_at_most_three_times(algorithm, monkeypatch):
    learner = bert()
    config = config_of(learner, algorithm=algorithm)
    worker, episode = worker_of(learner, config), batches_of(episode_of(learner))
    rule = RuleOn(find(algorithm).rule, setup_of(worker, config))
    read, reads = torch.Tensor.tolist, list[int]()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (reads.append(self.numel()), read(self))[1])
    StepMetrics().add(task_gradient(rule, worker, episode), 1)
    assert len(reads) <= (3 if algorithm != "maml" else config.inner_steps + 2)  # a product a step


def test_statistics_of_a_pass():
    numbers = torch.tensor([0.5, 3.0, 4.0, 0.0], dtype=torch.float64)
    stats = PassStats(numbers)
    assert (stats.loss, stats.accuracy, stats.finite) == (0.5, 0.75, True)
    for at, value in ((0, float("nan")), (3, 1.0)):
        wrong = numbers.clone()
        wrong[at] = value
        assert not PassStats(wrong).finite
