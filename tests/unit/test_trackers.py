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

import pytest

from fmmeta.common.errors import UsageError
from fmmeta.common.security import redact
from fmmeta.config.settings import TRACKERS, Config
from fmmeta.train import MetaTrainer
from fmmeta.training import trackers
from fmmeta.training.trackers import Trackers, check_installed, flat, settings
from tests.support.helpers import ROOT
from tests.support.messages import check_message, refusal
from tests.support.short_runs import metrics_of

SMALL = {
    "outer_steps": 4,
    "eval_steps": 2,
    "eval_episodes": 2,
    "meta_batch_size": 2,
    "logging_steps": 1,
    "save_steps": 2,
}

NO_RUN: Any = None  # the trackers do not use it


def installed(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def numbers_of(lines: list[dict]) -> dict[str, dict[int, float]]:
    """Name -> step -> number: what a tracker should have got."""
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in flat(line).items():
            found.setdefault(name, {})[line["step"]] = value
    found.pop("step")
    return found


def tensorboard_of(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


@installed("tensorboard")
def test_tensorboard_gets_every_number_also_after_a_resume(tmp_path):
    from accelerate import PartialState

    folder = tmp_path / "run"
    result = MetaTrainer(Config(**SMALL, output_dir=str(folder), report_to=["tensorboard"])).train()
    logged, expected = tensorboard_of(folder), numbers_of(metrics_of(folder))
    assert {"query_loss", "grad_norm", "valid_loss", "wait_seconds_by_group/0"} <= expected.keys()
    for name, values in expected.items():
        assert logged[name] == pytest.approx(values, rel=1e-6), name
    assert logged["held_out_accuracy/after"] == {4: pytest.approx(result.after)}
    assert PartialState._shared_state == {}
    (hparams,) = (folder / "tensorboard").rglob("hparams.yml")
    assert "inner_lr: 0.1" in hparams.read_text()

    # a run that was stopped after its checkpoint at 2: its later lines are dropped, there as here
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "finished": False}))
    (folder / "checkpoint-4").rename(tmp_path / "late")
    MetaTrainer(Config(**SMALL, output_dir=str(folder), report_to=["tensorboard"])).train()
    again, expected = tensorboard_of(folder), numbers_of(metrics_of(folder))
    assert {name: list(values) for name, values in expected.items()} == {
        name: list(again[name]) for name in expected
    }
    assert again["seconds"] == pytest.approx(expected["seconds"], rel=1e-6)
    assert len(list((folder / "tensorboard").rglob("hparams.yml"))) == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_refused_first(monkeypatch, tmp_path, name):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    check_message(
        refusal(check_installed, Config(report_to=[name])),
        f"report_to={name}",
        f"the package {name}",
        f"pip install 'fmmeta[{name}]'",
    )
    folder = tmp_path / "run"
    with pytest.raises(UsageError, match="needs the package"):
        MetaTrainer(Config(**SMALL, output_dir=str(folder), report_to=[name])).train()
    assert not folder.exists()


def test_every_tracker_has_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(TRACKERS) <= set(extras)


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (["tensorbord"], ["report_to=tensorbord", "did you mean tensorboard?", "use none, all, tensorboard"]),
        (
            ["tensorboard", "tensorboard"],
            ["report_to=tensorboard", "name each once, or none"],
        ),
        (["none", "wandb"], ["report_to=none", "leave out none"]),
        ([], ["report_to= names no tracker", "name each once, or none"]),
    ],
)
def test_bad_tracker_names_are_refused(given, messages):
    check_message(refusal(Config, report_to=given), *messages)


def test_all_names_the_trackers_that_are_installed(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: name if name in ("mlflow", "wandb") else None)
    assert trackers.names_of(Config(report_to="all")) == ["wandb", "mlflow"]  # one name needs no list
    check_installed(Config(report_to=["all"]))


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_gets_the_name_of_the_run(monkeypatch, tmp_path, name):
    from accelerate import tracking

    made = []

    class Recorder:
        def __init__(self, *given, **named):
            made.append([*map(str, given), *map(str, named.values())])

    for attribute in [one for one in vars(tracking) if one.endswith("Tracker")]:
        monkeypatch.setattr(tracking, attribute, Recorder)
    trackers.make(name, tmp_path, 0, None, "mine")
    assert len(made) == 1
    if name != "tensorboard":  # it writes into the folder
        assert "mine" in made[0]


class FailingTracker:
    """Stands where a service would be that breaks at the third line."""

    def __init__(self, broken_at: int = 3, start_error: str = "") -> None:
        self.broken_at, self.start_error, self.logged, self.finished = broken_at, start_error, [], 0

    def start(self) -> None:
        if self.start_error:
            raise ConnectionError(self.start_error)

    def store_init_configuration(self, values) -> None:
        self.settings = values

    def log(self, values, step) -> None:
        if len(self.logged) + 1 == self.broken_at:
            raise ConnectionError("https://me:pa55word@tracker.test answers not\nsecond line")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_a_failing_tracker_is_logged_once_and_the_run_continues(monkeypatch, tmp_path, capsys):
    stub = FailingTracker()
    monkeypatch.setattr(trackers, "make", lambda *args: stub)
    monkeypatch.setattr(trackers, "check_installed", lambda config: None)
    monkeypatch.setattr("fmmeta.train.check_installed", lambda config: None)
    MetaTrainer(Config(**SMALL, output_dir=str(tmp_path / "run"), report_to=["trackio"])).train()
    (message,) = [line for line in capsys.readouterr().out.splitlines() if "trackio" in line]
    check_message(message, "trackio", "https://***@tracker.test", "the run continues without it")
    assert [step for step, _ in stub.logged] == [1, 2]
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 2, 3, 4, 4]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"]


def test_a_tracker_that_cannot_start_is_refused_at_the_start_and_logged_on_resume(monkeypatch, tmp_path):
    stub, messages = FailingTracker(start_error="no route to host"), []
    monkeypatch.setattr(trackers, "make", lambda *args: stub)
    config = Config(report_to=["wandb"])
    check_message(
        refusal(Trackers(messages.append).start, config, tmp_path, 0),
        "report_to=wandb",
        "correct that, or leave it out",
    )
    assert messages == []
    running = Trackers(messages.append)
    running.start(config, tmp_path, 7)
    (message,) = messages
    check_message(message, "wandb", "no route to host", "the run continues without it")
    running.on_log(NO_RUN, {"step": 8, "loss": 1.0})
    running.close()
    assert stub.logged == []


def test_a_run_that_stops_finishes_its_trackers(monkeypatch, tmp_path):
    stub = FailingTracker(broken_at=0)
    monkeypatch.setattr(trackers, "make", lambda *args: stub)
    monkeypatch.setattr("fmmeta.train.check_installed", lambda config: None)
    config = Config(
        **{**SMALL, "save_steps": 0},
        inner_lr=1e30,
        max_bad_steps=1,
        report_to=["trackio"],
        output_dir=str(tmp_path / "run"),
    )
    assert "no task was finite" in refusal(MetaTrainer(config).train)
    assert stub.finished == 1
    assert "Not finished: logged to outer step 1 of 4" in (tmp_path / "run" / "report.html").read_text()


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
    logged = settings(
        Config(
            dataset=["https://me:pa55word@host.test/d.jsonl?x=1&token=abc123", "b"],
            output_dir="hf_abcdefghijklmnopq",
        )
    )
    assert logged["dataset"] == "https://***@host.test/d.jsonl?x=1&token=*** b"
    assert logged["output_dir"] == "hf_***"
    assert "deepspeed" not in logged  # it is open
    assert all(isinstance(value, (bool, int, float, str)) for value in logged.values())
    assert logged["seed"] == 42


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


@installed("mlflow")
def test_mlflow_keeps_one_run(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for first, step in ((0, 1), (5, 6)):
        running = Trackers(pytest.fail)
        running.start(Config(report_to=["mlflow"]), tmp_path, first)
        running.on_log(NO_RUN, {"step": step, "loss": 0.5 * step, "waits": [1.0]})
        running.close()
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.data.params["inner_lr"] == "0.1"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (6, 3.0)]
    assert run.info.status == "FINISHED"


@installed("wandb")
def test_wandb_writes_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    running = Trackers(pytest.fail)
    running.start(Config(report_to=["wandb"]), tmp_path, 0)
    running.on_log(NO_RUN, {"step": 1, "loss": 0.5})
    known = running.running["wandb"].tracker.id
    running.close()
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": known}
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{known}/*.wandb"))


@installed("trackio")
def test_trackio_writes_locally(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    running = Trackers(pytest.fail)
    running.start(Config(report_to=["trackio"]), tmp_path, 0)
    running.on_log(NO_RUN, {"step": 1, "loss": 0.5})
    running.close()
    assert list((tmp_path / "trackio").glob("fmmeta*"))
