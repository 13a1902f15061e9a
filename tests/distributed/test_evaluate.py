"""`fmmeta evaluate` gives the same scores on any number of ranks, and wherever a model can be trained."""

from __future__ import annotations

import json
import signal
import time
from functools import cache

import pytest

from harness.fork_server import shared
from tests.support.launch import ROOT, Forked, run_ranks, start_ranks
from tests.support.messages import check_message
from tests.support.models import save_bert, save_llama, write_classes, write_pairs


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    model, data = save_bert(folder / "bert"), write_classes(folder / "rows.jsonl", classes=15, rows=8)
    flags = [
        "--model_name_or_path",
        str(model),
        "--dataset",
        str(data),
        "--n_way",
        "3",
        "--k_shot",
        "1",
        "2",
        "--num_query",
        "3",
        "--episodes",
        "5",
        "--method",
        "finetune",
        "prototype",
    ]

    @cache
    def run(ranks: int, *more: str):
        output = folder / f"{ranks}-{len(more)}.json"
        ended = run_ranks(["-m", "fmmeta", "evaluate", *flags, *more, "--output", str(output)], ranks).ok()
        assert not ended.others  # only rank 0 logs
        assert "accuracy %" in ended.output[0]
        return json.loads(output.read_text())["cells"]

    return run


@pytest.mark.timeout(300)
def test_any_number_of_ranks_gives_the_same_scores(evaluate):
    one, two, three = evaluate(1), evaluate(2), evaluate(3)
    assert one == two == three


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_gives_the_scores_of_one_process(evaluate):
    one = evaluate(1)
    shared = evaluate(2, "--group_size", "2", "--deepspeed", str(ROOT / "ds_configs" / "zero3.json"))
    stages = evaluate(2, "--group_size", "2", "--pipeline_stages", "2")
    for spread in (shared, stages):
        for mine, theirs in zip(spread, one, strict=True):
            assert mine["episodes_fingerprint"] == theirs["episodes_fingerprint"]
            assert [score["loss"] for score in mine["scores"]] == pytest.approx(
                [s["loss"] for s in theirs["scores"]], rel=1e-4
            )
            assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=0.03)
    assert [cell["ece"] is None for cell in stages] == [
        True,
        False,
        True,
        False,
    ]  # no probabilities across stages
    assert all(cell["ece"] is not None for cell in shared)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prompts_give_the_scores_of_one_process_on_stages_and_tensor_ranks(tmp_path):
    flags = ["--task_type", "causal_lm", "--dataset", str(write_pairs(tmp_path / "pairs.jsonl"))]
    flags += ["--model_name_or_path", str(save_llama(tmp_path / "llama")), "--method", "in_context"]
    flags += ["--k_shot", "2", "--num_query", "3", "--episodes", "4", "--max_length", "64"]

    def losses(ranks: int, **layout: int) -> list[float]:
        output = tmp_path / f"{ranks}-{len(layout)}-{'-'.join(layout)}.json"
        more = [f"--{name}={value}" for name, value in layout.items()]
        run_ranks(["-m", "fmmeta", "evaluate", *flags, *more, "--output", str(output)], ranks).ok()
        (cell,) = json.loads(output.read_text())["cells"]
        return [score["loss"] for score in cell["scores"]]

    one = losses(1)
    for layout in (
        {"pipeline_stages": 2},
        {"tensor_parallel_size": 2},
        {"pipeline_stages": 2, "tensor_parallel_size": 2},
    ):
        ranks = 2 ** len(layout)
        assert losses(ranks, group_size=ranks, **layout) == pytest.approx(one, rel=1e-4)


@pytest.mark.timeout(300)
def test_a_head_is_trained_on_the_features_of_all_ranks(evaluate):
    alone = ["--inner_lr_groups", "head=1", "*=0"]
    one, whole = evaluate(1, *alone), evaluate(1)
    assert one[0]["scores"] != whole[0]["scores"]
    shared = evaluate(2, *alone, "--group_size", "2", "--deepspeed", str(ROOT / "ds_configs" / "zero3.json"))
    stages = evaluate(2, *alone, "--pipeline_stages", "2", "--group_size", "2", "--micro_batch_size", "32")
    for spread in (shared, stages):
        for mine, theirs in zip(spread, one, strict=True):
            assert [score["loss"] for score in mine["scores"]] == pytest.approx(
                [s["loss"] for s in theirs["scores"]], rel=1e-4
            )


@pytest.mark.timeout(300)
def test_generated_answers_need_the_complete_model_on_one_rank(tmp_path):
    data = str(write_pairs(tmp_path / "pairs.jsonl"))
    flags = [
        "--task_type",
        "causal_lm",
        "--dataset",
        data,
        "--num_query",
        "3",
        "--k_shot",
        "1",
        "--episodes",
        "2",
        "--metrics",
        "rouge_l",
        "--group_size",
        "2",
    ]
    ended = run_ranks(["-m", "fmmeta", "evaluate", *flags], 2)
    assert ended.codes == [2, 2]
    line = ended.output[0].strip().splitlines()[-1]
    assert line.startswith("fmmeta: error: ")
    check_message(line, "metrics=rouge_l", "group_size=2", "use --group_size 1")
    assert "Traceback" not in "".join(ended.output)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", ["tune", "evaluate"])
def test_a_stopped_command_keeps_complete_results(command, tmp_path):
    """tune: the signal comes to one rank alone, and both stop after the same episodes; evaluate: to all ranks
    of the launch.
    """
    model, data = save_bert(tmp_path / "bert"), write_classes(tmp_path / "rows.jsonl", classes=15, rows=8)
    words = [
        "-m",
        "fmmeta",
        command,
        "--model_name_or_path",
        str(model),
        "--dataset",
        str(data),
        "--n_way",
        "3",
        "--k_shot",
        "1",
        "--num_query",
        "3",
        "--output",
        str(tmp_path / "out.json"),
        "--episodes",
    ]
    many = [str(rate / 10000) for rate in range(1, 501)]
    words += (
        ["50", "--max_steps", "1", "--inner_lrs", *many]
        if command == "tune"
        else ["3000", "--method", "finetune"]
    )
    started = start_ranks(words, 2)
    assert isinstance(started, Forked)
    ready = "trial 1 of 1000: " if command == "tune" else "1-shot finetune 1/"
    while ready not in (output := started.ranks[0].text) and started.ranks[0].code is None:
        assert "error" not in output, output
        time.sleep(0.1)  # a log sends no event
        shared().poll()
    for rank in started.ranks[1 if command == "tune" else 0 :]:
        shared().signal(rank, signal.SIGTERM)
    ended = started.end(60)
    assert ended.codes == [75, 75], ended.output
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith("tmp")] == []
    if command == "evaluate":
        assert ended.output[0].strip().endswith("stopped by a signal before the output was written")
        assert not (tmp_path / "out.json").exists()
        return
    stored = json.loads((tmp_path / "out.json").read_text())
    done = stored["tuned"]["trials"]
    assert 0 < done < stored["tuned"]["of"] == 1000
    line = ended.output[0].strip().splitlines()[-1]
    assert line.startswith(f"fmmeta: stopped by SIGTERM after {done} of 1000 trials; ")
    assert line.endswith(f" {tmp_path / 'out.json'}")
    rows = [line for line in ended.output[0].splitlines() if line.startswith(("zero ", "prototype "))]
    assert len(rows) == done
    assert rows[0].split()[2] == f"{stored['inner_lr']:.4g}"
