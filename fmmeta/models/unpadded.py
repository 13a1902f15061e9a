"""Encoder layers without padding: between the embeddings and the last layer only real tokens are computed.

    embeddings [B, T, H] --> [1, N, H] --> layers --> [B, T, H], zeros on padding

N: real tokens of the micro-batch. Everything in a layer but attention works token by token. Attention gets
padded rows, and its padding is removed again. The numbers are the same up to the rounding of products of
other sizes. Used on CPUs, where arithmetic dominates; on a GPU the host would have to wait for N.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MODELS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "electra",
)  # `encoder(hidden, ...)` hands what it is given to attention
ATTENTION = "fmmeta_unpadded"  # what transformers calls it, in place of sdpa


@dataclass(frozen=True)
class UnpaddedRows:
    """Positions of the real tokens in a padded batch: `places` [N] among B x T."""

    places: Tensor
    shape: tuple[int, int]

    def take(self, padded: Tensor) -> Tensor:
        """[B, T, ...] -> [1, N, ...]."""
        return padded.flatten(0, 1).index_select(0, self.places)[None]

    def put(self, tokens: Tensor) -> Tensor:
        """[1, N, ...] -> [B, T, ...], zeros elsewhere."""
        rows, length = self.shape
        empty = tokens.new_zeros(rows * length, *tokens.shape[2:])
        return empty.index_copy(0, self.places, tokens[0]).view(rows, length, *tokens.shape[2:])


class Unpadded:
    """Around the encoder of `hf`, if it is one of MODELS with torch's attention; else nothing is changed, and
    `of` does nothing.

    Inside a pipeline the last stage alone leaves padding out.
    """

    def __init__(self, hf: Any) -> None:
        self.rows: UnpaddedRows | None = None  # of the pass under way
        self.seen: UnpaddedRows | None = (
            None  # of the last one: layers may be computed again for the backward pass
        )
        base = getattr(hf, hf.base_model_prefix, hf)
        config = hf.config
        self.works = (
            config.model_type in MODELS and config._attn_implementation == "sdpa" and not config.is_decoder
        )
        if self.works:
            own = copy.copy(config)  # masks are made, and the model is saved, by the one that it has
            own._attn_implementation = register()
            for module in base.encoder.modules():
                if getattr(module, "config", None) is config:
                    module.config = own
            base.encoder.register_forward_pre_hook(self._before, with_kwargs=True)
            base.encoder.register_forward_hook(self._after)

    @contextmanager
    def of(self, attention_mask: Tensor) -> Iterator[None]:
        """Inside, a forward pass over rows [B, T] leaves out what `attention_mask` has zeros for."""
        self.seen = None
        if self.works and attention_mask.device.type == "cpu" and not torch.compiler.is_compiling():
            places = attention_mask.flatten().nonzero()[:, 0]
            if len(places) < attention_mask.numel():
                self.rows = self.seen = UnpaddedRows(
                    places, (attention_mask.shape[0], attention_mask.shape[1])
                )
        try:
            yield
        finally:
            self.rows = None

    def counts(self, x: Tensor, tasks: int) -> list[int] | None:
        """Tokens of each of `tasks` equal runs of rows, if `x` [1, N, ...] is inside the encoder in the last
        pass, else None.
        """
        if self.seen is None or x.shape[:2] != (1, len(self.seen.places)):
            return None
        rows, length = self.seen.shape
        return torch.bincount(self.seen.places // (rows // tasks * length), minlength=tasks).tolist()

    def _before(self, encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Layers that are computed again for the backward pass get the same `rows`: they are kept with the
        other arguments.
        """
        if self.rows is None:
            return None
        hidden, *others = args
        return (self.rows.take(hidden), *others), {**kwargs, "rows": self.rows}

    def _after(self, encoder: Any, args: tuple[Any, ...], output: Any) -> Any:
        if self.rows is not None:
            output.last_hidden_state = self.rows.put(output.last_hidden_state)
        return output


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rows: UnpaddedRows | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa on [B, heads, T, D]; with `rows` on [1, heads, N, D], as if it were padded."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    query, key, value = (rows.put(each.transpose(1, 2)).transpose(1, 2) for each in (query, key, value))
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    return rows.take(output), None


def register() -> str:
    """Tell transformers of the attention; return its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    return ATTENTION
