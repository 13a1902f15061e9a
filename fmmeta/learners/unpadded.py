"""Encoder layers without padding: between the embeddings and the last layer only real tokens are computed.

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
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

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
        self.seen, mask = None, attention_mask
        if mask is not None and self.works and mask.is_cpu and not torch.compiler.is_compiling():
            places = mask.flatten().nonzero()[:, 0]
            if len(places) < mask.numel():
                self.seen = UnpaddedRows(places, mask.shape)
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
    if unpadded_rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    query, key, value = (
        unpadded_rows.put(each.transpose(1, 2)).transpose(1, 2) for each in (query, key, value)
    )
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    return unpadded_rows.take(output), None
