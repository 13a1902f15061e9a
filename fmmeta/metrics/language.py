"""Metrics of language models that fmmeta has, and generated answers; both need the whole model on one rank.

Of several right answers, the best counts.

rouge_l   F of the longest common subsequence of words, greedy answer against the reference (Lin 2004,
          "ROUGE: A Package for Automatic Evaluation of Summaries", equations 2-4 with beta = 1)
exact_match   whether the greedy answer is the reference, apart from spaces around it
options   whether the right answer has the highest total log-likelihood among the row's options, or, where
          it has none, among the episode's answers
rank      its place among them, from 1
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from fmmeta.common.errors import UsageError
from fmmeta.common.text import rouge_l
from fmmeta.config.settings import GENERATED, Config
from fmmeta.learners.load import max_positions
from fmmeta.learners.shared_prefix import AnswerRow, greedy, with_cache
from fmmeta.parallel.workers.full_model import FullModelWorker
from fmmeta.tasks.batching import IGNORE, Batcher, Example
from fmmeta.tasks.data.encode import AnswerReader, RowEncoder, labelled
from fmmeta.tasks.sources.base import Draw, EpisodeRows, EpisodeTransform, transformed


def values_of(draw: Draw, rows: Sequence[tuple[Any, int]]) -> list[Any]:
    """What the learner has stored of some rows of a draw."""
    return [draw.store.value(row) for row, _ in rows]


class LanguageMetrics:
    """The metrics in `names` of an episode, with the weights of the worker, which holds a whole model."""

    def __init__(
        self,
        names: Sequence[str],
        worker: Any,
        reader: AnswerReader,
        config: Config,
        batcher: Batcher,
        max_new_tokens: int,
        prompts: Sequence[EpisodeTransform] = (),
    ) -> None:
        """prompts: put the support set before queries, for in-context learning."""
        self.prompts = prompts
        self.names, self.worker, self.reader, self.config = names, worker, reader, config
        self.batcher, self.max_new_tokens = replace(batcher, pack=None), max_new_tokens  # a row per sequence

    def of(self, draw: Draw) -> dict[str, float]:
        """The value of each metric: the mean over the queries."""
        found: dict[str, float] = {}
        truth = [row.get("answers", [row["output"]]) for row in values_of(draw, draw.query)]
        if {*GENERATED} & {*self.names}:
            pairs = [*zip(self.greedy_answers(draw), truth, strict=True)]
            found["rouge_l"] = sum(
                max(rouge_l(answer, one) for one in right) for answer, right in pairs
            ) / len(truth)
            same = [answer in map(str.strip, right) for answer, right in pairs]
            found["exact_match"] = sum(same) / len(truth)
        if {"options", "rank"} & set(self.names):
            ranks = self.ranks_of_truth(draw, truth)
            found["options"] = sum(rank == 1 for rank in ranks) / len(truth)
            found["rank"] = sum(ranks) / len(truth)
        return {name: found[name] for name in self.names}

    def greedy_answers(self, draw: Draw) -> list[str]:
        return generate(
            self.worker,
            self.reader,
            [row.prompt for row in transformed(draw.episode(), self.prompts).query],
            self.max_new_tokens,
            self.batcher.micro_batch_size,
        )

    def ranks_of_truth(self, draw: Draw, truth: Sequence[Sequence[str]]) -> list[int]:
        """The place of each query's most likely right answer, from 1, by total log-likelihood among the row's
        options; of a row without options, among the distinct answers of the episode. Wrong ones that are as
        likely, or whose likelihood is NaN, come before it.
        """
        query = values_of(draw, draw.query)
        answers = list(dict.fromkeys(row["output"] for row in (*values_of(draw, draw.support), *query)))
        options = [row.get("options", answers) for row in query]
        pairs = [
            {"input": row["input"], "output": option}
            for row, of_row in zip(query, options, strict=True)
            for option in of_row
        ]
        examples = RowEncoder(self.config, self.reader.tokenizer).examples(pairs, {})
        found, episode = iter(examples), draw.episode()
        rows = [self.behind_one_prompt([next(found) for _ in of_row], episode) for of_row in options]
        scores = iter(self.log_likelihoods(list(itertools.chain(*rows))))
        ranks = []
        for of_row, right in zip(options, truth, strict=True):
            likelihoods = {option: next(scores) for option in of_row}
            of_right = max(likelihoods.pop(one) for one in right if one in likelihoods)
            ranks.append(1 + sum(not score < of_right for score in likelihoods.values()))  # NaN: the last
        return ranks

    def behind_one_prompt(self, options: list[Example], episode: EpisodeRows) -> list[Example]:
        """The options of a row, all behind what is left of the input and of the support set before the
        longest of them.
        """
        longest = max(options, key=lambda one: one.label_tokens)
        if any(len(one.input_ids) >= self.config.max_length for one in options):
            before = longest.prompt
            answers = [one.input_ids[len(one.prompt) :] for one in options]
            options = [labelled([*before, *answer], len(before)) for answer in answers]
        if not self.prompts:
            return options
        (row,) = transformed(replace(episode, query=[longest]), self.prompts).query
        # the first token of all, which may mark the start of the text, stays the first
        before = row.input_ids[: len(row.input_ids) - len(longest.input_ids) + 1]
        ignored = [IGNORE] * len(before)
        return [Example([*before, *one.input_ids[1:]], ignored + one.token_labels[1:]) for one in options]

    def log_likelihoods(self, examples: Sequence[Example]) -> list[float]:
        """Total log-likelihood of each example's answer, in nats."""
        answers = self.worker.prefixes
        if answers is not None and answers.can_score(()):
            rows = [AnswerRow.of(row.input_ids, row.token_labels) for row in examples]
            batcher = self.batcher
            return (-answers.losses(rows, batcher.micro_batch_size, batcher.max_tokens)[0]).tolist()
        losses: list[float] = []
        for batch in self.batcher.split(examples):  # one at a time: the logits of all would take much memory
            losses += self.worker.losses(batch).loss.tolist()
        # `Batcher.split` puts the longest rows first
        by_length = sorted(range(len(examples)), key=lambda i: -len(examples[i].input_ids))
        return [-loss for _, loss in sorted(zip(by_length, losses, strict=True))]


@torch.no_grad()
def generate(
    worker: FullModelWorker,
    reader: AnswerReader,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    around: Callable[[Sequence[int]], AbstractContextManager[None]] | None = None,
) -> list[str]:
    """Greedy answers to prompts of tokens, in their order; an answer ends at an end token of `reader`, and
    where the model's positions end.

    Prompts of similar length are a batch, and share the computation of a common prefix. around: context of
    the pass over some prompts, by their numbers, which ascend; it may change the model by the prompt, so that
    the order of the prompts is kept and nothing is shared.

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
    answers, shared = [""] * len(prompts), None if around else worker.prefixes
    for tokens in dict.fromkeys(room):  # in batches of equal room: no answer is shortened by another one
        indices = [index for index, one in enumerate(room) if one == tokens]
        if not around:
            indices.sort(key=lambda index: -len(prompts[index]))
        for begin in range(0, len(indices), batch_size):
            batch = indices[begin : begin + batch_size]
            cache = shared.prefix([prompts[index] for index in batch]) if shared else None
            start = cache.get_seq_length() if cache else 0  # padding is between the prefix and the rest
            rows = [torch.tensor(prompts[index][start:], device=worker.device) for index in batch]
            ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
            if cache:
                prefix = torch.tensor([prompts[batch[0]][:start]] * len(batch), device=worker.device)
                ids, mask = torch.cat([prefix, ids], 1), torch.cat([torch.ones_like(prefix), mask], 1)
            with greedy(hf), around(batch) if around else nullcontext():
                out = hf.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=tokens,
                    do_sample=False,
                    num_beams=1,
                    pad_token_id=pad,
                    eos_token_id=[*reader.ends],
                    **(with_cache(hf, cache) if cache else {}),
                )
            for index, answer in zip(batch, out[:, ids.shape[1] :].tolist(), strict=True):
                answers[index] = reader.text(answer)
    return answers
