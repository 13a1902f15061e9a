"""Creates a worker from a checkpoint, for each way to share a model among the ranks of a group.

plain        a complete model on one rank                        reads everything
ZeRO 0-2     a complete model on every rank of the group         reads everything
tensor       weight matrices split over the group                reads everything, then splits
ZeRO 3       every parameter sharded while it is loaded          one tensor at a time (packing: everything)
pipeline     some layers per rank                                only the tensors of its stage
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import undo_later
from fmmeta.config.settings import Config
from fmmeta.learners.base import Learner
from fmmeta.learners.experts import router_names
from fmmeta.learners.forward_options import check_packing, compile_model
from fmmeta.learners.lazy_weights import open_lazy_model
from fmmeta.learners.load import Description, load_learner
from fmmeta.learners.parameter_sets import trains_base
from fmmeta.learners.quantized import check_use
from fmmeta.learners.stages import base_model, plan_stages, take_stage
from fmmeta.parallel.layout import GroupCoordinates, ParallelPlan
from fmmeta.parallel.param_map import param_groups
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.tensor_parallel import check_layers, sharing_ranks
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.full_model import PlainWorker
from fmmeta.parallel.workers.pipeline import PipelineWorker, hold_stage
from fmmeta.parallel.workers.zero import (
    DeepSpeedWorker,
    check_config,
    forget_zero_3,
    refusals,
    shard_while_loading,
)

CreatedWorker = tuple[Worker, tuple[str, ...], dict[str, Tensor]]
"""A worker with the checkpoint's weights, the names of its head, and untrained tensors by name.

The tensors are on the rank that exports them; none with LoRA.
"""


def create_worker(
    config: Config, description: Description, plan: ParallelPlan, ranks: ProcessGroups
) -> CreatedWorker:
    """Read the weights and start the worker. Raises `UsageError`. Collective: world."""
    forget_zero_3()
    undo_later(forget_zero_3)
    stage = plan.deepspeed.zero_stage if plan.engine == "deepspeed" else 0
    check_use(config, description.hf_config, stage, trains=False)
    filled = plan.deepspeed.complete(getattr(description.hf_config, "hidden_size", 768))
    coordinates = plan.coordinates(ranks.layout.group_rank)
    create = create_stage if plan.stages > 1 else create_full
    with refusals(config.deepspeed):
        if plan.engine == "deepspeed":
            check_config(config.deepspeed or "the default", filled)
        return create(config, description, plan, filled, ranks, coordinates)


def create_full(
    config: Config,
    description: Description,
    plan: ParallelPlan,
    filled: dict[str, Any],
    ranks: ProcessGroups,
    coordinates: GroupCoordinates,
) -> CreatedWorker:
    """A worker whose ranks run the whole model. Collective: world."""
    read = None
    if plan.deepspeed.zero_stage == 3 and plan.group_size > 1 and not config.packing:
        learner, frozen, read = load_sharded(config, description, filled, ranks)
    else:  # packing is tried on a loaded model
        with ranks.world.raise_on_all("loading the model"):
            learner: Any = load_learner(config, description)
            if plan.tensor > 1:
                check_layers(base_model(learner), plan.tensor)
        writes = ranks.first and trains_base(learner)
        frozen = copies_to_export(config, ranks, frozen_tensors(learner), writes)
    groups = groups_of(config, learner)
    if plan.engine == "plain":
        worker: Worker = PlainWorker(learner, groups, ranks.device, plan.deepspeed.bf16)
        with ranks.world.raise_on_all("compiling the model"):
            if config.compile:
                compile_model(learner, ranks.device)
    else:
        worker = DeepSpeedWorker(learner, groups, filled, ranks.group, coordinates, read)
    return worker, learner.head_names, frozen


def load_sharded(
    config: Config, description: Description, filled: dict[str, Any], ranks: ProcessGroups
) -> tuple[Learner, dict[str, Tensor], Callable[[str], Tensor]]:
    """A learner whose parameters ZeRO 3 shards while they are loaded, copies of its untrained tensors, and a
    function that reads a complete parameter. Collective: world.
    """
    with ranks.world.raise_on_all("opening the checkpoint"):
        model = open_lazy_model(config, description)
        learner = model.learner
        exported = trains_base(learner)
        if exported:
            model.materialize([name for name, param in learner.named_parameters() if not param.requires_grad])
        tensors = frozen_tensors(learner)  # a LoRA base is read a second time for its fingerprint, not kept
        in_checkpoint = {name for name, _ in learner.named_parameters()}  # a tied weight has one name there
        read = (
            (name, model.read(name) if value.is_meta else value)
            for name, value in sorted(tensors.items())
            if name in in_checkpoint or not value.is_meta
        )
    frozen = copies_to_export(config, ranks, tensors, ranks.first and exported, read)
    del tensors  # an engine gives the frozen weights other storage
    shard_while_loading(model, filled, ranks.device)
    return learner, frozen, model.read


def create_stage(
    config: Config,
    description: Description,
    plan: ParallelPlan,
    filled: dict[str, Any],
    ranks: ProcessGroups,
    coordinates: GroupCoordinates,
) -> CreatedWorker:
    """A worker that runs one pipeline stage per rank. Collective: world."""
    with ranks.world.raise_on_all("reading the stages"):
        model = open_lazy_model(config, description)
        learner = model.learner
        if plan.tensor > 1:
            check_layers(base_model(learner), plan.tensor)
        shared_by = sharing_ranks(description.hf_config, plan.tensor)
        routers, exported = router_names(learner), trains_base(learner)
        cut = plan_stages(learner, plan.stages, plan.layer_costs, shared_by)
        names = hold_stage(model, cut, coordinates)
        tensors = frozen_tensors(learner, [n for n, stage in cut.owner.items() if stage == coordinates.stage])
        stage = take_stage(learner, cut, coordinates.stage)
        if config.packing:
            check_packing(learner.hf, stage.alone)
        groups = groups_of(config, learner, stage.body) or [{"params": [stage.idle], "name": "no_decay"}]
    writes = ranks.layout.group_index == 0 and coordinates.data_rank == 0 and exported
    frozen = copies_to_export(config, ranks, tensors, writes, stage=coordinates.stage)
    del tensors
    worker = PipelineWorker(
        stage, names, groups, cut, filled, ranks.group, coordinates, description.hf_config.hidden_size
    )
    worker.routers, worker.outer_only = routers, learner.outer_only
    if plan.deepspeed.bf16:
        worker.set_exactly(model.read)
    return worker, learner.head_names, frozen


def groups_of(config: Config, learner: Learner, body: nn.Module | None = None) -> list[dict[str, Any]]:
    """Parameter groups of a learner, or of `body`, the stage of it that this rank runs.

    A head that every task initialises is adapted, but it is not a meta-parameter. That of `joint` is one.
    """
    head = () if config.head_init == "learned" or config.joint_head else learner.head_names
    inner_only = {*head, *learner.inner_only}
    return param_groups(learner, inner_only, config.weight_decay > 0, body)


def frozen_tensors(learner: Learner, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Frozen parameters and saved buffers by name, not copied, before an engine shards them. names: only
    these.
    """
    params = dict(learner.named_parameters(remove_duplicate=False))
    return {
        name: value.detach()
        for name, value in learner.state_dict().items()
        if not (name in params and params[name].requires_grad) and (names is None or name in names)
    }


def copies_to_export(
    config: Config,
    ranks: ProcessGroups,
    tensors: dict[str, Tensor],
    writes: bool,
    read: Iterable[tuple[str, Tensor]] | None = None,
    stage: int = 0,
) -> dict[str, Tensor]:
    """Copies in host memory on the rank that writes them; none of a base that is not exported.

    Refuses tensors that are not the same on all ranks. read: they and their values by name, if some are not
    loaded. Collective: world.
    """
    with ranks.world.raise_on_all("looking at the frozen weights"):
        found = sorted(tensors.items()) if read is None else read
        mark = fingerprint((name, check_finite(config, name, value, True)) for name, value in found)
    check_equal(ranks, mark, stage)
    if not writes:
        return {}
    return {name: value.cpu().clone() for name, value in tensors.items()}


def check_finite(config: Config, name: str, value: Tensor, frozen: bool = False) -> Tensor:
    """A tensor of a checkpoint. Raises `UsageError` for one that holds NaN or infinity.

    frozen: it may hold -inf, which is the mask in a buffer.
    """
    if not (value < math.inf if frozen else value.isfinite()).all():
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path} has weights that are NaN or infinite, the"
            f" first in {name.removeprefix('hf.')}; give a checkpoint from before they diverged, or"
            " download it again"
        )
    return value


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of named tensors, one at a time in the given order."""
    digest = hashlib.sha256()
    for name, value in tensors:
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_equal(ranks: ProcessGroups, mine: str, stage: int = 0) -> None:
    """Refuse a start if ranks of the same stage hold different tensors. Collective: world."""
    gathered = set(map(tuple, ranks.world.gather([stage, mine])))
    if len(gathered) > len({stage for stage, _ in gathered}):
        raise UsageError(
            "the frozen weights and buffers are not the same on every rank;"
            " let every node read the same checkpoint"
        )
