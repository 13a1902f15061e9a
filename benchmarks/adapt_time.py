"""How long from `fmmeta adapt` to the folder? Five examples of five intents, as a user starts it.

    python -m benchmarks.adapt_time --model PATH-OF-all-MiniLM-L6-v2 --data ../shared/data/banking77 \
        [--repeats 3]

The command runs in a process of its own with all cores, imports included. Wall time depends on who else uses
the machine, so that processor seconds and the load stand beside it. The intents are test classes of split 01.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.common import table, write_json

CLASSES, SHOTS = 5, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        support = Path(folder, "support.jsonl")
        support.write_text(
            "".join(json.dumps(row) + "\n" for row in examples(Path(asked.data))), encoding="utf-8"
        )
        runs = [timed(asked.model, support, Path(folder, f"out-{repeat}")) for repeat in range(asked.repeats)]
    columns = list(runs[0])
    print(table(columns, [[f"{run[name]:.1f}" for name in columns] for run in runs]))
    write_json(asked.json, {"runs": runs})


def examples(data: Path) -> list[dict[str, str]]:
    """The first rows of the first test classes of split 01."""
    classes = json.loads((data / "class_splits.json").read_text(encoding="utf-8"))["01"]["test"][:CLASSES]
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    with gzip.open(data / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if row["label"] in classes and len(found[row["label"]]) < SHOTS:
                found[row["label"]].append({"text": row["text"], "label": row["label"]})
    return [row for name in classes for row in found[name]]


def timed(model: str, support: Path, out: Path) -> dict[str, float]:
    """Seconds of one run: wall, processor, and how much else ran (load average of the last minute, before
    it).
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [
        sys.executable,
        "-m",
        "fmmeta",
        "adapt",
        "--model_name_or_path",
        model,
        "--support",
        str(support),
    ]
    load, began, before = os.getloadavg()[0], time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*command, "--output_dir", str(out)], check=True, env=environment, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall s": time.monotonic() - began, "processor s": busy, "load before": load}


if __name__ == "__main__":
    main()
