"""A task that is not finite is dropped with its weight, in whatever group it ran; theta is what the others
make it.
"""

import json
import math
import shutil
import tempfile
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fmmeta.config.settings import Config
from fmmeta.meta.reference import reference_run
from tests.support.launch import train
from tests.support.matrix import Case, ParityFixture, oracle_inputs, relative_error, tolerance
from tests.support.messages import check_message
from tests.support.models import save_llama, write_pairs
from tests.support.nan_memory import fill
from tests.support.ranks import built, first_episode, on_ranks
from tests.support.run_cases import run_cases
from tests.support.short_runs import metrics_of

# Three tasks per step; with two groups, one of them runs a single one. Poisoned (outer step, slot, set):
POISONS = {
    "first": [[0, 0, "support"]],
    "last": [[2, 2, "query"]],
    "two": [[1, 0, "query"], [1, 2, "support"]],
    "every": [[1, 0, "support"], [1, 1, "query"], [1, 2, "support"]],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nonfinite")
    return folder, save_llama(folder / "llama"), write_pairs(folder / "pairs.jsonl")


@pytest.fixture(scope="module")
def expected_theta(files):
    """What an algorithm ends at with a poison, on any layout."""
    _, model, data = files
    return cache(
        lambda algorithm, name: oracle(Config(**settings(model, data, algorithm=algorithm)), POISONS[name])
    )


def settings(model, data, **extra):
    return {
        "model_name_or_path": str(model),
        "dataset": [str(data)],
        "task_type": "causal_lm",
        "k_shot": 5,
        "num_query": 3,
        "meta_batch_size": 3,
        "inner_steps": 2,
        "outer_steps": 3,
        "outer_optimizer": "sgd",
        "outer_lr": 0.5,
        "lr_scheduler_type": "linear",
        **extra,
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("group_size", "stages", "spread", "every_rule"),
    [
        (1, ("plain", 0), {}, False),
        pytest.param(1, ("plain",), {}, True, marks=pytest.mark.slow),
        pytest.param(2, (0, 1, 2, 3), {}, False, marks=pytest.mark.slow),
        pytest.param(2, (0, 1), {"pipeline_stages": 2}, False, marks=pytest.mark.slow),
        pytest.param(
            2, (0, 1), {"tensor_parallel_size": 2}, False, marks=[pytest.mark.slow, pytest.mark.long]
        ),
    ],
)
def test_theta_is_that_of_the_finite_tasks(files, expected_theta, group_size, stages, spread, every_rule):
    """On two groups. every_rule: with each poison; otherwise each poison has one rule."""
    folder, model, data = files
    chosen = [
        (stage, algorithm, name)
        for stage, algorithm, name in product(stages, ("fomaml", "reptile"), POISONS)
        if every_rule or (name == "last") == (algorithm == "reptile")
    ]
    listed = []
    for stage, algorithm, name in chosen:
        zero, engine = (0, "plain") if stage == "plain" else (stage, "deepspeed")
        ds = folder / f"zero{stage}.json"
        ds.write_text(json.dumps({"zero_optimization": {"stage": zero}}))
        own = {"deepspeed": str(ds), "algorithm": algorithm, "group_size": str(group_size), "engine": engine}
        config = settings(model, data, **own, **spread)
        listed.append({"id": f"{stage}-{algorithm}-{name}", "config": config, "poison": POISONS[name]})
    out = folder / f"out-{group_size}-{every_rule}-{'-'.join(spread)}"
    found = run_cases(listed, out, 2 * group_size, timeout_s=500)
    for case, (_, algorithm, name) in zip(listed, chosen, strict=True):
        assert relative_error(found[case["id"]][0], *expected_theta(algorithm, name)) < 1e-5, case["id"]
        metrics = metrics_of(out / case["id"])
        skipped = [sum(step == line["step"] - 1 for step, *_ in case["poison"]) for line in metrics]
        assert [line["skipped_tasks"] for line in metrics] == skipped, case["id"]


@pytest.mark.parametrize(
    "rows",
    [
        [("reptile", "nothing")],
        pytest.param([("reptile", "multi_task"), ("fomaml", "nothing")], marks=pytest.mark.slow),
    ],
)
def test_uninitialized_memory_does_not_change_theta(tmp_path, rows):
    """ZeRO 3 pads parameters that its ranks cannot share evenly with what it finds in memory: here, no
    numbers.
    """
    cases = [
        Case((1, 2), 3, algorithm, "several", "default", "bert", "fp32", "sgd", "learned", "micro", also)
        for algorithm, also in rows
    ]
    bench = ParityFixture(tmp_path)
    outcomes = bench.run(cases, fill)
    assert {
        case.id: error
        for case in cases
        if (error := bench.error(case, outcomes[case.id][0])) >= tolerance(case)
    } == {}


@on_ranks(2, timeout_s=300)
def test_a_gradient_rejected_by_one_stage_is_rejected_by_all(world, files):
    """A gradient that is not finite on the first of two stages alone: neither stage adds anything of it.

    ZeRO 0 and 1 in fp32, and 1 in bf16: DeepSpeed agrees on what is finite in the last alone.
    """
    folder, model, data = files
    own = Path(tempfile.mkdtemp(dir=folder)) / "deepspeed.json"
    ranks = None
    for way, stage, bf16 in (("optimizer", 0, False), ("none", 1, False), ("engine", 1, True)):
        own.write_text(json.dumps({"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}}))
        config = Config(**settings(model, data, group_size="2", pipeline_stages=2, deepspeed=str(own)))
        inputs, ranks, parts = built(world, config, ranks)
        worker, theta = parts.worker, parts.meta_params.theta
        assert worker.shards.nonfinite_consensus == way
        episode = first_episode(config, inputs, ranks, parts)
        begin = torch.linspace(-1, 1, worker.params.numel)
        total = begin.clone()
        last = [param for param in worker.stage.parameters() if param.requires_grad][-1]
        for broken in (True, False):
            factor = float("nan") if broken and ranks.layout.group_rank == 0 else 1.0
            hook = last.register_hook(lambda grad, factor=factor: grad * factor)
            assert worker.gradient(episode.query, total, restore=theta).finite != broken
            hook.remove()
            assert torch.equal(total, begin) == broken
            assert torch.equal(worker.read(), theta)


def oracle(config, poison):
    """The reference run without the poisoned tasks; a step that loses all of them leaves theta alone."""
    learner, began, steps = oracle_inputs(config)
    dropped = {(step, slot) for step, slot, _ in poison}
    finite = [
        [episode for slot, episode in enumerate(episodes) if (step, slot) not in dropped]
        for step, episodes in enumerate(steps)
    ]
    return reference_run(learner, finite, config).thetas[-1], began


def refused(files, tmp_path, **own):
    """The lines of a run on two ranks that refuses or ends with an error on both."""
    _, model, data = files
    flags = {"model_name_or_path": model, "dataset": data, "task_type": "causal_lm", "num_query": 3}
    ended = train(tmp_path / "run", 2, **{**flags, **own})
    assert ended.codes == [2, 2]
    assert not ended.others
    assert "Traceback" not in ended.output[0]
    return ended.output[0].splitlines()


def test_a_run_without_finite_tasks_ends_with_an_error(files, tmp_path):
    diverging = {"meta_batch_size": 2, "outer_steps": 20, "inner_lr": 1e30, "max_bad_steps": 4}
    (line,) = [line for line in refused(files, tmp_path, **diverging) if "no task was finite" in line]
    check_message(line, "4 outer steps in a row (the last is 4)", "lower --inner_lr")


@pytest.mark.parametrize(
    ("value", "own"),
    [
        (math.nan, {}),
        (math.inf, {"lora_r": 2}),
        (-math.inf, {"group_size": 2, "deepspeed": "zero3"}),
        (math.nan, {"group_size": 2, "pipeline_stages": 2}),
    ],
)
def test_a_model_with_weights_that_are_not_finite_is_refused_on_all_ranks(files, tmp_path, value, own):
    broken, name = shutil.copytree(files[1], tmp_path / "broken"), "layers.1.self_attn.q_proj.weight"
    weights = load_file(broken / "model.safetensors")
    (key,) = [key for key in weights if key.endswith(name)]
    weights[key][3, 4] = value
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    lines = refused(files, tmp_path, **{"model_name_or_path": broken, **own})
    (line,) = [line for line in lines if "NaN" in line]
    layer = name.replace(".weight", "")
    check_message(line, f"model_name_or_path={broken}", "NaN or infinite", layer, "give a checkpoint")
    assert not (tmp_path / "run").exists()
