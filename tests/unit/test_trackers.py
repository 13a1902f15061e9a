"""Trackers get the lines of metrics.jsonl and no secret, start no process group, and never end a run.

TensorBoard is read back; W&B, MLflow and trackio as far as they work without their servers, where they are
installed.
"""

import importlib.util
import json
import math
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fmmeta.common.security import redact
from fmmeta.config.settings import TRACKERS, Config
from fmmeta.train import MetaTrainer
from fmmeta.training.trackers import Trackers, check_installed, flat, make, names_of, settings
from tests.support.helpers import ROOT
from tests.support.messages import check_message, refusal
from tests.support.short_runs import QUICK, metrics_of, tensorboard_of

SMALL = {
    **QUICK,
    "meta_batch_size": 2,
    "outer_steps": 4,
    "eval_steps": 2,
    "eval_episodes": 2,
    "save_steps": 2,
}

NO_RUN: Any = None  # the trackers do not use it


def installed(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def run(folder: Path, *trackers: str, **settings: Any) -> Any:
    """The result of a short run with these trackers."""
    given = {**SMALL, "report_to": list(trackers), **settings}
    return MetaTrainer(Config(**given, output_dir=str(folder))).train()


def check_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """Every number of metrics.jsonl, name -> step -> number, is in TensorBoard's files; returns those."""
    logged, expected = tensorboard_of(folder), dict[str, dict[int, Any]]()
    for line in metrics_of(folder):
        for name in flat(line).keys() - {"step"}:
            expected.setdefault(name, {})[line["step"]] = pytest.approx(flat(line)[name], rel=1e-6)
    assert {name: logged[name] for name in expected} == expected
    return logged


@installed("tensorboard")
def test_tensorboard_gets_every_number_also_after_a_resume(tmp_path):
    from accelerate import PartialState

    folder = tmp_path / "run"
    result = run(folder, "tensorboard")
    logged = check_tensorboard(folder)
    assert {"query_loss", "grad_norm", "valid_loss", "wait_seconds_by_group/0"} <= logged.keys()
    assert logged["held_out_accuracy/after"] == {4: pytest.approx(result.after)}
    assert PartialState._shared_state == {}

    # a run that was stopped after its checkpoint at 2: its later lines are dropped, there as here
    stored = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**stored, "finished": False}))
    (folder / "checkpoint-4").rename(tmp_path / "late")
    run(folder, "tensorboard")
    check_tensorboard(folder)
    (hparams,) = (folder / "tensorboard").rglob("hparams.yml")
    assert "inner_lr: 0.1" in hparams.read_text()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_refused_first(monkeypatch, tmp_path, name):
    monkeypatch.setattr("fmmeta.training.trackers.find_spec", lambda package: None)
    parts = (f"report_to={name} needs the package {name}", f"pip install 'fmmeta[{name}]'")
    check_message(refusal(run, tmp_path / "run", name), *parts)
    assert not (tmp_path / "run").exists()


def test_every_tracker_has_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(TRACKERS) <= set(extras)


def test_all_names_the_trackers_that_are_installed(monkeypatch):
    monkeypatch.setattr(
        "fmmeta.training.trackers.find_spec", lambda name: name if name in ("mlflow", "wandb") else None
    )
    assert names_of(Config(report_to="all")) == ["wandb", "mlflow"]  # one name needs no list
    check_installed(Config(report_to=["all"]))


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_gets_the_name_of_the_run(monkeypatch, tmp_path, name):
    from accelerate import tracking

    recorder = Mock()
    for attribute in [one for one in vars(tracking) if one.endswith("Tracker")]:
        monkeypatch.setattr(tracking, attribute, recorder)
    make(name, tmp_path, 0, None, "mine")
    ((given, named),) = recorder.call_args_list
    assert name == "tensorboard" or "mine" in map(str, (*given, *named.values()))  # it writes into the folder


@pytest.fixture
def tracker(monkeypatch):
    """Stands for every tracker, all of which count as installed."""
    tracker = Mock()
    monkeypatch.setattr("fmmeta.training.trackers.make", lambda *args: tracker)
    monkeypatch.setattr("fmmeta.training.trackers.find_spec", lambda package: package)
    return tracker


def test_a_failing_tracker_is_logged_once_and_the_run_continues(tracker, tmp_path, capsys):
    broken = ConnectionError("https://me:pa55word@tracker.test answers not\nsecond line")
    tracker.log.side_effect = [None, None, broken]
    run(tmp_path, "trackio")
    (message,) = [line for line in capsys.readouterr().out.splitlines() if "trackio" in line]
    check_message(message, "trackio", "https://***@tracker.test", "the run continues without it")
    assert tracker.log.call_count == 3
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 2, 3, 4, 4]
    assert json.loads((tmp_path / "run.json").read_text())["finished"]


def test_a_tracker_that_cannot_start_is_refused_at_the_start_and_logged_on_resume(tracker, tmp_path):
    tracker.start.side_effect, messages = ConnectionError("no route to host"), []
    running, config = Trackers(messages.append), Config(report_to=["wandb"])
    parts = ("report_to=wandb", "correct that, or leave it out")
    check_message(refusal(running.start, config, tmp_path, 0), *parts)
    assert messages == []
    running.start(config, tmp_path, 7)
    check_message(*messages, "wandb", "no route to host", "the run continues without it")
    running.on_log(NO_RUN, {"step": 8, "loss": 1.0})
    running.close()
    assert not tracker.log.called


def test_a_run_that_stops_finishes_its_trackers(tracker, tmp_path):
    diverging = {"save_steps": 0, "inner_lr": 3e38, "inner_steps": 2, "max_bad_steps": 1}
    assert "no task was finite" in refusal(run, tmp_path, "trackio", **diverging)
    assert tracker.finish.call_count == 1
    assert "Not finished: logged to outer step 1 of 4" in (tmp_path / "report.html").read_text()


def test_only_numbers_are_logged():
    line = {
        "a": 1,
        "b": 2.5,
        "none": None,
        "nan": math.nan,
        "text": "x",
        "waits": [0.1, 0.2],
        "bad_tasks": [{"task": "t"}, {"task": "u"}],
        "held_out": {"loss": [1.0, 0.1]},
        "right": True,
    }
    assert flat(line) == {
        "a": 1,
        "b": 2.5,
        "waits/0": 0.1,
        "waits/1": 0.2,
        "bad_tasks": 2,
        "held_out/loss/0": 1.0,
        "held_out/loss/1": 0.1,
        "right": True,
    }


def test_settings_hold_no_secrets():
    data = ["https://me:pa55word@host.test/d.jsonl?x=1&token=abc123", "b"]
    logged = settings(Config(dataset=data, output_dir="hf_abcdefghijklmnopq"))
    assert logged["dataset"] == "https://***@host.test/d.jsonl?x=1&token=*** b"
    assert (logged["output_dir"], logged["seed"]) == ("hf_***", 42)
    assert "deepspeed" not in logged  # it is open
    assert all(isinstance(value, (bool, int, float, str)) for value in logged.values())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ghp_0123456789abcdefghij", "ghp_***"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("/data/hf_models/run_1", "/data/hf_models/run_1"),
        ("http://host/a@b", "http://host/a@b"),
        ("2 @ 3://x", "2 @ 3://x"),
    ],
)
def test_tokens_in_texts_are_redacted(text, shown):
    assert redact(text) == shown


def log_to(name: str, folder: Path, step: int = 1) -> Any:
    """Log a step as a run does that begins, or resumes, with it; the tracker."""
    running = Trackers(pytest.fail)
    running.start(Config(report_to=[name]), folder, step - 1)
    running.on_log(NO_RUN, {"step": step, "loss": 0.5 * step, "waits": [1.0]})
    tracker = running.running[name].tracker
    running.close()
    return tracker


@installed("mlflow")
def test_mlflow_keeps_one_run(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for step in (1, 6):
        log_to("mlflow", tmp_path, step)
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (6, 3.0)]
    assert (run.data.params["inner_lr"], run.info.status) == ("0.1", "FINISHED")


@installed("wandb")
def test_wandb_writes_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    known = log_to("wandb", tmp_path).id
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": known}
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{known}/*.wandb"))


@installed("trackio")
def test_trackio_writes_locally(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    log_to("trackio", tmp_path)
    assert list((tmp_path / "trackio").glob("fmmeta*"))
