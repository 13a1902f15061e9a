"""Checks of training: equal replicas, spikes of the loss, and inner loops that raise the loss."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from fmmeta.common.errors import MachineFault
from fmmeta.common.text import counted
from fmmeta.config.settings import Config
from fmmeta.meta.inner_loop import InnerResult
from fmmeta.parallel.process_groups import ProcessGroups
from fmmeta.parallel.workers.base import PassStats, Worker
from fmmeta.tasks.batching import MicroBatch, batches_of_step


def hash_vector(vector: Tensor) -> int:
    """A 64-bit hash of the bits of an fp32 vector [S] and their positions, computed on its device."""
    sums = list[Tensor]()
    for number, part in enumerate(vector.split(2**20)):
        bits = part.contiguous().view(torch.int32).long()
        places = torch.arange(1, len(bits) + 1, device=bits.device, dtype=torch.int64)
        sums.append((bits * (places * 2654435761 + number)).sum())
    total = 0
    for number in torch.stack(sums).tolist():  # one read
        total = (total * 1000003 + number) & (2**64 - 1)
    return total


def check_replicas(ranks: ProcessGroups, theta: Tensor, when: str, whole: bool = False) -> None:
    """Check that ranks with the same shard hold the same bits. when: for the message. whole: every rank of a
    group holds the whole model (ZeRO 0), so that those of a group are compared too: they are summed over
    different communicators.

    Raises `MachineFault` on all ranks, with the ranks that differ from the majority; all of a shard's ranks
    if there is no majority. Collective: all groups.
    """
    size = 1 if whole else ranks.layout.group_size
    if ranks.all_groups.size == size:
        return
    hashes = ranks.all_groups.gather(hash_vector(theta))
    odd = []
    for group_rank in range(size):
        (majority, count), *others = Counter(hashes[group_rank::size]).most_common()
        tied = bool(others) and others[0][1] == count
        odd += [rank for rank in range(group_rank, len(hashes), size) if tied or hashes[rank] != majority]
    if odd:
        raise MachineFault(
            f"theta is not the same on all ranks that hold it {when} (ranks"
            f" {', '.join(map(str, sorted(odd)))} differ); nothing of it is saved; check their machines, then"
            " run the same command again"
        )


LEAST_RISE = 1e-3  # of a loss, that is warned of
MOST_TASKS = 4  # whose losses are measured for the warning


class SupportLosses:
    """Losses of support sets before and after their inner loops: those of the first few tasks, for a warning
    if the inner loop raises them.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.pairs = config, list[tuple[float, float]]()

    def add(self, worker: Worker, learned: InnerResult, support: Sequence[MicroBatch]) -> None:
        """Count a task whose phi the worker holds, by one more pass over the rows of the first inner step, or
        of a document by the mean of its chunks before their steps; none once there are enough. Collective:
        group.
        """
        if learned.passes and len(self.pairs) < MOST_TASKS:
            ordered = self.config.learner.ordered  # a first chunk that is forgotten is no failure
            after = PassStats.mean(learned.passes) if ordered else worker.forward(batches_of_step(support, 0))
            self.pairs.append((learned.passes[0].loss, after.loss))

    def warning(self) -> str:
        """A message with a lower rate if the mean loss rises or is not finite; "" otherwise."""
        if not self.pairs:
            return ""
        before, after = (sum(losses) / len(losses) for losses in zip(*self.pairs, strict=True))
        return rising_loss(self.config, before, after, self.config.inner_steps, len(self.pairs))


def rising_loss(config: Config, before: float, after: float, steps: int, tasks: int = 1) -> str:
    """A message with a lower rate if `steps` inner steps raise the loss on the support set, or make it not
    finite; "" otherwise. before, after: means over `tasks` tasks.
    """
    if after <= before + LEAST_RISE * abs(before):
        return ""
    return (
        f"inner_lr={config.inner_lr:g}: the loss on the support set rises from {before:.3g} to"
        f" {after:.3g} in the inner loop ({counted(steps, 'step')} of"
        f" {config.inner_optimizer}{f', mean of {tasks} tasks' if tasks > 1 else ''}); try --inner_lr"
        f" {config.inner_lr / 10:g}"
    )


FAR, DECAY, LEAST = 6.0, 0.95, 20  # of spikes: deviations, of the running mean, losses before the first one


class Spikes:
    """Marks losses more than FAR deviations above a running mean. A function of the losses alone."""

    def __init__(self, state: list[float] | None = None) -> None:
        self.mean, self.square, self.count = state or (0.0, 0.0, 0)

    @property
    def state(self) -> list[float]:
        """What a checkpoint stores."""
        return [self.mean, self.square, self.count]

    def mark(self, loss: float) -> float | None:
        """Deviations above the mean if the loss is a spike, else None.

        A spike enters the running mean as a loss FAR deviations above it. No loss is a spike before LEAST
        losses were seen.
        """
        if not math.isfinite(loss):
            return None
        deviation = math.sqrt(max(self.square, 1e-12))
        off = (loss - self.mean) / deviation
        spike = self.count >= LEAST and off > FAR
        gap = min(off, FAR) * deviation if self.count >= LEAST else loss - self.mean
        weight = max(1 - DECAY, 1 / (self.count + 1))
        self.mean += weight * gap
        self.square += weight * (gap * gap * (1 - weight) - self.square)
        self.count += 1
        return round(off, 2) if spike else None
