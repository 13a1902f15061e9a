"""A row, and its columns by role: text or image and class, or input and output, options, stratum.

A column has the name that a setting gives, or a usual one. Errors of a row begin with a verb: `prefixed` puts
its origin, `file:line`, before them.
"""

import datetime
import json
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.security import import_function
from fmmeta.common.text import PromptTemplate, broken_text, shortened, to_json
from fmmeta.config.settings import Config, RowConfig
from fmmeta.tasks.data.turns import BEGIN, PAIR, Turns, as_text, last_answer, read_turns

Bad = Callable[[UsageError], None]
"""Handles an error of a row or a file: raises it, or stores it."""


@dataclass(frozen=True, slots=True)
class Row:
    """Values by column, their origin (`file:line`), and the folder where relative paths of images begin."""

    values: dict[str, Any]
    origin: str
    folder: Path | None = None


class RowReader(NamedTuple):
    """What a learner reads of rows (`Learner.rows`).

    read: from a row to what is stored of it, as JSON, and the `image` for a model of images. Raises
    `UsageError` without the place of the row. columns: those that are read; none: there are no notices about
    unread ones. label: the column of classes.
    """

    read: Callable[[Row], Any]
    columns: tuple[str, ...] = ()
    label: str = ""


def refuse(error: UsageError) -> NoReturn:
    raise error


INSTRUCTION = "instruction"  # is joined with an `input`
TEXT, LABEL = ("text", "sentence", "utterance"), ("label", "intent", "class")
PAIRED = ("sentence1", "sentence2")  # the texts of a pair
CHATS = ("messages", "conversations")  # the last turn of the assistant is the answer
USUAL = {  # names that are recognised, without regard to case
    "text_column": (*TEXT, PAIRED[0]),
    "image_column": ("image", "img", "text"),  # the last one is that of pairs
    "label_column": LABEL,
    "stratum_column": ("stratum", "category", "domain"),
    "task_column": ("task",),
    "input_column": ("input", "prompt", "question", INSTRUCTION, *TEXT, *CHATS),
    "output_column": ("output", "answer", "target", "answers", "completion", *LABEL, *CHATS),
}
OPTIONS = "options"  # column of the answers to choose from, for causal_lm


def pick(
    config: Config,
    columns: Collection[str],
    setting: str,
    required: bool = True,
    names: Sequence[str] = (),
) -> str | None:
    """The column that a setting names, else the first usual one, else None unless it is required.

    names: usual ones, in place of those in USUAL. Raises `UsageError` without the name of the data.
    """
    asked = getattr(config, setting)
    names = (names or USUAL[setting]) if asked is None else [asked]
    found = usual(names, columns)
    if asked is not None and found is None:
        raise UsageError(f"{setting}={asked} is no column of the data; it has {', '.join(columns)}")
    if found is None and required:
        pairs = config.learner.of_classes and all(
            usual(USUAL[one], columns) for one in ("input_column", "output_column")
        )
        raise UsageError(
            f"the data has none of the columns {', '.join(names)}; it has "
            f"{', '.join(columns)}: name one with --{setting}"
            + (", or use --task_type causal_lm for pairs of input and output" if pairs else "")
        )
    return found


def input_setting(config: Config, images: bool) -> str:
    """The setting that names the column of inputs; "" if no setting does. images: whether the model reads
    images.
    """
    spec = config.learner
    if spec.generates or "input_column" in spec.reads:
        return "input_column"
    if not (spec.of_classes or "text_column" in spec.reads):
        return ""
    return "image_column" if images else "text_column"


def usual(names: Iterable[str], columns: Iterable[str]) -> str | None:
    """The column like the first of these names that has one."""
    return next(filter(None, (column_like(name, columns) for name in names)), None)


def column_like(name: str, columns: Iterable[str]) -> str | None:
    """The column of this name, else one whose name differs in upper and lower case alone."""
    alike = [column for column in columns if column.lower() == name.lower()]
    return name if name in alike else next(iter(alike), None)


def template_columns(config: RowConfig) -> list[str]:
    """The columns that --prompt_template names, {input} aside."""
    return [] if config.prompt_template == "chat" else PromptTemplate.of(config.prompt_template).columns


def is_text(value: Any) -> bool:
    """Whether a value is read as a text: numbers and dates are; null, NaN, bytes, lists, objects and an empty
    text are not.
    """
    kinds = (str, bool, numbers.Number, np.bool_, datetime.date, datetime.time, datetime.timedelta)
    try:
        return isinstance(value, kinds) and bool(value == value) and str(value) != ""
    except (ValueError, ArithmeticError):  # an integer of thousands of digits, a signalling NaN
        return False


def is_missing(value: Any) -> bool:
    """Whether a value is null, NaN as in a table, or an empty text or list."""
    empty = isinstance(value, (str, list, tuple)) and not value
    return value is None or empty or (isinstance(value, float) and math.isnan(value))


def cell(row: Row, column: str) -> str:
    """The text of a row in a column. Raises `UsageError`."""
    return text_of(column, row.values.get(column))


def text_of(column: str, value: Any) -> str:
    """The text of a value in a column. Raises `UsageError`."""
    if type(value) is str and value and value.isascii() and "\0" not in value:
        return value
    if not is_text(value):
        why = " (missing, null, or the number of no class, such as -1)" if value is None else ""
        raise UsageError(f"has {column}={shortened(value)}, which is no text{why}; fix the row")
    text = str(value)
    if wrong := broken_text(text):
        raise UsageError(f"has {wrong} in {column}; fix the row")
    return text


def turns_of(row: Row, column: str) -> Turns | None:
    """The turns of a row in a column; None for any other value. A column of conversations may have them as
    the text of a JSON list.
    """
    value = row.values.get(column)
    if isinstance(value, str):
        if column.lower() not in CHATS:
            return None
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return read_turns(value)


def answers_of(row: Row, column: str) -> list[str]:
    """The right answers of a row: a text, a list of texts, or the last turn of an assistant; none is empty.

    Raises `UsageError`.
    """
    value = row.values.get(column)
    if turns := turns_of(row, column):
        if (end := last_answer(turns)) < 0:
            raise UsageError(f"has no turn of an assistant in {column}; add the answer")
        value = [turns[end]["content"]]
    if not isinstance(value, (list, tuple)) or not value:
        value = [value]
    answers = list(dict.fromkeys(text_of(column, one) for one in value))
    if blank := [answer for answer in answers if not answer.strip()]:
        raise UsageError(f"has the answer {blank[0]!r}, which is empty; fix the row")
    return answers


def only_answer(row: Row, column: str) -> str:
    """The right answer of a row that has one. Raises `UsageError`."""
    first, *others = answers_of(row, column)
    if others:
        raise UsageError(f"has {column}={shortened(row.values.get(column))}; give one answer")
    return first


def options_of(row: Row, column: str, answers: Sequence[str]) -> list[str]:
    """The answers to choose from in a row's column `options`; [] without one. Raises `UsageError`.

    A right answer is one of them, and each has more than spaces in it.
    """
    options = row.values.get(column)
    if is_missing(options):
        return []
    if not isinstance(options, (list, tuple)) or not all(
        isinstance(one, str) and one.strip() for one in options
    ):
        raise UsageError(
            f"has {column}={shortened(options)}, which is no list of texts; write"
            f' "{column}": ["yes", "no"], say, or leave it out'
        )
    distinct = list(dict.fromkeys(text_of(column, one) for one in options))
    if len(distinct) < 2 or not {*answers} & {*distinct}:
        raise UsageError(
            f"has {column}={shortened(options)}, which are not two or more texts with the"
            f" answer {shortened(answers[0])} among them; add it"
        )
    return distinct


@dataclass(frozen=True)
class PairInput:
    """The columns of an input: one, `instruction` and `input`, which a line break joins, those that
    --prompt_template names, or the two of a pair of texts. Of several, some may be empty, but none of a pair.

    template: None unless it names other columns than that of {input} (`picked`); then the input is its whole
    prompt. chat: whether turns are written. answered: whether the column has the answer as its last turn of
    the assistant.
    """

    columns: tuple[str, ...]
    template: PromptTemplate | None = None
    picked: str = ""
    separator: str = "\n"
    chat: bool = False
    answered: bool = False

    @classmethod
    def of(
        cls,
        config: RowConfig,
        picked: str,
        columns: Collection[str],
        joins: bool,
        answered: bool = False,
    ) -> "PairInput":
        """picked: the column of {input}. columns: those of the data. joins: whether `picked` is a usual name,
        which another column may precede or follow. Raises `UsageError`.
        """
        if named := template_columns(config):
            if missing := [name for name in named if name not in columns]:
                raise UsageError(
                    f"prompt_template={config.prompt_template} names {{{missing[0]}}}, which is no column of"
                    f" the data; it has {', '.join(columns)}"
                )
            return cls((*named, picked), PromptTemplate.of(config.prompt_template), picked)
        kind = picked.lower() if joins else ""
        if kind == PAIRED[0] and (second := column_like(PAIRED[1], columns)):
            return cls((picked, second), separator=PAIR)
        first = column_like(INSTRUCTION, columns) if kind == "input" else None
        chat = config.prompt_template == "chat"
        return cls((first, picked) if first else (picked,), chat=chat, answered=answered)

    def read(self, row: Row) -> tuple[str, str]:
        """The input, and the texts of its columns alone. Raises `UsageError`."""
        if len(self.columns) == 1 and self.template is None:
            text = self.text(row, self.columns[0])
            return text, text
        some = self.separator != PAIR
        texts = {
            column: "" if some and is_missing(row.values.get(column)) else self.text(row, column)
            for column in self.columns
        }
        parts = list(filter(None, texts.values()))
        if not parts:
            raise UsageError(f"has no text in {', '.join(self.columns)}; fix the row")
        joined = self.separator.join(parts)
        if self.template is None:
            return joined, joined
        return self.template.fill({**texts, "input": texts[self.picked]}), joined

    def text(self, row: Row, column: str) -> str:
        """The text of a column, or its turns before the answer. Raises `UsageError`."""
        turns = turns_of(row, column)
        if turns is None and self.answered:
            raise UsageError(
                f"has {column}={shortened(row.values.get(column))}, which is no list of turns;"
                f' write "{column}": [{{"role": "user", "content": "..."}}, ...]'
            )
        if turns is None:
            return cell(row, column)
        end = last_answer(turns)
        if end >= 0 and (self.answered or end == len(turns) - 1):
            turns = turns[:end]
        text = text_of(column, as_text(turns))
        if text.startswith(BEGIN) and not self.chat:
            raise UsageError(
                f"has several turns in {column}, which a chat template writes; give --prompt_template chat"
            )
        return text


def stratifier(config: Config) -> Callable[[Row], str] | None:
    """The function of --stratify_by, from a row to its stratum; None without the setting.

    Raises `UsageError`, as the returned function does: an error of that function is not one of the row.
    """
    named = config.stratify_by
    if named is None:
        return None
    function = import_function("stratify_by", named)

    def stratum_of(row: Row) -> str:
        with usage_errors(f"stratify_by={named} failed at {row.origin}", "fix the function"):
            value = function(dict(row.values))
        if not is_text(value) or broken_text(str(value)):
            raise UsageError(
                f"stratify_by={named} returned {shortened(value)} at {row.origin}, which names no stratum;"
                " return a text or a number"
            )
        return str(value)

    return stratum_of


def as_json(origin: str, values: dict[str, Any], write: Callable[..., str] = to_json, **how: Any) -> str:
    """The columns of a row as JSON. write, how: a function such as json.dumps, and its options.

    Raises `UsageError`.
    """
    fix = "give texts, numbers of fewer digits, lists, and dictionaries whose keys are texts"
    with usage_errors(f"{origin} has a value that JSON cannot hold", fix):
        return write(values, **how)
