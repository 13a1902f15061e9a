"""The built-in suite `words`: functions of words, as input and answer of a language model.

A task is one function, unnamed; five pairs show which. Strata:

    pick    one of four to six words (by place, length, alphabet, category, or the odd one out), in a form
    list    all of them: turned round, sorted, without some, counted
    word    a word in another form, or its category
    number  arithmetic with one number

Held-out tasks are other functions; in `pick` they are other combinations of a way to pick and a form.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fmmeta.tasks.data.columns import Row
from fmmeta.tasks.suites import shuffled

CATEGORIES = {
    "animal": "horse rabbit tiger whale eagle spider goat camel monkey shark donkey turtle lion frog sheep",
    "food": "bread cheese apple butter carrot soup lemon potato honey rice onion cherry garlic pepper cake",
    "colour": "red green blue yellow purple orange brown grey pink black white silver violet beige",
    "tool": "hammer saw drill shovel wrench pliers chisel rake axe ladder needle scissors broom file",
    "garment": "shirt coat glove scarf boot sock belt jacket dress sweater apron hat skirt trousers",
    "vehicle": "train bicycle lorry tractor ship canoe tram rocket ferry scooter sledge taxi van bus",
    "instrument": "violin drum flute trumpet piano guitar harp cello organ banjo oboe tuba clarinet",
    "furniture": "table chair sofa shelf desk wardrobe bench stool cradle dresser cupboard bed",
    "sport": "tennis hockey rowing judo golf rugby fencing skiing archery surfing boxing cricket",
    "weather": "rain snow fog storm hail thunder frost drizzle breeze sunshine sleet mist",
}
BY_CATEGORY = {category: text.split() for category, text in CATEGORIES.items()}
WORDS = [word for words in BY_CATEGORY.values() for word in words]
WORD_ROWS, MOST_OF_A_STRATUM = 60, 80  # rows of a task of words; tasks of a stratum
LENGTHS = (4, 5, 6)  # words in a list; in tasks of `pick` the same number in all rows
SHARES = {"train": 0.6, "valid": 0.2, "test": 0.2}  # of the tasks of a stratum
SEPARATORS = (", ", " ", "; ", " / ")

MakePair = Callable[[random.Random, str, int], tuple[str, str]]
"""(rng, the task's separator, words in a list) -> an input and its answer."""
DrawWords = Callable[[random.Random, int], tuple[list[str], Any]]
"""(rng, words in a list) -> words of an input, and what the answer is of: a word, a number, all of them."""


PICKS: dict[str, Callable[[list[str]], str]] = {  # a word of a list without ties
    "first": lambda words: words[0],
    "last": lambda words: words[-1],
    "second of more": lambda words: words[1],
    "last but one": lambda words: words[-2],
    "longest": lambda words: max(words, key=len),
    "shortest": lambda words: min(words, key=len),
    "alphabetically first": min,
}
FORMS: dict[str, Callable[[str], str]] = {
    "as it is": lambda word: word,
    "capitals": str.upper,
    "capitalised": str.capitalize,
    "last letter": lambda word: word[-1],
    "three letters": lambda word: word[:3],
    "without its first letter": lambda word: word[1:],
    "twice": lambda word: f"{word} {word}",
    "in brackets": lambda word: f"({word})",
    "backwards": lambda word: word[::-1],
}
LISTS: dict[str, Callable[[list[str]], str]] = {
    "reversed": lambda words: " ".join(reversed(words)),
    "sorted": lambda words: " ".join(sorted(words)),
    "by length": lambda words: " ".join(sorted(words, key=len)),
    "without the first": lambda words: " ".join(words[1:]),
    "without the last": lambda words: " ".join(words[:-1]),
    "first and last": lambda words: f"{words[0]} {words[-1]}",
    "last and first": lambda words: f"{words[-1]} {words[0]}",
    "number": lambda words: str(len(words)),
    "numbered": lambda words: " ".join(f"{i} {word}" for i, word in enumerate(words, 1)),
    "joined": "-".join,
    "capitals": lambda words: " ".join(words).upper(),
    "last letters": lambda words: "".join(word[-1] for word in words),
    "with and": " and ".join,
    "first twice": lambda words: " ".join([words[0], *words]),
}
NUMBERS: dict[str, Callable[[int], int]] = {
    "plus 1": lambda n: n + 1,
    "plus 2": lambda n: n + 2,
    "plus 5": lambda n: n + 5,
    "plus 10": lambda n: n + 10,
    "minus 1": lambda n: n - 1,
    "minus 3": lambda n: n - 3,
    "doubled": lambda n: 2 * n,
    "times 10": lambda n: 10 * n,
    "halved": lambda n: n // 2,
    "last digit": lambda n: n % 10,
}


def words_without_ties(rng: random.Random, size: int) -> list[str]:
    """Different words; one of them is the longest, and one the shortest."""
    while True:
        found = rng.sample(WORDS, size)
        lengths = sorted(map(len, found))
        if lengths[0] < lengths[1] and lengths[-2] < lengths[-1]:
            return found


def function(draw: DrawWords, answer: Callable[[Any], Any]) -> MakePair:
    """The function `answer` of what `draw` gives."""

    def pair(rng: random.Random, separator: str, size: int) -> tuple[str, str]:
        shown, asked = draw(rng, size)
        return separator.join(shown), str(answer(asked))

    return pair


def some_list(rng: random.Random, size: int, lengths: Sequence[int] = ()) -> tuple[list[str], list[str]]:
    """A list of words, of the task's length or of any of `lengths`."""
    found = words_without_ties(rng, rng.choice(lengths) if lengths else size)
    return found, found


def one_word(rng: random.Random, size: int) -> tuple[list[str], str]:
    word = rng.choice(WORDS)
    return [word], word


def one_number(rng: random.Random, size: int) -> tuple[list[str], int]:
    number = 2 * rng.randint(1, 99)
    return [str(number)], number


def one_of_category(rng: random.Random, size: int, category: str) -> tuple[list[str], str]:
    """The one word of a category among words of others."""
    others = [word for word in WORDS if word not in BY_CATEGORY[category]]
    right = rng.choice(BY_CATEGORY[category])
    return shuffled(rng, [right, *rng.sample(others, size - 1)]), right


def odd_one_out(rng: random.Random, size: int) -> tuple[list[str], str]:
    """The one word of another category."""
    common, other = rng.sample(list(BY_CATEGORY), 2)
    right = rng.choice(BY_CATEGORY[other])
    return shuffled(rng, [right, *rng.sample(BY_CATEGORY[common], size - 1)]), right


def all_functions() -> dict[str, dict[str, MakePair]]:
    """The functions of each stratum, by name."""
    picks = {
        f"{pick} {name}": function(some_list, lambda words, take=take, form=form: form(take(words)))
        for pick, take in PICKS.items()
        for name, form in FORMS.items()
    }
    for name, form in FORMS.items():
        for category in BY_CATEGORY:
            picks[f"{category} {name}"] = function(partial(one_of_category, category=category), form)
        picks[f"odd one out {name}"] = function(odd_one_out, form)
    forms = {f"word {name}": function(one_word, form) for name, form in FORMS.items() if name != "as it is"}
    category_of = function(
        one_word, lambda word: next(name for name, kind in BY_CATEGORY.items() if word in kind)
    )
    lists = partial(some_list, lengths=LENGTHS)
    return {
        "pick": picks,
        "list": {f"list {name}": function(lists, answer) for name, answer in LISTS.items()},
        "word": {**forms, "word category": category_of},
        "number": {f"number {name}": function(one_number, answer) for name, answer in NUMBERS.items()},
    }


def words() -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows (task, stratum, input, output) and the tasks of each split."""
    rows, splits = list[Row](), {split: list[str]() for split in SHARES}
    for stratum, of_stratum in all_functions().items():
        names = shuffled(random.Random(f"words/{stratum}"), list(of_stratum))[:MOST_OF_A_STRATUM]
        first = 0
        for split, share in SHARES.items():
            last = len(names) if split == "test" else first + round(share * len(names))
            splits[split] += names[first:last]
            first = last
        for task in names:
            rng, found = random.Random(f"words/{task}"), dict[str, str]()
            separator, size = rng.choice(SEPARATORS), rng.choice(LENGTHS)
            while len(found) < WORD_ROWS:
                found.update([of_stratum[task](rng, separator, size)])
            rows += [
                Row({"task": task, "stratum": stratum, "input": given, "output": answer}, f"words/{task}")
                for given, answer in found.items()
            ]
    return rows, splits
