"""The contract of a learner: the trained module, and its losses by row.

    outputs = learner(**inputs)                    what an engine hooks into and differentiates
    learner.losses(outputs, micro_batch)           loss, right answers and answers of each row (RowLosses)
    learner.answers(outputs, micro_batch)          what was answered, and what is right
    learner.score(micro_batches)                   losses without gradient by a faster way, where there is one

    Class.rows(config, tokenizer, columns)         what is read and stored of a row of the data
    Class.facts(support, query)                    what is known of an episode, such as names of labels
    Class.encode(config, tokenizer, rows, facts)   rows of a set as examples
    Class.collate(examples, pad_token_id)          inputs and targets of a micro-batch
    Class.present(answer, names, facts)            an answer as people read it
    Class.metrics(predictions, references)         numbers of an episode

`inputs` are those of a MicroBatch (input_ids [B, T], attention_mask [B, T], ..., or pixel_values
[B, 3, H, W]), and keyword arguments of `forward`. Weights of rows come from the data (MicroBatch.weights), so
that losses of micro-batches and ranks add up to the mean over a set.

classification.py: `outputs` are the features that the head sees and the logits. causal_lm.py: logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from fmmeta.config.learners import LearnerSpec
from fmmeta.config.settings import Config
from fmmeta.learners.unpadded import Unpadded
from fmmeta.tasks.batching import IGNORE, Collated, Example, MicroBatch, map_tensors, padded
from fmmeta.tasks.data.columns import RowReader

RowLoss = Callable[[Tensor, Tensor], Tensor]


def loss_of(spec: LearnerSpec) -> RowLoss:
    """The loss of rows or tokens [N] from logits [N, C] and targets [N]; 0 where a target is IGNORE."""
    return partial(row_losses, spec.loss)


def row_losses(own: RowLoss | None, logits: Tensor, targets: Tensor) -> Tensor:
    """See `loss_of`. own: the user's loss; None: cross-entropy."""
    if own is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    ignored = targets == IGNORE
    return own(logits, targets.masked_fill(ignored, 0)).masked_fill(ignored, 0.0)


class RowLosses(NamedTuple):
    """Of each row [B]: the loss, summed inside a row; how many of its answers are right; its answers.

    A row has one answer, or several where rows share a sequence. A loss that is NaN is no right answer.
    """

    loss: Tensor
    correct: Tensor
    answers: Tensor

    @classmethod
    def of(cls, loss: Tensor) -> "RowLosses":
        """The losses of rows without answers that are right or wrong."""
        none = torch.zeros_like(loss, dtype=torch.long)
        return cls(loss, none, none)

    def weighted(self, weights: Tensor) -> "RowLosses":
        """Each row's part of the set's mean loss; rows of weight 0 have no answers."""
        counted = weights > 0
        return RowLosses(self.loss * weights, self.correct * counted, self.answers * counted)

    def sums(self) -> Tensor:
        """The sums over rows without their graph, float64 [3], as in `PassStats.stats`."""
        return torch.stack([part.detach().sum().double() for part in self])


def on_device(batch: MicroBatch, learner: Any, device: torch.device, all_outputs: bool = False) -> MicroBatch:
    """The batch on the device of a model, with the `places` that its loss reads. all_outputs: without them.
    For sdpa on a GPU, a mask without zeros is one number, expanded.
    """
    inputs = {name: value for name, value in batch.inputs.items() if name != "places"}
    if all_outputs:
        batch = replace(batch, inputs=inputs)
    elif (
        isinstance(learner, Learner) and batch.weights.is_cpu and (found := learner.places(batch)) is not None
    ):
        places = found.pin_memory() if device.type == "cuda" else found
        batch = replace(batch, inputs={**inputs, "places": places})
    mask, moved = batch.inputs.get("attention_mask"), batch.to(device)
    if (
        mask is not None
        and mask.is_cpu
        and device.type != "cpu"
        and isinstance(learner, HFLearner)
        and learner.hf.config._attn_implementation == "sdpa"
        and mask.all()
    ):
        moved.inputs["attention_mask"] = torch.ones((), dtype=torch.bool, device=device).expand(mask.shape)
    return moved


def mask_without_waiting(*args: Any, attention_mask: Tensor | None = None, **named: Any) -> Any:
    """transformers' mask for sdpa, without a look at whether it hides anything: the host would wait for a
    GPU, where a mask that is not one expanded number does (`on_device`).
    """
    if attention_mask is not None and not any(attention_mask.stride()):
        attention_mask = None
    if attention_mask is not None and not attention_mask.is_cpu:
        named |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, attention_mask=attention_mask, **named)


class Learner(nn.Module, ABC):
    """A trained module, what it reads, and what it learns by. A subclass may hold any modules.

    `forward(**inputs)` takes the inputs of a micro-batch by name; an engine hooks into it. The class methods
    are called without the module, also in loader processes.

    head_path: of the classifier head's module; others have none. head_names: of the head's weight, then its
    bias, if any. top: prefix of the names of all parameters above the base, which LoRA trains in full.
    own_head: the head is fmmeta's, beside `hf`, and is exported in a separate file. own_loss: of the user,
    see LearnerSpec.loss; set where the learner is made. rows_are_independent: False for losses of rows that
    depend on each other (contrastive, batch norm): then a set is one micro-batch on one rank. inputs: usual
    names of the column by which `fmmeta predict` shows an input, and that a plain line is read as. example: a
    row, for the card of a model. of_numbers: the loss is one of outputs [N] and targets [N], both numbers.
    unused: prefixes of the names of parameters that no output depends on.
    inner_only, outer_only: names of trained parameters that the outer loop, or the inner loop, leaves as they
    are (parameter_sets.py).
    pair: names of input and target in a stored row, of learners whose texts are encoded without `facts`: they
    are tokenised once, and transforms see them as `TextExample`.
    """

    head_path: str = ""
    head_names: tuple[str, ...] = ()
    top: tuple[str, ...] = ()
    own_head = False
    own_loss: RowLoss | None = None
    rows_are_independent = True
    auto = ""
    inputs: tuple[str, ...] = ("input",)
    example: Mapping[str, Any] = {"input": "a b", "output": "b"}
    of_numbers = False
    pair: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    inner_only: Collection[str] = ()
    outer_only: Collection[str] = ()

    @classmethod
    def rows(cls, config: Config, tokenizer: Any, columns: Sequence[str], answered: bool = True) -> RowReader:
        """What is read of rows.

        tokenizer: an `ImageReader` for models of images. columns: those of the data. answered: whether rows
        must have their targets, as those to answer need not. Raises `UsageError`.
        """
        return RowReader(lambda row: row.values)

    @classmethod
    def content(cls, row: Any) -> Sequence[str]:
        """The texts that identify a stored row of a `pair` in all data sets."""
        return (row[cls.pair[0]],)

    @classmethod
    def facts(cls, support: Sequence[Any], query: Sequence[Any] = ()) -> dict[str, Any]:
        """What rows of an episode are encoded with and answers are read with, as JSON: the scale of targets,
        say. `names`: of the labels, where rows have some; the micro-batches then say how many
        (`targets["classes"]`). An adapted model stores those of its support set. Raises `UsageError`.
        """
        return {}

    @classmethod
    def encode(
        cls, config: Config, tokenizer: Any, rows: Sequence[Any], facts: Mapping[str, Any]
    ) -> list[Example]:
        """The rows of a set as examples. facts: of their episode. Rows to answer may lack their targets."""
        return [Example([0], 0, values={"row": row}) for row in rows]

    @classmethod
    def collate(cls, rows: Sequence[Example], pad_token_id: int) -> Collated:
        """The inputs and targets of rows that go through the module together; the first dimension of each
        tensor is the rows. By default tokens and their labels are padded (`batching.padded`).
        """
        return padded(rows, pad_token_id)

    @classmethod
    def metrics(cls, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        """Numbers by name for the answers to a query set (`present`), beside loss and accuracy."""
        return {}

    @classmethod
    def present(
        cls, answer: Sequence[Any], names: Sequence[str], facts: Mapping[str, Any], tokenizer: Any = None
    ) -> Any:
        """An answer of `answers` as people read it, as JSON. tokenizer: see `reader`."""
        return answer

    @classmethod
    def reader(cls, config: Config, tokenizer: Any, ends: Sequence[int]) -> Any:
        """The `tokenizer` of `present`. ends: the end tokens of the checkpoint. Raises `UsageError`."""
        return tokenizer

    @abstractmethod
    def losses(self, outputs: Any, batch: MicroBatch) -> RowLosses:
        """The losses of the rows of a micro-batch, which is on the device of the outputs."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of rows or tokens [N] from logits [N, C] and targets [N]; 0 where a target is IGNORE."""
        return row_losses(self.own_loss, logits, targets)

    def places(self, batch: MicroBatch) -> Tensor | None:
        """Of a batch in host memory: the tokens of the flattened rows [N] whose outputs `losses` reads, for
        `forward`; None: all.
        """
        return None

    def logits(self, outputs: Any) -> Tensor:
        """The logits in the outputs, fp32: [B, C] of classes, or [B, T, V] of tokens."""
        return at_least_fp32(outputs)

    def answers(self, outputs: Any, batch: MicroBatch) -> Iterator[tuple[list[Any], list[Any]]]:
        """(prediction, reference) of each row with a weight, as classes, tokens or numbers; -1 for NaN
        logits.
        """
        return iter(())

    def score(self, batches: Sequence[MicroBatch]) -> RowLosses | None:
        """The losses of all rows of micro-batches without gradient, in another way than by forward passes of
        their inputs; None where there is none. Local: the learner is whole, in this process.
        """
        return None

    def respond(self, batch: MicroBatch, max_new_tokens: int) -> list[list[Any]]:
        """The answer to each row with a weight, whose targets are not known. Local: as `score`."""
        return [prediction for prediction, _ in self.answers(self(**batch.inputs), batch)]


class HFLearner(Learner):
    """A Hugging Face model `hf`, the part that export saves.

    auto: transformers' class for it, such as AutoModelForTokenClassification. peft_task: peft's name of what
    the adapters are for. pipeline: transformers' name of what an adapted model does. problem_type: as in its
    configuration. pooled: of learners of whole texts, the class over features that fmmeta pools (--pooling).
    options: of `hf`, in passes whose losses are learned.
    """

    peft_task: str
    pipeline: str | None = None
    problem_type: str | None = None
    pooled: type | None = None
    options: Mapping[str, Any] = {}

    def __init__(self, hf: Any, outputs: int = 0) -> None:
        """outputs: of the head, of learners that have one."""
        super().__init__()
        AttentionMaskInterface.register("sdpa", mask_without_waiting)
        self.hf, self.unpadded = hf, Unpadded(hf)

    def cast(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs with pixels and other numbers in the dtype of the model, which not every model casts."""
        dtype = next(self.hf.parameters()).dtype
        return map_tensors(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor in fp32, or in fp64 if it is in fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
