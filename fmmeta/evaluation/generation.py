"""Generated answers of a language model and their scores: ROUGE-L and ranked options.

    rouge_l   F of the longest common subsequence of words, greedy answer against the reference (Lin 2004)
    options   whether the right answer has the highest total log-likelihood among the episode's answers

Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004, equations 2-4 with beta = 1; words are
runs of letters and digits, case does not count. Both need the whole model on one rank.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.models.load import max_positions
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import IGNORE, Batcher, Example
from fmmeta.tasks.data.encode import encode
from fmmeta.tasks.sources.base import Draw


def rouge_l(answer: str, truth: str) -> float:
    """ROUGE-L of an answer, between 0 and 1.

    >>> rouge_l("police killed the gunman", "police kill the gunman")  # Lin 2004, section 3
    0.75
    """
    given, reference = words(answer), words(truth)
    common = longest_common(given, reference)
    return 2 * common / (len(given) + len(reference)) if common else float(given == reference)


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
    """The metrics in `names` of an episode, with the weights of the worker, which holds a whole model."""

    def __init__(
        self,
        names: Sequence[str],
        worker: Any,
        tokenizer: Any,
        config: Config,
        batcher: Batcher,
        max_new_tokens: int,
    ) -> None:
        self.names, self.worker, self.tokenizer, self.config = names, worker, tokenizer, config
        self.batcher, self.max_new_tokens = replace(batcher, pack=None), max_new_tokens  # a row per sequence

    def of(self, draw: Draw) -> dict[str, float]:
        """The value of each metric, between 0 and 1."""
        return {name: getattr(self, f"_{name}")(draw) for name in self.names}

    def _rouge_l(self, draw: Draw) -> float:
        store = draw.store
        answers = generate(
            self.worker,
            self.tokenizer,
            [store.input_ids(row)[: store.labels(row).count(IGNORE)] for row, _ in draw.query],
            self.max_new_tokens,
            self.batcher.micro_batch_size,
        )
        truth = [store.text("target", row) for row, _ in draw.query]
        return sum(map(rouge_l, answers, truth)) / len(truth)

    def _options(self, draw: Draw) -> float:
        """Share of the queries whose right answer is the likeliest of the episode's distinct answers."""
        options = list(
            dict.fromkeys(draw.store.text("target", row) for row, _ in (*draw.support, *draw.query))
        )
        examples = encode(
            self.tokenizer,
            self.config,
            [draw.store.text("input", row) for row, _ in draw.query for _ in options],
            options * len(draw.query),
        )
        scores = torch.tensor(self.log_likelihoods(examples)).view(len(draw.query), len(options))
        truth = [options.index(draw.store.text("target", row)) for row, _ in draw.query]
        return float((scores.argmax(1) == torch.tensor(truth)).double().mean())

    def log_likelihoods(self, examples: Sequence[Example]) -> list[float]:
        """Total log-likelihood of each example's answer, in nats."""
        losses: list[float] = []
        for batch in self.batcher.split(examples):  # one at a time: the logits of all would take much memory
            (logits,) = self.worker.logits([batch])
            targets = batch.labels[:, 1:].to(logits.device)
            per_token = F.cross_entropy(
                logits[:, :-1].transpose(1, 2), targets, ignore_index=IGNORE, reduction="none"
            )
            losses += per_token.sum(1).tolist()
        # `Batcher.split` puts the longest rows first
        by_length = sorted(range(len(examples)), key=lambda i: -len(examples[i].input_ids))
        return [-loss for _, loss in sorted(zip(by_length, losses, strict=True))]


@torch.no_grad()
def generate(
    worker: FullModelWorker,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
) -> list[str]:
    """Greedy answers to prompts of tokens, in their order; an answer ends where the model's positions end.

    Raises `UsageError` for a prompt that leaves no position.
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
    for batch in batches_of_equal_room(room, batch_size):
        rows = [torch.tensor(prompts[index], device=worker.device) for index in batch]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        out = hf.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=room[batch[0]],
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id,
        )
        texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        for index, text in zip(batch, texts, strict=True):
            answers[index] = text.strip()
    return answers


def batches_of_equal_room(room: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in batches of equal room, so that no answer is shortened by another one of its batch."""
    batches = []
    for tokens in dict.fromkeys(room):
        indices = [index for index, one in enumerate(room) if one == tokens]
        batches += [indices[begin : begin + batch_size] for begin in range(0, len(indices), batch_size)]
    return batches
