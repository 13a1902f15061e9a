"""The trained module: a Hugging Face model, and a head for classification, behind one forward.

    learner(**inputs)                      -> logits [B, C] or [B, T, V]
    learner(**inputs, want="features")     -> [B, D], what the classifier head sees
    learner(**inputs, want="both")         -> features and logits

`inputs` are those of a MicroBatch (input_ids [B, T], attention_mask [B, T], ...); they go to the HF model.
Three kinds: a sequence classifier as transformers ships it (pooling: model), an encoder with fmmeta's pooling
and a linear head, and a causal language model. `hf` is the part that export saves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.models.unpadded import Unpadded


class Learner(nn.Module):
    """Common part of the three kinds.

    head_names: of the head's weight, then its bias, if any. top: prefix of the names of all parameters above
    the base, which LoRA trains in full.
    """

    head_names: tuple[str, ...] = ()
    top: tuple[str, ...] = ()

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf, self.unpadded = hf, Unpadded(hf)

    def classify(self, features: Tensor) -> Tensor:
        """Logits [B, C] of features [B, D]: the last operation of forward."""
        raise NotImplementedError(f"{type(self).__name__} has no class features")


class CausalLearner(Learner):
    """A causal language model; it has no separate head to reset.

    Rows that share a sequence come with position_ids and without attention_mask: transformers then keeps
    them apart where the positions restart (masking_utils.find_packed_sequence_indices).
    """

    def forward(self, *, want: str = "logits", **inputs: Tensor) -> Tensor:
        assert want == "logits", "a language model has no class features"
        return self.hf(**inputs, use_cache=False).logits


class PooledClassifier(Learner):
    """An encoder, mean or cls pooling over its last hidden states, and a linear head.

    norm: length that every feature vector is scaled to; 0 leaves them unscaled. With a prototype head the
    logits are then 2 norm^2 cos(f, mu_c) and a constant, where each class has one example: cosines at the
    temperature 1 / (2 norm^2).
    """

    head_names, top = ("head.weight", "head.bias"), ("head.",)

    def __init__(self, hf: Any, classes: int, pooling: str, norm: float = 0.0) -> None:
        super().__init__(hf)
        self.pooling, self.norm = pooling, norm
        self.head = nn.Linear(hf.config.hidden_size, classes)
        for name, param in hf.named_parameters():
            if name.split(".")[0] == "pooler":  # unused, so it would get no gradient
                param.requires_grad_(False)

    def forward(self, *, want: str = "logits", **inputs: Tensor) -> Any:
        mask = inputs["attention_mask"]
        features = pool(self.hf(**inputs, **self.unpadded.of(mask)).last_hidden_state, mask, self.pooling)
        if self.norm:
            features = self.norm * F.normalize(features, dim=1)
        if want == "features":
            return features
        return (features, self.head(features)) if want == "both" else self.head(features)

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)


class NativeClassifier(Learner):
    """AutoModelForSequenceClassification with its pooling; the head is its last linear layer."""

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
                f"model_name_or_path={hf.config.name_or_path} ({type(hf).__name__}) has no linear classifier "
                "on top; use --pooling mean"
            )
        name, head = heads[-1]
        self.head_path, self.top = f"hf.{name}", (f"hf.{name.split('.')[0]}.",)
        self.head_names = tuple(f"hf.{name}.{part}" for part, _ in head.named_parameters())

    def forward(self, *, want: str = "logits", **inputs: Tensor) -> Any:
        seen: list[Tensor] = []
        head = self.get_submodule(self.head_path)
        hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            logits = self.hf(**inputs, **self.unpadded.of(inputs["attention_mask"])).logits
        finally:
            hook.remove()
        if want == "logits":
            return logits
        features = seen[0]
        if features.ndim == 3:  # decoders score every token and keep the last one
            last = inputs["attention_mask"].sum(1) - 1
            features = features[torch.arange(len(features), device=features.device), last]
        return (features, logits) if want == "both" else features

    def classify(self, features: Tensor) -> Tensor:
        return self.get_submodule(self.head_path)(features)


def pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """[B, T, D] and [B, T] -> [B, D]: mean over the tokens, or the first token."""
    if pooling == "cls":
        return hidden[:, 0]
    mask = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
