"""Results of an evaluation: content of results.json, tables, and paired differences from other results; and
output files of the commands, checked before the work, complete or absent after it.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.security import make_folders, publishing, remove_empty
from fmmeta.common.text import counted, to_json, units_of
from fmmeta.config.fields import refuse_first
from fmmeta.config.learners import CLASSIFICATION, LearnerSpec
from fmmeta.config.settings import METRICS, Config
from fmmeta.evaluation.settings import EvaluateConfig
from fmmeta.metrics.scores import EpisodeScore, format_interval, paired, summary, verdict, warning_of_few


@dataclass
class EvalCell:
    """The scores of one model by one method at one k_shot. `episodes`: fingerprint of the episodes."""

    method: str
    k_shot: int
    episodes: str
    scores: list[EpisodeScore]

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "k_shot": self.k_shot,
            **summary(self.scores),
            "episodes_fingerprint": self.episodes,
            "scores": [score.as_result() for score in self.scores],
        }


class EvaluationResults(dict[str, Any]):
    """results.json as a dict; shown in one line, without the scores of every episode."""

    def __repr__(self) -> str:
        cells = (f"{cell['method']}{shots_text(cell, '-shot')} {score_text(cell)}" for cell in self["cells"])
        return (
            f"{type(self).__name__}({self['model']!r}, {counted(self['episodes'], 'episode')} of the"
            f" {self['eval_split']} split: {', '.join(cells)})"
        )


def results_of(
    settings: EvaluateConfig, cells: Sequence[EvalCell], config: Config, kind: str = "task"
) -> EvaluationResults:
    """The content of results.json: settings and the numbers of the first cell, then all cells.

    config: of the run. kind: `class` or `task`, over which the intervals are.
    """
    listed = [cell.as_dict() for cell in cells]
    return EvaluationResults(
        {
            "model": settings.model_name_or_path,
            "dataset": settings.dataset,
            "eval_split": settings.eval_split,
            "n_way": settings.n_way if config.draws_classes else None,
            "n_way_max": settings.n_way_max,
            "k_shot_max": settings.k_shot_max,
            "seed": settings.seed,
            "kind": kind,
            **{
                name: value
                for name, value in listed[0].items()
                if name not in ("scores", "episodes_fingerprint")
            },
            "cells": listed,
        }
    )


def read_cells(path: str) -> list[EvalCell]:
    """The cells of an earlier results.json. Raises `UsageError`."""
    with usage_errors(f"compare={path} holds no results of fmmeta evaluate", "give such a file, or a model"):
        return [cell_of(one) for one in json.loads(Path(path).read_text(encoding="utf-8"))["cells"]]


def cell_of(stored: dict[str, Any]) -> EvalCell:
    """A cell from its JSON. Raises `ValueError`, `KeyError` or `TypeError` for something else."""
    scores, k_shot = stored["scores"], stored["k_shot"]
    without = stored["accuracy"] is None  # where no answer is right or wrong
    if not scores or type(k_shot) is not int or any((one["accuracy"] is None) != without for one in scores):
        raise ValueError("a cell without scores")
    found = [EpisodeScore.of(**score) for score in scores]
    return EvalCell(stored["method"], k_shot, stored["episodes_fingerprint"], found)


def check_comparable(
    settings: EvaluateConfig, prints: dict[int, str], others: Sequence[EvalCell] | None
) -> None:
    """Raise `UsageError` if `others` share no method and k_shot with `settings`, or used other episodes.

    prints: fingerprint of the episodes by k_shot. others: None where nothing is compared.
    """
    common = [cell for cell in others or () if cell.method in settings.method and cell.k_shot in prints]
    refuse_first(
        [
            (
                others is not None and not common,
                f"compare={settings.compare}: the other results have none of these methods and k_shot;"
                " evaluate the same ones",
            ),
            *(
                (
                    cell.episodes != prints[cell.k_shot],
                    f"compare={settings.compare or settings.model_name_or_path}: the other results are of"
                    " other episodes; use the same data, --seed, --episodes, numbers of classes, queries or"
                    " chunks, and for --answers symbols models of one tokenizer",
                )
                for cell in common
            ),
        ]
    )


def differences(
    cells: Sequence[EvalCell], others: Sequence[EvalCell], learner: LearnerSpec = CLASSIFICATION
) -> list[dict[str, Any]]:
    """Paired differences of the cells that both models have, with a verdict and the other model's scores.

    The verdict is by accuracy, for language models and where there is none by loss.
    """
    by_loss = learner.by_loss or not all(score.accuracies for cell in cells for score in cell.scores)
    gain_of = ("loss_gain", "loss_ci95") if by_loss else ("accuracy_gain", "ci95")
    by_name = {(other.method, other.k_shot): other for other in others}
    compared = [
        (cell, other, paired(cell.scores, other.scores))
        for cell in cells
        if (other := by_name.get((cell.method, cell.k_shot)))
    ]
    return [
        {
            "method": cell.method,
            "k_shot": cell.k_shot,
            **gain,
            "by": "loss" if by_loss else "accuracy",
            "verdict": verdict((gain[gain_of[0]], gain[gain_of[1]])),
            "other": other.as_dict(),
        }
        for cell, other, gain in compared
    ]


def show(results: dict[str, Any], progress: Progress) -> None:
    """Print the scores of all cells, then accuracy by stratum, then the comparison with another model."""
    scores = (score for cell in results["cells"] for score in cell["scores"])
    extra = [*dict.fromkeys(name for score in scores for name in score["metrics"])]
    shares = [] if math.isnan(results["accuracy"]) else ["accuracy %"]  # where answers are right or wrong
    most = f" to {results['k_shot_max']}" if results["k_shot_max"] else ""  # only with one k_shot
    shots = ["shots"] if shots_text(results) else []
    rows = [
        [
            cell["method"],
            *(f"{cell['k_shot']}{most}" for _ in shots),
            *(percent(cell["accuracy"], cell["ci95"]) for _ in shares),
            f"{cell['loss']:.4f}",
            *("-" if cell["ece"] is None else f"{100 * cell['ece']:.1f}" for _ in shares),
            *(shown_metric(name, cell) for name in extra),
        ]
        for cell in results["cells"]
    ]
    way = f"{results['n_way']}-way " if results["n_way"] and not results["n_way_max"] else ""
    episodes = counted(results["episodes"], f"{way}episode")
    if results["n_way_max"]:
        episodes += f" of {results['n_way']} to {results['n_way_max']} classes"
    over = units_of(results["units"], results["kind"])
    progress.table(
        f"{results['model']}: {episodes} of the {results['eval_split']} split, intervals over {over}",
        ["method", *shots, *shares, "loss", *("ECE" for _ in shares), *extra],
        rows,
    )
    if shares and len(results["per_stratum"]) > 1:
        progress.table(
            f"accuracy % by stratum ({results['method']}{shots_text(results, f'{most} shots', ', ')})",
            ["", "accuracy %"],
            [[name, f"{100 * value:.1f}"] for name, value in results["per_stratum"].items()],
        )
    if "compare" in results:
        own = {(cell["method"], cell["k_shot"]): cell for cell in results["cells"]}
        rows = [
            [
                name,
                *(f"{k}{most}" for _ in shots),
                *(percent(one["accuracy"], one["ci95"]) for one in (own[name, k], cell["other"]) if shares),
                *(percent(cell["accuracy_gain"], cell["ci95"], "+") for _ in shares),
                f"{own[name, k]['loss']:.4f}",
                f"{cell['other']['loss']:.4f}",
                format_interval((cell["loss_gain"], cell["loss_ci95"]), "+.4f"),
                cell["verdict"] or "-",
            ]
            for cell in results["compare"]["cells"]
            for name, k in [(cell["method"], cell["k_shot"])]
        ]
        progress.table(
            f"{results['model']} (A) against {results['compare']['with']} (B): differences are paired by"
            f" episode, intervals over {over}",
            [
                "method",
                *shots,
                *(one for _ in shares for one in ("A: accuracy %", "B: accuracy %", "A - B")),
                "A: loss",
                "B: loss",
                "B - A",
                f"by {' or '.join({cell['by'] for cell in results['compare']['cells']})} A is",
            ],
            rows,
        )
        if doubt := warning_of_few(results["units"], results["kind"]):
            progress.notice(Warn(doubt))


def shots_text(cell: Mapping[str, Any], unit: str = "", before: str = " ") -> str:
    """The shots of a cell; none of documents."""
    return "" if "bits_per_byte" in cell else f"{before}{cell['k_shot']}{unit}"


def score_text(cell: dict[str, Any]) -> str:
    """The accuracy of a cell, or its loss where it has none."""
    if math.isnan(cell["accuracy"]):
        return f"loss {cell['loss']:.4f}"
    return f"accuracy {percent(cell['accuracy'], cell['ci95'])} %"


def shown_metric(name: str, cell: dict[str, Any]) -> str:
    """The mean of a metric: a share in percent, a place, or a number of the user's function."""
    if name not in cell:
        return "-"
    mean = cell[name]["mean"]
    if name in METRICS and name != "rank":
        return f"{100 * mean:.1f}"
    return f"{mean:.2f}" if name == "rank" else f"{mean:.4f}" if abs(mean) < 1000 else f"{mean:,.0f}"


def percent(mean: float, half: float, sign: str = "") -> str:
    return format_interval((mean, half), f"{sign}.2f", 100)


def check_output(path: Path) -> None:
    """Raise `UsageError` for a file that cannot be written, before its content is computed."""
    if path.is_dir():
        raise UsageError(f"output={path} is a folder; give a file in it, such as {path / 'results.json'}")
    if path.exists() and not path.is_file():
        return  # opening a pipe or a device would disturb its reader
    try:
        made, new = make_folders(path.parent), not path.exists()
        path.open("a").close()
        if new:
            path.resolve().unlink()
        remove_empty(made)
    except FileExistsError:
        raise UsageError(
            f"output={path} cannot be written ({path.parent} is no folder); give another file"
        ) from None
    except OSError as error:
        raise unwritable(path, error) from None


def file_beside(output: Path, what: str) -> Path | None:
    """The file of what is finished before an output; None for a pipe or a device."""
    return output.with_name(f"{output.stem}.{what}.json") if output.is_file() or not output.exists() else None


@contextmanager
def open_output(path: str | Path) -> Iterator[TextIO]:
    """A text file that appears under its name when the block ends without an error; - is standard output.

    Its folder is created. Pipes, devices and files in a folder that is not writable are written directly.
    Raises `UsageError` for a file that cannot be written.
    """
    if path == "-":
        yield sys.stdout
        return
    target, there = Path(os.path.realpath(path)), Path(path).exists()
    if there and not Path(path).is_file():
        target = Path(path)  # a pipe has no path that could be resolved
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replaceable = not there or (
            target.is_file() and os.access(target, os.W_OK) and os.access(target.parent, os.W_OK)
        )
        with (
            publishing(target) if replaceable else nullcontext(target) as name,
            name.open("w", encoding="utf-8") as file,
        ):
            yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(path, error) from None


def write_output(path: Path, values: Mapping[str, Any]) -> None:
    """Write results or settings as strict JSON; its folder is created. Raises `UsageError`."""
    with open_output(path) as file:
        file.write(to_json(values, indent=1) + "\n")


def unwritable(path: str | Path, error: OSError) -> UsageError:
    return UsageError(f"output={path} cannot be written ({error.strerror}); give another file")
