"""Losses of a language model's answers: rows that begin alike share the computation of their first tokens.

    rows --> longest common prefix, in one pass of one row --> its keys and values, expanded
         --> the rest of each row, as a batch behind them  --> logits of the tokens before answer tokens only

The queries of an in-context episode share the support set, the options of a query its prompt: a prefix of P
tokens before Q rows of q tokens costs P + Q q tokens in place of Q (P + q). Prefixes are of tokens, not of
texts, so every row has the tokens that it has by itself. Rows with the same beginning behind a shared prefix
share it in turn. Results are those of complete rows up to rounding.

A cache is used where every layer attends to all earlier tokens and keeps their keys and values, and where a
short pass with it agrees with one without (`Answers.can_share`). Other models, such as those with a sliding
window, compute complete rows; so do compiled models, with all logits.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from fmmeta.learners.base import HFLearner, at_least_fp32
from fmmeta.tasks.batching import IGNORE, MicroBatch, pad_right, sent

LEAST_SAVED = {"cpu": 64}
"""Fewest tokens that a pass for a shared prefix must save, by type of device."""
LEAST_SAVED_ELSEWHERE = 2048  # there a pass of few tokens takes as long as one of many
AGREEMENT = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference between logits with a cache and without, as a share of their spread, by precision."""
AGREEMENT_LOW_PRECISION = 5e-2


@dataclass(frozen=True)
class AnswerRow:
    """Tokens of a row; positions whose logits predict its label tokens; these tokens."""

    ids: list[int]
    positions: list[int]
    targets: list[int]

    @classmethod
    def of(cls, ids: Sequence[int], labels: Sequence[int]) -> "AnswerRow":
        positions = [place for place, label in enumerate(labels[1:]) if label != IGNORE]
        return cls(list(ids), positions, [labels[place + 1] for place in positions])

    @property
    def most_shared(self) -> int:
        """Most tokens that a shared prefix may have: the logits at positions behind it are computed."""
        return self.positions[0] if self.positions else len(self.ids) - 1


def rows_of(batches: Sequence[MicroBatch]) -> list[AnswerRow]:
    """The rows of padded micro-batches."""
    rows = []
    for batch in batches:
        lengths = batch.inputs["attention_mask"].sum(1).tolist()
        for ids, labels, length in zip(
            batch.inputs["input_ids"].tolist(), batch.targets["labels"].tolist(), lengths, strict=True
        ):
            rows.append(AnswerRow.of(ids[:length], labels[:length]))
    return rows


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest common prefix.

    >>> common_prefix([[1, 2, 3], [1, 2, 4, 5], [1, 2]])
    2
    """
    ordered = sorted(list(row) for row in rows)
    pairs = zip(ordered[0], ordered[-1], strict=False)  # these two differ first
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class Answers:
    """Scores and prefixes of a causal language model."""

    learner: HFLearner

    def can_score(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether `losses` holds for these micro-batches: those of packed rows have no attention mask."""
        return not self.compiled and all("attention_mask" in batch.inputs for batch in batches)

    @cached_property
    def can_share(self) -> bool:
        """Whether rows may share the keys and values of a common prefix.

        Two short rows go through the model with and without a shared prefix.
        """
        hf = self.learner.hf
        if self.compiled or getattr(hf, "_is_stateful", False):
            return False
        weight = hf.get_input_embeddings().weight
        ids = torch.randint(weight.shape[0], (2, 9), generator=torch.Generator().manual_seed(0))
        ids[1, :5] = ids[0, :5]
        rows = [
            AnswerRow(row, list(range(5, length)), [])
            for row, length in zip(ids.tolist(), (9, 8), strict=True)
        ]
        try:
            cache = self.extended(None, rows[0].ids[:5])
            if not all(type(layer) is DynamicLayer for layer in cache.layers):
                return False
            shared, plain = (self._logits(rows, *behind) for behind in ((5, cache), (0, None)))
        except (AttributeError, NotImplementedError, TypeError, ValueError):  # it has another cache, or none
            return False
        allowed = AGREEMENT.get(weight.dtype, AGREEMENT_LOW_PRECISION)
        return bool((shared - plain).abs().max() <= allowed * plain.std())

    @torch.no_grad()
    def losses(
        self, rows: Sequence[AnswerRow], most_rows: int, most_tokens: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Summed loss over each row's label tokens (nats), fp64 [N], and whether each of them is the
        likeliest token, bool [N]; False for a loss that is NaN. Without gradients.

        most_rows, most_tokens: of one pass; see `cuts`.
        """
        device = self._device
        losses = torch.zeros(len(rows), dtype=torch.float64, device=device)
        wrong = torch.zeros(len(rows), dtype=torch.float64, device=device)
        for chosen, start, cache in self._passes(list(range(len(rows))), rows, 0, None):
            for which in cuts([len(rows[index].ids) for index in chosen], most_rows, most_tokens):
                part = chosen[which]
                here = [rows[index] for index in part]
                logits = self._logits(here, start, cache)
                if not (tokens := [token for row in here for token in row.targets]):
                    continue
                owner = sent([i for i in part for _ in rows[i].positions], device)
                targets = sent(tokens, device)
                each = self.learner.loss(logits, targets).double()
                losses.index_add_(0, owner, each)
                wrong.index_add_(0, owner, ((logits.argmax(-1) != targets) | each.isnan()).double())
        return losses, wrong == 0

    def prefix(self, prompts: Sequence[Sequence[int]]) -> Any:
        """The cache of a prefix of all prompts, expanded to as many rows; None where it would not pay.

        At least one token of each prompt follows the prefix.
        """
        length = min(common_prefix(prompts), min(map(len, prompts)) - 1)
        if not self._pays(length, len(prompts)):
            return None
        return expanded(self.extended(None, prompts[0][:length]), len(prompts))

    @torch.no_grad()
    def extended(self, cache: Any, ids: Sequence[int]) -> Any:
        """A cache of one row with `ids` behind the tokens of `cache`, which does not change."""
        hf = self.learner.hf
        cache = DynamicCache(config=hf.config) if cache is None else expanded(cache, 1)
        length = cache.get_seq_length() + len(ids)
        with head_at(hf, torch.empty(0, dtype=torch.long, device=self._device)):  # no logits are needed
            hf(
                input_ids=sent([list(ids)], self._device),
                attention_mask=torch.ones(1, length, dtype=torch.long, device=self._device),
                use_cache=True,
                **with_cache(hf, cache),
            )
        if cache.get_seq_length() != length:
            raise NotImplementedError("the model keeps no keys and values in the cache that it is given")
        return cache

    def _passes(
        self, chosen: list[int], rows: Sequence[AnswerRow], start: int, cache: Any
    ) -> Iterator[tuple[list[int], int, Any]]:
        """Rows that are computed together, longest first, with the tokens before them and their cache."""
        length = self._shared([rows[index] for index in chosen])
        if self._pays(length - start, len(chosen)):
            cache, start = self.extended(cache, rows[chosen[0]].ids[start:length]), length
        by_next, rest = defaultdict[int, list[int]](list), list[int]()
        for index in chosen:  # rows that continue alike
            row = rows[index]
            by_next[row.ids[length] if length < row.most_shared else -1].append(index)
        for token, group in by_next.items():
            alike = self._shared([rows[index] for index in group])
            if token >= 0 and len(group) < len(chosen) and self._pays(alike - start, len(group)):
                yield from self._passes(group, rows, start, cache)
            else:
                rest += group
        if rest:
            yield sorted(rest, key=lambda index: -len(rows[index].ids)), start, cache

    @staticmethod
    def _shared(rows: Sequence[AnswerRow]) -> int:
        return min(common_prefix([row.ids for row in rows]), *(row.most_shared for row in rows))

    def _pays(self, tokens: int, rows: int) -> bool:
        """Whether a pass for `tokens` that so many rows share takes less time than computing them in each."""
        least = LEAST_SAVED.get(self._device.type, LEAST_SAVED_ELSEWHERE)
        return tokens > 0 and rows > 1 and tokens * (rows - 1) >= least and self.can_share

    @torch.no_grad()
    def _logits(self, rows: Sequence[AnswerRow], start: int, cache: Any) -> Tensor:
        """Logits at the positions of all rows, fp32 [N, V]; `cache` holds their first `start` tokens."""
        ids = pad_right([row.ids[start:] for row in rows], self.learner.hf.config.pad_token_id or 0)
        mask = pad_right([[1] * len(row.ids) for row in rows], 0)  # of the tokens in the cache too
        behind = (
            {"use_cache": False}
            if cache is None
            else {**with_cache(self.learner.hf, expanded(cache, len(rows))), "use_cache": True}
        )
        width = ids.shape[1]
        places = [
            number * width + place - start for number, row in enumerate(rows) for place in row.positions
        ]
        given = {"input_ids": sent(ids, self._device), "attention_mask": sent(mask, self._device), **behind}
        outputs = outputs_at(self.learner.hf, sent(places, self._device).long(), **given)
        return at_least_fp32(outputs.logits[0])

    @property
    def compiled(self) -> bool:
        return getattr(self.learner.hf, "_compiled_call_impl", None) is not None

    @property
    def _device(self) -> torch.device:
        return self.learner.hf.get_input_embeddings().weight.device


def head_at(hf: Any, places: Tensor | None) -> AbstractContextManager[Any]:
    """In the block the output embeddings see the hidden states at `places` [N] of the flattened rows only, as
    [1, N, H]; None: all.
    """
    head = hf.get_output_embeddings()
    if head is None or places is None:
        return nullcontext()
    return head.register_forward_pre_hook(
        lambda _, args: (args[0].flatten(0, 1)[places][None], *args[1:]) if args else None
    )


def outputs_at(hf: Any, places: Tensor | None, **inputs: Any) -> Any:
    """The outputs of a model with logits [1, N, V] at `places` of the flattened rows, or [B, T, V] at all."""
    with head_at(hf, places):
        outputs = hf(**inputs)
    if places is not None and outputs.logits.shape[:2] != (1, len(places)):  # the head is no module
        outputs.logits = outputs.logits.flatten(0, 1)[places][None]
    return outputs


@contextmanager
def greedy(hf: Any) -> Iterator[None]:
    """Leaves out what the model's generation_config.json asks for beside end tokens, such as a repetition
    penalty, which would count the tokens of the prompt.
    """
    from transformers import GenerationConfig

    stored, hf.generation_config = hf.generation_config, GenerationConfig()
    try:
        yield
    finally:
        hf.generation_config = stored


def with_cache(hf: Any, cache: Any) -> dict[str, Any]:
    """The argument of a model for a cache, which transformers has renamed in 5.24."""
    renamed = "cache" in inspect.signature(hf.forward).parameters
    return {"cache" if renamed else "past_key_values": cache}


def expanded(cache: Any, rows: int) -> Any:
    """A cache of `rows` equal rows. It shares the memory of `cache`, which further tokens do not change."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in found.layers:
        layer.keys, layer.values = (one.expand(rows, -1, -1, -1) for one in (layer.keys, layer.values))
    return found


def cuts(lengths: Sequence[int], most_rows: int, most_tokens: int) -> Iterator[slice]:
    """Slices of rows, longest first, each of at most `most_rows` rows and `most_tokens` tokens with padding;
    a longer row is by itself. 0 tokens: no limit.

    >>> [*cuts([9, 8, 7, 3, 3], 4, 18)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    begin, even = 0, -(-len(lengths) // -(-len(lengths) // most_rows))  # as many rows in each pass
    while begin < len(lengths):
        size = min(even, most_tokens // lengths[begin]) if most_tokens else even
        end = min(begin + max(1, size), len(lengths))
        yield slice(begin, end)
        begin = end
