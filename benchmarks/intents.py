"""Which recipe makes a 22 M encoder learn new intents from one or five examples? The ProtAugment protocol,
row by row.

    python -m benchmarks.intents --data ../shared/data --model PATH-OF-all-MiniLM-L6-v2 \
        [--rows ...] [--minutes M]

Five class-disjoint splits, 5-way, 5 queries per class; 600 test episodes where classifiers look at frozen
features, the first 40 (1 shot) or 20 (5 shots) of them where an inner loop of SGD runs in each, the first 60
where it is of AdamW, and the first 200 where that moves the head alone. Every row is meta-trained on BUDGET
rows of text through forward and backward passes, at one example per class, and the checkpoint is the one best
on validation classes (with AdamW: the last). A cell is a row on one split of a data set, at 1 and 5 shots.
Finished cells lie in benchmarks/results/intents.json; what is there is not computed again, so that it can be
stopped at any time, and several may run beside each other. The last lines are the table: mean over the
splits, gain over frozen prototypes in the same episodes, 95 % intervals (Student's t, over splits where a row
has three or more, else over episodes), and processor minutes per cell.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import keep, read, table
from fmmeta import Config, MetaTrainer, evaluate
from fmmeta.metrics.scores import mean_ci95

RESULTS = Path(__file__).parent / "results" / "intents.json"
SPLITS = ("01", "02", "03", "04", "05")
SETS = ("banking77", "clinc150")
SHOTS = (1, 5)
WAYS, QUERIES, EPISODES = 5, 5, 600  # of the test
FINETUNED = {1: 40, 5: 20}  # episodes, by shots, where an inner loop runs in each: the first of the others
ADAPTED = {1: 60, 5: 60}  # the same for loops of AdamW from the class means
HEADS = {1: 200, 5: 200}  # the same for loops that move the head alone
COSINE = 10**0.5  # feature length at which prototypes have the temperature 0.05

BUDGET = 4000  # rows of text that go forward and backward in the meta-training of a cell
# chosen with the rest of that recipe (choose.py)
BUDGETS = {"best": 8000, "best+names": 8000, "best+tuned": 8000}

COMMON: dict[str, Any] = {
    "num_query": 1,
    "k_shot": 1,
    "max_length": 64,
    "save_steps": 0,
    "test_episodes": 0,
    "load_best_model_at_end": True,
    "lr_scheduler_type": "linear",
    "warmup_steps": 10,
    "micro_batch_size": 32,
}
METRIC: dict[str, Any] = {
    "feature_norm": COSINE,
    "algorithm": "protonet",
    "n_way": 20,
    "meta_batch_size": 1,
    "eval_episodes": 20,
}
DROPPED: dict[str, Any] = {"example_transforms": ["fmmeta.tasks.augment:drop_words"]}
TASKS: dict[str, Any] = {"n_way": 5, "meta_batch_size": 4, "eval_episodes": 10}
INNER: dict[str, Any] = {**TASKS, "inner_steps": 5, "inner_lr": 0.1, "outer_lr": 5e-5}
ADAMW: dict[str, Any] = {  # the loop that was best on validation classes without meta-training (docs/log.md)
    "inner_optimizer": "adamw",
    "inner_lr": 1e-4,
    "inner_steps": 3,
    "head_init": "prototype",
    "feature_norm": COSINE,
}
# of the head alone, chosen in the same way, at five shots
HEAD: dict[str, Any] = {**ADAMW, "inner_lr": 0.01, "inner_steps": 5}
LAST: dict[str, Any] = {"eval_episodes": 0, "eval_steps": 0, "load_best_model_at_end": False}
# rows that end with +names have the names of classes among the support examples
BEST: dict[str, Any] = {**METRIC, "outer_lr": 1e-4, "init_interpolation": 0.6, **DROPPED}
STEPS: dict[str, Any] = {**BEST, **ADAMW, **LAST}
BY_STEPS: dict[str, dict[str, Any]] = {  # trainings whose inner loop is that of ADAMW
    "fomaml": {**STEPS, "algorithm": "fomaml"},
    "reptile": {**STEPS, "algorithm": "reptile", "n_way": 10, "k_shot": 5},
    "proto_maml": {
        **STEPS,
        "algorithm": "proto_maml",
        "first_order_steps": 10**6,
        "prototype_gradient": True,
    },
    "anil": {**STEPS, **HEAD, "algorithm": "anil", "prototype_gradient": True},
    "maml": {
        **STEPS,
        "algorithm": "maml",
        "prototype_gradient": True,
        "lora_r": 8,
        "inner_lr": 3e-4,
        "outer_lr": 1e-3,
    },
}
GONE = "best+tuned"  # of a `tune` section that chose the rate (docs/log.md, 2026-11-26); not computed again
ROWS: dict[str, tuple[dict[str, Any] | None, str]] = {  # settings of meta-training, method of the test
    "none+prototype": (None, "prototype"),
    "none+linear": (None, "linear"),
    "none+soft_kmeans": (None, "soft_kmeans"),
    "none+sinkhorn": (None, "sinkhorn"),
    "none+names": (None, "prototype"),
    "none+finetune": (None, "finetune"),
    "joint": (
        {**TASKS, "algorithm": "joint", "feature_norm": COSINE, "head_init": "prototype", "outer_lr": 5e-5},
        "prototype",
    ),
    "protonet": ({**METRIC, "feature_norm": 0.0, "outer_lr": 5e-5}, "prototype"),
    "fomaml": ({**INNER, "algorithm": "fomaml"}, "finetune"),
    "proto_maml": (
        {
            **INNER,
            "algorithm": "proto_maml",
            "first_order_steps": 10**6,
            "feature_norm": COSINE,
            "inner_lr": 0.01,
        },
        "finetune",
    ),
    "reptile": ({**INNER, "algorithm": "reptile"}, "finetune"),
    "anil": ({**INNER, "algorithm": "anil"}, "finetune"),
    "none+adamw": (None, "finetune"),
    "none+head": (None, "finetune"),
    **{f"{name}+adamw": (settings, "finetune") for name, settings in BY_STEPS.items()},
    **{f"{name}+prototype": (settings, "prototype") for name, settings in BY_STEPS.items()},
    "best": (BEST, "prototype"),
    GONE: (None, "prototype"),
    "best+names": ({**BEST, "label_names": "names"}, "prototype"),
}
TESTED_WITH = {  # other rows with an inner loop: the settings of their training
    "none+adamw": ADAMW,
    "none+head": {**HEAD, "inner_lr_groups": ["head=1", "*=0"]},
}
EPISODES_BY_ROW = {  # of rows with an inner loop; the others have FINETUNED
    **{row: ADAPTED for row in ROWS if row.endswith("+adamw")},
    **dict.fromkeys(("none+head", "anil+adamw"), HEADS),
}
FREE = ("none+prototype", "none+linear", "none+soft_kmeans", "none+sinkhorn")  # of one pass over the rows


def rows_per_step(settings: dict[str, Any]) -> int:
    """Rows of text that an outer step sends forward and backward."""
    settings = {**COMMON, **settings}
    shots = settings["k_shot"] + ("label_names" in settings)
    support, query = settings["n_way"] * shots, settings["n_way"] * settings["num_query"]
    name = settings["algorithm"]
    passes = {"joint": support + query, "protonet": support + query, "anil": support + query}
    steps = settings.get("inner_steps", 0)
    return settings["meta_batch_size"] * passes.get(
        name, steps * support + (0 if name == "reptile" else query)
    )


def main() -> None:
    parser = parser_of(__doc__, RESULTS)
    parser.add_argument("--rows", nargs="+", default=[one for one in ROWS if one != GONE], choices=list(ROWS))
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=SPLITS)
    asked = parser.parse_args()
    file, began = Path(asked.json), time.monotonic()
    for split in asked.splits:
        for row in asked.rows:
            for name in asked.sets:
                done = "right" in read(file).get(
                    f"{row} {name} {split}", {}
                )  # else means only, of an earlier version
                if done or time.monotonic() - began > 60 * asked.minutes:
                    continue
                keep(
                    file,
                    {f"{one} {name} {split}": cell for one, cell in run(row, name, split, asked).items()},
                )
    print(show(read(file)))


def parser_of(doc: str | None, results: Path) -> argparse.ArgumentParser:
    """The flags of a table of cells that is filled over time."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no further cell after this long"
    )
    parser.add_argument("--json", default=str(results))
    return parser


def run(row: str, name: str, split: str, asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The cell of a row, and those of rows that come with it."""
    settings, method = ROWS[row]
    data, began = f"{asked.data}/{name}", time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        model, facts = asked.model, dict[str, Any]()
        if settings is not None:
            model, facts["validation"] = trained(
                settings, BUDGETS.get(row, BUDGET), asked.model, data, split, folder
            )
        methods = [ROWS[one][1] for one in FREE] if row in FREE else [method]
        found = []
        for shots in SHOTS:
            inner = method == "finetune"
            counts = EPISODES_BY_ROW.get(row, FINETUNED)
            episodes, size = (counts[shots], 32) if inner else (EPISODES, 64)
            found += evaluate(
                model,
                data,
                class_split=split,
                method=methods,
                k_shot=[shots],
                n_way="5",
                num_query=QUERIES,
                episodes=episodes,
                micro_batch_size=size,
                max_length=64,
                label_names="names" if row.endswith("+names") else None,
                **TESTED_WITH.get(row, {}),
            )["cells"]
    rows = FREE if row in FREE else (row,)
    facts["cpu_minutes"] = round((time.process_time() - began) / 60 / len(rows), 2)
    return {
        one: {**facts, **numbers([cell for cell in found if cell["method"] == ROWS[one][1]])} for one in rows
    }


def trained(
    settings: dict[str, Any], budget: int, model: str, data: str, split: str, folder: str
) -> tuple[str, dict[int, float]]:
    """Meta-train on `budget` rows; the model's folder, and validation accuracies by outer step."""
    steps = budget // rows_per_step(settings)
    config = Config(
        model_name_or_path=model,
        dataset=[data],
        class_split=split,
        output_dir=folder,
        outer_steps=steps,
        **{"eval_steps": steps // 3, **COMMON, **settings},
    )
    MetaTrainer(config).train()
    lines = [
        json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return f"{folder}/model", {
        line["step"]: line["valid_accuracy"] for line in lines if "valid_accuracy" in line
    }


def numbers(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of a method's results, by shots: mean, and how many queries of each episode are right."""
    by_shots = {str(cell["k_shot"]): cell for cell in cells}
    shots = {shot: {"accuracy": cell["accuracy"], "ci95": cell["ci95"]} for shot, cell in by_shots.items()}
    return {"shots": shots, "right": {shot: letters(cell["scores"]) for shot, cell in by_shots.items()}}


def letters(scores: list[dict[str, Any]]) -> str:
    """A letter per episode: how many of its 25 queries are right, a for none."""
    return "".join(chr(ord("a") + round(score["accuracy"] * WAYS * QUERIES)) for score in scores)


def accuracies(cell: dict[str, Any], shot: str) -> list[float]:
    """Percent per episode, or their mean where no more is known."""
    right = cell.get("right", {}).get(shot)
    if right is None:
        return [100 * cell["shots"][shot]["accuracy"]]
    return [100 * (ord(letter) - ord("a")) / (WAYS * QUERIES) for letter in right]


def gains(ours: dict[str, Any], frozen: dict[str, Any], shot: str) -> list[list[float]]:
    """Of each split that both rows have: paired by episode, of which a row may have met the first ones only,
    or by means.
    """
    alike = [
        split for split in ours if split in frozen and ("right" in ours[split]) == ("right" in frozen[split])
    ]
    return [
        [a - b for a, b in zip(accuracies(ours[split], shot), accuracies(frozen[split], shot), strict=False)]
        for split in alike
    ]


def show(cells: dict[str, Any]) -> str:
    """The table: a row per recipe and data set; accuracies in percent."""
    lines = []
    for name, row, ours, frozen in by_split(cells):
        line = [name, row, str(len(ours))]
        for shot in map(str, SHOTS):
            line.append(interval([accuracies(cell, shot) for cell in ours.values()]))
            found = gains(ours, frozen, shot) if row != "none+prototype" else []
            line.append(interval(found, "+") if found else "")
        lines.append([*line, f"{sum(cell['cpu_minutes'] for cell in ours.values()) / len(ours):.1f}"])
    return table(["data set", "row", "splits", "1 shot", "gain", "5 shots", "gain", "CPU min"], lines)


def by_split(cells: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Data set, row, its cells by split, and those of frozen prototypes."""
    found: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for key, cell in cells.items():
        row, name, split = key.split()
        found[name, row][split] = cell
    for name in SETS:
        for row in ROWS:
            if (name, row) in found:
                yield name, row, found[name, row], found.get((name, "none+prototype"), {})


def interval(splits: list[list[float]], sign: str = "") -> str:
    mean, half = estimate(splits)
    return f"{mean:{sign}.2f}" if half is None else f"{mean:{sign}.2f} ± {half:.2f}"


def estimate(splits: list[list[float]]) -> tuple[float, float | None]:
    """Mean of what episodes of splits have, half its 95 % interval: over three splits or more, else over
    episodes.
    """
    means = [sum(values) / len(values) for values in splits]
    over = means if len(splits) > 2 else [value for values in splits for value in values]
    return sum(means) / len(means), mean_ci95(over)[1] if len(over) > 1 else None


if __name__ == "__main__":
    main()
