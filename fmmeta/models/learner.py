"""The trained module: a Hugging Face model, and a head for classification, behind one forward.

    learner(input_ids [B, T], attention_mask [B, T]) -> logits [B, C] or [B, T, V]
    learner(..., want="features")                    -> [B, D], what the classifier head sees
    learner(..., want="both")                        -> features and logits

Three kinds: a sequence classifier as transformers ships it (pooling: model), an encoder with fmmeta's pooling
and a linear head, and a causal language model. `hf` is the part that export saves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.models.unpadded import Unpadded


class Learner(nn.Module):
    """Common part: the HF model as `hf`, and the names of the head's weight and bias."""

    head_names: tuple[str, ...] = ()  # weight, then bias where there is one

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf, self.unpadded = hf, Unpadded(hf)

    def classify(self, features: Tensor) -> Tensor:
        """Logits [B, C] of features [B, D]: what forward does last."""
        raise NotImplementedError(f"{type(self).__name__} has no class features")


class CausalLearner(Learner):
    """A causal language model; it has no separate head to reset.

    packed: `attention_mask` numbers the rows of each sequence. transformers keeps rows apart by their
    positions, which restart with each (masking_utils.find_packed_sequence_indices), if it gets no mask
    beside them.
    """

    def __init__(self, hf: Any, packed: bool = False) -> None:
        super().__init__(hf)
        self.packed = packed

    def forward(self, input_ids: Tensor, attention_mask: Tensor, want: str = "logits") -> Tensor:
        assert want == "logits", "a language model has no class features"
        if self.packed:
            return self.hf(
                input_ids=input_ids, position_ids=positions(attention_mask), use_cache=False
            ).logits
        return self.hf(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


class PooledClassifier(Learner):
    """An encoder, mean or cls pooling over its last hidden states, and a linear head.

    norm: length that every feature vector is scaled to; 0 leaves them as they are. With a prototype head the
    logits are then 2 norm^2 cos(f, mu_c) and a constant, where each class has one example: cosines at the
    temperature 1 / (2 norm^2).
    """

    head_names = ("head.weight", "head.bias")

    def __init__(self, hf: Any, classes: int, pooling: str, norm: float = 0.0) -> None:
        super().__init__(hf)
        self.pooling, self.norm = pooling, norm
        self.head = nn.Linear(hf.config.hidden_size, classes)
        for name, param in hf.named_parameters():
            if name.split(".")[0] == "pooler":  # never reached: it would get no gradient
                param.requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, want: str = "logits") -> Any:
        with self.unpadded.of(attention_mask):
            hidden = self.hf(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        features = pool(hidden, attention_mask, self.pooling)
        if self.norm:
            features = self.norm * F.normalize(features, dim=1)
        if want == "features":
            return features
        return (features, self.head(features)) if want == "both" else self.head(features)

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)


class NativeClassifier(Learner):
    """AutoModelForSequenceClassification with its own pooling; the head is its last linear layer."""

    def __init__(self, hf: Any, classes: int) -> None:
        super().__init__(hf)
        base = hf.base_model_prefix
        found = [
            (name, module)
            for name, module in hf.named_modules()
            if isinstance(module, nn.Linear) and module.out_features == classes and name.split(".")[0] != base
        ]
        if not found:
            raise UsageError(
                f"model_name_or_path={hf.config.name_or_path} ({type(hf).__name__}) has no linear classifier "
                "on top; use --pooling mean"
            )
        name, self_head = found[-1]
        self.head_path = f"hf.{name}"
        self.head_names = tuple(f"hf.{name}.{part}" for part, _ in self_head.named_parameters())

    def forward(self, input_ids: Tensor, attention_mask: Tensor, want: str = "logits") -> Any:
        if want == "logits":
            return self._logits(input_ids, attention_mask)
        seen: list[Tensor] = []
        head = self.get_submodule(self.head_path)
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            logits = self._logits(input_ids, attention_mask)
        finally:
            hook.remove()
        features = seen[0]
        if features.ndim == 3:  # decoders score every token and keep the last one
            last = attention_mask.long().sum(1) - 1
            features = features[torch.arange(len(features), device=features.device), last]
        return (features, logits) if want == "both" else features

    def classify(self, features: Tensor) -> Tensor:
        return self.get_submodule(self.head_path)(features)

    def _logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        with self.unpadded.of(attention_mask):
            return self.hf(input_ids=input_ids, attention_mask=attention_mask).logits


def positions(numbers: Tensor) -> Tensor:
    """Place of each token in its own row [B, T]; `numbers` as in a packed MicroBatch's attention_mask."""
    places = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return places - torch.where(begins, places, 0).cummax(1).values


def pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """[B, T, D] and [B, T] -> [B, D]: mean over the tokens, or the first token."""
    if pooling == "cls":
        return hidden[:, 0]
    mask = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
