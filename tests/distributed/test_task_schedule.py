"""Groups that claim tasks: each task runs once in every outer step, on a group that is free, and theta is
that of assigned tasks to rounding.
"""

import json
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.short_runs import Job, metrics_of, model_of, off, steps_of

STEPS, TASKS = 4, 7
SETTINGS = {
    "outer_steps": STEPS,
    "meta_batch_size": TASKS,
    "save_steps": 1,
    "save_total_limit": STEPS,
    "episode_transforms": "tests.support.short_runs:slow_rank",
    "group_size": 1,
}
PATIENCE_S = 400
SKIPPED = {"on_bad_task": "skip", "max_bad_fraction": 1.0}


@pytest.fixture(scope="module")
def start(flags):
    """start(folder, ranks, env, **settings): a run in folder/run."""

    def begin(folder: Path, ranks: int = 2, env: dict[str, str] | None = None, **settings) -> Job:
        (folder / "tasks").mkdir(parents=True, exist_ok=True)
        argv = flags(folder / "run", **{**SETTINGS, "task_schedule": "dynamic", **settings})
        return Job.start(argv, ranks, folder, TASKS=str(folder / "tasks"), **(env or {}))

    return begin


def with_states(run: Path) -> tuple[Path, list[dict]]:
    """A run of one process, and its states after the first outer step and the last."""
    files = [run / f"checkpoint-{step}" / "shard-00000.safetensors" for step in (1, STEPS)]
    return run, [load_file(file) for file in files]


@pytest.fixture(scope="module")
def static_run(start, tmp_path_factory):
    job = start(tmp_path_factory.mktemp("static"), 1, task_schedule="static")
    job.end()
    return with_states(job.run)


def error_of(run: Path, static_run) -> float:
    whole, (begin, wanted) = static_run
    return off(model_of(run), whole, begin, wanted)


def tasks_of(folder: Path) -> list[list[tuple[int, int]]]:
    """(outer step, slot) of the episodes that each rank has loaded, without the trial of the transforms."""
    return [
        [(int(step), int(slot)) for step, slot in map(str.split, file.read_text().splitlines()[1:])]
        for file in sorted((folder / "tasks").iterdir())
    ]


ALL = sorted((step, slot) for step in range(STEPS) for slot in range(TASKS))


@pytest.mark.timeout(500)
def test_a_slow_group_runs_fewer_tasks_and_each_task_runs_once(start, static_run, tmp_path):
    job = start(tmp_path, env={"SLOW_RANK": "1", "EPISODE_S": "1.5"})
    job.end(timeout_s=PATIENCE_S)
    fast, slow = tasks_of(tmp_path)
    assert sorted([*fast, *slow]) == ALL
    assert len(slow) < len(ALL) / 3
    for step, line in enumerate(metrics_of(job.run)):
        assert line["tasks_by_group"] == [sum(one[0] == step for one in done) for done in (fast, slow)]
    assert error_of(job.run, static_run) < 1e-5
    promise = json.loads((job.run / "run.json").read_text())["promise"]
    assert promise.startswith("task_schedule=dynamic: theta is the same to rounding")


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_episodes_are_prepared_ahead_and_no_rank_loads_one_twice(start, static_run, tmp_path):
    job = start(tmp_path, env={"SLOW_RANK": "1", "EPISODE_S": "0.3"}, num_workers=1)
    job.end(timeout_s=PATIENCE_S)
    for loaded in tasks_of(tmp_path):
        assert len(loaded) == len(set(loaded))
    assert [sum(line["tasks_by_group"]) for line in metrics_of(job.run)] == [TASKS] * STEPS
    assert error_of(job.run, static_run) < 1e-5


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_stop_abandons_the_step_and_the_other_schedule_resumes(start, static_run, tmp_path):
    """The group that is not stopped gets no task of this step any more."""
    job = start(tmp_path, env={"SLOW_RANK": "1", "EPISODE_S": "4"}).reach(1, PATIENCE_S)
    job.signal(signal.SIGTERM, 1)
    text, done = job.end(75, PATIENCE_S), steps_of(job.run)
    assert 1 <= done < STEPS
    assert f"after outer step {done}, saved in" in text
    begun = [one for loaded in tasks_of(tmp_path) for one in loaded if one[0] == done]
    assert len(begun) == len(set(begun)) <= TASKS
    again = start(tmp_path, task_schedule="static").end(timeout_s=PATIENCE_S)
    assert "do not change theta: task_schedule: dynamic -> static" in again
    assert error_of(job.run, static_run) < 1e-5


@pytest.mark.timeout(900)
def test_bad_tasks_are_those_of_assigned_tasks(start, tmp_path):
    jobs = [
        start(tmp_path / schedule, ranks, {"FAILS": "3"}, task_schedule=schedule, **SKIPPED)
        for schedule, ranks in (("static", 1), ("dynamic", 2))
    ]
    found = []
    for job in jobs:
        job.end(timeout_s=PATIENCE_S)
        found.append([(line["bad_tasks"], line["skipped_tasks"]) for line in metrics_of(job.run)])
    assert found[0] == found[1]
    assert [len(bad) for bad, _ in found[0]] == [1] * STEPS
    assert error_of(jobs[1].run, with_states(jobs[0].run)) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_groups_of_two_ranks_claim_together(start, static_run, tmp_path):
    job = start(tmp_path, 4, {"SLOW_RANK": "3", "EPISODE_S": "1"}, group_size=2)
    job.end(timeout_s=PATIENCE_S)
    first, second, third, fourth = tasks_of(tmp_path)
    assert (first, third) == (second, fourth)
    assert sorted([*first, *third]) == ALL
    assert error_of(job.run, static_run) < 1e-5
