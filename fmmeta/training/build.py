"""Builds the parts of a run from a Config: sources, groups, model, worker.

What can fail on one rank alone (files, downloads, memory) runs inside `raise_on_all`, so that all ranks fail
with the same error.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.meta.algorithms import setup as rules
from fmmeta.meta.algorithms.in_context import prompted
from fmmeta.models.forward_options import check_attention
from fmmeta.models.layer_timing import layer_seconds
from fmmeta.models.lazy_weights import open_lazy_model
from fmmeta.models.load import Description, describe, empty_learner, load_tokenizer
from fmmeta.models.pipeline_split import plan_stages
from fmmeta.models.stored_settings import trained_with
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.layout import GroupCoordinates, Layout
from fmmeta.parallel.offload import OuterMemory
from fmmeta.parallel.process_groups import ProcessGroups, World
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.create import create_worker, group_coordinates
from fmmeta.parallel.workers.tensor_parallel import tensor_parallel_block
from fmmeta.planning.auto_group_size import SizesAt, check_group_size, choose_group_size
from fmmeta.planning.memory import rank_sizes
from fmmeta.planning.sizes import count_params, largest_part, stage_rows
from fmmeta.reliability.replicas import equal_replicas
from fmmeta.tasks.augment import Transforms
from fmmeta.tasks.batching import Batcher
from fmmeta.tasks.data.prompts import make_prompt
from fmmeta.tasks.data.used_splits import UsedSplits
from fmmeta.tasks.loader import LoadEpisode, Prompted
from fmmeta.tasks.packing import pack
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import TaskSource, shares
from fmmeta.tasks.sources.load import Sources, load_sources, stratum_weights

Notice = Callable[..., None]
"""Logs a line, or several as one."""


@dataclass
class Plan:
    """What is known before weights are read."""

    description: Description
    tokenizer: Any
    sources: Sources
    transforms: Transforms | None
    deepspeed: dict[str, Any]
    precision: deepspeed_config.DeepSpeedSettings
    trained: list[UsedSplits]  # what the model has been trained with before
    costs: list[float] | None = None  # seconds of each layer, where stages are balanced by them

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """What changes theta beside the flags and the data, for the run's settings (validate.RESOLVED)."""
        return {
            **deepspeed_config.recorded(self.deepspeed, self.precision),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "transforms_fingerprint": self.transforms.fingerprint if self.transforms else "",
        }


def plan(config: Config, world: World, notice: Notice, models: Sequence[str] = ()) -> Plan:
    """Read and check everything but the weights. `models`: those whose splits count (default: that of
    `config`).

    Collective: world.
    """
    with world.comm.raise_on_all("reading settings"):
        deepspeed, precision = deepspeed_config.read(config.deepspeed, config.bf16, notice)
        if config.pipeline_stages > 1:
            deepspeed, precision = deepspeed_config.for_pipeline(deepspeed, precision, notice)

    def read() -> tuple[Description, Any, Sources, list[UsedSplits]]:
        description = describe(config)
        if config.tensor_parallel_size > 1:
            deepspeed_config.for_tensor(precision)
            tensor_parallel_block(description.hf_config, config.tensor_parallel_size)
        tokenizer = load_tokenizer(config, description, notice)
        if config.task_type == "causal_lm":
            make_prompt(
                config.prompt_template, tokenizer
            )  # what the tokenizer cannot do is said before any data are read
        trained = trained_with(models or [config.model_name_or_path])
        # encoding sets the truncation of a tokenizer; export needs it as it was
        sources = load_sources(config, copy.deepcopy(tokenizer), notice, trained)
        return replace(description, classes=len(sources.train.classes)), tokenizer, sources, trained

    names = " ".join(config.dataset)
    description, tokenizer, sources, trained = world.run_on_first_rank_of_node(
        f"dataset={names} is being read and tokenised", read, config.prepare_timeout
    )
    with world.comm.raise_on_all("trying the transforms"):
        transforms = Transforms.of(config, copy.deepcopy(tokenizer))
        if transforms:
            transforms(sources.train.draw(Schedule(sources.train.items, 1, config.seed).meta_batch(0)[0]))
    notice(sources.summary)
    prints = set(world.comm.gather_bytes(sources.fingerprint.encode()))
    if len(prints) > 1:
        raise UsageError(
            f"dataset={names} is not the same on every rank ({len(prints)} versions); share one copy"
        )
    costs = measure(config, description, precision, world) if config.pipeline_balance == "time" else None
    return Plan(description, tokenizer, sources, transforms, deepspeed, precision, trained, costs)


def measure(
    config: Config, description: Description, precision: deepspeed_config.DeepSpeedSettings, world: World
) -> list[float]:
    """Seconds of each layer in a micro-batch of the run's size, as the first rank tries them, so that all cut
    alike. Collective: world.
    """
    seconds: list[float] = []
    with world.comm.raise_on_all("measuring the layers"):
        if world.launch.global_rank == 0:
            learner = open_lazy_model(config, description).learner
            plan_stages(learner, config.pipeline_stages)  # refuses what cannot be cut
            tokens = min(
                config.max_length,
                getattr(description.hf_config, "max_position_embeddings", config.max_length) - 2,
            )
            seconds = layer_seconds(learner, stage_rows(config), tokens, world.device, precision.bf16)
    return json.loads(world.comm.gather_bytes(json.dumps(seconds).encode())[0])


def form_groups(config: Config, plan: Plan, world: World, notice: Notice) -> ProcessGroups:
    """Choose the group size and make the groups. Collective: world."""
    with world.comm.raise_on_all("sizing the model"):
        check_attention(config, plan.precision.bf16, world.device.type)
        sizes_at = sizes_of(config, plan, world.device)
        if config.group_size != "auto":
            group_coordinates(config, Layout(world.launch, int(config.group_size)))
    model_ranks = config.pipeline_stages * config.tensor_parallel_size
    if config.elastic:
        group_size = world.launch.world_size
        if config.group_size not in ("auto", str(group_size)):
            raise UsageError(
                f"group_size={config.group_size} with elastic=True: a launch is one group, and this one has "
                f"{group_size} ranks; leave group_size out"
            )
        check_group_size(world, sizes_at, plan.precision, group_size, model_ranks)
    elif config.group_size == "auto":
        group_size, why = choose_group_size(world, sizes_at, plan.precision, model_ranks)
        notice(why)
    else:
        group_size = int(config.group_size)
        check_group_size(world, sizes_at, plan.precision, group_size, model_ranks)
    engine = engine_of(config, plan, group_size, world.device)
    warned = world.nodes.check(group_size)
    if config.task_sharding == "node" and len(set(world.nodes.sizes)) > 1:
        raise UsageError(
            "task_sharding=node needs as many ranks on every node, and here are "
            f"{', '.join(map(str, world.nodes.sizes))}; use global"
        )
    ranks = world.split(group_size, default_group=engine == "deepspeed")
    if config.pipeline_stages > 1:
        notice(balance_of(config, plan))
    stage = (
        f"DeepSpeed ZeRO {plan.precision.zero_stage}"
        if engine == "deepspeed"
        else "plain PyTorch, nothing to shard"
    )
    stage += f", {config.pipeline_stages} pipeline stages" if config.pipeline_stages > 1 else ""
    stage += f", {config.tensor_parallel_size} tensor ranks" if config.tensor_parallel_size > 1 else ""
    notice(f"{ranks.layout} on {world.device.type}; {stage}; {'bf16' if plan.precision.bf16 else 'fp32'}")
    for text in (*world.said, *([warned] if warned else [])):
        notice(text)
    if config.show_layout:
        shown = show_layout(config, plan, sizes_at(1).params, world, group_size, engine)
        notice(f"show_layout: {ranks.layout} on {len(world.nodes.hosts)} nodes", *shown)
    if config.offload_outer and world.device.type == "cpu":
        notice("offload_outer changes nothing on CPUs: the ranks' memory is the host's already")
    if config.lora_r:
        trained, frozen = count_params(empty_learner(config, plan.description))
        notice(f"LoRA of rank {config.lora_r}: {trained:,} of {trained + frozen:,} parameters are trained")
    return ranks


def show_layout(
    config: Config, plan: Plan, params: int, world: World, group_size: int, engine: str
) -> list[str]:
    """Who is where, and what travels on which link."""
    stage, stages, tensor = plan.precision.zero_stage, config.pipeline_stages, config.tensor_parallel_size
    kinds = ["gradients" if stage < 3 else "weights and gradients"] if group_size > stages * tensor else []
    kinds += ["updated weights"] if 0 < stage < 3 and kinds else []
    kinds += ["hidden states between stages"] if stages > 1 else []
    kinds += ["activations of every layer"] if tensor > 1 else []
    sharers = group_size // (stages * tensor) if engine == "deepspeed" and stage else 1
    return world.nodes.map(group_size, ", ".join(kinds) or "nothing", 4 * params / sharers, world.device.type)


def balance_of(config: Config, plan: Plan) -> str:
    """Which layers each stage gets, and how much that is."""
    cut = plan_stages(empty_learner(config, plan.description), config.pipeline_stages, plan.costs)
    parts = []
    for (begin, end), size in zip(pairwise(cut.bounds), cut.sizes, strict=True):
        taken = f", {1000 * sum(plan.costs[begin:end]):.3g} ms" if plan.costs else ""
        parts.append(f"layers {begin} to {end - 1} ({size:,} parameters{taken})")
    return f"stages by {config.pipeline_balance}: {'; '.join(parts)}"


def sizes_of(config: Config, plan: Plan, device: torch.device) -> SizesAt:
    """Sizes of the largest rank's part of the model and its micro-batches, by the number of data ranks.

    Raises `UsageError` for what cannot be cut.
    """
    hf_config = plan.description.hf_config
    counted = largest_part(config, empty_learner(config, plan.description), hf_config, plan.costs)
    return lambda data: rank_sizes(config, hf_config, counted, device.type == "cpu", data)


def engine_of(config: Config, plan: Plan, group_size: int, device: torch.device) -> str:
    """A group of one has nothing to shard: unless it offloads a GPU, plain PyTorch does the same for less."""
    if config.engine == "plain" and group_size > 1:
        raise UsageError(
            f"engine=plain holds a whole model on one rank, but group_size={group_size}; use engine=auto"
        )
    if config.engine == "auto":
        offloads = plan.precision.offload and device.type != "cpu"
        return "deepspeed" if group_size > 1 or offloads else "plain"
    return config.engine


@dataclass
class Parts:
    """A worker that holds theta, and what a run needs besides."""

    worker: Worker
    theta: Tensor
    frozen: dict[
        str, Tensor
    ]  # untrained tensors by name, on the rank that writes them, for export; none beside adapters
    setup: rules.Setup
    dealer: Batcher
    place: GroupCoordinates
    prompt: Prompted | None = None  # puts support sets before queries

    def load(self, source: TaskSource, transform: Transforms | None = None) -> LoadEpisode:
        """From a task of `source` to this rank's micro-batches."""
        return LoadEpisode(source, self.dealer, transform, self.setup.inner.head.classes, self.prompt)


def training_schedule(config: Config, plan: Plan, layout: Layout) -> Schedule:
    """The tasks of every outer step. Raises `UsageError` where they cannot be shared by the nodes."""
    source = plan.sources.train
    nodes = 1
    if config.task_sharding == "node":  # a group that spans nodes is as good as one
        nodes = layout.num_groups // max(1, layout.launch.local_world_size // layout.group_size)
    return Schedule(
        source.items,
        config.meta_batch_size * config.meta_accumulation_steps,
        config.seed,
        shares=shares(source.items, stratum_weights(config), config.mix_temperature),
        nodes=nodes,
        sizes=source.size,
    )


def build(config: Config, plan: Plan, ranks: ProcessGroups) -> Parts:
    """Read the weights and start the worker; the replicas are equal afterwards. Collective: world."""
    engine = engine_of(config, plan, ranks.layout.group_size, ranks.device)
    started = create_worker(
        config, plan.description, plan.deepspeed, plan.precision, engine, ranks, plan.costs
    )
    worker, place = started.worker, started.coordinates
    theta = ranks.cross.broadcast_(worker.read())
    worker.write(theta)
    equal_replicas(ranks, theta)
    theta = OuterMemory(ranks.device, config.offload_outer).store(theta)
    setup = rules.setup(
        config, worker, started.head_names, plan.description.outputs(config), plan.precision.bf16
    )
    prompt = None
    if find(config.algorithm).in_prompt:
        positions = getattr(plan.description.hf_config, "max_position_embeddings", None)
        prompt = partial(prompted, bos_token_id=plan.tokenizer.bos_token_id, positions=positions)
    return Parts(worker, theta, started.frozen, setup, dealer_of(config, plan, place), place, prompt)


def dealer_of(config: Config, plan: Plan, place: GroupCoordinates) -> Batcher:
    """Deals a task's rows over the data ranks of a group, in micro-batches small enough for every stage to
    work on one.
    """
    most = config.micro_batch_size
    if place.stages > 1:
        rows = config.most_shots * (config.most_classes or 1)
        most = min(most, max(1, -(-rows // (place.data * place.stages))))
    packing = partial(pack, length=config.max_length) if config.packing else None
    return Batcher(
        plan.description.hf_config.pad_token_id,
        most,
        place.data_rank,
        place.data,
        packing,
        config.max_tokens_per_micro_batch,
    )
