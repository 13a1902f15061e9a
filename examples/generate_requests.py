"""Write examples/data/requests.csv, the data of the tutorial on classification.

    python examples/generate_requests.py

Customers of a shop, a restaurant, a hotel and a school ask for 19 things, which makes 76 classes of 12 texts.
Each text also says something that has nothing to do with the request, so that a sentence encoder finds texts
of different classes alike: what meta-training learns is to look at the request. The file depends on this
script alone, and has the licence of the repository.
"""

import csv
import random
from itertools import product
from pathlib import Path

FILE = Path(__file__).parent / "data" / "requests.csv"
ROWS = 12  # of a class
THINGS = ("order", "table", "room", "course")
REQUESTS = {
    "cancel": ("please cancel my {}", "i do not need the {} any more", "i want to call off the {}"),
    "other_day": (
        "can my {} be moved to another day",
        "i need a later date for the {}",
        "please put off my {}",
    ),
    "price": ("what does the {} cost", "how much is the {} in all", "tell me the price of the {}"),
    "invoice": (
        "send me the invoice for my {}",
        "i need a receipt for the {}",
        "where is the bill for the {}",
    ),
    "refund": ("i want my money back for the {}", "when do you refund the {}", "please repay me for the {}"),
    "discount": (
        "is there a discount on the {}",
        "do students pay less for the {}",
        "can i use a voucher for my {}",
    ),
    "confirm": ("did you get my {}", "i have no confirmation of my {}", "please confirm the {}"),
    "declined": (
        "my card was declined for the {}",
        "paying for the {} fails",
        "the payment of my {} did not go through",
    ),
    "cash": (
        "can i pay for the {} in cash",
        "which cards do you take for the {}",
        "may i pay later for the {}",
    ),
    "wrong_name": (
        "the {} is under the wrong name",
        "please correct my name on the {}",
        "you misspelt my name on the {}",
    ),
    "one_more": (
        "can one more person join my {}",
        "please add a person to the {}",
        "we are one more for the {}",
    ),
    "charged_twice": (
        "i was charged twice for the {}",
        "i paid double for my {}",
        "the {} is on my statement two times",
    ),
    "present": (
        "the {} is a present, add a card",
        "can i give the {} as a gift",
        "please wrap up the {} as a gift",
    ),
    "wheelchair": (
        "is the {} suitable for a wheelchair",
        "can disabled people use the {}",
        "has the {} step-free access",
    ),
    "complaint": ("the {} was not as described", "i am not happy with my {}", "the {} was a disappointment"),
    "review": ("where can i review the {}", "how do i rate the {}", "i would like to leave stars for the {}"),
    "praise": ("the {} was wonderful", "thank you for the lovely {}", "everything about the {} was perfect"),
    "waiting_list": (
        "tell me when a {} is free again",
        "put me on the waiting list for the {}",
        "is the {} still sold out",
    ),
    "find": ("where do i find the {}", "how do i get to the {}", "what is the address for the {}"),
}
WHO = (
    "my sister",
    "our neighbour",
    "my boss",
    "a friend from work",
    "my grandfather",
    "our teacher",
    "my dentist",
    "the whole team",
    "my cousin",
    "an old colleague",
)
WHAT = (
    "is in hospital with a broken leg",
    "loves cycling in the rain",
    "has just adopted two kittens",
    "plays the violin in an orchestra",
    "moved to norway last winter",
    "is studying for a physics exam",
    "grows tomatoes on the balcony",
    "is afraid of flying",
    "bought an electric van",
    "collects old stamps",
    "runs a marathon on sunday",
    "is expecting a baby in may",
)


def texts(rng: random.Random, phrases: tuple[str, ...], thing: str) -> list[str]:
    """ROWS texts of a class, each phrase equally often, each with another remark."""
    remarks = rng.sample([*product(WHO, WHAT)], ROWS)
    requests = [phrases[row % len(phrases)].format(thing) for row in range(ROWS)]
    return [
        f"{who} {what}, {request}" if rng.random() < 0.5 else f"{request}, {who} {what}"
        for request, (who, what) in zip(requests, remarks, strict=True)
    ]


def rows() -> list[tuple[str, str]]:
    """(text, label) of all classes."""
    rng = random.Random(0)
    return [
        (text, f"{thing}_{name}")
        for name, phrases in REQUESTS.items()
        for thing in THINGS
        for text in texts(rng, phrases, thing)
    ]


def main() -> None:
    with FILE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("text", "label"), *rows()])


if __name__ == "__main__":
    main()
