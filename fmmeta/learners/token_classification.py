"""Token classification: a tag for each word of a row, as in named entity recognition and tagging.

    {"tokens": ["Anna", "lives", "in", "Rome"], "tags": ["B-PER", "O", "O", "B-LOC"]}

The tags of an episode are those of its support set, sorted. The label of a word is on its first token; words
that --max_length cuts off do not count. A tag of the query set that the support set does not have is never
right: no loss is taken there, and metrics see it. `outputs` are the logits [B, T, C].
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fmmeta.common.errors import UsageError
from fmmeta.common.text import broken_text, shortened
from fmmeta.config.settings import Config
from fmmeta.learners.base import RowLosses, at_least_fp32
from fmmeta.learners.classification import NativeClassifier, of_episode
from fmmeta.tasks.batching import IGNORE, Example, MicroBatch
from fmmeta.tasks.data.columns import Row, RowReader, pick

TAGS = ("tags", "ner_tags", "labels", "label")
ENDS, STARTS = ("E", "L", "S", "U"), ("B", "S", "U")  # of an entity, in BIO, BIOES (IOBES) and BILOU


class TokenClassifier(NativeClassifier):
    """AutoModelForTokenClassification; its head has an output for each tag of an episode."""

    auto, peft_task, pipeline = "AutoModelForTokenClassification", "TOKEN_CLS", "token-classification"
    problem_type = pooled = None
    inputs, pair = ("tokens", "words"), ()
    example: Mapping[str, Any] = {
        "tokens": ["Anna", "lives", "in", "Rome"],
        "tags": ["B-PER", "O", "O", "B-LOC"],
    }

    @classmethod
    def rows(cls, config: Config, tokenizer: Any, columns: Sequence[str], answered: bool = True) -> RowReader:
        tokens = str(pick(config, columns, "text_column", names=cls.inputs))
        tags = pick(config, columns, "label_column", names=TAGS, required=answered)

        def read(row: Row) -> dict[str, list[str]]:
            found = {"tokens": listed(row.values, tokens)}
            if answered:
                found["tags"] = listed(row.values, str(tags))
                counts = [len(one) for one in found.values()]
                if counts[0] != counts[1]:
                    raise UsageError(f"has {counts[0]} {tokens} and {counts[1]} {tags}; give one for each")
            return found

        return RowReader(read)

    @classmethod
    def facts(cls, support: Sequence[Any], query: Sequence[Any] = ()) -> dict[str, Any]:
        names, of_query = ({tag for row in rows for tag in row["tags"]} for rows in (support, query))
        unseen = sorted(of_query - names)
        return {"names": sorted(names), **({"unseen": unseen} if unseen else {})}

    @classmethod
    def encode(
        cls, config: Config, tokenizer: Any, rows: Sequence[Any], facts: Mapping[str, Any]
    ) -> list[Example]:
        names = facts["names"]
        numbers = {tag: number for number, tag in enumerate([*names, *facts.get("unseen", ())])}
        return [encoded(tokenizer, row, numbers, len(names), config.max_length) for row in rows]

    def forward(self, **inputs: Tensor) -> Any:
        return self.hf(**self.cast(inputs), **self.unpadded.of(inputs.get("attention_mask"))).logits

    def logits(self, outputs: Tensor) -> Tensor:
        return at_least_fp32(outputs)

    def losses(self, outputs: Tensor, batch: MicroBatch) -> RowLosses:
        labels, logits = batch.targets["labels"], of_episode(at_least_fp32(outputs), batch)
        known = (labels != IGNORE) & (labels < batch.targets["classes"][:, None])
        losses = self.loss(logits.flatten(0, 1), labels.masked_fill(~known, IGNORE).flatten()).view_as(labels)
        right = (logits.argmax(-1) == labels) & known & ~losses.isnan()
        return RowLosses(losses.sum(1), right.sum(1), (labels != IGNORE).sum(1))

    def answers(self, outputs: Tensor, batch: MicroBatch) -> Iterator[tuple[list[int], list[int]]]:
        guess = of_episode(outputs, batch).argmax(-1).masked_fill_(outputs.isnan().any(-1), -1)
        for row, labels, weight in zip(guess, batch.targets["labels"], batch.weights.tolist(), strict=True):
            if weight > 0:
                yield row[labels != IGNORE].tolist(), labels[labels != IGNORE].tolist()

    @classmethod
    def present(
        cls, answer: Sequence[Any], names: Sequence[str], facts: Mapping[str, Any], tokenizer: Any = None
    ) -> list[str]:
        tags = [*names, *facts.get("unseen", ())]
        return [tags[number] if number >= 0 else "?" for number in answer]

    @classmethod
    def metrics(
        cls, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
    ) -> dict[str, float]:
        """Precision, recall and F1 of the entities of all rows together; 0 of none, as seqeval has it."""
        found, right = (
            {(i, *one) for i, tags in enumerate(rows) for one in entities(tags)}
            for rows in (predictions, references)
        )
        both = len(found & right)
        precision, recall = both / max(len(found), 1), both / max(len(right), 1)
        f1 = 2 * both / max(len(found) + len(right), 1)
        return {"precision": precision, "recall": recall, "f1": f1}


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """First word, last word and type of each entity, by the rules of conlleval (Tjong Kim Sang and De Meulder
    2003) and seqeval: a wrong beginning, such as I-PER after O, begins an entity too. A tag without a mark,
    but O, is an entity by itself.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC", "NOUN"]))
    [(0, 1, 'PER'), (3, 3, 'LOC'), (4, 4, 'NOUN')]
    """
    found, begin, kind, ended = set[tuple[int, int, str]](), -1, "", False
    for place, tag in enumerate([*tags, "O"]):
        mark, dash, name = tag.partition("-")
        if not dash or mark not in ("I", *STARTS, *ENDS):
            mark, name = ("O", "") if tag == "O" else ("S", tag)
        if begin >= 0 and (ended or mark in ("O", *STARTS) or name != kind):
            found.add((begin, place - 1, kind))
            begin = -1
        if begin < 0 and mark != "O":
            begin, kind = place, name
        ended = mark in ENDS
    return found


def listed(row: Mapping[str, Any], column: str) -> list[str]:
    """The texts of a column: a list of texts or whole numbers, or a text that is cut at spaces. Raises
    `UsageError`.
    """
    value = row.get(column)
    texts = value.split() if isinstance(value, str) else getattr(value, "tolist", lambda: value)()
    if (
        not isinstance(texts, (list, tuple))
        or not texts
        or not all(
            type(one) in (str, int) and str(one).strip() and not broken_text(str(one)) for one in texts
        )
    ):
        raise UsageError(f"has {column}={shortened(value)}, which is no list of texts; fix the row")
    return [str(one) for one in texts]


def encoded(
    tokenizer: Any, row: Mapping[str, Any], numbers: Mapping[str, int], known: int, max_length: int
) -> Example:
    """A row as tokens, of its words with spaces between them. known: how many of the tags are learned.

    Raises `UsageError` for a tokenizer that does not say where its tokens are.
    """
    words, tags = list(row["tokens"]), row.get("tags")
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError("the tokenizer does not say where its tokens are; give a fast one (tokenizer.json)")
    for _ in range(2):
        found = tokenizer(
            " ".join(words),
            truncation=True,
            max_length=max_length,
            return_offsets_mapping=True,
            verbose=False,
        )
        places = first_tokens(found["offset_mapping"], words)
        last = max((number for number, place in enumerate(places) if place is not None), default=-1)
        lost = [number for number, place in enumerate(places[:last]) if place is None]
        if not lost or tokenizer.truncation_side == "left":
            break
        for number in lost:  # words that the tokenizer drops would shift the tags behind them
            words[number] = tokenizer.unk_token or "?"
    labels = [IGNORE] * len(found["input_ids"])
    for number, place in enumerate(places):
        if place is not None:
            labels[place] = numbers[tags[number]] if tags else 0
    return Example(found["input_ids"], labels, losses=sum(0 <= one < known for one in labels))


def first_tokens(offsets: Sequence[tuple[int, int]], words: Sequence[str]) -> list[int | None]:
    """The first token of each of the words, which spaces separate; None for one without a token.

    offsets: begin and end of each token in the text, both 0 of added ones.
    """
    begin, place, found = 0, 0, list[int | None]()
    for word in words:
        while place < len(offsets) and offsets[place][1] <= begin:
            place += 1
        has_one = place < len(offsets) and offsets[place][0] < begin + len(word)
        found.append(place if has_one else None)
        place, begin = place + has_one, begin + len(word) + 1
    return found
