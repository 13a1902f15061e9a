"""batch_size.yaml: the noise scale at the end of a run, and means of its metrics."""

from pathlib import Path
from statistics import mean
from typing import Any

from fmmeta.report.page import read_lines


def measure(study: Any, cell: Any) -> dict[str, Any]:
    model, seconds = study.trained(cell)
    lines = read_lines(Path(model).parent)
    last = lines[-max(1, len(lines) // 4) :]
    return {
        "outer_steps": len(lines),
        "noise_scale": lines[-1]["noise_scale"],
        "signal": mean(line["gradient_square"] for line in lines),
        "variance": mean(line["gradient_variance"] for line in lines),
        "loss": mean(line["query_loss"] for line in last),
        "accuracy": mean(line["accuracy"] for line in last),
        "peak_lr": max(line["lr"] for line in lines),
        "cpu_seconds": round(seconds, 1),
    }
