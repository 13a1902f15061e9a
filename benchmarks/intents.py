"""Which recipe makes a 22 M encoder learn new intents from one or five examples? The ProtAugment protocol, row by row.

    python -m benchmarks.intents --data ../shared/data --model PATH-OF-all-MiniLM-L6-v2 [--rows ...] [--minutes M]

Five class-disjoint splits, 5-way, 5 queries per class, 600 test episodes; the checkpoint is the one best on validation classes.
A cell is a row on one split of a data set, at 1 and 5 shots. Finished cells lie in benchmarks/results/intents.json; what is
there is not computed again, so that it can be stopped at any time. The last lines are the table: mean over the splits and its
95 % interval (1.96 standard errors over splits), gain over frozen prototypes, paired by split, and processor minutes per cell.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.common import machine, table
from fmmeta import Config, MetaTrainer, evaluate

RESULTS = Path(__file__).parent / "results" / "intents.json"
SPLITS = ("01", "02", "03", "04", "05")
SETS = ("banking77", "clinc150")
SHOTS = (1, 5)
COSINE = 10**0.5  # feature length at which prototypes have the temperature 0.05

COMMON: dict[str, Any] = {"num_query": 5, "max_length": 64, "save_steps": 0, "eval_steps": 50, "eval_episodes": 40,
                          "load_best_model_at_end": True, "lr_scheduler_type": "linear", "warmup_steps": 20,
                          "micro_batch_size": 64}  # fmt: skip
METRIC: dict[str, Any] = {"feature_norm": COSINE, "outer_lr": 2e-5}
ADAPTED: dict[str, Any] = {"n_way": 5, "k_shot": 1, "inner_steps": 5, "inner_lr": 0.1, "outer_steps": 100, "meta_batch_size": 4,
                           "outer_lr": 5e-5}  # fmt: skip
ROWS: dict[str, tuple[dict[str, Any] | None, str]] = {  # settings of meta-training, method of the test
    "none+prototype": (None, "prototype"),
    "none+linear": (None, "linear"),
    "none+finetune": (None, "finetune"),
    "protonet": (
        {**METRIC, "algorithm": "protonet", "n_way": 20, "k_shot": 1, "meta_batch_size": 1, "outer_steps": 200},
        "prototype",
    ),
    "joint": ({**METRIC, "algorithm": "joint", "n_way": 5, "k_shot": 1, "meta_batch_size": 4, "outer_steps": 100}, "prototype"),
    "fomaml": ({**ADAPTED, "algorithm": "fomaml"}, "finetune"),
    "proto_maml": ({**ADAPTED, **METRIC, "algorithm": "proto_maml", "inner_lr": 0.01}, "finetune"),
    "reptile": ({**ADAPTED, "algorithm": "reptile", "outer_lr": 1e-4}, "finetune"),
    "anil": ({**ADAPTED, "algorithm": "anil"}, "finetune"),
}
FREE = ("none+prototype", "none+linear")  # one pass over the rows serves both


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=SPLITS)
    parser.add_argument("--episodes", type=int, default=600)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further cell after this long")
    parser.add_argument("--json", default=str(RESULTS))
    asked = parser.parse_args()
    file, began = Path(asked.json), time.monotonic()
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"cells": {}}
    for split in asked.splits:
        for name in asked.sets:
            for row in asked.rows:
                key = f"{row} {name} {split} {asked.episodes}"
                if key in known["cells"] or time.monotonic() - began > 60 * asked.minutes:
                    continue
                for done, cell in run(row, name, split, asked).items():
                    known["cells"][f"{done} {name} {split} {asked.episodes}"] = cell
                known["machine"] = machine()
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(show(known["cells"], asked.episodes))


def run(row: str, name: str, split: str, asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The cell of a row, and those of rows that come with it."""
    settings, method = ROWS[row]
    data, began = f"{asked.data}/{name}", time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        model, facts = asked.model, {}
        if settings is not None:
            config = Config(
                model_name_or_path=asked.model, dataset=[data], split=split, output_dir=folder, **{**COMMON, **settings}
            )
            MetaTrainer(config).train()
            model = f"{folder}/model"
            lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            facts["validation"] = {line["step"]: line["valid_accuracy"] for line in lines if "valid_accuracy" in line}
        methods = [ROWS[one][1] for one in FREE] if row in FREE else [method]
        found = evaluate(model, data, split=split, method=methods, k_shot=list(SHOTS), n_way="5", num_query=5,
                         episodes=asked.episodes, micro_batch_size=64, max_length=64)  # fmt: skip
    minutes = (time.process_time() - began) / 60
    rows = FREE if row in FREE else (row,)
    return {one: {**facts, "cpu_minutes": round(minutes / len(rows), 2),
                  "shots": {str(cell["k_shot"]): {"accuracy": cell["accuracy"], "ci95": cell["ci95"]}
                            for cell in found["cells"] if cell["method"] == ROWS[one][1]}} for one in rows}  # fmt: skip


def show(cells: dict[str, Any], episodes: int) -> str:
    """The table: a row per recipe and data set; accuracies in percent."""
    found: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for key, cell in cells.items():
        row, name, split, count = key.split()
        if int(count) == episodes:
            found[name, row][split] = cell
    lines = []
    for name in SETS:
        for row in ROWS:
            by_split = found.get((name, row))
            if not by_split:
                continue
            frozen, line = found.get((name, "none+prototype"), {}), [name, row, str(len(by_split))]
            for shot in map(str, SHOTS):
                line.append(interval([cell["shots"][shot]["accuracy"] for cell in by_split.values()]))
                common = [split for split in by_split if split in frozen and row != "none+prototype"]
                gains = [
                    by_split[split]["shots"][shot]["accuracy"] - frozen[split]["shots"][shot]["accuracy"] for split in common
                ]
                line.append(interval(gains, "+") if gains and row != "none+prototype" else "")
            lines.append([*line, f"{sum(cell['cpu_minutes'] for cell in by_split.values()) / len(by_split):.1f}"])
    return table(["data set", "row", "splits", "1 shot", "gain", "5 shots", "gain", "CPU min"], lines)


def interval(values: list[float], sign: str = "") -> str:
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{100 * mean:{sign}.2f}"
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return f"{100 * mean:{sign}.2f} ± {196 * spread:.2f}"


if __name__ == "__main__":
    main()
