"""Meta-gradients of each rule against the oracle (autograd in fp64), and how many passes each rule takes."""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fmmeta.config.algorithms import find
from fmmeta.meta.algorithms import setup as rules
from fmmeta.meta.algorithms.unrolled import step_loss_weights
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.meta.reference import layer_name, reference_gradient, set_gradient, set_loss
from fmmeta.tasks.batching import collate
from fmmeta.training.step_metrics import StepMetrics
from tests.support import learners
from tests.support.helpers import fast_or_slow
from tests.support.learners import (
    LEARNERS,
    PROTOTYPE,
    RuleOn,
    against_oracle,
    batches_of,
    by_name,
    compared,
    config_of,
    episode_of,
    identity,
    meta_gradient_of,
    passes_of,
    rule_on,
    setup_of,
    task_gradient,
)
from tests.support.messages import check_message, refusal

# cosine at least, relative error at most; fp32 differences of gradients leave 1e-3 after 7 inner steps, more
# or less by the processor's kernels, where the others leave less than 5e-4
FIRST, CLOSE, EXACT = (1 - 1e-9, 1e-5), (0.9999, 1e-3), (0.9999, 2e-3)
MOVED = (1 - 1e-8, 1e-4)  # theta - phi: the difference of larger numbers
PROTOTYPE_HEAD = {"head_init": "prototype"}
THROUGH = {**PROTOTYPE, "prototype_gradient": True}
CASES = [
    ("llama", {}),
    ("bert", {}),
    ("bert", {"head_init": "learned"}),
    ("classifier", {"head_init": "learned"}),
    ("classifier", {}),
    ("bert", PROTOTYPE),
    ("classifier", PROTOTYPE),
    ("bert", THROUGH),
    ("classifier", THROUGH),
    ("llama", {"inner_lr": 0.3}),
    ("bert", {"inner_lr": 0.3}),
    ("llama", {"inner_steps": 1}),
    ("llama", {"inner_steps": 7}),
    ("llama", {"inner_lr_groups": ["*layers.1=3", "*embed*=0"]}),
    ("llama", {"inner_parameters": ["except", "*.mlp.*", "*norm.weight"]}),
    ("bert", {"inner_lr_groups": ["head=4"]}),
    ("llama", {"multi_step_loss_steps": 10}),
    ("bert", {**THROUGH, "multi_step_loss_steps": 10}),
    ("llama", {"inner_optimizer": "momentum"}),
    ("bert", {"inner_optimizer": "momentum", "inner_momentum": 0.5}),
]


SETTLED = [  # by the others, one setting at a time
    ("bert", {}),
    ("classifier", {}),
    ("classifier", PROTOTYPE),
    ("classifier", THROUGH),
    ("llama", {"inner_lr": 0.3}),
    ("llama", {"inner_steps": 7}),
    ("bert", {"inner_lr_groups": ["head=4"]}),
    ("bert", {**THROUGH, "multi_step_loss_steps": 10}),
    ("bert", {"inner_optimizer": "momentum", "inner_momentum": 0.5}),
]
EXACTLY = [(case, [pytest.mark.slow] if case in SETTLED else []) for case in CASES]


@pytest.mark.parametrize(
    ("algorithm", "model", "settings", "bounds"),
    [
        *(("fomaml", *case, FIRST) for case in CASES),
        *(pytest.param("maml", *case, EXACT, marks=marks) for case, marks in EXACTLY),
        *(
            ("anil", model, {**head, **extra}, FIRST)  # to rounding: nothing is approximated
            for model in ("bert", "classifier")
            for head in ({}, {"head_init": "learned"}, PROTOTYPE, THROUGH)
            for extra in (
                {},
                {"first_order_steps": 5},
                {"inner_optimizer": "momentum"},
            )
        ),
        *(
            # with gradient checkpointing the support set is computed again
            ("anil", "classifier", {"micro_batch_size": 4, **settings}, FIRST)
            for settings in ({}, THROUGH, {"first_order_steps": 5})
        ),
        ("reptile", "bert", {}, MOVED),
        ("reptile", "bert", {"head_init": "learned"}, MOVED),
        ("reptile", "bert", {**PROTOTYPE_HEAD, "inner_lr": 0.1}, MOVED),
        ("boil", "bert", {}, CLOSE),
        ("boil", "classifier", {"inner_lr": 0.3}, CLOSE),
        ("boil", "bert", {"first_order_steps": 9}, FIRST),
        ("proto_maml", "bert", {"inner_lr": 0.02}, CLOSE),
        ("proto_maml", "classifier", {"inner_lr": 0.02, "prototype_gradient": True}, CLOSE),
        ("proto_maml", "bert", {"inner_lr": 0.02, "prototype_gradient": True, "first_order_steps": 9}, FIRST),
        ("meta_sgd", "llama", {}, CLOSE),
        ("meta_sgd", "bert", {}, CLOSE),
        ("meta_sgd", "llama", {"first_order_steps": 9}, FIRST),
        ("protonet", "bert", {}, FIRST),
        ("protonet", "classifier", {}, FIRST),
        ("protonet", "bert", {"inner_steps": 0}, FIRST),
        ("joint", "llama", {}, FIRST),
        ("meta_icl", "llama", {}, FIRST),
        ("meta_icl", "llama", {"loss_on_support": True}, FIRST),
        ("imaml", "llama", {"proximal_weight": 300.0, "inner_lr": 0.003}, CLOSE),
        (
            "imaml",
            "bert",
            {"proximal_weight": 10.0, "inner_lr": 0.05, "head_init": "learned"},
            CLOSE,
        ),
        ("imaml", "bert", {**THROUGH, "proximal_weight": 400.0, "inner_lr": 0.002}, CLOSE),
    ],
    ids=identity,
)
def test_meta_gradient_is_that_of_the_oracle(algorithm, model, settings, bounds):
    """That of MAML is far from the first order: else second derivatives would not be tested."""
    learner = LEARNERS[model]
    config, episode = config_of(learner, algorithm=algorithm, **settings), episode_of(learner)
    found, worker = learners.rule_gradient(learner, config, episode)
    wanted, _ = learners.oracle_gradient(learner, config, episode)
    cosine, error = compared(learner, config, worker, found.gradient, wanted)
    assert found.finite
    assert cosine > bounds[0]
    assert error < bounds[1]
    if algorithm == "maml":
        first, _ = learners.oracle_gradient(learner, replace(config, algorithm="fomaml"), episode)
        assert compared(learner, config, worker, found.gradient, first)[1] > 0.02


@pytest.mark.parametrize(
    "settings",
    [{}, THROUGH, {"inner_optimizer": "momentum"}, {"multi_step_loss_steps": 10}],
    ids=identity,
)
def test_oracle_equals_finite_differences_of_the_adapted_loss(settings):
    """In fp64: the adaptation is repeated at two values of theta along a line."""
    learner = copy.deepcopy(LEARNERS["bert"]).double()
    config, episode = config_of(learner, algorithm="maml", **settings), episode_of(learner)
    theta = {
        name: param.detach().clone() for name, param in learner.named_parameters() if param.requires_grad
    }
    if config.head_init != "learned":
        theta = {name: 0 * value if name in learner.head_names else value for name, value in theta.items()}
    assert slope_error(learner, theta, config, episode, 3, adapted_loss, h=1e-5) == pytest.approx(0, abs=1e-5)


def slope_error(learner, theta, config, episode, seed, loss, h):
    """The oracle's slope along a random line less that of finite differences, relative to it."""
    rng = torch.Generator().manual_seed(seed)
    along = {name: torch.randn(x.shape, generator=rng, dtype=x.dtype) for name, x in theta.items()}
    wanted, *_ = reference_gradient(learner, theta, episode, config, False)
    slope = sum(float((wanted[name] * along[name]).sum()) for name in theta)
    ends = [
        loss(learner, {name: theta[name] + step * along[name] for name in theta}, episode, config)
        for step in (h, -h)
    ]
    return slope * 2 * h / (ends[0] - ends[1]) - 1


def adapted_loss(learner, theta, episode, config):
    """Initialise the head, take SGD steps with momentum on the support set, weigh the query losses."""
    phi, velocity, total = dict(theta), {name: 0 * value for name, value in theta.items()}, 0.0
    if config.head_init == "prototype":
        model = copy.deepcopy(learner)
        for name, value in theta.items():
            model.get_parameter(name).data.copy_(value)
        features: dict[int, list] = {}
        for row in episode.support:
            ids = torch.tensor([row.input_ids])
            found = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
            features.setdefault(row.labels, []).append(found[0].detach())
        means = torch.stack([torch.stack(features[c]).mean(0) for c in range(learners.CLASSES)])
        phi[learner.head_names[0]], phi[learner.head_names[1]] = 2 * means, -means.square().sum(1)
    mu = config.inner_momentum if config.inner_optimizer == "momentum" else 0.0
    for k in range(config.inner_steps):
        gradient = set_gradient(learner, phi, episode.support, False)
        velocity = {name: mu * velocity[name] + gradient[name] for name in phi}
        phi = {name: phi[name] - config.inner_lr * velocity[name] for name in phi}
        share = 1 / config.inner_steps if config.multi_step_loss_steps else float(k == config.inner_steps - 1)
        total += share * float(set_loss(learner, phi, episode.query, False)) if share else 0.0
    return total


def test_the_oracle_of_imaml_is_the_derivative_of_the_proximal_minimum():
    """Lemma 1 of the paper: theta moved, the proximal problem solved to the end again, in fp64."""
    learner = learners.bert(**learners.SMALL).double()
    imaml = {"algorithm": "imaml", "head_init": "learned", "proximal_weight": 8.0, "inner_lr": 0.05}
    config = config_of(learner, **imaml, inner_steps=30, cg_steps=25)
    theta = {name: p.detach().clone() for name, p in learner.named_parameters() if p.requires_grad}

    def loss(learner, began, episode, config):
        phi = began
        for _ in range(30):  # each leaves 0.6 of the way
            gradient = set_gradient(learner, phi, episode.support, False)
            phi = {
                name: phi[name] - 0.05 * (gradient[name] + 8.0 * (phi[name] - began[name])) for name in phi
            }
        return float(set_loss(learner, phi, episode.query, False))

    assert slope_error(learner, theta, config, episode_of(learner), 1, loss, h=1e-4) == pytest.approx(
        0, abs=1e-3
    )


EXTRA = [{}, {"inner_optimizer": "momentum", "inner_momentum": 0.5}, {"multi_step_loss_steps": 4}]
LEARNED = [*itertools.product(("bert", "llama"), ("fomaml", "maml"), ("layer", "element"), EXTRA)]


@pytest.mark.parametrize("case", fast_or_slow(LEARNED, LEARNED[::5].__contains__, str))
def test_gradient_of_learned_rates_equals_autograd(case):
    """Of rates that differ from the start."""
    model, algorithm, learned, extra = case
    learner, at_most = LEARNERS[model], 1e-5 if algorithm == "fomaml" else 1e-3
    settings = {"inner_lr_learned": learned, "inner_lr_groups": ["*0*=2"], **extra}
    config, episode = config_of(learner, algorithm=algorithm, **settings), episode_of(learner)
    found, worker = learners.rule_gradient(learner, config, episode)
    wanted, theirs = learners.oracle_gradient(learner, config, episode)
    assert compared(learner, config, worker, found.gradient, wanted)[1] < at_most
    if learned == "element":
        mine = by_name(worker, found.extra["rates"])
    else:
        names = setup_of(worker, config).inner.rates.layers.names
        mine = dict(zip(names, found.extra["rates"].T, strict=True))
        theirs = {layer_name(name): value for name, value in theirs.items()}
        assert sorted(mine) == sorted(theirs)
    a, b = (torch.cat([of[name].double().reshape(-1) for name in theirs]) for of in (mine, theirs))
    assert learners.cosine_and_error(a, b)[1] < at_most


@pytest.mark.parametrize(("outer_step", "order"), [(0, 1), (3, 1), (4, 2), (9, 2)])
def test_derivative_order_is_annealed(outer_step, order):
    _, error = against_oracle(LEARNERS["llama"], outer_step, algorithm="maml", first_order_steps=4)
    assert error < (1e-5 if order == 1 else 1e-3)
    assert error > (0 if order == 1 else 1e-6)


def test_multi_step_weights():
    assert step_loss_weights(4, 0, 8) == (0.25, 0.25, 0.25, 0.25)
    assert step_loss_weights(4, 4, 8) == (0.125, 0.125, 0.125, 0.625)
    assert [step_loss_weights(4, step, 8) for step in (8, 9)] == [(), ()]
    assert step_loss_weights(4, 0, 0) == ()
    assert all(sum(step_loss_weights(5, step, 30)) == pytest.approx(1) for step in range(30))


def calls_of(worker, monkeypatch, note: Callable[[], int] = lambda: 0) -> list[int]:
    """What `note` gives at every forward of a worker from here on."""
    calls, call = list[int](), worker._call
    monkeypatch.setattr(worker, "_call", lambda *a, **k: calls.append(note()) or call(*a, **k))
    return calls


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama", {"algorithm": "fomaml"}),
        ("llama", {"algorithm": "reptile"}),
        ("llama", {"algorithm": "maml", "multi_step_loss_steps": 9}),
        ("llama", {"algorithm": "imaml", "cg_steps": 2, "proximal_weight": 50.0}),
        ("llama", {"algorithm": "joint"}),
        ("llama", {"algorithm": "meta_icl", "inner_steps": None}),
        ("bert", {"algorithm": "proto_maml", "head_init": "prototype", "prototype_gradient": True}),
        ("bert", {"algorithm": "anil", "first_order_steps": 9}),
        ("bert", {"algorithm": "protonet", "head_init": "prototype", "inner_steps": 0}),
    ],
)
def test_a_rule_calls_its_hook_between_any_two_passes(model, settings, monkeypatch):
    """Before the n-th pass of a task the hook was called n - 1 times."""
    learner, hooks = LEARNERS[model], list[None]()
    rule, worker = rule_on(learner, **settings)
    seen = calls_of(worker, monkeypatch, lambda: len(hooks))
    meta = MetaParameters.of(worker.read(), rule.inner)
    episode = batches_of(episode_of(learner), micro_batch_size=32)
    into = MetaGradient(meta.theta, meta.extra)
    rule.rule(replace(rule.task(worker, episode, into, meta), between_passes=lambda: hooks.append(None)))
    assert seen == list(range(len(seen)))


IMAML = {"proximal_weight": 300.0, "inner_lr": 0.003, "cg_steps": 3}
PASSES = [  # with a gradient, without, after n inner steps
    ("llama", "fomaml", {}, lambda n: (n + 1, 0)),
    ("llama", "fomaml", {"inner_lr_learned": "layer"}, lambda n: (n + 1, 0)),
    ("llama", "fomaml", {"multi_step_loss_steps": 9}, lambda n: (2 * n, 0)),
    ("llama", "reptile", {}, lambda n: (n, 1)),
    ("llama", "maml", {}, lambda n: (3 * n + 3, 0)),
    ("llama", "imaml", IMAML, lambda n: (n + 1 + 2 * 3 + 2, 0)),
    ("llama", "joint", {}, lambda n: (2, 0)),
    ("llama", "meta_icl", {"inner_steps": None}, lambda n: (1, 0)),
    ("bert", "anil", {}, lambda n: (2, 0)),
    ("bert", "anil", {"first_order_steps": 9}, lambda n: (1, 1)),
    ("bert", "anil", {"micro_batch_size": 29}, lambda n: (2, 1)),  # of 15 + 15 rows
    ("bert", "boil", {}, lambda n: (3 * n + 3, 0)),
    ("bert", "meta_sgd", {}, lambda n: (3 * n + 3, 0)),
    ("bert", "proto_maml", {}, lambda n: (3 * n + 3, 0)),
    ("bert", "proto_maml", {"prototype_gradient": True}, lambda n: (3 * n + 4, 0)),
    ("bert", "protonet", {}, lambda n: (2, 0)),
]


@pytest.mark.parametrize("steps", [1, 5])
def test_number_of_passes_per_task(steps, monkeypatch):
    """The numbers of the docstrings and of docs/how-to/choose-an-algorithm.md."""
    for model, algorithm, settings, wanted in PASSES:
        given = {"algorithm": algorithm, "inner_steps": steps, **settings}
        assert passes_of(LEARNERS[model], monkeypatch, **given) == wanted(steps), (algorithm, settings)


@pytest.mark.parametrize(
    "settings", [{}, THROUGH, {"first_order_steps": 5}, {"inner_optimizer": "momentum"}], ids=identity
)
def test_class_weights_count_in_the_inner_loop_on_the_head(settings):
    """A weight of 2 is the same loss as every row of the class twice, which the oracle gets."""
    learner, weights = LEARNERS["bert"], (1, 3, 2)
    config, episode = config_of(learner, algorithm="anil", **settings), episode_of(learner)
    rule, worker = rule_on(learner, algorithm="anil", **settings)
    found = task_gradient(rule, worker, batches_of(episode, class_weights=weights))
    support, query = (
        [row for row in rows for _ in range(weights[row.labels])] for rows in (episode.support, episode.query)
    )
    wanted, _ = learners.oracle_gradient(learner, config, replace(episode, support=support, query=query))
    assert compared(learner, config, worker, found.gradient, wanted)[1] < 1e-5


@pytest.mark.parametrize("model", ["bert", "classifier"])
def test_anil_evaluation_and_training_reach_the_same_head(model):
    """Evaluation runs the ordinary inner loop with rates of zero on the body; both reach the same head and
    first loss.
    """
    learner = LEARNERS[model]
    config, episode = config_of(learner, algorithm="anil", head_init="learned"), episode_of(learner)
    found, worker = learners.rule_gradient(learner, config, episode)
    inner = setup_of(worker, config).inner
    adapted = inner.adapt(worker, worker.read(), batches_of(episode).support)
    assert found.support.loss == pytest.approx(adapted.passes[0].loss, rel=1e-6)
    assert found.support.accuracy == adapted.passes[0].accuracy
    assert found.query.loss == pytest.approx(worker.forward(batches_of(episode).query).loss, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"algorithm": "anil"}, 2 + 3),
        ({"algorithm": "anil", **PROTOTYPE_HEAD}, 2 + 3),
        ({"algorithm": "fomaml", **PROTOTYPE_HEAD}, 3 + 4 * 2 + 3 * 3),
        ({"algorithm": "imaml"}, 4 * 2 + 3 * 3),
    ],
    ids=identity,
)
def test_scores_after_each_step_are_those_of_the_query_set(settings, calls):
    """9 + 6 rows in micro-batches of 4: 3 and 2. Where the body stays, each goes through it once."""
    learner, seen = LEARNERS["bert"], list[int]()
    episode = batches_of(episode_of(learner), class_weights=(1, 4, 2))
    rule, worker = rule_on(learner, **settings)
    theta = worker.read()
    hook = worker.learner.hf.register_forward_hook(lambda *_: seen.append(1))
    found = rule.inner.scores_after_each_step(worker, theta, episode)
    assert len(seen) == calls
    hook.remove()
    end = worker.read()
    for steps, one in enumerate(found):
        worker.write(theta)
        replace(rule.inner, steps=steps).adapt(worker, theta, episode.support)
        assert one.stats.tolist() == pytest.approx(worker.forward(episode.query).stats.tolist(), rel=1e-6)
    torch.testing.assert_close(worker.read(), end)
    assert len({one.loss for one in found}) == len(found) == 4


@pytest.mark.parametrize("settings", [{}, PROTOTYPE], ids=identity)
def test_anil_of_fewer_classes_than_the_head_has(settings):
    """The head's other outputs take no part."""
    more = learners.CLASSES + 2
    learner, found = learners.bert(classes=more), []
    for classes in (learners.CLASSES, more):
        model = learners.bert(classes=classes)
        model.hf.load_state_dict(learner.hf.state_dict())
        config = config_of(model, algorithm="anil", n_way=classes, **settings)
        worker = learners.worker_of(model, config)
        rule = RuleOn(find("anil").rule, rules.setup(config, worker, model.head_names, classes, False))
        batches = batches_of(episode_of(learner))
        for batch in [*batches.support, *batches.query]:
            batch.targets["classes"] = torch.full((len(batch.weights),), learners.CLASSES)
        result = task_gradient(rule, worker, batches)
        embedding = by_name(worker, result.gradient)["hf.embeddings.word_embeddings.weight"]
        found.append([embedding, torch.tensor(result.query.loss)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


HEAD_ALONE = {"algorithm": "fomaml", "inner_lr_groups": ["head=1", "*=0"]}


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "anil"},
        {"algorithm": "anil", **PROTOTYPE, "inner_optimizer": "momentum"},
        {**HEAD_ALONE, "inner_optimizer": "adamw", "head_init": "learned"},
        {**HEAD_ALONE, "inner_optimizer": "tests.support.inner_optimizer:same_dtype"},
        {"algorithm": "anil", "inner_optimizer": "tests.support.inner_optimizer:same_dtype_smooth"},
    ],
    ids=identity,
)
def test_head_only_steps_run_one_body_forward(settings, monkeypatch):
    """The same phi, losses and accuracies as steps of the whole model at rates of zero on the body; one
    forward for all.
    """
    learner = LEARNERS["bert"]
    episode = batches_of(episode_of(learner), class_weights=(1, 4, 2))

    def learned(whole: bool):
        rule, worker = rule_on(learner, **settings)
        inner, calls = rule.inner, calls_of(worker, monkeypatch)
        assert inner.changes_head_only
        with monkeypatch.context() as patch:
            patch.setattr(type(inner), "changes_head_only", property(lambda self: not whole))
            passes = inner.adapt(worker, worker.read(), episode.support).passes
        return worker.read(), [p.loss for p in passes], [p.accuracy for p in passes], len(calls)

    (phi, losses, right, few), (wanted, loss, others, many) = learned(False), learned(True)
    torch.testing.assert_close(phi, wanted, rtol=1e-5, atol=1e-6)
    assert losses == pytest.approx(loss, rel=1e-5)
    assert right == others
    means = 1 if settings.get("head_init") == "prototype" else 0  # of several micro-batches: a separate pass
    assert (few, many) == (len(episode.support), (3 + means) * len(episode.support))


def test_the_first_step_reuses_the_forward_of_the_class_means(monkeypatch):
    """Of one micro-batch; phi is that of a pass more."""
    found = []
    for kept in (True, False):
        rule, worker = rule_on(LEARNERS["bert"], **PROTOTYPE)
        calls = calls_of(worker, monkeypatch)
        monkeypatch.setattr(worker, "can_defer_backward", kept)
        rule.inner.adapt(worker, worker.read(), batches_of(episode_of(LEARNERS["bert"]), 32).support)
        found.append((worker.read(), len(calls)))
    (phi, few), (wanted, many) = found
    assert (few, many) == (3, 4)
    torch.testing.assert_close(phi, wanted, rtol=1e-6, atol=1e-8)


def test_boil_does_not_change_the_head():
    learner = LEARNERS["bert"]
    rule, worker = rule_on(learner, algorithm="boil")
    began = copy.deepcopy(worker.model.state_dict())
    rule.inner.adapt(worker, worker.read(), batches_of(episode_of(learner)).support)
    still = {name for name, value in worker.model.state_dict().items() if torch.equal(value, began[name])}
    assert still - {f"hf.pooler.dense.{part}" for part in ("weight", "bias")} == set(learner.head_names)


CLASSIFIERS = ("fomaml", "reptile", "maml", "anil", "boil", "proto_maml", "meta_sgd", "imaml", "protonet")
BY_PROTOTYPES = [{**PROTOTYPE_HEAD, "bf16": bf16} for bf16 in (False, True)]


@pytest.mark.parametrize(
    ("algorithm", "poison", "settings"),
    [
        *itertools.product((*CLASSIFIERS, "joint"), ("support", "query"), [{}]),
        ("meta_icl", "query", {}),
        *itertools.product(("fomaml", "reptile", "maml"), ("support", "steps"), BY_PROTOTYPES),
        *(("anil", "query", more) for more in ({"head_init": "learned"}, THROUGH, {"first_order_steps": 5})),
    ],
    ids=identity,
)
def test_a_task_adds_its_gradient_to_any_sum_or_nothing(algorithm, poison, settings):
    """Nothing if its support or query set or steps that are too long are not finite: the next task is as
    without it, and the worker holds theta.
    """
    learner = LEARNERS["bert" if algorithm in CLASSIFIERS else "llama"]
    rule, worker = rule_on(learner, algorithm=algorithm, **settings)
    alone = task_gradient(rule, worker, batches_of(episode_of(learner))).gradient
    too_long = {"inner_lr": 1e38} if poison == "steps" else {}
    bad, _ = rule_on(learner, algorithm=algorithm, **settings, **too_long)
    episode, theta = batches_of(episode_of(learner)), worker.read()
    held = copy.deepcopy(worker.model.state_dict())
    into, start = meta_gradient_of(rule, theta), torch.linspace(-1, 1, worker.params.numel)
    into.sum.copy_(start)
    for batch in getattr(episode, poison, []):
        batch.weights *= math.inf
    assert not task_gradient(bad, worker, episode, into).finite
    assert torch.equal(into.sum, start)
    assert into.weight == 0
    assert task_gradient(rule, worker, batches_of(episode_of(learner)), into).finite
    assert into.weight == 1
    torch.testing.assert_close(into.sum - start, alone, rtol=1e-4, atol=1e-6)
    assert torch.equal(worker.read(), theta)
    assert all(torch.equal(value, held[name]) for name, value in worker.model.state_dict().items())


@pytest.mark.parametrize("algorithm", ["anil", "protonet"])
def test_padding_rows_have_no_weight(algorithm):
    """A rank without rows runs a padding row of weight 0; here it is added to the others."""
    learner, found = LEARNERS["bert"], []
    rule, worker = rule_on(learner, algorithm=algorithm, inner_lr=0.05, **PROTOTYPE_HEAD)
    episode = episode_of(learner)
    for filler in ([], [collate(episode.query[:1], 0.0, 0)]):
        batches = batches_of(episode)
        batches.support.extend(filler)
        found.append(task_gradient(rule, worker, batches).gradient)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_a_rule_that_does_not_return_a_number_of_its_spec_is_refused():
    learner = LEARNERS["llama"]
    result, _ = learners.rule_gradient(learner, config_of(learner, algorithm="fomaml"), episode_of(learner))
    message = refusal(StepMetrics(("sharpness",)).add, result, 1)
    check_message(message, "TaskResult.numbers has no 'sharpness'", "leave it out of the spec")
