"""Ranks that take one inner step in each way to spread a model, with every byte that they hand to
torch.distributed counted.

A line of JSON per case: what was gathered, reduced, sent and summed between tensor ranks, and the same as
planned.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

COUNTED = dict.fromkeys(("gather", "reduce", "sum", "send"), 0)
SMALL = 8  # elements of an all-reduce of norms and flags
CASES = {
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero2 in rounds": {"zero_stage": 2, "micro_batch_size": 1},
    "zero3 in rounds": {"zero_stage": 3, "micro_batch_size": 1},
    "zero3 released": {"zero_stage": 3, "micro_batch_size": 1, "live": 1000},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_stages": 2},
}


def size(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()


def counting(name: str, kind: str, which: int) -> None:
    """Count what a function of torch.distributed is given: its argument number `which`, a tensor or a list of
    them.
    """
    ordinary = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        given = args[which] if len(args) > which else list(kwargs.values())[which - len(args)]
        listed = given if isinstance(given, (list, tuple)) else [given]
        group = kwargs.get("group")
        alone = group is not None and dist.get_world_size(group) == 1  # nothing travels
        is_control = (
            alone
            or (name == "all_reduce" and given.numel() <= SMALL)
            or (name == "send" and given.dtype == torch.int32)
        )  # shapes to come
        COUNTED[kind] += 0 if is_control else sum(map(size, listed))
        return ordinary(*args, **kwargs)

    setattr(dist, name, counted)


def main(model: str, data: str, out: str, *cases: str) -> None:
    for name, kind, which in (
        ("all_gather_into_tensor", "gather", 0),
        ("all_gather", "gather", 0),
        ("all_reduce", "sum", 0),
        ("reduce_scatter_tensor", "reduce", 1),
        ("send", "send", 0),
    ):
        counting(name, kind, which)
    from fmmeta.parallel.layout import Launch
    from fmmeta.parallel.process_groups import World, pick_device

    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    ranks = world.split(2)
    found = [one_case(name, model, data, f"{out}/{launch.global_rank}.json", world, ranks) for name in cases]
    with open(f"{out}/{cases[0]}{launch.global_rank}.json", "w") as file:
        json.dump(found, file)
    world.close()


def one_case(name: str, model: str, data: str, path: str, world: Any, ranks: Any) -> dict[str, Any]:
    from fmmeta.config.settings import Config
    from fmmeta.models.load import empty_learner
    from fmmeta.planning.compute import count_matmuls, one_pass
    from fmmeta.planning.memory import largest_part, rank_sizes
    from fmmeta.training import build

    given = dict(CASES[name])
    stage, live = given.pop("zero_stage", 0), given.pop("live", None)
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    zero |= {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live} if live else {}
    with open(path, "w") as file:
        json.dump({"zero_optimization": zero}, file)
    config = Config(
        model_name_or_path=model,
        dataset=[data],
        task_type="causal_lm",
        k_shot=4,
        num_query=4,
        group_size="2",
        max_length=32,
        eval_episodes=0,
        deepspeed=path,
        **given,
    )
    inputs = build.read_inputs(config, world, lambda text: None)
    plan = inputs.parallel_plan(config, ranks.layout.group_size, "cpu")
    parts = build.build(config, inputs, plan, ranks)
    task = build.training_schedule(config, inputs, ranks.layout).meta_batch(0)[0]
    batches = parts.load(inputs.sources.train)(task).batches
    assert batches is not None
    worker: Any = parts.worker
    for _ in range(2):  # in the first pass ZeRO 3 learns the order of the parameters
        COUNTED.update(dict.fromkeys(COUNTED, 0))
        before = worker.mpu.tensor.bytes_sent if worker.mpu else 0
        worker.step(batches.support, lambda shard, grad, where: None)
        COUNTED["sum"] += worker.mpu.tensor.bytes_sent - before if worker.mpu else 0
    learner = empty_learner(config, inputs.description)
    hf_config, data_ranks = learner.hf.config, plan.data
    sizes = rank_sizes(config, hf_config, largest_part(config, learner, hf_config), True, data_ranks)
    planned = one_pass(
        config,
        plan.deepspeed,
        sizes,
        count_matmuls(learner, config),
        data_ranks,
        4,
        batches.support[0].inputs["input_ids"].shape[1],
        True,
    )
    return {
        "case": name,
        "counted": dict(COUNTED),
        "planned": asdict(planned.wire),
        "params": sizes.params,
        "shapes": [list(batch.inputs["input_ids"].shape) for batch in batches.support],
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*sys.argv[1:])
