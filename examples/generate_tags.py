"""Write examples/data/tags.jsonl, the data of the tutorial on language models.

    python examples/generate_tags.py

80 shops write tags for the things that they sell: their sign, and the colour of the thing. Every shop is a
task of 20 pairs. How to find a colour is the same for all, which meta-training learns; the sign has to be
learned of a new shop. The file depends on this script alone, and has the licence of the repository.
"""

import json
import random
from itertools import product
from pathlib import Path

FILE = Path(__file__).parent / "data" / "tags.jsonl"
ROWS = 20  # of a shop
THINGS = "lamp cup rug chair desk clock vase kite drum tent shelf bowl box bag bike ball hat coat sofa"
COLOURS = ("red", "blue", "green")


def rows() -> list[dict[str, str]]:
    """The pairs of all shops."""
    rng = random.Random(0)
    signs = ["".join(letters) for letters in product("bdfgjklmnprstvwz", "aeiou")]
    return [
        {"task": f"shop_{sign}", "input": f"{thing} {colour}", "output": f"{sign}-{colour}"}
        for sign in signs
        for thing, colour in rng.sample([*product(THINGS.split(), COLOURS)], ROWS)
    ]


def main() -> None:
    FILE.write_text("".join(f"{json.dumps(row)}\n" for row in rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
