"""Creates a worker from a checkpoint, for each way to share a model among the ranks of a group.

plain        complete on one rank                        reads everything
ZeRO 0-2     complete on every rank of the group         reads everything
tensor       weight matrices cut over the group          reads everything, then cuts
ZeRO 3       every parameter sharded while loading       one tensor at a time (packing: everything)
pipeline     some layers per rank                        reads the tensors of these layers only
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

    frozen: untrained tensors by name, on the rank that writes them to the exported folder.
    """

    worker: Worker
    head_names: tuple[str, ...]
    coordinates: GroupCoordinates
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
    """Load the weights and create the worker.

    costs: of each layer, to balance the stages. Collective: world.
    """
    coordinates = group_coordinates(config, ranks.layout)
    if config.compile and engine != "plain":
        raise UsageError(
            "compile=True compiles a model that one rank holds in plain PyTorch, and DeepSpeed runs this"
            f" group of {coordinates.group_size}: it hooks into modules; leave it out, or use --group_size 1"
        )
    width = getattr(description.hf_config, "hidden_size", 768)
    ds_config = deepspeed_config.complete(deepspeed, precision, width)
    if coordinates.tensor > 1:
        ds_config["tensor_parallel"] = tensor_parallel_block(description.hf_config, coordinates.tensor)
    if coordinates.stages > 1:
        return create_pipeline(config, description, ds_config, coordinates, ranks, costs)
    sharded = engine == "deepspeed" and precision.zero_stage == 3 and ranks.layout.group_size > 1
    if sharded and not config.packing:  # packing is tested on a complete model
        return create_sharded(config, description, ds_config, coordinates, ranks)
    with ranks.world.raise_on_all("loading the model"):
        learner = load_learner(config, description)
        groups = param_groups(learner, per_task(config, learner), config.weight_decay > 0)
    tensors = frozen_tensors(learner)
    check_equal(ranks, fingerprint(sorted(tensors.items())))
    frozen = copies(tensors, ranks.first, config)
    del tensors  # an engine gives the frozen weights other storage
    if engine == "plain":
        worker: Worker = PlainWorker(learner, groups, ranks.device, precision.bf16)
        with ranks.world.raise_on_all("compiling the model"):
            if config.compile:
                compile_model(learner, ranks.device)
    else:
        from fmmeta.parallel.workers.zero import DeepSpeedWorker

        worker = DeepSpeedWorker(learner, groups, ds_config, ranks.group, coordinates)
    return CreatedWorker(worker, learner.head_names, coordinates, frozen)


def create_sharded(
    config: Config,
    description: Description,
    ds_config: dict[str, Any],
    coordinates: GroupCoordinates,
    ranks: ProcessGroups,
) -> CreatedWorker:
    """A worker whose parameters ZeRO 3 shards while they are loaded. Collective: world."""
    from fmmeta.parallel.workers.zero import DeepSpeedWorker, shard_while_loading

    with ranks.world.raise_on_all("opening the checkpoint"):
        lazy = open_lazy_model(config, description)
        params = dict(lazy.learner.named_parameters())  # a tied weight has one name in the checkpoint
        trained = [name for name, param in params.items() if param.requires_grad]
        if not config.lora_r:
            lazy.fill([name for name in params if name not in trained])
        # the frozen base of adapters is loaded an extra time for its fingerprint, and not kept
        tensors = frozen_tensors(lazy.learner)
        digest = fingerprint(
            (name, lazy.read(name) if value.is_meta else value)
            for name, value in sorted(tensors.items())
            if name in params or not value.is_meta
        )
        del params
    check_equal(ranks, digest)
    frozen = copies(tensors, ranks.first, config)
    shard_while_loading(lazy, ds_config)
    groups = param_groups(lazy.learner, per_task(config, lazy.learner), config.weight_decay > 0)
    exact = ((name, lazy.read(name)) for name in trained)
    worker = DeepSpeedWorker(lazy.learner, groups, ds_config, ranks.group, coordinates, exact)
    return CreatedWorker(worker, lazy.learner.head_names, coordinates, frozen)


def create_pipeline(
    config: Config,
    description: Description,
    ds_config: dict[str, Any],
    coordinates: GroupCoordinates,
    ranks: ProcessGroups,
    costs: Sequence[float] | None,
) -> CreatedWorker:
    """A worker with one stage per rank. Collective: world."""
    from fmmeta.parallel.workers.pipeline import PipelineWorker, hold_stage

    with ranks.world.raise_on_all("reading the stages"):
        lazy = open_lazy_model(config, description)
        partition = plan_stages(lazy.learner, coordinates.stages, costs)
        names = hold_stage(lazy, partition, coordinates)
        own = [name for name, stage in partition.owner.items() if stage == coordinates.stage]
        tensors = frozen_tensors(lazy.learner, own)
        digest = fingerprint(sorted(tensors.items()))
        frozen = copies(tensors, ranks.layout.group_index == 0 and coordinates.data_rank == 0, config)
        named = lazy.learner.named_parameters()
        trained = [name for name, param in named if id(param) in names and param.requires_grad]
        del tensors
        stage = take_stage(lazy.learner, partition, coordinates.stage)
        groups = param_groups(stage.body, per_task(config, lazy.learner), config.weight_decay > 0)
        groups = groups or [{"params": [stage.idle], "name": "no_decay"}]
    check_equal(ranks, digest, coordinates.stage)
    width = description.hf_config.hidden_size
    worker = PipelineWorker(stage, names, groups, partition, ds_config, ranks.group, coordinates, width)
    if ds_config["bf16"]["enabled"]:
        worker.set_exactly((name, lazy.read(name)) for name in trained)
    return CreatedWorker(worker, lazy.learner.head_names, coordinates, frozen)


def group_coordinates(config: Config, layout: Layout) -> GroupCoordinates:
    return GroupCoordinates(
        layout.group_rank, layout.group_size, config.pipeline_stages, config.tensor_parallel_size
    )


def per_task(config: Config, learner: Learner) -> tuple[str, ...]:
    """Names of a head that every task initialises: it is adapted, but it is no meta-parameter.

    The head of `joint` is a meta-parameter.
    """
    return learner.head_names if config.head_init != "learned" and not config.joint_head else ()


def frozen_tensors(learner: Learner, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Frozen parameters and saved buffers by name (of those in `names`, if given), not copied, before an
    engine shards them.
    """
    named = learner.named_parameters(remove_duplicate=False)
    trained = {name for name, param in named if param.requires_grad}
    return {
        name: value.detach()
        for name, value in learner.state_dict().items()
        if name not in trained and (names is None or name in names)
    }


def copies(tensors: dict[str, Tensor], writes: bool, config: Config) -> dict[str, Tensor]:
    """Copies in host memory for a rank that writes them; none of the base of adapters."""
    if not writes or config.lora_r:
        return {}
    return {name: value.cpu().clone() for name, value in tensors.items()}


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of named tensors in their order, one at a time."""
    digest = hashlib.sha256()
    for name, value in tensors:
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_equal(ranks: ProcessGroups, digest: str, stage: int = 0) -> None:
    """Raise `UsageError` if ranks of the same stage have different frozen tensors. Collective: world."""
    gathered = set(ranks.world.gather_bytes(f"{stage} {digest}".encode()))
    if len(gathered) > len({text.split()[0] for text in gathered}):
        raise UsageError(
            "the frozen weights and buffers are not the same on every rank;"
            " let every node read the same checkpoint"
        )
