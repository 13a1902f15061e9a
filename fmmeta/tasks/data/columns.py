"""Columns of a data set by role: text and class, or input and output, task and stratum."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.data.rows import Bad, Row, refuse

TEXT, LABEL = ("text", "sentence", "utterance"), ("label", "intent", "class")
USUAL = {  # names that are recognised
    "text_column": TEXT,
    "label_column": LABEL,
    "stratum_column": ("stratum", "category", "domain"),
    "task_column": ("task",),
    "input_column": ("input", "prompt", "question", *TEXT),
    "output_column": ("output", "answer", "target", *LABEL),
}
HALF_PAIR = re.compile(r"[\ud800-\udfff]")


@dataclass
class Table:
    """Rows by role. `unit` is what splits assign: the named task, or the class if tasks have no names."""

    unit: list[str]
    stratum: list[str]
    task: list[str]  # "" if tasks have no names
    input: list[str]  # text or input
    target: list[str]  # class or output


def tabulate(
    name: str,
    rows: Sequence[Row],
    config: Config,
    notice: Callable[[str], None],
    bad: Bad = refuse,
    one_task: bool = False,
    unique: bool = True,
) -> Table:
    """Choose the columns of data set `name`, check that every row fills them, and drop duplicate rows.

    one_task: the rows are one task; columns of tasks and strata are ignored. unique: False keeps duplicates.
    """
    names = sorted({column for row in rows for column in row.values})
    causal = config.task_type == "causal_lm"
    columns = {
        "input": pick(name, config, names, "input_column" if causal else "text_column"),
        "target": pick(name, config, names, "output_column" if causal else "label_column"),
    }
    if not one_task:
        columns["task"] = pick(name, config, names, "task_column", required=causal)
        columns["stratum"] = pick(name, config, names, "stratum_column", required=False)
    found: dict[Any, dict[str, str]] = {}
    wrong = 0
    for number, row in enumerate(rows):
        try:
            values = {role: cell(row, column) for role, column in columns.items() if column}
        except UsageError as error:
            bad(error)
            wrong += 1
            continue
        key = (values.get("task"), values["input"], values["target"]) if unique else number
        found.setdefault(key, values)
    if duplicates := len(rows) - len(found) - wrong:
        notice(f"{duplicates} of {len(rows)} rows repeat another one and are left out")
    return Table(
        [values.get("task", values["target"]) for values in found.values()],
        [values.get("stratum", "all") for values in found.values()],
        [values.get("task", "") for values in found.values()],
        [values["input"] for values in found.values()],
        [values["target"] for values in found.values()],
    )


def pick(
    name: str, config: Config, columns: Sequence[str], setting: str, required: bool = True
) -> str | None:
    """The column that a setting names, else the first usual one, else None unless it is required."""
    asked = getattr(config, setting)
    if asked is not None:
        if asked not in columns:
            raise UsageError(f"{setting}={asked} is no column of dataset={name}; it has {', '.join(columns)}")
        return asked
    found = next((column for column in USUAL[setting] if column in columns), None)
    if found is None and required:
        raise UsageError(
            f"dataset={name} has none of the columns {', '.join(USUAL[setting])}; it has "
            f"{', '.join(columns)}: name one with --{setting}"
        )
    return found


def cell(row: Row, column: str) -> str:
    """The text of a row in a column. Raises `UsageError`."""
    value = row.values.get(column)
    empty = value is None or value == "" or (isinstance(value, float) and value != value)
    if empty or isinstance(value, (dict, list)):
        raise UsageError(f"{row.origin} has {column}={value!r}, which is no text; fix the row")
    text = str(value)
    if wrong := broken_text(text):
        raise UsageError(f"{row.origin} has {wrong} in {column}; fix the row")
    return text


def broken_text(text: str) -> str | None:
    """The characters of a text that no tokenizer accepts or no file can store."""
    if "\0" in text:
        return "NUL bytes"
    half = HALF_PAIR.search(text)
    return f"half of a surrogate pair (\\u{ord(half[0]):x})" if half else None
