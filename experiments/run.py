"""Run a study: the cells of its grid that have no result yet, then its tables.

    python -m experiments.run NAME [--data FOLDER] [--model FOLDER] [--cells CELL ...] [--folder FOLDER]
    python -m experiments.run NAME --show [--plot]

experiments/NAME.yaml says what is asked and how (experiments/README.md). Each cell is written to
experiments/results/NAME.json when it is finished, so that a study can be stopped at any time, and several
processes may work on one study. Paths in the results lose what is one machine's alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml

from benchmarks.common import keep, read, start_ranks
from experiments import report
from fmmeta import MetaTrainer, evaluate
from fmmeta.cli import parse
from fmmeta.training.loop import train
from fmmeta.training.run import Run

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Cell:
    """A point of a grid. names: of texts, the axes among them; settings: of study, grid and axes, merged."""

    name: str
    grid: str
    axes: dict[str, Any]
    names: dict[str, Any]
    settings: dict[str, Any]


class Study:
    """A YAML file, its cells and their results. folder: where trained models are kept while it runs."""

    def __init__(self, name: str, data: str = "", model: str = "", folder: str = "") -> None:
        self.name, self.data, self.model, self.folder = name, data, model, folder
        self.spec = yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))
        self.file = HERE / "results" / f"{name}.json"
        self.cells = {
            cell.name: cell
            for number, grid in enumerate(self.spec["cells"])
            for cell in self.cells_of(grid.get("grid", str(number)), grid)
        }

    def cells_of(self, name: str, grid: dict[str, Any]) -> list[Cell]:
        found, options = list[Cell](), self.spec.get("options", {})
        choices = {axis: options[axis] if v == "all" else v for axis, v in grid["axes"].items()}
        for values in itertools.product(*choices.values()):
            axes = dict(zip(choices, values, strict=True))
            if any(report.matches(axes, left_out) for left_out in grid.get("without", [])):
                continue
            parts = [self.spec.get("settings"), grid.get("settings")]
            parts += [options.get(axis, {}).get(value) for axis, value in axes.items()]
            settings = merged(*(part or {} for part in parts))
            names = {**settings.pop("names", {}), **axes}
            cell = grid["name"].format_map(names)
            given = {"data": self.data, "model": self.model, "folder": self.folder, "cell": cell}
            found.append(Cell(cell, name, axes, names, filled(settings, {**names, **given})))
        return found

    def results(self) -> dict[str, Any]:
        return read(self.file)

    def chosen(self, cell: Cell) -> Cell:
        """The cell with the settings that were best among those of another grid, if it says `chosen`.

        chosen: `grid`; `same`, axes that the other cells share with this one; `value`, of which the lowest
        mean wins; `with`, what is changed of the sections that the settings have.
        """
        if (rule := cell.settings.get("chosen")) is None:
            return cell
        wanted = {"grid": rule["grid"], **{axis: cell.axes[axis] for axis in rule["same"]}}
        tried = [one for one in self.cells.values() if report.matches({"grid": one.grid, **one.axes}, wanted)]
        results, settings = self.results(), cell.settings
        if tried:
            settings = min(
                tried, key=lambda one: report.mean(report.units(results[one.name], rule["value"]))
            ).settings
        changes = {name: value for name, value in rule["with"].items() if name in settings}
        return dataclasses.replace(cell, settings=merged(settings, changes))

    def measure(self, cell: Cell) -> dict[str, Any]:
        """The result of a cell; with `ranks`, of rank 0 of so many processes."""
        cell = self.chosen(cell)
        function = pkgutil.resolve_name(cell.settings.get("measure", "experiments.run:evaluated"))
        if "ranks" not in cell.settings or "RANK" in os.environ:
            return function(self, cell)
        words = [self.name, "--data", self.data, "--model", self.model, "--folder", self.folder]
        words += ["--cells", cell.name]
        with tempfile.NamedTemporaryFile() as file:
            ranks = start_ranks("experiments.run", cell.settings["ranks"], words, EXPERIMENT_RESULT=file.name)
            if any([rank.wait() for rank in ranks]):
                raise subprocess.SubprocessError(f"{cell.name}: a rank failed")
            return json.loads(file.read())

    def trained(
        self, cell: Cell, at_end: Callable[[Run], None] = lambda run: None, **more: Any
    ) -> tuple[str, float]:
        """Folder of the model that `train` of a cell gives, and CPU seconds that the training took.

        Cells with the same settings share a training. at_end: called after the last outer step. more:
        arguments of MetaTrainer.
        """
        if (settings := cell.settings.get("train")) is None:
            return self.model, 0.0
        folder = Path(self.folder, hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16])
        if not (seconds := folder / "cpu_seconds").is_file():
            began = sum(os.times()[:4])  # with loader processes
            with MetaTrainer(
                parse(words_of({**settings, "output_dir": folder})), **more
            ).prepare() as prepared:
                if prepared.run is not None:
                    train(prepared.run)
                    at_end(prepared.run)
                prepared.finish()
            seconds.write_text(str(sum(os.times()[:4]) - began))
        return str(folder / "model"), float(seconds.read_text())


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Later parts win; dictionaries are merged too."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            old = found.get(name)
            found[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return found


def filled(value: Any, names: dict[str, Any]) -> Any:
    """The same with `{name}` replaced in every text; a text that is one name alone becomes its value."""
    if isinstance(value, dict):
        return {key.format_map(names): filled(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, names) for one in value]
    if not isinstance(value, str):
        return value
    return names[value[1:-1]] if value[1:-1] in names and value[0] == "{" else value.format_map(names)


def words_of(settings: dict[str, Any]) -> list[str]:
    """The words of a command line; `recipe` is the first of them."""
    words = [settings["recipe"]] if "recipe" in settings else []
    for name, value in settings.items():
        if name != "recipe" and value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def evaluated(study: Study, cell: Cell) -> dict[str, Any]:
    """Train, and evaluate each of `passes`: {measure: {pass: values}} and CPU minutes."""
    model, seconds = study.trained(cell)
    found, began = defaultdict[str, dict[str, Any]](dict), time.process_time()
    for name, more in cell.settings["passes"].items():
        (result,) = evaluate(model, **{**cell.settings["evaluate"], **more})["cells"]
        for value in cell.settings["values"]:
            found[value][name] = values_of(result, value, cell.settings["by"])
    minutes = (seconds + time.process_time() - began) / 60
    return {**found, "cpu_minutes": round(minutes, 2)}


def values_of(result: dict[str, Any], name: str, by: str) -> Any:
    """Of each episode, in one text, an accuracy in percent; of each task the mean of a loss or accuracy."""
    if by == "episode":
        return " ".join(f"{round(100 * score[name], 2):g}" for score in result["scores"])
    tasks = defaultdict[str, list[float]](list)
    for score in result["scores"]:
        tasks[score["task"]].append(score[name])
    return {task: round(mean(scores), 5) for task, scores in sorted(tasks.items())}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=sorted(file.stem for file in HERE.glob("*.yaml")))
    parser.add_argument("--data", default="", help="folder of the data sets")
    parser.add_argument("--model", default="", help="the model that training starts from")
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="default: all")
    parser.add_argument("--folder", help="where trained models are kept; default: a temporary one")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--plot", action="store_true", help="draw the plots too")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        study = Study(asked.name, asked.data, asked.model, asked.folder or folder)
        if unknown := {*(asked.cells or [])} - study.cells.keys():
            parser.error(f"cells={', '.join(unknown)} are not in {asked.name}.yaml; use some of its names")
        if file := os.environ.get("EXPERIMENT_RESULT"):  # a rank of a cell
            result = study.measure(study.cells[asked.cells[0]])
            if os.environ["RANK"] == "0":
                Path(file).write_text(json.dumps(result))
            return
        for name in () if asked.show else asked.cells or study.cells:
            if name not in study.results() and "gone" not in study.cells[name].settings:
                keep(study.file, {name: study.measure(study.cells[name])})
                print(name, flush=True)
        print(report.show(study))
        if asked.plot:
            report.draw(study)


if __name__ == "__main__":
    main(sys.argv[1:])
