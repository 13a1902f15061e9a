"""Columns of a data set by the role they play: text and class, or input and output, task and stratum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fmmeta.config import Config, UsageError
from fmmeta.tasks.rows import Row

USUAL = {
    "text_column": ("text", "sentence", "utterance"), "label_column": ("label", "intent", "class"),
    "stratum_column": ("stratum", "category", "domain"), "task_column": ("task",),
    "input_column": ("input", "prompt", "question"), "output_column": ("output", "answer", "target"),
}  # fmt: skip


@dataclass
class Table:
    """Rows by role. `member` is what splits divide: the named task, or the class where tasks have no names."""

    member: list[str]
    stratum: list[str]
    task: list[str]  # "" where tasks have no names
    left: list[str]  # text or input
    right: list[str]  # class or output


def tabulate(rows: Sequence[Row], config: Config, notice: Callable[[str], None]) -> Table:
    """Pick the columns, check that every row fills them, and drop rows that say the same twice."""
    columns = sorted({column for row in rows for column in row.values})
    causal = config.task_type == "causal_lm"
    left = (
        pick(config, columns, "input_column", also="text_column" if causal else None)
        if causal
        else pick(config, columns, "text_column")
    )
    right = pick(config, columns, "output_column", also="label_column") if causal else pick(config, columns, "label_column")
    task = pick(config, columns, "task_column", required=causal)
    stratum = pick(config, columns, "stratum_column", required=False)
    table, seen = Table([], [], [], [], []), set()
    for row in rows:
        values = {column: cell(row, column) for column in (left, right, task, stratum) if column}
        key = (values.get(task or ""), values[left], values[right])  # type: ignore[index]
        if key in seen:
            continue
        seen.add(key)
        table.left.append(values[left])  # type: ignore[index]
        table.right.append(values[right])  # type: ignore[index]
        table.task.append(values[task] if task else "")
        table.member.append(values[task] if task else values[right])  # type: ignore[index]
        table.stratum.append(values[stratum] if stratum else "all")
    if len(seen) < len(rows):
        notice(f"{len(rows) - len(seen)} of {len(rows)} rows repeat another one and are left out")
    return table


def pick(config: Config, columns: Sequence[str], setting: str, required: bool = True, also: str | None = None) -> str | None:
    asked = getattr(config, setting)
    if asked is not None:
        if asked not in columns:
            raise UsageError(f"{setting}={asked} is no column of dataset={config.dataset[0]}; it has {', '.join(columns)}")
        return asked
    usual = USUAL[setting] + (USUAL[also] if also else ())
    found = next((column for column in usual if column in columns), None)
    if found is None and required:
        raise UsageError(f"dataset={config.dataset[0]} has none of the columns {', '.join(usual)}; it has "
                         f"{', '.join(columns)}: name one with --{setting}")  # fmt: skip
    return found


def cell(row: Row, column: str) -> str:
    value = row.values.get(column)
    if value is None or isinstance(value, (dict, list)) or value == "":
        raise UsageError(f"{row.origin} has {column}={value!r}, which is no text; mend the row")
    return str(value)
