"""--profile: shares that add up to one outer step, a trace that says the same, nothing left behind; several
ranks too.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fmmeta import Config, MetaTrainer
from fmmeta.meta.parameters import MetaGradient
from fmmeta.parallel.process_groups import PendingWork
from fmmeta.training.profiler import KINDS, Clock, wrapped
from tests.support.launch import ROOT, train
from tests.support.short_runs import QUICK, QUICK_PAIRS, metrics_of

SHORT = {"outer_steps": 4, "meta_batch_size": 2, "inner_steps": 3, "save_steps": 0, "profile": True}


def profiled(folder: Path, **settings: Any) -> dict[str, Any]:
    """The profile of a run of one process."""
    MetaTrainer(Config(**{**QUICK, **SHORT, **settings}, output_dir=str(folder))).train()
    return json.loads((folder / "run.json").read_text())["profile"]


def clock_of(*times: float) -> Clock:
    """A clock that is looked at when it begins, at the ends of regions and when it stops: at these times."""
    return Clock(iter(times).__next__)


def test_time_of_an_inner_region_is_subtracted_from_the_outer():
    clock = clock_of(0, 1, 3, 7, 8, 8.5)
    with clock.region("backward"), clock.region("group communication"):
        pass
    wanted = {"other": 1.5, "backward": 3, "group communication": 4}
    assert clock.stop() == {**dict.fromkeys(KINDS, 0), **wanted}


def test_waiting_inside_the_cross_group_reduction_is_part_of_it_and_an_error_unwraps():
    class Reducer:
        def reduce(self):
            self.wait()

        def wait(self):
            raise ValueError("gone")

    thing, clock = Reducer(), clock_of(0, 0, 1, 3, 3, 3)
    with (
        pytest.raises(ValueError, match="gone"),
        wrapped(thing, "reduce", clock, "cross-group"),
        wrapped(thing, "wait", clock, "group communication"),
    ):
        thing.reduce()
    assert clock.stop() == {**dict.fromkeys(KINDS, 0), "cross-group": 3}
    assert vars(thing) == {}


def test_profiling_one_step_changes_no_result(tmp_path, capsys):
    places = [(torch.autograd, "backward"), (MetaGradient, "add"), (PendingWork, "wait")]
    before = [vars(owner)[name] for owner, name in places]
    profile = profiled(tmp_path, logging_steps=1)
    assert before == [vars(owner)[name] for owner, name in places]
    seconds, step = profile["seconds"], metrics_of(tmp_path)[2]
    assert (profile["outer_step"], list(seconds)) == (3, list(KINDS))
    assert sum(seconds.values()) < step["seconds"]  # which also holds the writing of the trace
    unused = {"group communication", "cross-group"}
    assert {
        kind
        for kind in ("data", "forward", "backward", "role switch", "outer step", *unused)
        if not seconds[kind]
    } == unused
    events = json.loads((tmp_path / profile["trace"]).read_text())["traceEvents"]
    backward = [one["dur"] for one in events if (one.get("name"), one.get("ph")) == ("backward", "X")]
    # the worker's and, inside it, torch's: 2 tasks of 3 inner steps and a query
    assert len([took for took in backward if took]) == 2 * 2 * (3 + 1)
    assert sum(backward) / 2e6 == pytest.approx(seconds["backward"], rel=0.3)
    shown = capsys.readouterr().out
    assert "where the time of outer step 3 went" in shown
    assert "role switch" in shown


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_loading_is_counted_with_either_schedule_in_a_run_of_one_step(tmp_path, schedule):
    slowly = {"episode_transforms": f"{__name__}:slow", "task_schedule": schedule}
    profile = profiled(tmp_path, outer_steps=1, **slowly)
    assert profile["outer_step"] == 1
    assert profile["seconds"]["data"] > 0.1


def slow(episode, rng):
    time.sleep(0.1)
    return episode


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("settings", "busy", "idle"),
    [
        ({"group_size": 2, "deepspeed": "ds_configs/zero3.json"}, "group communication", None),
        ({"group_size": 2, "pipeline_stages": 2}, "group communication", None),
        ({"group_size": 1}, "cross-group", "group communication"),
    ],
)
def test_the_profile_holds_seconds_by_rank(tmp_path, settings, busy, idle):
    train(tmp_path, 2, task_type="causal_lm", **{**QUICK_PAIRS, **SHORT, **settings}).ok()
    by_rank = json.loads((tmp_path / "run.json").read_text())["profile"]["seconds_by_rank"]
    for rank in range(2):
        assert (tmp_path / f"trace-rank{rank}.json").is_file()
        assert min(by_rank[rank][kind] for kind in (busy, "forward", "backward", "role switch")) > 0
        assert idle is None or by_rank[rank][idle] == 0


def test_the_page_has_a_remedy_for_every_region():
    text = (ROOT / "docs" / "how-to" / "monitor.md").read_text()
    rows = re.findall(r"^\|(.*?)\|", text.partition("which remedy\n")[2].partition("\n## ")[0], re.MULTILINE)
    assert set(KINDS) <= {name.strip() for row in rows for name in row.split(",")}
