"""How long until something happens: importing fmmeta, and from the shell's Enter to the first outer step.

    python -m benchmarks.start --json benchmarks/results/start.json

The floors, measured in turn: an interpreter that does nothing, one that imports torch and transformers' model
classes, which every run has to, and the `deepspeed` launcher with ranks that import those and DeepSpeed and
do nothing else. First outer step: its line in metrics.jsonl, of the built-in model and suite, by `fmmeta
train` and by the launcher, bare and on two ranks as in `make demo`. With --model and --support the whole of
`fmmeta adapt` too, with all cores. The first run of each warms the disk and is left out.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import spread, table, write_json

ROOT = Path(__file__).parent.parent
TIMED = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"
SHORT = ["--outer_steps", "1", "--eval_episodes", "0", "--save_steps", "0"]
IMPORTS = "import torch, transformers.models.bert.modeling_bert"
LAUNCHERS = {
    "deepspeed": ["deepspeed"],
    "deepspeed --num_gpus 2": ["deepspeed", "--master_port", "29871", "--num_gpus", "2"],
}


def environment(**more: str) -> dict[str, str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "PYTHONPATH": str(ROOT), "PATH": path, **more}


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def statement(code: str) -> tuple[float, float]:
    """Seconds that a statement takes in a fresh interpreter, by the clock and of CPU (the interpreter's start
    included).
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", TIMED.format(code)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(**ONE_THREAD))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return float(ran.stdout), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_step(command: list[str]) -> tuple[float, float]:
    """Seconds from the start of a command until the first line of metrics.jsonl is there; CPU seconds of all
    of it to its end.
    """
    folder = Path(tempfile.mkdtemp(prefix="fmmeta-start-"))
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *SHORT, "--output_dir", str(folder / "run")],
            env=environment(**ONE_THREAD),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        file, seen = folder / "run" / "metrics.jsonl", None
        while process.poll() is None:
            if seen is None and file.is_file() and file.stat().st_size:
                seen = time.perf_counter() - began
            time.sleep(0.01)
    if process.returncode or seen is None:
        raise SystemExit(
            f"{' '.join(command)} ended with {process.returncode}:\n{(folder / 'log').read_text()[-3000:]}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(folder)
    return seen, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def whole(command: list[str], **more: str) -> tuple[float, float]:
    """Seconds of a command from start to end, by the clock and of CPU."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, env=environment(**more), cwd=ROOT, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports_alone(launcher: list[str]) -> tuple[float, float]:
    """Seconds that the launcher needs for ranks that import what every rank has to, from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "imports.py")
        script.write_text(f"{IMPORTS}, deepspeed\n")
        return whole([*launcher, str(script)], **ONE_THREAD)


def adapted(model: str, support: str) -> tuple[float, float]:
    """Seconds of `fmmeta adapt`, imports included."""
    words = ["--model_name_or_path", model, "--support", str(Path(support).resolve())]
    with tempfile.TemporaryDirectory() as folder:
        return whole([sys.executable, "-m", "fmmeta", "adapt", *words, "--output_dir", f"{folder}/out"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="of `fmmeta adapt`")
    parser.add_argument("--support", help="its examples, a .jsonl file")
    parser.add_argument("--json")
    given = parser.parse_args()
    imports = {
        "nothing": "pass",
        "import fmmeta": "import fmmeta",
        "import fmmeta.cli": "import fmmeta.cli",
        "torch and transformers": IMPORTS,
    }
    script = ["launch/train.py", "--deepspeed", "ds_configs/zero2.json"]
    commands = {
        "fmmeta train": [sys.executable, "-m", "fmmeta", "train"],
        **{name: [*launcher, *script] for name, launcher in LAUNCHERS.items()},
    }
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(given.repeats + 1):
        for name, code in imports.items():
            found.setdefault(name, []).append(statement(code))
        for name, command in commands.items():
            found.setdefault(name, []).append(first_step(command))
        for name, launcher in LAUNCHERS.items():
            found.setdefault(f"{name}, imports alone", []).append(imports_alone(launcher))
        if given.model:
            found.setdefault("fmmeta adapt", []).append(adapted(given.model, given.support))
    results: dict[str, Any] = {
        name: {"wall": spread([w for w, _ in costs[1:]]), "cpu": spread([c for _, c in costs[1:]])}
        for name, costs in found.items()
    }
    print(
        table(
            ["", "seconds", "quartiles", "CPU seconds of the process"],
            [
                [
                    name,
                    f"{r['wall']['median']:.3f}",
                    f"{r['wall']['low']:.3f} to {r['wall']['high']:.3f}",
                    f"{r['cpu']['median']:.2f}",
                ]
                for name, r in results.items()
            ],
        )
    )
    write_json(given.json, {"start": results})
    print(
        "start: "
        + ", ".join(
            f"{name} {results[name]['wall']['median']:.2f} s" for name in ("import fmmeta", *commands)
        )
    )


if __name__ == "__main__":
    main()
