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
    """Eight classes, none of them for validation: two folds."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "splits.json").write_text(json.dumps({"train": [f"c{number}" for number in range(8)]}))
    data = {"dataset": write_classes(folder / "rows.jsonl", classes=8)}
    return {**SHORT, **data, "class_splits": folder / "splits.json", "tune": json.dumps(SECTION)}


@pytest.mark.parametrize("valid", [False, True], ids=["folds", "validation classes"])
def test_any_layout_makes_the_same_choice(fork_server, flags, settings, tmp_path, valid):
    """One process, two groups of one rank, and one group of two ranks that shards with ZeRO-3."""
    if valid:
        splits = {"train": ["c0", "c1", "c2", "c3"], "valid": ["c4", "c5", "c6", "c7"]}
        (tmp_path / "splits.json").write_text(json.dumps(splits))
        settings = {**settings, "class_splits": tmp_path / "splits.json"}
    zero3 = {"group_size": 2, "deepspeed": ROOT / "ds_configs" / "zero3.json"}
    layouts = {"one": (1, {}), "two": (2, {"group_size": 1}), "zero3": (2, zero3)}
    chosen, scores = [], []
    for name, (count, more) in layouts.items():
        ranks = fork_server.train(
            flags(tmp_path / name, **settings, **more), count, tmp_path / f"logs-{name}"
        )
        assert fork_server.wait(ranks, 100) == [0] * count, ranks[0].text
        run = json.loads((tmp_path / name / "run.json").read_text())
        chosen.append((run["init_interpolation"], run["outer_steps"]))
        scores.append([one for one in ranks[0].text.splitlines() if "; accuracy on " in one])
    assert chosen == chosen[:1] * 3
    assert len(scores[0]) == (1 if valid else 3)
    assert scores == scores[:1] * 3


def test_a_signal_to_one_rank_ends_all(fork_server, flags, settings, tmp_path):
    folder = tmp_path / "run"
    slow = "tests.support.short_runs:slow_episode"
    command = flags(folder, **{**settings, "outer_epochs": 8, "episode_transforms": slow})
    ranks = fork_server.train(command, 2, tmp_path, EPISODE_S="0.1")
    until(lambda: "fold 1 of 2" in ranks[0].text)
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert fork_server.wait(ranks, 60) == [75, 75], ranks[0].text
    assert "nothing is stored, and the same command begins again" in ranks[0].text
    assert "Traceback" not in ranks[0].text + ranks[1].text
    assert not (folder / "run.json").exists()
    assert fork_server.wait(fork_server.train(command, 2, tmp_path, EPISODE_S="0"), 100) == [0, 0]
