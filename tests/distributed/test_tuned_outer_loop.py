"""A `tune` section chooses the same interpolation on any layout; a signal to one rank ends all of them."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.support.launch import ROOT
from tests.support.models import write_classes
from tests.support.short_runs import until

SECTION = {"init_interpolations": [0, 0.4, 1], "episodes": 20, "folds": 2}
SHORT = {
    "algorithm": "protonet",
    "inner_steps": 0,
    "feature_norm": 3,
    "outer_steps": 20,
    "outer_epochs": 1,
    "meta_batch_size": 2,
    "save_steps": 0,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    data = write_classes(tmp_path_factory.mktemp("tuned") / "rows.jsonl", classes=8)
    return {**SHORT, "dataset": data, "tune": json.dumps(SECTION)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "held_out",
    [[], pytest.param(["c4", "c5", "c6", "c7"], marks=pytest.mark.slow)],
    ids=["folds", "validation classes"],
)
def test_any_layout_makes_the_same_choice(fork_server, flags, settings, tmp_path, held_out):
    """One process, two groups of one rank, and one group of two ranks that shards with ZeRO-3."""
    trained = [name for name in (f"c{number}" for number in range(8)) if name not in held_out]
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": trained, "valid": held_out}))
    zero3 = {"group_size": 2, "deepspeed": ROOT / "ds_configs" / "zero3.json"}
    found = []
    for name, count, more in (("one", 1, {}), ("two", 2, {"group_size": 1}), ("zero3", 2, zero3)):
        words = flags(tmp_path / name, **settings, class_splits=splits, **more)
        ranks = fork_server.train(words, count, tmp_path / f"logs-{name}")
        assert fork_server.wait(ranks, 100) == [0] * count, ranks[0].text
        run = json.loads((tmp_path / name / "run.json").read_text())
        scores = [line for line in ranks[0].text.splitlines() if "; accuracy on " in line]
        found.append((run["init_interpolation"], run["outer_steps"], scores))
        assert len(scores) == (1 if held_out else 3)
    assert found == found[:1] * 3


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all(fork_server, flags, settings, tmp_path):
    splits, run = tmp_path / "splits.json", tmp_path / "run"
    splits.write_text(json.dumps({"train": [f"c{number}" for number in range(8)]}))
    slow = {"outer_epochs": 8, "episode_transforms": "tests.support.short_runs:slow_episode"}
    command = flags(run, **{**settings, **slow}, class_splits=splits)
    ranks = fork_server.train(command, 2, tmp_path, EPISODE_S="0.1")
    until(lambda: "fold 1 of 2" in ranks[0].text)
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert fork_server.wait(ranks, 60) == [75, 75], ranks[0].text
    assert "nothing is stored, and the same command begins again" in ranks[0].text
    assert "Traceback" not in ranks[0].text + ranks[1].text
    assert not (run / "run.json").exists()
    assert fork_server.wait(fork_server.train(command, 2, tmp_path, EPISODE_S="0"), 100) == [0, 0]
