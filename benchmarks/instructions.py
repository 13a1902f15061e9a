"""Does meta-training make a causal language model learn held-out instructions from five examples? Against
joint training.

    python -m benchmarks.instructions --data ../shared/data --folder runs/instructions [--rows ...]

A small byte-level Llama is made from a config and pre-trained jointly on the training tasks of
instruction_induction and function_vectors (34 of 55; held-out tasks are other tasks, not other rows). From
there it is meta-trained or trained jointly on, each with BUDGET pairs of input and answer through forward and
backward passes. Outer rate, inner rate and number of inner steps are chosen on the validation tasks, for
every row by itself. Then every model adapts to the test tasks: five examples, the loss per answer token on
five others. Gains are paired by task: mean over a task's episodes first, 95 % interval over tasks.

Finished trainings lie in --folder, finished cells in benchmarks/results/instructions.json: it can be stopped
and continued.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.common import keep, read, table
from fmmeta import Config, MetaTrainer, evaluate
from fmmeta.common.progress import Progress
from fmmeta.evaluation.settings import TuneConfig
from fmmeta.evaluation.tune import tune
from fmmeta.metrics.scores import format_interval, mean_ci95

RESULTS = Path(__file__).parent / "results" / "instructions.json"
SHOTS = 5  # examples; as many queries
PRETRAINED, BUDGET = 120_000, 60_000  # pairs through forward and backward passes
OUTER_LRS = (1e-3, 3e-3, 3e-4)
INNER = {"inner_lrs": [0.01, 0.03, 0.1, 0.3], "max_steps": 10}
VALID_EPISODES, TEST_EPISODES = 20, 110  # two of each of ten tasks, ten of each of eleven
JOINT: dict[str, Any] = {"algorithm": "joint", "meta_batch_size": 4}
PRETRAINING_LR = 3e-3
ROWS: dict[str, dict[str, Any] | None] = {
    "untrained": None,  # from the config
    "pre-trained": None,
    "joint": JOINT,
    "reptile": {"algorithm": "reptile", "meta_batch_size": 4, "inner_steps": 5, "inner_lr": 0.03},
    "fomaml": {"algorithm": "fomaml", "meta_batch_size": 4, "inner_steps": 3, "inner_lr": 0.1},
}
COMMON: dict[str, Any] = {
    "task_type": "causal_lm",
    "k_shot": SHOTS,
    "num_query": SHOTS,
    "max_length": 128,
    "save_steps": 100,
    "eval_episodes": 0,
    "num_workers": "0",
    "lr_scheduler_type": "linear",
    "logging_steps": 50,
    "adam_epsilon": 1e-6,
}


def pairs_per_step(settings: dict[str, Any]) -> int:
    """Pairs that an outer step sends forward and backward."""
    steps, shots = settings.get("inner_steps", 0), settings.get("k_shot", SHOTS)
    per_task = {"joint": 2 * shots, "reptile": steps * shots}.get(settings["algorithm"], (steps + 1) * shots)
    return settings["meta_batch_size"] * per_task


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--folder", required=True, help="where the models are kept")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--json", default=str(RESULTS))
    asked = parser.parse_args()
    file = Path(asked.json)
    plan = [(row, rate) for rate in OUTER_LRS for row in asked.rows if ROWS[row]]
    for row, rate in [*((row, 0.0) for row in asked.rows if not ROWS[row]), *plan]:
        if f"{row} {rate:g}" not in read(file):
            keep(file, {f"{row} {rate:g}": cell(row, rate, asked)})
    print(show(read(file)))


def cell(row: str, rate: float, asked: argparse.Namespace) -> dict[str, Any]:
    """A row at an outer rate: choose its inner loop on validation tasks, then score it on test tasks."""
    began = time.process_time()
    data = [f"{asked.data}/{name}" for name in ("instruction_induction", "function_vectors")]
    model = made(row, rate, asked, data)
    shared = {"k_shot": [SHOTS], "num_query": SHOTS, "max_length": COMMON["max_length"]}
    target = Path(asked.folder) / f"{row}-{rate:g}.json"
    best = tune(
        TuneConfig(
            model_name_or_path=model,
            dataset=data,
            task_type="causal_lm",
            output=str(target),
            episodes=VALID_EPISODES,
            **INNER,
            **shared,
        ),
        progress=Progress(enabled=False),
    )[0]
    found = evaluate(
        model,
        data,
        task_type="causal_lm",
        method="finetune",
        episodes=TEST_EPISODES,
        inner_lr=best.inner_lr,
        inner_steps=best.inner_steps,
        **shared,
    )["cells"][0]
    losses: dict[str, list[float]] = defaultdict(list)
    for score in found["scores"]:
        losses[score["task"]].append(round(score["loss"], 5))
    minutes = round((time.process_time() - began) / 60, 2)
    return {
        "inner_lr": best.inner_lr,
        "inner_steps": best.inner_steps,
        "valid_loss": round(best.loss, 5),
        "cpu_minutes": minutes,
        "exact_match": found["accuracy"],
        "losses": losses,
    }


def made(row: str, rate: float, asked: argparse.Namespace, data: list[str]) -> str:
    """Path of a row's model, trained if it is not there yet; a run that was stopped goes on."""
    if row == "untrained":
        return "tiny"
    base = f"{asked.folder}/base"
    if not Path(base, "model").is_dir():
        train(JOINT, PRETRAINED, "tiny", base, PRETRAINING_LR, data)
    settings = ROWS[row]
    if settings is None:
        return f"{base}/model"
    folder = f"{asked.folder}/{row}-{rate:g}"
    if not Path(folder, "model").is_dir():
        train(settings, BUDGET, f"{base}/model", folder, rate, data)
    return f"{folder}/model"


def train(
    settings: dict[str, Any], pairs: int, model: str, folder: str, rate: float, data: list[str]
) -> None:
    MetaTrainer(
        Config(
            model_name_or_path=model,
            dataset=data,
            output_dir=folder,
            outer_lr=rate,
            outer_steps=pairs // pairs_per_step(settings),
            **{**COMMON, **settings},
        )
    ).train()


def show(cells: dict[str, Any]) -> str:
    """The table: a row per kind of training, at the outer rate with the lowest validation loss."""
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for key, one in cells.items():
        row, rate = key.split()
        if row not in best or one["valid_loss"] < best[row][1]["valid_loss"]:
            best[row] = float(rate), one
    lines = []
    for row in filter(best.__contains__, ROWS):
        rate, one = best[row]
        gains = [
            gain(best[other][1], one) if other in best and other != row else ""
            for other in ("untrained", "joint")
        ]
        settings = [f"{rate:g}", f"{one['inner_lr']:g} x {one['inner_steps']}"]
        numbers = [
            f"{one['valid_loss']:.3f}",
            format_interval(mean_ci95(list(by_task(one).values())), ".3f"),
            *gains,
        ]
        lines.append(
            [row, *settings, *numbers, f"{100 * one['exact_match']:.1f}", f"{one['cpu_minutes']:.1f}"]
        )
    header = [
        "row",
        "outer lr",
        "inner lr x steps",
        "valid loss",
        "test loss",
        "lower than untrained",
        "lower than joint",
    ]
    return table([*header, "exact match %", "CPU min"], lines)


def by_task(cell: dict[str, Any]) -> dict[str, float]:
    return {task: sum(values) / len(values) for task, values in cell["losses"].items()}


def gain(other: dict[str, Any], one: dict[str, Any]) -> str:
    """How much lower the losses of `one` are, paired by task."""
    before, after = by_task(other), by_task(one)
    return format_interval(mean_ci95([before[task] - after[task] for task in sorted(after)]), "+.3f")


if __name__ == "__main__":
    main()
