"""`fmmeta evaluate` and metrics of the user give the same scores on any number of ranks, and wherever a model
can be trained.
"""

from __future__ import annotations

import json
import signal
import time
from functools import cache

import pytest

from harness.fork_server import shared
from tests.support.launch import ROOT, Forked, run_ranks, start_ranks, train
from tests.support.messages import check_message
from tests.support.models import save_bert, save_llama, write_classes, write_pairs
from tests.support.short_runs import metrics_of


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Settings of a model and its data."""
    folder = tmp_path_factory.mktemp("classifier")
    rows = write_classes(folder / "rows.jsonl", classes=15, rows=8)
    return {"model_name_or_path": save_bert(folder / "bert"), "dataset": rows, "n_way": 3}


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    data = write_pairs(folder / "pairs.jsonl")
    return {"model_name_or_path": save_llama(folder / "llama"), "dataset": data, "task_type": "causal_lm"}


def words_of(settings):
    """A command line; a list is the values of one flag."""
    flags = {f"--{name}": value if isinstance(value, list) else [value] for name, value in settings.items()}
    return [str(word) for flag, values in flags.items() for word in (flag, *values)]


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory):
    """The cells of an evaluation on some ranks, which is run once."""
    folder = tmp_path_factory.mktemp("evaluate")

    @cache
    def run(ranks: int, *words: str):
        output = folder / f"{len([*folder.iterdir()])}.json"
        ended = run_ranks(["-m", "fmmeta", "evaluate", *words, "--output", str(output)], ranks).ok()
        assert not ended.others  # only rank 0 logs
        assert "accuracy %" in ended.output[0] or "loss" in ended.output[0]
        return json.loads(output.read_text())["cells"]

    return lambda ranks, **settings: run(ranks, *words_of(settings))


FEW = {"k_shot": [1, 2], "num_query": 3, "episodes": 5, "method": ["finetune", "prototype"]}
ZERO3 = {"group_size": 2, "deepspeed": ROOT / "ds_configs" / "zero3.json"}
STAGES = {"group_size": 2, "pipeline_stages": 2}


def assert_same_losses(cells, wanted):
    for mine, theirs in zip(cells, wanted, strict=True):
        assert mine["episodes_fingerprint"] == theirs["episodes_fingerprint"]
        losses = [score["loss"] for score in theirs["scores"]]
        assert [score["loss"] for score in mine["scores"]] == pytest.approx(losses, rel=1e-4)


@pytest.mark.timeout(300)
def test_any_number_of_ranks_gives_the_same_scores(evaluate, classifier):
    one, three = (evaluate(ranks, **classifier, **FEW) for ranks in (1, 3))
    assert one == three


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_gives_the_scores_of_one_process(evaluate, classifier):
    one, shared, stages = (
        evaluate(ranks, **classifier, **FEW, **layout) for ranks, layout in ((1, {}), (2, ZERO3), (2, STAGES))
    )
    for spread in (shared, stages):
        assert_same_losses(spread, one)
        for mine, theirs in zip(spread, one, strict=True):
            assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=0.03)
    assert [cell["ece"] is None for cell in stages] == [True, False] * 2  # no probabilities across stages
    assert all(cell["ece"] is not None for cell in shared)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prompts_give_the_scores_of_one_process_on_stages_and_tensor_ranks(evaluate, language):
    few = {"method": "in_context", "k_shot": 2, "num_query": 3, "episodes": 4, "max_length": 64}
    one = evaluate(1, **language, **few)
    for layout in (
        {"pipeline_stages": 2},
        {"tensor_parallel_size": 2},
        {"pipeline_stages": 2, "tensor_parallel_size": 2},
    ):
        ranks = 2 ** len(layout)
        assert_same_losses(evaluate(ranks, group_size=ranks, **language, **few, **layout), one)


@pytest.mark.timeout(300)
def test_a_head_is_trained_on_the_features_of_all_ranks(evaluate, classifier):
    head = {**classifier, **FEW, "inner_lr_groups": ["head=1", "*=0"]}
    one = evaluate(1, **head)
    assert one[0]["scores"] != evaluate(1, **classifier, **FEW)[0]["scores"]
    for layout in (ZERO3, {**STAGES, "micro_batch_size": 32}):
        assert_same_losses(evaluate(2, **head, **layout), one)


def last_line(ended):
    """The line that ended all ranks with exit code 2."""
    assert ended.codes == [2, 2]
    assert "Traceback" not in "".join(ended.output)
    return next(line for line in reversed(ended.output[0].strip().splitlines()) if "metrics=" in line)


@pytest.mark.timeout(300)
def test_generated_answers_need_the_complete_model_on_one_rank(language):
    words = words_of({**language, "k_shot": 1, "metrics": "rouge_l", "group_size": 2})
    line = last_line(run_ranks(["-m", "fmmeta", "evaluate", *words], 2))
    assert line.startswith("fmmeta: error: ")
    check_message(line, "metrics=rouge_l", "group_size=2", "use --group_size 1")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("command", "ready", "more"),
    [
        (
            "tune",
            "trial 1 of 1000: ",
            {"episodes": 50, "max_steps": 1, "inner_lrs": [rate / 10000 for rate in range(1, 501)]},
        ),
        ("evaluate", "1-shot finetune 1/", {"episodes": 3000, "method": "finetune"}),
    ],
)
def test_a_stopped_command_keeps_complete_results(command, ready, more, classifier, tmp_path):
    """tune: the signal comes to one rank alone, and both stop after the same episodes; evaluate: to all ranks
    of the launch.
    """
    file = tmp_path / "out.json"
    words = words_of({**classifier, "k_shot": 1, "num_query": 3, "output": file, **more})
    started = start_ranks(["-m", "fmmeta", command, *words], 2)
    assert isinstance(started, Forked)
    while ready not in (output := started.ranks[0].text) and started.ranks[0].code is None:
        assert "error" not in output, output
        time.sleep(0.1)  # a log sends no event
        shared().poll()
    for rank in started.ranks[1 if command == "tune" else 0 :]:
        shared().signal(rank, signal.SIGTERM)
    ended = started.end(60)
    assert ended.codes == [75, 75], ended.output
    assert [one.name for one in tmp_path.iterdir() if one.name.endswith("tmp")] == []
    *lines, last = ended.output[0].strip().splitlines()
    if command == "evaluate":
        assert last.endswith("stopped by a signal before the output was written")
        assert not file.exists()
        return
    stored = json.loads(file.read_text())
    done = stored["tuned"]["trials"]
    assert 0 < done < stored["tuned"]["of"] == 1000
    assert last.startswith(f"fmmeta: stopped by SIGTERM after {done} of 1000 trials; ")
    assert last.endswith(f" {file}")
    rows = [line for line in lines if line.startswith(("zero ", "prototype "))]
    assert len(rows) == done
    assert rows[0].split()[2] == f"{stored['inner_lr']:.4g}"


SCORED = {
    "k_shot": 1,
    "num_query": 3,
    "meta_batch_size": 2,
    "inner_steps": 2,
    "inner_lr": 0.1,
    "outer_steps": 1,
    "eval_steps": 1,
    "eval_episodes": 4,
    "micro_batch_size": 2,
    "num_workers": 0,
    "metrics": "tests.support.own_metric:f1",
}


@pytest.fixture(scope="module")
def scored(tmp_path_factory, request):
    """What a run says about a metric of the user on some ranks; it is run once."""
    folder = tmp_path_factory.mktemp("metrics")

    @cache
    def run(kind: str, groups: int, group_size: int):
        out = folder / f"{kind}-{groups}x{group_size}"
        more = {"group_size": group_size, "deepspeed": "zero2"} if group_size > 1 else {}
        train(out, groups * group_size, **SCORED, **request.getfixturevalue(kind), **more).ok()
        last = metrics_of(out)[-1]
        table = json.loads((out / "run.json").read_text())["held_out"]["metrics"]
        return last["valid_f1"], last["valid_share"], table

    return run


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "groups", "group_size"),
    [
        ("classifier", 1, 2),
        pytest.param("classifier", 2, 1, marks=pytest.mark.slow),
        pytest.param("language", 1, 2, marks=pytest.mark.slow),
        pytest.param("language", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_metrics_of_the_user_do_not_depend_on_the_layout(scored, kind, groups, group_size):
    one = scored(kind, 1, 1)
    assert 0 < one[0] < 1 or kind == "language"
    assert scored(kind, groups, group_size) == one


@pytest.mark.timeout(300)
def test_a_metric_that_raises_ends_all_ranks_with_its_line(tmp_path):
    flags = {**SCORED, "metrics": "tests.support.own_metric:broken", "n_way": 2, "group_size": 1}
    line = last_line(train(tmp_path / "run", 2, **flags))
    check_message(line, "metrics=tests.support.own_metric:broken", "correct the metric, or leave it out")
