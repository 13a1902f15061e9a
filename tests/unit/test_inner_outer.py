"""Inner steps, head inits, rules and the outer step in one process, against their definitions."""

import copy
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import get_scheduler

from fmmeta.common.progress import Progress
from fmmeta.config.algorithms import find
from fmmeta.config.settings import SCHEDULES, Config
from fmmeta.meta.algorithms.setup import setup
from fmmeta.meta.classifier_head import class_means
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.meta.noise_scale import TaskSquares
from fmmeta.meta.outer_step import OuterOptimizer, OuterStep, OuterUpdate
from fmmeta.meta.parameters import MetaGradient, MetaParameters, PendingMean, StateDict
from fmmeta.meta.reference import set_gradient, set_loss
from fmmeta.metrics.scores import EpisodeScore, mean_ci95, per_stratum
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.workers.full_model import PlainWorker, nan_gradient_if_nonfinite
from fmmeta.parallel.workers.zero import ShardOptimizer
from fmmeta.tasks.loader import LoadResult
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.training.episodes import EpisodeReader
from fmmeta.training.final import BaselineLoop, compare, show
from fmmeta.training.scoring import Scoring, score_of
from tests.support.helpers import one_rank
from tests.support.learners import (
    CLASSES,
    CPU,
    LEARNERS,
    RuleOn,
    batches_of,
    bert,
    by_name,
    episode_of,
    gradient_of,
    norm,
    worker_over,
)

LR, STEPS = 0.1, 3
RNG = torch.Generator().manual_seed(5)
ROWS = episode_of(LEARNERS["bert"], support=10)  # of one class four, of the others three
ALONE = Communicator(None, 0, 1, CPU)


def rule_of(name: str, worker: PlainWorker, head_init: str, lr: float = LR) -> RuleOn:
    config = Config(algorithm=name, inner_steps=STEPS, inner_lr=lr, head_init=head_init)
    return RuleOn(find(name).rule, setup(config, worker, worker.model.head_names, CLASSES, bf16=False))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.parametrize("pooling", ["mean", "cls", "model"])
def test_prototypes_are_class_means(pooling):
    model = bert(pooling)
    features: dict[int, list[Tensor]] = {c: [] for c in range(CLASSES)}
    for row in ROWS.support:
        ids = torch.tensor([row.input_ids])
        features[row.labels].append(model(input_ids=ids, attention_mask=torch.ones_like(ids))[0].detach())
    means = torch.stack([torch.cat(of_class).mean(0) for of_class in features.values()])
    worker = worker_over(model, "prototype")
    theta, head = worker.read(), rule_of("fomaml", worker, "prototype").inner.head
    phi0, found = head.start(worker, theta, batches_of(ROWS).support)
    assert torch.equal(phi0, worker.read())
    torch.testing.assert_close(found.means, means)
    weight, bias = (model.get_parameter(name) for name in model.head_names)
    torch.testing.assert_close(weight.detach(), 2 * means)
    torch.testing.assert_close(bias.detach(), -means.square().sum(1))
    rest = worker.params.groups["inner_only"].start
    assert torch.equal(worker.read()[:rest], theta[:rest])


def test_a_row_that_only_fills_a_batch_is_no_part_of_a_class_mean():
    """A rank without rows runs a copy of a row of another rank, with weight 0."""
    worker, (first, *_) = worker_over(bert("mean"), "prototype"), batches_of(ROWS).support
    labels, weights = first.targets["labels"], first.weights.clone()
    features = torch.randn(len(labels), 16, generator=RNG)
    weights[1] = 0
    found = class_means(worker, [replace(first, weights=weights)], [features], CLASSES)
    for c in labels[weights > 0].unique():
        torch.testing.assert_close(found.means[c], features[(labels == c) & (weights > 0)].mean(0))


@pytest.mark.parametrize("head_init", ["zero", "learned"])
def test_other_head_inits_leave_theta_unchanged(head_init):
    worker = worker_over(bert("mean"), head_init)
    theta, head = worker.read(), rule_of("fomaml", worker, head_init).inner.head
    phi0, means = head.start(worker, theta, batches_of(ROWS).support)
    assert phi0 is theta
    assert means is None
    assert torch.equal(worker.read(), theta)


@pytest.mark.parametrize(
    ("model", "micro_batch_size"), [("bert", 1), ("bert", 4), ("bert", 32), ("llama", 2)]
)
def test_gradient_of_micro_batches_equals_that_of_the_whole_set(model, micro_batch_size):
    """Embeddings have sparse gradients in each, with and without an output layer that is tied to them."""
    learner = LEARNERS[model]
    rows, weights = episode_of(learner, support=10), weights_of(learner)
    wanted = set_gradient(learner, weights, rows.support, False)
    worker, support = worker_over(copy.deepcopy(learner)), batches_of(rows, micro_batch_size).support
    sparse = [module.sparse for module in worker.model.modules() if isinstance(module, nn.Embedding)]
    assert set(sparse) == {True}
    found = worker.zeros()
    passed = worker.gradient(support, found)
    off = {name: value - wanted[name] for name, value in by_name(worker, found).items()}
    assert off.keys() == wanted.keys()
    assert norm(off) < 1e-5 * norm(wanted)
    assert passed.loss == pytest.approx(set_loss(learner, weights, rows.support, False).item(), rel=1e-5)
    assert passed.finite
    worker.write(worker.read())
    assert torch.equal(gradient_of(worker, support), found)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_pass_starts_without_gradients_of_others(bf16, monkeypatch):
    """Its micro-batches are added up; nothing is left of a pass before it, nor of one that an error ends."""
    worker, support = worker_over(bert("mean"), "prototype", bf16), batches_of(ROWS, 2).support
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


@pytest.mark.parametrize(
    ("loss", "slope"),
    [(lambda x: 2 * x, 2.0), (lambda x: 2 * x + math.inf, math.nan), (lambda x: 2 * x * math.nan, math.nan)],
)
def test_nonfinite_loss_has_a_nan_gradient(loss, slope):
    x = torch.tensor(3.0, requires_grad=True)
    (found,) = torch.autograd.grad(nan_gradient_if_nonfinite(loss(x)), x)
    assert found.item() == pytest.approx(slope, nan_ok=True)


@pytest.mark.parametrize(
    ("grads", "reject", "wanted"),
    [([1.0, math.nan], True, 0.0), ([1.0, 1.0], False, 1.0), ([1.0, 1.0], True, 0.0)],
)
def test_shard_optimizer_passes_zeros_when_ranks_reject_the_gradient(grads, reject, wanted):
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer, updates, flags = ShardOptimizer([{"params": params}]), [], []
    optimizer.slices = {p.data_ptr(): slice(2 * i, 2 * i + 2) for i, p in enumerate(params)}
    optimizer.update = lambda shard, grad, where: updates.append((where, grad.tolist()))
    optimizer.bad = torch.tensor(False)
    optimizer.reject_nonfinite = lambda bad: flags.append(bool(bad)) or torch.tensor(reject)
    for param, value in zip(params, grads, strict=True):
        param.grad = torch.full((2,), value)
    optimizer.step()
    assert flags == [any(map(math.isnan, grads))]
    assert updates == [(slice(0, 2), [wanted] * 2), (slice(2, 4), [wanted] * 2)]


def test_parameter_groups():
    model = bert("model")
    groups = {one["name"]: one["params"] for one in param_groups(model, model.head_names, weight_decay=True)}
    names = {id(param): name for name, param in model.named_parameters()}
    assert [names[id(p)] for p in groups["inner_only"]] == list(model.head_names)
    assert all(p.ndim > 1 for p in groups["decay"])
    assert all(p.ndim == 1 for p in groups["no_decay"])
    assert sum(map(len, groups.values())) == len(names)
    assert [g["name"] for g in param_groups(model, (), weight_decay=False)] == ["no_decay"]
    pooled = worker_over(bert("mean"))  # which does not train the pooler
    trained = {name for name, _ in pooled.model.named_parameters() if "pooler" not in name}
    assert {f.name for f in pooled.params.fragments} == trained


PLAIN_SGD = {
    "outer_optimizer": "sgd",
    "outer_lr": 0.5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "weight_decay": 0.0,
}


def outer_step(
    gradient: Callable[[Tensor], Tensor] | None, head_init: str = "learned", **settings
) -> tuple[PlainWorker, Tensor, Tensor, OuterStep]:
    """The outer step of a gradient that has the shape of theta; theta before it and after it."""
    worker = worker_over(bert("mean"), head_init)
    theta = worker.read()
    began = theta.clone()
    outer = OuterOptimizer(MetaParameters(theta), worker, Config(**{**PLAIN_SGD, **settings}))
    mean = None if gradient is None else PendingMean({"theta": gradient(theta)})
    return worker, began, theta, outer.step(mean, 0)


@pytest.mark.parametrize("largest", [0.1, 1e6])
def test_clipping_is_over_the_whole_model(largest):
    gradient = torch.randn(worker_over(bert("mean")).params.numel, generator=RNG)
    worker, began, theta, moved = outer_step(lambda _: gradient.clone(), "zero", max_grad_norm=largest)
    gradient[worker.params.groups["inner_only"]] = 0  # a head that is reset in every task is not in the norm
    length = float(gradient.double().norm())
    assert moved.applied
    assert moved.grad_norm == pytest.approx(length)
    step = -0.5 * gradient * min(1, largest / length)
    torch.testing.assert_close(theta - began, step, atol=1e-6, rtol=1e-4)


def test_weight_decay_is_on_the_decay_group_alone():
    settings = {"outer_optimizer": "adamw", "outer_lr": 0.1, "weight_decay": 0.2}
    worker, began, theta, _ = outer_step(torch.zeros_like, **settings)
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
    schedule = {"lr_scheduler_type": name, "warmup_steps": warmup, "outer_steps": 20}
    outer = OuterOptimizer(MetaParameters(worker.read()), worker, Config(**{**PLAIN_SGD, **schedule}))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = get_scheduler(name, optimizer, warmup, 20)
    wanted = {}
    for step in range(20):
        wanted[step] = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
    for steps in (range(20), reversed(range(20))):  # a function of the step alone
        assert {step: outer.lr(step) for step in steps} == pytest.approx(wanted)


EPS = {"eps": 1e-6}
TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p),
    "adamw": lambda p: torch.optim.AdamW(p, **EPS, weight_decay=0.0),
    "nesterov": lambda p: torch.optim.SGD(p, momentum=0.8, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, **EPS),
    "adamax": lambda p: torch.optim.Adamax(p, **EPS),
    "nadam": lambda p: torch.optim.NAdam(p, **EPS),
    "radam": lambda p: torch.optim.RAdam(p, **EPS),
    "rmsprop": lambda p: torch.optim.RMSprop(p, **EPS),
}


def inner_and_outer(worker: PlainWorker, theta: Tensor, config: Config) -> tuple[InnerLoop, OuterOptimizer]:
    inner = setup(config, worker, worker.model.head_names, CLASSES, bf16=False).inner
    return inner, OuterOptimizer(MetaParameters.of(theta, inner), worker, config)


RATES = [
    {"inner_lr_learned": learned, "inner_lr_outer_lr": 0.03, "weight_decay": 0.5}
    for learned in ("layer", "element")
]


@pytest.mark.parametrize(
    ("name", "learned"),
    [*itertools.product(TORCH, [{}]), *itertools.product(("sgd", "adamw", "nesterov", "rmsprop"), RATES)],
)
def test_outer_optimizers_equal_torch(name, learned):
    """Of theta, or of learned rates, with another outer rate and without weight decay."""
    own = {"outer_momentum": 0.8} if name == "nesterov" else {}
    settings = {"outer_optimizer": name, "outer_lr": 0.01, "adam_epsilon": 1e-6, **own}
    schedule = {"lr_scheduler_type": "linear", "outer_steps": 10, "max_grad_norm": 0.0, "weight_decay": 0.0}
    worker = worker_over(bert("mean"))
    _, outer = inner_and_outer(worker, worker.read(), Config(**{**settings, **schedule, **learned}))
    named, moved = outer.meta_params.named(), "rates" if learned else "theta"
    values, zeros = named[moved], {key: torch.zeros_like(value) for key, value in named.items()}
    param = nn.Parameter(values.clone())
    plain = TORCH[name]([param])
    for step in range(4):
        param.grad = torch.randn(values.shape, generator=RNG, dtype=values.dtype)
        plain.param_groups[0]["lr"] = learned.get("inner_lr_outer_lr", 0.01) * (1 - step / 10)
        assert outer.step(PendingMean({**zeros, moved: param.grad.clone()}), step).applied
        plain.step()
    torch.testing.assert_close(values, param.detach())
    before = values.clone()
    assert not outer.step(PendingMean({**zeros, moved: torch.full_like(values, math.nan)}), 4).applied
    assert torch.equal(values, before)


@pytest.mark.parametrize("learned", ["no", "layer", "element"])
@pytest.mark.parametrize("optimizer", TORCH)
def test_resumed_outer_optimizer_with_learned_rates_equals_undisturbed_run(optimizer, learned):
    worker = worker_over(bert("mean"), "zero")
    settings = {"outer_optimizer": optimizer, "outer_lr": 0.01, "inner_lr_learned": learned}
    config = Config(**settings, lr_scheduler_type="cosine", weight_decay=0.1)
    ends = []
    for stops in (False, True):
        theta, rng = worker.read(), torch.Generator().manual_seed(9)
        inner, outer = inner_and_outer(worker, theta, config)
        for step in range(4):
            if stops and step == 2:
                saved = StateDict()
                outer.meta_params.add_state(saved)
                outer.add_state(saved)
                inner, outer = inner_and_outer(worker, theta, config)
                outer.meta_params.load_state(saved)
                outer.load_state(saved)
            named = outer.meta_params.named().items()
            draw = {key: torch.randn(one.shape, generator=rng, dtype=one.dtype) for key, one in named}
            outer.step(PendingMean(draw), step)
        ends.append((theta, inner.rates.meta_parameter))
    assert torch.equal(ends[0][0], ends[1][0])
    assert learned == "no" or torch.equal(ends[0][1], ends[1][1])


def test_meta_gradient_is_the_weighted_mean_of_tasks():
    meta, other = MetaGradient(torch.zeros(2)), MetaGradient(torch.zeros(2))
    meta.add(torch.tensor([1.0, 2.0]))
    other.add(torch.tensor([4.0, 8.0]), 3.0)
    meta.merge(other)
    assert meta.weight == 4
    mean = meta.begin_reduce(ALONE, meta.weight)
    assert mean is not None
    assert mean.finish("theta").tolist() == [3.25, 6.5]
    meta.clear()
    assert (meta.sum.tolist(), meta.weight, meta.begin_reduce(ALONE, 0.0)) == ([0, 0], 0, None)


def updates_of(**settings) -> OuterUpdate:
    """Outer steps of SGD whose learning rate falls linearly over 12 steps."""
    worker = worker_over(bert("mean"))
    config = Config(**{**PLAIN_SGD, "lr_scheduler_type": "linear", "outer_steps": 12, **settings})
    theta = torch.linspace(-1, 1, worker.params.numel)
    return OuterUpdate(OuterOptimizer(MetaParameters(theta), worker, config), ALONE, config)


def test_theta_follows_the_recursion():
    """On a quadratic: two tasks that weigh 3 together; one meta-batch has no finite task."""
    updates = updates_of()
    theta = updates.outer.meta_params.theta
    wanted, start = theta.double(), theta.clone()
    for step in range(12):
        weight, rate = 3.0 * (step != 5), 0.5 * (1 - step / 12)
        updates.meta.sum.add_(theta, alpha=weight)
        wanted = wanted - rate * wanted * (weight > 0)
        result = updates.step(weight, step)
        assert result.lr == pytest.approx(rate)
        assert result.applied == (weight > 0)
        assert not updates.meta.sum.any()
    assert (theta - wanted).norm() < 1e-6 * (start - wanted).norm()


def test_the_noise_scale_continues_from_a_checkpoint():
    updates, later = updates_of(), updates_of(reduce_dtype="bf16")
    assert (updates.comm_dtype, later.comm_dtype) == (torch.float32, torch.bfloat16)
    updates.meta.sum.add_(updates.outer.meta_params.theta)
    updates.step(3.0, 0, squares=TaskSquares(3.0, 3.0, 10.0))
    updates.add_state(kept := StateDict())
    later.load_state(kept)
    assert later.noise_scale.state == updates.noise_scale.state
    assert later.noise_scale.count == 1


def test_evaluation_scores_before_and_after_adaptation_and_restores_theta():
    model = copy.deepcopy(LEARNERS["bert"])
    phi = weights_of(model)
    losses = [set_loss(model, phi, ROWS.query, False).item()]
    for _ in range(STEPS):
        gradient = set_gradient(model, phi, ROWS.support, False)
        phi = {name: value - LR * gradient[name] for name, value in phi.items()}
    losses.append(set_loss(model, phi, ROWS.query, False).item())
    worker = worker_over(model, "zero")
    theta, inner = worker.read(), rule_of("fomaml", worker, "zero").inner
    worker.write(torch.zeros_like(theta))  # evaluation puts theta in by itself
    tasks = [Task(0, f"t{i}", f"s{i}", 10 + i, (0, 0, 0, i)) for i in range(2)]
    reader = EpisodeReader(
        lambda tasks: [LoadResult(task, batches_of(ROWS)) for task in tasks], one_rank(), Config(), print
    )
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
        assert score.losses == pytest.approx(losses, rel=1e-4)


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


@pytest.mark.parametrize(
    ("values", "quantile"),
    [([1.0, 2.0, 6.0], 4.303), ([1.0, 2.0, 3.0, 4.0], 3.182), ([1.0, 1.0, 1.0, 1.0, 6.0], 2.776)],
)
def test_intervals_take_quantiles_of_students_t(values, quantile):
    """From a printed table: for 2, 3 and 4 degrees of freedom."""
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    assert mean_ci95(values) == pytest.approx((statistics.mean(values), half), rel=2e-4)


def test_an_interval_over_units_counts_their_values_as_repetitions():
    """By hand: deviations -1.5, -1.5, 0.5, 2.5 of two units sum to -3 and 3; sqrt(2 / 1 * 18) / 4 = 1.5."""
    values = [1.0, 1.0, 3.0, 5.0]
    assert mean_ci95(values, ["a", "a", "b", "b"]) == pytest.approx((2.5, 12.706 * 1.5), rel=1e-4)
    alike = [1.0, 3.0, 1.0, 3.0]
    assert mean_ci95(alike, ["a", "a", "b", "b"]) == mean_ci95(alike)  # not zero: over episodes it is wider
    assert mean_ci95(values, ["a", "b", "c", "d"]) == mean_ci95(values)
    assert mean_ci95([1.0]) == pytest.approx((1.0, math.nan), nan_ok=True)
    assert math.isnan(mean_ci95(values, ["a"] * 4)[1])
    strata = [("b", 0.5), ("a", 1.0), ("b", 1.0)]
    scores = [EpisodeScore(i, f"t{i}", name, [0, 0], [0, share]) for i, (name, share) in enumerate(strata)]
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
