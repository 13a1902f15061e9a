"""Inner optimizers equal torch's on whole vectors and on shards; rates by layer, step and element; inner and
outer optimizers of the user, chosen by `module:name`.
"""

import copy
import json
import shutil
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

from fmmeta.config.algorithms import OUTER_OPTIMIZERS, check_outer, find_outer
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import EvaluateConfig, TuneConfig
from fmmeta.meta import task
from fmmeta.meta.inner_loop import Trajectory
from fmmeta.meta.inner_optimizers import Layers, Rates, inner_optimizer, layer_of, natural
from fmmeta.meta.outer_step import OuterOptimizer
from fmmeta.meta.parameters import MetaParameters, PendingMean
from fmmeta.parallel.costs import shards
from tests.support.learners import (
    LEARNERS,
    batches_of,
    config_of,
    episode_of,
    rule_on,
    setup_of,
    task_gradient,
    worker_of,
)
from tests.support.messages import check_message, refusal
from tests.support.outer_optimizer import Averaged

LEARNER = LEARNERS["bert"]

RNG = torch.Generator().manual_seed(0)
LAYERS = Layers(("a", "b"), ((0, 3, 0), (3, 5, 1), (6, 9, 0)))  # element 5 is padding
WHOLE = slice(0, 9)


def rates(*rows: tuple[float, float]) -> Rates:
    return Rates(LAYERS, torch.tensor(rows, dtype=torch.float64))


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"inner_optimizer": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.1)),
        (
            {"inner_optimizer": "momentum", "inner_momentum": 0.7},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7),
        ),
        (
            {"inner_optimizer": "adamw", "algorithm": "reptile"},
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0),
        ),
        (
            {"inner_optimizer": "adamw", "inner_weight_decay": 0.3, "inner_epsilon": 1e-3},
            lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-3, weight_decay=0.3),
        ),
    ],
)
@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 9]])
def test_inner_steps_equal_torch(settings, make, cuts):
    """The steps are equal however the vector is split into shards."""
    shard = torch.randn(9, generator=RNG)
    param = nn.Parameter(shard.clone())
    optimizer, rule = make([param]), inner_optimizer(Config(**settings))
    state = rule.zero_state(9, torch.device("cpu"))
    for k in range(4):
        param.grad = torch.randn(9, generator=RNG)
        given = param.grad.clone()
        update = rule.update(k, state, rates(*[(0.1, 0.1)] * 4))
        for a, b in pairwise(cuts):
            update(shard[a:b], given[a:b], slice(a, b))
        assert torch.equal(given, param.grad)
        optimizer.step()
        torch.testing.assert_close(shard, param.detach())


@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 6, 7, 9]])
@pytest.mark.parametrize("element", [False, True])
def test_rates_by_layer_step_and_element(cuts, element):
    table = rates((2.0, 3.0), (5.0, 7.0))
    each = torch.arange(9.0) if element else torch.ones(9)
    chosen = Rates(LAYERS, table.table, each if element else None)
    wanted = torch.tensor([5.0, 5, 5, 7, 7, 1, 5, 5, 5]) * each
    found = torch.ones(9)
    for a, b in pairwise(cuts):
        chosen.scale_(1, found[a:b], slice(a, b))
    assert torch.equal(found, wanted)
    shard, recorded = torch.zeros(9), torch.zeros(9)
    rule = inner_optimizer(Config())
    rule.update(1, rule.zero_state(9, torch.device("cpu")), chosen, recorded)(
        shard, torch.full((9,), -2.0), WHOLE
    )
    assert torch.equal(shard, 2 * wanted)
    assert torch.equal(recorded, torch.full((9,), -2.0))


def test_proximal_gradient():
    anchor = torch.arange(9.0)
    sgd, recorded = inner_optimizer(Config()), torch.zeros(9)
    update = sgd.update(
        0, sgd.zero_state(9, anchor.device), rates((1.0, 1.0)), recorded, anchor, proximal=0.5
    )
    update(torch.ones(4), torch.full((4,), 3.0), slice(2, 6))
    assert recorded[2:6].tolist() == [2.5, 2.0, 1.5, 1.0]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("hf.encoder.layer.3.attention.self.key.bias", "hf.encoder.layer.3"),
        ("hf.model.layers.11.mlp.up_proj.weight", "hf.model.layers.11"),
        ("hf.embeddings.LayerNorm.weight", "hf.embeddings.LayerNorm"),
        ("head.weight", "head"),
        ("weight", "weight"),
    ],
)
def test_layers_by_name(name, layer):
    assert layer_of(name, ("head.weight", "head.bias"), ()) == layer
    assert sorted(["l.10", "l.9", "e", "l.2"], key=natural) == ["e", "l.2", "l.9", "l.10"]


def inner_of(**settings):
    """A worker over a small model, and the inner loop of these settings."""
    config = config_of(LEARNER, **settings)
    worker = worker_of(LEARNER, config)
    return worker, setup_of(worker, config).inner


def test_layers_cover_the_model():
    worker, inner = inner_of()
    layers = inner.rates.layers
    covered = sorted((begin, end) for begin, end, _ in layers.segments)
    assert (covered[0][0], covered[-1][1]) == (0, worker.params.numel)
    assert all(a[1] == b[0] for a, b in pairwise(covered))
    assert {"head", "hf.encoder.layer.0"} < set(layers.names)
    for fragment in worker.params.fragments:
        ((_, _, index),) = layers.inside(fragment.here)
        assert layers.names[index] == layer_of(fragment.name, LEARNER.head_names, ())


def test_layer_with_rate_zero_is_unchanged():
    worker, inner = inner_of(inner_lr_groups=["*embeddings*=0", "head=2"])
    began = copy.deepcopy(worker.model.state_dict())
    inner.adapt(worker, worker.read(), batches_of(episode_of(LEARNER)).support)
    moved = {name for name, value in worker.model.state_dict().items() if not torch.equal(value, began[name])}
    assert moved == {f.name for f in worker.params.fragments if "embeddings" not in f.name}
    message = refusal(inner_of, inner_lr_groups=["*embeddings*=0", "decoder=2"])
    parts = ("inner_lr_groups=decoder=2", "the layers are head, hf.embeddings.LayerNorm, ")
    check_message(message, *parts)


def test_a_first_order_rule_stores_no_weights_for_learned_rates(monkeypatch):
    firsts = []

    class Noted(Trajectory):
        def __init__(self, *args):
            super().__init__(*args)
            firsts.append(self.first)

    monkeypatch.setattr(task, "Trajectory", Noted)
    for algorithm in ("fomaml", "maml"):
        rule, worker = rule_on(LEARNER, algorithm=algorithm, inner_lr_learned="layer")
        task_gradient(rule, worker, batches_of(episode_of(LEARNER)))
    assert firsts == [rule.inner.steps, 0]


OWN = "tests.support.outer_optimizer"
BAD = '''
import torch
from fmmeta.config.algorithms import OuterOptimizerSpec

class Normed(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= p.grad.norm()
        super().step()

class Counts(torch.optim.Optimizer):
    """Its rate falls by a count outside the state."""
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                p -= group["lr"] / group["count"] * p.grad

unnamed = OuterOptimizerSpec("Adam", ("exp_avg",))
nowhere = OuterOptimizerSpec("Adamm")
number = 3
'''


@pytest.mark.parametrize(
    ("name", "given", "own"), [("Averaged", {}, {}), ("spec", {"outer_momentum": 0.7}, {"beta": 0.7})]
)
def test_a_class_or_a_spec_makes_the_steps_of_torch(name, given, own):
    plain = {"weight_decay": 0.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    config = config_of(LEARNER, outer_optimizer=f"{OWN}:{name}", outer_lr=0.01, **plain, **given)
    worker = worker_of(LEARNER, config)
    theta = worker.read()
    param = nn.Parameter(theta.clone())
    wanted, outer = Averaged([param], 0.01, **own), OuterOptimizer(MetaParameters(theta), worker, config)
    head = worker.params.groups["inner_only"]  # a zero head has no outer step
    for step in range(3):
        param.grad = torch.randn(theta.shape, generator=RNG)
        param.grad[head] = 0
        outer.step(PendingMean({"theta": param.grad.clone()}), step)
        wanted.step()
    torch.testing.assert_close(theta, param.detach())
    assert set(outer.moments) == set(outer.spec.moments) == {"mean"}


@pytest.mark.parametrize("name", ["Adam", "Adadelta", "ASGD", "Rprop"])
def test_optimizers_of_torch_are_found_with_their_moments(name):
    own = torch.optim.__dict__[name]([value := nn.Parameter(torch.ones(3))])
    value.grad = torch.ones(3)
    own.step()
    vectors = {key for key, one in own.state[value].items() if torch.is_tensor(one) and one.ndim}
    found = find_outer(Config(outer_optimizer=f"torch.optim:{name}").outer_optimizer)
    assert set(found.moments) == vectors


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("bad_outer:Normed", "does not act element by element"),
        ("bad_outer:Counts", "does not act element by element, with moments and numbers as its only state"),
        ("torch.optim:Adafactor", "does not act element by element"),
        ("torch.optim:LBFGS", "cannot take a step on a vector"),
        ("bad_outer:unnamed", "stores exp_avg_sq"),
        ("bad_outer:nowhere", "cannot take a step on a vector"),
        ("bad_outer:number", "is a int and no OuterOptimizerSpec"),
        ("bad_outer:missing", "cannot be imported"),
        *((name, "") for name in OUTER_OPTIMIZERS),  # which pass
    ],
)
def test_an_outer_optimizer_that_cannot_work_on_shards_is_refused(name, part, tmp_path, monkeypatch):
    if not part:
        check_outer(Config(outer_optimizer=name))
        return
    (tmp_path / "bad_outer.py").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "bad_outer", raising=False)
    check_message(refusal(Config, outer_optimizer=name), f"outer_optimizer={name}", part)


INNER = "tests.support.inner_optimizer"


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"inner_optimizer": f"{INNER}:normed"}, "does not act element by element"),
        ({"outer_momentum": 0.5, "outer_optimizer": f"{OWN}:Averaged"}, "leave it out"),  # it reads none
        ({"inner_optimizer": f"{INNER}:not_in_place"}, "vectors changed in place as its only state"),
        ({"inner_optimizer": f"{INNER}:nameless"}, "cannot update a vector (KeyError"),
        ({"inner_optimizer": f"{INNER}:with_momentum"}, "has momentum="),
        ({"inner_optimizer": f"{INNER}:unlike"}, "gives another u than its direction"),
        ({"inner_optimizer": f"{INNER}:direction"}, "is a function and no InnerOptimizer"),
        ({"inner_optimizer": "adam"}, "did you mean adamw?"),
        ({"inner_optimizer": f"{INNER}:spec", "algorithm": "maml"}, "has no differentiable="),
        ({"inner_optimizer": f"{INNER}:spec", "algorithm": "imaml"}, "use sgd with more"),
    ],
)
def test_an_inner_optimizer_that_cannot_work_is_refused(settings, part):
    name, value = next(iter(settings.items()))
    check_message(refusal(Config, **settings), f"{name}={value}", part)


def test_the_plan_counts_the_vectors_of_an_inner_optimizer():
    own, sgd = (shards(Config(inner_optimizer=name)).work for name in (f"{INNER}:spec", "sgd"))
    assert own == sgd + 1


def test_a_name_of_code_in_a_model_is_not_imported(bert, tmp_path):
    """The name in fmmeta.json counts after the user has given it as a flag."""
    model = shutil.copytree(bert, tmp_path / "bert")
    (model / "fmmeta.json").write_text(json.dumps({"inner_optimizer": "not_there:spec", "n_way": 2}))
    given = {"model_name_or_path": str(model)}
    for kind in (EvaluateConfig, TuneConfig):
        message = refusal(kind(**given).run_config)
        parts = ("inner_optimizer=not_there:spec", "give --inner_optimizer not_there:spec")
        check_message(message, *parts)
    own = EvaluateConfig(**given, inner_optimizer=f"{INNER}:spec").run_config(n_way=2)
    assert own.inner_optimizer == f"{INNER}:spec"
    no_loop = EvaluateConfig(**given, method=["prototype"]).run_config(n_way=2)
    assert no_loop.inner_optimizer == "sgd"
