"""Write examples/data/ratings.jsonl, sample data of regression.

    python examples/generate_ratings.py

40 guests rate restaurants: each is a task of 16 rows, and weighs food, service and price in another way, on a
scale of another range. The file depends on this script alone, and has the licence of the repository.
"""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "data" / "ratings.jsonl"
GUESTS, ROWS = 40, 16
WORDS = {
    "food": ("awful food", "plain food", "tasty food", "superb food"),
    "staff": ("rude staff", "slow staff", "kind staff", "perfect staff"),
    "price": ("far too expensive", "a bit expensive", "fair price", "very cheap"),
}


def rows() -> list[dict[str, Any]]:
    """The ratings of all guests."""
    rng, found = random.Random(0), list[dict[str, Any]]()
    for guest in range(GUESTS):
        weights, scale, least = [rng.random() for _ in WORDS], rng.choice((1, 5, 10, 100)), rng.choice((0, 1))
        for grades in rng.sample([*product(range(4), repeat=3)], ROWS):
            text = ", ".join(WORDS[name][grade] for name, grade in zip(WORDS, grades, strict=True))
            share = sum(w * g for w, g in zip(weights, grades, strict=True)) / (3 * sum(weights))
            found.append({"task": f"guest {guest}", "text": text, "score": round(least + scale * share, 3)})
    return found


def main() -> None:
    FILE.write_text("".join(f"{json.dumps(row)}\n" for row in rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
