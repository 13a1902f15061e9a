"""This process is rank 0 of many: what the other ranks would send is made up.

Sums leave what this rank has, gathers repeat its part, broadcasts from others leave a tensor as it is. So the
numbers are not those of a run; devices, waits, copies, kernels, collectives and their bytes are. What asks
another process by the store waits for ever (--task_schedule dynamic, --max_staleness, --elastic).
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from tests.support import nccl_rules


class Done(dist.Work):
    """An operation that has ended."""

    def wait(self, *timeout: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


class LoneGroup:
    """Stands for gloo in a group of `size` ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any = None) -> None:
        self.rank, self.size = rank, size

    def __getattr__(self, name: str) -> Any:
        if name not in (*nccl_rules.COLLECTIVES, "send", "recv", "abort", "shutdown", "set_timeout"):
            raise AttributeError(name)
        return lambda *args, **kwargs: Done()

    def allgather(self, outputs: Any, inputs: Any, *_: Any) -> Done:
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(own)
        return Done()

    def _allgather_base(self, output: Any, own: Any, *_: Any) -> Done:
        output.view(self.size, -1).copy_(own.reshape(1, -1).expand(self.size, -1))
        return Done()

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> Done:
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return Done()

    def _reduce_scatter_base(self, output: Any, whole: Any, *_: Any) -> Done:
        output.view(-1).copy_(whole.view(self.size, -1)[self.rank])
        return Done()

    def reduce_scatter(self, outputs: Any, inputs: Any, *_: Any) -> Done:
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[self.rank])
        return Done()

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    _set_default_timeout = lambda self, timeout: None  # noqa: E731


def be_rank_0_of(size: int) -> None:
    """Let this process, which has the pretended GPU, be rank 0 of a launch of `size` ranks."""
    from fmmeta.parallel import network, process_groups
    from fmmeta.parallel.collectives import Communicator

    place = {"RANK": 0, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": size, "LOCAL_SIZE": size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    nccl_rules.gloo = LoneGroup  # type: ignore[assignment]
    nccl_rules.Ledger = lambda *_: None  # type: ignore[assignment, misc]
    dist.ProcessGroupGloo = LoneGroup  # type: ignore[assignment, misc]
    process_groups.connect_store = lambda launch: dist.HashStore()
    process_groups.refuse_shared_gpus = lambda comm, uuid: None
    network.raise_file_limit = lambda launch: None
    network.check_and_choose_interface = lambda store, launch: []
    Communicator.gather_bytes = lambda self, payload: [payload] * self.size  # type: ignore[method-assign]
