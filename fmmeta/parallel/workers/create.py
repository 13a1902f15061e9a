"""Creates a worker from a checkpoint, for each way to share a model among the ranks of a group.

plain        whole on one rank                                   reads everything
ZeRO 0-2     whole on every rank of the group                    reads everything
tensor       weight matrices cut over the group                  reads everything, then cuts
ZeRO 3       every parameter sharded while it is loaded          one tensor at a time (packing: everything)
pipeline     some layers per rank                                reads its own tensors only
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.models.compile import compile_model
from fmmeta.models.lazy_weights import open_lazy_model
from fmmeta.models.learner import Learner
from fmmeta.models.load import Description, load_learner
from fmmeta.models.pipeline_split import plan_stages, take_stage
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import GroupCoordinates, Layout
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.plain import PlainWorker
from fmmeta.parallel.workers.tensor_parallel import tensor_parallel_block


@dataclass
class CreatedWorker:
    """A worker with the checkpoint's weights.

    `frozen`: untrained tensors by name, on the rank that will write them.
    """

    worker: Worker
    head_names: tuple[str, ...]
    place: GroupCoordinates
    frozen: dict[str, Tensor] = field(default_factory=dict)


def create_worker(
    config: Config,
    description: Description,
    deepspeed: dict[str, Any],
    precision: DeepSpeedSettings,
    engine: str,
    ranks: ProcessGroups,
    costs: Sequence[float] | None = None,
) -> CreatedWorker:
    """Read the weights and start the worker.

    `costs`: of each layer, to balance stages by. Collective: world.
    """
    place = group_coordinates(config, ranks.layout)
    if config.compile and engine != "plain":
        raise UsageError(
            "compile=True compiles a model that one rank holds in plain PyTorch, and DeepSpeed runs this"
            f" group of {place.group_size}: it hooks into modules; leave it out, or use --group_size 1"
        )
    filled = deepspeed_config.complete(
        deepspeed, precision, getattr(description.hf_config, "hidden_size", 768)
    )
    if place.tensor > 1:
        filled["tensor_parallel"] = tensor_parallel_block(description.hf_config, place.tensor)
    if place.stages > 1:
        return start_pipeline(config, description, filled, place, ranks, costs)
    if (
        engine == "deepspeed"
        and precision.zero_stage == 3
        and ranks.layout.group_size > 1
        and not config.packing
    ):
        # packing is tried on a model that is there
        return start_sharded(config, description, filled, place, ranks)
    with ranks.world.raise_on_all("loading the model"):
        learner = load_learner(config, description)
        groups = param_groups(learner, per_task(config, learner), config.weight_decay > 0)
    still = frozen_tensors(learner)
    check_equal(ranks, fingerprint(sorted(still.items())), "frozen weights and buffers")
    frozen = (
        copies(still) if ranks.first and not config.lora_r else {}
    )  # the base of adapters is never copied
    del still  # an engine gives the frozen weights other storage
    if engine == "plain":
        worker: Worker = PlainWorker(learner, groups, ranks.device, precision.bf16)
        with ranks.world.raise_on_all("compiling the model"):
            if config.compile:
                compile_model(learner, ranks.device)
    else:
        from fmmeta.parallel.workers.zero import DeepSpeedWorker

        worker = DeepSpeedWorker(learner, groups, filled, ranks.group, place)
    return CreatedWorker(worker, learner.head_names, place, frozen)


def start_sharded(
    config: Config,
    description: Description,
    filled: dict[str, Any],
    place: GroupCoordinates,
    ranks: ProcessGroups,
) -> CreatedWorker:
    """A worker whose parameters ZeRO 3 shards while they are loaded. Collective: world."""
    from fmmeta.parallel.workers.zero import DeepSpeedWorker, shard_while_loading

    with ranks.world.raise_on_all("opening the checkpoint"):
        stream = open_lazy_model(config, description)
        learner = stream.learner
        trained = [name for name, param in learner.named_parameters() if param.requires_grad]
        if not config.lora_r:
            stream.materialize(
                [name for name, param in learner.named_parameters() if not param.requires_grad]
            )
        still = frozen_tensors(
            learner
        )  # the base of adapters is read once more for its fingerprint, and never kept
        once = {
            name for name, _ in learner.named_parameters()
        }  # a tied weight has one name in the checkpoint
        mark = fingerprint(
            (name, stream.read(name) if value.is_meta else value)
            for name, value in sorted(still.items())
            if name in once or not value.is_meta
        )
    check_equal(ranks, mark, "frozen weights and buffers")
    frozen = copies(still) if ranks.first and not config.lora_r else {}
    shard_while_loading(stream, filled)
    groups = param_groups(learner, per_task(config, learner), config.weight_decay > 0)
    exact = ((name, stream.read(name)) for name in trained)
    worker = DeepSpeedWorker(learner, groups, filled, ranks.group, place, exact)
    return CreatedWorker(worker, learner.head_names, place, frozen)


def start_pipeline(
    config: Config,
    description: Description,
    filled: dict[str, Any],
    place: GroupCoordinates,
    ranks: ProcessGroups,
    costs: Sequence[float] | None,
) -> CreatedWorker:
    """A stage per rank. Collective: world."""
    from fmmeta.parallel.workers.pipeline import PipelineWorker, hold_stage

    with ranks.world.raise_on_all("reading the stages"):
        stream = open_lazy_model(config, description)
        cut = plan_stages(stream.learner, place.stages, costs)
        names = hold_stage(stream, cut, place)
        mine = [name for name, stage in cut.owner.items() if stage == place.stage]
        still = frozen_tensors(stream.learner, mine)
        mark = fingerprint(sorted(still.items()))
        writes = ranks.layout.group_index == 0 and place.data_rank == 0 and not config.lora_r
        frozen = copies(still) if writes else {}
        trained = [
            name
            for name, param in stream.learner.named_parameters()
            if id(param) in names and param.requires_grad
        ]
        del still
        stage = take_stage(stream.learner, cut, place.stage)
        groups = param_groups(stage.body, per_task(config, stream.learner), config.weight_decay > 0)
        groups = groups or [{"params": [stage.idle], "name": "no_decay"}]
    check_equal(ranks, mark, "frozen weights and buffers", place.stage)
    worker = PipelineWorker(
        stage, names, groups, cut, filled, ranks.group, place, description.hf_config.hidden_size
    )
    if filled["bf16"]["enabled"]:
        worker.set_exactly((name, stream.read(name)) for name in trained)
    return CreatedWorker(worker, stream.learner.head_names, place, frozen)


def group_coordinates(config: Config, layout: Layout) -> GroupCoordinates:
    return GroupCoordinates(
        layout.group_rank, layout.group_size, config.pipeline_stages, config.tensor_parallel_size
    )


def per_task(config: Config, learner: Learner) -> tuple[str, ...]:
    """Names of a head that every task initialises; it is adapted, but it is no meta-parameter.

    That of `joint` is one.
    """
    return learner.head_names if config.head_init != "learned" and not config.joint_head else ()


def frozen_tensors(learner: Learner, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Frozen parameters and saved buffers by name (of those in `names`, if given), uncopied, before an engine
    shards them.
    """
    trained = {
        name for name, param in learner.named_parameters(remove_duplicate=False) if param.requires_grad
    }
    wanted = {name: value for name, value in learner.state_dict().items() if name not in trained}
    return {name: value.detach() for name, value in wanted.items() if names is None or name in names}


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in tensors.items()}


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of named tensors in the order in which they come, one at a time."""
    digest = hashlib.sha256()
    for name, value in tensors:
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_equal(ranks: ProcessGroups, mine: str, what: str, stage: int = 0) -> None:
    """Refuse a start if ranks of the same stage hold different tensors. Collective: world."""
    told = set(ranks.world.gather_bytes(f"{stage} {mine}".encode()))
    if len(told) > len({text.split()[0] for text in told}):
        raise UsageError(
            f"the {what} are not the same on every rank; let every node read the same checkpoint"
        )
