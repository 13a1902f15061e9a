"""Groups that claim tasks: each task runs once in every outer step, on a group that is free, and theta is
that of assigned tasks to rounding.
"""

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.short_runs import metrics_of, model_of, off, steps_of, until

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


@pytest.fixture(scope="module")
def start(fork_server, flags):
    """start(folder, ranks, env, **settings): a run in folder/run; returns its ranks."""

    def begin(folder: Path, ranks: int, env: dict[str, str] | None = None, **settings):
        (folder / "tasks").mkdir(parents=True, exist_ok=True)
        argv = flags(folder / "run", **{**SETTINGS, **settings})
        return fork_server.train(argv, ranks, folder, TASKS=str(folder / "tasks"), **(env or {}))

    return begin


@pytest.fixture(scope="module")
def static_run(fork_server, start, tmp_path_factory):
    """Theta of one process, and its states after the first outer step and the last."""
    folder = tmp_path_factory.mktemp("static")
    ranks = start(folder, 1)
    assert fork_server.wait(ranks, PATIENCE_S) == [0], ranks[0].text
    states = [
        load_file(folder / "run" / f"checkpoint-{step}" / "shard-00000.safetensors") for step in (1, STEPS)
    ]
    return folder / "run", states


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
def test_a_slow_group_runs_fewer_tasks_and_each_task_runs_once(fork_server, start, static_run, tmp_path):
    env = {"SLOW_RANK": "1", "EPISODE_S": "3"}
    ranks = start(tmp_path, 2, env, task_schedule="dynamic")
    assert fork_server.wait(ranks, PATIENCE_S) == [0, 0], ranks[0].text + ranks[1].text
    fast, slow = tasks_of(tmp_path)
    assert sorted([*fast, *slow]) == ALL
    assert len(slow) < len(ALL) / 3
    for step, line in enumerate(metrics_of(tmp_path / "run")):
        assert line["tasks_by_group"] == [sum(one[0] == step for one in done) for done in (fast, slow)]
    assert error_of(tmp_path / "run", static_run) < 1e-5
    promise = json.loads((tmp_path / "run" / "run.json").read_text())["promise"]
    assert promise.startswith("task_schedule=dynamic: theta is the same to rounding")


@pytest.mark.timeout(500)
def test_episodes_are_prepared_ahead_and_no_rank_loads_one_twice(fork_server, start, static_run, tmp_path):
    env = {"SLOW_RANK": "1", "EPISODE_S": "0.3"}
    ranks = start(tmp_path, 2, env, task_schedule="dynamic", num_workers=1)
    assert fork_server.wait(ranks, PATIENCE_S) == [0, 0], ranks[0].text + ranks[1].text
    for loaded in tasks_of(tmp_path):
        assert len(loaded) == len(set(loaded))
    assert [sum(line["tasks_by_group"]) for line in metrics_of(tmp_path / "run")] == [TASKS] * STEPS
    assert error_of(tmp_path / "run", static_run) < 1e-5


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_stop_abandons_the_step_and_the_other_schedule_resumes(fork_server, start, static_run, tmp_path):
    """The group that is not stopped gets no task of this step any more."""
    env = {"SLOW_RANK": "1", "EPISODE_S": "4"}
    ranks = start(tmp_path, 2, env, task_schedule="dynamic")
    until(lambda: steps_of(tmp_path / "run") >= 1, PATIENCE_S)
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert fork_server.wait(ranks, PATIENCE_S) == [75, 75], ranks[0].text + ranks[1].text
    done = steps_of(tmp_path / "run")
    assert 1 <= done < STEPS
    assert f"after outer step {done}, saved in" in ranks[0].text
    begun = [one for loaded in tasks_of(tmp_path) for one in loaded if one[0] == done]
    assert len(begun) == len(set(begun)) <= TASKS
    again = start(tmp_path, 2, task_schedule="static")
    assert fork_server.wait(again, PATIENCE_S) == [0, 0], again[0].text
    assert "do not change theta: task_schedule: dynamic -> static" in again[0].text
    assert error_of(tmp_path / "run", static_run) < 1e-5


@pytest.mark.timeout(900)
def test_bad_tasks_are_those_of_assigned_tasks(fork_server, start, tmp_path):
    settings = {"on_bad_task": "skip", "max_bad_fraction": 1.0}
    found = {}
    for schedule, count in (("static", 1), ("dynamic", 2)):
        folder = tmp_path / schedule
        ranks = start(folder, count, {"FAILS": "3"}, task_schedule=schedule, **settings)
        assert fork_server.wait(ranks, PATIENCE_S) == [0] * count, ranks[0].text
        found[schedule] = [(line["bad_tasks"], line["skipped_tasks"]) for line in metrics_of(folder / "run")]
    assert found["static"] == found["dynamic"]
    assert [len(bad) for bad, _ in found["dynamic"]] == [1] * STEPS
    states = [
        load_file(tmp_path / "static/run" / f"checkpoint-{step}" / "shard-00000.safetensors")
        for step in (1, STEPS)
    ]
    assert error_of(tmp_path / "dynamic/run", (tmp_path / "static/run", states)) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_groups_of_two_ranks_claim_together(fork_server, start, static_run, tmp_path):
    ranks = start(
        tmp_path / "dynamic",
        4,
        {"SLOW_RANK": "3", "EPISODE_S": "1"},
        task_schedule="dynamic",
        group_size=2,
    )
    assert fork_server.wait(ranks, PATIENCE_S) == [0] * 4, ranks[0].text
    first, second, third, fourth = tasks_of(tmp_path / "dynamic")
    assert (first, third) == (second, fourth)
    assert sorted([*first, *third]) == ALL
    assert error_of(tmp_path / "dynamic/run", static_run) < 1e-5
