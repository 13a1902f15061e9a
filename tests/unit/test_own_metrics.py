"""Metrics of the user get the answers to the query set; one that fails ends the run with one line."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.metrics.own import answers
from fmmeta.tasks.batching import IGNORE, Batcher, Example, pack
from tests.support.helpers import refusal
from tests.support.messages import check_message
from tests.support.models import save_llama, write_pairs
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
    assert found["after"] == pytest.approx(result.after)
    assert found["after_from_start"] == pytest.approx(result.after_from_start)
    assert len(calls) == 9  # validation, held-out tasks, the same from the weights at the start
    for predictions, references in calls:
        assert references == sorted(references)
        assert len(set(references)) == 3
        assert set(predictions) <= set(references)
        assert len(references) == 6
    assert trainer.train().held_out == result.held_out


@pytest.mark.parametrize("packing", [False, True])
def test_a_metric_of_a_language_model_gets_texts(packing, tmp_path):
    data, calls = write_pairs(tmp_path / "pairs.jsonl"), []

    def lengths(predictions, references):
        calls.extend(references)
        return {"rows": len(references)}

    config = Config(
        **SHORT,
        model_name_or_path=str(save_llama(tmp_path / "llama")),
        dataset=[str(data)],
        task_type="causal_lm",
        inner_lr=0.01,
        packing=packing,
        output_dir=str(tmp_path / "run"),
    )
    result = MetaTrainer(config, metrics=[lengths]).train()
    assert result.held_out["metrics"] == {"rows": {"after_from_start": 2.0, "after": 2.0}}
    targets = {json.loads(line)["output"].strip() for line in data.read_text().splitlines()}
    assert calls
    assert set(calls) <= targets


def test_packed_rows_have_the_answers_of_single_rows():
    """Logits that say the number of the next token: each answer is that of its row."""
    rows = [Example([5, 6, 7, 8], [IGNORE, IGNORE, 7, 8]), Example([9, 3, 4], [IGNORE, 3, 4])]
    found = []
    for packing in (None, lambda examples, least: pack(examples, 1, 16)):
        (batch,) = Batcher(0, pack=packing).split(rows)
        follows = batch.inputs["input_ids"].roll(-1, 1) + 1
        found.append(sorted(answers(batch, torch.nn.functional.one_hot(follows, 12).float())))
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

number = 3
"""


@pytest.mark.parametrize(
    ("name", "more", "part"),
    [
        ("raises", {}, "raised KeyError"),
        ("listed", {}, "returned [1.0], no dictionary of numbers"),
        ("texts", {}, "no dictionary of numbers"),
        ("taken", {}, "returned accuracy, a name that is taken"),
        ("number", {}, "is a int and cannot be called"),
        ("missing", {}, "cannot be imported"),
        ("listed", {"pipeline_stages": 2, "group_size": "2"}, "only the last stage has the model's answers"),
        ("listed", {"algorithm": "in_context", "task_type": "causal_lm", "eval_steps": 0}, "not implemented"),
        ("listed", {"eval_episodes": 0, "eval_steps": 0}, "means nothing"),
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
