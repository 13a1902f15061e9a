"""Learners of classification: an encoder with fmmeta's pooling and a linear head, or a sequence classifier as
transformers ships it (pooling: model). Texts and images alike.

`outputs` are the features that the head sees [B, D], and the logits [B, C]. Targets of a micro-batch:
`labels` [B], and `classes` [B], the number of classes of each row's episode, where the head may have more.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.common.text import shortened
from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import Config
from fmmeta.learners.base import HFLearner, RowLosses, at_least_fp32
from fmmeta.tasks.batching import Example, MicroBatch
from fmmeta.tasks.data.columns import TEXT, PairInput, Row, RowReader, cell, pick
from fmmeta.tasks.data.encode import encode_texts, read_image
from fmmeta.tasks.data.images import ImageReader, encoded_image

Outputs = tuple[Tensor, Tensor]


class Classifier(HFLearner):
    """Rows of a text (one of a pair of texts too) or an image, with a class."""

    problem_type = "single_label_classification"  # a pipeline takes softmax
    inputs, pair = (*TEXT, "sentence1"), ("text", "label")
    example: Mapping[str, Any] = {"text": "a fine film", "label": "praise"}

    @classmethod
    def rows(cls, config: Config, tokenizer: Any, columns: Sequence[str], answered: bool = True) -> RowReader:
        images = isinstance(tokenizer, ImageReader)
        setting, unread = ("image_column", "text_column") if images else ("text_column", "image_column")
        refuse_first(
            [
                (
                    images and config.label_names is not None,
                    f"label_names={shortened(config.label_names)} needs texts, and the data has images; leave"
                    " it out",
                ),
                (
                    getattr(config, unread) is not None,
                    f"{unread}={getattr(config, unread)}: the model reads {'images' if images else 'texts'},"
                    " not this column; leave it out",
                ),
            ]
        )
        source, label = str(pick(config, columns, setting)), ""
        if answered:
            label = str(pick(config, columns, "label_column"))
        pair = None if images else PairInput.of(config, source, columns, config.text_column is None)

        def read(row: Row) -> dict[str, Any]:
            given = {"label": cell(row, label)} if answered else {}
            if pair is not None:
                return {"text": pair.read(row)[0], **given}
            name, image = encoded_image(row.values.get(source), source, row.origin, row.folder)
            return {"text": name, "image": image, **given}

        return RowReader(read, pair.columns if pair else (source,), label)

    @classmethod
    def facts(cls, support: Sequence[Any], query: Sequence[Any] = ()) -> dict[str, Any]:
        names, of_query = ({row["label"] for row in rows} for rows in (support, query))
        if unknown := sorted(of_query - names):
            raise UsageError(
                f"the query set has the class {unknown[0]!r}, of which the support set has none; add some"
            )
        return {"names": sorted(names)}

    @classmethod
    def encode(
        cls, config: Config, tokenizer: Any, rows: Sequence[Any], facts: Mapping[str, Any]
    ) -> list[Example]:
        """Labels number `names`; they are -1 without them."""
        if isinstance(tokenizer, ImageReader):
            images = [{"pixel_values": read_image(tokenizer, row["image"])} for row in rows]
            inputs = [([0], one) for one in images]
        else:
            texts = encode_texts(tokenizer, [row["text"] for row in rows], config.max_length)
            inputs = [(ids, dict[str, Tensor]()) for ids in texts]
        numbers = {name: number for number, name in enumerate(facts.get("names", ()))}
        return [
            Example(ids, numbers.get(row.get("label"), -1), values=values, weight=row.get("weight", 1.0))
            for (ids, values), row in zip(inputs, rows, strict=True)
        ]

    @classmethod
    def present(
        cls, answer: Sequence[int], names: Sequence[str], facts: Mapping[str, Any], tokenizer: Any = None
    ) -> str:
        return names[answer[0]] if answer[0] >= 0 else ""

    @abstractmethod
    def forward(self, **inputs: Tensor) -> Outputs:
        """Features and logits."""

    def losses(self, outputs: Outputs, batch: MicroBatch) -> RowLosses:
        logits, labels = of_episode(outputs[1], batch), batch.targets["labels"]
        losses = self.loss(at_least_fp32(logits), labels)
        right = (logits.argmax(-1) == labels) & ~losses.isnan()
        return RowLosses(losses, right.long(), torch.ones_like(labels))

    def logits(self, outputs: Outputs) -> Tensor:
        return at_least_fp32(outputs[1])

    def answers(self, outputs: Outputs, batch: MicroBatch) -> Iterator[tuple[list[int], list[int]]]:
        logits = of_episode(self.logits(outputs), batch)
        guess = logits.argmax(-1).masked_fill_(logits.isnan().any(-1), -1).tolist()
        rows = zip(guess, batch.targets["labels"].tolist(), batch.weights.tolist(), strict=True)
        return (([predicted], [right]) for predicted, right, weight in rows if weight > 0)

    def classify(self, features: Tensor) -> Outputs:
        """The outputs for features: the last operation of forward."""
        return features, self.get_submodule(self.head_path)(features)


def of_episode(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Logits [B, ..., C] with -inf for the classes that a row's episode does not have."""
    if "classes" not in batch.targets:
        return logits
    numbers = torch.arange(logits.shape[-1], device=logits.device)
    classes = batch.targets["classes"].view(-1, *[1] * (logits.ndim - 1))
    return logits.masked_fill(numbers >= classes, -math.inf)


class PooledClassifier(Classifier):
    """An encoder, mean or cls pooling over its last hidden states, and a linear head.

    norm: length that every feature vector is scaled to; 0 leaves them unscaled. With a prototype head the
    logits are then 2 norm^2 cos(f, mu_c) and a constant, where each class has one example: cosines at the
    temperature 1 / (2 norm^2).
    """

    head_path, head_names, top = "head", ("head.weight", "head.bias"), ("head.",)
    own_head, peft_task, unused = True, "FEATURE_EXTRACTION", ("hf.pooler.",)

    def __init__(self, hf: Any, classes: int, pooling: str, norm: float = 0.0) -> None:
        super().__init__(hf)
        self.pooling, self.norm = pooling, norm
        # convolutional models have a size of each stage
        size = hf.config.hidden_size if hasattr(hf.config, "hidden_size") else hf.config.hidden_sizes[-1]
        self.head = nn.Linear(size, classes)
        for name, param in self.named_parameters():
            if name.startswith(self.unused):
                param.requires_grad_(False)

    def forward(self, **inputs: Tensor) -> Outputs:
        mask = inputs.get("attention_mask")
        hidden = self.hf(**self.cast(inputs), **self.unpadded.of(mask)).last_hidden_state
        if hidden.ndim == 4:  # of a convolutional model [B, D, H, W]
            hidden = hidden.flatten(2).transpose(1, 2)
        if self.pooling == "cls":
            features = hidden[:, 0]
        elif mask is None:
            features = hidden.mean(1)
        else:
            mask = mask.unsqueeze(-1).to(hidden.dtype)
            features = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        if self.norm:
            features = self.norm * F.normalize(features, dim=1)
        return features, self.head(features)


class NativeClassifier(Classifier):
    """AutoModelForSequenceClassification with its pooling; the head is its last linear layer."""

    peft_task, pooled = "SEQ_CLS", PooledClassifier

    def __init__(self, hf: Any, classes: int) -> None:
        super().__init__(hf)
        heads = [
            (name, module)
            for name, module in hf.named_modules()
            if isinstance(module, nn.Linear)
            and module.out_features == classes
            and name.split(".")[0] != hf.base_model_prefix
        ]
        if not heads:
            raise UsageError(
                f"model_name_or_path={hf.config.name_or_path} ({type(hf).__name__}) has no linear classifier"
                f" on top; use {'--pooling mean' if self.pooled else 'another model'}"
            )
        name, head = heads[-1]
        self.head_path, self.top = f"hf.{name}", (f"hf.{name.split('.')[0]}.",)
        self.head_names = tuple(f"hf.{name}.{part}" for part, _ in head.named_parameters())

    def forward(self, **inputs: Tensor) -> Outputs:
        seen: list[Tensor] = []
        head = self.get_submodule(self.head_path)
        with head.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            try:
                logits = self.hf(**self.cast(inputs), **self.unpadded.of(inputs.get("attention_mask"))).logits
            except (TypeError, ValueError) as error:
                ends = getattr(self.hf.config, "eos_token_id", None)
                if not self.hf.config.is_encoder_decoder or (type(ends) is int and "<eos>" not in str(error)):
                    raise
                raise UsageError(
                    f"model_name_or_path={self.hf.config.name_or_path} ({type(self.hf).__name__}) reads a"
                    f" text at its last token eos_token_id={ends} of config.json, and the texts of a batch do"
                    " not have the same number of them; leave this token out of the texts, raise --max_length"
                    " for pairs, or correct the id"
                ) from None
        features = seen[0]
        if features.ndim == 3:  # decoders score every token and keep the last one
            # of transformers' classifiers: the last one that is no padding, by its id
            ids, last = inputs.get("input_ids"), features.shape[1] - 1
            if ids is not None:
                places = torch.arange(ids.shape[1], device=ids.device)
                last = ((ids != self.hf.config.pad_token_id) * places).argmax(1)
            features = features[torch.arange(len(features), device=features.device), last]
        return features, logits
