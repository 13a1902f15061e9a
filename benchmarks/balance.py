"""How long do groups wait for each other when tasks differ in size by a factor of 100?

    python -m benchmarks.balance --json benchmarks/results/balance.json

Real processes, one group each, run the inner loops of the same meta-batches, dealt largest first
(schedule.deal) and round-robin (the floor), step by step in turn. Idle: the share of the groups' time,
together, between a group's last task and the end of the slowest one, in CPU seconds of one thread each (wall
time on a busy machine says little). The last line is idle time, balanced and round-robin, in per cent.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import table, write_json
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms.setup import setup
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.models.load import describe, load_learner
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.parallel.workers.full_model import PlainWorker
from fmmeta.tasks.batching import Batcher, Episode, Example
from fmmeta.tasks.schedule.meta_batches import Item, Items, Schedule, Task, assign_to_groups

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--tasks_per_step", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json")
    given = parser.parse_args()
    if "BALANCE_OUT" in os.environ:
        return rank_main(given.steps, given.tasks_per_step)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "busy.pt"
        env = {
            **os.environ,
            "WORLD_SIZE": str(given.groups),
            "LOCAL_WORLD_SIZE": str(given.groups),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(20000 + os.getpid() % 20000),
            "OMP_NUM_THREADS": "1",
            "BALANCE_OUT": str(out),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.balance", *sys.argv[1:]],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(given.groups)
        ]
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
    write_json(
        given.json,
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
