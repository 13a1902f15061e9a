"""Columns of a data set by role: text and class, or input and output, task and stratum."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.data.rows import Bad, Row, refuse

USUAL = {
    "text_column": ("text", "sentence", "utterance"),
    "label_column": ("label", "intent", "class"),
    "stratum_column": ("stratum", "category", "domain"),
    "task_column": ("task",),
    "input_column": ("input", "prompt", "question"),
    "output_column": ("output", "answer", "target"),
}
HALF_PAIR = re.compile(r"[\ud800-\udfff]")


@dataclass
class Table:
    """Rows by role. `member` is the unit of splits: the named task, or the class if tasks have no names."""

    member: list[str]
    stratum: list[str]
    task: list[str]  # "" where tasks have no names
    left: list[str]  # text or input
    right: list[str]  # class or output


def tabulate(
    name: str,
    rows: Sequence[Row],
    config: Config,
    notice: Callable[[str], None],
    bad: Bad = refuse,
    one_task: bool = False,
    unique: bool = True,
) -> Table:
    """Pick the columns of data set `name`, check that every row fills them, and drop rows that say the same
    twice.

    one_task: the rows are one task, whatever they say of tasks and strata. unique: False keeps
    duplicates.
    """
    columns = sorted({column for row in rows for column in row.values})
    causal = config.task_type == "causal_lm"
    if causal:
        left = pick(name, config, columns, "input_column", also="text_column")
        right = pick(name, config, columns, "output_column", also="label_column")
    else:
        left, right = pick(name, config, columns, "text_column"), pick(name, config, columns, "label_column")
    task = None if one_task else pick(name, config, columns, "task_column", required=causal)
    stratum = None if one_task else pick(name, config, columns, "stratum_column", required=False)
    roles = {"left": left, "right": right, "task": task, "stratum": stratum}
    table, seen, wrong = Table([], [], [], [], []), set(), 0
    for row in rows:
        try:
            values = {role: cell(row, column) for role, column in roles.items() if column}
        except UsageError as error:
            bad(error)
            wrong += 1
            continue
        key = (values.get("task"), values["left"], values["right"])
        if key in seen and unique:
            continue
        seen.add(key)
        table.left.append(values["left"])
        table.right.append(values["right"])
        table.task.append(values.get("task", ""))
        table.member.append(values.get("task", values["right"]))
        table.stratum.append(values.get("stratum", "all"))
    if left_out := len(rows) - len(table.left) - wrong:
        notice(f"{left_out} of {len(rows)} rows repeat another one and are left out")
    return table


def pick(
    name: str,
    config: Config,
    columns: Sequence[str],
    setting: str,
    also: str | None = None,
    required: bool = True,
) -> str | None:
    asked = getattr(config, setting)
    if asked is not None:
        if asked not in columns:
            raise UsageError(f"{setting}={asked} is no column of dataset={name}; it has {', '.join(columns)}")
        return asked
    usual = USUAL[setting] + (USUAL[also] if also else ())
    found = next((column for column in usual if column in columns), None)
    if found is None and required:
        raise UsageError(
            f"dataset={name} has none of the columns {', '.join(usual)}; it has "
            f"{', '.join(columns)}: name one with --{setting}"
        )
    return found


def cell(row: Row, column: str) -> str:
    value = row.values.get(column)
    empty = value is None or value == "" or (isinstance(value, float) and value != value)
    if empty or isinstance(value, (dict, list)):
        raise UsageError(f"{row.origin} has {column}={value!r}, which is no text; fix the row")
    text = str(value)
    if wrong := broken_text(text):
        raise UsageError(f"{row.origin} has {wrong} in {column}; fix the row")
    return text


def broken_text(text: str) -> str | None:
    """What no tokenizer takes or no file holds."""
    if "\0" in text:
        return "NUL bytes"
    half = HALF_PAIR.search(text)
    return f"half of a surrogate pair (\\u{ord(half[0]):x})" if half else None
