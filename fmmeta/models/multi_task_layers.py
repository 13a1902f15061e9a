"""Adapters and heads with a task axis: one pass of the frozen base for rows of several tasks.

    y = W x + (alpha / r) B_t A_t x        LoRA, rows of task t
    y = W_t x + b_t                        a head, or another fully trained layer

The rows of a task are contiguous, the same number for each task: x [N B, ...] for N tasks; without padding
(models/unpadded.py) its tokens are contiguous, x [1, tokens, ...]. Callers pass the values by the names of
the parameters that they replace; the modules' parameters are neither read nor changed. The base is called
once per pass for all tasks, through the modules that an engine has hooks on, so that ZeRO 3 gathers it once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.models.learner import Learner
from fmmeta.models.lora import ADAPTER

Values = Mapping[str, Tensor]
"""Name of a trained parameter -> [N, *shape]."""
Counts = Callable[[Tensor], "list[int] | None"]
"""Tokens of each task in an input without padding; None for one that has rows."""


@dataclass(frozen=True)
class LoraLayer:
    """A frozen layer with an adapter; names of A [r, in] and B [out, r]."""

    layer: Any
    names: tuple[str, ...]

    def call(self, values: Values, counts: Counts, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        y = self.layer.base_layer(x, *rest, **named)
        down, up = (values[name] for name in self.names)
        low = per_task(x.to(down.dtype), down, None, counts(x))
        return y + per_task(low, up, None, counts(x)).view(y.shape).to(y.dtype) * self.layer.scaling[ADAPTER]


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer that is trained in full: names of its weight [out, in] and bias [out], if any."""

    layer: Any
    names: tuple[str, ...]

    def call(self, values: Values, counts: Counts, x: Tensor) -> Tensor:
        weight, *bias = (values[name] for name in self.names)
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
        self.layers: list[LoraLayer | LinearLayer] = []
        self.unpadded = learner.unpadded
        trained = [name for name, param in learner.named_parameters() if param.requires_grad]
        for name, module in learner.named_modules():
            adapter = tuple(f"{name}.lora_{part}.{ADAPTER}.weight" for part in "AB")
            direct = tuple(f"{name}.{part}" for part, _ in module.named_parameters(recurse=False))
            linear = type(module) is nn.Linear and ".lora_" not in name
            if hasattr(module, "base_layer") and set(adapter) <= set(trained):
                self.layers.append(LoraLayer(module, adapter))
            elif linear and direct and set(direct) <= set(trained):
                self.layers.append(LinearLayer(module, direct))
        self.names = [name for layer in self.layers for name in layer.names]
        missing = [name for name in trained if name not in self.names]
        if missing:
            raise UsageError(
                f"tasks_per_pass: {missing[0]} is trained, and belongs to no linear layer nor to an adapter"
                " of one; use --tasks_per_pass 1"
            )

    @contextmanager
    def of(self, values: Values) -> Iterator[None]:
        """Inside, the learner computes with `values`.

        Backward passes with recomputation belong inside, too.
        """
        counts = partial(self.unpadded.counts, tasks=len(next(iter(values.values()))))
        for each in self.layers:
            each.layer.forward = partial(each.call, values, counts)
        try:
            yield
        finally:
            for each in self.layers:
                del each.layer.forward
