"""Regression: rows, scaled targets, losses, metrics, own losses, and a run with adaptation."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

import fmmeta
from fmmeta.adaptation.model import Answer
from fmmeta.adaptation.predict import AdapterDirectory
from fmmeta.common.errors import UsageError
from fmmeta.config import learners
from fmmeta.config.learners import REGRESSION, check_loss
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import PredictConfig
from fmmeta.evaluation.tune import shown
from fmmeta.learners.regression import PooledRegressor, Regressor
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.metrics.scores import EpisodeScore
from fmmeta.report.page import write
from fmmeta.tasks.batching import Batcher
from fmmeta.tasks.data.columns import Row
from fmmeta.tasks.data.encode import RowEncoder
from fmmeta.tasks.schedule.meta_batches import Task
from fmmeta.tasks.sources.base import EpisodeRows
from fmmeta.train import MetaTrainer
from fmmeta.training.state import Best
from tests.support.helpers import stored_by
from tests.support.launch import ROOT

KIND: dict[str, Any] = {"task_type": "regression"}
DATA = ROOT / "examples" / "data" / "ratings.jsonl"
SHORT: dict[str, Any] = {
    **{"outer_steps": 2, "eval_steps": 2, "eval_episodes": 3, "num_workers": "0", "meta_batch_size": 2},
    **{"k_shot": 6, "num_query": 6},
}
HUBER = replace(REGRESSION, loss=partial(F.huber_loss, reduction="none"))
MEAN = replace(REGRESSION, loss=lambda outputs, targets: (outputs - targets).mean().expand(len(targets)))
SUPPORT = [{"text": "a", "target": [1.0, 5.0]}, {"text": "bb", "target": [3.0, 5.0]}]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"Text": "a", "Score": 2}, {"text": "a", "target": [2.0]}),
        ({"sentence": "a", "value": "2.5"}, {"text": "a", "target": [2.5]}),
        ({"text": "a", "label": [1, 2]}, {"text": "a", "target": [1.0, 2.0]}),
        ({"text": "a", "target": np.array([1.5])}, {"text": "a", "target": [1.5]}),
    ],
)
def test_rows_have_a_text_and_numbers(row, found):
    assert stored_by(Regressor, Config(**KIND), row) == found


def test_two_sentences_are_joined():
    row = {"sentence1": "a", "sentence2": "b", "score": 1}
    text = stored_by(Regressor, Config(**KIND), row)["text"]
    assert (text[0], text[-1]) == ("a", "b")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "target": "x"}, "has target=.*, which is no number; fix the row"),
        ({"text": "a", "target": True}, "has target=.*, which is no number"),
        ({"text": "a", "target": float("nan")}, "has target=.*, which is no number"),
        ({"text": "a", "target": []}, "has target=.*, which is no number"),
        ({"text": "", "target": 1}, "text"),
        ({"text": "a"}, "none of the columns target, score, label, value"),
    ],
)
def test_other_rows_are_refused_in_one_line(row, message):
    with pytest.raises(UsageError, match=message):
        stored_by(Regressor, Config(**KIND), row)


def encoded(support, query, **settings):
    encoder = RowEncoder(Config(**KIND, **{"n_way": 2, **settings}), byte_tokenizer())
    return EpisodeRows(Task(0, "", "", 0, ()), support, query).encoded(encoder)


def test_targets_are_scaled_by_the_support_set_and_answers_are_not():
    found = encoded(SUPPORT, [{"text": "c", "target": [4.0, 6.0]}])
    assert found.facts == {"mean": [2.0, 5.0], "std": [1.0, 1.0]}  # a constant target keeps its unit
    assert [row.labels for row in found.support] == [[-1.0, 0.0], [1.0, 0.0]]
    assert found.query[0].labels == [2.0, 1.0]
    assert Regressor.present(found.query[0].labels, found.classes, found.facts) == [4.0, 6.0]
    (unknown,) = Regressor.encode(Config(**KIND), byte_tokenizer(), [{"text": "c"}], found.facts)
    assert unknown.labels == [0.0, 0.0]
    with pytest.raises(UsageError, match="a row has 1 targets, and others 2"):
        encoded(SUPPORT, [{"text": "c", "target": [4.0]}])


def learner(kind, outputs):
    torch.manual_seed(0)
    hf_config = transformers.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    hf_config.num_labels = outputs
    if kind is PooledRegressor:
        return PooledRegressor(transformers.AutoModel.from_config(hf_config).eval(), outputs, "mean")
    return Regressor(transformers.AutoModelForSequenceClassification.from_config(hf_config).eval(), outputs)


@pytest.mark.parametrize("kind", [Regressor, PooledRegressor])
def test_the_loss_is_the_mean_over_rows_and_targets(kind):
    """The head may have more outputs than a row targets."""
    found = encoded(SUPPORT, [{"text": "c", "target": [4.0, 6.0]}, {"text": "ddd", "target": [0.0, 1.0]}])
    (batch,) = Batcher(0, collate_fn=Regressor.collate).split(found.query, 2)
    made = learner(kind, 3)
    with torch.no_grad():
        outputs = made(**batch.inputs)
        rows = made.losses(outputs, batch).weighted(batch.weights)
    wanted = F.mse_loss(outputs[1][:, :2], batch.targets["labels"])
    torch.testing.assert_close(rows.loss.sum(), wanted)
    assert (rows.answers.sum(), rows.correct.sum()) == (0, 0)
    made.own_loss = HUBER.loss
    torch.testing.assert_close(
        made.losses(outputs, batch).weighted(batch.weights).loss.sum(),
        F.huber_loss(outputs[1][:, :2], batch.targets["labels"]),
    )
    assert [len(one) for pair in made.answers(outputs, batch) for one in pair] == [2] * 4


def test_an_own_loss_is_one_of_numbers(monkeypatch):
    for name, spec in (("huber", HUBER), ("mean", MEAN)):
        monkeypatch.setitem(learners.GIVEN, name, spec)
    check_loss("huber")
    assert HUBER.unit == "units of loss"
    with pytest.raises(UsageError, match="depends on the other rows"):
        check_loss("mean")


def test_metrics_are_in_the_units_of_the_data():
    right, found = [1.0, 2.0, 4.0], [1.5, 2.0, 3.0]
    numbers = Regressor.metrics(found, right)
    spread = sum((one - 7 / 3) ** 2 for one in right)
    assert numbers == pytest.approx({"mse": 1.25 / 3, "mae": 0.5, "r2": 1 - 1.25 / spread})
    several = Regressor.metrics([[a, 0.0] for a in found], [[a, 1.0] for a in right])
    assert several == pytest.approx(
        {"mse": (1.25 / 3 + 1) / 2, "mae": 0.75, "r2": (1 - 1.25 / spread) / 2}  # a constant target adds 0
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings: dict[str, Any] = {**KIND, **SHORT, "dataset": [str(DATA)]}
    output = tmp_path_factory.mktemp("run") / "run"
    return MetaTrainer(Config(**settings, load_best_model_at_end=True, output_dir=str(output))).train()


def test_a_run_prints_no_accuracy_and_is_judged_by_the_loss(run, capsys):
    last = run.log_history[-1]
    assert {"valid_mse", "valid_mae", "valid_r2", "valid_loss"} <= last.keys()
    assert not any("accuracy" in key for line in run.log_history for key in line)
    assert run.before is None
    assert "squared standard deviations (over " in run.verdict
    model = run.output_dir / "model"
    assert "accuracy" not in (model / "README.md").read_text()
    report = write(run.output_dir).read_text()
    assert "Accuracy" not in report
    assert "accuracy %" not in report
    assert json.loads((model / "fmmeta.json").read_text())["task_type"] == "regression"


def test_texts_that_are_cut_when_they_are_drawn_are_reported_once(tmp_path, capsys):
    short = {**SHORT, "eval_steps": 0, "test_episodes": 0}
    for length, lines in (("8", 1), ("64", 0)):
        config = Config(
            **KIND, **short, dataset=[str(DATA)], max_length=int(length), output_dir=str(tmp_path / length)
        )
        MetaTrainer(config).train()
        assert "".join(capsys.readouterr()).count(f"rows fill max_length={length}") == lines


def test_the_best_weights_and_interpolation_are_those_of_the_lowest_loss():
    best, weights = Best(None), SimpleNamespace(snapshot=lambda: "weights")  # type: ignore[arg-type]
    for step, loss in enumerate([2.0, 1.0, 1.5], 1):
        best.update(weights, step, math.nan, loss)  # type: ignore[arg-type]
    assert (best.step, best.accuracy, best.text.split(", ")[1]) == (2, None, "loss 1.0000")
    score = EpisodeScore(0, "t", "all", [2.0, 1.0], [])
    assert (score.merit, EpisodeScore.of(0, "t", "all", 1.0, None).merit) == (-1.0, -1.0)
    assert shown({0.0: [-1.0, -2.0]}, "validation tasks") == "loss on validation tasks: 1.5000 at 0"


def test_an_evaluation_prints_no_accuracy_and_compares_by_the_loss(run, capsys, tmp_path):
    same: dict[str, Any] = {"k_shot": 6, "num_query": 6, "episodes": 3, "quiet": False}
    model = str(run.output_dir / "model")
    found = fmmeta.evaluate(model, DATA, **same, output=str(tmp_path / "results.json"))
    assert found["mse"]["mean"] == pytest.approx(run.held_out["metrics"]["mse"]["after"][0])
    again = fmmeta.evaluate(model, DATA, **same, compare=str(tmp_path / "results.json"))
    assert again["compare"]["cells"][0]["loss_gain"] == 0
    assert "accuracy" not in capsys.readouterr().out
    assert "3-shot loss" in repr(found) or "6-shot loss" in repr(found)


@pytest.mark.parametrize("pooling", ["mean", "model"])
@pytest.mark.parametrize("lora", [0, 2])
def test_a_task_is_adapted_to_answered_and_loaded(tmp_path, bert, pooling, lora):
    rows = [json.loads(line) for line in DATA.read_text().splitlines()[:16]]
    pairs = [(row["text"], row["score"]) for row in rows]
    settings: dict[str, Any] = {**KIND, "pooling": pooling, "inner_steps": 3, "lora_r": lora or None}
    adapted = fmmeta.adapt(bert, pairs[:10], query=pairs[10:], output_dir=tmp_path / "task", **settings)
    truths = [score for _, score in pairs[10:]]
    assert [one.truth for one in adapted.predictions] == pytest.approx(truths, abs=1e-4)
    assert adapted.metrics == Regressor.metrics(
        [one.output for one in adapted.predictions], [one.truth for one in adapted.predictions]
    )
    texts = [text for text, _ in pairs[10:]]
    answers = adapted.predict(texts)
    again = fmmeta.load(tmp_path / "task").predict(texts)
    assert [one.output for one in again] == pytest.approx([one.output for one in answers], abs=1e-4)
    if pooling == "model" and not lora:
        facts = json.loads((tmp_path / "task" / "fmmeta.json").read_text())["adapted"]["facts"]
        pipe = transformers.pipeline("text-classification", model=str(tmp_path / "task"))
        scaled = [one["score"] for one in pipe(texts)]
        shown = [one * facts["std"][0] + facts["mean"][0] for one in scaled]
        assert shown == pytest.approx([one.output for one in answers], abs=1e-3)


def test_more_targets_than_outputs_are_refused(tmp_path):
    data = tmp_path / "rows.jsonl"
    rows = [{"task": f"t{n % 6}", "text": f"text {n}", "target": [n, 2 * n]} for n in range(60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {**KIND, **SHORT, "k_shot": 2, "num_query": 2, "dataset": [str(data)]}
    with pytest.raises(UsageError, match=r"2 labels \(target 0, target 1\), and n_way=1 .*raise --n_way"):
        MetaTrainer(Config(**settings, output_dir=str(tmp_path / "one"))).train()
    result = MetaTrainer(Config(**settings, n_way=2, output_dir=str(tmp_path / "two"))).train()
    assert result.held_out["metrics"].keys() == {"mse", "mae", "r2"}


@pytest.mark.parametrize("pooling", ["mean", "model"])
def test_adapters_answer_in_one_pass_in_the_units_of_their_tasks(tmp_path, bert, pooling):
    supports = {
        name: [{"text": text, "target": unit * number} for number, text in enumerate(("a", "b c", "d"))]
        for name, unit in (("low", 1.0), ("high", 1000.0))
    }
    settings: dict[str, Any] = {**KIND, "pooling": pooling, "inner_steps": 3, "lora_r": 2}
    models = fmmeta.adapt_many(bert, supports, output_dir=tmp_path / "all", **settings)
    adapters = AdapterDirectory(PredictConfig(adapters=str(tmp_path / "all")))
    asked = [("high", "a"), ("low", "d"), ("high", "b c d")]
    found = adapters.answer(
        [replace(adapters.model.read(Row({"text": one}, "row")), adapter=name) for name, one in asked]
    )
    for (name, text), answer in zip(asked, found, strict=True):
        assert isinstance(answer, Answer)
        (wanted,) = models[name].predict([text])
        assert (answer.input, answer.output) == (text, pytest.approx(wanted.output, rel=1e-4))
