"""Few-shot evaluation equals plain PyTorch, transformers, NumPy and scikit-learn on the same episodes."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

import fmmeta
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.common.text import rouge_l
from fmmeta.config.settings import Config
from fmmeta.evaluation import command
from fmmeta.evaluation.command import episodes_of
from fmmeta.evaluation.methods import (
    classifier_score,
    knn,
    linear,
    sinkhorn,
    soft_kmeans,
)
from fmmeta.evaluation.results import (
    EvalCell,
    check_output,
    differences,
    read_cells,
    results_of,
    show,
    write_output,
)
from fmmeta.evaluation.settings import EvaluateConfig, PredictConfig, TuneConfig
from fmmeta.learners.files import hub_answers
from fmmeta.learners.load import describe, load_tokenizer
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.metrics.language import LanguageMetrics
from fmmeta.metrics.own import EpisodeMetrics
from fmmeta.metrics.scores import EpisodeScore, calibration_error, episode_score, paired, prediction_stats
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import name_rows
from fmmeta.tasks.sources.load import load_sources
from fmmeta.training.episodes import EpisodeReader
from fmmeta.training.scoring import Scoring
from tests.support.helpers import recorded, refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import FROZEN, WORDS, with_settings, write_classes, write_pairs
from tests.support.plain import PlainClassifier, batch

SMALL: dict[str, Any] = {"n_way": "3", "num_query": 3, "episodes": 3}
LANGUAGE: dict[str, Any] = {"task_type": "causal_lm", "k_shot": 2, "num_query": 2, "episodes": 3}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "rows.jsonl", rows=9)


def draws_of(model, data, k_shot=2, **given):
    """The episodes of an evaluation, in order."""
    settings = EvaluateConfig(model_name_or_path=str(model), dataset=[str(data)], **given)
    config = settings.run_config(k_shot=k_shot)
    draws = episodes_of(settings, k_shot, load_tokenizer(config, describe(config), print)).draws()
    return [*map(name_rows, draws)] if settings.label_names else draws


def texts(draw, rows):
    return batch([draw.store.text("input", row) for row, _ in rows]), torch.tensor(
        [label for _, label in rows]
    )


def plain_loop(folder, draws, rates, trained=""):
    """Losses and accuracies of plain PyTorch."""
    losses, right = [], []
    for draw in draws:
        model, (query, truth) = PlainClassifier(folder, 3), texts(draw, draw.query)
        model.learn(*texts(draw, draw.support), rates, trained)
        logits = model(query).detach()
        losses.append(float(F.cross_entropy(logits, truth)))
        right.append(float((logits.argmax(1) == truth).float().mean()))
    return losses, right


def losses_of(results, cell=0):
    return [score["loss"] for score in results["cells"][cell]["scores"]]


def test_finetuning_equals_a_plain_loop(bert, classes):
    given = {**SMALL, "episodes": 4}
    results = fmmeta.evaluate(bert, classes, k_shot=2, inner_steps=3, inner_lr=0.5, **given)
    losses, right = plain_loop(bert, draws_of(bert, classes, **given), [0.5] * 3)
    assert losses_of(results) == pytest.approx(losses, rel=1e-4)
    scores = results["cells"][0]["scores"]
    assert [score["accuracy"] for score in scores] == pytest.approx(right)
    assert results["accuracy"] == pytest.approx(np.mean(right))
    deviations = defaultdict[str, float](float)
    for score in scores:
        deviations[score["task"]] += score["accuracy"] - np.mean(right)
    assert (results["units"], results["kind"], results["episodes"]) == (3, "class", 4)
    assert results["ci95"] == pytest.approx(
        max(
            3.1824463 * np.std(right, ddof=1) / 2,  # Student's t, 3 degrees of freedom
            4.3026527 * (1.5 * sum(np.square([*deviations.values()]))) ** 0.5 / 4,  # 2: three classes
        )
    )
    assert set(results["per_stratum"]) <= {"s0", "s1", "s2"}


@pytest.mark.parametrize(
    ("method", "names"), [("prototype", None), ("prototype", "names"), ("linear", None), ("knn", None)]
)
def test_frozen_methods_equal_scikit_learn_on_plain_features(method, names, bert, classes):
    given = {**SMALL, "pooling": "mean", "episodes": 5, "label_names": names}
    results = fmmeta.evaluate(bert, classes, method=method, k_shot=2, **given)
    encoder, expected = PlainClassifier(bert, 3, "mean"), []
    for draw in draws_of(bert, classes, **given):
        (support, labels), (query, truth) = texts(draw, draw.support), texts(draw, draw.query)
        assert len(labels) == 3 * (2 + (names is not None))
        s, q = (F.normalize(encoder.features(inputs).detach()).numpy() for inputs in (support, query))
        if method == "prototype":
            means = np.stack([s[labels == c].mean(0) for c in range(3)])
            guess = (q @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T).argmax(1)
        elif method == "linear":
            guess = LogisticRegression(C=30, max_iter=1000).fit(s, labels).predict(q)
        else:
            nearest = KNeighborsClassifier(2, weights=lambda squares: 2 / squares**2)
            guess = nearest.fit(s, labels).predict(q)  # 1 - cosine is half the square of the distance
        expected.append(float((guess == truth.numpy()).mean()))
    assert [score["accuracy"] for score in results["cells"][0]["scores"]] == pytest.approx(expected)
    assert 0 <= results["ece"] <= 1


def test_methods_share_episodes_and_a_model_equals_itself(bert, classes, tmp_path):
    file = tmp_path / "deep" / "first.json"
    methods = ["prototype", "finetune"]
    first = fmmeta.evaluate(bert, classes, **SMALL, method=methods, k_shot=[1, 2], output=str(file))
    assert [(cell["k_shot"], cell["method"]) for cell in first["cells"]] == [
        *itertools.product([1, 2], methods)
    ]
    assert json.loads(file.read_text())["accuracy"] == first["accuracy"]
    flags: dict[str, Any] = {**SMALL, "method": "finetune", "k_shot": 2}
    renamed = shutil.copy(file, tmp_path / "results.txt")
    for other in (file, renamed, bert):
        (cell,) = fmmeta.evaluate(bert, classes, **flags, compare=str(other))["compare"]["cells"]
        assert (cell["accuracy_gain"], cell["loss_gain"], cell["ci95"], cell["episodes"]) == (0, 0, 0, 3)
        assert cell["other"] == first["cells"][3]
    flags |= {"compare": str(file), "method": "prototype"}
    named = fmmeta.evaluate(bert, classes, **flags, label_names="names")
    assert [cell["episodes"] for cell in named["compare"]["cells"]] == [3]  # with and without names: paired
    for change, parts in (
        ({"seed": 7}, (f"compare={file}", "are of other episodes", "use the same data, --seed")),
        ({"k_shot": 5}, ("have none of these methods and k_shot",)),
    ):
        check_message(refusal(fmmeta.evaluate, bert, classes, **{**flags, **change}), *parts)


def test_data_of_a_comparison_are_logged_once_unless_the_models_read_them_differently(
    llama, pairs, tmp_path, capsys
):
    short = with_settings(llama, tmp_path / "short", task_type="causal_lm", max_length=4)
    flags: dict[str, Any] = {"task_type": "causal_lm", "num_query": 1, "episodes": 1, "quiet": False}
    for other, cut in ((llama, 0), (short, 1)):
        fmmeta.evaluate(llama, pairs, **flags, compare=str(other))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fmmeta: ")]
        assert [sum(part in line for line in lines) for part in (" rows, ", "max_length=4")] == [1, cut]
        assert len(lines) == len(set(lines))


@pytest.mark.parametrize("train", [[], ["c0", "c1"]], ids=["empty", "fewer classes than n_way"])
def test_only_the_evaluated_split_has_to_hold_episodes(bert, tmp_path, train):
    """Also of class weights only those of the split count."""
    rows = write_classes(tmp_path / "rows.jsonl", classes=6)
    splits, weights = tmp_path / "splits.json", tmp_path / "weights.json"
    splits.write_text(json.dumps({"train": train, "valid": [], "test": ["c2", "c3", "c4", "c5"]}))
    few = {"k_shot": 1, "num_query": 1, "class_splits": str(splits)}
    asked: dict[str, Any] = {**few, "n_way": "3", "episodes": 2}
    losses = [fmmeta.evaluate(bert, rows, **asked)["loss"]]
    for weighted in ({"c1": 2}, {"c1": 2, "c5": 3}):
        weights.write_text(json.dumps(weighted))
        losses.append(fmmeta.evaluate(bert, rows, **asked, class_weights=str(weights))["loss"])
    assert losses[0] == losses[1] != losses[2]
    check_message(
        refusal(fmmeta.evaluate, bert, rows, **asked, eval_split="valid"), "eval_split=valid", "is empty"
    )
    why = "n_way=3 is above the 2 classes" if train else "nothing to train on"
    run = Config(dataset=[str(rows)], n_way=3, **few)
    check_message(refusal(load_sources, run, byte_tokenizer(), print), why)


def test_model_is_adapted_with_its_stored_settings(bert, classes, tmp_path):
    stored = {"inner_steps": 2, "inner_lr": 9.0, "head_init": "zero"}
    rates = {"head": [0.5, 0.1], **{layer: [0.0, 0.0] for layer in FROZEN}}
    folder = with_settings(bert, tmp_path / "model", **stored, inner_rates=rates)
    ours = fmmeta.evaluate(folder, classes, k_shot=2, **SMALL)
    losses, _ = plain_loop(bert, draws_of(bert, classes, **SMALL), [0.5, 0.1], "head")
    assert losses_of(ours) == pytest.approx(losses, rel=1e-4)
    mine = fmmeta.evaluate(folder, classes, k_shot=2, inner_lr=0.1, **SMALL)
    plain = fmmeta.evaluate(bert, classes, k_shot=2, inner_lr=0.1, inner_steps=2, **SMALL)
    assert mine["loss"] == plain["loss"]  # a given rate replaces all stored rates


def test_options_of_packed_runs_are_scored_row_by_row(llama, pairs, monkeypatch):
    """Packed and padded runs give the same likelihoods."""
    calls = recorded(monkeypatch, LanguageMetrics, "log_likelihoods")
    flags = {**LANGUAGE, "num_query": 3, "episodes": 2, "metrics": "options", "inner_steps": 1}
    for packing in (False, True):
        fmmeta.evaluate(llama, pairs, **flags, packing=packing)
    first, second, *packed = (call.result for call in calls)
    assert max(map(len, packed)) > 3
    for one, apart in zip(packed, (first, second), strict=True):
        assert one == pytest.approx(apart, rel=1e-4)


def test_bad_task_file_is_skipped_for_both_models(llama, tmp_path, capsys):
    data, names = tmp_path / "tasks", [f"s{number % 2}/t{number}" for number in range(10)]
    for name in names:
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        rows = [{"input": f"{name} {word}", "output": word[:2]} for word in WORDS[:6]]
        write_rows(data / f"{name}.jsonl", rows)
    (data / "s1" / "t3.jsonl").write_text("{broken\n")
    (data / "task_splits.json").write_text(json.dumps({"train": names[6:], "test": names[:6]}))
    flags: dict[str, Any] = {**LANGUAGE, "k_shot": [1, 2], "episodes": 12, "inner_steps": 1}
    assert "t3.jsonl" in refusal(fmmeta.evaluate, llama, data, **flags)
    results = fmmeta.evaluate(llama, data, **flags, on_bad_task="skip", compare=str(llama), quiet=False)
    assert [cell["episodes"] for cell in results["cells"]] == [10, 10]
    assert "s1/t3" not in {score["task"] for cell in results["cells"] for score in cell["scores"]}
    compared = results["compare"]["cells"]
    assert [(cell["episodes"], cell["loss_gain"]) for cell in compared] == [(10, 0)] * 2
    lines = [line for line in capsys.readouterr().out.splitlines() if "failed to load" in line]
    assert len(lines) == 2  # for either number of shots, once for both models
    check_message(lines[0], "fmmeta: 2 of 12 1-shot episodes", "task s1/t3: ", "left out")
    check_message(
        refusal(fmmeta.evaluate, llama, data, **flags, on_bad_task="skip", max_bad_fraction=0.01),
        "max_bad_fraction=0.01: 2 of 12 1-shot episodes",
        "task s1/t3: ",
    )


@pytest.mark.parametrize(
    ("found", "wanted", "score"),
    [
        ("the cat sat", "The cat, sat!", 1),
        ("police killed the gunman", "police kill the gunman", 0.75),  # Lin 2004, section 3
        ("the gunman kill police", "police kill the gunman", 0.5),
        ("a b c b d a b", "b d c a b a", 8 / 13),  # four of them in order, of 7 and of 6
        ("", "word", 0),
        ("", "", 1),
        ("\U0001f44d", "\U0001f44e", 0),  # symbols alone
        ("-", " - ", 1),
    ],
)
def test_rouge_l(found, wanted, score):
    assert rouge_l(found, wanted) == pytest.approx(score)


def test_an_evaluation_holds_a_bounded_number_of_episodes(bert, classes, monkeypatch):
    given = {"k_shot": 1, "num_query": 2, "n_way": 2, "episodes": 5, "max_length": 16}
    whole = fmmeta.evaluate(bert, classes, method="finetune", **given)
    calls = recorded(monkeypatch, EpisodeReader, "read_share")
    monkeypatch.setattr(command, "IN_MEMORY", 2)
    again = fmmeta.evaluate(bert, classes, method="finetune", **given)
    assert again["cells"][0]["scores"] == whole["cells"][0]["scores"]
    assert [len(tasks) for _, tasks in (call.args for call in calls)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("shares", "labels", "accuracy", "loss", "error"),
    [
        (  # bins: (0.9, 1.0] has 0.95 and 0.93, one right; 0.65 right alone; 0.58 wrong alone
            [[0.95, 0.05], [0.93, 0.07], [0.35, 0.65], [0.42, 0.58]],
            [0, 1, 1, 0],
            0.5,
            -np.log([0.95, 0.07, 0.65, 0.42]).mean(),
            (abs(0.95 + 0.93 - 1) + abs(0.65 - 1) + abs(0.58 - 0)) / 4,
        ),
        # one of two rows is nan: it is wrong with confidence 0, and its loss is infinite
        ([[0.75, 0.25], [math.nan, 0.5]], [0, 0], 0.5, math.inf, 0.25 / 2),
    ],
)
def test_scores_and_calibration_error_by_hand(shares, labels, accuracy, loss, error):
    stats = prediction_stats(torch.tensor(shares).log(), torch.tensor(labels))
    score = episode_score(0, "t", "s", stats)
    assert (score.accuracy, score.loss) == (accuracy, pytest.approx(loss, rel=1e-6))
    assert calibration_error([score]) == pytest.approx(error, rel=1e-6)
    assert calibration_error([score, EpisodeScore.of(1, "t", "s", 1.0, 1.0)]) is None


def scores_of(values, loss=1.0, first=0):
    """Scores of episodes from the slot `first` on, with these accuracies and equal losses."""
    return [
        EpisodeScore.of(slot, f"t{slot}", "s", loss, value) for slot, value in enumerate(values, start=first)
    ]


def test_paired_differences_are_over_common_episodes():
    found = paired(scores_of([0.5, 0.7, 0.9]), scores_of([0.4, 0.4], 1.5, first=1))
    assert found["episodes"] == 2
    assert found["accuracy_gain"] == pytest.approx(0.4)
    assert found["loss_gain"] == pytest.approx(0.5)
    half = 12.7062 * np.std([0.3, 0.5], ddof=1) / np.sqrt(2)  # 1 degree of freedom
    assert found["ci95"] == pytest.approx(half)


def test_infinite_losses_are_read_back_from_a_file_and_differ_by_zero(tmp_path):
    scores = [*scores_of([0.5], math.inf), *scores_of([0.5], first=1)]
    cells = [EvalCell("finetune", 1, "x", scores).as_dict()]
    write_output(str(tmp_path / "results.json"), {"cells": cells})
    (stored,) = read_cells(str(tmp_path / "results.json"))
    assert [score.loss for score in stored.scores] == [math.inf, 1.0]
    assert paired(scores, stored.scores)["loss_gain"] == 0


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            {"method": ["dreaming"]},
            ("method=dreaming", "use finetune, prototype, linear, knn"),
        ),
        ({"k_shot": []}, ("k_shot names nothing", "give one or more")),
        ({"n_way": "many"}, ("n_way=many", "use 5, say")),
        ({"n_way": "²"}, ("n_way=²", "use 5, say")),
        ({"num_workers": "2"}, ("num_workers='2'", "is no setting", "leave it out")),
        ({"lora_merge": True}, ("lora_merge=True", "is of training", "leave it out")),
        ({"n_way": "1"}, ("n_way=1", "use 2 or more")),
        ({"eval_split": "dev"}, ("eval_split=dev", "use train, valid or test")),
        ({"episodes": 0}, ("episodes=0", "use 1 or more")),
        ({"k_shot": [1, 5], "k_shot_max": 7}, ("k_shot_max=7", "here are 2", "give one")),
        ({"n_way": "all", "n_way_max": 7}, ("n_way_max=7", "n_way=all", "leave it out")),
        (
            {"method": ["in_context"]},
            ("method=in_context", "task_type=classification", "use finetune"),
        ),
        ({"mix_weights": [1.0]}, ("mix_weights=[1.0]", "is no setting", "leave it out")),
        ({"mix_temperature": 2.0}, ("mix_temperature=2.0", "is no setting", "leave it out")),
        ({"outer_lr": 1.0}, ("outer_lr=1.0", "is no setting", "leave it out")),
        (
            {"method": ["knn"], "class_weights": "weights.json"},
            ("class_weights=weights.json", "method=knn has none", "use finetune"),
        ),
        ({"metrics": ["bleu"]}, ("metrics=bleu", "use rouge_l, exact_match, options, rank or module:name")),
        (
            {"method": ["knn"], "task_type": "causal_lm"},
            ("method=knn", "task_type=causal_lm", "use finetune, in_context"),
        ),
        (
            {"n_way": "3", "task_type": "causal_lm"},
            ("n_way=3", "task_type=causal_lm", "leave it out"),
        ),
        (
            {"method": ["knn", "linear"], "inner_lr": 0.5},
            ("inner_lr=0.5", "method=knn linear", "leave it out, or use finetune"),
        ),
        (
            {"method": ["prototype"], "inner_lr_groups": ["head=2"]},
            ("inner_lr_groups=['head=2']", "method=prototype", "leave it out, or use finetune"),
        ),
        ({"dataset": []}, ("dataset=[]", "give one or more")),
        ({"compare": "./nowhere"}, ("compare=./nowhere", "check the path")),
        (
            {"compare": "nowhere.json"},
            ("compare=nowhere.json", "No such file or directory", "give such a file, or a model"),
        ),
        ({"k_shot": 1.5}, ("k_shot=1.5", "give one")),
        ({"k_shot": [1, "2"]}, ("k_shot='2'", "give one")),
        ({"episode": 3}, ("episode=3", "did you mean episodes?")),
        ({"dataset": 1.5}, ("dataset=1.5", "give one")),
        (  # a path, a number and a value for a list of one
            {"dataset": Path("rows.jsonl"), "n_way": 3, "metrics": "rouge_l"},
            ("metrics=rouge_l", "task_type=classification", "leave them out"),
        ),
        (
            {"dataset": "words", "task_type": "causal_lm", "max_new_tokens": 5},
            ("max_new_tokens=5 bounds generated answers", "give --metrics exact_match or rouge_l"),
        ),
        ({"method": "zero_shot"}, ("method=zero_shot", "use finetune")),
        ({"method": "finetune+in_context"}, ("method=finetune+in_context", "use finetune")),
    ],
)
def test_bad_and_conflicting_settings_are_refused(flags, parts):
    check_message(refusal(fmmeta.evaluate, "tiny", **{"dataset": "letters", **flags}), *parts)


def test_feature_norm_gives_cosine_prototypes(bert, classes):
    """One shot, no steps: the logits are 2 norm^2 cos and a constant, the temperature that `prototype` has at
    norm 10^0.5.
    """
    flags: dict[str, Any] = {**SMALL, "k_shot": 1, "pooling": "mean"}
    means = {"head_init": "prototype", "inner_steps": 0}
    ours, cosine, plain = (
        fmmeta.evaluate(bert, classes, **flags, **more)["loss"]
        for more in ({**means, "feature_norm": 10**0.5}, {"method": "prototype"}, means)
    )
    assert ours == pytest.approx(cosine, rel=1e-4)
    assert ours != pytest.approx(plain, rel=1e-2)
    check_message(
        refusal(fmmeta.evaluate, bert, classes, **{**flags, "pooling": "model"}, feature_norm=3.0),
        "feature_norm=3",
        "use --pooling mean or cls, or leave it out",
    )


def test_a_stopped_evaluation_keeps_the_methods_that_have_finished(
    bert, classes, tmp_path, monkeypatch, capsys, terminal
):
    original, computed, stop_at = Scoring.scores, [], [-1]

    def counted(scoring, tasks, read, score, what, *more, **named):
        def counting(todo):
            if len(computed) == stop_at[0]:
                raise RuntimeError("the device failed")
            computed.append(what)
            return read(todo)

        return original(scoring, tasks, counting, score, what, *more, **named)

    monkeypatch.setattr(Scoring, "scores", counted)
    model, other = (shutil.copytree(bert, tmp_path / name) for name in ("model", "other"))
    flags: dict[str, Any] = {**SMALL, "k_shot": [1, 2], "method": ["prototype", "finetune"]}
    run = partial(fmmeta.evaluate, model, classes, compare=str(other), **flags)
    output, finished = tmp_path / "out.json", tmp_path / "out.finished.json"
    whole = run(output=str(tmp_path / "whole.json"))
    names = [f"{k}-shot {method}" for k in (1, 2) for method in ("prototype", "finetune")] * 2
    assert computed == names
    computed.clear()
    for stop_at[0] in (1, 5):  # the second continues from the first
        with pytest.raises(RuntimeError, match="the device failed"):
            run(output=str(output), quiet=False)
    assert not output.exists()
    assert "2-shot prototype: accuracy " in capsys.readouterr().out
    stop_at[0] = -1
    kept = finished.read_text()
    assert run(output=str(output)) == whole == json.loads(output.read_text())
    assert computed == names
    assert not finished.exists()
    damaged = kept.replace('"accuracies"', '"no"')
    for text, more in ((kept, {"seed": 7}), (damaged, {}), (kept, {})):  # those of others are not taken
        computed.clear()
        finished.write_text(text)
        if not more and text == kept:
            os.utime(model / "model.safetensors")
        run(output=str(output), **more)
        assert computed[:2] == names[:2]


@pytest.fixture
def nothing_computed(monkeypatch):
    monkeypatch.setattr(command, "EvaluatedModel", lambda *_: pytest.fail("computed before the check"))


def test_a_table_is_shown_where_its_file_cannot_be_written(bert, classes, tmp_path, monkeypatch, capsys):
    settings = EvaluateConfig(
        model_name_or_path=str(bert), dataset=[str(classes)], output=str(tmp_path / "there.json"), **PROTOTYPE
    )
    full = Mock(side_effect=UsageError("output=there.json cannot be written; give another file"))
    monkeypatch.setattr(command, "write_output", full)
    assert refusal(command.evaluate, settings).startswith("output=there.json cannot be written")
    assert "prototype" in capsys.readouterr().out.split("accuracy %")[1]
    # no partial file is left, and the scores are kept
    assert [path.name for path in tmp_path.iterdir()] == ["there.finished.json"]


PROTOTYPE: dict[str, Any] = {**SMALL, "k_shot": [1], "method": ["prototype"]}


@pytest.mark.parametrize(
    ("output", "cause", "remedy"),
    [
        ("", "is a folder", "give a file in it, such as {}/results.json"),
        ("/file/x.json", "{}/file is no folder", "give another file"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_first(output, cause, remedy, tmp_path, nothing_computed):
    (tmp_path / "file").write_text("")
    message = refusal(fmmeta.evaluate, "tiny", "letters", **PROTOTYPE, output=f"{tmp_path}{output}")
    check_message(message.replace(str(tmp_path), "{}"), f"output={{}}{output} ", cause, remedy)


def test_an_output_that_is_a_pipe_gets_the_results():
    reader, writer = os.pipe()
    path = Path(f"/dev/fd/{writer}")
    check_output(path)
    write_output(path, {"cells": []})
    os.close(writer)
    with open(reader, encoding="utf-8") as results:
        assert json.load(results) == {"cells": []}


def test_an_output_in_a_folder_that_is_not_writable_is_written_in_place(tmp_path, monkeypatch):
    output, access = tmp_path / "results.json", os.access
    output.write_text("{}")
    number = output.stat().st_ino
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    write_output(output, {"cells": []})
    assert json.loads(output.read_text()) == {"cells": []}
    assert output.stat().st_ino == number


@pytest.mark.parametrize("kind", [EvaluateConfig, TuneConfig])
@pytest.mark.parametrize(
    ("name", "file", "is_folder"),
    [
        *((name, "input.json", False) for name in ("dataset", "class_splits", "label_names", "compare")),
        *(
            ("dataset", name, True)
            for name in ("test.jsonl", "class_splits.json", "s/a/tasks.csv", "c/0.png")
        ),
        *(("model_name_or_path", name, True) for name in ("model.safetensors", "config.json")),
    ],
)
def test_an_output_that_is_an_input_is_refused(kind, name, file, is_folder, tmp_path):
    """Also behind a link, and as one of the files of a folder."""
    folder, link = tmp_path / "in", tmp_path / "link.json"
    path, other = folder / file, str(folder / "results.json")
    path.parent.mkdir(parents=True)
    path.write_text('{"a": "b"}')
    link.symlink_to(path)
    given, output = (str(folder), path) if is_folder else (str(path), link)
    value: Any = {name: [given] if name == "dataset" else given}
    check_message(
        refusal(kind, output=str(output), **value),
        f"output={output} is an input too, of {name}={given}",
        "give another file",
    )
    assert kind(output=other, dataset=[str(folder)], model_name_or_path=str(folder)).output


def test_damaged_results_to_compare_with_are_refused_first(tmp_path, nothing_computed):
    file, score = tmp_path / "results.json", scores_of([1.0])[0]
    cell = EvalCell("finetune", 1, "x", [score]).as_dict()
    no_accuracy = {**cell["scores"][0], "accuracy": None}
    for damage in ({"scores": []}, {"k_shot": [1, 5]}, {"scores": [no_accuracy]}):
        file.write_text(json.dumps({"cells": [{**cell, **damage}]}))
        check_message(
            refusal(fmmeta.evaluate, "tiny", "letters", k_shot=[1], compare=str(file)),
            f"compare={file} holds no results",
            "a cell without scores",
            "give such a file",
        )


@pytest.mark.parametrize("kind", [EvaluateConfig, PredictConfig])
def test_only_tune_writes_the_stored_settings_of_a_model(tmp_path, kind):
    (tmp_path / "fmmeta.json").write_text("{}")
    given = {"model_name_or_path": str(tmp_path), "output": str(tmp_path / "fmmeta.json")}
    assert TuneConfig(**given).output
    check_message(refusal(kind, **given), f"is an input too, of model_name_or_path={tmp_path}")


def test_a_model_to_compare_with_is_checked_first(bert, llama, tmp_path, monkeypatch, nothing_computed):
    hub_answers.cache_clear()
    no_network = Mock(side_effect=OSError("Name or service not known"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils.get_session", no_network)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    other = with_settings(llama, tmp_path / "other", task_type="causal_lm")
    kinds = "task_type=causal_lm", f"model_name_or_path={bert}", "task_type=classification"
    for compare, parts in (
        (other, (*kinds, "give another model, or --task_type")),
        (tmp_path, ("give a Hugging Face folder or hub id",)),
        ("no-such-folder", ("check the path, or the network",)),
    ):
        check_message(
            refusal(fmmeta.evaluate, bert, "letters", compare=str(compare)), f"compare={compare}", *parts
        )
    assert no_network.call_count == 3  # and not for every file
    hub_answers.cache_clear()


def test_one_episode_has_no_interval_and_results_are_json(bert, classes, tmp_path, capsys):
    flags: dict[str, Any] = {"n_way": "2", "num_query": 2, "episodes": 1}
    file, twice = str(tmp_path / "one.json"), {"k_shot": [1, 1], "method": ["knn", "prototype", "knn"]}
    results = fmmeta.evaluate(bert, classes, **flags, **twice, output=file)
    assert [cell["method"] for cell in results["cells"]] == ["knn", "prototype"]  # once each
    stored = json.loads(Path(file).read_text(), parse_constant=pytest.fail)
    assert stored["ci95"] is None
    assert stored["accuracy"] == results["accuracy"]
    fmmeta.evaluate(bert, classes, **flags, k_shot=1, method="knn", compare=file, quiet=False)
    out = capsys.readouterr().out
    assert f"{100 * results['accuracy']:.2f} ± -" in out
    assert "+0.00 ± -" in out
    assert "nan" not in out


@pytest.mark.parametrize(
    ("accuracies", "row", "verdict"),
    [
        ([0.2, 0.3, 0.4, 0.3], "30.00 ± 12.99  60.00 ± 12.99  -30.00 ± 0.00", "worse"),
        ([0.8, 0.9, 1.0, 0.9], "90.00 ± 12.99  60.00 ± 12.99  +30.00 ± 0.00", "better"),
        ([0.5, 0.7, 0.6, 0.7], "62.50 ± 15.23  60.00 ± 12.99  +2.50 ± 15.23", "no significant difference"),
        ([0.2], "20.00 ± -  60.00 ± 12.99  -30.00 ± -", "-"),
    ],
)
def test_comparison_shows_both_models_and_the_verdict(accuracies, row, verdict, capsys):
    settings = EvaluateConfig(model_name_or_path="mine", compare="theirs", method=["knn"], k_shot=[1])
    both = (scores_of(accuracies), scores_of([0.5, 0.6, 0.7, 0.6], 1.25))
    ours, theirs = ([EvalCell("knn", 1, "x", scores)] for scores in both)
    results = results_of(settings, ours, Config())
    results["compare"] = {"with": "theirs", "cells": differences(ours, theirs)}
    show(results, Progress(True))
    table = capsys.readouterr().out.split("mine (A) against theirs (B)")[1]
    (line,) = [line for line in table.splitlines() if line.startswith("knn")]
    assert " ".join(line.split()).startswith(f"knn 1 {' '.join(row.split())} 1.0000 1.2500 +0.2500 ± ")
    assert line.endswith(f"  {verdict}")
    (stored,) = results["compare"]["cells"]
    assert stored["verdict"] == (None if verdict == "-" else verdict)
    assert (stored["other"]["accuracy"], len(stored["other"]["scores"])) == (pytest.approx(0.6), 4)


def test_the_table_names_ranges_of_shots_and_ways_and_a_language_model_has_no_ways(
    bert, classes, llama, pairs, tmp_path, capsys
):
    flags = {**SMALL, "n_way": "2", "n_way_max": 3, "k_shot": 1, "k_shot_max": 4, "method": "prototype"}
    language = with_settings(llama, tmp_path / "model", task_type="causal_lm")
    few = {"k_shot": 1, "num_query": 2, "episodes": 2, "inner_steps": 0}
    fmmeta.evaluate(bert, classes, **flags, quiet=False)
    assert fmmeta.evaluate(language, pairs, **few, quiet=False)["n_way"] is None
    out = capsys.readouterr().out
    ranges = "3 episodes of 2 to 3 classes", "prototype  1 to 4 ", "(prototype, 1 to 4 shots)"
    for text in (*ranges, "2 episodes of the test split"):
        assert text in out


@pytest.mark.parametrize("method", [soft_kmeans, sinkhorn])
def test_transductive_methods_compute_shares_and_means_in_turn(method):
    """Against loops over queries and classes in double precision."""
    rng, labels = np.random.default_rng(0), np.array([0, 1, 2, 1])
    centres = rng.normal(size=(3, 6))
    rows = [centres[of] + rng.normal(size=(len(of), 6)) for of in (labels, np.array([0, 0, 1, 1, 2, 2]))]

    def unit(vectors):
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    s, q = map(unit, rows)
    sums = own = np.stack([s[labels == c].sum(0) for c in range(3)])
    for _ in range(5):
        shares = np.exp(q @ unit(sums).T / 0.1)
        for _ in range(10 if method is sinkhorn else 0):
            shares /= shares.sum(0)
            shares /= shares.sum(1, keepdims=True)
        shares /= shares.sum(1, keepdims=True)
        sums = np.stack([own[c] + sum(shares[i, c] * q[i] for i in range(6)) for c in range(3)])
    expected = np.exp(q @ unit(sums).T / 0.05)
    expected = shares if method is sinkhorn else expected / expected.sum(1, keepdims=True)
    support, query = (torch.tensor(one, dtype=torch.float32) for one in rows)
    found = method(support, torch.from_numpy(labels), query, 3).exp().numpy()
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("method", [knn, linear, soft_kmeans, sinkhorn])
def test_one_example_per_class_is_classified_without_warnings(method, recwarn):
    features = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(method(features, torch.arange(30), features, 30).argmax(1), torch.arange(30))
    assert [str(one.message) for one in recwarn] == []


@pytest.mark.parametrize("method", ["prototype", "linear", "knn", "soft_kmeans", "sinkhorn"])
@pytest.mark.parametrize("bad", ["query", "support"])
def test_features_that_are_not_finite_count_as_wrong(method, bad, classes):
    """Of a query that row alone; of a support example the whole episode."""
    config = Config(dataset=[str(classes)], n_way=2, k_shot=2, num_query=3, max_length=16)
    source = load_sources(config, byte_tokenizer(), print).train
    (task,) = Schedule(source.items, 1, 0).meta_batch(0)
    draw = source.draw(task)
    features = {
        (draw.store.path, row): torch.eye(2)[label] + 0.01 * number
        for rows in (draw.support, draw.query)
        for number, (row, label) in enumerate(rows)
    }
    row, _ = draw.query[4] if bad == "query" else draw.support[0]
    features[draw.store.path, row] = torch.tensor([math.nan, 1.0])
    score = classifier_score(method, EpisodeMetrics(), 0, task, (draw, features))
    assert score.accuracy == (0 if bad == "support" else pytest.approx(5 / 6))
    assert score.loss == math.inf


@pytest.mark.parametrize("model", ["bert", "llama"])
def test_diverging_inner_loop_scores_zero(model, request, classes, pairs):
    kind, data = (LANGUAGE, pairs) if model == "llama" else (SMALL, classes)
    given = {**kind, "k_shot": 1, "inner_lr": 3e38}
    results = fmmeta.evaluate(request.getfixturevalue(model), data, **given)
    assert (results["accuracy"], results["loss"], results["loss_ci95"]) == (0, float("inf"), float("inf"))
    assert results["ece"] == (None if model == "llama" else 0)


def test_a_base_language_model_learns_with_the_settings_of_the_adapters(llama, tmp_path):
    """But a stored rate is of the stored optimizer; of another one the usual rate is taken."""
    stored = {"task_type": "causal_lm", "prompt_template": "Q: {input}\nA:", "lora_r": 4, "inner_steps": 3}
    rate_of = {"inner_optimizer": "sgd", "inner_lr": 0.25}
    trained = str(with_settings(llama, tmp_path / "trained", **stored, **rate_of))
    for optimizer, rate in ((None, 0.25), ("sgd", 0.25), ("adamw", 0.003)):
        settings = EvaluateConfig(model_name_or_path=trained, inner_optimizer=optimizer, compare=str(llama))
        assert settings.sets_inner_lr == (optimizer == "adamw")  # learned rates are of the stored one too
        command.check_compare_model(settings, str(llama))
        config = command.with_model(settings, str(llama)).run_config()
        assert stored.items() <= vars(config).items()
        assert (config.inner_lr, config.model_name_or_path) == (rate, str(llama))


def test_zero_shot_scores_the_queries_without_their_support_set(llama, pairs):
    """The loss per answer token and the exact match are those of an inner loop without steps."""
    metrics = ["exact_match", "options", "rank"]
    flags = {**LANGUAGE, "metrics": metrics, "max_new_tokens": 3}
    zero = fmmeta.evaluate(llama, pairs, **flags, method="zero_shot")
    none = fmmeta.evaluate(llama, pairs, **flags, inner_steps=0)
    assert losses_of(zero) == pytest.approx(losses_of(none))
    for name in ("accuracy", *metrics):
        assert zero[name] == none[name]
    both = fmmeta.evaluate(llama, pairs, **LANGUAGE, method=["finetune", "zero_shot"], inner_steps=1)
    assert both["cells"][1]["loss"] == zero["loss"] != both["cells"][0]["loss"]


def test_the_support_set_stays_in_the_prompt_after_the_inner_loop(llama, pairs):
    """Without inner steps finetune+in_context is in_context; with some, its loss is that of neither part."""
    flags = {**LANGUAGE, "metrics": ["exact_match"], "max_new_tokens": 3}
    prompt = fmmeta.evaluate(llama, pairs, **flags, method="in_context")
    none = fmmeta.evaluate(llama, pairs, **flags, method="finetune+in_context", inner_steps=0)
    assert none["loss"] == pytest.approx(prompt["loss"], rel=1e-6)
    assert none["exact_match"] == prompt["exact_match"]
    methods = ["finetune", "finetune+in_context"]
    loop, both = fmmeta.evaluate(llama, pairs, **flags, method=methods, inner_steps=2, inner_lr=0.05)["cells"]
    assert abs(both["loss"] - loop["loss"]) > 1e-4 < abs(both["loss"] - prompt["loss"])
    again = fmmeta.evaluate(llama, pairs, **flags, method=methods[1:], inner_steps=2, inner_lr=0.05)
    assert again["loss"] == both["loss"]  # the weights are those of before after each episode


def option_tasks(file, text, *options, right=lambda task: 1):
    """Rows of eight tasks with these options, of which `right` says the number of the right one."""
    rows = [
        {"task": f"t{n}", "input": text.format(word, n), "output": options[right(n)], "options": [*options]}
        for n in range(8)
        for word in WORDS[:6]
    ]
    return write_rows(file, rows)


@pytest.mark.parametrize("method", ["zero_shot", "in_context"])
def test_options_are_scored_behind_the_same_prompt(llama, tmp_path, monkeypatch, method):
    """Of an input that is cut, and of a support set that does not fit, as much is left before each option."""
    data = option_tasks(tmp_path / "rows.jsonl", "{0} {1} " * 8, "a", "bb " * 6, right=lambda task: task % 2)
    found, flags = [], {**LANGUAGE, "max_length": 40, "metrics": ["options"], "eval_split": "train"}

    def remember(self, examples):
        found.extend(zip(examples[::2], examples[1::2], strict=True))
        return [0.0] * len(examples)

    monkeypatch.setattr(LanguageMetrics, "log_likelihoods", remember)
    fmmeta.evaluate(llama, data, **flags, method=method)
    assert found
    for short, long in found:
        assert short.prompt == long.prompt
        assert len(long.prompt) > 10
        assert short.label_tokens < long.label_tokens
    lengths = {len(long.input_ids) for _, long in found}
    assert lengths == {40} if method == "zero_shot" else min(lengths) > 80


@pytest.mark.parametrize(
    ("of_tokens", "options", "rank", "share"),
    [
        (float, ("a", "bb", "ccc", "dddd"), 3, 0),  # the longest is the likeliest
        (float, ("a", "bb"), 1, 1),
        (
            lambda tokens: -1.0,
            ("a", "bb", "ccc", "dddd"),
            4,
            0,
        ),  # all alike: the right one is not the likeliest
        (lambda tokens: math.nan, ("a", "bb", "ccc", "dddd"), 4, 0),
    ],
)
def test_the_right_answer_is_ranked_among_the_options_of_its_row(
    llama, tmp_path, monkeypatch, of_tokens, options, rank, share
):
    """Likelihoods are replaced by a function of the option's number of tokens."""
    data = option_tasks(tmp_path / "rows.jsonl", "{0} {1}", *options)

    def likelihoods(self, examples):
        return [of_tokens(sum(label != -100 for label in one.labels)) for one in examples]

    monkeypatch.setattr(LanguageMetrics, "log_likelihoods", likelihoods)
    flags = {**LANGUAGE, "method": "zero_shot", "metrics": ["options", "rank"], "eval_split": "train"}
    results = fmmeta.evaluate(llama, data, **flags)
    assert (results["rank"]["mean"], results["options"]["mean"]) == (rank, share)
