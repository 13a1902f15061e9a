"""Learners that read rows end where the oracle ends, on every layout, and refuse where they cannot run."""

import pytest

from tests.support.matrix import ALSO, Case, ParityFixture, tolerance
from tests.support.models import write_rows

ROWS = [  # layout, stage, algorithm, model, head, also, tensor ranks as -T
    ((1, 1), "plain", "maml-adapters", "bert", "zero", "tags-lora", 1),
    ((1, 1), "plain", "reptile", "bert", "learned", "numbers", 1),
    ((2, 1), "plain", "fomaml", "bert", "learned", "tags", 1),
    ((2, 1), "plain", "fomaml", "bert", "zero", "numbers-lora-tasks", 1),
    ((2, 1), "plain", "fomaml", "bert", "zero", "tags-lora-tasks", 1),
    ((1, 2), 0, "fomaml", "bert", "learned", "tags", 1),
    ((1, 2), 1, "fomaml", "bert", "zero", "numbers-mean", 1),
    ((1, 2), 2, "reptile", "bert", "zero", "tags-lora", 1),
    ((1, 2), 3, "fomaml", "bert", "learned", "tags", 1),
    ((1, 2), 3, "fomaml", "bert", "zero", "numbers", 1),
    ((1, 2), 0, "fomaml", "bert", "learned", "numbers-lora", 1),
    ((1, 1), "plain", "fomaml", "llama3", "zero", "tags", 1),
    ((1, 2), 0, "fomaml", "llama3", "zero", "tags", -2),
    ((1, 2), 1, "fomaml", "llama3", "zero", "numbers", -2),
]
CASES = [
    Case.of_row(layout, stage, algorithm, model, "fp32", "sgd", head, also, spread)
    for layout, stage, algorithm, model, head, also, spread in ROWS
]


@pytest.fixture(scope="module", autouse=True)
def own(tmp_path_factory):
    tags, numbers = write_rows(tmp_path_factory.mktemp("rows"))
    of_tags = {"task_type": "token_classification", "dataset": [str(tags)], "n_way": 5}
    of_numbers = {"task_type": "regression", "dataset": [str(numbers)], "n_way": 2, "inner_lr": 0.05}
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in (("tags", of_tags), ("numbers", {**of_numbers, "pooling": "model"})):
            patch.setitem(ALSO, name, kind)
            patch.setitem(ALSO, f"{name}-lora", {**kind, "lora_r": 4})
            patch.setitem(ALSO, f"{name}-lora-tasks", {**kind, "lora_r": 4, "tasks_per_pass": "2"})
        patch.setitem(ALSO, "numbers-mean", {**of_numbers, "pooling": "mean"})
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory, own):
    return ParityFixture(tmp_path_factory.mktemp("own"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ends_where_the_oracle_ends(case, bench):
    theta, _ = bench.outcome(case, CASES)
    assert bench.error(case, theta) < tolerance(case)
