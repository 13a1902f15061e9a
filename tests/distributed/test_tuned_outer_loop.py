"""A `tune` section chooses the same outer loop on any layout, and a signal to one rank ends all of them."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.support.launch import ROOT
from tests.support.models import write_classes
from tests.support.short_runs import until

SECTION = {"outer_lrs": [0.002, 0.02], "init_interpolations": [0.4, 1.0], "episodes": 4, "folds": 2}
SHORT = {"outer_steps": 4, "meta_batch_size": 2, "lr_scheduler_type": "constant", "save_steps": 0}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Eight classes, none of them for validation: two folds."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "splits.json").write_text(json.dumps({"train": [f"c{number}" for number in range(8)]}))
    data = {
        "dataset": write_classes(folder / "rows.jsonl", classes=8),
        "class_splits": folder / "splits.json",
    }
    return {**SHORT, **data, "tune": json.dumps(SECTION)}


def choice_in(folder):
    (file,) = folder.glob("tuned-*.json")
    return json.loads(file.read_text())


def chosen_in(folder):
    settings = json.loads((folder / "run.json").read_text())["settings"]
    return settings["outer_lr"], settings["outer_steps"], settings["init_interpolation"]


def test_any_layout_makes_the_same_choice(fork_server, flags, settings, tmp_path):
    """One process, two groups of one rank, and one group of two ranks that shards with ZeRO-3."""
    zero3 = {"group_size": 2, "deepspeed": ROOT / "ds_configs" / "zero3.json"}
    layouts = {"one": (1, {}), "two": (2, {"group_size": 1}), "zero3": (2, zero3)}
    choices = []
    for name, (count, more) in layouts.items():
        ranks = fork_server.train(
            flags(tmp_path / name, **settings, **more), count, tmp_path / f"logs-{name}"
        )
        assert fork_server.wait(ranks, 100) == [0] * count, ranks[0].text
        choices.append(choice_in(tmp_path / name))
    chosen = [chosen_in(tmp_path / name) for name in layouts]
    assert chosen == chosen[:1] * 3
    for choice in choices[1:]:
        for mine, theirs in zip(choice["trials"], choices[0]["trials"], strict=True):
            assert (mine["fold"], mine["outer_lr"]) == (theirs["fold"], theirs["outer_lr"])
            for score, other in zip(mine["scores"], theirs["scores"], strict=True):
                assert score[:2] == other[:2]
                assert score[2] == pytest.approx(other[2])
                assert score[3] == pytest.approx(other[3], rel=1e-4)


def test_a_signal_to_one_rank_ends_all_with_finished_trials_stored(fork_server, flags, settings, tmp_path):
    folder = tmp_path / "run"
    slow = "tests.support.short_runs:slow_episode"
    command = flags(folder, **{**settings, "outer_steps": 20, "episode_transforms": slow})
    ranks = fork_server.train(command, 2, tmp_path, EPISODE_S="0.05")
    until(lambda: [*folder.glob("tuned-*.json")])
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert fork_server.wait(ranks, 60) == [75, 75], ranks[0].text
    assert "of 4 trials; the same command continues" in ranks[0].text
    assert "Traceback" not in ranks[0].text + ranks[1].text
    stored = choice_in(folder)
    assert not (folder / "run.json").exists()
    assert fork_server.wait(fork_server.train(command, 2, tmp_path, EPISODE_S="0"), 100) == [0, 0]
    again = choice_in(folder)
    assert again["trials"][: len(stored["trials"])] == stored["trials"]
    assert len(again["trials"]) == again["of"] == 4
