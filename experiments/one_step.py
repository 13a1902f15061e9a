"""one_step.yaml: compositions of the functions of the suite `words` as tasks."""

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache, reduce
from typing import Any

from fmmeta import Tasks
from fmmeta.tasks.word_suite import FORMS, LISTS, NUMBERS, PICKS, SEPARATORS, words_without_ties

TRAIN, VALID, TEST, SHOTS = 2000, 100, 200, 5
Text = Callable[[random.Random, str], tuple[str, str]]
"""(rng, the separator of a list) -> an input and its answer."""


def of_list(answer: Callable[[list[str]], str]) -> Text:
    def pair(rng: random.Random, separator: str) -> tuple[str, str]:
        found = words_without_ties(rng, 4)
        return separator.join(found), answer(found)

    return pair


def of_number(answer: Callable[[int], int]) -> Text:
    def pair(rng: random.Random, separator: str) -> tuple[str, str]:
        number = 2 * rng.randint(1, 49)
        return str(number), str(answer(number))

    return pair


def compositions() -> dict[str, dict[str, Text]]:
    """The functions of each stratum, by name; "two words" is the hardest."""
    three: Any = itertools.product(PICKS.items(), *[FORMS.items()] * 3)
    word = {
        f"{pick}, {first}, {then}, {last}": of_list(lambda found, p=p, f=f, g=g, h=h: h(g(f(p(found)))))
        for (pick, p), (first, f), (then, g), (last, h) in three
    }
    pairs = itertools.product(itertools.permutations(PICKS.items(), 2), FORMS.items(), FORMS.items())
    two = {
        f"{one} {first} and {other} {then}": of_list(
            lambda found, p=p, q=q, f=f, g=g: f(p(found)) + " " + g(q(found))
        )
        for ((one, p), (other, q)), (first, f), (then, g) in pairs
    }
    lists = {
        f"{name} of {first}, {then}": of_list(lambda found, a=a, f=f, g=g: g(a([f(one) for one in found])))
        for (name, a), (first, f), (then, g) in itertools.product(LISTS.items(), FORMS.items(), FORMS.items())
        if name != "number"
    }
    numbers = {
        ", ".join(names): of_number(
            lambda number, parts=parts: reduce(lambda n, part: part(n), parts, number)
        )
        for names, parts in (zip(*four, strict=True) for four in itertools.product(NUMBERS.items(), repeat=4))
    }
    return {"word": word, "two words": two, "list": lists, "number": numbers}


@cache
def numbered() -> list[tuple[str, Text]]:
    """Stratum and function of each task: of each stratum as many, in one random order within a split.

    Functions that answer 20 inputs alike are one; those without an answer are none.
    """
    seen, rng = set[str](), random.Random("one step")
    parts: dict[int, list[tuple[str, Text]]] = {TRAIN: [], VALID: [], TEST: []}
    for stratum, functions in compositions().items():
        names = rng.sample([*functions], len(functions))
        for size, part in parts.items():
            count = 0
            while count < size // 4:
                answer, inputs, pairs = functions[names.pop()], random.Random(0), list[tuple[str, str]]()
                with suppress(IndexError):  # of the last letter of no letters
                    pairs = [answer(inputs, ", ") for _ in range(20)]
                if pairs and all(text for _, text in pairs) and (alike := repr(pairs)) not in seen:
                    seen.add(alike)
                    part.append((stratum, answer))
                    count += 1
    return [one for part in parts.values() for one in rng.sample(part, len(part))]


def draw(number: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Five pairs and five queries of a function."""
    rng, (_, answer), rows = random.Random(number), numbered()[number], dict[str, str]()
    separator = rng.choice(SEPARATORS)
    while len(rows) < 2 * SHOTS:
        rows.update([answer(rng, separator)])
    return [*rows.items()][:SHOTS], [*rows.items()][SHOTS:]


def stratum(number: int) -> str:
    return numbered()[number][0]


tasks = Tasks(draw, train=TRAIN, valid=VALID, test=TEST, stratum=stratum)
