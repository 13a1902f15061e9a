"""Errors that a run on the CPU does not show, planted into fmmeta one by one: each must be noticed.

python -m tests.gpu.planted FILE NAME       train with the error NAME; write what was counted to FILE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmmeta.meta.inner_loop import InnerSteps
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.workers import zero
from fmmeta.parallel.workers.full_model import FullModelWorker, PlainWorker
from fmmeta.tasks.batching import MicroBatch
from tests.support.nccl_rules import CheckedGroup, replace


def after(owner: Any, name: str, act: Callable[[Any, Any], Any]) -> None:
    """Call `act` with the object and the result of its method; return what that gives, if anything."""

    def run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        changed = act(self, result)
        return result if changed is None else changed

    replace(owner, name, run)


def on_loss(act: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    return lambda: after(FullModelWorker, "_loss", lambda worker, loss: act(loss))


def on_step(act: Callable[[Any, Any], None]) -> Callable[[], None]:
    """act: gets the steps of a task and the numbers of the last one."""

    def run(steps: Any, stats: Any) -> None:
        act(steps, stats)

    return lambda: after(InnerSteps, "take", run)


def in_the_order_of_ranks(steps: Any, stats: Any) -> None:
    group = steps.worker.group
    for verb in (group.sum_, group.broadcast_)[:: -1 if group.rank else 1]:
        verb(torch.zeros(1, device=group.device))


def all_on_the_host() -> None:
    """The communicators take their tensors for the host's: nothing is copied to the device."""

    def on_the_host(original: Any, communicator: Any, *given: Any) -> None:
        backend, rank, size, _, *on_host = given
        original(communicator, backend, rank, size, torch.device("cpu"), *on_host)

    replace(Communicator, "__init__", on_the_host)


PLAIN, SHARDED = "plain bf16", "ZeRO 2 of 8"
ERRORS: dict[str, tuple[str, Callable[[], Any], str]] = {  # layout, how to plant it, words of the error
    "a tensor of the host in the loss": (PLAIN, on_loss(lambda loss: loss * torch.ones(1)), "same device"),
    "a tensor of another device in the loss": (
        PLAIN,
        on_loss(lambda loss: loss * torch.ones(1, device="cuda:1")),
        "same device",
    ),
    "noise from a generator of the host": (
        PLAIN,
        on_loss(lambda loss: loss * torch.rand(1, device=loss.device, generator=torch.Generator())),
        "Expected a 'cuda' device type for generator",
    ),
    "numpy of a tensor of the device": (
        PLAIN,
        on_step(lambda _, stats: stats.stats.numpy()),
        "can't convert cuda",
    ),
    "inputs that stay on the host": (
        PLAIN,
        lambda: replace(MicroBatch, "to", lambda original, batch, device: batch),
        "same device",
    ),
    "a buffer on the host under ZeRO 3": (
        "ZeRO 3 of 8",
        lambda: replace(zero, "move_buffers", lambda original, model, device: None),
        "same device",
    ),
    "a tensor of the host for NCCL": ("8 groups", all_on_the_host, "NCCL rule broken: host: rank 0 of cross"),
    "a sum that NCCL does not have": (
        SHARDED,
        on_step(lambda steps, _: steps.worker.group.sum_(torch.ones(1, dtype=torch.bool, device="cuda"))),
        "NCCL rule broken: dtype: rank 0 of group",
    ),
    "a tensor with gaps for NCCL": (
        SHARDED,
        on_step(lambda steps, _: steps.worker.group.broadcast_(torch.ones(4, 4, device="cuda")[:, 1])),
        "NCCL rule broken: dense: rank 0 of group",
    ),
    "collectives in another order": (
        "2 ranks, ZeRO 1",
        on_step(in_the_order_of_ranks),
        "NCCL rule broken: order: ",
    ),
}
# layout, how to plant it; step, kind and text of what is counted more often
COUNTED: dict[str, tuple[str, Callable[[], Any], str, str, str]] = {
    "a number of every inner step": (
        PLAIN,
        on_step(lambda _, stats: stats.stats.sum().item()),
        "inner step",
        "waits",
        "item < tests/gpu/planted.py:",
    ),
    "a decision of the host in every pass": (
        PLAIN,
        lambda: after(PlainWorker, "apply", lambda worker, bad: bool(bad) and None),
        "inner step",
        "waits",
        "item < tests/gpu/planted.py:",
    ),
    "batches that are not pinned": (
        PLAIN,
        lambda: replace(MicroBatch, "pin_memory", lambda original, batch: batch),
        "outer step",
        "copies",
        "to device pageable",
    ),
    "blocking copies of batches": (
        PLAIN,
        lambda: replace(
            MicroBatch, "to", lambda original, batch, device: batch._each(lambda t: t.to(device))
        ),
        "outer step",
        "copies",
        "to device pinned blocking",
    ),
    "weights that are kept on the host": (
        PLAIN,
        on_step(lambda steps, _: steps.worker.read().cpu()),
        "inner step",
        "copies",
        "to host pageable blocking",
    ),
    "synchronisation after every step": (
        PLAIN,
        on_step(lambda _, stats: torch.cuda.synchronize()),
        "inner step",
        "waits",
        "synchronize < tests/gpu/planted.py:",
    ),
    "a search for true values": (
        PLAIN,
        on_step(lambda _, stats: stats.stats[stats.stats > 0]),
        "inner step",
        "waits",
        "aten::nonzero < tests/gpu/planted.py:",
    ),
    "one more collective": (
        SHARDED,
        on_step(lambda steps, _: steps.worker.group.sum_(torch.zeros(3, device="cuda"))),
        "inner step",
        "collectives",
        "allreduce of group",
    ),
}


def printed(original: Any, group: Any, rule: str, text: str) -> None:
    """Print a broken rule at once: the other ranks wait for a rank that it has ended."""
    print(f"NCCL rule broken: {rule}: rank {group.rank()} of {group.kind}: {text}", flush=True)
    original(group, rule, text)


def main(file: str, name: str) -> None:
    from tests.gpu.budgets import measure

    layout, plant, *_ = {**ERRORS, **COUNTED}[name]
    plant()
    replace(CheckedGroup, "refuse", printed)
    measure(layout, Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
