"""Few-shot evaluation equals plain PyTorch, transformers, NumPy and scikit-learn on the same episodes."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import fmmeta
from fmmeta.adaptation.model import load_model
from fmmeta.common.errors import UsageError
from fmmeta.common.progress import Progress
from fmmeta.common.text import longest_common, rouge_l
from fmmeta.config.learners import CLASSIFICATION
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
from fmmeta.metrics.language import LanguageMetrics, generate
from fmmeta.metrics.own import EpisodeMetrics
from fmmeta.metrics.scores import EpisodeScore, calibration_error, episode_score, paired, prediction_stats
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import name_rows
from fmmeta.tasks.sources.load import load_sources
from fmmeta.training.episodes import EpisodeReader
from fmmeta.training.scoring import Scoring
from tests.support.helpers import refusal, write_rows
from tests.support.messages import check_message
from tests.support.models import WORDS, save_family, write_classes, write_pairs

SMALL: dict[str, Any] = {"n_way": "3", "num_query": 3, "episodes": 3}
LANGUAGE: dict[str, Any] = {"task_type": "causal_lm", "k_shot": 2, "num_query": 2, "episodes": 3}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "rows.jsonl", rows=9)


def draws_of(settings: EvaluateConfig, k_shot: int):
    config = settings.run_config(k_shot=k_shot)
    draws = episodes_of(settings, k_shot, load_tokenizer(config, describe(config), print)).draws()
    return [*map(name_rows, draws)] if settings.label_names else draws


def texts(draw, rows):
    return [draw.store.text("input", row) for row, _ in rows], torch.tensor([label for _, label in rows])


def batch(texts, tokenizer):
    return tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")


def test_finetuning_equals_a_plain_loop(bert, classes):
    given = {**SMALL, "episodes": 4}
    settings = EvaluateConfig(model_name_or_path=str(bert), dataset=[str(classes)], **given)
    results = fmmeta.evaluate(str(bert), str(classes), k_shot=2, inner_steps=3, inner_lr=0.5, **given)
    scores = results["cells"][0]["scores"]
    base = AutoModelForSequenceClassification.from_pretrained(
        bert, num_labels=3, ignore_mismatched_sizes=True
    ).eval()
    for param in base.classifier.parameters():
        param.data.zero_()
    tokenizer, losses, right = byte_tokenizer(), [], []
    for draw in draws_of(settings, 2):
        model = copy.deepcopy(base)
        support, labels = texts(draw, draw.support)
        for _ in range(3):
            model.zero_grad()
            F.cross_entropy(model(**batch(support, tokenizer)).logits, labels).backward()
            with torch.no_grad():
                for param in model.parameters():
                    if param.grad is not None:
                        param -= 0.5 * param.grad
        query, truth = texts(draw, draw.query)
        with torch.no_grad():
            logits = model(**batch(query, tokenizer)).logits
        losses.append(float(F.cross_entropy(logits, truth)))
        right.append(float((logits.argmax(1) == truth).float().mean()))
    assert [score["loss"] for score in scores] == pytest.approx(losses, rel=1e-4)
    assert [score["accuracy"] for score in scores] == pytest.approx(right)
    assert results["accuracy"] == pytest.approx(np.mean(right))
    deviations = defaultdict[str, float](float)
    for score in scores:
        deviations[score["task"]] += score["accuracy"] - np.mean(right)
    assert (results["units"], results["kind"]) == (3, "class")
    assert results["ci95"] == pytest.approx(
        max(
            3.1824463 * np.std(right, ddof=1) / 2,  # Student's t, 3 degrees of freedom
            4.3026527 * (1.5 * sum(np.square([*deviations.values()]))) ** 0.5 / 4,  # 2: three classes
        )
    )
    assert results["episodes"] == 4
    assert set(results["per_stratum"]) <= {"s0", "s1", "s2"}


@pytest.mark.parametrize(
    ("method", "names"), [("prototype", None), ("prototype", "names"), ("linear", None), ("knn", None)]
)
def test_frozen_methods_equal_scikit_learn_on_plain_features(method, names, bert, classes):
    given = {**SMALL, "pooling": "mean", "episodes": 5, "label_names": names}
    results = fmmeta.evaluate(str(bert), str(classes), method=method, k_shot=2, **given)
    settings = EvaluateConfig(model_name_or_path=str(bert), dataset=[str(classes)], **given)
    encoder, tokenizer, expected = AutoModel.from_pretrained(bert).eval(), byte_tokenizer(), []

    def features(rows):
        inputs = batch(rows, tokenizer)
        with torch.no_grad():
            hidden = encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None]
        found = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    for draw in draws_of(settings, 2):
        (support, labels), (query, truth) = texts(draw, draw.support), texts(draw, draw.query)
        assert len(support) == 3 * (2 + (names is not None))
        s, q, labels = features(support), features(query), labels.numpy()
        if method == "prototype":
            means = np.stack([s[labels == c].mean(0) for c in range(3)])
            guess = (q @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T).argmax(1)
        elif method == "linear":
            guess = LogisticRegression(C=30, max_iter=1000).fit(s, labels).predict(q)
        else:  # the two nearest, by weight 1 / distance
            near = 1 - q @ s.T
            votes = np.zeros((len(q), 3))
            for i, row in enumerate(near):
                for j in np.argsort(row)[:2]:
                    votes[i, labels[j]] += 1 / row[j]
            guess = votes.argmax(1)
        expected.append(float((guess == truth.numpy()).mean()))
    assert [score["accuracy"] for score in results["cells"][0]["scores"]] == pytest.approx(expected)
    assert 0 <= results["ece"] <= 1


def test_methods_share_episodes_and_a_model_equals_itself(bert, classes, tmp_path):
    file = tmp_path / "deep" / "first.json"
    first = fmmeta.evaluate(
        str(bert), str(classes), **SMALL, method=["prototype", "finetune"], k_shot=[1, 2], output=str(file)
    )
    assert [(cell["method"], cell["k_shot"]) for cell in first["cells"]] == [
        ("prototype", 1),
        ("finetune", 1),
        ("prototype", 2),
        ("finetune", 2),
    ]
    assert json.loads(file.read_text())["accuracy"] == first["accuracy"]
    flags: dict[str, Any] = {**SMALL, "method": "finetune", "k_shot": 2}
    renamed = shutil.copy(file, tmp_path / "results.txt")
    for other in (str(file), str(renamed), str(bert)):
        (cell,) = fmmeta.evaluate(str(bert), str(classes), **flags, compare=other)["compare"]["cells"]
        assert (cell["accuracy_gain"], cell["loss_gain"], cell["ci95"], cell["episodes"]) == (0, 0, 0, 3)
        assert cell["other"] == first["cells"][3]
    flags |= {"compare": str(file), "method": "prototype"}
    named = fmmeta.evaluate(str(bert), str(classes), **flags, label_names="names")
    assert [cell["episodes"] for cell in named["compare"]["cells"]] == [3]  # with and without names: paired
    check_message(
        refusal(fmmeta.evaluate, str(bert), str(classes), **flags, seed=7),
        f"compare={file}",
        "2-shot episodes",
        "use the same data, --seed",
    )
    message = refusal(fmmeta.evaluate, str(bert), str(classes), **{**flags, "k_shot": 5})
    assert "have none of these methods and k_shot" in message


def test_data_of_a_comparison_are_logged_once_unless_the_models_read_them_differently(
    llama, pairs, tmp_path, capsys
):
    short = shutil.copytree(llama, tmp_path / "short")
    (short / "fmmeta.json").write_text('{"task_type": "causal_lm", "max_length": 4}')
    flags: dict[str, Any] = {"task_type": "causal_lm", "num_query": 1, "episodes": 1, "quiet": False}
    for other, cut in ((llama, 0), (short, 1)):
        fmmeta.evaluate(str(llama), str(pairs), **flags, compare=str(other))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fmmeta: ")]
        assert len([line for line in lines if " rows, " in line]) == 1
        assert len([line for line in lines if "max_length=4" in line]) == cut
        assert len(lines) == len(set(lines))


@pytest.mark.parametrize(("split", "ways"), [("test", 3), ("train", 9)])  # a fifth of 15, three fifths
def test_n_way_all_uses_all_classes_of_the_split(split, ways, bert, classes):
    given: dict[str, Any] = {**SMALL, "n_way": "all", "eval_split": split}
    settings = EvaluateConfig(model_name_or_path=str(bert), dataset=[str(classes)], **given)
    episodes = episodes_of(settings, 2, byte_tokenizer())
    assert episodes.most_classes == ways
    assert [len(draw.classes) for draw in episodes.draws()] == [ways] * 3
    assert fmmeta.evaluate(str(bert), str(classes), k_shot=2, method="prototype", **given)["episodes"] == 3


@pytest.mark.parametrize("train", [[], ["c0", "c1"]], ids=["empty", "fewer classes than n_way"])
def test_only_the_evaluated_split_has_to_hold_episodes(bert, tmp_path, train):
    rows = write_classes(tmp_path / "rows.jsonl", classes=6)
    splits, weights = tmp_path / "splits.json", tmp_path / "weights.json"
    splits.write_text(json.dumps({"train": train, "valid": [], "test": ["c2", "c3", "c4", "c5"]}))
    weights.write_text('{"c1": 2, "c5": 3}')
    asked: dict[str, Any] = {"class_splits": str(splits), "n_way": "3", "k_shot": 1, "num_query": 1}
    found = fmmeta.evaluate(str(bert), str(rows), **asked, episodes=2, class_weights=str(weights))
    assert found["episodes"] == 2
    check_message(
        refusal(fmmeta.evaluate, str(bert), str(rows), **asked, eval_split="valid"),
        "eval_split=valid",
        "is empty",
    )
    weights.write_text('{"c1": 2}')  # no class of the test split
    found = fmmeta.evaluate(str(bert), str(rows), **asked, episodes=2, class_weights=str(weights))
    assert found["loss"] == fmmeta.evaluate(str(bert), str(rows), **asked, episodes=2)["loss"]
    run = Config(dataset=[str(rows)], class_splits=str(splits), n_way=3, k_shot=1, num_query=1)
    why = "n_way=3 is above the 2 classes" if train else "nothing to train on"
    check_message(refusal(load_sources, run, byte_tokenizer(), print), why)


def test_model_is_adapted_with_its_stored_settings(bert, classes, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "model")
    layers = [
        *(f"bert.encoder.layer.{n}" for n in range(2)),
        "bert.embeddings.LayerNorm",
        "bert.embeddings.position_embeddings",
        "bert.embeddings.token_type_embeddings",
        "bert.embeddings.word_embeddings",
        "bert.pooler.dense",
    ]
    rates = {"head": [0.5, 0.1], **{layer: [0.0, 0.0] for layer in layers}}
    stored = {"inner_steps": 2, "inner_lr": 9.0, "head_init": "zero", "inner_rates": rates}
    (folder / "fmmeta.json").write_text(json.dumps(stored))
    ours = fmmeta.evaluate(str(folder), str(classes), k_shot=2, **SMALL)
    # a head alone that learns at 0.5, then 0.1: the same by the features that stay
    settings = EvaluateConfig(model_name_or_path=str(bert), dataset=[str(classes)], **SMALL)
    encoder, tokenizer, expected = AutoModel.from_pretrained(bert).eval(), byte_tokenizer(), []
    for draw in draws_of(settings, 2):
        (support, labels), (query, truth) = texts(draw, draw.support), texts(draw, draw.query)
        with torch.no_grad():
            s, q = (encoder(**batch(rows, tokenizer)).pooler_output for rows in (support, query))
        head = torch.nn.Linear(s.shape[1], 3)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        for rate in (0.5, 0.1):
            head.zero_grad()
            F.cross_entropy(head(s), labels).backward()
            for param in head.parameters():
                param.data -= rate * param.grad
        expected.append(F.cross_entropy(head(q), truth).item())
    assert [score["loss"] for score in ours["cells"][0]["scores"]] == pytest.approx(expected, rel=1e-4)
    mine = fmmeta.evaluate(str(folder), str(classes), k_shot=2, inner_lr=0.1, **SMALL)
    plain = fmmeta.evaluate(str(bert), str(classes), k_shot=2, inner_lr=0.1, inner_steps=2, **SMALL)
    assert mine["loss"] == plain["loss"]  # a given rate replaces all stored rates


def test_language_metrics(llama, pairs):
    flags: dict[str, Any] = {"method": ["finetune", "in_context"], "inner_lr": 0.1, "inner_steps": 1}
    results = fmmeta.evaluate(
        str(llama), str(pairs), **LANGUAGE, **flags, metrics=["rouge_l", "options"], max_new_tokens=4
    )
    settings = EvaluateConfig(
        model_name_or_path=str(llama), dataset=[str(pairs)], task_type="causal_lm", num_query=2, episodes=3
    )
    base, tokenizer = AutoModelForCausalLM.from_pretrained(llama).eval(), byte_tokenizer()
    options, losses = list[float](), list[float]()
    for draw in draws_of(settings, 2):
        model = copy.deepcopy(base)

        def likelihood(row, answer, model=model, draw=draw):
            prompt = tokenizer(f"Input: {draw.store.text('input', row)}\nOutput:")["input_ids"]
            ids = tokenizer(f" {answer}", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            return -F.cross_entropy(logits, torch.tensor(ids), reduction="sum"), len(ids)

        def loss(rows, draw=draw):
            totals, counts = zip(
                *(likelihood(row, draw.store.text("target", row)) for row, _ in rows), strict=True
            )
            return -sum(totals) / sum(counts)

        loss(draw.support).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
            losses.append(float(loss(draw.query)))
            known = dict.fromkeys(draw.store.text("target", row) for row, _ in (*draw.support, *draw.query))
            right = 0
            for row, _ in draw.query:
                chosen = max(known, key=lambda answer, row=row: float(likelihood(row, answer)[0]))
                right += chosen == draw.store.text("target", row)
        options.append(right / len(draw.query))
    scores = results["cells"][0]["scores"]
    assert [score["loss"] for score in scores] == pytest.approx(losses, rel=1e-4)
    assert [score["metrics"]["options"] for score in scores] == pytest.approx(options)
    assert all(0 <= score["metrics"]["rouge_l"] <= 1 for score in scores)
    assert results["options"]["mean"] == pytest.approx(np.mean(options))
    assert results["cells"][1]["loss"] != results["loss"]


def test_options_of_packed_runs_are_scored_row_by_row(llama, pairs, monkeypatch):
    """Packed and padded runs give the same likelihoods."""
    plain, likelihoods = LanguageMetrics.log_likelihoods, list[list[float]]()

    def recording(self, examples):
        likelihoods.append(plain(self, examples))
        return likelihoods[-1]

    monkeypatch.setattr(LanguageMetrics, "log_likelihoods", recording)
    flags = {**LANGUAGE, "num_query": 3, "episodes": 2, "metrics": "options", "inner_steps": 1}
    for packing in (False, True):
        fmmeta.evaluate(llama, pairs, **flags, packing=packing)
    assert len(likelihoods) == 4
    assert max(map(len, likelihoods)) > 3
    for apart, packed in zip(likelihoods[:2], likelihoods[2:], strict=True):
        assert packed == pytest.approx(apart, rel=1e-4)


def test_bad_task_file_is_skipped_for_both_models(llama, tmp_path, capsys):
    data = tmp_path / "tasks"
    for number in range(10):
        file = data / f"s{number % 2}" / f"t{number}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_rows(file, [{"input": f"{number} {word}", "output": word[:2]} for word in WORDS[:6]])
    (data / "s1" / "t3.jsonl").write_text("{broken\n")
    names = [f"s{number % 2}/t{number}" for number in range(10)]
    (data / "task_splits.json").write_text(json.dumps({"train": names[6:], "test": names[:6]}))
    flags: dict[str, Any] = {
        "task_type": "causal_lm",
        "k_shot": [1, 2],
        "num_query": 2,
        "episodes": 12,
        "inner_steps": 1,
    }
    assert "t3.jsonl" in refusal(fmmeta.evaluate, llama, data, **flags)
    results = fmmeta.evaluate(llama, data, **flags, on_bad_task="skip", compare=str(llama), quiet=False)
    assert [cell["episodes"] for cell in results["cells"]] == [10, 10]
    assert "s1/t3" not in {score["task"] for cell in results["cells"] for score in cell["scores"]}
    assert [(cell["episodes"], cell["loss_gain"]) for cell in results["compare"]["cells"]] == [
        (10, 0),
        (10, 0),
    ]
    lines = [line for line in capsys.readouterr().out.splitlines() if "failed to load" in line]
    assert len(lines) == 2  # for either number of shots, once for both models
    check_message(lines[0], "fmmeta: 2 of 12 1-shot episodes", "task s1/t3: ", "left out")
    check_message(
        refusal(fmmeta.evaluate, llama, data, **flags, on_bad_task="skip", max_bad_fraction=0.01),
        "max_bad_fraction=0.01: 2 of 12 1-shot episodes",
        "task s1/t3: ",
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])  # learned positions and rotary ones, 128
def test_greedy_generation_equals_transformers_and_stops_at_the_last_position(family, tmp_path):
    """Each answer has the tokens that it has without the others of its batch."""
    folder = save_family(tmp_path / family, family)
    single = load_model(
        Config(model_name_or_path=str(folder), task_type="causal_lm", algorithm="none"), Progress(False)
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), single.tokenizer
    prompts = [tokenizer("river " * 30)["input_ids"][:length] for length in (125, 7, 127, 120, 1)]
    answers = generate(single.worker, single.reader, prompts, 6, 4)
    for prompt, text in zip(prompts, answers, strict=True):
        ids = list(prompt)
        while len(ids) < min(128, len(prompt) + 6) and ids[-1] != tokenizer.eos_token_id:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert text == tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True).strip()
    single.worker.model.hf.generation_config.repetition_penalty = 5.0
    assert generate(single.worker, single.reader, prompts, 6, 4) == answers
    assert single.worker.model.hf.generation_config.repetition_penalty == 5.0
    check_message(
        refusal(generate, single.worker, single.reader, [prompts[0] + [5] * 3], 6, 4),
        "max_new_tokens=6",
        "128 tokens",
        "128 positions",
        "lower --max_length",
    )
    assert generate(single.worker, single.reader, [], 6, 4) == []


def test_rouge_l():
    assert longest_common("abcbdab", "bdcaba") == 4
    assert rouge_l("the cat sat", "The cat, sat!") == 1
    assert (
        rouge_l("police killed the gunman", "police kill the gunman") == 0.75
    )  # the example of Lin 2004, section 3
    assert rouge_l("the gunman kill police", "police kill the gunman") == 0.5
    assert rouge_l("", "word") == 0
    assert rouge_l("", "") == 1
    assert (rouge_l("\U0001f44d", "\U0001f44e"), rouge_l("-", " - ")) == (0, 1)  # symbols alone


def test_an_evaluation_holds_a_bounded_number_of_episodes(bert, classes, monkeypatch):
    given = {"k_shot": 1, "num_query": 2, "n_way": 2, "episodes": 5, "max_length": 16}
    whole = fmmeta.evaluate(str(bert), str(classes), method="finetune", **given)
    read, counts = EpisodeReader.read_share, []

    def counting(reader, tasks):
        counts.append(len(tasks))
        return read(reader, tasks)

    monkeypatch.setattr(EpisodeReader, "read_share", counting)
    monkeypatch.setattr(command, "IN_MEMORY", 2)
    again = fmmeta.evaluate(str(bert), str(classes), method="finetune", **given)
    assert again["cells"][0]["scores"] == whole["cells"][0]["scores"]
    assert counts == [2, 2, 1]


def test_calibration_error_by_hand():
    shares = torch.tensor([[0.95, 0.05], [0.93, 0.07], [0.35, 0.65], [0.42, 0.58]])
    score = episode_score(0, "t", "s", prediction_stats(shares.log(), torch.tensor([0, 1, 1, 0])))
    assert score.accuracy == 0.5
    assert score.loss == pytest.approx(-np.log([0.95, 0.07, 0.65, 0.42]).mean(), rel=1e-6)
    # bins: (0.9, 1.0] has 0.95 and 0.93, one right; 0.65 right alone; 0.58 wrong alone
    expected = (abs(0.95 + 0.93 - 1) + abs(0.65 - 1) + abs(0.58 - 0)) / 4
    assert calibration_error([score]) == pytest.approx(expected, rel=1e-6)
    assert calibration_error([score, EpisodeScore.of(1, "t", "s", 1.0, 1.0)]) is None


def test_paired_differences_are_over_common_episodes():
    ours = [
        EpisodeScore.of(slot, f"t{slot}", "s", 1.0, accuracy) for slot, accuracy in enumerate([0.5, 0.7, 0.9])
    ]
    theirs = [EpisodeScore.of(slot, f"t{slot}", "s", 1.5, 0.4) for slot in (1, 2)]
    found = paired(ours, theirs)
    assert found["episodes"] == 2
    assert found["accuracy_gain"] == pytest.approx(0.4)
    assert found["loss_gain"] == pytest.approx(0.5)
    assert found["ci95"] == pytest.approx(
        12.7062 * np.std([0.3, 0.5], ddof=1) / np.sqrt(2)
    )  # 1 degree of freedom


def test_infinite_losses_are_read_back_from_a_file_and_differ_by_zero(tmp_path):
    scores = [EpisodeScore.of(slot, "t", "s", loss, 0.5) for slot, loss in enumerate([math.inf, 1.0])]
    cell = EvalCell("finetune", 1, "x", scores)
    write_output(str(tmp_path / "results.json"), {"cells": [cell.as_dict()]})
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


def test_unreadable_stored_settings_are_refused(tmp_path, bert):
    (tmp_path / "fmmeta.json").write_text("[]")
    check_message(
        refusal(fmmeta.evaluate, str(tmp_path), "letters"),
        f"model_name_or_path={tmp_path}",
        "fix or replace it",
    )


def test_feature_norm_gives_cosine_prototypes(bert, classes):
    """One shot, no steps: the logits are 2 norm^2 cos and a constant, the temperature that `prototype` has at
    norm 10^0.5.
    """
    flags: dict[str, Any] = {**SMALL, "k_shot": 1, "pooling": "mean"}
    means = {"head_init": "prototype", "inner_steps": 0}
    ours = fmmeta.evaluate(str(bert), str(classes), **flags, **means, feature_norm=10**0.5)
    cosine = fmmeta.evaluate(str(bert), str(classes), **flags, method="prototype")
    plain = fmmeta.evaluate(str(bert), str(classes), **flags, **means)
    assert ours["loss"] == pytest.approx(cosine["loss"], rel=1e-4)
    assert ours["loss"] != pytest.approx(plain["loss"], rel=1e-2)
    flags["pooling"] = "model"
    check_message(
        refusal(fmmeta.evaluate, str(bert), str(classes), **flags, feature_norm=3.0),
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

    def run(output, **more):
        return fmmeta.evaluate(str(model), str(classes), **flags, **more, compare=str(other), output=output)

    whole = run(str(tmp_path / "whole.json"))
    names = [f"{k}-shot {method}" for k in (1, 2) for method in ("prototype", "finetune")] * 2
    assert computed == names
    computed.clear()
    output, finished = str(tmp_path / "out.json"), tmp_path / "out.finished.json"
    for stop_at[0] in (1, 5):  # the second continues from the first
        with pytest.raises(RuntimeError, match="the device failed"):
            run(output)
    assert not Path(output).exists()
    assert "2-shot prototype: accuracy " in capsys.readouterr().out
    stop_at[0] = -1
    kept = finished.read_bytes()
    assert run(output) == whole == json.loads(Path(output).read_text())
    assert computed == names
    assert not finished.exists()
    for change in ("seed", "weights", "damage"):  # what was scored with others is not taken
        computed.clear()
        finished.write_bytes(kept)
        if change == "weights":
            os.utime(model / "model.safetensors")
        if change == "damage":
            finished.write_text(kept.decode().replace('"accuracies"', '"no"'))
        run(output, **({"seed": 7} if change == "seed" else {}))
        assert computed[:2] == names[:2]


def test_unwritable_output_is_refused_first_and_the_table_is_still_shown(
    bert, classes, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    flags: dict[str, Any] = {**SMALL, "k_shot": [1], "method": ["prototype"]}
    settings = EvaluateConfig(
        model_name_or_path=str(bert), dataset=[str(classes)], **flags, output=str(tmp_path / "there.json")
    )
    full = Mock(side_effect=UsageError("output=there.json cannot be written; give another file"))
    with monkeypatch.context() as patch:
        patch.setattr(command, "write_output", full)
        assert refusal(command.evaluate, settings).startswith("output=there.json cannot be written")
    assert "prototype" in capsys.readouterr().out.split("accuracy %")[1]
    monkeypatch.setattr(command, "EvaluatedModel", lambda *_: pytest.fail("computed before the check"))
    for output, cause, remedy in (
        (tmp_path, "is a folder", f"give a file in it, such as {tmp_path / 'results.json'}"),
        (tmp_path / "file" / "x.json", f"{tmp_path / 'file'} is no folder", "give another file"),
    ):
        check_message(
            refusal(fmmeta.evaluate, str(bert), str(classes), **flags, output=str(output)),
            f"output={output} ",
            cause,
            remedy,
        )
    # no partial file is left, and the scores are kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there.finished.json"]


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
@pytest.mark.parametrize("name", ["dataset", "class_splits", "label_names", "compare"])
def test_an_output_that_is_an_input_is_refused(kind, name, tmp_path):
    file, link = tmp_path / "input.json", tmp_path / "link.json"
    file.write_text('{"a": "b"}')
    link.symlink_to(file)
    values: dict[str, Any] = {name: [str(file)] if name == "dataset" else str(file)}
    check_message(
        refusal(kind, output=str(link), **values),
        f"output={link} is an input too, of {name}={file}",
        "give another file",
    )
    assert kind(output=str(tmp_path / "other.json"), dataset=[str(tmp_path)]).output


@pytest.mark.parametrize("name", ["test.jsonl", "class_splits.json", "strata/a/tasks.csv", "class/0.png"])
def test_an_output_that_is_a_file_of_the_data_folder_is_refused(name, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("")
    (tmp_path / "results.json").write_text("")
    check_message(
        refusal(EvaluateConfig, dataset=[str(tmp_path)], output=str(tmp_path / name)),
        f"output={tmp_path / name} is an input too, of dataset={tmp_path}",
        "give another file",
    )
    assert EvaluateConfig(dataset=[str(tmp_path)], output=str(tmp_path / "results.json")).output


def test_damaged_results_to_compare_with_are_refused_first(classes, tmp_path, monkeypatch):
    file = tmp_path / "results.json"
    flags: dict[str, Any] = {"n_way": 2, "k_shot": [1], "num_query": 1, "episodes": 1, "inner_steps": 1}
    (cell,) = fmmeta.evaluate("tiny", classes, **flags)["cells"]
    (score,) = cell["scores"]
    monkeypatch.setattr(command, "EvaluatedModel", lambda *_: pytest.fail("computed before the check"))
    for damage in ({"scores": []}, {"k_shot": [1, 5]}, {"scores": [{**score, "accuracy": None}]}):
        file.write_text(json.dumps({"cells": [{**cell, **damage}]}))
        check_message(
            refusal(fmmeta.evaluate, "tiny", classes, **flags, compare=str(file)),
            f"compare={file} holds no results",
            "a cell without scores",
            "give such a file",
        )


@pytest.mark.parametrize("kind", [EvaluateConfig, TuneConfig, PredictConfig])
def test_an_output_that_is_a_file_of_a_model_is_refused(kind, tmp_path):
    for name in ("model.safetensors", "config.json", "fmmeta.json", "results.json"):
        (tmp_path / name).write_text("{}")
        given = {"model_name_or_path": str(tmp_path), "output": str(tmp_path / name)}
        if name == "results.json" or (name == "fmmeta.json" and kind is TuneConfig):  # that of tune is there
            assert kind(**given).output
            continue
        check_message(
            refusal(kind, **given), f"is an input too, of model_name_or_path={tmp_path}", "give another file"
        )


def test_a_model_to_compare_with_is_checked_first(bert, llama, classes, tmp_path, monkeypatch):
    other = shutil.copytree(llama, tmp_path / "other")
    (other / "fmmeta.json").write_text('{"task_type": "causal_lm"}')
    monkeypatch.setattr(command, "EvaluatedModel", lambda *_: pytest.fail("computed before the check"))
    check_message(
        refusal(fmmeta.evaluate, str(bert), str(classes), compare=str(other)),
        f"compare={other}",
        "task_type=causal_lm",
        f"model_name_or_path={bert}",
        "task_type=classification",
        "give another model, or --task_type",
    )
    check_message(
        refusal(fmmeta.evaluate, str(bert), str(classes), compare=str(tmp_path)),
        f"compare={tmp_path}",
        "give a Hugging Face folder or hub id",
    )
    hub_answers.cache_clear()
    no_network = Mock(side_effect=OSError("Name or service not known"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils.get_session", no_network)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    check_message(
        refusal(fmmeta.evaluate, str(bert), str(classes), compare="no-such-folder"),
        "compare=no-such-folder",
        "check the path, or the network",
    )
    assert no_network.call_count == 3  # and not for every file
    hub_answers.cache_clear()


def test_one_episode_has_no_interval_and_results_are_json(bert, classes, tmp_path, capsys):
    flags: dict[str, Any] = {
        "n_way": "2",
        "k_shot": [1, 1],
        "num_query": 2,
        "episodes": 1,
        "method": ["knn", "prototype", "knn"],
    }
    results = fmmeta.evaluate(str(bert), str(classes), **flags, output=str(tmp_path / "one.json"), quiet=True)
    assert [cell["method"] for cell in results["cells"]] == ["knn", "prototype"]  # once each
    stored = json.loads((tmp_path / "one.json").read_text(), parse_constant=pytest.fail)
    assert stored["ci95"] is None
    assert stored["accuracy"] == results["accuracy"]
    flags |= {"k_shot": [1], "method": ["knn"]}
    command.evaluate(
        EvaluateConfig(
            model_name_or_path=str(bert), dataset=[str(classes)], **flags, compare=str(tmp_path / "one.json")
        )
    )
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
    def cell(values, loss):
        return EvalCell(
            "knn",
            1,
            "x",
            [EpisodeScore.of(slot, f"t{slot}", "s", loss, value) for slot, value in enumerate(values)],
        )

    settings = EvaluateConfig(model_name_or_path="mine", compare="theirs", method=["knn"], k_shot=[1])
    ours, theirs = cell(accuracies, 1.0), cell([0.5, 0.6, 0.7, 0.6], 1.25)
    results = results_of(settings, [ours], CLASSIFICATION)
    results["compare"] = {"with": "theirs", "cells": differences([ours], [theirs])}
    show(results, Progress(True))
    table = capsys.readouterr().out.split("mine (A) against theirs (B)")[1]
    (line,) = [line for line in table.splitlines() if line.startswith("knn")]
    assert " ".join(line.split()).startswith(f"knn 1 {' '.join(row.split())} 1.0000 1.2500 +0.2500 ± ")
    assert line.endswith(f"  {verdict}")
    (stored,) = results["compare"]["cells"]
    assert stored["verdict"] == (None if verdict == "-" else verdict)
    assert (stored["other"]["accuracy"], len(stored["other"]["scores"])) == (pytest.approx(0.6), 4)


def test_ranges_of_shots_and_ways_are_shown(bert, classes, capsys):
    flags = {**SMALL, "n_way": "2", "n_way_max": 3, "k_shot": 1, "k_shot_max": 4, "method": "prototype"}
    fmmeta.evaluate(str(bert), str(classes), **flags, quiet=False)
    out = capsys.readouterr().out
    assert "3 episodes of 2 to 3 classes" in out
    assert "prototype  1 to 4 " in out
    assert "(prototype, 1 to 4 shots)" in out


def test_stored_language_model_has_no_n_way(llama, pairs, tmp_path, capsys):
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / "fmmeta.json").write_text('{"task_type": "causal_lm"}')
    found = fmmeta.evaluate(
        str(folder), str(pairs), k_shot=1, num_query=2, episodes=2, inner_steps=0, quiet=False
    )
    assert found["n_way"] is None
    assert "2 episodes of the test split" in capsys.readouterr().out


@pytest.mark.parametrize("method", [soft_kmeans, sinkhorn])
def test_transductive_methods_compute_shares_and_means_in_turn(method):
    """Against loops over queries and classes in double precision."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 6))
    labels, truth = np.array([0, 1, 2, 1]), np.array([0, 0, 1, 1, 2, 2])
    support, query = (centres[of] + rng.normal(size=(len(of), 6)) for of in (labels, truth))
    s, q = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (support, query))
    own = np.stack([s[labels == c].sum(0) for c in range(3)])
    sums = own.copy()
    for _ in range(5):
        means = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        shares = np.exp(q @ means.T / 0.1)
        for _ in range(10 if method is sinkhorn else 0):
            shares /= shares.sum(0)
            shares /= shares.sum(1, keepdims=True)
        shares /= shares.sum(1, keepdims=True)
        sums = np.stack([own[c] + sum(shares[i, c] * q[i] for i in range(6)) for c in range(3)])
    means = sums / np.linalg.norm(sums, axis=1, keepdims=True)
    expected = np.exp(q @ means.T / 0.05)
    expected = shares if method is sinkhorn else expected / expected.sum(1, keepdims=True)
    given = [torch.tensor(rows, dtype=torch.float32) for rows in (support, query)]
    found = method(given[0], torch.from_numpy(labels), given[1], 3).exp().numpy()
    assert found == pytest.approx(expected, abs=1e-5)


def test_sinkhorn_shares_queries_equally_between_classes():
    """All queries are nearest to the first class."""
    rng = np.random.default_rng(1)
    support = torch.eye(2, 4)
    query = torch.tensor(rng.normal(scale=0.3, size=(8, 4)), dtype=torch.float32) + support[0]
    assert (soft_kmeans(support, torch.arange(2), query, 2).argmax(1) == 0).all()
    shares = sinkhorn(support, torch.arange(2), query, 2).exp()
    assert shares.sum(0).tolist() == pytest.approx([4, 4], abs=0.05)


@pytest.mark.parametrize("method", [knn, linear, soft_kmeans, sinkhorn])
def test_one_example_per_class_is_classified_without_warnings(method, recwarn):
    features = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(method(features, torch.arange(30), features, 30).argmax(1), torch.arange(30))
    assert [str(one.message) for one in recwarn] == []


def test_nan_scores_count_as_wrong():
    """One of two rows is nan: its confidence is 0 and its loss is infinite."""
    rows = torch.tensor([[0.75, 0.25], [float("nan"), 0.5]]).log()
    score = episode_score(0, "t", "s", prediction_stats(rows, torch.tensor([0, 0])))
    assert (score.accuracy, score.loss) == (0.5, float("inf"))
    assert (score.bins[0][0], score.bins[1][0], score.bins[2][0]) == (0, 0, 1)
    assert calibration_error([score]) == pytest.approx(0.25 / 2)
    assert paired([score], [score])["loss_gain"] == 0


@pytest.mark.parametrize("method", ["prototype", "linear", "knn", "soft_kmeans", "sinkhorn"])
@pytest.mark.parametrize("bad", ["query", "support"])
def test_features_that_are_not_finite_count_as_wrong(method, bad, classes):
    """Of a query that row alone; of a support example the whole episode."""
    source = load_sources(
        Config(dataset=[str(classes)], n_way=2, k_shot=2, num_query=3, max_length=16),
        byte_tokenizer(),
        print,
    ).train
    (task,) = Schedule(source.items, 1, 0).meta_batch(0)
    draw = source.draw(task)
    rows = {"support": draw.support, "query": draw.query}
    place = {"support": 0, "query": 4}[bad]
    features = {
        (draw.store.path, row): torch.eye(2)[label] + 0.01 * number
        for part in rows.values()
        for number, (row, label) in enumerate(part)
    }
    features[draw.store.path, rows[bad][place][0]] = torch.tensor([math.nan, 1.0])
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
    trained = shutil.copytree(llama, tmp_path / "trained")
    stored = {"task_type": "causal_lm", "prompt_template": "Q: {input}\nA:", "lora_r": 4, "inner_steps": 3}
    (trained / "fmmeta.json").write_text(json.dumps(stored))
    settings = EvaluateConfig(model_name_or_path=str(trained), compare=str(llama), inner_lr=0.02)
    command.check_compare_model(settings, str(llama))
    config = command.with_model(settings, str(llama)).run_config()
    assert stored.items() <= vars(config).items()
    assert (config.inner_lr, config.model_name_or_path) == (0.02, str(llama))


def test_a_stored_rate_is_of_the_stored_optimizer(llama, tmp_path):
    trained = shutil.copytree(llama, tmp_path / "trained")
    stored = {"task_type": "causal_lm", "lora_r": 4, "inner_optimizer": "sgd", "inner_lr": 0.25}
    (trained / "fmmeta.json").write_text(json.dumps(stored))
    for optimizer, rate in ((None, 0.25), ("sgd", 0.25), ("adamw", 0.003)):
        settings = EvaluateConfig(model_name_or_path=str(trained), inner_optimizer=optimizer)
        assert settings.run_config().inner_lr == rate
        assert settings.sets_inner_lr == (optimizer == "adamw")  # learned rates are of the stored one too


def test_zero_shot_scores_the_queries_without_their_support_set(llama, pairs):
    """The loss per answer token and the exact match are those of an inner loop without steps."""
    metrics = ["exact_match", "options", "rank"]
    zero = fmmeta.evaluate(llama, pairs, **LANGUAGE, method="zero_shot", metrics=metrics, max_new_tokens=3)
    none = fmmeta.evaluate(llama, pairs, **LANGUAGE, inner_steps=0, metrics=metrics, max_new_tokens=3)
    assert [score["loss"] for score in zero["cells"][0]["scores"]] == pytest.approx(
        [score["loss"] for score in none["cells"][0]["scores"]]
    )
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


@pytest.mark.parametrize("method", ["zero_shot", "in_context"])
def test_options_are_scored_behind_the_same_prompt(llama, tmp_path, monkeypatch, method):
    """Of an input that is cut, and of a support set that does not fit, as much is left before each option."""
    options = ["a", "bb " * 6]
    rows = [
        {"task": f"t{task}", "input": f"{word} {task} " * 8, "output": options[task % 2], "options": options}
        for task in range(8)
        for word in WORDS[:6]
    ]
    found, flags = [], {**LANGUAGE, "max_length": 40, "metrics": ["options"], "eval_split": "train"}

    def remember(self, examples):
        found.extend(zip(examples[::2], examples[1::2], strict=True))
        return [0.0] * len(examples)

    monkeypatch.setattr(LanguageMetrics, "log_likelihoods", remember)
    fmmeta.evaluate(llama, write_rows(tmp_path / "rows.jsonl", rows), **flags, method=method)
    assert found
    for short, long in found:
        assert short.prompt == long.prompt
        assert len(long.prompt) > 10
        assert short.label_tokens < long.label_tokens
    lengths = {len(long.input_ids) for _, long in found}
    assert lengths == {40} if method == "zero_shot" else min(lengths) > 80


def test_the_right_answer_is_ranked_among_the_options_of_its_row(llama, tmp_path, monkeypatch):
    """Likelihoods are replaced by the length of the option: the longest is the likeliest."""
    rows = [
        {"task": f"t{task}", "input": f"{word} {task}", "output": "bb", "options": ["a", "bb", "ccc", "dddd"]}
        for task in range(8)
        for word in WORDS[:6]
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)

    def longest(self, examples):
        return [float(sum(label != -100 for label in one.labels)) for one in examples]

    monkeypatch.setattr(LanguageMetrics, "log_likelihoods", longest)
    flags = {**LANGUAGE, "method": "zero_shot", "metrics": ["options", "rank"], "eval_split": "train"}
    results = fmmeta.evaluate(llama, data, **flags)
    assert results["rank"]["mean"] == 3.0
    assert results["options"]["mean"] == 0.0
    answers = write_rows(tmp_path / "answers.jsonl", [{**row, "options": None} for row in rows])
    assert fmmeta.evaluate(llama, answers, **flags)["rank"]["mean"] == 1.0  # the only answer of the episode
    for value in (-1.0, float("nan")):  # all options alike: the right one is not the likeliest
        monkeypatch.setattr(LanguageMetrics, "log_likelihoods", lambda _, rows, one=value: [one] * len(rows))
        results = fmmeta.evaluate(llama, data, **flags)
        assert (results["rank"]["mean"], results["options"]["mean"]) == (4.0, 0.0)
