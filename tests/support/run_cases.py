"""Started on every rank by tests: runs many small meta-trainings in one set of processes, and saves what came
out.

    python -m tests.support.run_cases CASES.json OUT_DIR

A case is {"id", "config": settings, "poison": [[outer step, slot, "support" | "query"], ...], "by":
{"factor": F}}; all cases of a file have the same group size. Poison makes a task's loss F times (by default
infinitely) as large on that set. For each case the first rank writes OUT_DIR/<id>.safetensors (theta, whole)
and OUT_DIR/<id>.json (facts). On CPUs the ranks communicate under NCCL's rules (nccl_rules.py).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from fmmeta.checkpoint.hf_export import export
from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.models.load import empty_learner, load_learner
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.training import build
from fmmeta.training.callbacks import Callback
from fmmeta.training.loop import Run
from fmmeta.training.run_folder import RunStart
from tests.support import nccl_rules


def poison(parts: build.Runtime, chosen: dict[tuple[int, int], str], factor: float = float("inf")) -> None:
    """Weigh the rows of the chosen tasks more; infinitely, loss and gradients are no numbers then, as after a
    divergence.
    """
    if not chosen:
        return
    clean = parts.load

    class Poisoned(LoadEpisode):
        def batches(self, task):
            episode = super().batches(task)
            for batch in getattr(episode, chosen[task.seed[2:]]) if task.seed[2:] in chosen else []:
                batch.weights *= factor
            return episode

    def load(source, transform=None):
        made = clean(source, transform)
        return Poisoned(made.source, made.batcher, made.transform, made.most_classes)

    parts.load = load  # type: ignore[method-assign]


class CountedTasks(Callback):
    """With --max_staleness: the tasks of each outer step, as (position in the queue, version of theta)."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        self.in_sum: list[tuple[int, int]] = []  # of this group, in the outer step that closes

    def on_train_begin(self, run):
        if (stale := run.stale_steps) is not None:
            describe = stale._describe

            def noting(metrics):
                self.in_sum = stale.in_sum if run.ranks.layout.group_rank == 0 else []
                describe(metrics)

            stale._describe = noting

    def on_step_end(self, run, outcome):
        if run.stale_steps is not None:
            parts = map(json.loads, run.ranks.world.gather_bytes(json.dumps(self.in_sum).encode()))
            self.steps.append(sorted(tuple(task) for part in parts for task in part))


def main(cases_file: str, out: str) -> None:
    if os.environ.get("FMMETA_NCCL_RULES") != "0":
        nccl_rules.install()
    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    ranks = None
    for case in json.loads(Path(cases_file).read_text()):
        config = Config(**{"save_steps": 0, "eval_episodes": 0, "logging_steps": 1, **case["config"]})
        inputs = build.read_inputs(config, world, lambda text: None)
        if ranks is None:
            ranks = world.split(int(config.group_size))
        plan = inputs.parallel_plan(config, ranks.layout.group_size, world.device.type)
        parts = build.build(config, inputs, plan, ranks)
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
        folder = Path(out) / case["id"]
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
        poison(
            parts, {(step, slot): which for step, slot, which in case.get("poison", [])}, **case.get("by", {})
        )
        held = getattr(parts.worker, "model", None) or parts.worker.stage
        layers = [m for m in held.modules() if getattr(m, "gradient_checkpointing", False) and m.training]
        run.resume()
        run.loop()
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
        if launch.global_rank == 0:
            save_file(theta, folder.with_name(f"{folder.name}.safetensors"))
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
            folder.with_name(f"{folder.name}.json").write_text(json.dumps(facts))
    world.close()
    nccl_rules.check()


if __name__ == "__main__":
    main(*sys.argv[1:])
