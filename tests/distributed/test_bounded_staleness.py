"""Bounded staleness: theta is that of an oracle that takes each gradient at the theta with which its task
began; a resumed run counts every task once; metrics, signals and dropped gradients.
"""

import json
import signal
from pathlib import Path

import pytest

from tests.support.matrix import Case, ParityFixture, fast_and_slow_cases, tolerance
from tests.support.models import write_tasks
from tests.support.short_runs import Job, metrics_of

ROWS = [  # layout, stage, algorithm, model, dtype, outer, head, pipeline stages
    ((1, 1), "plain", "slow-fomaml", "bert", "fp32", "adamw", "learned", 1),
    ((1, 2), 2, "slow-reptile", "llama", "fp32", "adamw", "zero", 1),
    ((2, 1), "plain", "slow-fomaml", "llama", "fp32", "sgd", "zero", 1),
    ((2, 1), "plain", "slow-rates", "bert", "fp32", "adamw", "learned", 1),
    ((2, 1), 1, "slow-reptile", "bert", "fp32", "adamw", "zero", 1),
    ((2, 2), 2, "slow-fomaml", "bert", "fp32", "sgd", "learned", 1),
    ((2, 2), 3, "slow-reptile", "llama", "fp32", "adamw", "zero", 1),
    ((2, 2), 3, "slow-fomaml", "bert", "bf16", "adamw", "learned", 1),
    ((2, 2), 0, "slow-fomaml", "llama3", "fp32", "adamw", "zero", 2),
]
CASES = [
    Case.of_row(layout, stage, algorithm, model, dtype, outer, head, "stale", stages)
    for layout, stage, algorithm, model, dtype, outer, head, stages in ROWS
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ParityFixture(tmp_path_factory.mktemp("stale"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case", fast_and_slow_cases([case for case in CASES if case.layout == (2, 1)], CASES, CASES.index)
)
def test_ends_where_the_oracle_with_old_gradients_ends(case, bench):
    theta, facts = bench.outcome(case, CASES)
    ages = [step - version for step, tasks in enumerate(facts["counted"]) for _, version in tasks]
    positions = [position for tasks in facts["counted"] for position, _ in tasks]
    assert sorted(positions) == list(range(9))  # each task of three outer steps, once
    assert (max(ages) > 0) == (case.layout[0] > 1)
    assert max(ages) <= 2
    assert bench.error(case, theta, facts["counted"]) < tolerance(case)
    if max(ages) and case.dtype == "fp32":
        assert bench.error(case, theta) > 10 * tolerance(case)  # not that of a synchronous run
    lines = bench.lines(case)
    assert sum(line["staleness_mean"] * 3 for line in lines) == pytest.approx(sum(ages))
    assert max(line["staleness_max"] for line in lines) == max(ages)


SETTINGS = {
    "outer_steps": 8,
    "meta_batch_size": 3,
    "group_size": 1,
    "save_steps": 2,
    "save_total_limit": 8,
    "algorithm": "tests.support.slow_group:FOMAML",
    "max_staleness": 2,
}


@pytest.fixture(scope="module")
def start(flags):
    """start(folder, **settings): a run of two groups in folder/run."""

    def begin(folder: Path, **settings) -> Job:
        return Job.start(flags(folder / "run", **{**SETTINGS, **settings}), 2, folder)

    return begin


@pytest.mark.slow
def test_a_stopped_run_begins_the_tasks_again_that_are_not_in_theta(start, tmp_path):
    for attempt in range(3):  # a stop may come when each group has just finished a task
        folder = tmp_path / str(attempt)
        job = start(folder).reach(3)
        job.signal(signal.SIGTERM, 0, 1)
        job.end(75)
        newest = max(int(path.name[11:]) for path in job.run.glob("checkpoint-*"))
        queue = json.loads((job.run / f"checkpoint-{newest}" / "state.json").read_text())["queue"]
        assert queue["claimed"] == 3 * newest + len(queue["again"])
        if queue["again"]:
            break
    assert queue["again"]
    assert "theta depends on how long tasks take" in start(folder).end()
    lines = metrics_of(job.run)
    assert [(line["step"], line["skipped_tasks"]) for line in lines] == [(step, 0) for step in range(1, 9)]


def test_a_bad_task_is_named_in_the_step_in_which_it_counts(start, tmp_path):
    root = write_tasks(tmp_path / "tasks")
    for file in sorted(root.glob("s*/*.jsonl"))[::2]:
        file.write_bytes(b"\0")
    short = {"n_way": 2, "k_shot": 1, "num_query": 1, "meta_batch_size": 2, "inner_steps": 1, "save_steps": 0}
    skips = {"on_bad_task": "skip", "max_bad_fraction": 1, "max_staleness": 1, "algorithm": "fomaml"}
    job = start(tmp_path, dataset=root, outer_steps=20, **short, **skips)
    job.end()
    lines = metrics_of(job.run)
    bad = [len(line.get("bad_tasks", ())) for line in lines]
    assert bad == [line["skipped_tasks"] for line in lines]
    assert sum(bad) > 5


@pytest.mark.slow
def test_old_gradients_are_dropped_by_stratum(start, tmp_path):
    drops = {"max_staleness": 1, "drop_stale": True, "algorithm": "tests.support.slow_group:TEN_TIMES_SLOWER"}
    job = start(tmp_path, **drops, meta_batch_size=1, outer_steps=20, save_steps=10, inner_steps=5)
    job.end()
    lines = metrics_of(job.run)
    assert len(lines) == 20
    assert max(line["staleness_max"] for line in lines) <= 1
    assert sum(line["dropped_tasks"] for line in lines) > 0
    shares = lines[-1]["dropped_share_by_stratum"]
    assert shares
    assert all(0 < share <= 1 for share in shares.values())
