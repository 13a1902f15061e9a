"""Inner steps, head inits, rules and the outer step in one process, against their definitions."""

import copy
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import get_scheduler

from fmmeta.common.progress import Progress
from fmmeta.config.algorithms import find
from fmmeta.config.settings import SCHEDULES, Config
from fmmeta.meta.algorithms.setup import setup
from fmmeta.meta.classifier_head import class_means
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.outer_step import OuterOptimizer, OuterStep
from fmmeta.meta.parameters import MetaGradient, MetaParameters, PendingMean, StateDict
from fmmeta.metrics.scores import EpisodeScore, mean_ci95, per_stratum
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.workers.full_model import PlainWorker, nan_gradient_if_nonfinite
from fmmeta.parallel.workers.zero import ShardOptimizer
from fmmeta.tasks.batching import Batcher, Episode, Example
from fmmeta.tasks.loader import LoadResult
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.training.episodes import EpisodeReader
from fmmeta.training.final import BaselineLoop, compare, show
from fmmeta.training.scoring import Scoring, score_of
from tests.support.episodes import objective
from tests.support.helpers import one_rank
from tests.support.learners import (
    RuleOn,
    batches_of,
    bert,
    by_name,
    config_of,
    episode_of,
    gradient_of,
    llama,
    task_gradient,
    worker_of,
    worker_over,
)

CPU = torch.device("cpu")
LR, STEPS, CLASSES = 0.1, 3, 3
RNG = torch.Generator().manual_seed(5)


def rows(count: int) -> list[Example]:
    """Rows of 2 to 6 tokens whose classes alternate."""
    return [
        Example(torch.randint(1, 40, (2 + i % 5,), generator=RNG).tolist(), i % CLASSES) for i in range(count)
    ]


SUPPORT, QUERY = rows(10), rows(6)  # of one class four, of the others three


def batches(micro_batch_size: int = 4) -> Episode:
    batcher = Batcher(0, micro_batch_size)
    return Episode(batcher.split(SUPPORT), batcher.split(QUERY))


def rule_of(name: str, worker: PlainWorker, head_init: str, lr: float = LR) -> RuleOn:
    config = Config(algorithm=name, inner_steps=STEPS, inner_lr=lr, head_init=head_init)
    return RuleOn(find(name).rule, setup(config, worker, worker.model.head_names, CLASSES, bf16=False))


def inner_loop(worker: PlainWorker, head_init: str) -> InnerLoop:
    return rule_of("fomaml", worker, head_init).inner


def call(model: nn.Module, row: Example) -> tuple[Tensor, Tensor]:
    """Features and logits of a row."""
    ids = torch.tensor([list(row.input_ids)])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids))


def mean_loss(model: nn.Module, examples: Sequence[Example]) -> Tensor:
    """The mean loss over a set, computed row by row."""
    return F.cross_entropy(
        torch.cat([call(model, row)[1] for row in examples]), torch.tensor([row.labels for row in examples])
    )


def gradients(model: nn.Module, examples: Sequence[Example]) -> dict[str, Tensor]:
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    found = torch.autograd.grad(mean_loss(model, examples), list(trained.values()))
    return dict(zip(trained, found, strict=True))


def means_by_hand(model: nn.Module) -> Tensor:
    with torch.no_grad():
        features = torch.cat([call(model, row)[0] for row in SUPPORT])
    return torch.stack(
        [features[torch.tensor([row.labels == c for row in SUPPORT])].mean(0) for c in range(CLASSES)]
    )


def adapted_copy(model: nn.Module, head_init: str) -> nn.Module:
    """A copy of the model with an initialised head, after SGD steps on the support set."""
    phi = copy.deepcopy(model)
    if head_init == "prototype":
        means = means_by_hand(phi)
        with torch.no_grad():
            phi.get_parameter(phi.head_names[0]).copy_(2 * means)
            phi.get_parameter(phi.head_names[1]).copy_(-means.square().sum(1))
    optimizer = torch.optim.SGD([param for param in phi.parameters() if param.requires_grad], lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mean_loss(phi, SUPPORT).backward()
        optimizer.step()
    return phi


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Compare relative to the norm of the whole vector, as docs/explanation/architecture.md does."""
    assert list(found) == list(wanted)
    off = math.sqrt(sum(float((found[name] - wanted[name]).square().sum()) for name in wanted))
    size = math.sqrt(sum(float(value.square().sum()) for value in wanted.values()))
    assert size > 1e-2
    assert off < tolerance * size


@pytest.mark.parametrize("pooling", ["mean", "cls", "model"])
def test_prototypes_are_class_means(pooling):
    model = bert(pooling)
    means = means_by_hand(model)
    worker = worker_over(model, "prototype")
    theta = worker.read()
    phi0, found = inner_loop(worker, "prototype").head.start(worker, theta, batches().support)
    assert torch.equal(phi0, worker.read())
    torch.testing.assert_close(found.means, means)
    weight, bias = (model.get_parameter(name) for name in model.head_names)
    torch.testing.assert_close(weight.detach(), 2 * means)
    torch.testing.assert_close(bias.detach(), -means.square().sum(1))
    rest = worker.params.groups["head"].start
    assert torch.equal(worker.read()[:rest], theta[:rest])


def test_a_row_that_only_fills_a_batch_is_no_part_of_a_class_mean():
    """A rank without rows runs a copy of a row of another rank, with weight 0."""
    worker, (first, *_) = worker_over(bert("mean"), "prototype"), batches().support
    features = torch.randn(len(first.targets["labels"]), 16, generator=RNG)
    weights = first.weights.clone()
    weights[1] = 0
    found = class_means(worker, [replace(first, weights=weights)], [features], CLASSES)
    others = [row for row in range(len(first.targets["labels"])) if row != 1]
    for c in {int(first.targets["labels"][row]) for row in others}:
        rows_of_c = [row for row in others if first.targets["labels"][row] == c]
        torch.testing.assert_close(found.means[c], features[rows_of_c].mean(0))


@pytest.mark.parametrize("head_init", ["zero", "learned"])
def test_other_head_inits_leave_theta_unchanged(head_init):
    worker = worker_over(bert("mean"), head_init)
    theta = worker.read()
    phi0, means = inner_loop(worker, head_init).head.start(worker, theta, batches().support)
    assert phi0 is theta
    assert means is None
    assert torch.equal(worker.read(), theta)


@pytest.mark.parametrize("micro_batch_size", [1, 4, 32])
def test_gradient_of_micro_batches_equals_that_of_the_whole_set(micro_batch_size):
    model = bert("mean")
    wanted = gradients(model, SUPPORT)
    worker = worker_over(model)
    found = worker.zeros()
    passed = worker.gradient(batches(micro_batch_size).support, found)
    assert_same(by_name(worker, found), wanted)
    assert passed.loss == pytest.approx(mean_loss(model, SUPPORT).item(), rel=1e-5)
    assert passed.finite


@pytest.mark.parametrize("rule", ["fomaml", "maml", "reptile"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("poison", [False, True])
def test_theta_is_restored_bitwise(rule, bf16, poison):
    """Also after a non-finite task, which adds nothing."""
    model = bert("mean")
    worker = worker_over(model, "prototype", bf16)
    theta = worker.read()
    before = [param.detach().clone() for param in model.parameters()]
    episode = batches()
    found = task_gradient(rule_of(rule, worker, "prototype", 1e38 if poison else LR), worker, episode)
    assert found.finite is not poison
    assert found.gradient.any() != poison
    assert torch.equal(worker.read(), theta)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    again = task_gradient(rule_of(rule, worker, "prototype"), worker, episode)
    assert again.finite  # the bad task has left no gradients


@pytest.mark.parametrize("bf16", [False, True])
def test_a_pass_starts_without_gradients_of_others(bf16, monkeypatch):
    """Its micro-batches are added up; nothing is left of a pass before it, nor of one that an error ends."""
    worker = worker_over(bert("mean"), "prototype", bf16)
    support = batches_of(episode_of(worker.model), 2).support
    assert len(support) > 2
    total = gradient_of(worker, support)
    parts = [gradient_of(worker, [batch]) for batch in support]
    torch.testing.assert_close(total, torch.stack(parts).sum(0), rtol=0, atol=2e-6)
    assert total.any()
    assert not gradient_of(worker, []).any()
    forward, calls = worker.model.forward, [0]

    def second_fails(**inputs):
        calls[0] += 1
        return forward(**inputs) if calls[0] == 1 else 1 / 0

    monkeypatch.setattr(worker.model, "forward", second_fails)
    with pytest.raises(ZeroDivisionError):
        gradient_of(worker, support)
    monkeypatch.undo()
    assert torch.equal(gradient_of(worker, support), total)


@pytest.mark.parametrize("tied", [False, True])
def test_sparse_embedding_gradients_equal_dense_ones(tied):
    """With and without an output layer tied to the embeddings, over several micro-batches."""
    learner = llama() if tied else bert()
    dense = copy.deepcopy(learner)
    episode = episode_of(learner)
    worker = worker_of(learner, config_of(learner))
    embeddings = [module for module in worker.model.modules() if isinstance(module, nn.Embedding)]
    assert embeddings
    assert all(module.sparse for module in embeddings)
    found = gradient_of(worker, batches_of(episode, 2).support)
    worker.write(worker.read())
    assert torch.equal(found, gradient_of(worker, batches_of(episode, 2).support))
    if not tied:
        for name in dense.head_names:
            dense.get_parameter(name).data.zero_()
    loss = torch.zeros(())
    for batch in Batcher(0, 100).split(episode.support):
        loss = loss + objective(dense(**batch.inputs), batch)[0]
    loss.backward()
    trained = {name: param.grad for name, param in dense.named_parameters() if param.grad is not None}
    assert_same(by_name(worker, found), trained)


@pytest.mark.parametrize("rule", ["fomaml", "reptile"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_gradient_added_to_a_sum_is_the_same_gradient(rule, bf16):
    worker, other = (worker_over(bert("mean"), "prototype", bf16) for _ in range(2))
    start = torch.linspace(-1, 1, worker.params.numel)
    into = MetaGradient(start)
    into.sum.copy_(start)
    added = task_gradient(rule_of(rule, worker, "prototype"), worker, batches(), into)
    apart = task_gradient(rule_of(rule, other, "prototype"), other, batches())
    assert added.finite
    assert into.weight == 1
    assert (added.query.loss, added.support.loss) == (apart.query.loss, apart.support.loss)
    assert torch.equal(into.sum, start + apart.gradient)


def test_nonfinite_loss_has_a_nan_gradient():
    x = torch.tensor(3.0, requires_grad=True)
    for loss, slope in ((2 * x, 2.0), (2 * x + math.inf, math.nan), (2 * x * math.nan, math.nan)):
        (found,) = torch.autograd.grad(nan_gradient_if_nonfinite(loss), x)
        assert found.item() == pytest.approx(slope, nan_ok=True)


def test_shard_optimizer_passes_zeros_when_ranks_reject_the_gradient():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer, updates = ShardOptimizer([{"params": params}]), []
    optimizer.slices = {p.data_ptr(): slice(2 * i, 2 * i + 2) for i, p in enumerate(params)}
    optimizer.update = lambda shard, grad, where: updates.append((where, grad.tolist()))
    for grads, reject, wanted in (
        ([1.0, math.nan], True, 0.0),
        ([1.0, 1.0], False, 1.0),
        ([1.0, 1.0], True, 0.0),
    ):
        for param, value in zip(params, grads, strict=True):
            param.grad = torch.full((2,), value)
        flags = []
        optimizer.bad, optimizer.reject_nonfinite = (
            torch.tensor(False),
            lambda bad, reject=reject, flags=flags: flags.append(bool(bad)) or torch.tensor(reject),
        )
        optimizer.step()
        assert flags == [any(map(math.isnan, grads))]
        assert updates == [(slice(0, 2), [wanted] * 2), (slice(2, 4), [wanted] * 2)]
        updates.clear()


def test_untrained_parameters_are_not_in_the_param_map():
    model = bert("mean")
    worker = worker_over(model)
    assert {f.name for f in worker.params.fragments} == {
        n for n, p in model.named_parameters() if "pooler" not in n
    }


def test_parameter_groups():
    model = bert("model")
    groups = {
        group["name"]: group["params"] for group in param_groups(model, model.head_names, weight_decay=True)
    }
    names = {id(param): name for name, param in model.named_parameters()}
    assert [names[id(p)] for p in groups["head"]] == list(model.head_names)
    assert all(p.ndim > 1 for p in groups["decay"])
    assert all(p.ndim == 1 for p in groups["no_decay"])
    assert sum(map(len, groups.values())) == len(names)
    assert [g["name"] for g in param_groups(model, (), weight_decay=False)] == ["no_decay"]


def outer_of(worker: PlainWorker, theta: Tensor, **settings) -> OuterOptimizer:
    fixed = {"outer_optimizer": "sgd", "outer_lr": 0.5, "lr_scheduler_type": "constant"}
    config = Config(**{**fixed, "max_grad_norm": 0.0, "weight_decay": 0.0, **settings})
    return OuterOptimizer(MetaParameters(theta), worker, config)


def mean_of(theta: Tensor, **extra: Tensor) -> PendingMean:
    """A meta-gradient that is already reduced."""
    return PendingMean({**extra, "theta": theta})


def outer_step(
    gradient: Callable[[Tensor], Tensor] | None, head_init: str = "learned", **settings
) -> tuple[PlainWorker, Tensor, Tensor, OuterStep]:
    """The outer step of a gradient that has the shape of theta; theta before it and after it."""
    worker = worker_over(bert("mean"), head_init)
    theta = worker.read()
    began = theta.clone()
    mean = None if gradient is None else mean_of(gradient(theta))
    return worker, began, theta, outer_of(worker, theta, **settings).step(mean, 0)


@pytest.mark.parametrize("largest", [0.1, 1e6])
def test_clipping_is_over_the_whole_model(largest):
    worker = worker_over(bert("mean"), "zero")
    gradient = torch.randn(worker.params.numel, generator=RNG)
    _, began, theta, moved = outer_step(lambda _: gradient.clone(), "zero", max_grad_norm=largest)
    gradient[worker.params.groups["head"]] = 0  # a head that is reset in every task is not in the norm
    norm = float(gradient.double().norm())
    assert moved.applied
    assert moved.grad_norm == pytest.approx(norm)
    torch.testing.assert_close(theta - began, -0.5 * gradient * min(1, largest / norm), atol=1e-6, rtol=1e-4)


def test_weight_decay_is_on_the_decay_group_alone():
    worker, began, theta, _ = outer_step(
        torch.zeros_like, outer_optimizer="adamw", outer_lr=0.1, weight_decay=0.2
    )
    decay, rest = worker.params.groups["decay"], worker.params.groups["no_decay"]
    torch.testing.assert_close(theta[decay], began[decay] * (1 - 0.1 * 0.2))
    assert torch.equal(theta[rest], began[rest])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("head_init", "moves"), [("zero", False), ("prototype", False), ("learned", True)])
def test_the_head_moves_only_if_learned(optimizer, head_init, moves):
    worker, *thetas, _ = outer_step(torch.ones_like, head_init, outer_optimizer=optimizer, weight_decay=0.1)
    began, now = (by_name(worker, theta) for theta in thetas)
    stayed = {name for name in now if torch.equal(now[name], began[name])}
    assert stayed == (set() if moves else set(worker.model.head_names))


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_theta_is_unchanged_without_a_finite_meta_gradient(bad):
    gradient = None if bad is None else lambda theta: torch.full_like(theta, bad)
    _, began, theta, moved = outer_step(gradient)
    assert not moved.applied
    assert torch.equal(theta, began)


@pytest.mark.parametrize(
    ("name", "warmup"),
    [(name, warmup) for name in SCHEDULES for warmup in (0, 4) if (name, warmup) != ("constant", 4)],
)
def test_outer_lr_schedules_equal_transformers(name, warmup):
    worker = worker_over(bert("mean"))
    outer = outer_of(worker, worker.read(), lr_scheduler_type=name, warmup_steps=warmup, outer_steps=20)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = get_scheduler(name, optimizer, warmup, 20)
    wanted = {}
    for step in range(20):
        wanted[step] = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
    for steps in (range(20), reversed(range(20))):  # a function of the step alone
        assert {step: outer.lr(step) for step in steps} == pytest.approx(wanted)


EPS = {"lr": 0.01, "eps": 1e-6}
TORCH = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, **EPS, weight_decay=0.0),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.8, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, **EPS),
    "adamax": lambda p: torch.optim.Adamax(p, **EPS),
    "nadam": lambda p: torch.optim.NAdam(p, **EPS),
    "radam": lambda p: torch.optim.RAdam(p, **EPS),
    "rmsprop": lambda p: torch.optim.RMSprop(p, **EPS),
}


def optimizer_settings(name: str) -> dict[str, Any]:
    own = {"outer_momentum": 0.8} if name == "nesterov" else {}
    return {"outer_optimizer": name, "outer_lr": 0.01, "adam_epsilon": 1e-6, **own}


@pytest.mark.parametrize("name", TORCH)
def test_outer_optimizers_equal_torch(name):
    worker = worker_over(bert("mean"))
    theta = worker.read()
    param = nn.Parameter(theta.clone())
    plain, outer = TORCH[name]([param]), outer_of(worker, theta, **optimizer_settings(name))
    for step in range(4):
        param.grad = torch.randn(theta.shape, generator=RNG)
        outer.step(mean_of(param.grad.clone()), step)
        plain.step()
    torch.testing.assert_close(theta, param.detach())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "nesterov", "rmsprop"])
@pytest.mark.parametrize("learned", ["layer", "element"])
def test_learned_rates_use_inner_lr_outer_lr(optimizer, learned):
    model = bert("mean")
    worker = worker_over(model)
    schedule = {"lr_scheduler_type": "linear", "outer_steps": 10, "weight_decay": 0.5, "max_grad_norm": 0.0}
    rates_of = {"inner_lr_learned": learned, "inner_lr_outer_lr": 0.03}
    config = Config(**optimizer_settings(optimizer), **schedule, **rates_of)
    inner = setup(config, worker, model.head_names, CLASSES, bf16=False).inner
    rates = inner.rates.meta_parameter
    param = nn.Parameter(rates.clone())
    plain = TORCH[optimizer]([param])
    outer = OuterOptimizer(MetaParameters.of(worker.read(), inner), worker, config)
    for step in range(3):
        param.grad = torch.randn(rates.shape, generator=RNG, dtype=rates.dtype)
        plain.param_groups[0]["lr"] = 0.03 * (1 - step / 10)
        assert outer.step(mean_of(torch.zeros(worker.params.numel), rates=param.grad), step).applied
        plain.step()
    torch.testing.assert_close(rates, param.detach())
    before = rates.clone()
    bad = mean_of(torch.zeros(worker.params.numel), rates=torch.full_like(rates, math.nan))
    assert not outer.step(bad, 3).applied
    assert torch.equal(rates, before)


@pytest.mark.parametrize("learned", ["no", "layer", "element"])
@pytest.mark.parametrize("optimizer", TORCH)
def test_resumed_outer_optimizer_with_learned_rates_equals_undisturbed_run(optimizer, learned):
    model = bert("mean")
    worker = worker_over(model, "zero")
    config = Config(
        outer_optimizer=optimizer,
        outer_lr=0.01,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        inner_lr_learned=learned,
    )
    grads = [torch.randn(worker.params.numel, generator=RNG) for _ in range(4)]
    ends = []
    for stops in (False, True):
        theta = worker.read()
        inner = setup(config, worker, model.head_names, CLASSES, bf16=False).inner
        outer = OuterOptimizer(MetaParameters.of(theta, inner), worker, config)
        rng = torch.Generator().manual_seed(9)
        for step, grad in enumerate(grads):
            if stops and step == 2:
                saved = StateDict()
                outer.meta_params.add_state(saved)
                outer.add_state(saved)
                inner = setup(config, worker, model.head_names, CLASSES, bf16=False).inner
                outer = OuterOptimizer(MetaParameters.of(theta, inner), worker, config)
                outer.meta_params.load_state(saved)
                outer.load_state(saved)
            rates = inner.rates.meta_parameter
            extra = (
                {} if rates is None else {"rates": torch.randn(rates.shape, generator=rng, dtype=rates.dtype)}
            )
            outer.step(mean_of(grad.clone(), **extra), step)
        ends.append((theta, inner.rates.meta_parameter))
    assert torch.equal(ends[0][0], ends[1][0])
    assert learned == "no" or torch.equal(ends[0][1], ends[1][1])


def test_meta_gradient_is_the_weighted_mean_of_tasks():
    meta, alone = MetaGradient(torch.zeros(2)), Communicator(None, 0, 1, CPU)
    meta.add(torch.tensor([1.0, 2.0]))
    other = MetaGradient(torch.zeros(2))
    other.add(torch.tensor([4.0, 8.0]), 3.0)
    meta.merge(other)
    assert meta.weight == 4
    mean = meta.begin_reduce(alone, meta.weight)
    assert mean is not None
    assert mean.finish("theta").tolist() == [3.25, 6.5]
    meta.clear()
    assert (meta.sum.tolist(), meta.weight, meta.begin_reduce(alone, 0.0)) == ([0, 0], 0, None)


def test_evaluation_scores_before_and_after_adaptation_and_restores_theta():
    model = bert("mean")
    phi = adapted_copy(model, "zero")
    before, after = mean_loss(model, QUERY).item(), mean_loss(phi, QUERY).item()
    worker = worker_over(model, "zero")
    theta = worker.read()
    worker.write(torch.zeros_like(theta))  # evaluation puts theta in by itself
    tasks = [Task(0, f"t{i}", f"s{i}", 10 + i, (0, 0, 0, i)) for i in range(2)]
    reader = EpisodeReader(
        lambda tasks: [LoadResult(task, batches()) for task in tasks], one_rank(), Config(), print
    )
    inner = inner_loop(worker, "zero")
    scores = Scoring(worker, one_rank(), Progress(enabled=False)).scores(
        tasks,
        reader.read_share,
        lambda slot, task, episode: score_of(slot, task, inner.score(worker, theta, episode)),
        "tasks",
        theta,
    )
    assert torch.equal(worker.read(), theta)
    assert [(score.slot, score.stratum) for score in scores] == [(0, "s0"), (1, "s1")]
    for score in scores:
        assert score.losses == pytest.approx([before, after], rel=1e-4)


def test_gains_are_paired_over_common_episodes():
    trained, started = (
        [EpisodeScore(slot, f"t{slot}", "s", [0, loss], [0, accuracy]) for slot, accuracy in accuracies]
        for loss, accuracies in (
            (1.0, [(0, 0.9), (1, 0.8), (3, 1.0)]),
            (1.5, [(1, 0.5), (2, 0.0), (3, 0.6)]),
        )
    )
    compared = compare(trained, started, BaselineLoop(1.0, 0), "task")
    assert (compared.episodes, compared.units) == (2, 2)
    assert compared.gain[0][0] == pytest.approx((0.3 + 0.4) / 2)
    assert compared.accuracies == pytest.approx({"before": 0, "after": 0.9, "after_from_start": 0.55})


def test_summaries_of_scores():
    """Quantiles of Student's t from a printed table: 4.303, 3.182 and 2.776 for 2, 3 and 4 degrees of
    freedom.
    """
    for values, quantile in (
        ([1.0, 2.0, 6.0], 4.303),
        ([1.0, 2.0, 3.0, 4.0], 3.182),
        ([1.0, 1.0, 1.0, 1.0, 6.0], 2.776),
    ):
        mean, half = mean_ci95(values)
        assert mean == pytest.approx(statistics.mean(values))
        assert half == pytest.approx(quantile * statistics.stdev(values) / math.sqrt(len(values)), rel=2e-4)
    assert mean_ci95([1.0])[0] == 1.0
    assert math.isnan(mean_ci95([1.0])[1])


def test_an_interval_over_units_counts_their_values_as_repetitions():
    """By hand: deviations -1.5, -1.5, 0.5, 2.5 of two units sum to -3 and 3; sqrt(2 / 1 * 18) / 4 = 1.5."""
    values = [1.0, 1.0, 3.0, 5.0]
    assert mean_ci95(values, ["a", "a", "b", "b"]) == pytest.approx((2.5, 12.706 * 1.5), rel=1e-4)
    alike = [1.0, 3.0, 1.0, 3.0]
    assert mean_ci95(alike, ["a", "a", "b", "b"]) == mean_ci95(alike)  # not zero: over episodes it is wider
    assert mean_ci95(values, ["a", "b", "c", "d"]) == mean_ci95(values)
    assert math.isnan(mean_ci95(values, ["a"] * 4)[1])
    scores = [
        EpisodeScore(i, f"t{i}", stratum, [0, 0], [0, accuracy])
        for i, (stratum, accuracy) in enumerate([("b", 0.5), ("a", 1.0), ("b", 1.0)])
    ]
    assert per_stratum(scores) == {"a": 1.0, "b": 0.75}


def test_one_held_out_episode_has_no_interval():
    shown: list[Sequence[str]] = []
    compared = compare(
        [EpisodeScore(0, "t", "a", [1.0, 0.5], [0.2, 0.6])],
        [EpisodeScore(0, "t", "a", [1.5, 0.75], [0.1, 0.4])],
        BaselineLoop(1.0, 0),
        "class",
    )
    show(compared, Config(), "5-way 1-shot", lambda title, header, rows: shown.extend(rows))
    assert [row[1:] for row in shown] == [
        ["20.0 ± -", "1.0000"],
        ["40.0 ± -", "0.7500"],
        ["60.0 ± -", "0.5000"],
        ["20.0 ± -", "0.2500 ± -"],
    ]
    facts = json.loads(json.dumps(compared.facts(), allow_nan=False))
    assert facts["gain"] == {"accuracy": [pytest.approx(0.2), None], "loss": [0.25, None]}
