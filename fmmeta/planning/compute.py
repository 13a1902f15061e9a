"""What one task asks of a rank: flops, bytes on the wire, bytes of vector arithmetic. Counted from the
layout, not timed.

Passes are those of meta/costs.py, micro-batches those of tasks/batching.py. On the wire counts the payload
that a rank hands to a collective or sends, as `comm_bytes` in metrics.jsonl does:

    gather     ZeRO 3: parameters, for each forward pass and each backward pass that finds them released;
               ZeRO 1 and 2: updated parameters
    reduce     gradients, fp32: once a pass (ZeRO 0, 1), once a micro-batch (ZeRO 2, 3)
    tensor     activations between tensor ranks: after attention and MLP (Shoeybi et al. 2019, section 3), and
               backward for each product cut by columns (Megatron has one sum for a shared input)
    send       hidden states to the next stage with ids and mask, their gradients to the one before
    cross      one reduction of the shard per outer step

benchmarks/plan.py counts the same in real engines (tests/distributed/test_plan.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fmmeta.config.settings import Config
from fmmeta.meta.costs import passes, rows_of
from fmmeta.models.learner import Learner
from fmmeta.models.pipeline_split import plan_stages
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings
from fmmeta.parallel.workers.tensor_parallel import cut_patterns
from fmmeta.planning.memory import Sizes
from fmmeta.planning.sizes import micro_batch_rows, micro_batches

# products cut by columns in a layer of parallel/workers/tensor_parallel.py's plan: queries, keys, values,
# gate and up
COLUMNS = 5


@dataclass(frozen=True)
class MatmulCounts:
    """Matrix products of a model: weights that each token meets, in all, of its fullest stage, and per tensor
    rank.
    """

    whole: int
    trained: int  # of them, those whose gradients are taken
    inside: int = 0  # of the whole, those in the layers: a head is not computed again
    fullest: float = 1.0  # share of the fullest stage
    width: int = 0  # layers x attention width: 4 T flops per token for each
    matrices: int = 1  # that are gathered one by one

    def flops(self, tokens: int, backward: bool, again: bool) -> float:
        """Of one token in a row of `tokens`. again: layers are computed once more for the backward pass."""
        forward = 2 * self.whole + 4 * self.width * tokens
        if not backward:
            return forward
        layers = 2 * self.inside + 4 * self.width * tokens if again else 0
        return 2 * forward + layers + 2 * self.trained + 4 * self.width * tokens


def count_matmuls(learner: Learner, config: Config) -> MatmulCounts:
    """Of a learner without storage. A tied output layer is a product too; embeddings are looked up."""
    text = learner.hf.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 12)
    width = (
        getattr(text, "num_hidden_layers", 12)
        * heads
        * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    )
    found = ((name, weight_of(module)) for name, module in learner.named_modules())
    weights = [(name, weight) for name, weight in found if weight is not None]
    whole, trained = (
        sum(w.numel() for _, w in weights if w.requires_grad or every) for every in (True, False)
    )
    inside = sum(w.numel() for name, w in weights if re.search(r"\.\d+\.", name))
    if config.tensor_parallel_size > 1:
        ranks, is_cut = config.tensor_parallel_size, cut_patterns(learner.hf.config)
        away = sum(w.numel() - w.numel() // ranks for name, w in weights if is_cut(f"{name}.weight"))
        return MatmulCounts(whole - away, trained - away, inside - away, 1.0, width // ranks, len(weights))
    if config.pipeline_stages == 1:
        return MatmulCounts(whole, trained, inside, 1.0, width, len(weights))
    cut = plan_stages(learner, config.pipeline_stages)
    parts = [0] * config.pipeline_stages
    for name, weight in weights:
        parts[cut.owner.get(f"{name}.weight", config.pipeline_stages - 1)] += weight.numel()
    return MatmulCounts(whole, trained, inside, max(parts) / whole, width, len(weights))


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """The matrix of a linear layer (GPT-2's are transposed)."""
    return (
        getattr(module, "weight", None)
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        else None
    )


@dataclass(frozen=True)
class Wire:
    """Payload bytes of one rank, by kind, and in how many collectives."""

    gather: int = 0
    reduce: int = 0
    tensor: int = 0
    send: int = 0
    collectives: int = 0

    def __add__(self, other: Wire) -> Wire:
        return Wire(*(a + b for a, b in zip(self.values, other.values, strict=True)))

    def __mul__(self, times: int) -> Wire:
        return Wire(*(times * a for a in self.values))

    @property
    def values(self) -> Sequence[int]:
        return self.gather, self.reduce, self.tensor, self.send, self.collectives

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.values[:-1])


@dataclass(frozen=True)
class PassCost:
    """A pass over one set on the rank that has most to do: flops, micro-batches that follow each other, bytes
    on the wire.
    """

    flops: float
    wire: Wire
    update: bool
    fetched: int = 0  # bytes of weights from host memory (offload_param)


@dataclass(frozen=True)
class TaskCost:
    """All passes of one task, by kind and how often; `writes`: whole vectors put into the worker besides,
    each with the wire of `refresh`.
    """

    passes: Sequence[tuple[int, PassCost]]
    updates: int
    writes: int
    refresh: Wire

    @property
    def flops(self) -> float:
        return sum(times * one.flops for times, one in self.passes)

    @property
    def wire(self) -> Wire:
        return sum((one.wire * times for times, one in self.passes), self.refresh * self.writes)


def task_work(
    config: Config,
    precision: DeepSpeedSettings,
    sizes: Sizes,
    matmuls: MatmulCounts,
    data: int,
    row_tokens: int,
) -> TaskCost:
    """One task of a run. data: data-parallel ranks of the group."""
    many = passes(config, data, leaves_open(config, precision, data))
    support, query = rows_of(config)
    kinds = [
        (many.support, support, True),
        (many.query, query, True),
        (many.support_forwards, support, False),
        (many.query_forwards, query, False),
    ]
    found = [
        (times, one_pass(config, precision, sizes, matmuls, data, rows, row_tokens, back))
        for times, rows, back in kinds
        if times
    ]
    return TaskCost(found, many.training, many.writes, refresh(precision, sizes, data))


def leaves_open(config: Config, precision: DeepSpeedSettings, data: int) -> bool:
    """Whether workers of this layout keep a forward pass until its backward pass is matmuls for
    (WholeWorker.keeps).
    """
    return config.pipeline_stages * config.tensor_parallel_size == 1 and (
        precision.zero_stage < 3 or data == 1
    )


def needed_flops(config: Config, matmuls: MatmulCounts, tokens: int) -> float:
    """Of one task on one rank that keeps all activations: what no layout can do without."""
    many = passes(config)
    support, query = rows_of(config)
    trained = many.support * support + many.query * query
    looked_at = many.support_forwards * support + many.query_forwards * query
    return tokens * (
        matmuls.flops(tokens, True, False) * trained + matmuls.flops(tokens, False, False) * looked_at
    )


def one_pass(
    config: Config,
    precision: DeepSpeedSettings,
    sizes: Sizes,
    matmuls: MatmulCounts,
    data: int,
    rows: int,
    tokens: int,
    backward: bool,
) -> PassCost:
    stages, width = config.pipeline_stages, 2 if precision.bf16 else 4
    rounds, each = micro_batches(rows, data, micro_batch_rows(config, data))
    per_token = matmuls.flops(tokens, backward, config.gradient_checkpointing)
    one = each * tokens * per_token * matmuls.fullest
    flops = (rounds + stages - 1) * one  # a pipeline fills and empties
    hidden = each * tokens * sizes.hidden * width
    wire = Wire()
    if stages > 1:
        ids = each * tokens * 16
        wire += Wire(
            send=rounds * (hidden + ids + (hidden if backward else 0)),
            collectives=rounds * (2 if backward else 1),
        )
    if config.tensor_parallel_size > 1:
        forward = 2 * (2 if config.gradient_checkpointing and backward else 1)
        sums = sizes.layers * (forward + (COLUMNS if backward else 0))
        wire += Wire(tensor=rounds * sums * hidden, collectives=rounds * sums)
    held, stage = sizes.params + sizes.frozen, precision.zero_stage if data > 1 else 0
    kept = held <= precision.live  # gathered parameters stay from the forward to the backward pass, no longer
    gathers = rounds * (1 if kept or not backward else 2)
    if stage == 3:
        wire += Wire(gather=gathers * held * width, collectives=gathers * matmuls.matrices)
    if backward and data > 1:
        each_time = rounds if stage > 1 else 1
        buckets = max(1, -(-sizes.params // (precision.bucket or sizes.hidden**2)))
        wire += Wire(reduce=each_time * 4 * sizes.params, collectives=each_time * buckets) + refresh(
            precision, sizes, data
        )
    return PassCost(flops, wire, backward, gathers * held * width // data if precision.offload_param else 0)


def refresh(precision: DeepSpeedSettings, sizes: Sizes, data: int) -> Wire:
    """New weights from new shards: ZeRO 1 and 2 gather them at once, ZeRO 3 when they are needed."""
    if data == 1 or precision.zero_stage not in (1, 2):
        return Wire()
    return Wire(gather=sizes.params * (2 if precision.bf16 else 4), collectives=1)
