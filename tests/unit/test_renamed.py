"""Settings that were renamed: refused by their old names, and read under them from folders that 0.1.0 wrote.

The JSON files in `written_by_0_1_0` are those of four runs of commit df4f2f4, made with the settings of RUNS.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.cli import COMMANDS, parse
from fmmeta.common.progress import Progress
from fmmeta.config.renamed import RENAMED, translated
from fmmeta.evaluation.settings import TuneConfig
from fmmeta.evaluation.tune import tune
from fmmeta.report import data
from tests.support.helpers import ROOT, refusal, write_rows
from tests.support.messages import check_message

WRITTEN, OLD = Path(__file__).parent / "written_by_0_1_0", os.environ.get("FMMETA_OLD_COMMIT", "")
NAMES = [f"c{i}" for i in range(12)]
COMMON: dict[str, Any] = {
    "dataset": ["rows.jsonl"],
    "output_dir": "run",
    "outer_steps": 3,
    "inner_steps": 1,
    "meta_batch_size": 2,
    "n_way": 2,
    "k_shot": 1,
    "num_query": 2,
    "max_length": 16,
    "num_workers": "0",
    "save_steps": 1,
    "save_total_limit": 3,
    "eval_episodes": 2,
    "logging_steps": 1,
    "group_size": "1",
}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "rates": (
        {"class_splits": "splits.json", "inner_lr_learned": "layer"},
        {"split": "02", "start_share": 0.4, "rates_lr": 0.01, "max_bad_share": 0.1, "group_layout": True},
        {
            "class_split": "02",
            "init_interpolation": 0.6,
            "inner_lr_outer_lr": 0.01,
            "max_bad_fraction": 0.1,
            "show_layout": True,
        },
    ),
    "moments": (
        {"algorithm": "reptile", "inner_optimizer": "adamw", "inner_lr": 0.01},
        {"inner_state": "kept", "max_bad_share": 0.2, "start_share": 0.9},
        {"inner_optimizer_state": "kept", "max_bad_fraction": 0.2, "init_interpolation": 0.1},
    ),
    "delayed": (
        {"algorithm": "maml", "outer_delay": 1, "eval_steps": 1, "load_best_model_at_end": True},
        {"trajectory_gib": 0.5},
        {"trajectory_memory_gib": 0.5},
    ),
    "batched": ({"algorithm": "anil"}, {"task_batch": "2"}, {"tasks_per_pass": "2"}),
}
"""Settings, those with old names, and the same with new ones."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with the data of the runs."""
    rows = [
        {"text": f"{chr(97 + i)}{chr(97 + j)}{i + j}", "label": name, "stratum": f"s{i % 2}"}
        for i, name in enumerate(NAMES)
        for j in range(6)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    first = {"train": NAMES[:6], "valid": NAMES[6:9], "test": NAMES[9:]}
    second = {"train": NAMES[6:], "valid": NAMES[3:6], "test": NAMES[:3]}
    (tmp_path / "splits.json").write_text(json.dumps({"01": first, "02": second}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(name: str) -> Config:
    settings, _, new = RUNS[name]
    return Config(**COMMON, **settings, **new)


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def unfinish(run: Path) -> None:
    """Make of a finished run one that was killed after checkpoint-2."""
    shutil.rmtree(run / "checkpoint-3")
    shutil.rmtree(run / "model")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "finished": False}))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_0_1_0_resumes(folder, name, capsys):
    """Vectors by today's code, everything else as 0.1.0 wrote it; the end is that of the undisturbed run."""
    run, written = folder / "run", WRITTEN / name
    MetaTrainer(config_of(name)).train()
    expected = weights(run)
    shutil.copy(written / "run.json", run)
    unfinish(run)
    manifest = json.loads((run / "checkpoint-2" / "manifest.json").read_text())
    state = (written / "state.json").read_bytes()
    (run / "checkpoint-2" / "state.json").write_bytes(state)
    entry = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    assert manifest["files"]["state.json"].keys() == entry.keys()
    manifest["files"]["state.json"] = entry
    (run / "checkpoint-2" / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    MetaTrainer(config_of(name)).train()
    message = capsys.readouterr().out
    assert "resumed from run/checkpoint-2" in message
    assert "settings that differ" not in message
    assert weights(run) == expected
    changed = replace(config_of(name), inner_lr=0.3)
    check_message(refusal(MetaTrainer(changed).train), "inner_lr: ", "use the values before ->")


@pytest.mark.skipif(not OLD, reason="FMMETA_OLD_COMMIT=df4f2f4 runs the old commit; minutes")
@pytest.mark.parametrize("name", RUNS)
def test_a_real_run_of_0_1_0_resumes(folder, name, tmp_path_factory):
    code = tmp_path_factory.mktemp("code")
    archive = subprocess.run(["git", "archive", OLD, "fmmeta"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"git has no commit {OLD}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", code], input=archive.stdout, check=True)
    settings, old, _ = RUNS[name]
    (folder / "old.json").write_text(json.dumps({**COMMON, **settings, **old}))
    command = [sys.executable, "-m", "fmmeta", "train", "--config", "old.json"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(code)}, check=True)
    expected = weights(folder / "run")
    for file in ("run.json", "checkpoint-2/state.json", "model/fmmeta.json"):
        committed = json.loads((WRITTEN / name / Path(file).name).read_text())
        assert json.loads((folder / "run" / file).read_text()).keys() == committed.keys()
    unfinish(folder / "run")
    MetaTrainer(config_of(name)).train()
    assert weights(folder / "run") == expected


def test_a_model_of_0_1_0_is_evaluated_tuned_and_adapted(folder):
    MetaTrainer(config_of("rates")).train()
    model = folder / "run" / "model"
    shutil.copy(WRITTEN / "rates" / "fmmeta.json", model)
    memory = json.loads((model / "fmmeta.json").read_text())
    splits: dict[str, Any] = {"class_splits": "splits.json", "class_split": "02"}
    shots: dict[str, Any] = {"n_way": "2", "num_query": 2, "episodes": 2, **splits}
    results = fmmeta.evaluate(model, "rows.jsonl", **shots, k_shot=1, eval_split="valid")
    assert (results["eval_split"], results["episodes"]) == ("valid", 2)
    adapted = fmmeta.adapt(model, [("aa0", "x"), ("bb2", "y")], output_dir=folder / "adapted")
    assert adapted.inner_steps == memory["inner_steps"] == 1
    tuning = TuneConfig(
        model_name_or_path=str(model), dataset=["rows.jsonl"], k_shot=[1], inner_lrs=[0.05, 0.1], **shots
    )
    best = tune(tuning, progress=Progress(False))[0]
    stored = json.loads((model / "fmmeta.json").read_text())
    assert (stored["inner_lr"], stored["inner_steps"]) == (best.inner_lr, best.inner_steps)
    assert (stored["tuned"]["eval_split"], stored["classes"]) == ("valid", memory["classes"])


def test_the_report_of_a_run_of_0_1_0_shows_the_new_names(tmp_path):
    shutil.copy(WRITTEN / "rates" / "run.json", tmp_path)
    settings = data.read(tmp_path).run["settings"]
    assert (settings["init_interpolation"], settings["class_split"]) == (0.6, "02")
    assert not {"start_share", "split"} & settings.keys()


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_old_names_are_refused(tmp_path, old, new):
    """As a flag, in a file and as a keyword, by every command that has the setting."""
    note = " 0.6 for start_share 0.4: it is 1 - start_share" if old == "start_share" else ""
    commands = [
        name for name in COMMANDS if new in pkgutil.resolve_name(COMMANDS[name].settings).__dataclass_fields__
    ]
    for command in commands:
        settings = pkgutil.resolve_name(COMMANDS[command].settings)
        if old in settings.__dataclass_fields__:
            continue
        message = f"--{old} was renamed; use --{new}{note}"
        assert refusal(parse, [f"--{old}", "0.4"], command) == message
        assert refusal(parse, [f"--{old}=0.4"], command) == message
        assert refusal(parse, [f"--{old.replace('_', '-')}", "1"], command) == message
        file = tmp_path / "old.yaml"
        file.write_text(f"{old}: 0.4\n")
        message = f"{old} was renamed; use {new}{note}"
        assert refusal(parse, ["--config", str(file)], command) == f"config={file}: {message}"
        assert refusal(settings, **{old: 0.4}) == message
    assert commands
    if "evaluate" in commands:
        assert refusal(fmmeta.evaluate, "tiny", "letters", **{old: 0.4}) == message


def test_stored_settings_get_their_new_names():
    known = Config.__dataclass_fields__
    stored = {"start_share": 0.9, "profile": True, "split": None, "part": "x", "dataset_fingerprint": "f"}
    assert translated(stored, known) == {
        "init_interpolation": 0.1,
        "profile": True,
        "class_split": None,
        "part": "x",
        "dataset_fingerprint": "f",
    }
    assert translated({"start_share": "broken", "class_split": "01", "split": "02"}, known) == {
        "init_interpolation": "broken",
        "class_split": "01",
    }
    assert set(RENAMED.values()) - {"eval_split", "machine"} <= known.keys()
