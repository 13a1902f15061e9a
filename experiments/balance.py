"""balance.yaml: time that groups wait for each other, by sizes of tasks."""

import time
from typing import Any

import numpy as np
import torch

from fmmeta import Config
from fmmeta.config.algorithms import find
from fmmeta.learners.load import describe, load_learner
from fmmeta.meta.algorithms.setup import setup
from fmmeta.meta.parameters import MetaGradient, MetaParameters
from fmmeta.meta.task import TaskRun
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.workers.full_model import PlainWorker
from fmmeta.tasks.batching import Batcher, Episode, Example
from fmmeta.tasks.schedule.meta_batches import Item, Items, Schedule, assign_to_groups

GROUPS, TASKS, STEPS = 4, 16, 10


def measure(study: Any, cell: Any) -> dict[str, float]:
    """Share of the time of groups that wait, by the CPU seconds of tasks of 4 to 400 rows."""
    config = Config(inner_steps=3)
    learner = load_learner(config, describe(config))
    worker: Any = PlainWorker(learner, param_groups(learner, learner.head_names, True), torch.device("cpu"))
    meta = MetaParameters(worker.read())
    rule: Any = find("fomaml").rule
    parts = setup(config, worker, learner.head_names, config.n_way, False)
    rng, seconds = np.random.default_rng(0), dict[str, list[float]]()
    sizes = rng.permutation(np.exp(rng.uniform(np.log(4), np.log(400), 200)))
    items = Items.of(Item(f"t{i}", f"s{i % 4}", round(size) * 64) for i, size in enumerate(sizes))
    for step in range(STEPS):
        tasks, of_task = Schedule(items, TASKS, 0).meta_batch(step), dict[Any, float]()
        for task in (tasks[0], *tasks):  # the first one warms up
            drawn = np.random.default_rng(task.seed)
            rows = range(task.tokens // 64)
            made = [Example(drawn.integers(3, 250, 32).tolist(), int(drawn.integers(5))) for _ in rows]
            batches, began = Batcher(0, 50).split(made), time.process_time()
            rule(TaskRun(parts, worker, meta, Episode(batches, batches), MetaGradient(meta.theta)))
            of_task[task.seed] = time.process_time() - began
        in_turn = [tasks[group::GROUPS] for group in range(GROUPS)]
        dealt = {"largest first": assign_to_groups(tasks, GROUPS), "round-robin": in_turn}
        for name, groups in dealt.items():
            busy = [sum(of_task[task.seed] for task in group) for group in groups]
            seconds.setdefault(name, []).append(max(busy))
            seconds.setdefault("busy", []).append(sum(busy) / len(dealt))
    return {name: 1 - sum(seconds["busy"]) / (GROUPS * sum(seconds[name])) for name in dealt}
