"""Generated answers of a language model and their scores: ROUGE-L and ranked options.

    rouge_l   F of the longest common subsequence of words, greedy answer against the reference (Lin 2004)
    options   whether the right answer has the highest total log-likelihood among the episode's answers

Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004, equations 2-4 with beta = 1; words are
runs of letters and digits, case does not count. Both need the whole model on one rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.models.lengths import max_positions
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import IGNORE, Batcher, Example
from fmmeta.tasks.data.encode import encode_pairs
from fmmeta.tasks.data.token_store import TokenStore
from fmmeta.tasks.sources.base import Draw


def rouge_l(answer: str, truth: str) -> float:
    """Between 0 and 1."""
    said, right = words(answer), words(truth)
    common = longest_common(said, right)
    return 2 * common / (len(said) + len(right)) if common else float(said == right)


def words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for left in a:
        before = 0
        for j, right in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if left == right else max(row[j], row[j - 1])
    return row[-1]


class LanguageMetrics:
    """The metrics in `names` of an episode, from the weights that the worker holds."""

    def __init__(
        self,
        names: Sequence[str],
        worker: FullModelWorker,
        tokenizer: Any,
        config: Config,
        batcher: Batcher,
        max_new_tokens: int,
    ) -> None:
        self.names, self.worker, self.tokenizer, self.config = names, worker, tokenizer, config
        self.batcher, self.max_new_tokens = (
            replace(batcher, pack=None),
            max_new_tokens,
        )  # every row is looked at by itself

    def of(self, draw: Draw) -> dict[str, float]:
        return {name: getattr(self, f"_{name}")(draw) for name in self.names}

    def _rouge_l(self, draw: Draw) -> float:
        prompts = [prompt_of(draw.store, row) for row, _ in draw.query]
        answers = generate(
            self.worker, self.tokenizer, prompts, self.max_new_tokens, self.batcher.micro_batch_size
        )
        right = [draw.store.text("target", row) for row, _ in draw.query]
        return sum(map(rouge_l, answers, right)) / len(right)

    def _options(self, draw: Draw) -> float:
        """Share of the queries whose right answer is the likeliest of the episode's distinct answers."""
        options = list(
            dict.fromkeys(draw.store.text("target", row) for row, _ in (*draw.support, *draw.query))
        )
        asked = [draw.store.text("input", row) for row, _ in draw.query]
        left, right = [text for text in asked for _ in options], options * len(asked)
        examples = encode_pairs(
            self.tokenizer, left, right, self.config.max_length, self.config.prompt_template
        )
        scores = torch.tensor(self.log_likelihoods(examples)).view(len(asked), len(options))
        truth = [options.index(draw.store.text("target", row)) for row, _ in draw.query]
        return float((scores.argmax(1) == torch.tensor(truth)).double().mean())

    def log_likelihoods(self, examples: Sequence[Example]) -> list[float]:
        """Total log-likelihood of each example's answer, in nats."""
        found: list[float] = []
        for begin in range(0, len(examples), self.batcher.micro_batch_size):
            rows = examples[begin : begin + self.batcher.micro_batch_size]
            order = sorted(
                range(len(rows)), key=lambda i: -len(rows[i].input_ids)
            )  # as the batcher will have them
            scores = [0.0] * len(rows)
            done = 0
            dealt = self.batcher.split(rows)
            for batch, logits in zip(dealt, self.worker.logits(dealt), strict=True):
                losses = F.cross_entropy(
                    logits[:, :-1].transpose(1, 2),
                    batch.labels[:, 1:].to(logits.device),
                    ignore_index=IGNORE,
                    reduction="none",
                ).sum(1)
                for loss in losses.tolist():
                    scores[order[done]] = -loss
                    done += 1
            found += scores
        return found


def prompt_of(store: TokenStore, row: int) -> list[int]:
    """Tokens of a row up to its answer."""
    return store.input_ids(row)[: store.labels(row).count(IGNORE)]


@torch.no_grad()
def generate(
    worker: FullModelWorker,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
) -> list[str]:
    """Greedy answers to prompts of tokens; they end where the model's positions do.

    Raises `UsageError` for a prompt of all.
    """
    hf: Any = worker.model.hf
    pad, most = hf.config.pad_token_id, max_positions(hf.config)
    room = [max_new_tokens if most is None else min(max_new_tokens, most - len(prompt)) for prompt in prompts]
    if min(room, default=1) < 1:
        raise UsageError(
            f"max_new_tokens={max_new_tokens}: an input of {max(map(len, prompts))} tokens leaves none of the"
            f" model's {most} positions for an answer; lower --max_length"
        )
    answers = [""] * len(prompts)
    for places in alike(room, batch_size):
        part = [prompts[place] for place in places]
        longest = max(map(len, part))
        ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in part], device=worker.device)
        mask = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in part], device=worker.device
        )
        out = hf.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=room[places[0]],
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id,
        )
        for place, text in zip(
            places, tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True), strict=True
        ):
            answers[place] = text.strip()
    return answers


def alike(room: Sequence[int], batch_size: int) -> list[list[int]]:
    """Places in batches of equal room, so that no answer is cut for another one's sake."""
    found = []
    for most in dict.fromkeys(room):
        places = [place for place, own in enumerate(room) if own == most]
        found += [places[begin : begin + batch_size] for begin in range(0, len(places), batch_size)]
    return found
