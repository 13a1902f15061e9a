"""Builds a run from a Config: `read_inputs`, then `plan_parallel`, then `build`.

What can fail on one rank alone (files, downloads, memory) runs inside `raise_on_all`, so that all ranks fail
with the same error.
"""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import TimedOut, time_limit
from fmmeta.common.progress import Warn
from fmmeta.common.security import source_of
from fmmeta.common.text import as_stored, counted
from fmmeta.config.algorithms import find
from fmmeta.config.settings import Config
from fmmeta.learners.base import HFLearner
from fmmeta.learners.files import trained_with
from fmmeta.learners.forward_options import bf16_slowdown, check_attention
from fmmeta.learners.from_gguf import as_folder, is_gguf
from fmmeta.learners.lazy_weights import open_lazy_model
from fmmeta.learners.load import Description, describe, empty_learner, load_tokenizer, max_positions
from fmmeta.learners.stages import layer_seconds, plan_stages
from fmmeta.meta.algorithms import setup as rules
from fmmeta.meta.algorithms.baselines import prompts
from fmmeta.meta.parameters import MetaParameters
from fmmeta.parallel import deepspeed_config
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.layout import GroupCoordinates, Layout, ParallelPlan, unread_settings
from fmmeta.parallel.memory import (
    SizesAt,
    check_group_size,
    choose_group_size,
    count_params,
    largest_part,
    micro_batch_rows,
    rank_sizes,
)
from fmmeta.parallel.param_map import OuterMemory
from fmmeta.parallel.process_groups import (
    ProcessGroups,
    World,
    chosen_bf16,
    has_bf16,
    set_matmul_precision,
    suits_bf16,
)
from fmmeta.parallel.tensor_parallel import plan_of, sharing_ranks
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.create import check_finite, create_worker
from fmmeta.planning.machines import PROFILES
from fmmeta.reliability.checks import check_replicas
from fmmeta.tasks import augment
from fmmeta.tasks.batching import Batcher, pack
from fmmeta.tasks.collate import Collate, structure_of
from fmmeta.tasks.data.columns import Row
from fmmeta.tasks.data.encode import make_prompt
from fmmeta.tasks.data.splits import SPLITS, UsedSplits
from fmmeta.tasks.data.token_store import digest
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import (
    Draw,
    EpisodeTransform,
    TaskSource,
    stratum_shares,
    transformed,
)
from fmmeta.tasks.sources.load import Sources, load_sources
from fmmeta.tasks.sources.own import OwnSource, Tasks

TRIED = 8  # tasks, one of which a collate function is tried with
Notice = Callable[..., None]
"""Logs a line, or several as one."""


def settings_of(config: Config, fingerprint: str, **resolved: Any) -> dict[str, Any]:
    """What identifies a run: flags, fingerprint of the data, and `resolved` of RunInputs."""
    return as_stored({**config.as_dict(), "dataset_fingerprint": fingerprint, **resolved})


@dataclass
class RunInputs:
    """What a run reads before its weights: the model's description, the data and the DeepSpeed file."""

    description: Description
    tokenizer: Any
    sources: Sources
    reading: list[EpisodeTransform]  # of training episodes
    deepspeed: DeepSpeedSettings
    trained: list[UsedSplits]  # splits that the model was trained with before
    layer_costs: list[float] | None = None  # seconds of each layer, if stages are balanced by time
    collate: Collate | None = None  # makes the inputs of rows
    code: str = ""  # digest of what the user's kind of task runs
    dependent: str = ""  # see Description.dependent

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """What changes theta beside the flags and the data (conflicts.RESOLVED)."""
        return {
            **self.deepspeed.recorded(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "class_weights_fingerprint": digest(weights) if (weights := self.sources.class_weights) else "",
            "task_type_fingerprint": self.code,
        }

    def settings(self, config: Config) -> dict[str, Any]:
        """The settings that identify the run."""
        transforms = augment.fingerprint(config)
        return settings_of(
            config, self.sources.fingerprint, transforms_fingerprint=transforms, **self.resolved
        )

    def shape(self, config: Config) -> str:
        """The episodes in words, without shots where a function draws the rows."""
        if not isinstance(self.sources.train, OwnSource):
            return config.shape
        return f"{config.n_way}-way" if config.learner.of_classes else ""

    def prompts(self, method: str, **options: bool) -> list[EpisodeTransform]:
        """The transforms of a method of `fmmeta evaluate`."""
        return prompts(method, self.tokenizer, self.description.hf_config, **options)

    def parallel_plan(self, config: Config, group_size: int, device_type: str) -> ParallelPlan:
        """The plan of groups of `group_size`. Raises `UsageError`."""
        return ParallelPlan.of(config, self.deepspeed, group_size, device_type, self.layer_costs)


def local_model(model_name_or_path: str, world: World, notice: Notice, timeout_s: float) -> str:
    """The folder that a GGUF file is converted to, once per node; any other name unchanged.

    Raises `UsageError` on every rank. Collective: world.
    """
    if not is_gguf(model_name_or_path):
        return model_name_or_path
    return world.run_on_first_rank_of_node(
        f"model_name_or_path={model_name_or_path} is being converted",
        lambda: as_folder(model_name_or_path, notice),
        timeout_s,
    )


def read_deepspeed(config: Config, bf16: bool, world: World, notice: Notice) -> DeepSpeedSettings:
    """Read and check the DeepSpeed file. bf16: the precision if the file leaves it open. Raises `UsageError`.
    Collective: world.
    """
    with world.comm.raise_on_all("reading settings"):
        found = deepspeed_config.read(config.deepspeed, bf16, notice)
        return deepspeed_config.with_model_ranks(found, config.pipeline_stages, config.tensor_parallel_size)


def read_inputs(
    config: Config,
    world: World,
    notice: Notice,
    models: Sequence[str] = (),
    given_tokenizer: Any = None,
    rows: Sequence[Row] | Tasks | None = None,
    splits: Sequence[str] = SPLITS,
) -> RunInputs:
    """Read and check everything but the weights. Collective: world.

    models: those whose training splits count (default: that of `config`). given_tokenizer: instead of the
    checkpoint's. rows: of a data set that was given in Python, or its tasks. splits: see `load_sources`.
    """
    set_matmul_precision(config)
    deepspeed = read_deepspeed(config, False, world, notice)
    if chosen_bf16(config, deepspeed.zero_stage, world.comm, world.device):
        deepspeed = read_deepspeed(config, True, world, deepspeed_config.quiet)
    tensor_ranks = config.tensor_parallel_size

    def read() -> tuple[Description, Any, Sources, list[UsedSplits]]:
        description = describe(config)
        if tensor_ranks > 1:
            plan_of(description.hf_config, tensor_ranks)
        tokenizer = load_tokenizer(config, description, notice, given_tokenizer)
        if config.learner.writes:  # refuse what the tokenizer cannot do before any data are read
            make_prompt(config.prompt_template, tokenizer)
        trained = trained_with(models or [config.model_source])
        # encoding sets the truncation of a tokenizer; export needs it as it was
        sources = load_sources(config, copy.deepcopy(tokenizer), notice, trained, rows, splits)
        return replace(description, classes=len(sources.numbers)), tokenizer, sources, trained

    names = " ".join(config.dataset)
    description, tokenizer, sources, trained = world.run_on_first_rank_of_node(
        f"dataset={names} is being read and tokenised", read, config.prepare_timeout
    )
    with world.comm.raise_on_all("trying the transforms"):
        reading = tried_transforms(config, tokenizer, sources)
    notice(sources.summary)
    fingerprints = set(world.comm.gather(sources.fingerprint))
    if len(fingerprints) > 1:
        raise UsageError(
            f"dataset={names} is not the same on every rank ({len(fingerprints)} versions); share one copy"
        )
    with world.comm.raise_on_all("trying the collate function"):
        collate = tried_collate(config, sources.first, description.pad_token_id)
    check_same_inputs(collate, world)
    inputs = RunInputs(description, tokenizer, sources, reading, deepspeed, trained, collate=collate)
    spec = config.learner
    inputs.dependent = description.dependent(config)
    if own := [one for one in (spec.loss, None if spec.plain else spec.kind) if one]:
        inputs.code = digest([*map(source_of, own)])
    if config.pipeline_balance == "time":
        inputs.layer_costs = measure_layers(config, inputs, world)
    return inputs


COUNTED = 200  # tasks whose rows are counted


def with_outer_epochs(config: Config, train: TaskSource, notice: Notice) -> Config:
    """The settings with the outer steps that --outer_epochs gives for the training tasks; logs them.

    Raises `UsageError`. Local.
    """
    if config.outer_epochs is None:
        return config
    rows, tasks = train.num_rows(), Schedule(train.items, COUNTED, config.seed).meta_batch(0)
    sizes = [len(draw.support) + len(draw.query) for draw in map(train.draw, tasks)]
    each = config.tasks_per_step * sum(sizes) / len(sizes)
    steps = max(1, min(config.outer_steps, round(config.outer_epochs * rows / each)))
    epochs = f"{steps * each / rows:.1f} epochs of {counted(rows, 'training row')}, {each:.0f} of them a step"
    notice(
        f"outer_steps {steps}: {epochs} (outer_epochs={config.outer_epochs:g}, at most {config.outer_steps}"
        " steps)"
    )
    return config.but(outer_steps=steps)


def tried_transforms(config: Config, tokenizer: Any, sources: Sources) -> list[EpisodeTransform]:
    """The transforms that read training episodes, those of the user after a trial on one episode.

    Raises `UsageError` for one that fails or does not return. Local.
    """
    limit = config.load_timeout or config.prepare_timeout
    try:
        with time_limit(limit):
            reading = augment.reading(config, copy.deepcopy(tokenizer), sources.numbers)
            if config.example_transforms or config.episode_transforms:
                (task,) = Schedule(sources.first.items, 1, config.seed).meta_batch(0)
                transformed(sources.first.draw(task), [*sources.drawn, *reading])
            return reading
    except TimedOut:
        named = [
            f"{name}={' '.join(getattr(config, name))}" for name in augment.SETTINGS if getattr(config, name)
        ]
        flag = "load_timeout" if config.load_timeout else "prepare_timeout"
        raise UsageError(
            f"{' and '.join(named)} did not return the first episode within {flag}={limit:g} s; fix it, or"
            f" raise --{flag}"
        ) from None


def tried_collate(config: Config, source: TaskSource, pad_token_id: int) -> Collate | None:
    """The collate function with the structure of its inputs for the first episode that can be read.

    Raises `UsageError`. Local.
    """
    collate = Collate.of(config)
    if collate is None:
        return None
    for task in Schedule(source.items, TRIED, config.seed).meta_batch(0):
        try:
            rows = source.draw(task).episode().support
        except (UsageError, OSError):
            if config.on_bad_task == "raise":
                raise
            continue
        return replace(collate, structure=structure_of(*collate(rows, pad_token_id)))
    raise UsageError(f"dataset={' '.join(config.dataset)}: none of {TRIED} tasks can be read; fix the data")


def check_same_inputs(collate: Collate | None, world: World) -> None:
    """Raise `UsageError` on all ranks if one of them makes inputs with other keys. Collective: world."""
    if collate is None:
        return
    found = world.comm.gather(collate.structure)
    for rank, one in enumerate(found):
        if one != found[0]:
            raise UsageError(
                f"{collate.name} returns {found[0]} on rank 0 and {one} on rank {rank}, for the"
                " same rows; return the same keys on all ranks"
            )


def measure_layers(config: Config, inputs: RunInputs, world: World) -> list[float]:
    """Seconds of each layer in a micro-batch of the run's size, measured on rank 0, so that all ranks split
    alike. Collective: world.
    """

    def measured() -> list[float]:
        learner = open_lazy_model(config, inputs.description).learner
        plan_stages(learner, config.pipeline_stages)  # refuses a model that has no stages
        return layer_seconds(
            learner,
            micro_batch_rows(config),
            min(config.max_length, max_positions(inputs.description.hf_config) or config.max_length),
            world.device,
            inputs.deepspeed.bf16,
        )

    return world.comm.on_first("measuring the layers", measured)


def plan_parallel(config: Config, inputs: RunInputs, world: World, notice: Notice) -> ParallelPlan:
    """Choose the group size, check that the model fits, and log the layout. Collective: world.

    Raises `UsageError` on every rank. `world.split(plan.group_size, plan.engine == "deepspeed")` forms the
    groups.
    """
    given, world_size, device = config.group_size, world.launch.world_size, world.device.type
    with world.comm.raise_on_all("sizing the model"):
        check_attention(config, inputs.deepspeed.bf16, device)
        sizes_at = sizes_of(config, inputs, world.device)
    if config.elastic and given not in ("auto", str(world_size)):
        raise UsageError(
            f"group_size={given} with elastic=True: a launch is one group, and this one has {world_size}"
            " ranks; leave group_size out"
        )
    model_ranks = config.pipeline_stages * config.tensor_parallel_size
    if given == "auto" and not config.elastic:
        group_size, reason = choose_group_size(world, sizes_at, inputs.deepspeed, model_ranks)
        notice(reason)
        plan = inputs.parallel_plan(config, group_size, device)
    else:
        layout = Layout(world.launch, world_size if config.elastic else int(given))
        plan = inputs.parallel_plan(config, layout.group_size, device)
        check_group_size(world, sizes_at, inputs.deepspeed, plan.group_size, model_ranks)
    if inputs.dependent and plan.data > 1:
        raise UsageError(
            f"group_size={plan.group_size} shares the rows of a set, whose losses depend on each other"
            f" ({inputs.dependent}); use --group_size 1"
        )
    if plan.deepspeed != inputs.deepspeed:
        notice("ZeRO 0 in bf16 runs as ZeRO 1: DeepSpeed's ZeRO 0 adds up gradients in bf16")
    warned = world.nodes.check(plan.group_size)
    if config.task_sharding == "node" and len(set(world.nodes.sizes)) > 1:
        raise UsageError(
            "task_sharding=node needs as many ranks on every node, and here are "
            f"{', '.join(map(str, world.nodes.sizes))}; use global"
        )
    log_layout(config, inputs, plan, world, sizes_at(1).params, notice)
    if device == "cuda" or inputs.deepspeed.bf16:
        notice(f"precision: {precision_text(config, inputs.deepspeed, world.device)}")
    slow = slow_bf16(config, inputs.deepspeed, device) if world.launch.global_rank == 0 else ""
    unread = unread_settings(os.environ, config.but(bf16=inputs.deepspeed.bf16 or None), device == "cuda")
    for text in filter(None, [*world.warnings, warned, slow, *unread]):
        notice(Warn(text))
    return plan


def precision_text(config: Config, deepspeed: DeepSpeedSettings, device: torch.device) -> str:
    """The precision in words, with its price on GPUs that have a faster one."""
    products = torch.get_float32_matmul_precision()
    if deepspeed.bf16:
        return "bf16 weights and activations over fp32 shards"
    if products != "highest" or not has_bf16(device):
        return f"fp32, float32_matmul_precision={products}"
    use, rates = "use --bf16 or --float32_matmul_precision high", PROFILES["h100"]
    if not suits_bf16(config, deepspeed.zero_stage):
        use = f"the finite differences of algorithm={config.algorithm} need it"
    times = f"about 1/{rates.matmul_bf16 / rates.matmul_fp32:.0f} of bf16's rate on an H100"
    return f"fp32 without TF32: matrix products run at {times}; {use}"


def slow_bf16(config: Config, deepspeed: DeepSpeedSettings, device: str) -> str:
    """A warning where bf16 is chosen on CPUs whose matrix products take more than 1.5 times as long in it."""
    if not deepspeed.bf16 or device != "cpu" or (times := bf16_slowdown()) < 1.5:
        return ""
    of_file = deepspeed.file.get("bf16", {}).get("enabled", "auto") != "auto"
    fix = f'"bf16": {{"enabled": false}} in {config.deepspeed}' if of_file else "--bf16 false"
    return f"bf16 on this CPU: a matrix product takes {times:.0f} times as long as in fp32; use {fix}"


def log_layout(
    config: Config, inputs: RunInputs, plan: ParallelPlan, world: World, params: int, notice: Notice
) -> None:
    """Log groups, stages and adapters; at log level debug also where each rank is and what each link carries.

    params: trained parameters of the largest rank's part of the model.
    """
    layout, stage = Layout(world.launch, plan.group_size), plan.deepspeed.zero_stage
    notice(f"{layout} on {world.device.type}; {plan}")
    if plan.stages > 1:
        learner = empty_learner(config, inputs.description)
        notice(f"stages by {config.pipeline_balance}: {stages_text(plan, learner)}")
    if config.log_level == "debug":
        kinds = {
            "gradients": plan.data > 1 and stage < 3,
            "weights and gradients": plan.data > 1 and stage == 3,
            "updated weights": plan.data > 1 and stage in (1, 2),
            "hidden states between stages": plan.stages > 1,
            "activations of every layer": plan.tensor > 1,
        }
        inside = ", ".join(kind for kind, is_sent in kinds.items() if is_sent) or "nothing"
        shard_bytes = 4 * params / (plan.data if plan.engine == "deepspeed" and stage else 1)
        notice(
            f"{layout} on {counted(len(world.nodes.hosts), 'node')}",
            *world.nodes.map(plan.group_size, inside, shard_bytes, world.device.type),
        )
    if config.offload_outer and world.device.type == "cpu":
        notice("offload_outer changes nothing on CPUs: the ranks compute in host memory already")
    if config.lora_r:
        counts = count_params(empty_learner(config, inputs.description))
        notice(f"LoRA of rank {config.lora_r}: {counts.params:,} of {counts.all:,} parameters are trained")


def stages_text(plan: ParallelPlan, learner: HFLearner) -> str:
    """The layers of each stage, with their parameters and measured seconds."""
    shared_by = sharing_ranks(learner.hf.config, plan.tensor)
    cut, costs = plan_stages(learner, plan.stages, plan.layer_costs, shared_by), plan.layer_costs
    parts = []
    for (begin, end), size in zip(pairwise(cut.bounds), cut.sizes, strict=True):
        seconds = f", {1000 * sum(costs[begin:end]):.3g} ms" if costs else ""
        parts.append(f"layers {begin} to {end - 1} ({size:,} parameters{seconds})")
    return "; ".join(parts)


def sizes_of(config: Config, inputs: RunInputs, device: torch.device) -> SizesAt:
    """Sizes of the largest rank's part of the model and its micro-batches, by the number of data ranks.

    Raises `UsageError` for a model that cannot be split.
    """
    hf_config = inputs.description.hf_config
    counted = largest_part(config, empty_learner(config, inputs.description), hf_config, inputs.layer_costs)
    return lambda data: rank_sizes(config, hf_config, counted, device.type == "cpu", data)


@dataclass
class Runtime:
    """What a run computes with: a worker that holds theta, the rule's setup, the batcher.

    drawn: transforms of row numbers, of all episodes. prepared: transforms of their examples, the last ones.
    """

    worker: Worker
    meta_params: MetaParameters
    frozen: dict[str, Tensor]  # untrained tensors by name, on the rank that exports them; empty with LoRA
    setup: rules.Setup
    batcher: Batcher
    drawn: list[EpisodeTransform]
    prepared: list[EpisodeTransform]
    load_timeout: float | None = None

    def load(
        self,
        source: TaskSource,
        prompts: Sequence[EpisodeTransform] = (),
        reading: Sequence[EpisodeTransform] = (Draw.episode,),
    ) -> LoadEpisode:
        """Loads tasks of `source` as micro-batches of this rank. prompts: of the method."""
        transforms = [*self.drawn, *reading, *prompts, *self.prepared]
        return LoadEpisode(source, self.batcher, transforms, timeout_s=self.load_timeout)


def training_schedule(config: Config, inputs: RunInputs, layout: Layout) -> Schedule:
    """The tasks of every outer step. Raises `UsageError` if they cannot be divided over the nodes."""
    source, by_node = inputs.sources.train, config.task_sharding == "node"
    # a group that spans nodes counts as one node
    groups_per_node = max(1, layout.launch.local_world_size // layout.group_size)
    return Schedule(
        source.items,
        config.tasks_per_step,
        config.seed,
        shares=stratum_shares(config, source.items),
        nodes=layout.num_groups // groups_per_node if by_node else 1,
        sizes=source.size,
    )


def build(config: Config, inputs: RunInputs, plan: ParallelPlan, ranks: ProcessGroups) -> Runtime:
    """Read the weights, start the worker and make the replicas equal. Collective: world."""
    worker, head_names, frozen = create_worker(config, inputs.description, plan, ranks)
    memory = OuterMemory(worker.storage_device, config.offload_outer)
    theta = ranks.cross.broadcast_(memory.joined(worker.local_shards, worker.params.numel))
    with ranks.world.raise_on_all("looking at the weights"):
        for part in worker.params.fragments:
            check_finite(config, part.name, theta[part.here])
    worker.write(theta)
    check_replicas(ranks, theta, "although it was broadcast", worker.params.replicated)
    theta = theta if memory.offload else memory.store(theta)
    setup = rules.setup(config, worker, head_names, inputs.description.outputs(config), inputs.deepspeed.bf16)
    rules.refuse_jumps(config, worker, setup.hvp)
    if (spec := find(config.algorithm)).rule and not spec.evaluation:
        rules.refuse_still_head(config, setup.inner, worker)
    weights = inputs.sources.class_weights
    # the final table also tries twice as many steps
    samples = partial(augment.sample_support, config.support_batch_size, 2 * config.inner_steps)
    return Runtime(
        worker,
        MetaParameters.of(theta, setup.inner),
        frozen,
        setup,
        batcher(config, inputs, plan.coordinates(ranks.layout.group_rank)),
        inputs.sources.drawn,
        [*([partial(augment.weigh_classes, weights)] if weights else []), samples],
        config.load_timeout,
    )


def batcher(config: Config, inputs: RunInputs, coordinates: GroupCoordinates) -> Batcher:
    """Splits a task's rows over the data ranks of a group, in micro-batches for every stage."""
    return Batcher(
        inputs.description.pad_token_id,
        micro_batch_rows(config, coordinates.data),
        coordinates.data_rank,
        coordinates.data,
        partial(pack, length=config.max_length) if config.packing else None,
        config.max_tokens_per_micro_batch,
        inputs.collate,
        whole_sets=bool(inputs.dependent),
    )
