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
(tests/support/fork_server.py): Python starts in a fraction of a second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.common import machine, spread, write_json
from fmmeta import Config, MetaTrainer
from fmmeta.elastic.supervisor import ElasticConfig as Elastic
from fmmeta.elastic.supervisor import Group, Supervisor
from fmmeta.models.load import describe, load_learner
from fmmeta.tasks.augment import TextEpisode
from tests.support.fork_server import Rank, shared

SLEEP = "FMMETA_TASK_SECONDS"  # a file with a number; none: do not sleep
PARITY = 1e-5  # fp32, AdamW
LEARNED: dict[str, Any] = {"inner_lr_learned": "layer", "save_steps": 1, "save_total_limit": 1}
ROLL = re.compile(r"outer step (\d+): \d+ groups? \((.*)\)")


def slowly(episode: TextEpisode, rng: object) -> TextEpisode:
    """A transform that changes nothing and takes its time."""
    file = Path(os.environ.get(SLEEP, "/nonexistent"))
    if file.is_file():
        time.sleep(float(file.read_text() or 0))
    return episode


class Born:
    """A rank from the fork_server, as subprocess would have it."""

    lock = threading.Lock()  # of the fork_server

    def __init__(self, rank: Rank) -> None:
        self.rank, self.pid = rank, rank.pid

    @classmethod
    def of(cls, words: Sequence[str], log: Path, env: Mapping[str, str], before: str = "") -> Born:
        with cls.lock:
            return cls(shared().start(words, log, env, before=before))

    def poll(self) -> int | None:
        with self.lock:
            shared().poll()
        return self.rank.code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def lines(self) -> Iterator[str]:
        """What it prints, line by line, until it has ended."""
        while not self.rank.log.exists() and self.poll() is None:
            time.sleep(0.05)  # the rank opens it itself
        with self.rank.log.open() as log:
            text, over = "", False
            while not over:
                over = self.rank.code is not None
                text += log.read()
                *whole, text = text.split("\n")
                yield from whole
                time.sleep(0.05)


class Trial:
    """A run with kills. `log`: every line that its groups print."""

    def __init__(self, settings: dict[str, Any], task_seconds: float) -> None:
        self.folder, self.log = Path(settings["output_dir"]), list[str]()
        self.rolls: list[tuple[float, set[str]]] = [(0.0, set())]  # when, and who takes part, as logged
        self.file = self.folder.with_suffix(".seconds")
        self.file.write_text(str(task_seconds))
        os.environ[SLEEP] = str(self.file)
        self.supervisor = Supervisor(Elastic(**settings), self.hear)
        self.supervisor.spawn = self.spawn
        self.code: int | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.kills: list[dict[str, Any]] = []
        self.before = "os:setsid"  # called first in every rank

    def _run(self) -> None:
        self.code = self.supervisor.run()

    def spawn(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Born:
        log = self.folder.with_name(f"{name}-{time.monotonic_ns()}.log")
        born = Born.of(command[1:], log, env, before=self.before)
        threading.Thread(target=self.supervisor.log_output, args=(name, born.lines()), daemon=True).start()
        return born

    def hear(self, line: str) -> None:
        self.log.append(line)
        if found := ROLL.search(line):
            self.rolls.append((time.monotonic(), {name.strip() for name in found[2].split(",")}))

    def start(self) -> float:
        self.began = time.monotonic()
        self.thread.start()
        return self.began

    @property
    def taking_part(self) -> set[str]:
        """Groups of the last roll that have not been killed since."""
        since, named = self.rolls[-1]
        return named - {kill["group"] for kill in self.kills if kill["at"] >= since}

    def wait_for(self, enough: int, timeout_s: float) -> None:
        """Until so many groups take part. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while len(self.taking_part) < enough:
            if time.monotonic() > deadline or not self.thread.is_alive():
                raise TimeoutError(
                    f"{self.taking_part} take part after {timeout_s} s\n" + "\n".join(self.log[-40:])
                )
            time.sleep(0.05)

    def kill(self, group: Group) -> None:
        self.kills.append({"group": group.name, "at": time.monotonic(), "left": len(self.taking_part) - 1})
        group.kill()

    def wait_for_step(self, groups: int, timeout_s: float) -> None:
        """Until so many groups have taken part in an outer step to its end. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while all(line["groups"] != groups for line in lines_of(self.folder)):
            if time.monotonic() > deadline or not self.thread.is_alive():
                raise TimeoutError(
                    f"no outer step of {groups} groups after {timeout_s} s\n" + "\n".join(self.log[-40:])
                )
            time.sleep(0.05)

    def hurry(self) -> None:
        self.file.unlink(missing_ok=True)

    def close(self) -> None:
        """End whatever is left."""
        self.supervisor.config.max_restarts, self.supervisor.stop_signal = 0, signal.SIGTERM
        for group in self.supervisor.groups:
            group.kill()
        if self.thread.is_alive():
            self.thread.join(30)

    def end(self, timeout_s: float) -> float:
        """Wait for the end of the run; seconds that it took."""
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            self.close()
            raise TimeoutError(f"the run goes on after {timeout_s} s\n" + "\n".join(self.log[-60:]))
        return time.monotonic() - self.began


def at_random(trial: Trial, kills: int, mean_s: float, rng: random.Random) -> None:
    """Kill any group that takes part at any time, but not the last one."""
    by_name = {group.name: group for group in trial.supervisor.groups}
    while len(trial.kills) < kills:
        trial.wait_for(2, 600)
        time.sleep(rng.expovariate(1 / mean_s))
        if len(trial.taking_part) > 1:
            trial.kill(by_name[rng.choice(sorted(trial.taking_part))])


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics; none before there is a file."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def is_finished(folder: Path) -> bool:
    """Whether run.json says so, and the model is there."""
    return (
        json.loads((folder / "run.json").read_text())["finished"]
        and (folder / "model/model.safetensors").is_file()
    )


def theta_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """theta out of the files of a checkpoint, by parameter."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in sorted(checkpoint.glob("shard-*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                if key.startswith("theta/"):
                    name, _, offset = key.removeprefix("theta/").partition("@")
                    parts.setdefault(name, []).append((int(offset), opened.get_tensor(key)))
    return {
        name: torch.cat([part for _, part in sorted(found, key=lambda one: one[0])])
        for name, found in sorted(parts.items())
    }


def parity(config: Config, folder: Path, other: Path) -> float:
    """|theta - other's| / |other's - theta_0|, at the last outer step of both."""
    mine, wanted = (theta_of(one / f"checkpoint-{config.outer_steps}") for one in (folder, other))
    assert list(mine) == list(wanted)
    begun = dict(load_learner(config, describe(config)).named_parameters())
    off = sum(float((mine[name] - wanted[name]).double().square().sum()) for name in wanted)
    far = sum(
        float((begun[name].detach().flatten() - wanted[name]).double().square().sum()) for name in wanted
    )
    return (off / far) ** 0.5


def alone(settings: dict[str, Any], folder: Path) -> Config:
    """The same run for one process: no groups, no lighthouse."""
    own = ("groups", "ranks_per_group", "heartbeat_timeout", "max_restarts", "deepspeed")
    kept: dict[str, Any] = {name: value for name, value in settings.items() if name not in own} | {
        "output_dir": str(folder)
    }
    return Config(**kept)


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
            "episode_transforms": ["benchmarks.elastic:slowly"],
            "heartbeat_timeout": args.heartbeat_timeout,
            "max_restarts": 10 * args.kills,
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
        "no_group_lost": all(group.ended == 0 for group in trial.supervisor.groups),
        "exit_code_is_that_of_the_record": (trial.code == 0) == is_finished(trial.folder),
        "restarts_without_a_kill": (
            sum(group.starts - 1 for group in trial.supervisor.groups) - len(trial.kills)
        ),
        "no_false_alarm": not any(line["retries"] for line in lines[start:before]),
        "steps_before_kills": before - start,
        "killed": [{**kill, "at": round(kill["at"] - began, 2)} for kill in trial.kills],
        "restarts": {group.name: group.starts - 1 for group in trial.supervisor.groups},
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
