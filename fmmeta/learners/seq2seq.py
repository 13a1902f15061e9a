"""The learner of encoder-decoders, such as T5 and BART. `outputs` are the logits [B, T, V].

    encoder   the input: alone with --prompt_template plain, else in a format string ('summarize: {input}')
    decoder   the start token, then the answer (teacher forcing); labels are the answer and its end token

A row has a text as input and a text as answer, in the columns of causal_lm. It is right when each of its
label tokens is the most likely one. Input and answer lose what is beyond --max_length; the answer keeps its
end token. Of several right answers the first is learned; in metrics the best counts. The target `others`
[B, L] has the tokens of the others, each with IGNORE before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, takewhile
from typing import Any

import torch
from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.text import PromptTemplate, rouge_l, shortened
from fmmeta.config.settings import Config
from fmmeta.learners.base import HFLearner, RowLosses, at_least_fp32
from fmmeta.learners.shared_prefix import greedy
from fmmeta.tasks.batching import IGNORE, Collated, Example, MicroBatch, pad_right
from fmmeta.tasks.data.columns import PairInput, Row, RowReader, answers_of, pick, template_columns
from fmmeta.tasks.data.encode import IDS_ALONE, encode_texts, text_prompt


class Seq2SeqLearner(HFLearner):
    """An encoder-decoder; it has no head to reset."""

    auto, peft_task = "AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"
    example: Mapping[str, Any] = {"input": "2 + 2", "output": "4"}

    @classmethod
    def rows(cls, config: Config, tokenizer: Any, columns: Sequence[str], answered: bool = True) -> RowReader:
        template = config.prompt_template
        if template == "chat" or PromptTemplate.of(template).after:
            raise UsageError(
                f"prompt_template={shortened(template)}: an encoder reads the input alone; use plain, or a"
                " format string that ends before the answer, such as 'summarize: {input}'"
            )
        free = [column for column in columns if column not in template_columns(config)]
        picked = pick(config, free, "input_column")
        answer = pick(config, columns, "output_column") if answered else None
        source = PairInput.of(config, str(picked), columns, config.input_column is None)

        def read(row: Row) -> dict[str, Any]:
            found = dict[str, Any](input=source.read(row)[0])
            if answer is not None:
                right = answers_of(row, answer)
                found |= {"output": right[0], **({"answers": right} if right[1:] else {})}
            return found

        return RowReader(read)

    @classmethod
    def encode(
        cls, config: Config, tokenizer: Any, rows: Sequence[Any], facts: Mapping[str, Any]
    ) -> list[Example]:
        plain = config.prompt_template == "plain"
        before = str if plain else text_prompt(config.prompt_template).before
        end, most = tokenizer.eos_token_id, config.max_length
        inputs = encode_texts(tokenizer, [before(row["input"]) for row in rows], most)
        answers = [row.get("answers", [row.get("output", "")]) for row in rows]  # none of rows to answer
        every = tokenizer(text_target=[*chain(*answers)], **IDS_ALONE)["input_ids"]
        ids = iter([(one[:-1] if one[-1:] == [end] else one)[: most - 1] for one in every])
        examples = list[Example]()
        for before, of_row in zip(inputs, answers, strict=True):
            first, *others = (next(ids) for _ in of_row)
            values = {"others": [token for one in others for token in (IGNORE, *one)]}
            examples.append(Example(before, [*first, end], values=values))
        return examples

    @classmethod
    def collate(cls, rows: Sequence[Example], pad_token_id: int) -> Collated:
        """The first token for the decoder is a placeholder, which `forward` replaces."""
        labels = pad_right([row.labels for row in rows], IGNORE)
        inputs = {
            "input_ids": pad_right([row.input_ids for row in rows], pad_token_id),
            "attention_mask": pad_right([[1] * len(row.input_ids) for row in rows], 0),
            "decoder_input_ids": pad_right([[pad_token_id, *row.labels[:-1]] for row in rows], pad_token_id),
        }
        others = pad_right([row.values["others"] for row in rows], IGNORE)
        return inputs, {"labels": labels, "others": others}

    def forward(self, **inputs: Tensor) -> Tensor:
        ids = inputs.pop("decoder_input_ids")
        start = torch.full_like(ids[:, :1], self.hf.config.decoder_start_token_id)
        shifted = torch.cat([start, ids[:, 1:]], 1)
        return self.hf(**inputs, decoder_input_ids=shifted, use_cache=False).logits

    def losses(self, outputs: Tensor, batch: MicroBatch) -> RowLosses:
        logits, labels = at_least_fp32(outputs), batch.targets["labels"]
        losses = self.loss(logits.flatten(0, 1), labels.flatten()).view_as(labels)
        wrong = ((logits.argmax(-1) != labels) & (labels != IGNORE)) | losses.isnan()
        right = ~wrong.any(1)
        return RowLosses(losses.sum(1), right.long(), torch.ones_like(right, dtype=torch.long))

    def answers(self, outputs: Tensor, batch: MicroBatch) -> Iterator[tuple[list[int], list[Any]]]:
        """The likeliest tokens after the right ones before them, without the end token: a model that repeats
        its last token would otherwise give the whole text. Of several right answers, all are the reference.
        """
        guess = outputs.argmax(-1).masked_fill_(outputs.isnan().any(-1), -1).tolist()
        labels, others = (batch.targets[name].tolist() for name in ("labels", "others"))
        for predicted, right, more, weight in zip(guess, labels, others, batch.weights.tolist(), strict=True):
            if weight > 0:
                first = [token for token in right if token != IGNORE][:-1]
                runs = [[*run] for known, run in groupby(more, lambda token: token != IGNORE) if known]
                yield predicted[: len(first)], [first, *runs] if runs else first

    @torch.no_grad()
    def respond(self, batch: MicroBatch, max_new_tokens: int) -> list[list[int]]:
        """Greedy answers, without their end tokens."""
        hf, inputs = self.hf, {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
        found = hf.generation_config.eos_token_id or hf.config.eos_token_id
        ends = [*found] if isinstance(found, (list, tuple)) else [found]
        with greedy(hf):
            out = hf.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                eos_token_id=ends,
                pad_token_id=hf.config.pad_token_id,
                decoder_start_token_id=hf.config.decoder_start_token_id,
            )
        rows = zip(out[:, 1:].tolist(), batch.weights.tolist(), strict=True)
        return [[*takewhile(lambda one: one not in ends, row)] for row, weight in rows if weight > 0]

    @classmethod
    def present(
        cls, answer: Sequence[Any], names: Sequence[str], facts: Mapping[str, Any], tokenizer: Any = None
    ) -> str | list[str]:
        if answer and isinstance(answer[0], list):
            return [tokenizer.decode(one, skip_special_tokens=True).strip() for one in answer]
        known = [one for one in answer if one >= 0]
        return tokenizer.decode(known, skip_special_tokens=True).strip()

    @classmethod
    def metrics(cls, predictions: Sequence[str], references: Sequence[str | list[str]]) -> dict[str, float]:
        right = [[one] if isinstance(one, str) else one for one in references]
        pairs = [*zip(predictions, right, strict=True)]
        best = [max(rouge_l(answer, one) for one in of_row) for answer, of_row in pairs]
        return {
            "exact_match": sum(answer in of_row for answer, of_row in pairs) / len(pairs),
            "rouge_l": sum(best) / len(pairs),
        }
