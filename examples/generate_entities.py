"""Write examples/data/entities.jsonl, sample data of token classification.

    python examples/generate_entities.py

A domain, such as travel, has sentences with three kinds of entities. A task marks two of them: those of the
third are O there, so that a model has to learn from the support set what is asked for. 16 domains make 48
tasks. The file depends on this script alone, and has the licence of the repository.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "data" / "entities.jsonl"
ROWS = 12  # of a task
DOMAINS = """
travel; city: rome, new york, oslo, lima, cape town, san jose; day: monday, next friday, tomorrow, the first
of may; line: blue air, northern wings, sky jet, aero sur; book a flight to {city} on {day}, is {line} late
{day}, fly me from {city} to {city} with {line}, which {line} planes go to {city}, I leave {city} {day}

food; dish: onion soup, fried rice, pancakes, a green salad; drink: tea, cold milk, apple juice, black
coffee; house: the old mill, corner bistro, sea view, casa lola; a table at {house} please, I would like
{dish} and {drink}, does {house} serve {dish}, one {drink} without sugar, send {dish} from {house} with
{drink}

music; song: blue river, night train, my little bird, seven stars; singer: ann lee, the grey foxes, marco
polo, dj snow; mood: calm, happy, sad, wild; play {song} by {singer}, something {mood} by {singer}, add
{song} to my {mood} list, who sings {song}, is {singer} on tour with {song}

health; pain: a headache, back pain, a dry cough, sore eyes; drug: aspirin, green drops, vitamin c, cold
cream; time: since monday, for two days, every night, all week; I have {pain} {time}, does {drug} help
against {pain}, take {drug} {time}, my son has {pain}, she used {drug} {time}

bank; sum: ten euros, 200 dollars, half a million, 40 pounds; person: my sister, mister brown, the landlord,
anna; account: savings, the joint account, my main card, travel card; send {sum} to {person}, move {sum}
from {account}, {person} paid {sum}, block {account} now, did {person} use {account}

sport; team: red lions, the kings, north united, river boys; sport: football, ice hockey, table tennis,
rugby; score: two nil, 3 to 1, a draw, five all; did {team} win in {sport}, it ended {score} for {team},
watch {sport} tonight, {team} against {team} was {score}, {sport} ended {score}

weather; place: the coast, berlin, our valley, mount etna; sky: heavy rain, snow, thick fog, sunshine; hour:
at noon, tonight, before six, in the morning; {sky} over {place} {hour}, will there be {sky} {hour}, how is
it in {place}, expect {sky} near {place}, {place} gets {sky}

film; title: the last door, red sand, a quiet winter, robot dreams; maker: jane kim, old bear films, luis
ortega, maria stone; kind: comedy, a thriller, western, silent film; is {title} {kind}, {maker} made
{title}, show me {kind} by {maker}, when does {title} start, the new {kind} of {maker}

home; device: the lamp, oven, front door, air fan; room: kitchen, the cellar, bedroom two, garage; state:
off, on, half open, to 20 degrees; turn {device} {state}, in {room} set {device} {state}, is {device} in
{room} broken, warm {room} up, leave {device} {state} in {room}

work; task: the report, invoice nine, slides, the budget; person: peter, our boss, team b, miss wong; due:
by friday, at five, next week, this evening; {person} needs {task} {due}, finish {task} {due}, ask {person}
about {task}, is {task} ready, call {person} {due}

school; course: biology, french two, old history, algebra; teacher: mrs hill, doctor sato, mister diaz,
lena; hall: room 12, the gym, hall c, library; {teacher} teaches {course} in {hall}, where is {course},
{course} moved to {hall}, is {teacher} in {hall}, I failed {course} with {teacher}

car; part: brake, left mirror, engine oil, the tyres; brand: vento, alpha six, moto king, elan; fault:
leaks, makes noise, is worn, is missing; {part} of my {brand} {fault}, order {part} for a {brand}, my
{brand} is red, why {fault} {part}, a {brand} whose {part} {fault}

garden; plant: roses, a fig tree, basil, tall grass; tool: rake, the saw, water can, sharp knife; season: in
spring, in early june, after frost, all summer; cut {plant} with {tool} {season}, {plant} grow {season},
lend me {tool}, water {plant} {season}, where is {tool} for {plant}

museum; work: the blue vase, sun boat, iron mask, lady in white; artist: van holt, ida berg, an unknown
master, k tanaka; age: of 1650, from the stone age, of last century, from 1911; {work} by {artist} is {age},
who made {work}, something {age} please, {artist} painted {work}, {work} {age} was sold

police; thing: a gold ring, two bikes, his wallet, laptop; street: oak lane, main street, the station, mill
road; man: a tall man, young driver, the guard, two boys; {thing} was stolen in {street}, {man} ran down
{street}, {man} took {thing}, we found {thing}, look for {man} near {street}

space; planet: mars, the red moon, kepler nine, venus; ship: eagle two, star dust, old pioneer, luna; crew:
three people, a robot, captain rao, nobody; {ship} lands on {planet}, {crew} flew to {planet} with {ship},
is {crew} on {ship}, {planet} is far, {crew} left {planet}
""".strip()


def sentence(
    rng: random.Random, template: str, values: Mapping[str, Sequence[str]], marked: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The words and tags of a template with random values."""
    tokens, tags = list[str](), list[str]()
    for word in template.split():
        kind = word[1:-1] if word[0] == "{" else ""
        parts = rng.choice(values[kind]).split() if kind else [word]
        tokens += parts
        tags += [f"{'I' if i else 'B'}-{kind}" if kind in marked else "O" for i in range(len(parts))]
    return tokens, tags


def rows(count: int = ROWS) -> Iterator[dict[str, Any]]:
    """`count` different rows of each task; `domain` is the stratum."""
    rng = random.Random(0)
    for block in DOMAINS.split("\n\n"):
        domain, *kinds, templates = " ".join(block.split()).split("; ")
        values = {kind: listed.split(", ") for kind, listed in (one.split(": ") for one in kinds)}
        for marked in combinations(values, 2):
            found = dict[str, tuple[list[str], list[str]]]()
            while len(found) < count:
                tokens, tags = sentence(rng, rng.choice(templates.split(", ")), values, marked)
                found[" ".join(tokens)] = tokens, tags
            for tokens, tags in found.values():
                yield {
                    "task": f"{domain}: {', '.join(marked)}",
                    "domain": domain,
                    "tokens": tokens,
                    "tags": tags,
                }


def main() -> None:
    FILE.write_text("".join(f"{json.dumps(row)}\n" for row in rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
