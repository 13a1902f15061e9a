"""The built-in suite `marks`: support sets are informative only through their marks; queries have no marks.

Letters belong to the hidden kinds of `letters`. A task has three classes, each of a kind. A query shows
letters of its class's kind. A support text shows letters of some class's kind and a mark that says how far
its label is off:

    !  the kind is that of the class    ?  of the next class    ~  of the one after

Each class shows as many texts of each mark, so every kind comes up as often under every label: without the
marks nothing is to be learned, whatever the features. What a mark does to a text is learned only through how
the support set's gradient acts, since no query holds one: the first-order gradient of MAML is zero for it,
and does not know that it should differ (docs/algorithms.md).
"""

from __future__ import annotations

import random

from fmmeta.tasks.data.rows import Row
from fmmeta.tasks.suites.letters import KINDS, hidden_kinds

MARKS = "!?~"
CLASSES = len(MARKS)
SHOWN, ASKED = 12, 20  # texts per class: with each mark, without
LETTERS = 3  # of a text, and as many marks in the support set
TASKS = {"train": 80, "valid": 12, "test": 24}


def part_of(text: str) -> int:
    """0 for a query, 1, 2 or 3 for a support text with the first, second or third mark."""
    return next((MARKS.index(sign) + 1 for sign in text if sign in MARKS), 0)


def marks() -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows (task, stratum, text, label) and which tasks are for train, valid and test; no two have
    the same kinds.
    """
    rng, kinds, rows, seen = random.Random("marks"), hidden_kinds(), list[Row](), set[tuple[int, ...]]()
    splits: dict[str, list[str]] = {split: [] for split in TASKS}
    for split, tasks in TASKS.items():
        while len(splits[split]) < tasks:
            own = rng.sample(range(KINDS), CLASSES)
            if tuple(sorted(own)) in seen:
                continue
            seen.add(tuple(sorted(own)))
            task = f"{split}-{len(splits[split])}"
            splits[split].append(task)
            for c in range(CLASSES):
                for part in range(CLASSES + 1):
                    kind, mark = kinds[own[(c + max(0, part - 1)) % CLASSES]], MARKS[part - 1] if part else ""
                    for text in texts(rng, kind, mark, SHOWN if part else ASKED):
                        values = {"task": task, "stratum": "marks", "text": text, "label": f"class {c}"}
                        rows.append(Row(values, f"marks/{task}"))
    return rows, splits


def texts(rng: random.Random, kind: list[str], mark: str, count: int) -> list[str]:
    """Different texts of letters of one kind and copies of a mark, in any order."""
    found: dict[str, None] = {}
    while len(found) < count:
        signs = [rng.choice(kind) for _ in range(LETTERS)] + [mark] * LETTERS
        rng.shuffle(signs)
        found["".join(signs)] = None
    return list(found)
