"""entities.yaml: entity F1 on domains that were not trained on, of initial and of meta-trained weights."""

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from examples.generate_entities import rows
from experiments.data import texts_of
from fmmeta import evaluate

EPISODES = 54
MARKS = {"[E1]": "head", "[E2]": "tail"}


def relations(data: str) -> Iterator[dict[str, Any]]:
    """For each relation of FewRel 100 sentences of at most 40 words, with its two entities as tags."""
    for relation, texts in sorted(texts_of(data, "fewrel_val_wiki", "all").items()):
        short = [text.split() for text in texts if len(text.split()) <= 44]
        for words in random.Random(relation).sample(short, 100):
            tokens, tags, inside = list[str](), list[str](), "O"
            for word in words:
                if word in MARKS or word in ("[/E1]", "[/E2]"):
                    inside = f"B-{MARKS[word]}" if word in MARKS else "O"
                else:
                    tokens, tags = [*tokens, word], [*tags, inside]
                    inside = inside.replace("B-", "I-")
            yield {"task": relation, "tokens": tokens, "tags": tags}


def roles(things: dict[str, str], said: dict[str, str]) -> Iterator[dict[str, Any]]:
    """For each domain and role 40 sentences with a thing in each role; those of one role are tagged."""
    rng = random.Random(0)
    for domain, role, _ in product(things, said, range(40)):
        words = list[tuple[str, str]]()
        for part, thing in zip(
            rng.sample([*said], 3), rng.sample(things[domain].split(", "), 3), strict=True
        ):
            before, after = rng.choice(said[part].split(", ")).split("X")
            tags = ["B-thing", "I-thing", "I-thing"] if part == role else ["O"] * 3
            words += [(word, "O") for word in before.split()] + [*zip(thing.split(), tags, strict=False)]
            words += [(word, "O") for word in [*after.split(), ","]]
        tokens, tags = zip(*words, strict=True)
        yield {"task": f"{domain}: {role}", "tokens": [*tokens], "tags": [*tags]}


def write(folder: Path, found: list[dict[str, Any]], held: int) -> None:
    """The rows of all tasks, and their splits: 3/8 of the tasks for tests, `held` for validation."""
    tasks = list[str]()
    for row in found:
        tasks += [row["task"]] if row["task"] not in tasks else []
    test = len(tasks) * 5 // 8
    parts = {"train": tasks[: test - held], "valid": tasks[test - held : test], "test": tasks[test:]}
    (folder / "splits.json").write_text(json.dumps(parts))
    (folder / "entities.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))


def measure(study: Any, cell: Any) -> dict[str, Any]:
    """F1 by domain, of both weights and of their difference, and CPU minutes."""
    asked = cell.settings
    found = relations(study.data) if "relations" in asked else rows(30)
    found = roles(**asked["roles"]) if "roles" in asked else found
    write(Path(study.folder), [*found], asked.get("held", 6))
    (trained, seconds), train, began = study.trained(cell), cell.settings["train"], time.process_time()
    loop = json.loads(Path(trained).with_name("run.json").read_text())["held_out"]["baseline_inner_loop"]
    of_base = {"inner_lr": 0.1 * loop["scale"], "inner_steps": loop["steps"]}
    names = ("task_type", "dataset", "task_splits", "max_length", "num_query")
    same, scores = {name: train[name] for name in names} | {"episodes": EPISODES}, dict[str, Any]()
    for name, model, more in (("base", study.model, of_base), ("trained", trained, {})):
        by_domain = defaultdict[str, list[float]](list)
        for score in evaluate(model, **same, **more)["cells"][0]["scores"]:
            by_domain[score["task"].split(":")[0]].append(score["metrics"]["f1"])
        scores[name] = {domain: round(mean(values), 4) for domain, values in by_domain.items()}
    scores["gain"] = {
        domain: round(f1 - scores["base"][domain], 4) for domain, f1 in scores["trained"].items()
    }
    minutes = (seconds + time.process_time() - began) / 60
    return {**scores, "base_loop": of_base, "cpu_minutes": round(minutes, 1)}
