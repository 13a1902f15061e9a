"""Counts the work of one task on one rank: flops, bytes on the wire, bytes of vector arithmetic.

Passes are those of meta/costs.py, micro-batches those of tasks/batching.py. Bytes on the wire are the payload
that a rank passes to a collective or sends, as `comm_bytes` in metrics.jsonl:

    gather     ZeRO 3: parameters, for each forward pass and each backward pass after they were released;
               ZeRO 1 and 2: updated parameters
    reduce     gradients, fp32: once a pass (ZeRO 0, 1), once a micro-batch (ZeRO 2, 3)
    tensor     activations between tensor ranks: after attention and MLP (Shoeybi et al. 2019, section 3), and
               backward for each product split by columns (Megatron has one sum for a shared input)
    send       hidden states to the next stage with ids and mask, their gradients to the one before
    cross      one reduction of the shard per outer step

benchmarks/plan.py counts the same in real engines (tests/distributed/test_plan.py).
"""

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from torch import nn

from fmmeta.config.settings import Config
from fmmeta.meta.costs import passes, rows_of
from fmmeta.models.learner import Learner
from fmmeta.models.pipeline_split import plan_stages
from fmmeta.parallel.deepspeed_config import DeepSpeedSettings, cut_patterns
from fmmeta.planning.memory import Sizes
from fmmeta.planning.sizes import micro_batch_rows, micro_batches

# products split by columns in a layer (parallel/deepspeed_config.py): queries, keys, values, gate, up
COLUMNS = 5


@dataclass(frozen=True)
class MatmulCounts:
    """Weights of a model that each token is multiplied by, on one tensor rank."""

    whole: int
    trained: int  # weights of `whole` that have gradients
    inside: int = 0  # weights of `whole` in the layers: checkpointing does not compute a head again
    fullest: float = 1.0  # share of the fullest stage
    width: int = 0  # layers x attention width: 4 T flops per token for each
    matrices: int = 1  # ZeRO 3 gathers them one by one

    def flops(self, tokens: int, backward: bool, again: bool) -> float:
        """Flops of one token in a row of `tokens`. again: the backward pass computes the layers again."""
        forward = 2 * self.whole + 4 * self.width * tokens
        if not backward:
            return forward
        layers = 2 * self.inside + 4 * self.width * tokens if again else 0
        return 2 * forward + layers + 2 * self.trained + 4 * self.width * tokens


def count_matmuls(learner: Learner, config: Config) -> MatmulCounts:
    """Count a learner without storage. A tied output layer counts; embeddings are looked up and do not."""
    text = learner.hf.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 12)
    width = (
        getattr(text, "num_hidden_layers", 12)
        * heads
        * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    )
    weights = [
        (name, module.get_parameter("weight"))
        for name, module in learner.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # Conv1D: GPT-2's
    ]
    whole = sum(w.numel() for _, w in weights)
    trained = sum(w.numel() for _, w in weights if w.requires_grad)
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


@dataclass(frozen=True)
class Wire:
    """Payload bytes of one rank, by kind, and in how many collectives."""

    gather: int = 0
    reduce: int = 0
    tensor: int = 0
    send: int = 0
    collectives: int = 0

    def __add__(self, other: "Wire") -> "Wire":
        return Wire(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> "Wire":
        return Wire(*(times * a for a in astuple(self)))

    @property
    def total(self) -> int:
        """Bytes."""
        return self.gather + self.reduce + self.tensor + self.send


@dataclass(frozen=True)
class PassCost:
    """A pass over one set on the rank with the most work."""

    flops: float
    wire: Wire
    update: bool
    fetched: int = 0  # bytes of weights from host memory (offload_param)


@dataclass(frozen=True)
class TaskCost:
    """All passes of one task."""

    passes: Sequence[tuple[int, PassCost]]  # how often, and its cost
    updates: int
    writes: int  # complete vectors that are written to the worker besides
    refresh: Wire  # of each of these writes

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
    """The work of one task. data: data-parallel ranks of the group."""
    one_rank = config.pipeline_stages * config.tensor_parallel_size == 1
    defers = one_rank and (precision.zero_stage < 3 or data == 1)  # as FullModelWorker.can_defer_backward
    many = passes(config, data, defers)
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


def needed_flops(config: Config, matmuls: MatmulCounts, tokens: int) -> float:
    """Flops of one task on one rank that keeps all activations: the least of all layouts."""
    many = passes(config)
    support, query = rows_of(config)
    trained = many.support * support + many.query * query
    forwarded = many.support_forwards * support + many.query_forwards * query
    return tokens * (
        matmuls.flops(tokens, True, False) * trained + matmuls.flops(tokens, False, False) * forwarded
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
    """A pass over `rows` rows of `tokens` tokens that `data` ranks share."""
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
    kept = held <= precision.live  # parameters stay gathered until the backward pass
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
