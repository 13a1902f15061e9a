"""FOMAML against exact MAML where one long inner step has to do it all: five seeds, same tasks and number of outer steps.

    python -m benchmarks.first_order --json benchmarks/results/first_order.json --plot docs/first_order.svg

Prints a table and writes JSON and a plot of the query loss over the outer steps (mean over seeds of a running mean, and its
range).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

from fmmeta import Config, MetaTrainer

SETTINGS = {"dataset": ["letters"], "inner_steps": 1, "inner_lr": 1.0, "outer_steps": 100, "eval_episodes": 60, "save_steps": 0,
            "logging_steps": 1}  # fmt: skip
COLORS = {"fomaml": "#c0504d", "maml": "#1f6f8b"}
CHANCE = 1.6094  # log 5
WINDOW = 10


def run(algorithm: str, seed: int) -> dict:
    """Held-out loss and accuracy before and after meta-training, and the query loss of every outer step."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        MetaTrainer(Config(**SETTINGS, algorithm=algorithm, seed=seed, output_dir=folder)).train()
        held_out = json.loads((Path(folder) / "run.json").read_text())["held_out"]
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    start, after = (held_out[f"after adaptation, {row}"] for row in ("weights at the start", "meta-trained"))
    return {"algorithm": algorithm, "seed": seed, "start_loss": start["loss"][0], "loss": after["loss"][0],
            "accuracy": after["accuracy"][0], "curve": [json.loads(line)["query_loss"] for line in lines]}  # fmt: skip


def smooth(curve: list[float]) -> list[float]:
    return [sum(curve[max(0, i - WINDOW + 1) : i + 1]) / (i + 1 - max(0, i - WINDOW + 1)) for i in range(len(curve))]


def plot(results: list[dict], file: Path) -> None:
    """An SVG with one line per algorithm and the range over seeds behind it."""
    width, height, left, top = 560, 320, 60, 20
    curves = {a: [smooth(r["curve"]) for r in results if r["algorithm"] == a] for a in COLORS}
    steps = SETTINGS["outer_steps"]
    most = max(max(c) for found in curves.values() for c in found)

    def at(step: int, loss: float) -> str:
        return f"{left + (width - left - 20) * step / (steps - 1):.1f},{top + (height - top - 50) * (1 - loss / most):.1f}"

    body = []
    for number, (algorithm, color) in enumerate(COLORS.items()):
        columns = list(zip(*curves[algorithm], strict=True))
        band = [at(i, max(c)) for i, c in enumerate(columns)] + [at(i, min(c)) for i, c in reversed(list(enumerate(columns)))]
        line = [at(i, sum(c) / len(c)) for i, c in enumerate(columns)]
        body.append(f'<polygon points="{" ".join(band)}" fill="{color}" opacity="0.2"/>')
        body.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="{color}" stroke-width="2"/>')
        body.append(f'<text x="{width - 90}" y="{top + 20 + 18 * number}" fill="{color}">{algorithm}</text>')
    (x0, y0), (x1, _) = (at(step, CHANCE).split(",") for step in (0, steps - 1))
    body.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y0}" stroke="#777" stroke-dasharray="4 3"/>')
    body.append(f'<text x="{left + 4}" y="{float(y0) - 4:.1f}" fill="#777">chance</text>')
    for loss in range(int(most) + 1):
        y = float(at(0, loss).split(",")[1])
        body.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{loss}</text>')
    body.append(f'<text x="{width / 2:.0f}" y="{height - 8}" text-anchor="middle">outer step (0 to {steps - 1})</text>')
    body.append(
        f'<text x="14" y="{height / 2:.0f}" transform="rotate(-90 14 {height / 2:.0f})" text-anchor="middle">query loss</text>'
    )
    style = 'font-family="sans-serif" font-size="12"'
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {style}>\n' + "\n".join(body) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", type=Path, required=True, help="results; seeds that it already holds are not run again")
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    results = json.loads(asked.json.read_text()) if asked.json.is_file() else []
    done = {(r["algorithm"], r["seed"]) for r in results}
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    for seed in asked.seeds:
        for algorithm in COLORS:
            if (algorithm, seed) not in done:
                results.append(run(algorithm, seed))
                asked.json.write_text(json.dumps(results, indent=1) + "\n")
            found = next(r for r in results if (r["algorithm"], r["seed"]) == (algorithm, seed))
            print(f"seed {seed} {algorithm:7} start {found['start_loss']:.3f} -> {found['loss']:.3f} "
                  f"accuracy {100 * found['accuracy']:.1f} %", flush=True)  # fmt: skip
    if asked.plot:
        plot(results, asked.plot)


if __name__ == "__main__":
    main()
