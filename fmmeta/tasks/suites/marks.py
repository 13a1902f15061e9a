"""The built-in suite `marks`: support sets are informative only through their marks; queries have no marks.

Letters belong to the hidden kinds of `letters`. A task has three classes, each with a kind. A query text
consists of letters of its class's kind. A support text consists of letters of some class's kind and a mark
that encodes the distance between that class and the label:

    !  the kind is that of the class    ?  of the next class    ~  of the one after

Each class has equally many texts of each mark, so every kind is equally frequent under every label: without
the marks the support set holds no information, whatever the features. No query holds a mark, so the effect of
a mark on a text is learned only through the gradient of the support set: the first-order gradient of MAML is
zero for the marks (docs/algorithms.md).
"""

import random

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.tasks.data.rows import Row
from fmmeta.tasks.suites.letters import hidden_kinds, unused_kinds

MARKS = "!?~"
CLASSES = len(MARKS)
SUPPORT, QUERY = 12, 20  # texts per class: with each mark, without a mark
LETTERS = 3  # of a text; a support text has as many marks
TASKS = {"train": 80, "valid": 12, "test": 24}


def part_of(text: str) -> int:
    """0 for a query, 1, 2 or 3 for a support text with the first, second or third mark."""
    return next((MARKS.index(sign) + 1 for sign in text if sign in MARKS), 0)


def check_episodes(config: Config) -> None:
    """Raise `UsageError` for episodes that the suite does not have."""
    if config.task_type != "classification":
        raise UsageError(
            f"dataset=marks has classes and no answers, and task_type={config.task_type}; use classification"
        )
    for setting, value, most in (
        ("k_shot", config.most_shots, CLASSES * SUPPORT),
        ("num_query", config.num_query, QUERY),
    ):
        if value > most:
            raise UsageError(
                f"{setting}={value} is above the {most} texts of a class of dataset=marks; lower it"
            )


def marks() -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows (task, stratum, text, label) and the tasks of each split, all of different kinds."""
    rng, kinds, rows, seen = random.Random("marks"), hidden_kinds(), list[Row](), set[tuple[int, ...]]()
    splits = {split: [f"{split}-{number}" for number in range(tasks)] for split, tasks in TASKS.items()}
    for task in [*splits["train"], *splits["valid"], *splits["test"]]:
        own = unused_kinds(rng, CLASSES, seen)
        for c in range(CLASSES):
            for part, mark in enumerate(["", *MARKS]):
                kind = kinds[own[(c + max(0, part - 1)) % CLASSES]]
                for text in texts(rng, kind, mark, SUPPORT if mark else QUERY):
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
