"""The worker's operations in one process without DeepSpeed: groups of one, notebooks, `adapt`, `evaluate`.

Trainable parameters become views of one flat buffer (fp32), so that reading, writing and updating are single
operations on it. With bf16 the model keeps bf16 copies that `refresh` fills from the fp32 buffer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.param_map import build_param_map, whole_parameters
from fmmeta.parallel.workers.base import Update
from fmmeta.parallel.workers.full_model import FullModelWorker


class PlainWorker(FullModelWorker):
    """Holds the whole model. `groups`: parameter groups as `param_map.param_groups` returns them."""

    def __init__(
        self, model: nn.Module, groups: list[dict[str, Any]], device: torch.device, bf16: bool = False
    ) -> None:
        self.device, self.storage_device, self.group = device, device, Communicator(None, 0, 1, device)
        if bf16:  # before the move to the device: frozen weights need no fp32 copy there
            for param in model.parameters():
                if not param.requires_grad:
                    param.data = param.data.to(torch.bfloat16)
        self.model = model.to(device)
        params = [param for group in groups for param in group["params"]]
        self.theta = torch.cat([param.detach().float().reshape(-1) for param in params])
        self.grad = torch.zeros_like(self.theta)
        names = {id(param): (name, tuple(param.shape)) for name, param in model.named_parameters()}
        group_names = [group["name"] for group in groups for _ in group["params"]]
        self.params = build_param_map(params, whole_parameters(params), group_names, names, replicated=True)
        if bf16:  # parameters only: buffers such as rotary tables would lose too much precision
            for param in self.model.parameters():
                param.data = param.data.to(torch.bfloat16)
        self.working = params if bf16 else []  # bf16 parameters; fp32 parameters are the buffer itself
        sizes = [param.numel() for param in params]
        self.theta_views, self.grad_views = (
            [part.view(param.shape) for part, param in zip(flat.split(sizes), params, strict=True)]
            for flat in (self.theta, self.grad)
        )
        if not bf16:
            for param, theta, grad in zip(params, self.theta_views, self.grad_views, strict=True):
                param.data, param.grad = theta, grad
        if device.type == "cpu" and not bf16:
            _use_sparse_embedding_gradients(model)

    def read(self) -> Tensor:
        return self.theta.clone()

    def write(self, vector: Tensor) -> None:
        self.theta.copy_(vector)
        self.refresh()

    def refresh(self) -> None:
        if self.working:
            torch._foreach_copy_([param.data for param in self.working], self.theta_views)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()
        if self.working:
            pairs = zip(self.grad_views, self.working, strict=True)
            used = [(view, param.grad.float()) for view, param in pairs if param.grad is not None]
            torch._foreach_add_([view for view, _ in used], [grad for _, grad in used])
            for param in self.working:
                param.grad = None

    def local_shards(self) -> list[tuple[Tensor, slice]]:
        return [(self.theta, slice(0, self.theta.numel()))]

    def apply(self, update: Update, skip_nonfinite_everywhere: bool) -> Tensor:
        bad = ~torch.isfinite(self.grad.sum())
        # reading `bad` would make the CPU wait for a GPU: there the mask is applied in any case
        if skip_nonfinite_everywhere and (self.device.type != "cpu" or bad):
            self.grad.masked_fill_(bad, 0.0)
        update(self.theta, self.grad, slice(0, self.theta.numel()))
        self.grad.zero_()
        self.refresh()
        return bad


def _use_sparse_embedding_gradients(model: nn.Module) -> None:
    """Let backward passes add only the rows that occur to an embedding's gradient, not those of the whole
    vocabulary.

    The sums are the same. CPU only: on GPUs sparse sums have no fixed order.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
