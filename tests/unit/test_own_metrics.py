"""Metrics of the user get the answers to the query set; one that fails ends the run with one line."""

import json
import sys
from typing import Any

import pytest
import torch

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.tasks.batching import IGNORE, Batcher, Example, pack
from tests.support.messages import check_message, refusal
from tests.support.models import write_pairs
from tests.support.own_metric import f1

SHORT = {
    "n_way": 3,
    "k_shot": 1,
    "num_query": 2,
    "meta_batch_size": 1,
    "inner_steps": 2,
    "max_length": 16,
    "num_workers": "0",
    "outer_steps": 1,
    "eval_steps": 1,
    "eval_episodes": 3,
}


class Seen(fmmeta.Callback):
    def on_evaluate(self, run, metrics):
        self.metrics = metrics


def test_a_metric_gets_the_names_of_classes_after_adaptation(tmp_path):
    """The share of right answers is the accuracy, in validation and in the table on held-out tasks."""
    calls, seen = [], Seen()

    def share(predictions, references):
        calls.append((predictions, references))
        return {"share": f1(predictions, references)["share"]}

    trainer = MetaTrainer(Config(**SHORT, output_dir=str(tmp_path)), callbacks=[seen], metrics=[share])
    result = trainer.train()
    assert seen.metrics["valid_share"] == pytest.approx(seen.metrics["valid_accuracy"])
    assert result.log_history[-1]["valid_share"] == seen.metrics["valid_share"]
    found = result.held_out["metrics"]["share"]
    assert found["after"][0] == pytest.approx(result.after)
    assert found["after_from_start"][0] == pytest.approx(result.after_from_start)
    assert len(calls) == 9  # validation, held-out tasks, the same from the weights at the start
    for predictions, references in calls:
        assert references == sorted(references)
        assert len(set(references)) == 3
        assert set(predictions) <= set(references)
        assert len(references) == 6
    assert trainer.train().held_out == result.held_out


@pytest.mark.parametrize("method", ["finetune", "prototype"])
def test_an_evaluation_takes_the_same_functions(bert, classes, method, capsys, terminal):
    """The share of right answers is the accuracy of an episode, by gradient steps and by frozen features."""
    flags: dict[str, Any] = {"n_way": 3, "k_shot": 1, "num_query": 3, "episodes": 4, "method": method}
    results = fmmeta.evaluate(bert, classes, **flags, metrics="tests.support.own_metric:f1", quiet=False)
    scores = results["cells"][0]["scores"]
    assert [one["metrics"]["share"] for one in scores] == pytest.approx([one["accuracy"] for one in scores])
    assert results["share"]["mean"] == pytest.approx(results["accuracy"])
    assert 0 < results["f1"]["mean"] < 1
    assert f"{results['f1']['mean']:.4f}" in capsys.readouterr().out


def test_a_run_takes_the_metrics_of_an_evaluation(llama, tmp_path):
    """The table on held-out tasks has the numbers of an evaluation of the exported model."""
    names, data = ["options", "exact_match"], write_pairs(tmp_path / "pairs.jsonl", rows=9)
    config = Config(
        **SHORT,
        model_name_or_path=str(llama),
        dataset=[str(data)],
        task_type="causal_lm",
        metrics=[*names, "tests.support.own_metric:f1"],
        output_dir=str(tmp_path / "run"),
    )
    result = MetaTrainer(config).train()
    assert {"valid_options", "valid_exact_match", "valid_share"} <= result.log_history[-1].keys()
    same: dict[str, Any] = {"k_shot": 1, "num_query": 2, "episodes": 3}
    found = fmmeta.evaluate(tmp_path / "run" / "model", data, **same, metrics=config.metrics)
    for name in (*names, "share"):
        assert result.held_out["metrics"][name]["after"][0] == found[name]["mean"]
    assert 0 < found["options"]["mean"] < 1


def test_metrics_see_the_support_set_in_the_prompt(llama, tmp_path):
    """Of in-context learning, where nothing is learned by gradients."""
    data = write_pairs(tmp_path / "pairs.jsonl", rows=9)
    config = Config(
        **{**SHORT, "eval_steps": 0},
        model_name_or_path=str(llama),
        dataset=[str(data)],
        algorithm="in_context",
        task_type="causal_lm",
        metrics=["rank", "tests.support.own_metric:f1"],
        output_dir=str(tmp_path / "run"),
    )
    own = MetaTrainer(config).train().held_out["metrics"]
    same: dict[str, Any] = {"k_shot": 1, "num_query": 2, "episodes": 3, "method": "in_context"}
    found = fmmeta.evaluate(tmp_path / "run" / "model", data, **same, metrics=config.metrics)
    assert {name: each["after"][0] for name, each in own.items()} == {
        name: found[name]["mean"] for name in own
    }
    assert own.keys() == {"rank", "f1", "share"}


@pytest.mark.parametrize("packing", [False, True])
def test_a_metric_of_a_language_model_gets_texts(llama, packing, tmp_path):
    data, calls = write_pairs(tmp_path / "pairs.jsonl"), []

    def lengths(predictions, references):
        calls.extend(references)
        return {"rows": len(references)}

    config = Config(
        **SHORT,
        model_name_or_path=str(llama),
        dataset=[str(data)],
        task_type="causal_lm",
        inner_lr=0.01,
        packing=packing,
        output_dir=str(tmp_path / "run"),
    )
    result = MetaTrainer(config, metrics=[lengths]).train()
    assert result.held_out["metrics"] == {"rows": {"after_from_start": [2.0, None], "after": [2.0, None]}}
    targets = {json.loads(line)["output"].strip() for line in data.read_text().splitlines()}
    assert calls
    assert set(calls) <= targets


def test_packed_rows_have_the_answers_of_single_rows():
    """Logits that say the number of the next token: each answer is that of its row."""
    rows = [Example([5, 6, 7, 8], [IGNORE, IGNORE, 7, 8]), Example([9, 3, 4], [IGNORE, 3, 4])]
    no_model: Any = None
    found = []
    for packing in (None, lambda examples, least: pack(examples, 1, 16)):
        (batch,) = Batcher(0, pack=packing).split(rows)
        follows = batch.inputs["input_ids"].roll(-1, 1) + 1
        found.append(
            sorted(CausalLearner.answers(no_model, torch.nn.functional.one_hot(follows, 12).float(), batch))
        )
    assert found[0] == found[1] == [([4, 5], [3, 4]), ([8, 9], [7, 8])]


METRICS = """
def raises(predictions, references):
    raise KeyError("no\\nkey")

def listed(predictions, references):
    return [1.0]

def texts(predictions, references):
    return {"f1": "high"}

def taken(predictions, references):
    return {"accuracy": 1.0}

def taken_rank(predictions, references):
    return {"rank": 1.0}

number = 3
"""


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"metrics": ["rouge_l"]},
            ["metrics=rouge_l", "task_type=classification has none", "leave them out"],
        ),
        ({"metrics": ["f1"]}, ["metrics=f1 is unknown", "rank or module:name of a function"]),
    ],
)
def test_names_that_mean_nothing_are_refused(settings, parts, tmp_path):
    check_message(refusal(MetaTrainer(Config(**SHORT, **settings, output_dir=str(tmp_path))).train), *parts)


@pytest.mark.parametrize(
    ("name", "more", "part"),
    [
        ("raises", {}, "failed (KeyError"),
        ("listed", {}, "returned [1.0], no dictionary of numbers"),
        ("texts", {}, "no dictionary of numbers"),
        ("taken", {}, "returned accuracy, a name that is taken"),
        ("number", {}, "is a int and cannot be called"),
        ("missing", {}, "cannot be imported"),
        ("listed", {"pipeline_stages": 2, "group_size": "2"}, "only the last stage has the model's answers"),
        ("listed", {"eval_episodes": 0, "eval_steps": 0}, "means nothing"),
        ("taken_rank", {}, "returned rank, a name that is taken"),
    ],
)
def test_a_metric_that_cannot_work_ends_the_run_with_one_line(name, more, part, tmp_path, monkeypatch):
    (tmp_path / "bad_metrics.py").write_text(METRICS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run():
        given = {**SHORT, **more, "metrics": [f"bad_metrics:{name}"]}
        MetaTrainer(Config(**given, output_dir=str(tmp_path / "run"))).train()

    try:
        check_message(refusal(run), f"metrics=bad_metrics:{name}", part)
    finally:
        sys.modules.pop("bad_metrics", None)
