"""From a Config to the parts of a run: sources, groups, model, worker. The one place where the rooms are wired together.

Whatever can fail for one rank alone (files, downloads, memory) runs inside `together`, so that all ranks fail as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fmmeta.config import Config, UsageError
from fmmeta.meta.inner import InnerLoop
from fmmeta.models.forward import check_attention
from fmmeta.models.learner import Learner
from fmmeta.models.load import Description, describe, empty_learner, load_learner, load_tokenizer
from fmmeta.parallel import ds_config, memory
from fmmeta.parallel.communicator import Ranks, World
from fmmeta.parallel.home import Home
from fmmeta.parallel.layout import Layout
from fmmeta.parallel.plain import PlainWorker
from fmmeta.parallel.shards import param_groups
from fmmeta.parallel.worker import Worker
from fmmeta.tasks.batch import Dealer
from fmmeta.tasks.load import Sources, load_sources, stratum_weights
from fmmeta.tasks.loader import Load
from fmmeta.tasks.pack import pack
from fmmeta.tasks.prompts import make_prompt
from fmmeta.tasks.schedule import Schedule
from fmmeta.tasks.source import TaskSource, shares
from fmmeta.tasks.transforms import Transforms

Notice = Callable[[str], None]


@dataclass
class Plan:
    """What is known before weights are read."""

    description: Description
    tokenizer: Any
    sources: Sources
    transforms: Transforms | None
    deepspeed: dict[str, Any]
    precision: ds_config.Precision


def plan(config: Config, world: World, notice: Notice) -> Plan:
    """Read and check everything but the weights. Collective: world."""
    with world.comm.together("reading settings"):
        deepspeed, precision = ds_config.read(config.deepspeed, config.bf16, notice)

    def read() -> tuple[Description, Any, Sources]:
        description = describe(config)
        tokenizer = load_tokenizer(config, description, notice)
        if config.task_type == "causal_lm":
            make_prompt(config.prompt_template, tokenizer)  # what the tokenizer cannot do is said before any data are read
        return description, tokenizer, load_sources(config, tokenizer, notice)

    names = " ".join(config.dataset)
    description, tokenizer, sources = world.first_on_node(
        f"dataset={names} is being read and tokenised", read, config.prepare_timeout
    )
    with world.comm.together("trying the transforms"):
        transforms = Transforms.of(config, tokenizer)
        if transforms:
            transforms(sources.train.draw(Schedule(sources.train.items, 1, config.seed).meta_batch(0)[0]))
    notice(sources.summary)
    prints = set(world.comm.gather_bytes(sources.fingerprint.encode()))
    if len(prints) > 1:
        raise UsageError(f"dataset={names} is not the same on every rank ({len(prints)} versions); share one copy")
    return Plan(description, tokenizer, sources, transforms, deepspeed, precision)


def form_groups(config: Config, plan: Plan, world: World, notice: Notice) -> Ranks:
    """Choose the group size and make the groups. Collective: world."""
    sizes = None
    with world.comm.together("sizing the model"):
        check_attention(config, plan.precision.bf16, world.device.type)
        learner = empty_learner(config, plan.description)
        trained = sum(param.numel() for param in learner.parameters() if param.requires_grad)
        frozen = sum(param.numel() for param in learner.parameters() if not param.requires_grad)
        rows = min(config.micro_batch_size, config.most_shots * (config.most_classes or 1))
        causal = config.task_type == "causal_lm"
        sizes = memory.Sizes.of(plan.description.hf_config, trained, frozen, rows, config.max_length, causal,
                                config.gradient_checkpointing,
                                config.offload_outer and world.device.type != "cpu")  # fmt: skip
        if config.group_size != "auto":
            Layout(world.launch, int(config.group_size))
    if config.group_size == "auto":
        group_size, why = memory.choose_group_size(world, sizes, plan.precision)
        notice(why)
    else:
        group_size = int(config.group_size)
    engine = engine_of(config, plan, group_size, world.device)
    ranks = world.split(group_size, default_group=engine == "deepspeed")
    stage = f"DeepSpeed ZeRO {plan.precision.zero_stage}" if engine == "deepspeed" else "plain PyTorch, nothing to shard"
    notice(f"{ranks.layout} on {world.device.type}; {stage}; {'bf16' if plan.precision.bf16 else 'fp32'}")
    if config.offload_outer and world.device.type == "cpu":
        notice("offload_outer changes nothing on CPUs: the ranks' memory is the host's already")
    if config.lora_r:
        notice(f"LoRA of rank {config.lora_r}: {sizes.params:,} of {sizes.params + sizes.frozen:,} parameters are trained")
    return ranks


def engine_of(config: Config, plan: Plan, group_size: int, device: torch.device) -> str:
    """A group of one has nothing to shard: unless it offloads a GPU, plain PyTorch does the same for less."""
    if config.engine == "plain" and group_size > 1:
        raise UsageError(f"engine=plain holds a whole model on one rank, but group_size={group_size}; use engine=auto")
    if config.engine == "auto":
        offloads = plan.precision.offload and device.type != "cpu"
        return "deepspeed" if group_size > 1 or offloads else "plain"
    return config.engine


@dataclass
class Parts:
    """A worker that holds theta, and what a run needs besides."""

    worker: Worker
    theta: Tensor
    frozen: dict[str, Tensor]  # untrained tensors by name, on the first rank, for export; none beside adapters
    inner: InnerLoop
    dealer: Dealer

    def load(self, source: TaskSource, transform: Transforms | None = None) -> Load:
        """From a task of `source` to this rank's micro-batches."""
        return Load(source, self.dealer, transform, self.inner.classes)


def training_schedule(config: Config, plan: Plan, layout: Layout) -> Schedule:
    """The tasks of every outer step. Raises `UsageError` where they cannot be shared by the nodes."""
    source = plan.sources.train
    nodes = 1
    if config.task_sharding == "node":  # a group that spans nodes is as good as one
        nodes = layout.num_groups // max(1, layout.launch.local_world_size // layout.group_size)
    return Schedule(source.items, config.meta_batch_size * config.meta_accumulation_steps, config.seed,
                    shares=shares(source.items, stratum_weights(config), config.mix_temperature), nodes=nodes,
                    sizes=source.size)  # fmt: skip


def build(config: Config, plan: Plan, ranks: Ranks) -> Parts:
    """Read the weights and start the worker; the replicas are equal afterwards. Collective: world."""
    with ranks.world.together("loading the model"):
        learner = load_learner(config, plan.description)
        per_task = learner.head_names if config.head_init != "learned" else ()
        groups = param_groups(learner, per_task, config.weight_decay > 0)
    still = untrained(learner)
    check_equal(ranks, fingerprint_of(still), "frozen weights and buffers")
    frozen = {name: value.clone() for name, value in still.items()} if ranks.first and not config.lora_r else {}
    del still  # an engine gives the frozen weights other storage
    layout = ranks.layout
    if engine_of(config, plan, layout.group_size, ranks.device) == "plain":
        worker: Worker = PlainWorker(learner, groups, ranks.device, plan.precision.bf16)
    else:
        from fmmeta.parallel.engine import DeepSpeedWorker

        filled = ds_config.complete(plan.deepspeed, plan.precision, getattr(plan.description.hf_config, "hidden_size", 768))
        worker = DeepSpeedWorker(learner, groups, filled, ranks.group)
    theta = ranks.cross.broadcast_(worker.read())
    worker.write(theta)
    equal_replicas(ranks, theta)
    theta = Home(ranks.device, config.offload_outer).keep(theta)
    inner = InnerLoop(config.inner_steps, config.inner_lr, config.head_init, learner.head_names, config.most_classes)
    pad = plan.tokenizer.pad_token_id
    packing = partial(pack, length=config.max_length) if config.packing else None
    dealer = Dealer(plan.description.hf_config.pad_token_id if pad is None else pad, config.micro_batch_size,
                    layout.group_rank, layout.group_size, packing)  # fmt: skip
    return Parts(worker, theta, frozen, inner, dealer)


def untrained(learner: Learner) -> dict[str, Tensor]:
    """Frozen parameters and saved buffers by name, uncopied, before an engine shards them."""
    state = learner.state_dict()
    trained = {name for name, param in learner.named_parameters(remove_duplicate=False) if param.requires_grad}
    return {name: value.detach() for name, value in state.items() if name not in trained}


def fingerprint_of(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_vector(vector: Tensor) -> int:
    """A 64-bit hash of an fp32 vector's bits and their places, computed where the vector lives."""
    total, mask = 0, 2**64 - 1
    for number, part in enumerate(vector.split(2**24)):
        bits = part.contiguous().view(torch.int32).long()
        places = torch.arange(1, len(bits) + 1, device=bits.device, dtype=torch.int64)
        total = (total * 1000003 + int((bits * (places * 2654435761 + number)).sum())) & mask
    return total


def equal_replicas(ranks: Ranks, theta: Tensor) -> None:
    """Check that ranks with the same shard hold the same bits. Collective: world."""
    hashes = ranks.world.gather_bytes(str(hash_vector(theta)).encode())
    size = ranks.layout.group_size
    if any(hashes[rank] != hashes[rank % size] for rank in range(len(hashes))):
        raise RuntimeError("theta differs between groups although it was broadcast; check the hardware and the network")


def check_equal(ranks: Ranks, mine: str, what: str) -> None:
    if len(set(ranks.world.gather_bytes(mine.encode()))) > 1:
        raise UsageError(f"the {what} are not the same on every rank; let every node read the same checkpoint")
