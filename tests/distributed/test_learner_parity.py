"""Learners of other rows and losses than texts with classes end where the oracle ends, on every layout."""

import json
from dataclasses import replace

import pytest

from tests.support.matrix import (
    ALSO,
    Case,
    Launches,
    ParityFixture,
    assert_export_gives_logits,
    fast_and_slow_cases,
    kind_of,
    selected,
    tolerance,
)
from tests.support.models import write_pairs, write_preferences, write_rows

FAST = [  # layout, stage, algorithm, model, head, settings, pipeline stages (-T: tensor ranks)
    ((1, 1), "plain", "maml-adapters", "bert", "zero", "tags-lora", 1),
    ((1, 1), "plain", "reptile", "bert", "learned", "numbers", 1),
    ((1, 1), "plain", "fomaml", "llama", "zero", "preference-columns", 1),
    ((1, 1), "plain", "reptile", "bert", "learned", "reward", 1),
    ((1, 1), "plain", "maml-adapters", "llama", "zero", "answers-lora", 1),
    ((1, 1), "plain", "ttt-rates", "llama", "zero", "stream-lora", 1),
    ((2, 1), "plain", "ttt-first", "llama", "zero", "stream", 1),
    ((1, 2), 2, "ttt", "llama", "zero", "stream-lora", 1),
    ((1, 2), 3, "ttt-first", "llama", "zero", "stream", 1),
    ((1, 1), "plain", "maml", "llama", "zero", "base-under-adapters", 1),
    ((1, 1), "plain", "fomaml-rates", "bert", "zero", "base-under-adapters", 1),
    ((1, 2), 2, "maml", "llama", "zero", "all-under-adapters", 1),
    ((1, 2), 2, "maml-adapters", "llama3", "zero", "lora-last", 1),  # two frozen blocks run once
    ((1, 2), 3, "fomaml", "llama", "zero", "base-under-adapters", 1),
    ((1, 2), 3, "ttt-first", "llama", "zero", "stream-prime", 1),
    ((1, 1), 2, "anil", "bert", "learned", "classes", 1),
    ((1, 1), 3, "protonet", "bert", "prototype", "classes", 1),
    ((2, 1), "plain", "fomaml", "bert", "learned", "tags", 1),
    ((2, 1), "plain", "fomaml", "bert", "zero", "numbers-lora-tasks", 1),
    ((2, 1), "plain", "fomaml", "llama", "zero", "preference-lora-tasks", 1),
    ((2, 1), "plain", "fomaml", "t53", "zero", "seq2seq-lora-tasks", 1),
    ((2, 1), "plain", "anil", "bert", "learned", "classes-tasks", 1),
    ((1, 2), 0, "fomaml", "t53", "zero", "seq2seq", 1),
    ((1, 2), 1, "fomaml", "bert", "zero", "numbers-mean", 1),
    ((1, 2), 2, "reptile", "bert", "zero", "tags-lora", 1),
    ((1, 2), 3, "fomaml", "bert", "learned", "reward", 1),
    ((1, 2), 3, "fomaml", "llama", "zero", "answers-packing", 1),
    ((1, 2), 0, "fomaml", "llama3", "zero", "answers", 2),
    ((1, 2), 0, "fomaml", "llama3", "zero", "preference-lora", -2),
    ((1, 2), 1, "fomaml", "llama3", "zero", "numbers", -2),
]
SLOW = [
    ((1, 1), "plain", "maml-adapters", "t53", "zero", "seq2seq-lora", 1),
    ((1, 1), "plain", "maml", "llama", "zero", "norms", 1),
    ((1, 1), "plain", "meta_sgd", "llama", "zero", "norms", 1),
    ((1, 1), "plain", "ttt", "llama", "zero", "stream-base", 1),
    ((1, 1), "plain", "ttt", "llama", "zero", "stream-prime", 1),
    ((1, 2), 2, "maml", "llama", "zero", "prime", 1),
    ((2, 1), "plain", "fomaml", "bert", "zero", "base-under-adapters", 1),
    ((2, 1), "plain", "joint", "bert", "zero", "base-of-all", 1),
    ((1, 2), 0, "fomaml", "bert", "learned", "all-under-adapters", 1),
    ((1, 2), 1, "fomaml-rates", "llama", "zero", "norms", 1),
    ((1, 2), 3, "maml", "llama", "zero", "all-under-adapters", 1),
    ((1, 2), 3, "boil", "bert", "learned", "norms-meta", 1),
    ((1, 1), "plain", "fomaml", "llama3", "zero", "tags", 1),
    ((1, 1), "plain", "fomaml", "t53", "zero", "seq2seq", 1),
    ((1, 1), "plain", "maml-adapters", "llama", "zero", "preference-lora", 1),
    ((1, 1), "plain", "fomaml", "bert", "learned", "classes", 1),
    ((1, 1), "plain", "ttt", "llama", "zero", "stream", 1),
    ((1, 2), 0, "ttt-rates", "llama", "zero", "stream-lora", 1),
    ((1, 2), 1, "ttt-first", "llama", "zero", "stream", 1),
    ((1, 2), 3, "ttt", "llama", "zero", "stream-lora", 1),
    ((1, 2), 2, "ttt", "llama", "zero", "stream-clip-lora", 1),
    ((1, 2), 3, "ttt", "llama", "zero", "stream-clip", 1),
    ((1, 2), 0, "joint", "llama", "zero", "stream", 1),
    ((2, 1), "plain", "fomaml", "bert", "zero", "tags-lora-tasks", 1),
    ((2, 1), "plain", "fomaml", "bart3", "zero", "seq2seq", 1),
    ((2, 1), "plain", "fomaml", "bert", "zero", "reward-lora-tasks", 1),
    ((2, 1), "plain", "fomaml", "llama", "zero", "answers-lora-tasks", 1),
    ((1, 2), 0, "fomaml", "bert", "learned", "tags", 1),
    ((1, 2), 3, "fomaml", "bert", "learned", "tags", 1),
    ((1, 2), 3, "fomaml", "bert", "zero", "numbers", 1),
    ((1, 2), 0, "fomaml", "bert", "learned", "numbers-lora", 1),
    ((1, 2), 1, "reptile", "bart3", "zero", "seq2seq-lora", 1),
    ((1, 2), 2, "fomaml", "t53", "zero", "seq2seq", 1),
    ((1, 2), 3, "fomaml", "bart3", "zero", "seq2seq", 1),
    ((1, 2), 0, "fomaml", "llama", "zero", "preference-lora", 1),
    ((1, 2), 1, "fomaml", "llama", "zero", "preference-columns", 1),
    ((1, 2), 2, "reptile", "llama", "zero", "preference-lora", 1),
    ((1, 2), 3, "fomaml", "llama", "zero", "preference-lora", 1),
    ((1, 2), 1, "fomaml", "bert", "zero", "reward-lora", 1),
    ((1, 2), 1, "reptile", "bert", "prototype", "classes-lora", 1),
    ((1, 2), 0, "anil", "bert", "learned", "classes", 2),
    ((1, 2), 0, "fomaml", "llama3", "zero", "tags", -2),
    ((1, 2), 1, "fomaml", "llama3", "zero", "preference-columns", -2),
    ((1, 2), 0, "fomaml", "llama3", "zero", "answers", -2),
    ((1, 2), 0, "fomaml", "llama3", "zero", "base-under-adapters", 2),
    ((1, 2), 0, "fomaml", "llama3", "zero", "all-under-adapters", -2),
    ((1, 2), 0, "ttt-first", "llama3", "zero", "stream", 2),
    ((1, 2), 0, "ttt-first", "llama3", "zero", "stream", -2),
]


def cases_of(rows) -> list[Case]:
    return [
        replace(
            Case.of_row(layout, stage, algorithm, model, "fp32", "sgd", head, also, spread),
            export="under-adapters" in also and model != "bert",
        )
        for layout, stage, algorithm, model, head, also, spread in rows
    ]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """The learners and their data, as values of the matrix's axis `also`."""
    folder = tmp_path_factory.mktemp("rows")
    tags, numbers = write_rows(folder)
    columns, preferences = write_preferences(folder / "logps.jsonl"), folder / "preferences.jsonl"
    rows = [json.loads(line) for line in columns.read_text().splitlines()]
    lines = [json.dumps({key: one for key, one in row.items() if "logp" not in key}) for row in rows]
    preferences.write_text("\n".join(lines))
    regression = {"task_type": "regression", "dataset": [str(numbers)], "n_way": 2, "inner_lr": 0.05}
    # the margin of a pair is a tenth of its log-probabilities: rates are higher
    preference = {"task_type": "preference", "dataset": [str(preferences)], "inner_lr": 0.5}
    learners = {
        "tags": {"task_type": "token_classification", "dataset": [str(tags)], "n_way": 5},
        "numbers": {**regression, "pooling": "model"},
        "seq2seq": {"task_type": "seq2seq", "dataset": [str(write_pairs(folder / "pairs.jsonl"))]},
        "preference": preference,
        "reward": {"task_type": "reward", "dataset": [str(preferences)], "n_way": 1},
        "classes": {"task_type": "examples.own_loss:classes"},
        "answers": {"task_type": "examples.own_loss:answers"},
        "stream": {
            "task_type": "stream",
            "dataset": ["ciphers"],
            "chunk": 8,
            "context": 8,
            "chunks": 3,
            "inner_steps": 3,
            "num_query": 5,
            "n_way": 5,
        },
    }
    under = {"lora_r": 4, "inner_parameters": ["except", "body"]}
    new = {"inner_parameters": ["*.layers.1.mlp.*"]}  # as of prime MLPs
    prime = {**new, "outer_parameters": ["all", "except", "*.layers.1.self_attn.*"]}
    learners["stream-clip"] = {**learners["stream"], "inner_max_grad_norm": 0.5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALSO, "base-under-adapters", {**under, "outer_parameters": ["body"]})
        patch.setitem(ALSO, "base-of-all", {"lora_r": 4, "outer_parameters": ["body"]})
        patch.setitem(ALSO, "all-under-adapters", {**under, "outer_parameters": ["all"]})
        patch.setitem(ALSO, "stream-base", {**learners["stream"], **under, "outer_parameters": ["body"]})
        patch.setitem(ALSO, "prime", prime)
        patch.setitem(ALSO, "stream-prime", {**learners["stream"], **prime})
        patch.setitem(ALSO, "norms", {"inner_parameters": ["norms"]})
        patch.setitem(ALSO, "norms-meta", {"outer_parameters": ["norms", "head"]})
        patch.setitem(ALSO, "numbers-mean", {**regression, "pooling": "mean"})
        patch.setitem(ALSO, "preference-columns", {**preference, "dataset": [str(columns)]})
        for name, settings in learners.items():
            patch.setitem(ALSO, name, settings)
            patch.setitem(ALSO, f"{name}-packing", {**settings, "packing": True})
            patch.setitem(ALSO, f"{name}-tasks", {**settings, "tasks_per_pass": "2"})
            patch.setitem(ALSO, f"{name}-lora", {**settings, "lora_r": 4})
            patch.setitem(ALSO, f"{name}-lora-tasks", {**settings, "lora_r": 4, "tasks_per_pass": "2"})
        yield


@pytest.fixture(scope="module")
def launches(request, tmp_path_factory, kinds):
    bench = ParityFixture(tmp_path_factory.mktemp("parity"))
    return Launches(bench, selected(request), kind_of)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", fast_and_slow_cases(cases_of(FAST), cases_of(SLOW), kind_of))
def test_ends_where_the_oracle_ends(case, launches):
    """An own loss of classes matters: without it a run ends elsewhere."""
    theta, _ = launches.outcome(case)
    assert launches.bench.error(case, theta) < tolerance(case)
    if case.also == "classes":
        assert launches.bench.error(replace(case, also="nothing"), theta) > 0.01
    if case.export:
        assert_export_gives_logits(launches.bench, case, theta)
