"""Runs many small meta-trainings in one launch.

A case is {"id", "config": settings, "poison": [[outer step, slot, "support" | "query"], ...]}; all cases of a
launch have the same group size. Poison makes a task's loss infinite on that set. The output of a run goes to
OUT/<id>. On CPUs the ranks communicate under NCCL's rules (nccl_rules.py).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fmmeta.checkpoint.hf_export import export
from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.learners.load import empty_learner, load_learner
from fmmeta.parallel.process_groups import World
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.training import build
from fmmeta.training.bounded_staleness import StaleSchedule
from fmmeta.training.callbacks import Callback
from fmmeta.training.loop import train
from fmmeta.training.run import Run
from fmmeta.training.run_files import RunStart
from tests.support import nccl_rules
from tests.support.ranks import begin, built


def poison(parts: build.Runtime, chosen: dict[tuple[int, int], str]) -> None:
    """Weigh the rows of the chosen tasks infinitely: loss and gradients are no numbers, as after a
    divergence.
    """
    if not chosen:
        return
    clean = parts.load

    class Poisoned(LoadEpisode):
        def batches(self, task):
            episode = super().batches(task)
            for batch in getattr(episode, chosen[task.seed[2:]]) if task.seed[2:] in chosen else []:
                batch.weights *= float("inf")
            return episode

    def load(*of, **how):
        made = clean(*of, **how)
        return Poisoned(made.source, made.batcher, made.transforms)

    parts.load = load  # type: ignore[method-assign]


class CountedTasks(Callback):
    """With --max_staleness: the tasks of each outer step, as (position in the queue, version of theta).

    schedule: of the run, set before it begins.
    """

    def __init__(self) -> None:
        self.schedule: Any = None
        self.steps: list[list[tuple[int, int]]] = []
        self.in_sum: list[tuple[int, int]] = []  # of this group, in the outer step that closes

    def on_train_begin(self, run):
        if isinstance(stale := self.schedule, StaleSchedule):
            describe = stale.describe

            def noting(metrics):
                self.in_sum = stale.in_sum if run.ranks.layout.group_rank == 0 else []
                describe(metrics)

            stale.describe = noting  # type: ignore[method-assign]

    def on_step_end(self, run, outcome):
        if isinstance(self.schedule, StaleSchedule):
            parts = run.ranks.world.gather(self.in_sum)
            self.steps.append(sorted(tuple(task) for part in parts for task in part))


Outcomes = dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]  # by case: theta, whole, and facts


def begin_cases(
    listed: Sequence[dict[str, Any]], out: Path, ranks: int, timeout_s: float = 300, **launch: Any
) -> Callable[[], Outcomes]:
    """Begin to run cases on some ranks; what comes back waits for the end."""
    out.mkdir(exist_ok=True)
    end = begin(on_each_rank, ranks, listed, out, timeout_s=timeout_s, rules=True, **launch)
    return lambda: end()[0]


def run_cases(listed: Sequence[dict[str, Any]], out: Path, ranks: int, **launch: Any) -> Outcomes:
    return begin_cases(listed, out, ranks, **launch)()


def on_each_rank(world: World, listed: Sequence[dict[str, Any]], out: Path) -> Outcomes | None:
    """Run the cases; the first rank returns their outcomes."""
    outcomes: Outcomes = {}
    ranks = None
    for case in listed:
        config = Config(**{"save_steps": 0, "eval_episodes": 0, "logging_steps": 1, **case["config"]})
        inputs, ranks, parts = built(world, config, ranks)
        mapped = config.model_name_or_path in Path("/proc/self/maps").read_text()
        began = load_learner(config, inputs.description)
        off = [
            float(
                (parts.worker.gather_param(parts.meta_params.theta, name, tuple(p.shape)).cpu() - p)
                .abs()
                .max()
            )
            for name, p in began.named_parameters()
            if p.requires_grad
        ]
        del began  # it maps the checkpoint
        folder = out / case["id"]
        folder.mkdir(exist_ok=True)
        counted = CountedTasks()
        run = Run(
            config,
            inputs,
            ranks,
            parts,
            RunStart(folder, None, False),
            Progress(enabled=False),
            user_callbacks=[counted],
        )
        counted.schedule = run.outer_schedule
        poison(parts, {(step, slot): which for step, slot, which in case.get("poison", [])})
        held = getattr(parts.worker, "model", None) or parts.worker.stage
        layers = [m for m in held.modules() if getattr(m, "gradient_checkpointing", False) and m.training]
        run.resume()
        train(run)
        theta = {}
        skeleton = empty_learner(config, inputs.description)
        for name, param in skeleton.named_parameters():
            if param.requires_grad:
                theta[name] = parts.worker.gather_param(run.theta, name, tuple(param.shape)).cpu()
        if case.get("export"):
            export(
                folder / "model",
                run.theta,
                parts.worker,
                parts.frozen,
                config,
                inputs.description,
                inputs.tokenizer,
                ranks,
            )
        if world.launch.global_rank == 0:
            adapters = [p.shape[0] for n, p in skeleton.named_parameters() if ".lora_A." in n]
            effects = {
                "gradient_checkpointing": bool(layers),
                "packing": parts.batcher.pack is not None,
                "offload_outer": run.state.outer.memory.offload,
                "reduce_dtype": {torch.float32: "", torch.bfloat16: "bf16"}[run.state.updates.comm_dtype],
                "lora_r": max(adapters, default=0),
            }
            facts = {
                "effects": {name: value for name, value in effects.items() if value},
                "engine": type(parts.worker).__name__,
                "groups": list(parts.worker.params.groups),
                "wrapper": (
                    type(parts.worker.engine.optimizer).__name__ if hasattr(parts.worker, "engine") else None
                ),
                "numel": parts.worker.params.numel,
                "start_off": max(off),
                "mapped": mapped,
                "counted": counted.steps,
                "linear": torch.nn.functional.linear.__name__,
                "checked": nccl_rules.CheckedGroup.issued,  # by NCCL's rules, so far
            }
            outcomes[case["id"]] = theta, facts
    return outcomes or None
