"""--profile: shares that add up to one outer step, a trace that says the same, nothing left behind; several
ranks too.
"""

import json
import time

import pytest
import torch

from fmmeta import Config, MetaTrainer
from fmmeta.meta.parameters import MetaGradient
from fmmeta.parallel.process_groups import PendingWork
from fmmeta.training.profiler import KINDS, Clock, wrapped
from tests.support.launch import ROOT, run_ranks
from tests.support.short_runs import metrics_of

SHORT = {
    "outer_steps": 4,
    "meta_batch_size": 2,
    "inner_steps": 3,
    "eval_episodes": 0,
    "save_steps": 0,
    "num_workers": "0",
}


class ManualClock:
    """A clock that a test advances."""

    time = 0.0

    def __call__(self) -> float:
        return self.time


def test_time_of_an_inner_region_is_subtracted_from_the_outer():
    hands = ManualClock()
    clock = Clock(hands)
    hands.time = 1
    with clock.region("backward"):
        hands.time = 3
        with clock.region("group communication"):
            hands.time = 7
        hands.time = 8
    hands.time = 8.5
    seconds = clock.stop()
    assert seconds == {**dict.fromkeys(KINDS, 0), "other": 1.5, "backward": 3, "group communication": 4}


def test_waiting_inside_the_cross_group_reduction_is_part_of_it_and_an_error_unwraps():
    hands = ManualClock()

    class Reducer:
        def reduce(self):
            hands.time += 1
            self.wait()

        def wait(self):
            hands.time += 2
            raise ValueError("gone")

    thing, clock = Reducer(), Clock(hands)
    with (
        pytest.raises(ValueError, match="gone"),
        wrapped(thing, "reduce", clock, "cross-group"),
        wrapped(thing, "wait", clock, "group communication"),
    ):
        thing.reduce()
    assert clock.stop() == {**dict.fromkeys(KINDS, 0), "cross-group": 3}
    assert vars(thing) == {}


def test_a_compiled_method_works_after_unwrapping():
    """torch's Work is compiled: put back carelessly, its `wait` would no longer know whose it is."""
    before = vars(PendingWork)["wait"]
    with wrapped(PendingWork, "wait", Clock(ManualClock()), "group communication"):
        assert vars(PendingWork)["wait"] is not before
    assert vars(PendingWork)["wait"] is before


def test_profiling_one_step_changes_no_result(tmp_path, capsys):
    def stored():
        places = [(torch.autograd, "backward"), (MetaGradient, "add"), (PendingWork, "wait")]
        return [vars(owner)[name] for owner, name in places]

    before = stored()
    MetaTrainer(Config(**SHORT, logging_steps=1, profile=True, output_dir=str(tmp_path))).train()
    assert before == stored()
    profile = json.loads((tmp_path / "run.json").read_text())["profile"]
    lines = metrics_of(tmp_path)
    assert profile["outer_step"] == 3
    assert list(profile["seconds"]) == list(KINDS)
    assert sum(profile["seconds"].values()) < lines[2]["seconds"]  # which also holds the writing of the trace
    assert (
        min(profile["seconds"][kind] for kind in ("data", "forward", "backward", "role switch", "outer step"))
        > 0
    )
    assert profile["seconds"]["group communication"] == profile["seconds"]["cross-group"] == 0
    events = json.loads((tmp_path / profile["trace"]).read_text())["traceEvents"]
    traced = {
        kind: [event for event in events if event.get("name") == kind and event.get("ph") == "X"]
        for kind in KINDS
    }
    backward = [event for event in traced["backward"] if event["dur"]]
    assert len(backward) == 2 * 2 * (
        3 + 1
    )  # the worker's and, inside it, torch's: 2 tasks of 3 inner steps and a query
    assert sum(event["dur"] for event in backward) / 2e6 == pytest.approx(
        profile["seconds"]["backward"], rel=0.3
    )
    shown = capsys.readouterr().out
    assert "where the time of outer step 3 went" in shown
    assert "role switch" in shown


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_loading_is_counted_with_either_schedule_in_a_run_of_one_step(tmp_path, schedule):
    settings = {**SHORT, "outer_steps": 1, "task_schedule": schedule, "profile": True}
    settings["episode_transforms"] = f"{__name__}:slow"
    MetaTrainer(Config(**settings, output_dir=str(tmp_path))).train()
    profile = json.loads((tmp_path / "run.json").read_text())["profile"]
    assert profile["outer_step"] == 1
    assert profile["seconds"]["data"] > 0.1


def slow(episode, rng):
    time.sleep(0.1)
    return episode


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("group_size", "extra", "busy", "idle"),
    [
        ("2", ["--deepspeed", "ds_configs/zero3.json"], "group communication", None),
        ("2", ["--pipeline_stages", "2"], "group communication", None),
        ("1", [], "cross-group", "group communication"),
    ],
)
def test_the_profile_holds_seconds_by_rank(tmp_path, group_size, extra, busy, idle):
    flags = [f"--{name}={value}" for name, value in SHORT.items()]
    folder = tmp_path / "run"
    run_ranks(
        [
            "-m",
            "fmmeta",
            "train",
            *flags,
            *extra,
            f"--group_size={group_size}",
            "--profile=True",
            "--task_type=causal_lm",
            f"--output_dir={folder}",
        ],
        2,
        timeout_s=150,
    ).ok()
    profile = json.loads((folder / "run.json").read_text())["profile"]
    assert len(profile["seconds_by_rank"]) == 2
    assert (folder / "trace-rank0.json").is_file()
    assert (folder / "trace-rank1.json").is_file()
    for seconds in profile["seconds_by_rank"]:
        assert seconds[busy] > 0
        assert min(seconds["forward"], seconds["backward"], seconds["role switch"]) > 0
        assert idle is None or seconds[idle] == 0


def test_the_page_has_a_remedy_for_every_region():
    text = (ROOT / "docs" / "how-to" / "monitor.md").read_text()
    page = text.partition("which remedy\n")[2].partition("\n## ")[0]
    regions = {
        name.strip() for row in page.splitlines() if "|" in row for name in row.split("|")[1].split(",")
    }
    assert set(KINDS) <= regions
