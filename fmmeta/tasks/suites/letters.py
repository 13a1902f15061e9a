"""The built-in suite `letters`: seven families of string tasks, disjoint between train, valid and test.

The 60 letters and digits belong to 12 hidden kinds of five. A task has a family and some kinds; its classes
differ in one property of otherwise random strings. Five examples show a few letters of a kind, the query set
shows others: a model that has learned the kinds from other tasks can classify them. Families are the strata;
held-out tasks combine other kinds.

    first      the first letter is of one of six kinds
    last       the last letter is
    contains   one letter, anywhere, is of one of six kinds
    pair       a letter of one kind is followed by one of the next, anywhere
    double     two neighbours are of the same kind, one of six
    majority   about half of the letters are of one of six kinds
    count      0 to 5 letters are of two kinds
"""

import random
import string
from collections.abc import Callable

from fmmeta.tasks.data.rows import Row

CLASSES, ROWS = 6, 20
KINDS, OF_A_KIND = 12, 5
TASKS = {"train": 20, "valid": 4, "test": 6}  # per family

Kind = list[str]
Family = Callable[[random.Random, list[Kind], list[Kind], int, int], list[str]]
"""(rng, the task's kinds, other kinds, class, length) -> a string as a list of letters."""


def fill(rng: random.Random, kinds: list[Kind], length: int) -> list[str]:
    """Random letters, no two neighbours of one kind."""
    out: list[str] = []
    before = None
    for _ in range(length):
        before = rng.choice([kind for kind in kinds if kind is not before])
        out.append(rng.choice(before))
    return out


def insert(rng: random.Random, what: list[str], other: list[Kind], n: int) -> list[str]:
    text = fill(rng, other, n - len(what))
    at = rng.randrange(len(text) + 1)
    return text[:at] + what + text[at:]


def first(rng: random.Random, own: list[Kind], other: list[Kind], c: int, n: int) -> list[str]:
    return [rng.choice(own[c]), *fill(rng, own + other, n - 1)]


def last(rng: random.Random, own: list[Kind], other: list[Kind], c: int, n: int) -> list[str]:
    return first(rng, own, other, c, n)[::-1]


def contains(rng: random.Random, own: list[Kind], other: list[Kind], c: int, n: int) -> list[str]:
    return insert(rng, [rng.choice(own[c])], other, n)


def pair(rng: random.Random, own: list[Kind], other: list[Kind], c: int, n: int) -> list[str]:
    return insert(rng, [rng.choice(own[c]), rng.choice(own[(c + 1) % CLASSES])], other, n)


def double(rng: random.Random, own: list[Kind], other: list[Kind], c: int, n: int) -> list[str]:
    return insert(rng, rng.sample(own[c], 2), other, n)


def majority(rng: random.Random, own: list[Kind], other: list[Kind], c: int, n: int) -> list[str]:
    text = fill(rng, own + other, n - n // 2) + [rng.choice(own[c]) for _ in range(n // 2)]
    rng.shuffle(text)
    return text


def count(rng: random.Random, own: list[Kind], other: list[Kind], c: int, n: int) -> list[str]:
    text = fill(rng, other, n - c) + [rng.choice(rng.choice(own)) for _ in range(c)]
    rng.shuffle(text)
    return text


FAMILIES: dict[str, tuple[Family, int]] = {  # family -> its strings, number of kinds of a task
    "first": (first, 6),
    "last": (last, 6),
    "contains": (contains, 6),
    "pair": (pair, 6),
    "double": (double, 6),
    "majority": (majority, 6),
    "count": (count, 2),
}


def hidden_kinds() -> list[Kind]:
    letters = list(string.ascii_letters + string.digits)
    random.Random("letters").shuffle(letters)
    return [letters[OF_A_KIND * i : OF_A_KIND * (i + 1)] for i in range(KINDS)]


def letters() -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows (task, stratum, text, label) and the tasks of each split."""
    rows, kinds = [], hidden_kinds()
    splits: dict[str, list[str]] = {split: [] for split in TASKS}
    for family, (make, owned) in FAMILIES.items():
        rng, seen = random.Random(f"letters/{family}"), set[tuple[int, ...]]()
        for split, tasks in TASKS.items():
            for number in range(tasks):
                own = [kinds[i] for i in unused_kinds(rng, owned, seen)]
                other = [kind for kind in kinds if kind not in own]
                task = f"{family}-{split}-{number}"
                splits[split].append(task)
                for c in range(CLASSES):
                    for _ in range(ROWS):
                        text = "".join(make(rng, own, other, c, rng.randint(8, 12)))
                        values = {"task": task, "stratum": family, "text": text, "label": f"{family} {c}"}
                        rows.append(Row(values, f"letters/{task}"))
    return rows, splits


def unused_kinds(rng: random.Random, count: int, seen: set[tuple[int, ...]]) -> list[int]:
    """Draw numbers of kinds until their set is not in `seen`; add it."""
    while True:
        own = rng.sample(range(KINDS), count)
        if tuple(sorted(own)) not in seen:
            seen.add(tuple(sorted(own)))
            return own
