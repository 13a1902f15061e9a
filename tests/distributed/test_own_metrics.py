"""Metrics of the user do not depend on the layout; one that raises ends all ranks."""

import json
from functools import cache

import pytest

from tests.support.launch import train
from tests.support.messages import check_message
from tests.support.models import save_bert, save_llama, write_classes, write_pairs
from tests.support.short_runs import metrics_of

QUICK = {
    "k_shot": 1,
    "num_query": 3,
    "meta_batch_size": 2,
    "inner_steps": 2,
    "inner_lr": 0.1,
    "outer_steps": 1,
    "eval_steps": 1,
    "eval_episodes": 4,
    "micro_batch_size": 2,
    "num_workers": 0,
    "metrics": "tests.support.own_metric:f1",
}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    of = {
        "classification": {
            "model_name_or_path": save_bert(folder / "bert"),
            "dataset": write_classes(folder / "rows.jsonl", classes=15, rows=8),
            "n_way": 3,
        },
        "causal_lm": {
            "model_name_or_path": save_llama(folder / "llama"),
            "dataset": write_pairs(folder / "pairs.jsonl"),
        },
    }

    @cache
    def run(task_type: str, groups: int, group_size: int):
        out = folder / f"{task_type}-{groups}x{group_size}"
        more = {"group_size": group_size, "deepspeed": "zero2"} if group_size > 1 else {}
        train(out, groups * group_size, task_type=task_type, **QUICK, **of[task_type], **more).ok()
        lines = metrics_of(out)
        table = json.loads((out / "run.json").read_text())["held_out"]["metrics"]
        return lines[-1]["valid_f1"], lines[-1]["valid_share"], table

    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("groups", "group_size"),
    [pytest.param(1, 2, id="1x2"), pytest.param(2, 1, id="2x1", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("task_type", ["classification", pytest.param("causal_lm", marks=pytest.mark.slow)])
def test_the_numbers_do_not_depend_on_the_layout(scored, task_type, groups, group_size):
    one = scored(task_type, 1, 1)
    assert 0 < one[0] < 1 or task_type == "causal_lm"
    assert scored(task_type, groups, group_size) == one


@pytest.mark.timeout(300)
def test_a_metric_that_raises_ends_all_ranks_with_its_line(tmp_path):
    flags = {**QUICK, "metrics": "tests.support.own_metric:broken", "n_way": 2, "group_size": 1}
    ended = train(tmp_path / "run", 2, **flags)
    assert ended.codes == [2, 2]
    line = next(line for line in ended.output[0].splitlines() if "metrics=" in line)
    check_message(line, "metrics=tests.support.own_metric:broken", "correct the metric, or leave it out")
    assert "Traceback" not in "".join(ended.output)
