"""Does meta-training make a pretrained language model learn held-out tasks from five examples?

    python -m benchmarks.language --model FILE.gguf --data ../shared/data --folder runs/language
    python -m benchmarks.language ... --stage train --rows fomaml joint     a part, beside other processes
    python -m benchmarks.language ... --stage show                          the table of what is finished

LoRA on the training tasks of function_vectors and instruction_induction; held-out tasks are other tasks, not
other rows. Every training sees the same number of pairs of input and answer. In stages:

train    each way of training, from the pretrained model, at each seed
choose   the inner loop of every row on validation tasks, seed 1 alone: SGD and AdamW, three rates each (and
         the rates of the training), 0 to 30 steps; the template of the untrained model's rows
test     every row on the test tasks, the same episodes for all: loss per answer token, exact match of greedy
         answers, calibration error over answer tokens; curves over inner steps and over shots
words    the same on the held-out functions of the generated suite, which no choice was made on
show     the table, with differences paired by task (t interval, Wilcoxon test) to the best meta-trained row,
         which is the one with the lowest validation loss; --plot: exact match over shots

Each finished cell is a file in --folder/cells: a run that was stopped goes on, and several processes share
the work. --json collects them. One thread a process. Forward and backward passes are in bf16, or with
--precision fp32 in fp32, for CPUs without bf16 instructions; cells say which.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
from scipy.stats import wilcoxon
from torch import Tensor

from benchmarks.common import plot, read, table, write_json
from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.evaluation.command import EvaluatedModel
from fmmeta.evaluation.methods import with_stored_rates
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.metrics.scores import BINS, format_interval, mean_ci95
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.tasks.batching import IGNORE, MicroBatch
from fmmeta.train import MetaTrainer
from fmmeta.training import build

RESULTS = Path(__file__).parent / "results" / "language.json"
SUITES = ("function_vectors", "instruction_induction")
SHOTS = 5  # examples; as many queries
COMMON: dict[str, Any] = {
    "task_type": "causal_lm",
    "num_query": SHOTS,
    "max_length": 96,
    "attn_implementation": "eager",  # faster than sdpa for short rows on a CPU
}
LORA: dict[str, Any] = {"lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"]}
OUTER: dict[str, Any] = {
    "outer_lr": 1e-3,
    "warmup_steps": 5,
    "lr_scheduler_type": "linear",
    "meta_batch_size": 4,
    "eval_episodes": 0,
    "num_workers": "0",
    "logging_steps": 10,
    "save_steps": 50,
}
INNER: dict[str, Any] = {"inner_lr": 0.1, "inner_steps": 5}
LEARNED: dict[str, Any] = {**INNER, "inner_lr_learned": "layer"}  # docs/log.md
TRAININGS: dict[str, dict[str, Any]] = {
    "joint": {"algorithm": "joint"},
    "meta_icl": {"algorithm": "meta_icl"},
    "meta_icl_all": {"algorithm": "meta_icl", "loss_on_support": True},
    "fomaml": {"algorithm": "fomaml", **LEARNED},
    "reptile": {"algorithm": "reptile", **INNER},
    "maml": {"algorithm": "maml", **LEARNED},
}
"""Flags of each training."""
ROWS = {  # name: training and method
    "zero-shot": ("base", "zero_shot"),
    "in context": ("base", "in_context"),
    "LoRA": ("base", "finetune"),
    "test-time training": ("base", "finetune+in_context"),
    "joint, zero-shot": ("joint", "zero_shot"),
    "joint, in context": ("joint", "in_context"),
    "joint, LoRA": ("joint", "finetune"),
    "MetaICL": ("meta_icl", "in_context"),
    "MetaICL, all answers": ("meta_icl_all", "in_context"),
    "FOMAML": ("fomaml", "finetune"),
    "Reptile": ("reptile", "finetune"),
    "exact MAML": ("maml", "finetune"),
    "MetaICL, test-time training": ("meta_icl_all", "finetune+in_context"),
}
META_TRAINED = (
    "MetaICL",
    "MetaICL, all answers",
    "MetaICL, test-time training",
    "FOMAML",
    "Reptile",
    "exact MAML",
)
UNTRAINED = ("zero-shot", "in context", "LoRA", "test-time training")
JOINT = ("joint, zero-shot", "joint, in context", "joint, LoRA")
CURVES = (  # over inner steps
    "LoRA",
    "test-time training",
    "joint, LoRA",
    "MetaICL, test-time training",
    "FOMAML",
    "exact MAML",
)
SHOT_CURVES = ("in context", "LoRA", "MetaICL, all answers", "FOMAML")
GRID = [("sgd", 0.03), ("sgd", 0.1), ("sgd", 0.3), ("adamw", 1e-3), ("adamw", 3e-3), ("adamw", 1e-2)]
STEPS = (0, 1, 2, 3, 4, 5, 7, 10, 15, 20, 30)
STEPS_WITH_PROMPTS = STEPS[:8]  # such a step costs as much as five others, and the loss rises again early
TEMPLATES = ("plain", "chat")
FIRST_SEED = 1  # of the choices, of curves, and of rows that are not trained
PAIRS = 18_000  # of input and answer, through forward and backward passes
SPLITS = {"valid": (11, 10), "test": (12, 66), "words": (13, 46)}  # seed of the episodes, and how many


def pairs_per_task(settings: dict[str, Any]) -> int:
    """Pairs of input and answer that a task of training sends forward and backward."""
    steps = settings.get("inner_steps", 0)
    known = {"joint": 2 * SHOTS, "meta_icl": SHOTS * (SHOTS + 1), "reptile": steps * SHOTS}
    return known.get(settings["algorithm"], (steps + 1) * SHOTS)


class Study:
    """The folder of a study: trained models, and finished cells."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.folder = asked, Path(asked.folder)
        self.data = [f"{asked.data}/{suite}" for suite in SUITES]
        self.trained_on = [*self.data, *asked.generated]
        self.common = {**COMMON, "bf16": asked.precision == "bf16"}
        (self.folder / "cells").mkdir(parents=True, exist_ok=True)

    def cells(self) -> dict[str, Any]:
        """The finished cells by name: those of --json, and those of the folder."""
        of_folder = {
            file.stem: json.loads(file.read_text(encoding="utf-8"))
            for file in sorted((self.folder / "cells").glob("*.json"))
        }
        return {**read(Path(self.asked.json)), **of_folder}

    def add(self, name: str, cell: dict[str, Any]) -> None:
        path = self.folder / "cells" / f"{name}.json"
        text = json.dumps({**cell, "precision": self.asked.precision}, indent=1)
        path.with_suffix(".part").write_text(text, encoding="utf-8")
        path.with_suffix(".part").replace(path)

    def model(self, training: str, seed: int) -> str:
        return self.asked.model if training == "base" else str(self.folder / f"{training}-{seed}" / "model")

    def train(self, training: str, seed: int) -> dict[str, Any]:
        """Train, or go on with a run that was stopped."""
        settings, output = TRAININGS[training], self.folder / f"{training}-{seed}"
        resumed, began = output.exists(), time.process_time()
        steps = self.asked.pairs // (OUTER["meta_batch_size"] * pairs_per_task(settings))
        config = Config(
            model_name_or_path=self.asked.model,
            dataset=self.trained_on,
            output_dir=str(output),
            outer_steps=steps,
            seed=seed,
            k_shot=SHOTS,
            prompt_template="plain",
            **{**self.common, **LORA, **OUTER, **settings},
        )
        MetaTrainer(config).train()
        minutes = None if resumed else round((time.process_time() - began) / 60, 1)
        return {"outer_steps": steps, "pairs": self.asked.pairs, "cpu_minutes": minutes}

    def score(
        self,
        row: str,
        seed: int,
        split: str,
        choice: dict[str, Any],
        at: Sequence[int],
        chosen: int | None = None,
        shots: int = SHOTS,
    ) -> dict[str, Any]:
        """Loss, exact match and calibration of a row after each number of inner steps in `at`, by task."""
        training, methods = ROWS[row][0], ROWS[row][1].split("+")
        learns, prompts = "finetune" in methods, "in_context" in methods
        of_base = LORA if learns and training == "base" else {}
        episodes_seed, count = SPLITS[split]
        began = time.process_time()
        settings = EvaluateConfig(
            model_name_or_path=self.model(training, seed),
            dataset=["words"] if split == "words" else self.data,
            method=["finetune" if learns else methods[0]],
            episodes=count,
            eval_split="test" if split == "words" else split,
            seed=episodes_seed,
            k_shot=[shots],
            **{**self.common, **of_base, **choice, **({"inner_steps": max(at)} if learns else {})},
        )
        scores = {steps: defaultdict[str, list[Score]](list) for steps in at}
        launch = Launch.from_env(os.environ)
        with closing(World(launch, pick_device(launch))) as world:
            model = EvaluatedModel(settings, world, Progress(enabled=False), lambda text: None, [])
            (episodes,) = model.episodes.values()
            worker: Any = model.parts.worker
            theta = model.parts.meta_params.theta
            inner = with_stored_rates(settings, model.config, model.parts.setup.inner, worker)
            load = model.parts.load(episodes.source)
            if prompts and learns:
                load.prompt_episode = build.episode_prompt_builder(model.inputs)
            elif prompts:
                load.prompt = build.prompt_builder(model.inputs)
            for number, task in enumerate(episodes.tasks, 1):
                print(f"\r{row}, {split}: episode {number} of {len(episodes.tasks)}", end="", flush=True)
                episode: Any = load(task).batches
                batches = episode.prompted or episode.query
                steps = itertools.count()

                def after_step(
                    head: Any, task: Any = task, batches: Any = batches, steps: Any = steps
                ) -> None:
                    done = next(steps)
                    if done in scores:
                        scores[done][task.name].append(score_of(batches, worker.logits(batches)))

                after_step([])
                if learns:
                    start = inner.begin(worker, theta, episode.support)
                    inner.run(worker, start, episode.support, after_step=after_step)
                    worker.write(theta)
            print("\r\033[K", end="", flush=True)
        return {
            "row": row,
            "choice": choice,
            "chosen": max(at) if chosen is None else chosen,
            "shots": shots,
            "steps": {str(steps): by_task(one) for steps, one in scores.items()},
            "cpu_minutes": round((time.process_time() - began) / 60, 2),
        }


@dataclass(frozen=True)
class Score:
    """An episode's queries: loss per answer token in nats, share of answers whose tokens are all the
    likeliest ones, and sums by bin of confidence of (confidence, right tokens, tokens).
    """

    loss: float
    exact: float
    bins: Tensor


@torch.no_grad()
def score_of(batches: Sequence[MicroBatch], logits: Sequence[Tensor]) -> Score:
    loss, tokens, exact, bins = 0.0, 0, [], torch.zeros(3, BINS, dtype=torch.float64)
    for batch, of_batch in zip(batches, logits, strict=True):
        for labels, row in zip(batch.labels[:, 1:], of_batch[:, :-1], strict=True):
            answer = labels != IGNORE
            if not bool(answer.any()):  # a row that fills the batch
                continue
            probabilities = row[answer].double().log_softmax(1)
            confidence, guess = probabilities.max(1)
            right = guess == labels[answer]
            loss -= float(probabilities.gather(1, labels[answer][:, None]).sum())
            tokens += len(right)
            exact.append(float(right.all()))
            place = (confidence.exp() * BINS).long().clamp(max=BINS - 1)
            bins.index_add_(
                1, place, torch.stack([confidence.exp(), right.double(), torch.ones_like(confidence)])
            )
    return Score(loss / tokens, mean(exact), bins)


def by_task(scores: dict[str, list[Score]]) -> dict[str, Any]:
    """Means over the episodes of each task, and the calibration error over the answer tokens of all."""
    every = [one for of_task in scores.values() for one in of_task]
    confidence, right, tokens = torch.stack([one.bins for one in every]).sum(0)
    return {
        "loss": {task: round(mean(one.loss for one in found), 5) for task, found in sorted(scores.items())},
        "exact": {task: round(mean(one.exact for one in found), 5) for task, found in sorted(scores.items())},
        "ece": round(float((confidence - right).abs().sum() / tokens.sum()), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="pretrained model: a GGUF file, a folder or a hub id")
    parser.add_argument("--data", required=True)
    parser.add_argument("--folder", required=True, help="where models and cells are kept")
    parser.add_argument("--stage", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs that each training sees")
    parser.add_argument("--generated", nargs="*", default=["words"], help="data sets to train on as well")
    parser.add_argument("--json", default=str(RESULTS))
    parser.add_argument("--plot", help="SVG file of exact match over shots")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    study, began = Study(asked), time.monotonic()
    stages = [STAGES[stage] for stage in STAGES if stage in asked.stage]
    work = [cell for stage in stages for cell in stage(study) if asked.only in cell[0]]
    for done, (name, make) in enumerate(work):
        if name not in study.cells():
            print(f"{name}: {done} of {len(work)} cells, {(time.monotonic() - began) / 60:.0f} min so far")
            study.add(name, make())
    cells = study.cells()
    write_json(asked.json, {"cells": cells})
    print(show(cells))
    plot(asked.plot, partial(draw, cells))


Cells = Iterator[tuple[str, Callable[[], dict[str, Any]]]]
"""Names of cells, and what makes them."""


def trainings(study: Study) -> Cells:
    for seed in study.asked.seeds:
        for training in dict.fromkeys(ROWS[row][0] for row in study.asked.rows):
            if training != "base":
                yield f"train {training} {seed}", partial(study.train, training, seed)


def choices(study: Study) -> Cells:
    """Every choice of every row on validation tasks, with the first seed."""
    for row in study.asked.rows:
        training, method = ROWS[row]
        learns = "finetune" in method
        options: list[dict[str, Any]] = [{}]
        if learns:
            options = [{"inner_optimizer": optimizer, "inner_lr": rate} for optimizer, rate in GRID] + (
                [{}] if training != "base" and "inner_lr" in TRAININGS[training] else []
            )
        if training == "base":
            options = [{**one, "prompt_template": name} for one in options for name in TEMPLATES]
        steps = STEPS_WITH_PROMPTS if "+" in method else STEPS
        for one in options:
            values = [f"{value:g}" if isinstance(value, float) else value for value in one.values()]
            name, at = " ".join(values), steps if learns else steps[:1]
            yield (
                f"choose {row} {name or 'as trained'}",
                partial(study.score, row, FIRST_SEED, "valid", one, at),
            )


def chosen(study: Study, row: str) -> tuple[dict[str, Any], int, float]:
    """The choice of a row, its number of inner steps, and its loss: the lowest mean over validation tasks."""
    found = [
        (mean(scores["loss"].values()), int(steps), cell["choice"])
        for name, cell in study.cells().items()
        if name.startswith("choose ") and cell["row"] == row
        for steps, scores in cell["steps"].items()
    ]
    loss, steps, choice = min(found, key=lambda one: one[0] if math.isfinite(one[0]) else math.inf)
    return choice, steps, loss


def tests(study: Study) -> Cells:
    for seed in study.asked.seeds:
        for row in study.asked.rows:
            if ROWS[row][0] == "base" and seed != FIRST_SEED:
                continue  # nothing random but the adapters' first matrices

            def test(row: str = row, seed: int = seed, shots: int = SHOTS) -> dict[str, Any]:
                choice, steps, _ = chosen(study, row)
                curve = row in CURVES and shots == SHOTS and seed == FIRST_SEED
                at = sorted({steps, *(range(11) if curve else ())})
                return study.score(row, seed, "test", choice, at, steps, shots)

            yield f"test {row} {seed}", test
            if row in SHOT_CURVES and seed == FIRST_SEED:
                for shots in (1, 2, 10):
                    yield f"shots {row} {shots}", partial(test, shots=shots)


def confirmations(study: Study) -> Cells:
    """Rows with the settings of the test tasks, on the functions of `words` that are held out."""
    for row in study.asked.rows:

        def confirm(row: str = row) -> dict[str, Any]:
            choice, steps, _ = chosen(study, row)
            return study.score(row, FIRST_SEED, "words", choice, [steps])

        yield f"words {row} {FIRST_SEED}", confirm


STAGES: dict[str, Callable[[Study], Cells]] = {
    "train": trainings,
    "choose": choices,
    "test": tests,
    "words": confirmations,
    "show": lambda study: iter(()),
}


def over_seeds(
    cells: dict[str, Any], row: str, value: str, steps: str | None = None, split: str = "test"
) -> dict[str, float]:
    """Mean of a value over the seeds of a row's cells of a split, by task; empty if there are none."""
    found = defaultdict[str, list[float]](list)
    for name, cell in cells.items():
        if name.startswith(f"{split} ") and cell["row"] == row:
            for task, one in cell["steps"].get(steps or str(cell["chosen"]), {value: {}})[value].items():
                found[task].append(one)
    return {task: mean(values) for task, values in found.items()}


def difference(one: dict[str, float], other: dict[str, float], form: str, scale: float = 1.0) -> str:
    """one - other, paired by task: mean with its 95 % interval, and the p-value of Wilcoxon's test."""
    pairs = [one[task] - other[task] for task in sorted(one)]
    p = cast(Any, wilcoxon(pairs)).pvalue if any(pairs) else 1.0
    return f"{format_interval(mean_ci95(pairs), form, scale)}, p {p:.3f}"


def show(cells: dict[str, Any]) -> str:
    """The table: a row per way of learning; differences are of the meta-trained row with the lowest
    validation loss from this one.
    """
    valid = defaultdict[str, list[float]](list)
    for name, cell in cells.items():
        if name.startswith("choose "):
            valid[cell["row"]] += [mean(one["loss"].values()) for one in cell["steps"].values()]
    meta = [row for row in META_TRAINED if valid[row] and over_seeds(cells, row, "loss")]
    best = min(meta, key=lambda row: min(valid[row]), default=None)
    lines = []
    for row in ROWS:
        loss, exact = (over_seeds(cells, row, value) for value in ("loss", "exact"))
        if not loss:
            continue
        of_row = [cell for name, cell in cells.items() if name.startswith("test ") and cell["row"] == row]
        choice = of_row[0]["choice"]
        inner = "-"
        if "finetune" in ROWS[row][1]:
            rates = f"{choice['inner_optimizer']} {choice['inner_lr']:g}" if choice else "as trained"
            inner = f"{rates} x {of_row[0]['chosen']}"
        apart = ["", ""]
        if best and row != best:
            apart = [
                difference(over_seeds(cells, best, "loss"), loss, "+.3f"),
                difference(over_seeds(cells, best, "exact"), exact, "+.1f", 100),
            ]
        lines.append(
            [
                row + (" (chosen)" if row == best else ""),
                choice.get("prompt_template", "plain"),
                inner,
                seeds_and_precision(of_row),
                f"{min(valid[row], default=float('nan')):.3f}",
                format_interval(mean_ci95(list(loss.values())), ".3f"),
                format_interval(mean_ci95(list(exact.values())), ".1f", 100),
                f"{mean(one['steps'][str(one['chosen'])]['ece'] for one in of_row):.3f}",
                *apart,
            ]
        )
    header = ["row", "template", "inner loop", "seeds", "valid loss", "test loss", "exact match %", "ECE"]
    main = table([*header, "chosen - this: loss", "chosen - this: exact match"], lines)
    parts = [main, differences(cells), curves(cells)]
    if any(name.startswith("words ") for name in cells):
        parts.append(words(cells))
    return "\n\n".join(parts)


def seeds_and_precision(cells: list[dict[str, Any]]) -> str:
    """The number of seeds, and how many of them were trained and scored in fp32."""
    in_fp32 = sum(cell.get("precision") == "fp32" for cell in cells)
    return f"{len(cells)}, {in_fp32} in fp32" if in_fp32 else str(len(cells))


def words(cells: dict[str, Any]) -> str:
    """A table: the rows on the held-out functions of `words`, and the difference to the best one."""
    rows = [row for row in ROWS if over_seeds(cells, row, "loss", split="words")]
    values = {
        (row, name): over_seeds(cells, row, name, split="words") for row in rows for name in ("loss", "exact")
    }
    best = min(rows, key=lambda row: mean(values[row, "loss"].values()))
    lines = []
    for row in rows:
        loss, exact = values[row, "loss"], values[row, "exact"]
        apart = ["", ""]
        if row != best:
            apart = [
                difference(loss, values[best, "loss"], "+.3f"),
                difference(exact, values[best, "exact"], "+.1f", 100),
            ]
        shown = [
            format_interval(mean_ci95(list(loss.values())), ".3f"),
            format_interval(mean_ci95(list(exact.values())), ".1f", 100),
        ]
        lines.append([row, *shown, *apart])
    name = f"this - {best}"
    return table(["row on words", "loss", "exact match %", f"{name}: loss", f"{name}: exact match"], lines)


def differences(cells: dict[str, Any]) -> str:
    """A table: every meta-trained row against the ways of learning without meta-training."""
    lines = []
    for row, other in itertools.product(META_TRAINED, (*UNTRAINED, *JOINT)):
        values = [[over_seeds(cells, one, value) for one in (row, other)] for value in ("loss", "exact")]
        if all(of_row and of_other for of_row, of_other in values):
            (loss, other_loss), (exact, other_exact) = values
            lower, higher = difference(other_loss, loss, ".3f"), difference(exact, other_exact, ".1f", 100)
            lines.append([row, other, lower, higher])
    return table(["row", "compared with", "loss lower by", "exact match % higher by"], lines)


def curves(cells: dict[str, Any]) -> str:
    """A table: mean test loss after each number of inner steps."""
    steps, lines = [str(number) for number in range(11)], []
    for row in CURVES:
        if over_seeds(cells, row, "loss"):
            found = [over_seeds(cells, row, "loss", one) for one in steps]
            lines.append([row, *(f"{mean(one.values()):.2f}" for one in found)])
    return table(["loss after inner steps", *steps], lines)


def draw(cells: dict[str, Any], axes: Any) -> None:
    """Exact match over 1, 2, 5 and 10 shots, mean over test tasks, of the first seed."""
    for row in SHOT_CURVES:
        found = [cell for name, cell in cells.items() if name.split(" ")[0] == "shots" and cell["row"] == row]
        found += [cell for name, cell in cells.items() if name.startswith(f"test {row} ")][:1]
        curve = {
            cell["shots"]: 100 * mean(cell["steps"][str(cell["chosen"])]["exact"].values()) for cell in found
        }
        if len(curve) > 1:
            axes.plot(*zip(*sorted(curve.items()), strict=True), marker="o", label=row)
    axes.set(xlabel="examples", ylabel="exact match on held-out tasks, %", xscale="log")
    axes.set_xticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axes.set_ylim(bottom=0)
    axes.legend()


if __name__ == "__main__":
    main()
