"""Loads one model in one process for `adapt` and `predict`: no groups, no DeepSpeed, no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.models.load import Description, describe, load_tokenizer
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.parallel_plan import ParallelPlan
from fmmeta.parallel.process_groups import ProcessGroups, World, pick_device
from fmmeta.parallel.workers.create import create_worker
from fmmeta.parallel.workers.plain import PlainWorker
from fmmeta.tasks.batching import Batcher, Episode, Example


@dataclass
class LoadedModel:
    """A model with all that feeding it takes."""

    config: Config
    description: Description
    tokenizer: Any
    ranks: ProcessGroups
    worker: PlainWorker
    head_names: tuple[str, ...]
    frozen: dict[str, Tensor]
    batcher: Batcher

    def deal(self, support: Sequence[Example], query: Sequence[Example]) -> Episode:
        return Episode(self.batcher.split(support), self.batcher.split(query))


def load_single_process(
    config: Config, progress: Progress, labels: Sequence[str] = (), bf16: bool = False
) -> LoadedModel:
    """Load the model that `config` names, its classes called `labels`. Raises `UsageError`."""
    description = describe(config)
    if labels:
        description = replace(description, labels=tuple(labels))
        description.hf_config.num_labels = len(labels)
        description.hf_config.id2label = dict(enumerate(labels))
        description.hf_config.label2id = {label: number for number, label in enumerate(labels)}
    tokenizer = load_tokenizer(config, description, progress.notice)
    ranks = World(Launch(), pick_device(Launch())).split(1, default_group=False)
    started = create_worker(
        config, description, ParallelPlan(1, "plain", deepspeed_config.read(None, bf16)), ranks
    )
    assert isinstance(started.worker, PlainWorker)
    batcher = Batcher(description.hf_config.pad_token_id, config.micro_batch_size)
    return LoadedModel(
        config, description, tokenizer, ranks, started.worker, started.head_names, started.frozen, batcher
    )


def class_logits(single: LoadedModel, examples: Sequence[Example]) -> Tensor:
    """Logits [Q, C] of examples in their order, whose labels are their places."""
    found: list[Tensor | None] = [None] * len(examples)
    dealt = single.batcher.split(
        [Example(example.input_ids, place) for place, example in enumerate(examples)]
    )
    for batch, logits in zip(dealt, single.worker.logits(dealt), strict=True):
        for place, row in zip(batch.labels.tolist(), logits.cpu(), strict=True):
            found[place] = row
    return torch.stack([row for row in found if row is not None])
