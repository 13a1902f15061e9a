"""Splits a learner into pipeline stages: a stage keeps consecutive layers, placeholders replace the rest.

    stage 0          tokens -> embeddings -> layers -> hidden states
    in between       hidden states -> layers -> hidden states
    last stage       hidden states -> layers -> norm, pooling, head -> logits

The model's forward runs on every stage, so masks, positions and pooling are transformers' code. The
placeholder of the embeddings returns zeros, that of a layer its input, and that of the last layer before the
stage the hidden states of the previous stage. Nothing here communicates.

`layer_seconds` measures the time of each layer by running one of each kind on this machine: a stage of one
layer runs forward and backward with random weights, through the code that will train it; the time of a stage
without layers (masks, rotary tables) is subtracted, because every stage takes it. The first layer is measured
with the embeddings, the last one with norm, head and loss. The model itself stays on the meta device.
"""

import copy
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from fmmeta.common.errors import UsageError
from fmmeta.learners.base import HFLearner
from fmmeta.learners.unpadded import ARGUMENT
from fmmeta.tasks.batching import MicroBatch, map_tensors


@dataclass(frozen=True)
class Family:
    """Names of the parts of a base model. first: before the layers, embeddings first; last: after them."""

    layers: str
    first: tuple[str, ...]
    last: tuple[str, ...]


BERT = Family("encoder.layer", ("embeddings",), ("pooler",))
# of models for which transformers has no pipeline plan
FAMILIES = {"gpt2": Family("h", ("wte", "wpe"), ("ln_f",)), "bert": BERT, "roberta": BERT}


class IdentityLayer(nn.Module):
    """Replaces a layer of another stage."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class HiddenStateInput(nn.Module):
    """Replaces the last layer before a later stage: returns the hidden states that were received, once."""

    hidden: Any = None

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        received, self.hidden = self.hidden, None
        return kwargs[ARGUMENT].take(received) if ARGUMENT in kwargs else received


class ZeroEmbedding(nn.Module):
    """Replaces embeddings on later stages: zeros of the shape [B, T, H] of the hidden states to come."""

    def __init__(self, inlet: HiddenStateInput) -> None:
        super().__init__()
        self.inlet = (inlet,)  # not a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(self.inlet[0].hidden)


class Stage(nn.Module):
    """One stage. Stages send (hidden [B, T, H], *inputs), the inputs of a micro-batch in the order of
    `input_names`.

    The hidden states are the only floating tensor, and come first: DeepSpeed needs a gradient for each
    floating tensor, and reuses a receive buffer per position whatever its type.
    """

    input_names: Sequence[str] = ("input_ids", "attention_mask")

    def __init__(self, learner: HFLearner, inlet: HiddenStateInput | None, last: bool) -> None:
        super().__init__()
        self.body: nn.Module = learner if last else base_model(learner)
        self.inlet, self.last = inlet, last
        # DeepSpeed needs a trained parameter, and a gradient to send back, on a stage without adapters too
        trains = any(param.requires_grad for param in self.body.parameters())
        self.idle = None if trains else nn.Parameter(torch.zeros(1))

    @property
    def learner(self) -> Any:
        """Of the last stage."""
        return self.body

    @property
    def base(self) -> Any:
        """The transformer without heads, of which this stage has some layers."""
        return base_model(self.learner) if self.last else self.body

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        if self.inlet is not None:
            self.inlet.hidden, *tensors = tensors
        inputs = dict(zip(self.input_names, tensors, strict=True))
        if self.last:
            return self._busy(self.body(**inputs))
        return self._busy(self.body(**inputs, use_cache=False).last_hidden_state), *tensors

    def alone(self, inputs: dict[str, Tensor]) -> Tensor:
        """The output [B, T, D] for inputs of the model; received hidden states are made of the token ids."""
        self.input_names, ids = tuple(inputs), inputs["input_ids"]
        received = [torch.sin(ids[..., None] * torch.arange(1.0, self.base.config.hidden_size + 1))]
        output = self((*(received if self.inlet is not None else ()), *inputs.values()))
        return output if self.last else output[0]

    def _busy(self, output: Any) -> Any:
        idle = self.idle
        return output if idle is None else map_tensors(output, lambda tensor: tensor + 0 * idle)


def base_model(learner: HFLearner) -> Any:
    """The transformer inside a learner, without heads."""
    return getattr(learner.hf, learner.hf.base_model_prefix, learner.hf)


def family_of(hf_config: Any) -> Family:
    """The parts of a base model, by transformers' plan (`base_model_pp_plan`) or FAMILIES."""
    family = FAMILIES.get(hf_config.model_type)
    plan: list[str] = list(getattr(hf_config, "base_model_pp_plan", None) or ())
    if family is None and "layers" in plan:
        at = plan.index("layers")
        family = Family("layers", tuple(plan[:at]), tuple(plan[at + 1 :]))
    if family is None:
        raise UsageError(
            f"pipeline_stages: transformers has no pipeline plan for model_type={hf_config.model_type}, which"
            f" is none of {', '.join(FAMILIES)}; use --group_size with ZeRO 3 for this one"
        )
    return family


def check_parts(base: nn.Module, family: Family) -> None:
    """Raise `UsageError` for a base model with trained parts beside the layers and what stands before and
    after them, or with layers that share keys and values: a stage would compute without them.
    """
    config: Any = base.config
    root = family.layers.split(".")[0]
    parts = {name.split(".")[0] for name, _ in base.named_parameters()} - {*family.first, *family.last, root}
    missing = [] if hasattr(base, root) else [root]
    shared = ["num_kv_shared_layers"] if getattr(config, "num_kv_shared_layers", 0) else []
    if parts or missing or shared:
        raise UsageError(
            f"pipeline_stages: model_type={config.model_type} is not what its pipeline plan says"
            f" ({', '.join([*sorted(parts), *missing, *shared])}); use --group_size with ZeRO 3 for this one"
        )


@dataclass(frozen=True)
class StagePartition:
    """The parts of the model on each stage.

    bounds: layers `bounds[s]` to `bounds[s + 1]` are on stage s. owner: stage of every parameter and saved
    buffer by name; the first stage owns a tied one. sizes, trained: parameters of each stage, with copies of
    tied ones, and those of them that are trained. tied: the parameter that the first and the last stage both
    train. copied: a frozen one that both hold; its copies never change.
    """

    bounds: tuple[int, ...]
    owner: dict[str, int]
    sizes: tuple[int, ...]
    trained: tuple[int, ...]
    tied: str | None
    copied: str | None = None


def plan_stages(
    learner: HFLearner,
    stages: int,
    costs: Sequence[float] | None = None,
    shared_by: Callable[[str], int] = lambda name: 1,
) -> StagePartition:
    """Assign layers so that the largest stage has as few parameters as possible, or as small a sum of
    `costs` (one number per layer, with the parts outside the layers). Raises `UsageError`.

    shared_by: number of tensor ranks of a stage that a parameter is split over, by its name.
    """
    family, base = family_of(learner.hf.config), base_model(learner)
    check_parts(base, family)
    count = len(base.get_submodule(family.layers))
    if stages > count:
        raise UsageError(
            f"pipeline_stages={stages} is above the {count} layers of the model; use {count} or fewer"
        )
    prefix = "hf." if base is learner.hf else f"hf.{learner.hf.base_model_prefix}."
    layer = {
        name: layer_of(name.removeprefix(prefix), name.startswith(prefix), family, count)
        for name in learner.state_dict()
    }
    params = dict(learner.named_parameters(remove_duplicate=False))
    weights = [0] * count
    sizes = {name: param.numel() // shared_by(name) for name, param in params.items()}
    for name, size in sizes.items():
        weights[layer[name]] += size
    bounds = balance(costs or weights, stages)
    stage = {name: bisect_right(bounds, index) - 1 for name, index in layer.items()}
    first_name = {id(param): name for name, param in reversed(params.items())}
    copies = {name: first_name[id(param)] for name, param in params.items() if first_name[id(param)] != name}
    tied = sorted(set(copies.values()))
    inner = sorted(name for name, of in copies.items() if {stage[name], stage[of]} != {0, stages - 1})
    if inner or len(tied) > 1:
        raise UsageError(
            f"pipeline_stages={stages}: the model ties {', '.join([*tied, *inner])}, and only the"
            " first and the last layer may share one parameter; use --group_size with ZeRO 3"
        )
    held = [[name for name in params if stage[name] == each] for each in range(stages)]
    shared = tied[0] if tied else None
    trains = shared is not None and params[shared].requires_grad
    return StagePartition(
        bounds,
        {name: each for name, each in stage.items() if name not in copies},
        tuple(sum(sizes[name] for name in each) for each in held),
        tuple(sum(sizes[name] for name in each if params[name].requires_grad) for each in held),
        shared if trains else None,
        None if trains else shared,
    )


def layer_of(path: str, in_base: bool, family: Family, count: int) -> int:
    """The layer whose stage holds a tensor: embeddings go with the first layer, norms and heads with the
    last.
    """
    if in_base and path.startswith(f"{family.layers}."):
        return int(path[len(family.layers) + 1 :].split(".")[0])
    return 0 if in_base and path.split(".")[0] in family.first else count - 1


def balance(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Bounds of `parts` nonempty runs whose heaviest is as light as possible; the earliest of equals."""
    total = [0.0, *accumulate(weights)]

    @cache
    def lightest(parts: int, end: int) -> tuple[float, tuple[int, ...]]:
        """The heaviest of `parts` runs up to `end`, and their bounds."""
        if parts == 1:
            return total[end], (0, end)
        heaviest, begin = min(
            (max(lightest(parts - 1, begin)[0], total[end] - total[begin]), begin)
            for begin in range(parts - 1, end)
        )
        return heaviest, (*lightest(parts - 1, begin)[1], end)

    return lightest(parts, len(weights))[1]


def take_stage(learner: HFLearner, cut: StagePartition, stage: int) -> Stage:
    """Replace the parts of `learner` that other stages hold, and return it as a stage."""
    family, base = family_of(learner.hf.config), base_model(learner)
    first, last = stage == 0, stage == len(cut.bounds) - 2
    layers: Any = base.get_submodule(family.layers)
    for i in range(len(layers)):
        if not cut.bounds[stage] <= i < cut.bounds[stage + 1]:
            layers[i] = IdentityLayer()
    inlet = None if first else HiddenStateInput()
    if inlet is not None:
        layers[cut.bounds[stage] - 1] = inlet
        for name in family.first:
            embeds = any(isinstance(module, nn.Embedding) for module in getattr(base, name).modules())
            setattr(base, name, ZeroEmbedding(inlet) if embeds else IdentityLayer())
    for name in () if last else family.last:
        if getattr(base, name) is not None:
            setattr(base, name, IdentityLayer())
    return Stage(learner, inlet, last)


REPEATS = 5


def layer_seconds(
    learner: HFLearner, rows: int, tokens: int, device: torch.device, bf16: bool
) -> list[float]:
    """Median seconds of a forward and backward pass of `rows` x `tokens` through each layer and the
    parts outside the layers.

    learner: that of a LazyModel, parameters on the meta device and real buffers; it is not changed.
    """
    layers = list(base_model(learner).get_submodule(family_of(learner.hf.config).layers))
    last = len(layers) - 1
    ids = torch.randint(
        learner.hf.config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0)
    )
    targets = {"labels": torch.zeros(rows, dtype=torch.long) if learner.head_names else ids}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch = MicroBatch(inputs, targets, torch.full((rows,), 1 / rows)).to(device)

    def seconds(*bounds: int, stage: int = 1) -> float:
        made = take_stage(copy.deepcopy(learner), StagePartition(bounds, {}, (), (), None), stage)
        return time_stage(with_random_weights(made, device, bf16), batch, learner.hf.config.hidden_size)

    shared = seconds(0, 1, 1, last + 1)
    first = seconds(0, 1, last + 1, stage=0)
    kinds = [kind_of(learner, layer, i) for i, layer in enumerate(layers)]
    example = {kinds[i]: i for i in range(1, last)}
    middle = {kind: seconds(0, i, i + 1, last + 1) for kind, i in example.items()}
    measured = [first, *(middle[kind] for kind in kinds[1:last]), seconds(0, last, last + 1)]
    return [max(each - shared, 1e-9) for each in measured]


def kind_of(learner: HFLearner, layer: nn.Module, number: int) -> str:
    """Equal for layers that take equal time: modules and their sizes, trained parameters, reach of the
    attention.
    """
    types = getattr(learner.hf.config, "layer_types", None)
    return f"{layer} {[param.requires_grad for param in layer.parameters()]} {types and types[number]}"


def with_random_weights(stage: Stage, device: torch.device, bf16: bool) -> Stage:
    """Materialize the parameters of a stage with random values."""
    for param in stage.parameters():
        swap_tensors(
            param,
            nn.Parameter(torch.empty(param.shape, device=device).normal_(std=0.02), param.requires_grad),
        )
    stage = stage.to(device).train()
    return stage.bfloat16() if bf16 else stage


def time_stage(stage: Stage, batch: MicroBatch, width: int) -> float:
    """Median seconds of a forward and backward pass; `width`: of the hidden states."""
    dtype, ids, times = next(stage.parameters()).dtype, batch.inputs["input_ids"], []
    for _ in range(REPEATS + 1):
        hidden = torch.randn(*ids.shape, width, device=ids.device).to(dtype).requires_grad_()
        began = now(hidden)
        output = stage((*([hidden] if stage.inlet is not None else []), *batch.inputs.values()))
        if stage.last:
            stage.learner.losses(output, batch).weighted(batch.weights).loss.sum().backward()
        elif output[0].requires_grad:
            output[0].backward(torch.ones_like(output[0]))
        times.append(now(hidden) - began)
    return statistics.median(times[1:])  # the first one warms up


def now(tensor: Tensor) -> float:
    """Seconds of a clock, after the device of `tensor` has finished its work."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
