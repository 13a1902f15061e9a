"""Same numbers before and after: two commits run the same short runs, and their results are compared.

    python -m tests.support.golden OLD NEW [--only NAME ...]      # commits; exit code 1 if a run differs

Each commit is checked out into a temporary folder. A run's result is a hash of all weights in `model/`
and the table on held-out tasks; both must be the same bit for bit. Runs: each algorithm once; plain, ZeRO 1,
2 and 3, pipeline, tensor; 1x1, 2x1, 1x2 and 2x2 (groups x ranks of a group); LoRA; a resumed run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

GIT = ["git", "worktree"]
ROOT = Path(__file__).parent.parent.parent
SHORT: dict[str, Any] = {
    "outer_steps": 3,
    "inner_steps": 2,
    "n_way": 3,
    "k_shot": 1,
    "num_query": 2,
    "meta_batch_size": 3,
    "eval_episodes": 2,
    "save_steps": 0,
    "logging_steps": 1,
    "num_workers": 0,
}
PAIRS = {"task_type": "causal_lm", "k_shot": 2, "num_query": 1}
ALGORITHMS = [
    "fomaml",
    "maml",
    "reptile",
    "imaml",
    "anil",
    "boil",
    "proto_maml",
    "meta_sgd",
    "joint",
    "protonet",
    "none",
]


def zero(stage: int, **flags: Any) -> dict[str, Any]:
    return {"deepspeed": f"ds_configs/zero{stage}.json", **flags}


RUNS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, flags
    **{f"algorithm {name}": (1, {"algorithm": name}) for name in ALGORITHMS},
    "in-context": (1, {"algorithm": "in_context", **PAIRS}),
    "meta_icl": (1, {"algorithm": "meta_icl", "inner_steps": 0, **PAIRS}),
    "plain 2x1": (2, {}),
    "ZeRO 1 1x2": (2, zero(1, group_size=2)),
    "ZeRO 2 1x2": (2, zero(2, group_size=2)),
    "ZeRO 3 1x2": (2, zero(3, group_size=2)),
    "ZeRO 2 2x2": (4, zero(2, group_size=2)),
    "pipeline 1x2": (2, zero(1, group_size=2, pipeline_stages=2)),
    "tensor 1x2": (2, zero(0, group_size=2, tensor_parallel_size=2, **PAIRS)),
    "LoRA 2x1": (2, {"lora_r": 2}),
    "adapters ZeRO 3 1x2": (2, zero(3, group_size=2, lora_r=2)),
    "resumed": (1, {"save_steps": 2, "algorithm": "maml"}),
}


def results(folder: Path) -> dict[str, str]:
    """A hash of all exported tensors, and the table on held-out tasks."""
    seen = hashlib.sha256()
    for file in sorted((folder / "model").glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            seen.update(f"{file.name} {name} {tensor.dtype} {list(tensor.shape)}".encode())
            seen.update(tensor.view(torch.uint8).numpy().tobytes())
    held_out = json.loads((folder / "run.json").read_text()).get("held_out")
    return {"weights": seen.hexdigest(), "held_out": json.dumps(held_out, sort_keys=True)}


def execute(out: Path, only: list[str]) -> None:
    """Run everything with the code in the current folder; results go to `out`/results.json."""
    try:
        from tests.support.fork_server import ForkServer
    except ImportError:  # in commits before it had this name
        from tests.nursery import Nursery as ForkServer  # type: ignore

    fork_server, found = ForkServer(), {}
    for name in only or RUNS:
        ranks, flags = RUNS[name]
        folder = out / name.replace(" ", "-")
        words = [f"--{key}={value}" for key, value in {**SHORT, **flags, "output_dir": folder}.items()]
        for attempt in range(2 if name == "resumed" else 1):
            started = fork_server.train(words, ranks, out / f"{folder.name}-logs-{attempt}")
            codes = fork_server.wait(started, 300)
            assert set(codes) == {0}, f"{name}: {codes}\n" + "\n".join(rank.text[-3000:] for rank in started)
            run = json.loads((folder / "run.json").read_text())
            if name == "resumed" and attempt == 0:
                (folder / "run.json").write_text(json.dumps({**run, "finished": False}))
                shutil.rmtree(folder / "checkpoint-3")  # the second attempt continues from checkpoint-2
        found[name] = results(folder)
        print(f"{out.name}: {name}", flush=True)
    (out / "results.json").write_text(json.dumps(found, indent=1))
    fork_server.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--only", nargs="*", default=[], choices=list(RUNS))
    parser.add_argument("--execute", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.execute:
        execute(Path(args.old), args.only)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for side, commit in (("old", args.old), ("new", args.new)):
            tree, out = Path(folder, f"{side}-tree"), Path(folder, side)
            out.mkdir()
            subprocess.run(
                ["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True
            )
            try:
                env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
                command = [sys.executable, __file__, str(out), "--execute", "--only", *args.only]
                subprocess.run(command, cwd=tree, env=env, check=True)
            finally:
                subprocess.run([*GIT, "remove", "--force", tree], cwd=ROOT, check=True)
            found.append(json.loads((out / "results.json").read_text()))
        old, new = found
        differ = {name: [key for key in old[name] if old[name][key] != new[name][key]] for name in old}
        for name, keys in differ.items():
            print(f"{name:24} {'differs in ' + ' and '.join(keys) if keys else 'the same'}")
        sys.exit(any(differ.values()))


if __name__ == "__main__":
    main()
