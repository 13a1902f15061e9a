"""Measures the time of each layer of a model by running one of each kind on this machine.

A stage of one layer runs forward and backward with random weights, through the code that will train it; the
time of a stage without layers (masks, rotary tables) is subtracted, because every stage takes it. The first
layer is measured with the embeddings, the last one with norm, head and loss. Never holds more than one stage:
the model itself stays on the meta device.
"""

import copy
import statistics
import time

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from fmmeta.models.learner import Learner
from fmmeta.models.losses import objective
from fmmeta.models.pipeline_split import Stage, StagePartition, base_model, family_of, take_stage
from fmmeta.tasks.batching import MicroBatch

REPEATS = 5


def layer_seconds(learner: Learner, rows: int, tokens: int, device: torch.device, bf16: bool) -> list[float]:
    """Median seconds of a forward and backward pass of `rows` x `tokens` through each layer and the
    parts outside the layers.

    learner: that of a LazyModel, parameters on the meta device and real buffers; it is not changed.
    """
    layers = list(base_model(learner).get_submodule(family_of(learner.hf.config).layers))
    last = len(layers) - 1
    ids = torch.randint(
        learner.hf.config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0)
    )
    labels = ids if not learner.head_names else torch.zeros(rows, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch = MicroBatch(inputs, labels, torch.full((rows,), 1 / rows)).to(device)

    def seconds(*bounds: int, stage: int = 1) -> float:
        made = take_stage(copy.deepcopy(learner), StagePartition(bounds, {}, (), (), None), stage)
        return time_stage(with_random_weights(made, device, bf16), batch, learner.hf.config.hidden_size)

    shared = seconds(0, 1, 1, last + 1)
    first = seconds(0, 1, last + 1, stage=0)
    kinds = [kind_of(learner, layer, i) for i, layer in enumerate(layers)]
    example = {kinds[i]: i for i in range(1, last)}
    middle = {kind: seconds(0, i, i + 1, last + 1) for kind, i in example.items()}
    measured = [first, *(middle[kind] for kind in kinds[1:last]), seconds(0, last, last + 1)]
    return [max(each - shared, 1e-9) for each in measured]


def kind_of(learner: Learner, layer: nn.Module, number: int) -> str:
    """Equal for layers that take equal time: modules and their sizes, trained parameters, reach of the
    attention.
    """
    types = getattr(learner.hf.config, "layer_types", None)
    return f"{layer} {[param.requires_grad for param in layer.parameters()]} {types and types[number]}"


def with_random_weights(stage: Stage, device: torch.device, bf16: bool) -> Stage:
    """Materialize the parameters of a stage with random values."""
    for param in stage.parameters():
        value = torch.empty(param.shape, device=device).normal_(std=0.02)
        swap_tensors(param, nn.Parameter(value, param.requires_grad))
    stage = stage.to(device).train()
    return stage.bfloat16() if bf16 else stage


def time_stage(stage: Stage, batch: MicroBatch, width: int) -> float:
    """Median seconds of a forward and backward pass; `width`: of the hidden states."""
    dtype, ids, times = next(stage.parameters()).dtype, batch.inputs["input_ids"], []
    for _ in range(REPEATS + 1):
        hidden = torch.randn(*ids.shape, width, device=ids.device).to(dtype).requires_grad_()
        began = now(hidden)
        output = stage((*([hidden] if stage.inlet is not None else []), *batch.inputs.values()))
        if stage.last:
            objective(output, batch)[0].backward()
        elif output[0].requires_grad:
            output[0].backward(torch.ones_like(output[0]))
        times.append(now(hidden) - began)
    return statistics.median(times[1:])  # the first one warms up


def now(tensor: Tensor) -> float:
    """Seconds of a clock, after the device of `tensor` has finished its work."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
