"""Useful seconds of real ranks: every task of theta once on each rank of its group, also after kills."""

import json
import signal

import pytest

from harness.elastic import Trial
from harness.fork_server import shared
from tests.support.pass_seconds import START_S
from tests.support.short_runs import QUICK, steps_of, until

SLOWLY = {"episode_transforms": "tests.support.short_runs:slow_episode"}
SETTINGS = {**QUICK, "outer_steps": 8, "save_steps": 3, "test_episodes": 0, **SLOWLY}
STALE = {"max_staleness": 2, "drop_stale": True, "algorithm": "tests.support.slow_group:FOMAML"}
ONE_EACH = "tests.support.pass_seconds:one_each"


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"group_size": 1}, 32),
        ({"group_size": 2, "deepspeed": "ds_configs/zero2.json"}, 64),
        ({"group_size": 1, "task_schedule": "dynamic"}, 32),
        ({"group_size": 1, **STALE}, 32),
    ],
    ids=["groups", "sharded", "claimed", "stale"],
)
def test_each_task_is_useful_once_after_a_kill(flags, tmp_path, settings, seconds):
    """Both ranks are killed between two checkpoints, and the same command is given again."""
    run = tmp_path / "run"
    given = flags(run, **SETTINGS, **settings)
    ranks = shared().train(given, 2, tmp_path, ONE_EACH, EPISODE_S="0.5")
    until(lambda: steps_of(run) >= 4 or any(rank.code is not None for rank in ranks))
    for rank in ranks:
        shared().signal(rank, signal.SIGKILL)
    assert shared().wait(ranks, 60) == [-9, -9], ranks[0].text
    ranks = shared().train(given, 2, tmp_path, ONE_EACH, EPISODE_S="0")
    assert shared().wait(ranks, 100) == [0, 0], ranks[0].text
    goodput = json.loads((run / "run.json").read_text())["goodput"]
    assert goodput["useful_seconds"] == seconds
    assert goodput["percent"] == pytest.approx(min(100, 100 * seconds / goodput["rank_seconds"]))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_each_task_is_useful_once_after_a_group_was_lost(tmp_path, schedule):
    """A group of three is killed, and comes back. Finished tasks that are kept count too, and each start."""
    pytest.importorskip("torchft", reason="elastic groups need torchft")
    settings = {
        **QUICK,
        "groups": 3,
        "heartbeat_timeout": 2.0,
        "output_dir": str(tmp_path / "run"),
        "episode_transforms": ["harness.elastic:slowly"],
        "outer_steps": 40,
        "save_steps": 40,
        "meta_batch_size": 6,
        "num_workers": "0",
        "task_schedule": schedule,
    }
    trial = Trial(settings, 0.5)
    trial.before = "tests.support.pass_seconds:one_each_in_a_session"
    try:
        trial.start()
        trial.wait_for_step(3, 200)
        trial.kill("group1")
        trial.wait_for(2, 200)
        trial.wait_for(3, 200)
        trial.hurry()
        trial.end(200)
    finally:
        trial.close()
    assert trial.code == 0, "\n".join(trial.log[-50:])
    found = json.loads((trial.folder / "run.json").read_text())["goodput"]
    assert found["useful_seconds"] == 240
    assert round(found["rank_seconds"] / START_S) == 4  # three groups, one of which has started twice
