"""Images and a collate function on two ranks: equal to one, and mistakes end all ranks with one line."""

import json

import pytest
import torch

from tests.support.helpers import write_rows
from tests.support.launch import run_ranks, train, train_flags
from tests.support.messages import check_message
from tests.support.short_runs import theta_of
from tests.support.vision import nested_rows, save_nested

QUICK = {
    "n_way": 3,
    "k_shot": 2,
    "num_query": 2,
    "meta_batch_size": 2,
    "inner_steps": 2,
    "inner_lr": 0.1,
    "outer_steps": 2,
    "eval_episodes": 2,
    "micro_batch_size": 3,
    "num_workers": 0,
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits") / "alone"
    train(out, 1, dataset="digits", **QUICK).ok()
    return out


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("group_size", "more"),
    [
        pytest.param(2, {"deepspeed": "zero2"}, id="zero2"),
        pytest.param(1, {}, id="2x1", marks=pytest.mark.slow),
        pytest.param(2, {"deepspeed": "zero3"}, id="zero3", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one_on_digits(alone, tmp_path, group_size, more):
    out = tmp_path / "two"
    train(out, 2, dataset="digits", group_size=group_size, **QUICK, **more).ok()
    torch.testing.assert_close(theta_of(out), theta_of(alone), rtol=0, atol=2e-5)
    gains = [json.loads((run / "run.json").read_text())["held_out"]["gain"] for run in (out, alone)]
    assert gains[0]["accuracy"] == gains[1]["accuracy"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "function", ["other_keys_on_rank_1", pytest.param("other_keys_later", marks=pytest.mark.slow)]
)
def test_other_keys_end_all_ranks_with_one_line(tmp_path, function):
    kind = f"tests.support.vision:of_{function}"
    files = {
        "model_name_or_path": save_nested(tmp_path / "model"),
        "dataset": write_rows(tmp_path / "rows.jsonl", nested_rows()),
    }
    own = {"task_type": kind, "pooling": "mean", "group_size": 1, "outer_steps": 20}
    flags = train_flags(tmp_path / "run", **{**QUICK, **files, **own})
    ended = run_ranks(["launch/train.py", *flags], 2, before=registered)
    assert ended.codes == [2, 2]
    (line,) = [line for line in ended.output[0].splitlines() if "task_type=" in line]
    check_message(line, f"task_type={kind}", "same keys")
    assert "Traceback" not in "".join(ended.output)


def registered() -> None:
    """The model's class is registered when its module is imported."""
