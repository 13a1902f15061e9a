"""The trained module and its loss: a Hugging Face model, and a head for classification, behind one forward.

    learner(**inputs)                      -> logits [B, C] or [B, T, V]
    learner(**inputs, want="features")     -> [B, D], what the classifier head sees
    learner(**inputs, want="both")         -> features and logits
    objective(logits, micro_batch)         -> this micro-batch's part of the mean loss over a whole set

`inputs` are those of a MicroBatch (input_ids [B, T], attention_mask [B, T], ..., or pixel_values
[B, 3, H, W]); they go to the HF model.
Three kinds: a sequence classifier as transformers ships it (pooling: model), an encoder with fmmeta's pooling
and a linear head, and a causal language model. `hf` is the part that export saves.

Encoder layers run without padding: between the embeddings and the last layer only real tokens are computed.

    embeddings [B, T, H] --> [1, N, H] --> layers --> [B, T, H], zeros on padding

N: real tokens of the micro-batch. Every operation of a layer but attention works token by token. Attention
gets padded rows, and its padding is removed again. The numbers are the same up to the rounding of products of
other sizes. Used on CPUs, where arithmetic dominates; on a GPU the host would have to wait for N.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmmeta.common.errors import UsageError
from fmmeta.tasks.batching import IGNORE, MicroBatch, map_tensors

# Their models pass keyword arguments on to `encoder(hidden, ...)`, and that to attention.
MODELS = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
ATTENTION = "fmmeta_unpadded"  # its name in transformers, in place of sdpa
ARGUMENT = "unpadded_rows"


@dataclass(frozen=True)
class UnpaddedRows:
    """Positions of the real tokens in a padded batch: `places` [N] among B x T."""

    places: Tensor
    shape: torch.Size

    def take(self, padded: Tensor) -> Tensor:
        """[B, T, ...] -> [1, N, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places)[None]

    def put(self, tokens: Tensor) -> Tensor:
        """[1, N, ...] -> [B, T, ...], zeros elsewhere."""
        empty = tokens.new_zeros(math.prod(self.shape), *tokens.shape[2:])
        return empty.index_copy(0, self.places, tokens[0]).view(*self.shape, *tokens.shape[2:])


class Unpadded:
    """Hooks around the encoder of `hf`, if it is one of MODELS with torch's attention; else nothing changes.

    In a pipeline only the last stage computes without padding.
    """

    def __init__(self, hf: Any) -> None:
        self.seen: UnpaddedRows | None = None  # of the last pass: its layers may be recomputed in backward
        config = hf.config
        self.works = (
            config.model_type in MODELS and config._attn_implementation == "sdpa" and not config.is_decoder
        )
        if self.works:
            from transformers import AttentionInterface

            AttentionInterface.register(ATTENTION, attention)
            encoder = getattr(hf, hf.base_model_prefix, hf).encoder
            changed = copy.copy(config)  # the model makes masks and is saved with its original one
            changed._attn_implementation = ATTENTION
            for module in encoder.modules():
                if getattr(module, "config", None) is config:
                    module.config = changed
            encoder.register_forward_pre_hook(remove_padding, with_kwargs=True)
            encoder.register_forward_hook(restore_padding, with_kwargs=True)

    def of(self, attention_mask: Tensor | None) -> dict[str, UnpaddedRows]:
        """Arguments for the HF model, with which a pass over rows [B, T] leaves out the zeros of
        `attention_mask`, if there is one.
        """
        self.seen = None
        if attention_mask is None:
            return {}
        if self.works and attention_mask.device.type == "cpu" and not torch.compiler.is_compiling():
            places = attention_mask.flatten().nonzero()[:, 0]
            if len(places) < attention_mask.numel():
                self.seen = UnpaddedRows(places, attention_mask.shape)
        return {ARGUMENT: self.seen} if self.seen else {}

    def counts(self, x: Tensor, tasks: int, runs: Sequence[int] = ()) -> list[int] | None:
        """Tokens of each of `tasks` equal runs of rows, or of runs of `runs` rows, if `x` [1, N, ...] is
        inside the encoder in the last pass, else None.
        """
        if self.seen is None or x.shape[:2] != (1, len(self.seen.places)):
            return None
        rows, length = self.seen.shape
        bounds = torch.tensor(runs or [rows // tasks] * tasks).cumsum(0) * length
        return torch.bincount(torch.bucketize(self.seen.places, bounds, right=True), minlength=tasks).tolist()


def remove_padding(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of the encoder. Its layers get the same rows as an argument, also when they are recomputed."""
    if ARGUMENT in kwargs:
        hidden, *others = args
        return (kwargs[ARGUMENT].take(hidden), *others), kwargs
    return None


def restore_padding(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if ARGUMENT in kwargs:
        output.last_hidden_state = kwargs[ARGUMENT].put(output.last_hidden_state)
    return output


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    unpadded_rows: UnpaddedRows | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa on [B, heads, T, D]; with `unpadded_rows` on [1, heads, N, D], as if it were
    padded.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if unpadded_rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    query, key, value = (
        unpadded_rows.put(each.transpose(1, 2)).transpose(1, 2) for each in (query, key, value)
    )
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    return unpadded_rows.take(output), None


class Learner(nn.Module):
    """Common part of the three kinds.

    head_path: of the head's module; a language model has none. head_names: of the head's weight, then its
    bias, if any. top: prefix of the names of all parameters above the base, which LoRA trains in full.
    """

    head_path: str
    head_names: tuple[str, ...] = ()
    top: tuple[str, ...] = ()

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf, self.unpadded = hf, Unpadded(hf)

    def cast(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs with pixels and other numbers in the dtype of the model, which not every model casts."""
        dtype = next(self.hf.parameters()).dtype
        return map_tensors(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def classify(self, features: Tensor) -> Tensor:
        """Logits [B, C] of features [B, D]: the last operation of forward."""
        return self.get_submodule(self.head_path)(features)


class CausalLearner(Learner):
    """A causal language model; it has no separate head to reset.

    Rows that share a sequence come with position_ids and without attention_mask: transformers then keeps
    them apart where the positions restart (masking_utils.find_packed_sequence_indices).
    """

    def forward(self, *, want: str = "logits", **inputs: Tensor) -> Tensor:
        assert want == "logits", "a language model has no class features"
        return self.hf(**inputs, use_cache=False).logits


def feature_size(hf_config: Any) -> int:
    """Size of the last hidden states; convolutional models have one of each stage."""
    return hf_config.hidden_size if hasattr(hf_config, "hidden_size") else hf_config.hidden_sizes[-1]


class PooledClassifier(Learner):
    """An encoder, mean or cls pooling over its last hidden states, and a linear head.

    norm: length that every feature vector is scaled to; 0 leaves them unscaled. With a prototype head the
    logits are then 2 norm^2 cos(f, mu_c) and a constant, where each class has one example: cosines at the
    temperature 1 / (2 norm^2).
    """

    head_path, head_names, top = "head", ("head.weight", "head.bias"), ("head.",)

    def __init__(self, hf: Any, classes: int, pooling: str, norm: float = 0.0) -> None:
        super().__init__(hf)
        self.pooling, self.norm = pooling, norm
        self.head = nn.Linear(feature_size(hf.config), classes)
        for name, param in hf.named_parameters():
            if name.split(".")[0] == "pooler":  # unused, so it would get no gradient
                param.requires_grad_(False)

    def forward(self, *, want: str = "logits", **inputs: Tensor) -> Any:
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
        if want == "features":
            return features
        return (features, self.head(features)) if want == "both" else self.head(features)


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
        hook = self.get_submodule(self.head_path).register_forward_pre_hook(
            lambda _, args: seen.append(args[0])
        )
        try:
            logits = self.hf(**self.cast(inputs), **self.unpadded.of(inputs.get("attention_mask"))).logits
        finally:
            hook.remove()
        if want == "logits":
            return logits
        features = seen[0]
        if features.ndim == 3:  # decoders score every token and keep the last one
            # of transformers' classifiers: the last one that is no padding, by its id
            ids, last = inputs.get("input_ids"), features.shape[1] - 1
            if ids is not None:
                places = torch.arange(ids.shape[1], device=ids.device)
                last = ((ids != self.hf.config.pad_token_id) * places).argmax(1)
            features = features[torch.arange(len(features), device=features.device), last]
        return (features, logits) if want == "both" else features


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor in fp32, or in fp64 if it is in fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def objective(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return this micro-batch's part of the set's mean loss, its number of correct rows or answers, and its
    number of rows or answers.

    Summed over all micro-batches of all ranks the loss is the mean over the set: over rows for [B, C] logits,
    over label tokens for [B, T, V] ones. An answer of a causal_lm row, the label tokens of a run, is correct
    when each of them is the most likely one. NaN logits count as wrong.
    """
    losses, right, rows = per_row(logits, batch)
    return losses.sum(), right.sum(), rows.sum()


def per_row(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """`objective` before its sums: [B] each. Answers that share a sequence share an element."""
    counted = batch.weights > 0
    if logits.ndim == 2:
        logits = logits[:, : batch.classes or None]  # an episode of fewer classes than the head has
        losses = F.cross_entropy(at_least_fp32(logits), batch.labels, reduction="none")
        rows, right = counted.long(), ((logits.argmax(-1) == batch.labels) & ~losses.isnan()).long()
    else:
        logits, labels = at_least_fp32(logits), batch.labels[:, 1:]
        # over the last dimension: sums over a strided one lose digits where the vocabulary is large
        following = F.pad(labels, (0, 1), value=IGNORE)
        losses = F.cross_entropy(
            logits.flatten(0, 1), following.flatten(), ignore_index=IGNORE, reduction="none"
        )
        losses = losses.view_as(following)[:, :-1]
        wrong = ((logits.argmax(-1)[:, :-1] != labels) & (labels != IGNORE)) | losses.isnan()
        # the answer that each token belongs to, from 1: several where a sequence holds packed rows or pairs
        labelled = F.pad(labels != IGNORE, (1, 0))  # the first token is not predicted
        numbers = (labelled.long().diff(dim=1) > 0).cumsum(1)
        failed = numbers.new_zeros(len(numbers), numbers.shape[1] + 1).scatter_reduce(
            1, numbers, wrong.long(), "amax"
        )
        losses, rows = losses.sum(1), numbers[:, -1]
        right = rows - failed.sum(1)
    return losses * batch.weights, right * counted, rows * counted
