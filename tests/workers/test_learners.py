"""Each operation of each worker, with every other learner and one from outside, gives what the plain worker
gives, which gives what autograd gives in fp64.

To add a learner: a line in LEARNERS.
"""

from functools import cache

import pytest
import torch

from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_learner
from fmmeta.tasks.batching import map_tensors
from tests.support.models import save, save_bert, save_llama, tiny, write_pairs, write_preferences, write_rows
from tests.support.ranks import built, first_episode, on_ranks
from tests.workers.cases import EXACT, KINDS, engine, launch, relative_error
from tests.workers.exercise import LR, OPERATIONS, made_tensor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LEARNERS = {  # model, rows, further settings
    "token_classification": ("bert", "tagged", {"n_way": 5, "head_init": "learned"}),
    "regression": ("bert", "numbers", {"n_way": 2, "head_init": "learned"}),
    "seq2seq": ("t5", "pairs", {}),
    "preference": ("llama", "preferences", {}),
    "reward": ("bert", "preferences", {"n_way": 1, "head_init": "learned"}),
    "examples.own_module:Sine": ("", "examples.own_module:tasks", {}),
}
WORKERS = ("ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "tensor")
SETS = {"k_shot": 5, "num_query": 3, "micro_batch_size": 2}
TOLERANCE = 5e-6  # a reward is a difference of numbers that are almost equal
GENERAL = [name for name, (_, of_classes) in OPERATIONS.items() if not of_classes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learners")
    save_llama(folder / "llama")
    save_bert(folder / "bert")
    save(tiny("t5"), folder / "t5")
    write_rows(folder)
    write_pairs(folder / "pairs.jsonl")
    write_preferences(folder / "preferences.jsonl")
    return folder


def settings(folder, learner, stage=None, **extra):
    model, rows, more = LEARNERS[learner]
    found = {**engine(folder, stage), **extra, **SETS, **more, "task_type": learner}
    found |= {"dataset": [rows], "model_name_or_path": "tiny"}
    if model:
        return found | {
            "dataset": [str(folder / f"{rows}.jsonl")],
            "model_name_or_path": str(folder / model),
        }
    return {name: one for name, one in found.items() if name not in ("k_shot", "num_query")}


def learners(kind):
    """Those that a worker can hold: with tensor ranks a model needs a plan."""
    return ["preference"] if kind == "tensor" else [*LEARNERS]


@pytest.fixture(scope="module")
def plain(folder):
    return launch(1, {learner: settings(folder, learner) for learner in LEARNERS})


@pytest.fixture(scope="module")
def results(folder):
    @cache
    def of(kind):
        ranks, extra = KINDS[kind]
        return launch(ranks, {learner: settings(folder, learner, **extra) for learner in learners(kind)})

    return of


@pytest.mark.parametrize("operation", GENERAL)
@pytest.mark.parametrize(
    ("kind", "learner"), [(kind, learner) for kind in WORKERS for learner in learners(kind)]
)
def test_an_operation_equals_that_of_the_plain_worker(plain, results, kind, learner, operation):
    if operation == "gradient vjp" and kind in ("ZeRO 3", "tensor"):
        assert not any(name.startswith(operation) for name in results(kind)[learner] if "theta" not in name)
        return
    error = relative_error(results(kind)[learner], plain[learner], operation)
    assert error <= (1e-6 if operation in EXACT else TOLERANCE)


def doubled(values):
    return map_tensors(values, lambda one: one.double() if one.is_floating_point() else one)


@on_ranks(1)
def by_autograd(world, listed):
    """What some operations give with whole sets in one pass and without a worker, in fp64."""
    ranks, results = None, {}
    for learner, given in listed.items():
        config = Config(**given)
        inputs, ranks, parts = built(world, config, ranks)
        episode = first_episode(config, inputs, ranks, parts)
        module = load_learner(config, describe(config)).double()
        params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        found = results.setdefault(learner, {})

        def gradient(batches, module=module, params=params):
            (batch,) = batches
            batch = batch.__class__(doubled(batch.inputs), doubled(batch.targets), batch.weights.double())
            loss = module.losses(module(**batch.inputs), batch).weighted(batch.weights).loss.sum()
            grads = torch.autograd.grad(loss, [*params.values()], allow_unused=True, materialize_grads=True)
            return loss.item(), dict(zip(params, grads, strict=True))

        def keep(operation, values, found=found):
            found[operation] = {name: value.detach().clone() for name, value in values.items()}

        begin = {name: param.detach().clone() for name, param in params.items()}
        made = {name: made_tensor("sum" + name, tuple(value.shape)) for name, value in begin.items()}
        found["loss"], of_query = gradient(episode.query)
        keep("gradient", of_query)
        for step in range(2):
            _, of_support = gradient(episode.support)
            with torch.no_grad():
                for name, param in params.items():
                    param.sub_(LR * of_support[name])
            if step == 0:
                keep("displacement", {name: made[name] + begin[name] - params[name] for name in made})
                _, of_query = gradient(episode.query)
                total = {name: made[name] + 0.25 * of_query[name] for name in made}
                keep("weighted gradient that restores", total)
        keep("two steps, theta", params)
    return results


@pytest.fixture(scope="module")
def oracle(folder):
    whole = {"micro_batch_size": 99, "group_size": "1"}
    return by_autograd({learner: {**settings(folder, learner), **whole} for learner in LEARNERS})[0]


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_plain_worker_equals_autograd(plain, oracle, learner):
    found, wanted = plain[learner], dict(oracle[learner])
    assert float(found["forward/stats"][0]) == pytest.approx(wanted.pop("loss"), rel=1e-5)
    for operation, values in wanted.items():
        off = sum(float((found[f"{operation}/{name}"] - one).square().sum()) for name, one in values.items())
        size = sum(float(one.square().sum()) for one in values.values())
        assert size > 0
        assert (off / size) ** 0.5 < TOLERANCE, operation
