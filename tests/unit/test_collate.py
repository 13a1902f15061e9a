"""A collate function: nested inputs reach the model, and what a function may not return."""

import pickle
from typing import Any

import pytest
import torch

import fmmeta
from fmmeta.config.settings import Config
from fmmeta.tasks.batching import Example, MicroBatch, labels_of
from fmmeta.tasks.collate import Collate, structure_of
from tests.support.helpers import write_rows
from tests.support.messages import check_message, refusal
from tests.support.vision import nested_rows, save_nested

SHORT = {
    "n_way": 3,
    "k_shot": 1,
    "num_query": 2,
    "meta_batch_size": 2,
    "inner_steps": 1,
    "inner_lr": 0.5,
    "outer_steps": 3,
    "eval_episodes": 4,
    "pooling": "mean",
}
ROWS = [Example([0], 0, values={"nodes": [[1.0] * 4] * 2, "part": [float(n)] * 4}) for n in range(3)]


def named(function: str) -> Collate:
    collate = Collate.of(Config(task_type=f"tests.support.vision:of_{function}"))
    assert collate
    return collate


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nested")
    return {
        **SHORT,
        "model_name_or_path": str(save_nested(folder / "model")),
        "dataset": [str(write_rows(folder / "rows.jsonl", nested_rows()))],
    }


@pytest.mark.parametrize("workers", ["0", "1"])
def test_nested_inputs_train_a_model(settings, workers, tmp_path):
    config = Config(
        **settings,
        task_type="tests.support.vision:of_nested",
        num_workers=workers,
        algorithm="protonet",
        output_dir=str(tmp_path / "run"),
    )
    result = fmmeta.MetaTrainer(config).train()
    assert len(result.log_history) >= 1
    assert result.after is not None
    assert result.after > 0.6  # the classes are far from each other


def test_a_micro_batch_moves_with_its_nested_inputs():
    inputs = {"graph": {"nodes": torch.zeros(2, 3)}, "parts": [torch.zeros(2)], "name": "x"}
    batch = MicroBatch(inputs, {"labels": torch.zeros(2, dtype=torch.long)}, torch.ones(2))
    moved = batch.to(torch.device("meta"))
    assert moved.inputs["graph"]["nodes"].is_meta
    assert moved.inputs["parts"][0].is_meta
    assert moved.inputs["name"] == "x"


def test_the_structure_of_inputs_is_compared():
    collate = named("nested")
    inputs, targets = collate(ROWS, 0)
    assert structure_of(inputs) == {"graph": {"nodes": "float32"}, "parts": ["float32", "float32"]}
    assert structure_of(targets) == {"labels": "int64"}
    same = pickle.loads(pickle.dumps(collate))
    assert structure_of(same(ROWS, 0)) == structure_of((inputs, targets))
    other = Collate("a:b", collate.function, '{"input_ids": "int64"}')
    check_message(refusal(other, ROWS, 0), '"graph"', '{"input_ids": "int64"}', "return the same keys")


def test_functions_that_make_no_inputs_are_refused():
    def of(function: Any) -> Collate:
        return Collate("a:b", lambda rows, pad_token_id: (function(rows), {"labels": labels_of(rows)}))

    check_message(refusal(of(lambda rows: [1]), ROWS, 0), "a:b returned [1]", "return a dictionary")
    less = named("one_row_less")
    check_message(refusal(less, ROWS, 0), "pixel_values of shape [2, 3, 8, 8] for 3 rows")
    check_message(refusal(of(lambda rows: 1 / 0), ROWS, 0), "ZeroDivisionError", "fix it")
    missing = "task_type=tests.support.vision:of_missing"
    check_message(refusal(named, "missing"), missing, "write module:name")


def test_other_keys_for_some_rows_are_an_error_of_the_task(settings):
    config = Config(**settings, task_type="tests.support.vision:of_other_keys_later", num_workers="0")
    text = refusal(fmmeta.MetaTrainer(config.but(outer_steps=20)).train)
    check_message(text, "of_other_keys_later: collate returned", "for the first episode")
