"""What a lost group costs: groups of an elastic run are killed at random, and started again, while it goes
on.

    python -m benchmarks.elastic --kills 10 --json benchmarks/results/elastic.json
    # each under a separate key
    python -m benchmarks.elastic --kills 50 --learned --json benchmarks/results/elastic.json
    python -m benchmarks.elastic --kills 50 --tasks 6 --task_seconds 1 --task_schedule dynamic \
        --json benchmarks/results/elastic.json
    # no kill, four busy loops beside the groups: no group may be lost
    python -m benchmarks.elastic --kills 0 --minutes 30 --busy 4 --outer_steps 2000

Every kill is a SIGKILL for all processes of a group, at a random moment of a random one of those that take
part; one is always left. The run has to finish; every outer step has to have used the whole meta-batch; theta
has to be where a run of one process without groups, lighthouse and kills ends (parity: |theta - its| / |its -
theta_0|); no group may be lost for good, and the exit code must be that of the run's record. `--learned`:
rates per layer are learned, a checkpoint is written after every outer step, and only the newest is kept, so
that the checkpoint that a group has chosen is often gone when it is read.

Reported with median and 95th percentile, beside the seconds of an undisturbed step of the same run:

    lost_seconds_of_a_kill     between the first attempt at a step that was hit and the one that succeeded;
                               this contains tasks that are finished and, if they are claimed, kept
    longer_seconds_of_a_kill   what a step that was hit took longer than an undisturbed one, to its end; this
                               contains the tasks that fewer groups run for the lost one
    idle_seconds_of_a_kill     of a step that was hit, if tasks are claimed, without those of the group that
                               ran most of them, at the pace of an undisturbed step
    seconds_to_a_quorum        between a kill and the next quorum; this contains the rest of the tasks that
                               the other groups were running

and what the run took longer than without kills, divided by their number. `--minutes`: for this long no group
is killed at first, and each attempt that is repeated meanwhile is a false alarm. `--busy`: busy loops beside
the groups. `--task_seconds` stands for the computation of a larger model: every task also sleeps. When all
kills are done, it sleeps no more. Groups are real processes, forked from one that has imported everything
(harness/fork_server.py): Python starts in a fraction of a second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import machine, spread, write_json
from fmmeta import MetaTrainer
from harness.elastic import Trial, alone, lines_of, parity

PARITY = 1e-5  # fp32, AdamW
LEARNED: dict[str, Any] = {"inner_lr_learned": "layer", "save_steps": 1, "save_total_limit": 1}


def at_random(trial: Trial, kills: int, mean_s: float, rng: random.Random) -> None:
    """Kill any group that takes part at any time, but not the last one."""
    while len(trial.kills) < kills:
        trial.wait_for(2, 600)
        time.sleep(rng.expovariate(1 / mean_s))
        if len(trial.taking_part) > 1:
            trial.kill(rng.choice(sorted(trial.taking_part)))


def is_finished(folder: Path) -> bool:
    """Whether run.json says so, and the model is there."""
    return (
        json.loads((folder / "run.json").read_text())["finished"]
        and (folder / "model/model.safetensors").is_file()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--every", type=float, default=10.0, help="mean seconds between kills")
    parser.add_argument("--outer_steps", type=int, default=200)
    parser.add_argument("--task_seconds", type=float, default=0.5)
    parser.add_argument("--heartbeat_timeout", type=float, default=5.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="so long no group is killed first")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the groups")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3000)
    parser.add_argument(
        "--learned", action="store_true", help="learned rates, save_steps 1, save_total_limit 1"
    )
    parser.add_argument("--tasks", type=int, default=3, help="of a meta-batch")
    parser.add_argument("--task_schedule", default="static", help="dynamic: groups claim tasks")
    parser.add_argument("--json", default=None)
    parser.add_argument("--folder", default=None, help="keep the runs there")
    parser.add_argument("--compare", action="store_true", help="the run with kills is in --folder already")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(args.folder or place)
        settings = {
            "groups": args.groups,
            "output_dir": str(folder / "killed"),
            "outer_steps": args.outer_steps,
            "eval_episodes": 0,
            "logging_steps": 1,
            "save_steps": 50,
            "meta_batch_size": args.tasks,
            "task_schedule": args.task_schedule,
            "k_shot": 1,
            "num_query": 2,
            "inner_steps": 1,
            "num_workers": "0",
            "episode_transforms": ["harness.elastic:slowly"],
            "heartbeat_timeout": args.heartbeat_timeout,
            **(LEARNED if args.learned else {}),
        }
        if not args.compare:
            (folder / "facts.json").write_text(json.dumps(measure(settings, args), indent=1))
        facts = json.loads((folder / "facts.json").read_text())
        config = alone(settings, folder / "plain")
        MetaTrainer(config).train()
        lines = lines_of(folder / "killed")
        results = {
            **{
                name: value for name, value in vars(args).items() if name not in ("folder", "json", "compare")
            },
            **facts,
            "steps_logged_once_each": (
                [line["step"] for line in lines] == list(range(1, args.outer_steps + 1))
            ),
            "whole_meta_batch_in_every_step": all(line["tasks"] == args.tasks for line in lines),
            "groups_seen": sorted({line["groups"] for line in lines}),
            "idle_seconds_of_a_kill": spread95(idle_seconds(lines, facts["seconds_of_a_step"], args.groups)),
            "retried_attempts": sum(line["retries"] for line in lines),
            "parity": parity(config, folder / "killed", folder / "plain"),
        }
    print(json.dumps(results, indent=1))
    file = Path(args.json) if args.json else None
    known = json.loads(file.read_text()) if file and file.is_file() else {}
    variant = {(True, "static"): "learned_rates", (False, "dynamic"): "claimed_tasks"}.get(
        (args.learned, args.task_schedule)
    )
    variant = variant if args.kills else "without_kills"
    others = {
        name: known[name] for name in ("learned_rates", "claimed_tasks", "without_kills") if name in known
    }
    if variant:
        write_json(args.json, {**known, variant: {"machine": machine(), **results}})
    else:
        write_json(args.json, {**results, **others})
    good = (
        "whole_meta_batch_in_every_step",
        "steps_logged_once_each",
        "no_group_lost",
        "exit_code_is_that_of_the_record",
        "no_false_alarm",
    )
    sys.exit(
        0
        if all(results[name] for name in good) and not facts["exit_code"] and results["parity"] < PARITY
        else 1
    )


def measure(settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The run with kills: how it ended, and what each kill cost."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        return measure_kills(Trial(settings, args.task_seconds), args)
    finally:
        for loop in loops:
            loop.kill()


def measure_kills(trial: Trial, args: argparse.Namespace) -> dict[str, Any]:
    """`measure`, with the busy loops."""
    trial.start()
    trial.wait_for(args.groups, 300)
    start = len(lines_of(trial.folder))
    time.sleep(5 * args.task_seconds + 60 * args.minutes)  # a few steps for comparison
    began, before, load = time.monotonic(), len(lines_of(trial.folder)), os.getloadavg()[0]
    at_random(trial, args.kills, args.every, random.Random(args.seed))
    trial.wait_for(args.groups, 300)
    took, after = time.monotonic() - began, len(lines_of(trial.folder))
    load = max(load, os.getloadavg()[0])
    trial.hurry()
    trial.end(args.timeout)
    lines = lines_of(trial.folder)
    hit = [line for line in lines[before : after + 1] if line["retries"]]
    joined = [
        line["lost_seconds"] for line in lines[before:after] if line["lost_seconds"] and not line["retries"]
    ]
    quiet = [
        line["seconds"]
        for line in lines[:after]
        if line["groups"] == args.groups and not line["lost_seconds"]
    ]
    step = statistics.median(quiet) if quiet else float("nan")
    quorums = [
        min((at for at, _ in trial.rolls if at > kill["at"]), default=trial.began) - kill["at"]
        for kill in trial.kills
    ]
    return {
        "exit_code": trial.code,
        "no_group_lost": all(group.ended == 0 for group in trial.groups.values()),
        "exit_code_is_that_of_the_record": (trial.code == 0) == is_finished(trial.folder),
        "no_false_alarm": not any(line["retries"] for line in lines[start:before]),
        "steps_before_kills": before - start,
        "killed": [{**kill, "at": round(kill["at"] - began, 2)} for kill in trial.kills],
        "restarts": {group.name: group.starts - 1 for group in trial.groups.values()},
        "heals": sum("state received from" in line for line in trial.log),
        "load": load,
        "seconds_of_a_step": step,
        "steps_that_were_hit": len(hit),
        "lost_seconds_of_a_kill": spread95([line["lost_seconds"] for line in hit]),
        "longer_seconds_of_a_kill": spread95([line["lost_seconds"] + line["seconds"] - step for line in hit]),
        "seconds_to_a_quorum": spread95(quorums),
        "seconds_of_a_join": spread(joined) if joined else None,
        "seconds_with_kills": took,
        "steps_meanwhile": after - before,
        "longer_per_kill": (took - step * (after - before)) / args.kills if args.kills else None,
    }


def idle_seconds(lines: Sequence[Mapping[str, Any]], step: float, groups: int) -> list[float]:
    """Per step with a lost group: its time without that of the tasks of the busiest group.

    step: seconds of an undisturbed step of all groups. Only claimed tasks are counted by group; those that a
    lost group had finished are run again, and count where they are.
    """
    return [
        line["lost_seconds"]
        + line["seconds"]
        - max(line["tasks_by_group"]) * step / math.ceil(line["tasks"] / groups)
        for line in lines
        if line["retries"] and "tasks_by_group" in line
    ]


def spread95(values: Sequence[float]) -> dict[str, float] | None:
    """Median, quartiles, and the smallest value that 95 of 100 do not exceed; None without values."""
    if not values:
        return None
    return {**spread(values), "95th": sorted(values)[math.ceil(0.95 * len(values)) - 1]}


if __name__ == "__main__":
    main()
