"""An outer schedule outside the package, by `--task_schedule module:class`."""

import json

from safetensors.torch import load_file

import fmmeta
from fmmeta.config.settings import Config
from fmmeta.training.schedules import DynamicSchedule, StaticSchedule
from tests.support.messages import check_message, refusal

HERE = "tests.unit.test_own_schedule"
NO_CLASS = 3


class Same(StaticSchedule):
    """The schedule `static`."""


class FirstOnly(StaticSchedule):
    """An outer step closes after the first task of each group."""

    def passes(self, number, size):
        yield next(super().passes(number, size))


class FirstClaimed(DynamicSchedule):
    """As `FirstOnly`, of the tasks that a group claims."""

    def passes(self, number, size):
        yield next(super().passes(number, size))


SETTINGS = {
    "outer_steps": 2,
    "inner_steps": 1,
    "meta_batch_size": 3,
    "eval_episodes": 0,
    "num_workers": "0",
    "logging_steps": 1,
}


def run(folder, schedule, **changes):
    config = Config(**{**SETTINGS, **changes}, task_schedule=schedule, output_dir=str(folder))
    fmmeta.MetaTrainer(config).train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return load_file(folder / "model" / "model.safetensors"), sum(line.get("tokens", 0) for line in lines)


def test_a_schedule_is_found_by_name_and_says_when_a_step_closes(tmp_path):
    static, tokens = run(tmp_path / "static", "static")
    same, _ = run(tmp_path / "same", f"{HERE}:Same")
    assert all((static[name] == one).all() for name, one in same.items())
    first, fewer = run(tmp_path / "first", f"{HERE}:FirstOnly")
    assert fewer < 0.5 * tokens
    assert any((static[name] != one).any() for name, one in first.items())


def test_a_schedule_that_claims_tasks_may_close_early_too(tmp_path):
    run(tmp_path / "first", f"{HERE}:FirstClaimed")
    lines = [json.loads(line) for line in (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()]
    assert [line["tasks_by_group"] for line in lines] == [[1], [1]]


def test_a_run_does_not_resume_with_another_schedule_of_the_user(tmp_path):
    run(tmp_path / "run", f"{HERE}:Same", outer_steps=1, save_steps=1)
    config = Config(
        **{**SETTINGS, "outer_steps": 1, "save_steps": 1},
        task_schedule=f"{HERE}:FirstOnly",
        output_dir=str(tmp_path / "run"),
    )
    check_message(refusal(fmmeta.MetaTrainer(config).train), "task_schedule", "FirstOnly")


def test_names_that_are_no_schedule_are_refused(tmp_path):
    check_message(refusal(Config, task_schedule="sorted"), "task_schedule=sorted", "module:class of yours")
    own = f"{HERE}:Same"
    check_message(
        refusal(Config, task_schedule=own, max_staleness=1), f"task_schedule={own}", "max_staleness=1"
    )
    config = Config(task_schedule=f"{HERE}:NO_CLASS", output_dir=str(tmp_path / "run"), num_workers="0")
    check_message(refusal(fmmeta.MetaTrainer(config).train), f"{HERE}:NO_CLASS", "subclass")
