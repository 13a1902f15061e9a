"""A signal after the last outer step: the model is saved, and a second run repeats no finished episode."""

import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fmmeta import Callback, Config, MetaTrainer
from fmmeta.common.errors import Stopped
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.metrics.scores import EpisodeScore
from fmmeta.reliability.signals import Signals
from fmmeta.training import final
from fmmeta.training.scoring import FINISHED, HeldOut
from tests.support.short_runs import metrics_of

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

    def __init__(self, monkeypatch, number: int | None) -> None:
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


FIXED = {
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


@pytest.fixture
def config_of(bert, classes, tmp_path):
    def make(name: str, **settings) -> Config:
        given = {"model_name_or_path": str(bert), "dataset": [str(classes)], **FIXED, **settings}
        return Config(output_dir=str(tmp_path / name), **given)

    return make


def scored_by(config: Config, stop_at: int | None = None, why: str = "the same command", callbacks=()) -> int:
    """Train, and count held-out episodes; a signal in the episode `stop_at` ends the run."""
    with pytest.MonkeyPatch.context() as patch:
        stop = StopAt(patch, stop_at)
        trainer = MetaTrainer(config, stop.signals, callbacks)
        if stop_at is None:
            trainer.train()
        else:
            with pytest.raises(Stopped, match=why):
                trainer.train()
    return stop.scored


def exported(folder) -> dict[str, bytes]:
    """The files of the model by name; the name of the run is left out of its card."""
    files = {file.name: file.read_bytes() for file in sorted((folder / "model").iterdir())}
    return {**files, "README.md": files["README.md"].replace(folder.name.encode(), b"")}


def table_of(folder) -> dict:
    return json.loads((folder / "run.json").read_text())["held_out"]


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_stop_in_the_final_evaluation_keeps_the_trained_model(config_of, tmp_path, settings):
    """The signal arrives in the first, a middle and the last pass; only the stop saves a checkpoint."""
    whole = scored_by(config_of("whole", **settings))
    confused, rates = 1, len(final.SCALES)
    for number in (whole - 3 * rates - 3 - confused - 2, whole - 4, whole):
        name = f"stopped-{number}"
        config = config_of(name, **settings)
        stopped = scored_by(config, number, "the same command")
        again = scored_by(config)
        assert exported(tmp_path / name) == exported(tmp_path / "whole")
        assert table_of(tmp_path / name) == table_of(tmp_path / "whole")
        assert stopped + again - whole <= confused  # no finished episode was scored twice
        assert not (tmp_path / name / FINISHED).exists()


def test_finished_episodes_of_other_data_are_not_used(config_of, classes, tmp_path):
    """The rows of the same classes change between the stop in the last episode and the second run."""
    data = tmp_path / "rows.jsonl"
    data.write_text(classes.read_text())
    given: dict[str, Any] = {"dataset": [str(data)]}
    whole = scored_by(config_of("whole", **given))
    scored_by(config_of("run", **given), whole)
    data.write_text(data.read_text().replace('"text": "', '"text": "another '))
    given["accept_changed_settings"] = ["dataset_fingerprint"]
    assert scored_by(config_of("run", **given)) == whole


def test_stop_in_a_validation_repeats_the_validation(config_of, tmp_path):
    """The best weights then equal those of an undisturbed run."""
    settings = {"load_best_model_at_end": True, "eval_steps": 1, "test_episodes": 0, "eval_episodes": 4}
    MetaTrainer(config_of("whole", **settings)).train()
    lines = metrics_of(tmp_path / "whole")
    validated = [(line["valid_accuracy"], -line["valid_loss"]) for line in lines if "valid_loss" in line]
    best = max(range(3), key=lambda step: validated[step])
    scored_by(config_of("stopped", **settings), 4 * best + 2)
    MetaTrainer(config_of("stopped", **settings)).train()
    assert exported(tmp_path / "stopped") == exported(tmp_path / "whole")


class EndsEarly(Callback):
    """Ends the run after its second outer step."""

    def on_step_end(self, run, outcome):
        run.ends_early = run.state.outer_step == 2


@pytest.mark.parametrize("save_steps", [0, 1])
def test_a_run_ended_by_a_callback_stays_ended(config_of, tmp_path, save_steps):
    """A stop in its final evaluation and a second run give the model of an undisturbed run, whose card names
    the steps that were done; more --outer_steps continue it.
    """
    settings: dict[str, Any] = {"outer_steps": 4, "save_steps": save_steps}
    MetaTrainer(config_of("whole", **settings), callbacks=[EndsEarly()]).train()
    scored_by(config_of("stopped", **settings), 2, "after outer step 2", [EndsEarly()])
    again = MetaTrainer(config_of("stopped", **settings), callbacks=[EndsEarly()]).train()
    assert again.outer_steps == 2
    assert exported(tmp_path / "stopped") == exported(tmp_path / "whole")
    assert b"2 steps of adamw" in exported(tmp_path / "whole")["README.md"].lower()
    settings |= {"outer_steps": 5, "accept_changed_settings": ["outer_steps"]}
    assert MetaTrainer(config_of("stopped", **settings)).train().outer_steps == 5


class ThetaRecorder(Callback):
    """Records theta at the start of every evaluation."""

    def __init__(self, monkeypatch) -> None:
        self.thetas: list[torch.Tensor] = []
        evaluate = HeldOut.scores

        def record(held_out, *args, **named):
            if not named.get("each_step"):  # not those that choose the baseline's number of steps
                self.thetas.append(self.run.theta.clone())
            return evaluate(held_out, *args, **named)

        monkeypatch.setattr(HeldOut, "scores", record)

    def on_train_begin(self, run):
        self.run = run


def test_held_out_episodes_see_the_trained_weights_and_a_baseline_with_its_best_inner_loop(
    config_of, tmp_path, capsys, monkeypatch
):
    """theta holds the trained weights at every held-out episode, so that a checkpoint can be saved at any.

    The inner loop is chosen among rates and numbers of steps on validation episodes; the table and run.json
    name it.
    """
    recorder = ThetaRecorder(monkeypatch)
    config = config_of("run", inner_lr=1e-4, init_interpolation=0.75, eval_steps=3, save_steps=3)
    MetaTrainer(config, callbacks=[recorder]).train()
    saved = load_file(tmp_path / "run" / "checkpoint-3" / "shard-00000.safetensors")
    trained = sum(value.numel() for name, value in saved.items() if name.startswith("theta/"))
    first, *others = recorder.thetas  # validation, table, table of the weights at the start
    assert len(first) == trained
    assert [first.equal(other) for other in others] == [True, True]
    loop = table_of(tmp_path / "run")["baseline_inner_loop"]
    assert loop["episodes"] == 3
    assert loop["steps"] in (1, 2)
    assert loop["scale"] in final.SCALES
    rate = f"inner_lr {1e-4 * loop['scale']:.3g}, {loop['steps']} steps"
    assert f"weights at the start ({rate})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "chosen"), [({}, (0.3, 2)), ({"task_type": "causal_lm", "dataset": ["x.jsonl"]}, (1.0, 2))]
)
def test_best_inner_loop_has_the_highest_accuracy_then_the_lowest_loss(settings, chosen):
    """The scores are given by rate and step, in any order; a language model has its loss alone."""
    table = {
        0.1: [(0.2, 1.6)] * 3,
        0.3: [(0.2, 1.6), (0.5, 1.2), (0.5, 1.0)],
        1.0: [(0.2, 1.6), (0.5, 1.1), (0.4, 0.9)],
        3.0: [(0.2, 1.6), (0.5, 1.0), (0.1, 2.0)],
        10.0: [(0.2, 1.6), (1.0, float("nan")), (1.0, float("inf"))],
    }

    def scores(source, stream, what, theta, inner, each_step, count):
        accuracies, losses = zip(*table[inner], strict=True)
        return [EpisodeScore(0, "", "", [*losses], [*accuracies])]

    scored: Any = SimpleNamespace(scores=scores)
    initial: Any = SimpleNamespace(theta=None, rates=None)
    source: Any = None
    inner = SimpleNamespace(steps=1, variant=lambda learned, scale, steps: scale)
    setup: Any = SimpleNamespace(inner=inner, config=Config(**settings))
    found = final.choose_loop(scored, source, initial, setup, lambda: None)
    assert (found.scale, found.steps) == chosen
