"""How long do groups wait for each other when tasks differ in size, or groups in speed?

    python -m benchmarks.balance --json benchmarks/results/balance.json              tasks that differ by 100x
    python -m benchmarks.balance slow --json benchmarks/results/balance.json         a rank at half speed
    python -m benchmarks.balance simulate --json benchmarks/results/balance.json     8 to 1,024 groups

Real processes, one group each, run the inner loops of the same meta-batches, dealt largest first
(schedule.deal) and round-robin (the floor), step by step in turn. Idle: the share of the groups' time,
together, between a group's last task and the end of the slowest one, in CPU seconds of one thread each (wall
time on a busy machine says little). The last line is idle time, balanced and round-robin, in per cent.

`slow`: two real runs of two ranks, with --task_schedule static and dynamic, 32 equal tasks in an outer step.
Rank 1 has half the speed. With --task_seconds each task is padded by a sleep to so many seconds, times a
seeded factor within 2 %, twice that on rank 1 (padded.py). With --task_seconds 0 tasks are computed only
(--inner_steps makes them longer than --period), and rank 1 is stopped (SIGSTOP) for half of every --period.
Useful: the tasks of an outer step over the tasks that both ranks can run, at their speeds, from the begin of
its first task to the end of its last, in per cent. The theta of both runs is compared, over the distance that
it has travelled. The last line is useful time, static and dynamic.

`simulate`: useful time of both schedules for 8 to 1,024 groups with 4 and 16 tasks each, whose sizes have a
spread of 0.5, 20 % of it unknown (planning/simulate.py), and of the two ranks of `slow`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import machine, start_ranks, table, write_json
from benchmarks.padded import TIMES
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms.setup import setup
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.models.load import describe, load_learner
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.parallel.workers.full_model import PlainWorker
from fmmeta.planning.simulate import SimulatedCluster, claimed_times, group_times, simulate
from fmmeta.tasks.batching import Batcher, Episode, Example
from fmmeta.tasks.schedule.meta_batches import Item, Items, Schedule, Task, assign_to_groups
from fmmeta.train import MetaTrainer
from fmmeta.training.callbacks import Callback
from fmmeta.training.loop import Run

ROWS = (4, 400)  # rows of an episode's support set


def round_robin(tasks: list[Task], num_groups: int) -> list[list[Task]]:
    return [tasks[group::num_groups] for group in range(num_groups)]


def skewed(tasks: int) -> Items:
    """Tasks whose sizes are spread evenly on a logarithmic scale, in no order."""
    rng = np.random.default_rng(0)
    rows = np.exp(rng.uniform(np.log(ROWS[0]), np.log(ROWS[1]), tasks))
    rows[:2] = ROWS
    return Items.of(Item(f"t{i}", f"s{i % 4}", round(n) * 64) for i, n in enumerate(rng.permutation(rows)))


def episode(task: Task) -> Episode:
    rng = np.random.default_rng(task.seed)
    rows = [
        Example(rng.integers(3, 250, 32).tolist(), int(rng.integers(5)))
        for _ in range(max(1, task.tokens // 64))
    ]
    return Episode(Batcher(0, 50).split(rows), Batcher(0, 50).split(rows))


def rank_main(steps: int, tasks_per_step: int) -> None:
    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    ranks = world.split(1, default_group=False)
    config = Config(inner_steps=3)
    learner = load_learner(config, describe(config))
    worker = PlainWorker(learner, param_groups(learner, learner.head_names, True), ranks.device)
    meta = MetaParameters(worker.read())
    into = MetaGradient(meta.theta)
    rule = find("fomaml").rule(setup(config, worker, learner.head_names, config.n_way, False), 0)
    schedule = Schedule(skewed(200), tasks_per_step, 0)
    policies = {"largest first": assign_to_groups, "round-robin": round_robin}
    busy = {name: torch.zeros(steps, launch.world_size, dtype=torch.float64) for name in policies}
    for step in range(steps):
        for name, policy in policies.items():
            mine = policy(schedule.meta_batch(step), launch.world_size)[launch.global_rank]
            batches = [episode(task) for task in mine]
            world.comm.barrier()
            began = time.process_time()
            for one in batches:
                rule.task_gradient(worker, meta, one, into)
            busy[name][step, launch.global_rank] = time.process_time() - began
            world.comm.barrier()
    for times in busy.values():
        world.comm.sum_(times)
    if launch.global_rank == 0:
        torch.save(busy, os.environ["BALANCE_OUT"])
    world.close()


class Travelled(Callback):
    """Keeps the run and its first theta, of which each rank holds a whole one."""

    def on_train_begin(self, run: Run) -> None:
        self.run, self.begin = run, run.theta.clone()


def slow_rank_main(given: argparse.Namespace, schedule: str, out: Path) -> None:
    config = Config(
        algorithm="benchmarks.padded:FOMAML",
        outer_steps=given.steps,
        meta_batch_size=given.tasks_per_step,
        inner_steps=given.inner_steps,
        eval_episodes=0,
        save_steps=0,
        num_workers="0",
        group_size="1",
        task_schedule=schedule,
        output_dir=str(out / "run"),
    )
    travelled = Travelled()
    MetaTrainer(config, callbacks=[travelled]).train()
    facts = {"times": TIMES, "by_rank": travelled.run.metrics.tasks_by_group}
    rank = os.environ["RANK"]
    (out / f"rank-{rank}.json").write_text(json.dumps(facts))
    torch.save({"begin": travelled.begin, "end": travelled.run.theta}, out / f"rank-{rank}.pt")


def halve(rank: subprocess.Popen[bytes], period: float) -> None:
    """Stop a process for half of every `period` until it ends."""
    while rank.poll() is None:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            rank.send_signal(number)
            time.sleep(period / 2)


def slow(given: argparse.Namespace) -> dict[str, Any]:
    """Useful time with a rank at half speed, for each schedule."""
    names = ("tasks_per_step", "steps", "task_seconds", "period", "inner_steps")
    found: dict[str, Any] = {name: getattr(given, name) for name in names}
    thetas = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, schedule in enumerate(("static", "dynamic")):
            out = Path(folder) / schedule
            out.mkdir()
            seconds = f"{given.task_seconds},{2 * given.task_seconds}"
            ranks = start_ranks(
                "benchmarks.balance", 2, number, BALANCE_SLOW=f"{schedule}:{out}", PADDED_SECONDS=seconds
            )
            if not given.task_seconds:
                halve(ranks[1], given.period)
            if any([rank.wait() for rank in ranks]):
                raise SystemExit("a rank failed")
            of_ranks = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]
            found[schedule] = useful_time([facts["times"] for facts in of_ranks])
            found[schedule]["tasks of the last step"] = of_ranks[0]["by_rank"]
            thetas[schedule] = torch.load(out / "rank-0.pt", weights_only=True)
    static, dynamic = thetas["static"], thetas["dynamic"]
    way = float((static["end"] - static["begin"]).double().norm())
    found["theta_apart"] = float((static["end"] - dynamic["end"]).double().norm()) / way
    shares = {name: f"{100 * found[name]['useful']:.1f}" for name in ("static", "dynamic")}
    rows = [[name, f"{share} %", found[name]["tasks of the last step"]] for name, share in shares.items()]
    print(table(["task_schedule", "useful", "tasks of the ranks in the last step"], rows))
    print(f"theta apart by {found['theta_apart']:.1e} of the distance travelled")
    print(" ".join(shares.values()))
    return found


def useful_time(times: list[list[list[tuple[float, float]]]]) -> dict[str, Any]:
    """Useful time by begin and end of each task of each rank and outer step; the first step warms up."""
    steps = list(zip(*(rank[1:] for rank in times), strict=True))
    rates, shares = [], []
    for rank in zip(*steps, strict=True):
        taken = [end - began for step in rank for began, end in step]
        rates.append(len(taken) / sum(taken))
    for step in steps:
        tasks = [task for rank in step for task in rank]
        length = max(end for _, end in tasks) - min(began for began, _ in tasks)
        shares.append(len(tasks) / (sum(rates) * length))
    return {"useful": sum(shares) / len(shares), "by_step": shares, "tasks_per_second": rates}


GROUPS = [8, 16, 32, 64, 128, 256, 512, 1024]


def simulated(given: argparse.Namespace) -> dict[str, Any]:
    """Simulated useful time, in per cent."""
    percent: dict[str, list[float]] = {}
    for tasks in (4, 16):
        for name, claimed in (("static", False), ("dynamic", True)):
            clusters = [SimulatedCluster(n, tasks * n, 0.5, 0.2, claimed=claimed) for n in GROUPS]
            shares = [simulate(cluster, given.steps).efficiency for cluster in clusters]
            percent[f"{tasks} tasks, {name}"] = [round(100 * share, 1) for share in shares]
    print(
        table(["tasks of a group", *map(str, GROUPS)], [[name, *values] for name, values in percent.items()])
    )
    ones, factors = np.ones((1, 32)), np.array([[1.0, 2.0]])
    ideal = 32 / (1 / factors).sum()
    two_ranks = {
        "static": round(100 * float(ideal / (group_times(ones, ones, 2) * factors).max()), 1),
        "dynamic": round(100 * float(ideal / claimed_times(ones, ones, factors).max()), 1),
    }
    print(f"two ranks, one at half speed, 32 equal tasks: {two_ranks}")
    return {
        "groups": GROUPS,
        "spread": 0.5,
        "noise": 0.2,
        "steps": given.steps,
        "useful, per cent": percent,
        "two ranks, one at half speed, per cent": two_ranks,
    }


def store(path: str | None, part: str, results: dict[str, Any]) -> None:
    """Write the results of a part, and the machine that they are of, beside those of the other parts."""
    before = json.loads(Path(path).read_text()) if path and Path(path).is_file() else {}
    write_json(path, {**before, part: {"machine": machine(), **results}})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="sizes", choices=("sizes", "slow", "simulate"))
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--tasks_per_step", type=int, help="default: 16, with slow 32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--task_seconds", type=float, default=0.5)
    parser.add_argument("--period", type=float, default=0.1)
    parser.add_argument("--inner_steps", type=int, default=1, help="of a task of slow: how long it computes")
    parser.add_argument("--json")
    given = parser.parse_args()
    given.tasks_per_step = given.tasks_per_step or (32 if given.part == "slow" else 16)
    if "BALANCE_OUT" in os.environ:
        return rank_main(given.steps, given.tasks_per_step)
    if "BALANCE_SLOW" in os.environ:
        schedule, _, out = os.environ["BALANCE_SLOW"].partition(":")
        return slow_rank_main(given, schedule, Path(out))
    if given.part == "slow":
        return store(given.json, "slow", slow(given))
    if given.part == "simulate":
        return store(given.json, "simulated", simulated(given))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "busy.pt"
        ranks = start_ranks("benchmarks.balance", given.groups, BALANCE_OUT=str(out))
        if any(rank.wait() for rank in ranks):
            raise SystemExit("a rank failed")
        busy = torch.load(out, weights_only=True)
    idle = {
        name: float((times.max(1).values[:, None] - times).sum() / (times.max(1).values.sum() * given.groups))
        for name, times in busy.items()
    }
    rows = [
        [name, f"{100 * share:.1f} %", f"{float(busy[name].max(1).values.sum()):.1f}"]
        for name, share in idle.items()
    ]
    print(table(["dealt", "idle", "CPU seconds of the slowest groups"], rows))
    store(
        given.json,
        "sizes",
        {
            "groups": given.groups,
            "tasks_per_step": given.tasks_per_step,
            "spread": ROWS[1] / ROWS[0],
            "idle": idle,
        },
    )
    print(f"{100 * idle['largest first']:.1f} {100 * idle['round-robin']:.1f}")
    return None


if __name__ == "__main__":
    main()
