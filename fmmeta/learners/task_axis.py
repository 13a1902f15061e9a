"""Adapters and heads with a task axis: one pass of the frozen base for rows of several tasks.

    y = W x + (alpha / r) B_t A_t x        LoRA, rows of task t
    y = W_t x + b_t                        a head, or another fully trained layer

The rows of a task are contiguous, the same number for each task: x [N B, ...] for N tasks; without padding
(`Unpadded`) its tokens are contiguous, x [1, tokens, ...]. Callers pass the values by the names of the
parameters that they replace; the modules' parameters are neither read nor changed. The base is called once
per pass for all tasks, through the modules that an engine has hooks on, so that ZeRO 3 gathers it once.

`TaskAxis` trains them: as many rows for each task. `adapters_of_rows` answers rows of stored adapters.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.learners.base import HFLearner, Learner
from fmmeta.learners.lora import ADAPTER, PREFIX, stored_scaling
from fmmeta.learners.text_part import inside, outside

Values = Mapping[str, Tensor]
"""Name of a trained parameter -> [N, *shape]."""
Counts = Callable[[Tensor], "list[int] | None"]
"""Tokens of each task in an input without padding; None for one that has rows."""


def lora_forward(
    layer: Any, names: Sequence[str], values: Values, counts: Counts, x: Tensor, *rest: Any, **named: Any
) -> Tensor:
    """A frozen layer with an adapter; names of A [r, in] and B [out, r]."""
    y = layer.base_layer(x, *rest, **named)
    if layer.disable_adapters:
        return y
    down, up = (values[name] for name in names)
    low = per_task(x.to(down.dtype), down, None, counts(x))
    return y + per_task(low, up, None, counts(x)).view(y.shape).to(y.dtype) * layer.scaling[ADAPTER]


def linear_forward(layer: Any, names: Sequence[str], values: Values, counts: Counts, x: Tensor) -> Tensor:
    """A linear layer that is trained in full: names of its weight [out, in] and bias [out], if any."""
    weight, *bias = (values[name] for name in names)
    return per_task(x.to(weight.dtype), weight, *(bias or [None]), counts=counts(x))


def per_task(x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int] | None = None) -> Tensor:
    """x [N B, ..., in], weight [N, out, in], bias [N, out] -> [N B, ..., out].

    counts: tokens of each task, where x [1, tokens, in] has no padding.
    """
    if counts is not None:
        biases = [None] * len(weight) if bias is None else bias
        parts = zip(x[0].split(counts), weight, biases, strict=True)
        return torch.cat([F.linear(*part) for part in parts])[None]
    rows, turned = x.reshape(len(weight), -1, x.shape[-1]), weight.transpose(1, 2)
    y = torch.bmm(rows, turned) if bias is None else torch.baddbmm(bias[:, None], rows, turned)
    return y.view(*x.shape[:-1], weight.shape[1])


class TaskAxis:
    """The layers of a learner with trained parameters.

    Raises `UsageError` for trained parameters of other layers than linear ones.
    """

    def __init__(self, learner: Learner) -> None:
        self.layers: list[tuple[Any, tuple[str, ...], Callable[..., Tensor]]] = []  # with names, forward
        self.unpadded = learner.unpadded if isinstance(learner, HFLearner) else None
        trained = [name for name, param in learner.named_parameters() if param.requires_grad]
        for name, module in learner.named_modules():
            adapter = tuple(f"{name}.lora_{part}.{ADAPTER}.weight" for part in "AB")
            direct = tuple(f"{name}.{part}" for part, _ in module.named_parameters(recurse=False))
            linear = type(module) is nn.Linear and ".lora_" not in name
            of_layer = hasattr(module, "base_layer") and not hasattr(module, "parameter_name")
            if of_layer and set(adapter) <= set(trained):
                self.layers.append((module, adapter, lora_forward))
            elif linear and direct and set(direct) <= set(trained):
                self.layers.append((module, direct, linear_forward))
        self.names = [name for _, names, _ in self.layers for name in names]
        # a trained output layer must see as many tokens of each task
        outputs = learner.hf.get_output_embeddings() if isinstance(learner, HFLearner) else None
        self.needs_all_outputs = any(layer is outputs for layer, *_ in self.layers)
        if missing := [name for name in trained if name not in self.names]:
            raise UsageError(
                f"tasks_per_pass: {missing[0]} is trained, and belongs to no linear layer nor to an adapter"
                " of one; use --tasks_per_pass 1"
            )

    def of(self, values: Values) -> AbstractContextManager[None]:
        """Inside, the learner computes with `values`.

        Backward passes with recomputation belong inside, too.
        """
        tasks = len(next(iter(values.values())))
        counts: Counts = partial(self.unpadded.counts, tasks=tasks) if self.unpadded else lambda x: None
        return computing(
            (layer, partial(forward, layer, names, values, counts)) for layer, names, forward in self.layers
        )


@contextmanager
def computing(forwards: Iterable[tuple[Any, Callable[..., Tensor]]]) -> Iterator[None]:
    """Inside, each of these modules computes by the function beside it."""
    found = list(forwards)
    for module, forward in found:
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in found:
            del module.forward


@dataclass(frozen=True)
class StoredAdapter:
    """The weights of an adapter folder by module of a learner without adapters.

    pairs: A [r, in] and B [out, r], times the factor of the adapter's output. layers: weight and bias (None:
    none) of layers that were trained in full, the head among them.
    """

    pairs: dict[str, tuple[Tensor, Tensor]]
    layers: dict[str, tuple[Tensor, Tensor | None]]

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], head: Mapping[str, Tensor], settings: Mapping[str, Any], hf: Any
    ) -> "StoredAdapter":
        """tensors: of an adapter file. head: of HEAD_FILE. settings: of adapter_config.json. hf: the base.

        Raises `ValueError`, `ArithmeticError` or `LookupError`.
        """
        named = {
            f"hf.{inside(hf, name.removeprefix(PREFIX))}": one
            for name, one in tensors.items()
            if PREFIX in name
        }
        if len(named) < len(tensors) or not named:
            raise ValueError("its tensors are not those of LoRA adapters")
        pairs = {
            layer: (
                one,
                stored_scaling(settings, outside(hf, layer.removeprefix("hf.")), len(one))
                * named[f"{layer}.lora_B.weight"],
            )
            for layer, one in (
                (name.removesuffix(".lora_A.weight"), one)
                for name, one in named.items()
                if name.endswith(".lora_A.weight")
            )
        }
        direct = {name: one for name, one in named.items() if ".lora_" not in name} | dict(head)
        layers = {
            name.removesuffix(".weight"): (one, direct.get(f"{name.removesuffix('.weight')}.bias"))
            for name, one in direct.items()
            if name.endswith(".weight")
        }
        return cls(pairs, layers)

    def to(self, device: torch.device) -> "StoredAdapter":
        """The same on a device, in fp32."""

        def moved(tensors: Sequence[Tensor | None]) -> Any:
            return tuple(None if one is None else one.to(device, torch.float32) for one in tensors)

        return StoredAdapter(
            {name: moved(pair) for name, pair in self.pairs.items()},
            {name: moved(layer) for name, layer in self.layers.items()},
        )

    def misfit(self, learner: HFLearner) -> str:
        """What does not fit the layers of `learner`, in words; empty if everything fits."""
        modules = dict(learner.named_modules())
        for name, (down, up) in self.pairs.items():
            module = modules.get(name)
            shape = getattr(getattr(module, "weight", None), "shape", ())
            if isinstance(module, nn.Linear):  # whose weight may be packed
                shape = (module.out_features, module.in_features)
            wanted = {(up.shape[0], down.shape[1]), (down.shape[1], up.shape[0])}  # Conv1D is transposed
            if tuple(shape) not in wanted or down.shape[0] != up.shape[1]:
                return f"{name} has no layer of shape {[up.shape[0], down.shape[1]]}"
        for name, (own, _) in self.layers.items():
            weight = getattr(modules.get(name), "weight", None)
            if weight is None or weight.shape[1:] != own.shape[1:]:
                return f"{name} has no layer with {list(own.shape[1:])} inputs"
        tensors = [one for each in (*self.pairs.values(), *self.layers.values()) for one in each]
        return "" if all(one is None or bool(one.isfinite().all()) for one in tensors) else "it has NaNs"


def adapters_of_rows(
    learner: HFLearner, adapters: Sequence[StoredAdapter], runs: Sequence[int]
) -> AbstractContextManager[None]:
    """Inside, the first runs[0] rows of an input use adapters[0], the next runs[1] rows adapters[1], ...

    The learner has no adapters itself, so that these may have any ranks and layers. A head with fewer classes
    than another one gives -inf for the classes that it lacks. Without gradients.
    """
    counts = partial(learner.unpadded.counts, tasks=len(runs), runs=runs)
    forwards = list[tuple[Any, Callable[..., Tensor]]]()
    for kind, forward in (("pairs", forward_pairs), ("layers", forward_layers)):
        for name in dict.fromkeys(name for one in adapters for name in getattr(one, kind)):
            module, own = learner.get_submodule(name), [getattr(one, kind).get(name) for one in adapters]
            forwards.append((module, partial(forward, module, own, counts, runs)))
    return computing(forwards)


def forward_pairs(
    module: Any, pairs: Sequence[Any], counts: Counts, runs: Sequence[int], x: Tensor
) -> Tensor:
    """A layer with one adapter, or None, for each run of rows."""
    y, found = type(module).forward(module, x), counts(x)
    dim, sizes = (0, list(runs)) if found is None else (1, found)
    parts = zip(x.split(sizes, dim), y.split(sizes, dim), pairs, strict=True)
    return torch.cat(
        [
            of_y if pair is None else of_y + F.linear(F.linear(of_x.to(pair[0].dtype), pair[0]), pair[1])
            for of_x, of_y, pair in parts
        ],
        dim,
    )


def forward_layers(
    module: Any, layers: Sequence[Any], counts: Counts, runs: Sequence[int], x: Tensor
) -> Tensor:
    """A linear layer with separate weights, or the model's (None), for each run of rows."""
    found = counts(x)
    dim, sizes = (0, list(runs)) if found is None else (1, found)
    outputs = [
        type(module).forward(module, of_x) if layer is None else F.linear(of_x.to(layer[0].dtype), *layer)
        for of_x, layer in zip(x.split(sizes, dim), layers, strict=True)
    ]
    width = max(each.shape[-1] for each in outputs)
    return torch.cat([F.pad(each, (0, width - each.shape[-1]), value=-math.inf) for each in outputs], dim)
