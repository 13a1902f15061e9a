"""Splits a learner into pipeline stages: a stage keeps consecutive layers, stand-ins replace the rest.

    stage 0          tokens -> embeddings -> layers -> hidden states
    in between       hidden states -> layers -> hidden states
    last stage       hidden states -> layers -> norm, pooling, head -> logits

The model's own forward runs on every stage, so masks, positions and pooling are transformers' own: where an
embedding was, the last stage's hidden states come in; a layer that lives elsewhere hands its input on.
Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.models.learner import Learner


@dataclass(frozen=True)
class Family:
    """Where the base model of a family keeps its parts. first: embeddings, the first of which starts the
    hidden states.
    """

    layers: str
    first: tuple[str, ...]
    last: tuple[str, ...]


LLAMA, BERT = (
    Family("layers", ("embed_tokens",), ("norm",)),
    Family("encoder.layer", ("embeddings",), ("pooler",)),
)
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gpt2": Family("h", ("wte", "wpe"), ("ln_f",)),
    "gpt_neox": Family("layers", ("embed_in",), ("final_layer_norm",)),
    "bert": BERT,
    "roberta": BERT,
}


class IdentityLayer(nn.Module):
    """Stands for a layer of another stage."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class HiddenStateInput(nn.Module):
    """Stands for the embeddings on later stages: hands out the hidden states that were received."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None, "hidden states are set before each forward"
        return hidden


class ZeroEmbedding(nn.Module):
    """Stands for further embeddings (GPT-2's positions) on later stages."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


class Stage(nn.Module):
    """One stage. Stages send (hidden [B, T, H], *inputs), the inputs of a micro-batch in the order of
    `input_names`.

    The hidden states are the only floating tensor, and come first: DeepSpeed needs a gradient for each
    floating tensor, and reuses a receive buffer per position whatever its type.
    """

    input_names: Sequence[str] = ("input_ids", "attention_mask")

    def __init__(self, learner: Learner, inlet: HiddenStateInput | None, last: bool) -> None:
        super().__init__()
        self.body: nn.Module = learner if last else base_model(learner)
        self.inlet, self.last = inlet, last
        self.want = "logits"
        # a stage without adapters: DeepSpeed wants something to train, and a gradient for what is
        # sent back
        trains = any(param.requires_grad for param in self.body.parameters())
        self.idle = None if trains else nn.Parameter(torch.zeros(1))

    def forward(self, tensors: Sequence[Tensor]) -> Any:
        if self.inlet is not None:
            self.inlet.hidden, *tensors = tensors
        inputs = dict(zip(self.input_names, tensors, strict=True))
        if self.last:
            return self._busy(self.body(**inputs, want=self.want))
        return self._busy(self.body(**inputs, use_cache=False).last_hidden_state), *tensors

    def _busy(self, output: Tensor) -> Tensor:
        return output if self.idle is None else output + 0 * self.idle


def base_model(learner: Learner) -> Any:
    """The transformer inside a learner, without heads."""
    return getattr(learner.hf, learner.hf.base_model_prefix, learner.hf)


def family_of(hf_config: Any) -> Family:
    if hf_config.model_type not in FAMILIES:
        raise UsageError(
            f"pipeline_stages: model_type={hf_config.model_type} is not cut into stages; use one of "
            f"{', '.join(FAMILIES)}, or --group_size with ZeRO 3 for this one"
        )
    return FAMILIES[hf_config.model_type]


@dataclass(frozen=True)
class StagePartition:
    """Which stage holds what: `bounds[s]` to `bounds[s + 1]` are the layers of stage s."""

    bounds: tuple[int, ...]
    owner: dict[
        str, int
    ]  # stage of every parameter and saved buffer, by name; a tied one belongs to the first stage
    sizes: tuple[int, ...]  # parameters held by each stage, copies of tied ones too
    trained: tuple[int, ...]  # those of them that are trained
    tied: str | None  # the parameter that the first and the last stage both train
    copied: str | None = None  # a frozen one that both hold: copies that never change need no tie


def plan_stages(learner: Learner, stages: int, costs: Sequence[float] | None = None) -> StagePartition:
    """Share out the layers so that the largest stage has as few parameters as possible, or as small a sum of
    `costs` (one number for each layer and the parts outside). Raises `UsageError`.
    """
    family = family_of(learner.hf.config)
    base = base_model(learner)
    layers = base.get_submodule(family.layers)
    count = len(layers)
    if stages > count:
        raise UsageError(
            f"pipeline_stages={stages} is above the {count} layers of the model; use {count} or fewer"
        )
    prefix = "hf." if base is learner.hf else f"hf.{learner.hf.base_model_prefix}."
    named = dict(learner.named_parameters(remove_duplicate=False))
    home = {
        name: layer_of(name.removeprefix(prefix), name.startswith(prefix), family, count)
        for name in learner.state_dict()
    }
    weights = [0] * count
    for name, param in named.items():
        weights[home[name]] += param.numel()
    bounds = balance(costs or weights, stages)
    stage_of = [stage for stage in range(stages) for _ in range(bounds[stage], bounds[stage + 1])]
    canonical = {id(param): name for name, param in reversed(named.items())}
    doubles = {name for name, param in named.items() if canonical[id(param)] != name}
    tied = sorted({canonical[id(named[name])] for name in doubles})
    strange = [
        name
        for name in doubles
        if {stage_of[home[name]], stage_of[home[canonical[id(named[name])]]]} != {0, stages - 1}
    ]
    if strange or len(tied) > 1:
        raise UsageError(
            f"pipeline_stages={stages}: the model ties {', '.join([*tied, *sorted(strange)])}, and only the"
            " first and the last layer may share one parameter; use --group_size with ZeRO 3"
        )
    owner = {name: stage_of[layer] for name, layer in home.items() if name not in doubles}
    sizes, trained = [0] * stages, [0] * stages
    for name, param in named.items():
        sizes[stage_of[home[name]]] += param.numel()
        trained[stage_of[home[name]]] += param.numel() if param.requires_grad else 0
    trains = bool(tied) and named[tied[0]].requires_grad
    double = tied[0] if tied else None
    return StagePartition(
        tuple(bounds), owner, tuple(sizes), tuple(trained), *((double, None) if trains else (None, double))
    )


def layer_of(path: str, in_base: bool, family: Family, count: int) -> int:
    """The layer beside which a tensor lives: embeddings beside the first one, norms and heads beside the
    last.
    """
    if in_base and path.startswith(f"{family.layers}."):
        return int(path[len(family.layers) + 1 :].split(".")[0])
    return 0 if in_base and path.split(".")[0] in family.first else count - 1


def balance(weights: Sequence[float], parts: int) -> list[int]:
    """Bounds of `parts` runs, none empty, whose heaviest is as light as can be; of equal cuts, the one with
    early bounds.
    """
    n = len(weights)
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    best: list[list[float]] = [[float("inf")] * (n + 1) for _ in range(parts + 1)]
    came: list[list[int]] = [[0] * (n + 1) for _ in range(parts + 1)]
    best[0][0] = 0
    for part in range(1, parts + 1):
        for end in range(part, n + 1):
            for begin in range(part - 1, end):
                heaviest = max(best[part - 1][begin], total[end] - total[begin])
                if heaviest < best[part][end]:
                    best[part][end], came[part][end] = heaviest, begin
    bounds = [n]
    for part in range(parts, 0, -1):
        bounds.append(came[part][bounds[-1]])
    return bounds[::-1]


def take_stage(learner: Learner, cut: StagePartition, stage: int) -> Stage:
    """Leave in `learner` what stage `stage` holds, and return it as a stage."""
    family, base = family_of(learner.hf.config), base_model(learner)
    last = len(cut.bounds) - 2
    layers: Any = base.get_submodule(family.layers)
    for i in range(len(layers)):
        if not cut.bounds[stage] <= i < cut.bounds[stage + 1]:
            layers[i] = IdentityLayer()
    inlet = None
    if stage > 0:
        inlet = HiddenStateInput()
        for number, name in enumerate(family.first):
            setattr(base, name, inlet if number == 0 else ZeroEmbedding())
    if stage < last:
        for name in family.last:
            if getattr(base, name) is not None:
                setattr(base, name, IdentityLayer())
    return Stage(learner, inlet, stage == last)
