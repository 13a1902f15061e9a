"""The built-in suite `letters`: seven families of little string tasks, generated, disjoint between train, valid and test.

A task fixes a family and its letters; its classes differ in one property of otherwise random strings. Families are the
strata. Held-out tasks use other letters, so that what carries over is where to look, not what was seen.

    first      the first letter comes from one of six disjoint sets
    last       the same of the last letter
    contains   one of six marker letters occurs, anywhere
    pair       one of six bigrams occurs, anywhere
    double     one of six letters occurs twice in a row
    majority   one of six letters fills about half of the string
    count      two marker letters occur 0 to 5 times, together
"""

from __future__ import annotations

import random
from collections.abc import Callable

from fmmeta.tasks.rows import Row

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CLASSES, ROWS = 6, 20
TASKS = {"train": 20, "valid": 4, "test": 6}  # per family

Family = Callable[[random.Random, list[str], list[str], int, int], list[str]]
"""(rng, the task's letters, other letters, class, length) -> a string as a list of letters."""


def fill(rng: random.Random, letters: list[str], length: int) -> list[str]:
    """Random letters, no two equal ones in a row."""
    out: list[str] = []
    while len(out) < length:
        letter = rng.choice(letters)
        if not out or out[-1] != letter:
            out.append(letter)
    return out


def first(rng: random.Random, own: list[str], other: list[str], c: int, n: int) -> list[str]:
    return [rng.choice(own[3 * c : 3 * c + 3]), *fill(rng, own + other, n - 1)]


def last(rng: random.Random, own: list[str], other: list[str], c: int, n: int) -> list[str]:
    return first(rng, own, other, c, n)[::-1]


def insert(rng: random.Random, what: list[str], other: list[str], n: int) -> list[str]:
    text = fill(rng, other, n - len(what))
    at = rng.randrange(len(text) + 1)
    return text[:at] + what + text[at:]


def contains(rng: random.Random, own: list[str], other: list[str], c: int, n: int) -> list[str]:
    return insert(rng, [own[c]], other, n)


def pair(rng: random.Random, own: list[str], other: list[str], c: int, n: int) -> list[str]:
    return insert(rng, own[2 * c : 2 * c + 2], other, n)


def double(rng: random.Random, own: list[str], other: list[str], c: int, n: int) -> list[str]:
    return insert(rng, [own[c]] * 2, own + other, n)


def majority(rng: random.Random, own: list[str], other: list[str], c: int, n: int) -> list[str]:
    text = fill(rng, own + other, n - n // 2) + [own[c]] * (n // 2)
    rng.shuffle(text)
    return text


def count(rng: random.Random, own: list[str], other: list[str], c: int, n: int) -> list[str]:
    text = fill(rng, other, n - c) + [rng.choice(own) for _ in range(c)]
    rng.shuffle(text)
    return text


FAMILIES: dict[str, tuple[Family, int]] = {  # family -> its strings, letters that a task owns
    "first": (first, 18), "last": (last, 18), "contains": (contains, 6), "pair": (pair, 12), "double": (double, 6),
    "majority": (majority, 6), "count": (count, 2),
}  # fmt: skip


def letters() -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows (task, stratum, text, label) and which tasks are for train, valid and test."""
    rows, splits = [], {split: [] for split in TASKS}
    for family, (make, owned) in FAMILIES.items():
        rng, seen = random.Random(f"letters/{family}"), set[tuple[str, ...]]()
        for split, tasks in TASKS.items():
            for number in range(tasks):
                own = fresh(rng, owned, seen)
                other = [letter for letter in LETTERS if letter not in own]
                task = f"{family}-{split}-{number}"
                splits[split].append(task)
                for c in range(CLASSES):
                    for _ in range(ROWS):
                        text = "".join(make(rng, own, other, c, rng.randint(8, 12)))
                        values = {"task": task, "stratum": family, "text": text, "label": f"{family} {c}"}
                        rows.append(Row(values, f"letters/{task}"))
    return rows, splits


def fresh(rng: random.Random, owned: int, seen: set[tuple[str, ...]]) -> list[str]:
    """Letters for a task that no other task of the family has."""
    while True:
        own = rng.sample(LETTERS, owned)
        if tuple(sorted(own)) not in seen:
            seen.add(tuple(sorted(own)))
            return own
