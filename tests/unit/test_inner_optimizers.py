"""Inner optimizers equal torch's on whole vectors and on shards; rates by layer, step and element."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from fmmeta.config.settings import Config
from fmmeta.meta import task
from fmmeta.meta.inner_loop import Trajectory
from fmmeta.meta.inner_optimizers import Layers, Rates, inner_optimizer, layer_of, natural
from tests.support import learners
from tests.support.learners import batches_of, config_of, episode_of, setup_of, worker_of
from tests.support.messages import check_message, refusal

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
    assert layer_of(name, ("head.weight", "head.bias")) == layer
    assert sorted(["l.10", "l.9", "e", "l.2"], key=natural) == ["e", "l.2", "l.9", "l.10"]


def test_layers_cover_the_model():
    learner = learners.bert()
    config = config_of(learner)
    worker = worker_of(learner, config)
    layers = setup_of(worker, config).inner.rates.layers
    covered = sorted((begin, end) for begin, end, _ in layers.segments)
    assert (covered[0][0], covered[-1][1]) == (0, worker.params.numel)
    assert all(a[1] == b[0] for a, b in pairwise(covered))
    assert {"head", "hf.encoder.layer.0"} < set(layers.names)
    for fragment in worker.params.fragments:
        ((_, _, index),) = list(layers.inside(fragment.here))
        assert layers.names[index] == layer_of(fragment.name, learner.head_names)


def test_layer_with_rate_zero_is_unchanged():
    learner = learners.bert()
    config = config_of(learner, inner_lr_groups=["*embeddings*=0", "head=2"])
    worker, episode = worker_of(learner, config), batches_of(episode_of(learner))
    began = copy.deepcopy(worker.model.state_dict())
    setup_of(worker, config).inner.adapt(worker, worker.read(), episode.support)
    moved = {name for name, value in worker.model.state_dict().items() if not torch.equal(value, began[name])}
    trained = {f.name for f in worker.params.fragments}
    assert moved == {name for name in trained if "embeddings" not in name}


def test_a_pattern_that_fits_no_layer_is_refused():
    learner = learners.bert()
    config = config_of(learner, inner_lr_groups=["*embeddings*=0", "decoder=2"])
    check_message(
        refusal(setup_of, worker_of(learner, config), config),
        "inner_lr_groups=decoder=2",
        "the layers are head, hf.embeddings.LayerNorm, ",
    )


def test_a_first_order_rule_stores_no_weights_for_learned_rates(monkeypatch):
    firsts, learner = list[int](), learners.bert()

    class Noted(Trajectory):
        def __init__(self, *args):
            super().__init__(*args)
            firsts.append(self.first)

    monkeypatch.setattr(task, "Trajectory", Noted)
    for algorithm in ("fomaml", "maml"):
        rule, worker = learners.rule_on(learner, algorithm=algorithm, inner_lr_learned="layer")
        learners.task_gradient(rule, worker, learners.batches_of(learners.episode_of(learner)))
    assert firsts == [rule.inner.steps, 0]
