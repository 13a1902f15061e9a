"""Splits the linear layers of a model over the tensor ranks of a group.

Shoeybi et al. 2019 (arXiv 1909.08053), section 3. The plan is that of transformers (`base_model_tp_plan` of a
configuration):

    colwise                  a rank holds some rows of the weight and computes some output features
    rowwise                  a rank holds some columns and has some input features; the products are summed
    colwise_gather_output    as colwise; the outputs of all ranks are concatenated
    rowwise_split_input      as rowwise; every rank has the complete input and takes its part
    replicated_with_grad_allreduce    complete on every rank, applied to the rank's attention heads (norms of
                             queries and keys): gradients are summed
    embedding_rowwise        transformers splits the table by tokens; here it is complete on every rank

All other weights are complete on every rank, and so are their gradients. Of a layer with LoRA,
y = W x + B A x, B is split as W where W is split by rows, and A where W is split by columns.

The four functions that autograd sees are each other's derivatives (`Exchange`):

                forward                 backward
    copied      x                       sum over the ranks
    summed      sum over the ranks      g
    gathered    concatenated parts      the part of this rank
    part_taken  the part of this rank   concatenated parts
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.learners.lora import ADAPTER
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.layout import GroupCoordinates
from fmmeta.parallel.process_groups import subgroup

COLUMN, ROW = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
PARTIAL, TABLE = "replicated_with_grad_allreduce", "embedding_rowwise"
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
OfRanks = Callable[[Tensor, Communicator], Tensor]


class Exchange(torch.autograd.Function):
    """One of the four functions of a tensor and the tensor ranks; its gradient is that of DERIVATIVE."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Communicator, function: OfRanks) -> Tensor:
        ctx.ranks, ctx.function = ranks, function
        return function(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return Exchange.apply(gradients[0], ctx.ranks, DERIVATIVE[ctx.function]), None, None


def copied(x: Tensor, ranks: Communicator) -> Tensor:
    """A complete input of layers that hold parts."""
    return x.data  # a view would refer to x, which refers to its copy (`copy_of`): neither would be freed


def summed(x: Tensor, ranks: Communicator) -> Tensor:
    """The complete output of which each rank has a summand. Collective: the tensor ranks."""
    return ranks.sum_(x.clone(memory_format=torch.contiguous_format))


def gathered(x: Tensor, ranks: Communicator) -> Tensor:
    """The complete features of which each rank has a part. Collective: the tensor ranks."""
    return torch.cat(ranks.all_gather(x), -1)


def part_taken(x: Tensor, ranks: Communicator) -> Tensor:
    """This rank's part of complete features."""
    return part_of(x, -1, ranks).contiguous()


DERIVATIVE = {copied: summed, summed: copied, gathered: part_taken, part_taken: gathered}


def copy_of(x: Any, ranks: Communicator) -> Tensor:
    """`copied` of a layer's input, one for all layers that read it: the gradients of queries, keys and values
    are added before one sum over the ranks.
    """
    made, needs_gradient = getattr(x, "tensor_copy", None), x.requires_grad and torch.is_grad_enabled()
    if x.is_leaf and needs_gradient:  # the graph of the copy would refer to x
        return Exchange.apply(x, ranks, copied)
    if made is None or made.requires_grad != needs_gradient:
        made = x.tensor_copy = Exchange.apply(x, ranks, copied)
    return made


def part_of(whole: Tensor, dim: int, ranks: Communicator) -> Tensor:
    """This rank's part of a complete tensor, a view."""
    length = whole.shape[dim] // ranks.size
    return whole.narrow(dim, ranks.rank * length, length)


class SplitLinear(nn.Linear):
    """This rank's part of the linear layer `whole`, whose parameters it takes over. kind: see the module."""

    def __init__(self, whole: nn.Linear, kind: str, ranks: Communicator) -> None:
        nn.Module.__init__(self)
        self.kind, self.ranks = kind, ranks
        self.weight, self.bias = whole.weight, whole.bias
        for param in (self.weight, self.bias) if kind in COLUMN else (self.weight,):
            if param is not None:
                dim = 0 if kind in COLUMN else 1
                param.data = part_of(param.data, dim, ranks).clone(memory_format=torch.contiguous_format)
        self.out_features, self.in_features = self.weight.shape

    def forward(self, input: Tensor) -> Tensor:
        if self.kind in COLUMN:
            y = F.linear(copy_of(input, self.ranks), self.weight, self.bias)
            return Exchange.apply(y, self.ranks, gathered) if self.kind == "colwise_gather_output" else y
        if self.kind == "rowwise_split_input":
            input = Exchange.apply(input, self.ranks, part_taken)
        y = Exchange.apply(F.linear(input, self.weight), self.ranks, summed)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class TensorRanks:
    """The ranks of this rank's tensor set and of its data set, by the names that DeepSpeed calls (`mpu`)."""

    tensor: Communicator
    data: Communicator

    @classmethod
    def of(cls, group: Communicator, coordinates: GroupCoordinates) -> "TensorRanks":
        """Collective: group."""
        ranks = [
            GroupCoordinates(rank, group.size, coordinates.stages, coordinates.tensor)
            for rank in range(group.size)
        ]
        return cls(
            own_subgroup(group, [(one.stage, one.data_rank) for one in ranks]),
            own_subgroup(group, [(one.stage, one.tensor_rank) for one in ranks]),
        )

    def get_model_parallel_group(self) -> Any:
        return self.tensor.backend

    def get_model_parallel_world_size(self) -> int:
        return self.tensor.size

    def get_model_parallel_rank(self) -> int:
        return self.tensor.rank

    def get_data_parallel_group(self) -> Any:
        return self.data.backend

    def get_data_parallel_world_size(self) -> int:
        return self.data.size

    def get_data_parallel_rank(self) -> int:
        return self.data.rank


def own_subgroup(group: Communicator, marks: Sequence[Any]) -> Communicator:
    """The communicator of the ranks that have the same mark as this one; marks: of each rank of the group.

    Collective: group.
    """
    made = [
        subgroup(group, [rank for rank, other in enumerate(marks) if other == mark])
        for mark in dict.fromkeys(marks)
    ]
    return next(one for one in made if one is not None)


def plan_of(hf_config: Any, size: int) -> dict[str, str]:
    """How each linear layer of the base model is split over `size` ranks: name pattern -> kind.

    Token embeddings are left out: they stay complete.

    Raises `UsageError` for a model that cannot be split into `size` equal parts.
    """
    flag, name = f"tensor_parallel_size={size}", hf_config.model_type
    plan = getattr(hf_config, "base_model_tp_plan", None)
    if not plan:
        raise UsageError(
            f"{flag}: transformers has no tensor-parallel plan for model_type={name}; use pipeline stages or"
            " ZeRO 3 for this one"
        )
    unknown = sorted(set(plan.values()) - {*COLUMN, *ROW, PARTIAL, TABLE})
    if unknown:
        raise UsageError(
            f"{flag}: the plan of model_type={name} has layers of kind {', '.join(unknown)}, which are not"
            " supported; use ZeRO 3 for this one"
        )
    for setting in DIVIDED:
        value = getattr(hf_config, setting, None)
        if value is not None and value % size:
            raise UsageError(f"{flag} does not divide {setting}={value} of the model; use a divisor of it")
    return {pattern: kind for pattern, kind in plan.items() if kind != TABLE}


def sharing_ranks(hf_config: Any, size: int) -> Callable[[str], int]:
    """A function of a parameter's name in a learner: over how many of `size` tensor ranks it is split."""
    if size == 1:
        return lambda name: 1
    plan = plan_of(hf_config, size)
    column, row = (
        "|".join(regex_of(pattern) for pattern, kind in plan.items() if kind in kinds)
        for kinds in (COLUMN, ROW)
    )
    split = re.compile(
        rf"(?:.*\.)?(?:(?:{column})(?:\.base_layer)?\.(?:weight|bias)|(?:{column})\.lora_B\..*"
        rf"|(?:{row})(?:\.base_layer)?\.weight|(?:{row})\.lora_A\..*)"
    )
    return lambda name: size if split.fullmatch(name) else 1


def regex_of(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"\d+")


def planned_layers(base: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and kind of each layer of `base` that the plan names."""
    kinds = [(re.compile(regex_of(pattern)), kind) for pattern, kind in plan.items()]
    for name, module in base.named_modules():
        for pattern, kind in kinds:
            if pattern.fullmatch(name):
                yield name, module, kind


def split_layers(base: nn.Module, ranks: Communicator) -> None:
    """Keep this rank's parts of the linear layers of a transformer without heads, and of their adapters.

    Parameters stay the same objects, with less data. base: one that `check_layers` accepts.
    """
    for name, module, kind in list(planned_layers(base, plan_of(base.config, ranks.size))):
        if kind == PARTIAL:
            for param in module.parameters():
                if param.requires_grad:
                    param.register_hook(lambda gradient: Exchange.apply(gradient, ranks, summed))
            continue
        parts = [name]
        if hasattr(module, "base_layer"):
            parts = [f"{name}.base_layer", f"{name}.lora_{'B' if kind in COLUMN else 'A'}.{ADAPTER}"]
        for part in parts:
            whole: Any = base.get_submodule(part)
            base.set_submodule(part, SplitLinear(whole, kind, ranks))


def check_layers(base: nn.Module, size: int) -> None:
    """Raise `UsageError` for a transformer that does not fit its plan.

    Each split layer must be linear. A parameter beside split layers must be named: else it is applied to some
    of the heads, and its gradient is that of these heads.
    """
    config: Any = base.config
    layers = list(planned_layers(base, plan_of(config, size)))
    for name, module, kind in layers:
        if kind != PARTIAL and not isinstance(getattr(module, "base_layer", module), nn.Linear):
            raise UsageError(
                f"tensor_parallel_size={size}: {name} is not linear ({type(module).__name__}), and only"
                " linear layers are split; use ZeRO 3 for this model"
            )
    split, complete = (
        {name.rpartition(".")[0] for name, _, kind in layers if kind in kinds}
        for kinds in (("colwise", "rowwise"), ("colwise_gather_output", "rowwise_split_input"))
    )
    blocks = tuple(f"{block}." for block in split - complete)
    named = tuple(f"{name}." for name, _, _ in layers)
    for name, _ in base.named_parameters():
        if name.startswith(blocks) and not name.startswith(named):
            raise UsageError(
                f"tensor_parallel_size={size}: the plan of model_type={config.model_type} does not name"
                f" {name}, a weight for split features; use ZeRO 3 for this model"
            )
