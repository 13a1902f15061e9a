"""Bounded staleness: theta is that of an oracle that takes each gradient at the theta with which its task
began; a resumed run counts every task once; metrics, signals and dropped gradients.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.matrix import Case, ParityFixture, fast_and_slow_cases, tolerance
from tests.support.models import write_tasks
from tests.support.short_runs import metrics_of, steps_of, until

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
def start(fork_server, flags):
    """start(folder, **settings): a run of two groups in folder/run; returns its ranks."""

    def begin(folder: Path, **settings):
        return fork_server.train(flags(folder / "run", **{**SETTINGS, **settings}), 2, folder)

    return begin


def test_a_stopped_run_begins_the_tasks_again_that_are_not_in_theta(fork_server, start, tmp_path):
    for attempt in range(3):  # a stop may come when each group has just finished a task
        folder = tmp_path / str(attempt)
        ranks = start(folder)
        until(lambda run=folder / "run": steps_of(run) >= 3)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGTERM)
        assert fork_server.wait(ranks, 60) == [75, 75], ranks[0].text + ranks[1].text
        newest = max(int(path.name[11:]) for path in (folder / "run").glob("checkpoint-*"))
        state = json.loads((folder / "run" / f"checkpoint-{newest}" / "state.json").read_text())
        queue = state["queue"]
        assert queue["claimed"] == 3 * newest + len(queue["again"])
        if queue["again"]:
            break
    assert queue["again"]
    ranks = start(folder)
    assert fork_server.wait(ranks, 100) == [0, 0], ranks[0].text
    assert "theta depends on how long tasks take" in ranks[0].text
    assert [line["step"] for line in metrics_of(folder / "run")] == list(range(1, 9))
    assert sum(line["skipped_tasks"] for line in metrics_of(folder / "run")) == 0


def test_a_bad_task_is_named_in_the_step_in_which_it_counts(fork_server, start, tmp_path):
    root = write_tasks(tmp_path / "tasks")
    for file in sorted(root.glob("s*/*.jsonl"))[::2]:
        file.write_bytes(b"\0")
    ranks = start(
        tmp_path,
        dataset=root,
        n_way=2,
        k_shot=1,
        num_query=1,
        on_bad_task="skip",
        max_bad_fraction=1,
        max_staleness=1,
        meta_batch_size=2,
        outer_steps=30,
        inner_steps=1,
        save_steps=0,
        algorithm="fomaml",
    )
    assert fork_server.wait(ranks, 100) == [0, 0], ranks[0].text + ranks[1].text
    counts = [
        (len(line.get("bad_tasks", ())), line["skipped_tasks"]) for line in metrics_of(tmp_path / "run")
    ]
    assert [bad for bad, _ in counts] == [skipped for _, skipped in counts]
    assert sum(bad for bad, _ in counts) > 10


def test_old_gradients_are_dropped_by_stratum(fork_server, start, tmp_path):
    ranks = start(
        tmp_path,
        max_staleness=1,
        drop_stale=True,
        meta_batch_size=1,
        outer_steps=20,
        save_steps=10,
        inner_steps=5,
        algorithm="tests.support.slow_group:TEN_TIMES_SLOWER",
    )
    assert fork_server.wait(ranks, 100) == [0, 0], ranks[0].text + ranks[1].text
    lines = metrics_of(tmp_path / "run")
    assert len(lines) == 20
    assert max(line["staleness_max"] for line in lines) <= 1
    assert sum(line["dropped_tasks"] for line in lines) > 0
    shares = lines[-1]["dropped_share_by_stratum"]
    assert shares
    assert all(0 < share <= 1 for share in shares.values())
