"""The built-in suites, generated data sets.

`letters`: seven families of string tasks, disjoint between train, valid and test.

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

`ciphers`: documents of 1,024 letters for streams, from one grammar: each of 26 letters is followed by the
same one, and one letter in twenty is any (0.36 nats a letter). Each document is written through its own
permutation of the letters, which a window below 26 letters does not show and the weights can learn.

`tables`: documents of 32 characters for streams, in two chunks of 16. The first one is a table: A, B and six
digits in any order, each followed by a letter. The letters of A and B are of the document's own permutation
of a to h; those of the digits are any. The second chunk has six other signs, each followed by any letter, and
ends with A and B and their letters, which its window does not show.

`digits`: scikit-learn's 1,797 images of handwritten digits, 8 x 8 pixels, as arrays (no file, no network, no
Pillow). Classes 0 to 3 are for training, 4 to 6 for validation, 7 to 9 for the test.
"""

import random
import string
from collections.abc import Callable
from typing import Any

import numpy as np

from fmmeta.tasks.data.columns import Row

CLASSES, ROWS = 6, 20  # of a task of letters; rows of each class
KINDS, OF_A_KIND = 12, 5
NOISE = 0.05  # share of letters of ciphers that follow no rule
DOCUMENTS, LETTERS = {"train": 400, "valid": 20, "test": 100}, 1024  # of ciphers
TABLES = {"train": 4000, "valid": 20, "test": 100}  # documents of tables
SIGNS, DIGITS, OTHERS, VALUES = "AB", "012345", "NOPQRS", "abcdefgh"  # in tables
TASKS = {"train": 20, "valid": 4, "test": 6}  # of letters, per family

Kind = list[str]
Family = Callable[[random.Random, list[Kind], list[Kind], int, int], list[str]]
"""(rng, the task's kinds, other kinds, class, length) -> a string as a list of letters."""


def shuffled(rng: random.Random, letters: list[str]) -> list[str]:
    rng.shuffle(letters)
    return letters


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
    return shuffled(rng, fill(rng, own + other, n - n // 2) + [rng.choice(own[c]) for _ in range(n // 2)])


def count(rng: random.Random, own: list[Kind], other: list[Kind], c: int, n: int) -> list[str]:
    return shuffled(rng, fill(rng, other, n - c) + [rng.choice(rng.choice(own)) for _ in range(c)])


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
    letters = shuffled(random.Random("letters"), list(string.ascii_letters + string.digits))
    return [letters[OF_A_KIND * i : OF_A_KIND * (i + 1)] for i in range(KINDS)]


def letters() -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows (task, stratum, text, label) and the tasks of each split."""
    rows, kinds = list[Row](), hidden_kinds()
    splits: dict[str, list[str]] = {split: [] for split in TASKS}
    for family, (make, owned) in FAMILIES.items():
        rng, seen = random.Random(f"letters/{family}"), set[tuple[int, ...]]()
        for split, tasks in TASKS.items():
            for number in range(tasks):
                own = [kinds[i] for i in unused_kinds(rng, owned, seen)]
                other = [kind for kind in kinds if kind not in own]
                task = f"{family}-{split}-{number}"
                splits[split].append(task)
                rows += [
                    Row(
                        {
                            "task": task,
                            "stratum": family,
                            "text": "".join(make(rng, own, other, c, rng.randint(8, 12))),
                            "label": f"{family} {c}",
                        },
                        f"letters/{task}",
                    )
                    for c in range(CLASSES)
                    for _ in range(ROWS)
                ]
    return rows, splits


def unused_kinds(rng: random.Random, count: int, seen: set[tuple[int, ...]]) -> list[int]:
    """Draw numbers of kinds until their set is not in `seen`; add it."""
    while True:
        own = rng.sample(range(KINDS), count)
        if tuple(sorted(own)) not in seen:
            seen.add(tuple(sorted(own)))
            return own


def named(counts: dict[str, int]) -> dict[str, list[str]]:
    """Names of the documents of each split."""
    return {split: [f"{split}-{n}" for n in range(count)] for split, count in counts.items()}


def ciphers() -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows (task, text) and the documents of each split."""
    rng, rows, letters = random.Random("ciphers"), list[Row](), string.ascii_lowercase
    order = shuffled(rng, list(letters))
    follows = dict(zip(order, order[1:] + order[:1], strict=True))
    splits = named(DOCUMENTS)
    for name in (name for names in splits.values() for name in names):
        cipher = dict(zip(letters, shuffled(rng, list(letters)), strict=True))
        text = [rng.choice(letters)]
        while len(text) < LETTERS:
            text.append(rng.choice(letters) if rng.random() < NOISE else follows[text[-1]])
        rows.append(Row({"task": name, "text": "".join(cipher[one] for one in text)}, f"ciphers/{name}"))
    return rows, splits


def tables() -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows (task, text) and the documents of each split."""
    rng, rows, splits = random.Random("tables"), list[Row](), named(TABLES)
    for name in (name for names in splits.values() for name in names):
        cipher = dict(zip(SIGNS, shuffled(rng, list(VALUES)), strict=False))
        true = [sign + letter for sign, letter in cipher.items()]
        table, others = ([sign + rng.choice(VALUES) for sign in signs] for signs in (DIGITS, OTHERS))
        text = [*shuffled(rng, true + table[1:]), table[0], *shuffled(rng, others), *shuffled(rng, true)]
        rows.append(Row({"task": name, "text": "".join(text)}, f"tables/{name}"))
    return rows, splits


def digits() -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows (image uint8 [8, 8], label) and the classes of each split."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = np.rint(found.images * (255 / found.images.max())).astype(np.uint8)
    rows = [
        Row({"image": image, "label": str(label), "stratum": "digits"}, f"digits:{number}")
        for number, (image, label) in enumerate(zip(images, found.target, strict=True), 1)
    ]
    begins = {"train": range(4), "valid": range(4, 7), "test": range(7, 10)}
    return rows, {split: list(map(str, classes)) for split, classes in begins.items()}
