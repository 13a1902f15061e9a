"""Which settings should the recipe `best` of benchmarks.intents have? Those that are best on validation
classes of both sets.

    python -m benchmarks.choose --data ../shared/data --model PATH-OF-all-MiniLM-L6-v2 \
        [--only NAME ...] [--minutes M]

One split (01). Each variant is meta-trained on the training classes and classifies 600 episodes of the
validation classes by prototypes; test classes of split 01 are never used, but the validation classes are test
classes in other splits (docs/few-shot-classification.md says how many). Finished cells lie in
benchmarks/results/choose.json and are not computed again. The last lines are the table; the best variant is
that with the highest mean of both sets at one shot.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import keep, read, table
from benchmarks.intents import DROPPED, EPISODES, METRIC, QUERIES, SETS, SHOTS, parser_of, trained
from fmmeta import evaluate

RESULTS = Path(__file__).parent / "results" / "choose.json"
SPLIT = "01"
FROZEN = "frozen"
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {  # rows of text in training, settings beside METRIC
    FROZEN: (0, {}),
    "lr 1e-4": (8000, {"outer_lr": 1e-4}),
    "lr 1e-4, share 0.4": (8000, {"outer_lr": 1e-4, "init_interpolation": 0.6}),
    "lr 1e-4, share 0.4, words dropped": (8000, {"outer_lr": 1e-4, "init_interpolation": 0.6, **DROPPED}),
}


def main() -> None:
    parser = parser_of(__doc__, RESULTS)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    asked = parser.parse_args()
    file, began = Path(asked.json), time.monotonic()
    for variant in asked.only:
        for name in asked.sets:
            if f"{variant} | {name}" not in read(file) and time.monotonic() - began < 60 * asked.minutes:
                keep(
                    file,
                    {f"{variant} | {name}": run(*VARIANTS[variant], asked.model, f"{asked.data}/{name}")},
                )
    print(show(read(file)))


def run(budget: int, settings: dict[str, Any], model: str, data: str) -> dict[str, Any]:
    """Accuracy on validation classes by shots, and processor minutes of training and looking."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        if budget:
            model, _ = trained(
                {**METRIC, **settings, "eval_episodes": 0, "eval_steps": 0, "load_best_model_at_end": False},
                budget,
                model,
                data,
                SPLIT,
                folder,
            )
        found = evaluate(
            model,
            data,
            class_split=SPLIT,
            eval_split="valid",
            method=["prototype"],
            k_shot=list(SHOTS),
            n_way="5",
            num_query=QUERIES,
            episodes=EPISODES,
            micro_batch_size=64,
            max_length=64,
        )
    cells = {
        str(cell["k_shot"]): {"accuracy": cell["accuracy"], "ci95": cell["ci95"]} for cell in found["cells"]
    }
    return {"shots": cells, "cpu_minutes": round((time.process_time() - began) / 60, 2)}


def show(cells: dict[str, Any]) -> str:
    """A row per variant: percent on validation classes, per set and shots, the mean of both sets at one shot
    last.
    """
    lines = []
    for variant in VARIANTS:
        of_sets = [cells.get(f"{variant} | {name}") for name in SETS]
        shown = [
            f"{100 * cell['shots'][str(shot)]['accuracy']:.2f}" if cell else ""
            for cell in of_sets
            for shot in SHOTS
        ]
        found = [cell for cell in of_sets if cell]
        mean = (
            sum(100 * cell["shots"]["1"]["accuracy"] for cell in found) / len(SETS)
            if len(found) == len(SETS)
            else None
        )
        minutes = max((cell["cpu_minutes"] for cell in found), default=0.0)
        lines.append([variant, *shown, "" if mean is None else f"{mean:.2f}", f"{minutes:.1f}"])
    heads = [f"{name}, {shot} shot" for name in SETS for shot in SHOTS]
    return table(["variant", *heads, "both, 1 shot", "CPU min"], lines)


if __name__ == "__main__":
    main()
