"""The worker's operations over a DeepSpeed engine (ZeRO 0 to 3, with or without CPU offload).

DeepSpeed gets a client optimizer, `ShardOptimizer`, that holds no state, communicates nothing and applies the
current update to the tensors that DeepSpeed passes to it. DeepSpeed calls it once per step, per parameter
group or per sub-group, and not at all when it finds a non-finite gradient, so everything is keyed by tensor
and nothing relies on the call.

`of_engine` maps each optimizer wrapper of DeepSpeed to its fp32 shards, the fragments of parameters in them,
and the call that refreshes the working weights after a shard was written. DeepSpeed's private names occur in
this module only.
"""

import importlib.util
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, starmap
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fmmeta.common.errors import PeerError, UsageError, one_line
from fmmeta.common.processes import quiet_logger, without_fragments
from fmmeta.common.text import nearest
from fmmeta.learners.experts import fused_experts, release_weights, router_names
from fmmeta.learners.lazy_weights import LazyModel
from fmmeta.learners.stages import base_model
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.deepspeed_config import is_on, refusal
from fmmeta.parallel.layout import GroupCoordinates, can_defer_backward, differentiates_twice
from fmmeta.parallel.param_map import (
    ParamNames,
    Piece,
    TensorSlice,
    build_param_map,
    complement,
)
from fmmeta.parallel.tensor_parallel import TensorRanks, split_layers
from fmmeta.parallel.workers.base import Update, Worker
from fmmeta.parallel.workers.full_model import FullModelWorker

Consensus = Literal["engine", "optimizer", "none"]
"""Which part makes all ranks of a group skip a step as soon as one gradient is not finite.

engine: DeepSpeed. optimizer: ShardOptimizer, which is called once for the complete model. none: neither, so
ranks know only after the step.
"""


@dataclass(frozen=True)
class Shards:
    """The fp32 tensors that a DeepSpeed optimizer wrapper owns.

    pieces, group_names: the pieces of parameters in each tensor, and its parameter group. refresh: copies the
    tensors to the working weights. replicated: whether every rank of the group holds all of them.
    """

    tensors: list[Tensor]
    pieces: list[list[Piece]]
    group_names: list[str]
    refresh: Callable[[], None]
    replicated: bool
    nonfinite_consensus: Consensus = "engine"


def of_engine(engine: Any, rank: int) -> Shards:
    """Find the shards of a `deepspeed.initialize`d engine. rank: among the ranks that DeepSpeed shards over.

    Raises `TypeError` for an optimizer wrapper that is not known here.
    """
    wrapper = type(engine.optimizer).__name__
    if wrapper not in ADAPTERS:
        raise TypeError(
            f"DeepSpeed optimizer wrapper {wrapper} is not one of {', '.join(ADAPTERS)}; "
            "use a tested DeepSpeed version (pyproject.toml)"
        )
    return ADAPTERS[wrapper](engine.optimizer, rank)


def _zero_0(wrapper: Any, rank: int) -> Shards:
    """ZeRO 0, in fp32: every rank holds every parameter, which is its own shard."""
    shards = [param for group in wrapper.param_groups for param in group["params"]]
    return Shards(
        [shard.data.view(-1) for shard in shards],
        [[(param, 0, 0, param.numel())] for param in shards],
        [group["name"] for group in wrapper.param_groups for _ in group["params"]],
        lambda: None,
        replicated=True,
        nonfinite_consensus="optimizer",
    )


def _zero_1_2(partitions: str, groups: str, wrapper: Any, rank: int) -> Shards:
    """ZeRO 1 and 2: DeepSpeed links each parameter to its slice of the flat partition of its group.

    partitions, groups: attributes of the wrapper with the fp32 partitions and the parameters of each group.
    """
    pieces = [
        [
            (
                param,
                param._hp_mapping.hp_fragment_address.start,
                param._hp_mapping.lp_fragment_address.start,
                param._hp_mapping.hp_fragment_address.numel,
            )
            for param in params
            if param._hp_mapping is not None
        ]
        for params in getattr(wrapper, groups)
    ]
    tensors = [partition.data for partition in getattr(wrapper, partitions)]
    names = [group["name"] for group in wrapper.optimizer.param_groups]
    consensus = "engine" if getattr(wrapper, "compute_grad_norm", True) else "none"
    return Shards(tensors, pieces, names, wrapper.update_lp_params, False, consensus)


def _zero_3(wrapper: Any, rank: int) -> Shards:
    """ZeRO 3: every parameter is cut into equal parts over the ranks, and the parts of a sub-group are
    consecutive.
    """
    pieces = []
    for sub_group in wrapper.fp16_groups:
        at, found = 0, []
        for param in sub_group:
            part = param.partition_numel()
            offset = rank * part
            length = max(0, min(part, param.ds_numel - offset))
            if length:
                found.append((param, at, offset, length))
            at += part
        pieces.append(found)

    def refresh() -> None:
        wrapper._partition_all_parameters()
        for i in range(len(wrapper.fp16_groups)):
            wrapper._reassign_or_swap_out_partitioned_parameters(i)
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)

    tensors = [partition.data for partition in wrapper.fp32_partitioned_groups_flat]
    groups = [wrapper.optimizer.param_groups[wrapper.sub_group_to_group_id[i]] for i in range(len(pieces))]
    return Shards(tensors, pieces, [group["name"] for group in groups], refresh, replicated=False)


ADAPTERS: dict[str, Callable[[Any, int], Shards]] = {
    "ShardOptimizer": _zero_0,
    "DeepSpeedZeroOptimizer": partial(_zero_1_2, "single_partition_of_fp32_groups", "bit16_groups"),
    "BF16_Optimizer": partial(_zero_1_2, "fp32_groups_flat_partition", "bf16_groups"),
    "DeepSpeedZeroOptimizer_Stage3": _zero_3,
}


class ShardOptimizer(torch.optim.Optimizer):
    """Applies `self.update` to the fp32 tensors that DeepSpeed passes to it; see `Update`.

    reject_nonfinite: whether a rank of the group found a gradient that is not finite, given whether this rank
    did; the update then gets zeros.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.update: Update | None = None
        self.reject_nonfinite: Callable[[Tensor], Tensor] | None = None
        self.slices: dict[int, slice] = {}  # address of a shard -> its slice of the vector
        self.bad = torch.tensor(False)  # whether this rank found a gradient that is not finite

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient; set `bad`.

        Without an update it does nothing: DeepSpeed takes a step on zeros in the constructors of wrappers.
        """
        if self.update is None:
            return
        pairs = [
            (param, param.grad.reshape(-1).float())
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for _, grad in pairs:
            self.bad = self.bad | ~torch.isfinite(grad.sum())
        if self.reject_nonfinite is not None:
            rejected = self.reject_nonfinite(self.bad)
            for _, grad in pairs:
                grad.masked_fill_(rejected.to(grad.device), 0.0)
        for param, grad in pairs:
            self.update(param.data.view(-1), grad, self.slices[param.data_ptr()])


class EngineWorker(Worker):
    """The operations that all workers over an engine share: reading, writing and updating shards."""

    engine: Any
    shard_optimizer: ShardOptimizer
    coordinates: GroupCoordinates

    def start_engine(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        config: dict[str, Any],
        names: ParamNames,
        not_owned: Collection[str] = (),
        mpu: TensorRanks | None = None,
    ) -> None:
        """Start DeepSpeed with `shard_optimizer` and find its shards. Collective: group.

        names: of the complete parameters, before they are split over tensor ranks. not_owned: names of
        parameters that another rank owns.
        """
        data, data_rank = self.coordinates.data, self.coordinates.data_rank
        self.shard_optimizer, self.data_ranks = ShardOptimizer(groups), data
        self.tensor_rank, self.mpu = self.coordinates.tensor_rank, mpu
        for param in model.parameters() if self.coordinates.tensor > 1 else ():
            # DeepSpeed takes the norm of these on every rank, and fails where it finds none
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
        deepspeed, asked = import_deepspeed(), config.get("memory_breakdown") or config.get("dump_state")
        with nullcontext() if asked else redirect_stdout(io.StringIO()):  # BF16_Optimizer prints its memory
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=self.shard_optimizer, config=config, mpu=mpu, dist_init_required=False
            )
        if data == 1 and self.engine.optimizer is self.shard_optimizer:
            # over one rank it would copy all gradients
            self.engine.enable_backward_allreduce = self.engine.pipeline_enable_backward_allreduce = False
        rank, cuts = self.coordinates.tensor_rank, dict[str, TensorSlice | None]()
        for param in model.parameters() if self.coordinates.tensor > 1 else ():
            if id(param) in names:  # the idle parameter of a stage has no name
                name, shape = names[id(param)]
                cuts[name] = slice_of(shape, tuple(param.shape), rank)
        if rank:  # tensor rank 0 owns the parameters that are not split
            not_owned = [*not_owned, *(name for name, cut in cuts.items() if cut is None)]
        self.shards = shards = of_engine(self.engine, data_rank)
        replicated = shards.replicated and data == self.coordinates.group_size
        if shards.replicated and not replicated and data_rank:  # stages or tensor ranks: data rank 0 owns all
            not_owned = {name for name, _ in names.values()}
        self.params = build_param_map(
            shards.tensors, shards.pieces, shards.group_names, names, replicated, not_owned, cuts
        )
        self.storage_device = shards.tensors[0].device
        self.consensus_before_update = shards.nonfinite_consensus != "none"
        for tensor, pieces in zip(shards.tensors, shards.pieces, strict=True):
            for gap in complement([slice(at, at + length) for _, at, _, length in pieces], tensor.numel()):
                tensor[gap] = 0  # padding
        ends = [0, *accumulate(tensor.numel() for tensor in shards.tensors)]
        self.local_shards = list(zip(shards.tensors, starmap(slice, pairwise(ends)), strict=True))
        self.shard_optimizer.slices = {shard.data_ptr(): where for shard, where in self.local_shards}

    def set_exactly(self, read: Callable[[str], Tensor]) -> None:
        """Write fp32 parameters to the shards: DeepSpeed copies its own from weights rounded to bf16.

        read: returns a complete parameter by its name. Collective: group.
        """
        for shard, where in self.local_shards:  # without a vector as long as all of them
            for fragment in self.params.fragments:
                if where.start <= fragment.begin < where.stop:
                    begin = fragment.begin - where.start
                    shard[begin : begin + fragment.length] = fragment.take(read(fragment.name)).to(shard)
        self.refresh()

    def refresh(self) -> None:
        self.shards.refresh()

    def engine_step(
        self, run: Callable[[], Any], update: Update, skip_nonfinite_everywhere: bool = False
    ) -> Tensor:
        """Let `run` make the engine take a step that passes its shards and gradients to `update`.

        Returns whether the step was skipped or this rank found a non-finite gradient, as a 0-d tensor.
        """
        optimizer = self.shard_optimizer
        optimizer.update, optimizer.bad, optimizer.reject_nonfinite = update, torch.tensor(False), None
        if skip_nonfinite_everywhere and self.shards.nonfinite_consensus == "optimizer":
            optimizer.reject_nonfinite = lambda bad: self.group.sum_(bad.to(self.device, torch.float32)) > 0
        run()
        optimizer.update = None
        skipped = not self.engine.was_step_applied()
        if optimizer.bad.device == self.device:
            return optimizer.bad | skipped
        return torch.full((), bool(optimizer.bad) or skipped, device=self.device)  # of shards on the host


class DeepSpeedWorker(EngineWorker, FullModelWorker):
    """One engine over the ranks of `group`, which must be the default process group. `config`: see
    deepspeed_config.complete.

    With tensor parallelism the ranks of a tensor set run the same rows, and the first of them owns the
    parameters that all of them hold.
    """

    def __init__(
        self,
        model: Any,
        groups: list[dict[str, Any]],
        config: dict[str, Any],
        group: Communicator,
        coordinates: GroupCoordinates,
        read: Callable[[str], Tensor] | None = None,
    ) -> None:
        """read: returns a complete fp32 parameter by name, if `model` was sharded while loading (ZeRO 3)."""
        self.group, self.device, self.coordinates = group, group.device, coordinates
        self.counts_rows = coordinates.tensor_rank == 0
        names = {  # ZeRO 3 empties the shapes
            id(param): (name, tuple(getattr(param, "ds_shape", param.shape)))
            for name, param in model.named_parameters()
        }
        stage, bf16 = config["zero_optimization"]["stage"], config["bf16"]["enabled"]
        self.can_defer_backward = can_defer_backward(stage)
        self.differentiates_twice = differentiates_twice(stage, tensor=coordinates.tensor)
        # ZeRO 3 gathers parameters in the order of the first pass; blocks of tensor ranks communicate
        self.can_skip_blocks = stage < 3 and coordinates.tensor == 1
        if bf16 and read is None:
            read = {
                name: param.detach().clone()
                for name, param in model.named_parameters()
                if param.requires_grad
            }.__getitem__
        if stage == 3:  # experts and their adapters are gathered together, in an order without routing
            experts = fused_experts(model)
            recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
            for module in () if recomputes else experts.values():
                release_weights(module)
            import_deepspeed().utils.set_z3_leaf_modules_by_name(
                model, [name.split(".base_layer")[0] for name in experts]
            )
        mpu = None
        if coordinates.tensor > 1:
            mpu = TensorRanks.of(group, coordinates)
            split_layers(base_model(model), mpu.tensor)
            for param in model.parameters():  # one view of a mapped checkpoint keeps all of it in memory
                param.data = param.data.clone()
        self.start_engine(model, groups, config, names, mpu=mpu)
        self.model, self.routers = self.engine, router_names(model)
        self.outer_only = model.outer_only
        for leaf in import_deepspeed().utils.get_z3_leaf_modules(model):
            leaf.register_forward_pre_hook(with_gradient, prepend=True)
        if bf16 and read is not None:
            self.set_exactly(read)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over data ranks; we sum
        self.engine.backward(loss * self.coordinates.data, scale_wrt_gas=False)

    def apply(self, update: Update, skip_nonfinite_everywhere: bool) -> Tensor:
        return self.engine_step(self.engine.step, update, skip_nonfinite_everywhere)


def with_gradient(leaf: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs of a leaf module of ZeRO 3 of which the first requires gradients: DeepSpeed reduces those of its
    parameters when those of its inputs are there, and without any before the parameters have theirs.
    """
    first = inputs[0] if inputs else None
    if not torch.is_grad_enabled() or not isinstance(first, Tensor) or not first.is_floating_point():
        return inputs
    return (first if first.requires_grad else first.detach().requires_grad_(), *inputs[1:])


def slice_of(whole: tuple[int, ...], part: tuple[int, ...], rank: int) -> TensorSlice | None:
    """The part of a parameter that a tensor-parallel rank holds, given both shapes; None if it holds all."""
    sizes = enumerate(zip(whole, part, strict=True))
    return next((TensorSlice(dim, rank * own, own) for dim, (size, own) in sizes if own != size), None)


def check_config(name: str, config: dict[str, Any]) -> None:
    """Let DeepSpeed read its configuration, inside `refusals`. name: of the user's file.

    Raises `UsageError` for a monitor without its package, for which DeepSpeed looks on rank 0 alone.
    """
    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(deepcopy(config))
    for key, package in MONITORS.items():
        if is_on(config.get(key)) and importlib.util.find_spec(package) is None:
            why = f": {package} is not installed; pip install {package}, or remove it (--report_to logs more)"
            raise refusal(name, key, config[key], why)


MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # block -> package


@contextmanager
def refusals(name: str | None) -> Iterator[None]:
    """Raise `UsageError` for what DeepSpeed raises where it reads the user's file or starts with it: a key
    that it does not know, a value that it refuses, values that do not work together, a package that is not
    installed.

    name: of the file; without one the error is not the user's. Memory, disks and communication have their own
    errors, but for the folder of a monitor.
    """
    from pydantic import ValidationError

    try:
        yield
    except (UsageError, MemoryError, PeerError):
        raise
    except Exception as error:
        inside = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if f"{os.sep}deepspeed{os.sep}" in frame.filename
        ]
        of_run = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        if isinstance(error, OSError):  # a monitor makes the folder that the file names
            of_run = not any(f"{os.sep}monitor{os.sep}" in frame.filename for frame in inside)
        if name is None or not inside or of_run:
            raise
        if isinstance(error, ValidationError):
            from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

            found = error.errors()[0]
            key = ".".join(map(str, found["loc"]))
            known = DeepSpeedZeroConfig.model_fields if found["type"] == "extra_forbidden" else ()
            fix = nearest(key, known, "; change or remove it")
            why = f", which {error.title} of DeepSpeed refuses ({found['msg']}){fix}"
            raise refusal(name, key, found["input"], why) from None
        file = os.path.basename(inside[-1].filename)
        what = f"{type(error).__name__} in {file}: {one_line(error) or inside[-1].line}"
        raise UsageError(
            f"deepspeed={name} is refused by DeepSpeed ({what}); change or remove what this names"
        ) from None


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move what `.to(device)` moves beside parameters; what is in the state dict stays in it."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def shard_while_loading(stream: LazyModel, config: dict[str, Any], device: torch.device) -> None:
    """Load the parameters of a model one by one, and shard each over the group before the next (ZeRO 3).

    Its buffers move to `device`: the engine does not move a model with sharded parameters. Collective: group.
    """
    # DeepSpeed's context is for constructors, and here the module exists already. With a module it also gives
    # torch a linear layer that does not keep the gathered weight for the backward pass: without that every
    # layer would be complete on every rank by then.
    context = import_deepspeed().zero.Init(module=nn.Module(), config_dict_or_path=config)

    def shard(param: nn.Parameter) -> None:
        if config["bf16"]["enabled"]:
            param.data = param.data.bfloat16()
        context._convert_to_zero_parameters([param])

    with without_fragments():
        stream.materialize([name for name, _ in stream.learner.named_parameters()], shard)
    move_buffers(stream.learner, device)


def forget_zero_3() -> None:
    """Undo what a ZeRO 3 worker has changed for the whole process; the next one changes it again.

    Its linear layer adds the bias after rounding the product to bf16, so that the next run of the process, or
    the user's own code, would end elsewhere. The parameters that it does not shard count against one limit
    (stage3_model_persistence_threshold) over all models of a process.
    """
    loaded = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if loaded:
        loaded.Init.num_persisted_parameters = loaded.Init.num_persisted_elements = 0
        changed = loaded.InsertPostInitMethodToModuleSubClasses
        nn.functional.linear = getattr(changed, "linear_bk", nn.functional.linear)


def import_deepspeed() -> Any:
    """Import DeepSpeed without its log and without its CPU shared-memory op, which would start a compiler at
    its first use.
    """
    import deepspeed.ops

    # it warns of a client optimizer and of each skipped step
    quiet_logger("DeepSpeed")
    # deprecated names that DeepSpeed still calls
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    return deepspeed
