"""Trains under a memory limit that the complete training state exceeds; test_memory_limit.py starts it.

    python -m tests.support.limited MODEL DATA OUT

Prints the refusal of a group of one, whether the limit is real, and the result of the run with all ranks in
one group.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import status_bytes
from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.parallel.workers.zero import import_deepspeed
from fmmeta.training import build
from fmmeta.training.loop import Run
from fmmeta.training.run_folder import RunStart

ROOM = 640 * 2**20


def main(model: str, data: str, out: str, kind: str) -> None:
    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    settings = {
        "model_name_or_path": model,
        "dataset": [data],
        "task_type": "causal_lm",
        "k_shot": 2,
        "num_query": 2,
        "meta_batch_size": 1,
        "inner_steps": 1,
        "outer_steps": 2,
        "max_length": 32,
        "save_steps": 0,
        "eval_episodes": 0,
        "outer_lr": 1e-3,
    }
    deepspeed = f"{out}/zero3.json" if kind == "zero3" else None
    alone = Config(**settings, group_size="1", deepspeed=deepspeed)
    small = build.read_inputs(alone, world, lambda text: None)
    params = build.sizes_of(alone, small, world.device)(1).params
    spread = {"zero3": {"deepspeed": deepspeed}, "pipeline": {"pipeline_stages": 4}}[kind]
    config = Config(**settings, group_size="4", **spread)
    inputs = build.read_inputs(config, world, lambda text: None)
    # libraries are no part of the model's memory
    import transformers.models.llama.modeling_llama  # noqa: F401

    limit = status_bytes("VmData") + ROOM
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        build.plan_parallel(alone, small, world, lambda text: None)
        print("accepted")
    except UsageError as error:
        print(error)
    try:
        torch.zeros(7 * params)
        print("no limit")
    except RuntimeError:
        print("the limit is real")
    plan = build.plan_parallel(config, inputs, world, lambda text: None)
    ranks = world.split(plan.group_size, plan.engine == "deepspeed")
    import_deepspeed()
    parts = build.build(config, inputs, plan, ranks)
    run = Run(config, inputs, ranks, parts, RunStart(Path(out), None, False), Progress(enabled=False))
    run.resume()
    run.loop()
    moved = parts.worker.dot(run.theta, run.theta)
    print(f"trained {run.state.outer_step} steps, |theta|^2 {moved:.6f}")
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
