"""The worker's operations in one process without DeepSpeed: groups of one, notebooks, `adapt`, `evaluate`.

Trainable parameters become views of one flat buffer (fp32), so that reading, writing and updating are single
operations on it. With bf16 the model keeps bf16 copies that `refresh` fills from the fp32 buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.param_map import Fragment, ParamMap
from fmmeta.parallel.workers.base import Update
from fmmeta.parallel.workers.full_model import FullModelWorker


class PlainWorker(FullModelWorker):
    """Holds the whole model. `groups`: parameter groups as `param_map.param_groups` returns them."""

    def __init__(
        self, model: nn.Module, groups: list[dict[str, Any]], device: torch.device, bf16: bool = False
    ) -> None:
        self.device, self.home, self.group = device, device, Communicator(None, 0, 1, device)
        if bf16:  # before they travel: a frozen weight needs no fp32 copy on the device
            for param in model.parameters():
                if not param.requires_grad:
                    param.data = param.data.to(torch.bfloat16)
        self.model = model.to(device)
        params = [param for group in groups for param in group["params"]]
        self.theta = torch.cat([param.detach().float().reshape(-1) for param in params])
        self.grad = torch.zeros_like(self.theta)
        self.params = _param_map(model, groups)
        if bf16:  # parameters only: rotary tables and the like lose too much
            for param in self.model.parameters():
                param.data = param.data.to(torch.bfloat16)
        self.working: list[Tensor] = []  # bf16 parameters; fp32 parameters are the buffer itself
        self.views = {"theta": self._views(self.theta, params), "grad": self._views(self.grad, params)}
        for param, theta, grad in zip(params, self.views["theta"], self.views["grad"], strict=True):
            if bf16:
                self.working.append(param)
            else:
                param.data, param.grad = theta, grad
        if device.type == "cpu" and not bf16:
            _add_met_rows_only(model)

    def read(self) -> Tensor:
        return self.theta.clone()

    def write(self, vector: Tensor) -> None:
        self.theta.copy_(vector)
        self.refresh()

    def refresh(self) -> None:
        if self.working:
            torch._foreach_copy_([param.data for param in self.working], self.views["theta"])

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()
        if self.working:
            used = [
                (view, p)
                for view, p in zip(self.views["grad"], self.working, strict=True)
                if p.grad is not None
            ]
            torch._foreach_add_([view for view, _ in used], [p.grad.float() for _, p in used])  # type: ignore
            for param in self.working:
                param.grad = None

    def held(self) -> list[tuple[Tensor, slice]]:
        return [(self.theta, slice(0, self.theta.numel()))]

    def apply(self, update: Update, agreed: bool) -> Tensor:
        bad = ~torch.isfinite(self.grad.sum())
        if agreed and (self.device.type != "cpu" or bad):  # to look would make a GPU wait
            self.grad.masked_fill_(bad, 0.0)
        update(self.theta, self.grad, slice(0, self.theta.numel()))
        self.grad.zero_()
        self.refresh()
        return bad

    @staticmethod
    def _views(flat: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
        parts = flat.split([param.numel() for param in params])
        return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]


def _add_met_rows_only(model: nn.Module) -> None:
    """Let a backward pass add to the gradient of an embedding where rows were met, and not the whole
    vocabulary's zeros too.

    The sums are the same. On GPUs sparse sums have no fixed order.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True


def _param_map(model: nn.Module, groups: list[dict[str, Any]]) -> ParamMap:
    names = {id(param): name for name, param in model.named_parameters()}
    fragments, slices, begin = [], {}, 0
    for group in groups:
        first = begin
        for param in group["params"]:
            fragments.append(Fragment(names[id(param)], tuple(param.shape), begin, 0, param.numel()))
            begin += param.numel()
        slices[group["name"]] = slice(first, begin)
    return ParamMap(tuple(fragments), begin, slices, replicated=True)
