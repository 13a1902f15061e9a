"""What benchmarks share: the machine in words, medians with their spread, tables, JSON and plots."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fmmeta.common.text import to_json


def machine() -> dict[str, Any]:
    """Hardware and versions, for the results file."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    packages = ("torch", "deepspeed", "transformers", "datasets")
    here = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "cores": os.cpu_count(), "gpu": gpu}
    return {
        **here,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def start_ranks(
    module: str, count: int, words: Sequence[str] | None = None, number: int = 0, **env: str
) -> list[subprocess.Popen[bytes]]:
    """`python -m MODULE WORDS` as ranks of a launch; words: default those of this process.

    number: of the launch, so that each has a separate port.
    """
    launch = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + (os.getpid() + number) % 20000),
        "OMP_NUM_THREADS": "1",
        **env,
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *(sys.argv[1:] if words is None else words)],
            env={**launch, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": statistics.median(values), "low": low, "high": high}


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, aligned for reading in a terminal."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def write_json(path: str | Path | None, results: dict[str, Any]) -> None:
    """Write results beside the machine that they are of. Paths lose what is that machine's alone."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(
            to_json({"machine": machine(), **portable(results)}, indent=1) + "\n", encoding="utf-8"
        )


def portable(value: Any) -> Any:
    """The same with absolute paths cut to their last two names: /home/me/data/clinc150 -> data/clinc150."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(item) for item in value]
    if isinstance(value, (str, Path)) and Path(value).is_absolute():
        return "/".join(Path(value).parts[1:][-2:])
    return value


def plot(path: str | None, draw: Any) -> None:
    """Draw into an SVG file; `draw` gets matplotlib's axes. Needs the extra `bench`."""
    if not path:
        return
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'fmmeta[bench]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fmmeta"  # the same drawing gives the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    draw(axes)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def read(file: Path) -> dict[str, Any]:
    """The cells that are known."""
    return json.loads(file.read_text(encoding="utf-8"))["cells"] if file.is_file() else {}


def keep(file: Path, cells: dict[str, Any]) -> None:
    """Add cells to what the file holds by now."""
    write_json(file, {"cells": {**read(file), **cells}})
