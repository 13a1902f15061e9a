"""A signal after the last outer step: the model is saved, and a second run repeats no finished episode."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from fmmeta import Callback, Config, MetaTrainer
from fmmeta.common.errors import Stopped
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.reliability.signals import Signals
from fmmeta.training import comparison, validation
from tests.support.models import save_bert, write_classes

VARIANTS = {
    "last weights": {},
    "best, interpolated, learned rates": {
        "load_best_model_at_end": True,
        "eval_steps": 1,
        "init_interpolation": 0.75,
        "inner_lr_learned": "layer",
        "inner_lr_outer_lr": 0.05,
    },
}


class StopAt:
    """Sends a signal while the held-out episode with this number is scored, and counts episodes."""

    def __init__(self, monkeypatch, number: int) -> None:
        self.signals, self.number, self.scored = Signals(leave=lambda code: None), number, 0
        for name in ("score", "scores_after_each_step"):
            monkeypatch.setattr(InnerLoop, name, self.counting(getattr(InnerLoop, name)))

    def counting(self, original):
        def scoring(*args, **kwargs):
            self.scored += 1
            if self.scored == self.number:
                self.signals.receive("SIGTERM", 128 + signal.SIGTERM)
            return original(*args, **kwargs)

        return scoring


def config_of(tmp_path, name: str, **settings) -> Config:
    model, data = tmp_path / "bert", tmp_path / "rows.jsonl"
    if not data.exists():
        save_bert(model)
        write_classes(data, classes=15)
    fixed = {
        "k_shot": 1,
        "num_query": 2,
        "n_way": 3,
        "outer_steps": 3,
        "meta_batch_size": 2,
        "inner_steps": 1,
        "outer_lr": 0.05,
        "lr_scheduler_type": "constant",
        "save_steps": 0,
        "eval_episodes": 3,
        "test_episodes": 3,
    }
    return Config(
        model_name_or_path=str(model),
        dataset=[str(data)],
        output_dir=str(tmp_path / name),
        **{**fixed, **settings},
    )


def exported(folder) -> dict[str, bytes]:
    """The files of the model by name; the name of the run is left out of its card."""
    files = {file.name: file.read_bytes() for file in sorted((folder / "model").iterdir())}
    return {**files, "README.md": files["README.md"].replace(folder.name.encode(), b"")}


def table_of(folder) -> dict:
    return json.loads((folder / "run.json").read_text())["held_out"]


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_stop_in_the_final_evaluation_keeps_the_trained_model(tmp_path, monkeypatch, settings):
    """The signal arrives in the first, a middle and the last pass; only the stop saves a checkpoint."""
    with monkeypatch.context() as patch:
        whole = StopAt(patch, 10**9)
        MetaTrainer(config_of(tmp_path, "whole", **settings)).train()
    confused, rates = 1, len(comparison.SCALES)
    for number in (whole.scored - 3 * rates - 3 - confused - 2, whole.scored - 4, whole.scored):
        name, command = f"stopped-{number}", {**settings}
        with monkeypatch.context() as patch:
            stop = StopAt(patch, number)
            with pytest.raises(Stopped, match="the same command"):
                MetaTrainer(config_of(tmp_path, name, **command), stop.signals).train()
        with monkeypatch.context() as patch:
            again = StopAt(patch, 10**9)
            MetaTrainer(config_of(tmp_path, name, **command)).train()
        assert exported(tmp_path / name) == exported(tmp_path / "whole")
        assert table_of(tmp_path / name) == table_of(tmp_path / "whole")
        assert stop.scored + again.scored - whole.scored <= confused  # no finished episode was scored twice
        assert not (tmp_path / name / validation.FINISHED).exists()


def test_finished_episodes_of_other_data_are_not_used(tmp_path, monkeypatch):
    """The rows of the same classes change between the stop and the second run."""
    with monkeypatch.context() as patch:
        whole = StopAt(patch, 10**9)
        MetaTrainer(config_of(tmp_path, "whole")).train()
    with monkeypatch.context() as patch:
        stop = StopAt(patch, whole.scored)
        with pytest.raises(Stopped):
            MetaTrainer(config_of(tmp_path, "run"), stop.signals).train()
    data = tmp_path / "rows.jsonl"
    data.write_text(data.read_text().replace('"text": "', '"text": "another '))
    with monkeypatch.context() as patch:
        again = StopAt(patch, 10**9)
        MetaTrainer(config_of(tmp_path, "run", accept_changed_settings=["dataset_fingerprint"])).train()
    assert again.scored == whole.scored


def test_stop_in_a_validation_repeats_the_validation(tmp_path, monkeypatch):
    """The best weights then equal those of an undisturbed run."""
    settings = {"load_best_model_at_end": True, "eval_steps": 1, "test_episodes": 0, "eval_episodes": 4}
    MetaTrainer(config_of(tmp_path, "whole", **settings)).train()
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    validated = [(line["valid_accuracy"], -line["valid_loss"]) for line in lines if "valid_loss" in line]
    best = max(range(3), key=lambda step: validated[step])
    with monkeypatch.context() as patch:
        stop = StopAt(patch, 4 * best + 2)
        with pytest.raises(Stopped):
            MetaTrainer(config_of(tmp_path, "stopped", **settings), stop.signals).train()
    MetaTrainer(config_of(tmp_path, "stopped", **settings)).train()
    assert exported(tmp_path / "stopped") == exported(tmp_path / "whole")


class EndsEarly(Callback):
    """Ends the run after its second outer step."""

    def on_step_end(self, run, outcome):
        run.ends_early = run.state.outer_step == 2


@pytest.mark.parametrize("save_steps", [0, 1])
def test_a_run_ended_by_a_callback_stays_ended(tmp_path, monkeypatch, save_steps):
    """A stop in its final evaluation and a second run give the model of an undisturbed run, whose card names
    the steps that were done; more --outer_steps continue it.
    """
    settings = {"outer_steps": 4, "save_steps": save_steps}
    MetaTrainer(config_of(tmp_path, "whole", **settings), callbacks=[EndsEarly()]).train()
    with monkeypatch.context() as patch:
        stop = StopAt(patch, 2)
        run = MetaTrainer(config_of(tmp_path, "stopped", **settings), stop.signals, [EndsEarly()])
        with pytest.raises(Stopped, match="after outer step 2"):
            run.train()
    again = MetaTrainer(config_of(tmp_path, "stopped", **settings), callbacks=[EndsEarly()]).train()
    assert again.outer_steps == 2
    assert exported(tmp_path / "stopped") == exported(tmp_path / "whole")
    assert b"2 steps of adamw" in exported(tmp_path / "whole")["README.md"].lower()

    longer = config_of(
        tmp_path, "stopped", **{**settings, "outer_steps": 5, "accept_changed_settings": ["outer_steps"]}
    )
    assert MetaTrainer(longer).train().outer_steps == 5


class ThetaRecorder(Callback):
    """Records theta at the start of every evaluation."""

    def __init__(self) -> None:
        self.thetas: list[torch.Tensor] = []

    def on_train_begin(self, run):
        evaluate = run.held_out.scores

        def record(*args, **named):
            if not named.get("each_step"):  # not those that choose the baseline's number of steps
                self.thetas.append(run.theta.clone())
            return evaluate(*args, **named)

        run.held_out.scores = record


def test_theta_holds_the_trained_weights_during_evaluation(tmp_path):
    """theta holds the trained weights at every held-out episode, so that a checkpoint can be saved at any."""
    recorder = ThetaRecorder()
    config = config_of(tmp_path, "run", init_interpolation=0.75, eval_steps=3, save_steps=3)
    MetaTrainer(config, callbacks=[recorder]).train()
    saved = load_file(tmp_path / "run" / "checkpoint-3" / "shard-00000.safetensors")
    trained = sum(value.numel() for name, value in saved.items() if name.startswith("theta/"))
    thetas = recorder.thetas
    assert len(thetas) == 3  # validation, table, table of the weights at the start
    assert all(len(theta) == trained and theta.equal(thetas[0]) for theta in thetas)


def test_baseline_uses_its_best_inner_loop(tmp_path, capsys):
    """Chosen among rates and numbers of steps on validation episodes; named in the table and in run.json."""
    config = config_of(tmp_path, "run", inner_lr=1e-4, outer_steps=1, outer_lr=1e-9)
    MetaTrainer(config).train()
    loop = table_of(tmp_path / "run")["baseline_inner_loop"]
    assert loop["episodes"] == 3
    assert loop["steps"] in (1, 2)
    assert loop["scale"] in comparison.SCALES
    rate = f"inner_lr {1e-4 * loop['scale']:.3g}, {loop['steps']} steps"
    assert f"weights at the start ({rate})" in capsys.readouterr().out


def test_best_inner_loop_has_the_highest_accuracy_then_the_lowest_loss():
    """The scores are given by rate and step, in any order."""

    class Scored:
        def scores(self, source, stream, what, theta, inner, each_step, count):
            table = {
                0.1: [(0.2, 1.6)] * 3,
                0.3: [(0.2, 1.6), (0.5, 1.2), (0.5, 1.0)],
                1.0: [(0.2, 1.6), (0.5, 1.1), (0.4, 0.9)],
                3.0: [(0.2, 1.6), (0.5, 1.0), (0.1, 2.0)],
                10.0: [(0.2, 1.6), (1.0, float("nan")), (1.0, float("inf"))],
            }
            return [
                validation.HeldOutScore(
                    0, "", "", [loss for _, loss in table[inner]], [accuracy for accuracy, _ in table[inner]]
                )
            ]

    class Inner:
        steps = 1

        def variant(self, learned, scale, steps):
            return scale

    class Setup:
        inner = Inner()

        def __init__(self, task_type):
            self.config = Config(
                task_type=task_type, **({} if task_type == "classification" else {"dataset": ["x.jsonl"]})
            )

    class Initial:
        theta = rates = None

    chosen = [
        comparison.choose_loop(Scored(), None, Initial(), Setup(kind), lambda: None)
        for kind in ("classification", "causal_lm")
    ]  # type: ignore[arg-type]
    assert [(one.scale, one.steps) for one in chosen] == [(0.3, 2), (1.0, 2)]
