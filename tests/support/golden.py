"""Same numbers before and after: two commits run the same short runs, and their results are compared.

    python -m tests.support.golden OLD NEW [--only NAME ...]      # commits; exit code 1 if a run differs

Each commit is checked out into a temporary folder. A run's result is a hash of all weights in `model/`,
the table on held-out tasks and the scores of validations, or the answers; of `evaluate` and `tune` it is
what they write and print. All must be the same bit for bit. Runs: each algorithm once; plain, ZeRO 1, 2
and 3, pipeline, tensor; 1x1, 2x1, 1x2 and 2x2 (groups x ranks of a group); LoRA; a resumed run; validation
with own metrics; `tune` sections; `evaluate` and `tune` of classifiers and language models; `adapt` to a
file and a directory, and `predict`.
"""

import argparse
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from harness.fork_server import Rank, environment, places, shared
from tests.mutants.run import checkout
from tests.support.models import write_classes

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
PAIRS = {"task_type": "causal_lm", "n_way": 5, "k_shot": 2, "num_query": 1}
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


VALIDATED = {"eval_steps": 1, "metrics": "tests.support.own_metric:f1"}
MEANS = {"algorithm": "protonet", "inner_steps": 0, "feature_norm": 3.0}
NAMED = {"dataset": "OUT/rows.jsonl", "label_names": "names", "class_weights": "OUT/weights.json"}
OWN = {
    "example_transforms": "fmmeta.tasks.augment:swap_words",
    "episode_transforms": "fmmeta.tasks.augment:name_classes",
}
NONE_HELD = {"dataset": "OUT/rows.jsonl", "class_splits": "OUT/splits.json", "eval_episodes": 0}


RUNS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, flags
    **{f"algorithm {name}": (1, {"algorithm": name}) for name in ALGORITHMS},
    "in-context": (1, {"algorithm": "in_context", **PAIRS}),
    "meta_icl": (1, {"algorithm": "meta_icl", "inner_steps": 0, **PAIRS}),
    "meta_icl, every answer": (
        1,
        {"algorithm": "meta_icl", "inner_steps": 0, "loss_on_support": True, **PAIRS},
    ),
    "transforms 2x1": (2, {**NAMED, **OWN, "k_shot": 2, "support_batch_size": 4}),
    "transforms of joint training": (1, {"algorithm": "joint", **NAMED, **OWN}),
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
    "validation 2x1": (2, VALIDATED),
    "validation language": (1, {**VALIDATED, **PAIRS}),
    "tune section": (1, {"tune": '{"inner_lrs": [0.05, 0.3], "max_steps": 2, "episodes": 2}'}),
    "interpolation 2x1": (2, {"tune": '{"init_interpolations": [0.0, 0.5], "episodes": 3}'}),
    "interpolation of means": (
        1,
        {"tune": '{"init_interpolations": [0.0, 0.5], "episodes": 3}', **MEANS},
    ),
    "folds": (
        1,
        {"tune": '{"init_interpolations": [0.0], "folds": 2}', **MEANS, **NONE_HELD},
    ),
}

CLASSES = {"n_way": 3, "num_query": 2, "episodes": 4}
TEXTS = {"task_type": "causal_lm", "num_query": 2, "episodes": 3, "k_shot": 2}
FOUR = "in_context finetune finetune+in_context zero_shot"
BY_FEATURES = "prototype linear knn soft_kmeans sinkhorn"
TRIED = {"inner_lrs": "0.05 0.3", "max_steps": 3}
COMMANDS: dict[str, tuple[int, str, dict[str, Any]]] = {  # ranks, command, flags
    "evaluate 2x1": (
        2,
        "evaluate",
        {**CLASSES, "k_shot": "1 2", "method": f"finetune {BY_FEATURES}", "compare": "tiny"},
    ),
    "evaluate names": (
        1,
        "evaluate",
        {**CLASSES, "k_shot": 1, "label_names": "names", "method": f"finetune {BY_FEATURES}"},
    ),
    "evaluate all ways": (1, "evaluate", {**CLASSES, "n_way": "all", "method": "finetune prototype"}),
    "evaluate ZeRO 3 1x2": (2, "evaluate", zero(3, **CLASSES, k_shot=1, group_size=2)),
    "evaluate pipeline 1x2": (2, "evaluate", zero(1, **CLASSES, k_shot=1, group_size=2, pipeline_stages=2)),
    "evaluate language": (
        1,
        "evaluate",
        {**TEXTS, "method": FOUR, "metrics": "rouge_l exact_match options rank", "max_new_tokens": 4},
    ),
    "evaluate language 2x1": (2, "evaluate", {**TEXTS, "method": "in_context finetune"}),
    "tune 2x1": (2, "tune", {**CLASSES, "k_shot": 1, **TRIED}),
    "tune language": (1, "tune", {**TEXTS, **TRIED, "method": "finetune+in_context"}),
    "tune optuna": (1, "tune", {**CLASSES, "k_shot": 1, **TRIED, "tuner": "optuna", "trials": 3}),
}
ADAPT = ["adapt", "--output_dir=model", "--inner_steps=3"]
PREDICT = ["predict", "--input=tasks/0.jsonl", "--output=answers.jsonl"]
ADAPTED: dict[str, list[list[str]]] = {  # commands, in a folder with two tasks of the same classes
    "adapt": [
        [*ADAPT, "--support=tasks/0.jsonl", "--query=tasks/1.jsonl"],
        [*PREDICT, "--model_name_or_path=model"],
    ],
    "adapt LoRA": [
        [*ADAPT, "--support=tasks/0.jsonl", "--query=tasks/1.jsonl", "--lora_r=2", "--early_stopping=false"],
        [*PREDICT, "--model_name_or_path=model", "--equal_classes=true"],
    ],
    "adapt directory": [[*ADAPT, "--support=tasks"], [*PREDICT, "--model_name_or_path=model/1"]],
    "adapt directory LoRA": [[*ADAPT, "--support=tasks", "--lora_r=2"], [*PREDICT, "--adapters=model"]],
}


def results(folder: Path) -> dict[str, str]:
    """A hash of all exported tensors, and the table on held-out tasks, or all answers."""
    seen = hashlib.sha256()
    for file in sorted((folder / "model").rglob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            seen.update(f"{file.relative_to(folder)} {name} {tensor.dtype} {list(tensor.shape)}".encode())
            seen.update(tensor.view(torch.uint8).numpy().tobytes())
    if (folder / "answers.jsonl").exists():
        files = [folder / "answers.jsonl", *sorted(folder.rglob("predictions.jsonl"))]
        return {"weights": seen.hexdigest(), "answers": "".join(file.read_text() for file in files)}
    held_out = json.loads((folder / "run.json").read_text()).get("held_out")
    log = folder / "metrics.jsonl"  # missing where nothing is trained
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    validations = [{key: value for key, value in line.items() if key.startswith("valid_")} for line in lines]
    return {
        "weights": seen.hexdigest(),
        "held_out": json.dumps(held_out, sort_keys=True),
        "validation": json.dumps(validations, sort_keys=True),
    }


def printed(text: str) -> str:
    """What a command has printed, without times, folders and free memory."""
    lines = [line for line in text.splitlines() if "/" not in line and "GiB" not in line]
    return "\n".join(line.partition("; about ")[0] for line in lines)


def ended_well(name: str, ranks: Sequence[Rank]) -> str:
    """Wait for ranks, which must succeed; what the first has printed."""
    codes = shared().wait(ranks, 300)
    assert set(codes) == {0}, f"{name}: {codes}\n" + "\n".join(rank.text[-3000:] for rank in ranks)
    return ranks[0].text


def trained(out: Path, name: str, ranks: int, flags: dict[str, Any]) -> dict[str, str]:
    """The results of a run of `flags` in `out`; OUT in a flag is this folder. `resumed` is stopped once."""
    folder = out / name.replace(" ", "-")
    given = {**SHORT, **flags, "output_dir": folder}
    words = [f"--{key}={value}".replace("OUT", str(out)) for key, value in given.items()]
    for attempt in range(2 if name == "resumed" else 1):
        ended_well(name, shared().train(words, ranks, out / f"{folder.name}-logs-{attempt}"))
        run = json.loads((folder / "run.json").read_text())
        if name == "resumed" and attempt == 0:
            (folder / "run.json").write_text(json.dumps({**run, "finished": False}))
            shutil.rmtree(folder / "checkpoint-3")  # the second attempt continues from checkpoint-2
    return results(folder)


def printed_by(out: Path, name: str, ranks: int, command: str, flags: dict[str, Any]) -> dict[str, str]:
    """What a command writes and prints."""
    file = out / f"{name.replace(' ', '-')}.json"
    words = [word for key, value in flags.items() for word in (f"--{key}", *str(value).split())]
    words = ["-m", "fmmeta", command, *words, "--output", str(file)]
    started = [
        shared().start(words, file.with_suffix(f".{rank}.log"), environment(**place))
        for rank, place in enumerate(places(ranks))
    ]
    return {"printed": printed(ended_well(name, started)), "output": file.read_text()}


def adapted(out: Path, name: str, *commands: list[str]) -> dict[str, str]:
    """The results of commands in a folder with two tasks."""
    folder = out / name.replace(" ", "-")
    (folder / "tasks").mkdir(parents=True)
    for task in ("0", "1"):
        rows = [
            {"text": f"{kind} {n} {task}", "label": kind, "adapter": task}
            for kind in ("one", "two")
            for n in range(3)
        ]
        (folder / "tasks" / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in commands:
        subprocess.run([sys.executable, "-m", "fmmeta", *words], cwd=folder, check=True)
    return results(folder)


def execute(out: Path, only: list[str]) -> None:
    """Run everything with the code in the current folder; results go to `out`/results.json."""
    write_classes(out / "rows.jsonl")
    splits = {"train": [f"c{number}" for number in range(12)], "valid": [], "test": []}
    (out / "splits.json").write_text(json.dumps(splits))
    (out / "weights.json").write_text('{"c1": 2.0, "c2": 0.3}')
    found = {}
    kinds: tuple[tuple[Any, Any], ...] = ((RUNS, trained), (COMMANDS, printed_by), (ADAPTED, adapted))
    for rows, results_of in kinds:
        for name in [name for name in only or rows if name in rows]:
            found[name] = results_of(out, name, *rows[name])
            print(f"{out.name}: {name}", flush=True)
    (out / "results.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--only", nargs="*", default=[], choices=[*RUNS, *COMMANDS, *ADAPTED])
    parser.add_argument("--execute", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.execute:
        execute(Path(args.old), args.only)
        return
    found = []
    for side, commit in (("old", args.old), ("new", args.new)):
        with checkout(commit) as tree, tempfile.TemporaryDirectory() as folder:
            out = Path(folder, side)
            out.mkdir()
            env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, str(out), "--execute", "--only", *args.only]
            subprocess.run(command, cwd=tree, env=env, check=True)
            found.append(json.loads((out / "results.json").read_text()))
    old, new = found
    differ = {name: [key for key in old[name] if old[name][key] != new[name][key]] for name in old}
    for name, keys in differ.items():
        print(f"{name:24} {'differs in ' + ' and '.join(keys) if keys else 'the same'}")
        for key in keys:
            sides = [re.sub(r"([,{}\[])", r"\1\n", side[name][key]).splitlines() for side in found]
            print(*difflib.unified_diff(*sides, lineterm="", n=0), sep="\n")
    sys.exit(any(differ.values()))


if __name__ == "__main__":
    main()
