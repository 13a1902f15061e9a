"""seq2seq, preference and reward end where the oracle ends, on every layout."""

import json

import pytest

from tests.support.matrix import ALSO, Case, ParityFixture, tolerance
from tests.support.models import write_pairs, write_preferences

ROWS = [  # layout, stage, algorithm, model, head, also, tensor ranks as -T
    ((1, 1), "plain", "fomaml", "t53", "zero", "seq2seq", 1),
    ((1, 1), "plain", "maml-adapters", "t53", "zero", "seq2seq-lora", 1),
    ((1, 1), "plain", "maml-adapters", "llama", "zero", "preference-lora", 1),
    ((1, 1), "plain", "fomaml", "llama", "zero", "preference-columns", 1),
    ((1, 1), "plain", "reptile", "bert", "learned", "reward", 1),
    ((2, 1), "plain", "fomaml", "bart3", "zero", "seq2seq", 1),
    ((2, 1), "plain", "fomaml", "llama", "zero", "preference-lora-tasks", 1),
    ((2, 1), "plain", "fomaml", "bert", "zero", "reward-lora-tasks", 1),
    ((2, 1), "plain", "fomaml", "t53", "zero", "seq2seq-lora-tasks", 1),
    ((1, 2), 0, "fomaml", "t53", "zero", "seq2seq", 1),
    ((1, 2), 1, "reptile", "bart3", "zero", "seq2seq-lora", 1),
    ((1, 2), 2, "fomaml", "t53", "zero", "seq2seq", 1),
    ((1, 2), 3, "fomaml", "bart3", "zero", "seq2seq", 1),
    ((1, 2), 0, "fomaml", "llama", "zero", "preference-lora", 1),
    ((1, 2), 1, "fomaml", "llama", "zero", "preference-columns", 1),
    ((1, 2), 2, "reptile", "llama", "zero", "preference-lora", 1),
    ((1, 2), 3, "fomaml", "llama", "zero", "preference-lora", 1),
    ((1, 2), 1, "fomaml", "bert", "zero", "reward-lora", 1),
    ((1, 2), 3, "fomaml", "bert", "learned", "reward", 1),
    ((1, 2), 0, "fomaml", "llama3", "zero", "preference-lora", -2),
    ((1, 2), 1, "fomaml", "llama3", "zero", "preference-columns", -2),
]
CASES = [
    Case.of_row(layout, stage, algorithm, model, "fp32", "sgd", head, also, spread)
    for layout, stage, algorithm, model, head, also, spread in ROWS
]


@pytest.fixture(scope="module", autouse=True)
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    with_logps = write_preferences(folder / "logps.jsonl")
    without = folder / "preferences.jsonl"
    rows = [json.loads(line) for line in with_logps.read_text().splitlines()]
    lines = [json.dumps({key: one for key, one in row.items() if "logp" not in key}) for row in rows]
    without.write_text("\n".join(lines))
    pairs = {"task_type": "seq2seq", "dataset": [str(write_pairs(folder / "pairs.jsonl"))]}
    # the margin of a pair is a tenth of its log-probabilities: rates are higher
    preferences = {"task_type": "preference", "dataset": [str(without)], "inner_lr": 0.5}
    rewards = {"task_type": "reward", "dataset": [str(without)], "n_way": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALSO, "preference-columns", {**preferences, "dataset": [str(with_logps)]})
        for name, kind in (("seq2seq", pairs), ("preference", preferences), ("reward", rewards)):
            patch.setitem(ALSO, name, kind)
            patch.setitem(ALSO, f"{name}-lora", {**kind, "lora_r": 4})
            patch.setitem(ALSO, f"{name}-lora-tasks", {**kind, "lora_r": 4, "tasks_per_pass": "2"})
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory, own):
    return ParityFixture(tmp_path_factory.mktemp("own"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ends_where_the_oracle_ends(case, bench):
    theta, _ = bench.outcome(case, CASES)
    assert bench.error(case, theta) < tolerance(case)
