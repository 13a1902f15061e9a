"""Callbacks run in a fixed order on every rank, and outcomes match the change of theta."""

import json

import pytest
import torch

from fmmeta import Callback, Config, MetaTrainer
from fmmeta.common.errors import Stopped
from fmmeta.meta.outer_step import Outcome
from fmmeta.reliability.signals import Signals
from fmmeta.training.bounded_staleness import StaleSchedule
from fmmeta.training.episodes import EpisodeReader
from fmmeta.training.run import Run
from fmmeta.training.schedules import StaticSchedule
from fmmeta.training.scoring import Scoring
from tests.support.helpers import recorded
from tests.support.messages import check_message, refusal
from tests.support.ranks import on_ranks
from tests.support.short_runs import QUICK

SHORT = {
    **QUICK,
    "meta_batch_size": 2,
    "outer_steps": 2,
    "test_episodes": 0,
    "save_steps": 0,
    "outer_lr": 1e-3,
    "lr_scheduler_type": "constant",
}


def trainer(folder, *callbacks, **settings):
    """A short run with these callbacks, which the signals of the first one stop."""
    signals = getattr(callbacks[0], "signals", None) if callbacks else None
    return MetaTrainer(Config(**{**SHORT, **settings}, output_dir=str(folder)), signals, callbacks)


def missing(episode, rng):
    """A transform: the tasks of the second outer step fail to load."""
    if episode.task.seed[2] == 1:
        raise OSError("disk is missing")
    return episode


class Recorder(Callback):
    """A callback that records hooks, outcomes and theta, and requests a stop before step `stop_at`."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.signals, self.stop_at, self.held = Signals(), stop_at, list[bool]()
        self.hooks: list[str] = []
        self.outcomes: list[Outcome] = []
        self.thetas: list[torch.Tensor] = []

    def on_train_begin(self, run):
        self.hooks.append("train_begin")
        self.thetas.append(run.theta.clone())

    def on_step_begin(self, run):
        self.hooks.append(f"step_begin {run.state.outer_step}")
        if run.state.outer_step == self.stop_at:
            self.signals.asked = "SIGTERM"

    def on_step_end(self, run, outcome):
        self.hooks.append(f"step_end {run.state.outer_step}")
        self.outcomes.append(outcome)
        self.thetas.append(run.theta.clone())
        self.held.append(run.worker.read().equal(run.theta))

    def on_evaluate(self, run, metrics):
        self.hooks.append(f"evaluate {sorted(metrics)}")

    def on_log(self, run, metrics):
        self.hooks.append(f"log {metrics['step']} {'held_out_accuracy' in metrics}")

    def on_save(self, run, folder):
        self.hooks.append(f"save {folder.name}")

    def on_train_end(self, run):
        self.hooks.append(f"train_end {json.loads((run.folder / 'run.json').read_text())['finished']}")

    def close(self, run):
        self.hooks.append("close")
        self.last = run.theta.clone()

    @property
    def moved(self) -> list[bool]:
        """Whether theta changed in each outer step."""
        return [not one.equal(other) for one, other in zip(self.thetas, self.thetas[1:], strict=False)]


def test_hooks_run_in_the_documented_order(tmp_path):
    """A line is logged before the validation; the checkpoint is saved last."""
    seen = Recorder()
    trainer(tmp_path, seen, eval_episodes=2, test_episodes=2, eval_steps=1, save_steps=1).train()
    metrics = "evaluate ['valid_accuracy', 'valid_loss']"
    assert seen.hooks == [
        "train_begin",
        *("step_begin 0", "log 1 False", "log 1 False", metrics, "step_end 1", "save checkpoint-1"),
        *("step_begin 1", "log 2 False", "log 2 False", metrics, "step_end 2"),
        *("save checkpoint-2", "log 2 True", "train_end True", "close"),
    ]
    assert (seen.outcomes, seen.moved) == ([Outcome.APPLIED] * 2, [True, True])


def test_outcome_matches_the_change_of_theta_where_tasks_are_missing(tmp_path):
    seen = Recorder()
    trainer(tmp_path, seen, on_bad_task="skip", episode_transforms=f"{__name__}:missing").train()
    assert (seen.outcomes, seen.moved) == ([Outcome.APPLIED, Outcome.NO_DATA], [True, False])


def test_a_run_without_finite_tasks_leaves_theta_and_names_the_setting(tmp_path):
    seen = Recorder()
    run = trainer(tmp_path, seen, inner_lr=3e38, inner_steps=2, max_bad_steps=1)
    parts = ("inner_lr=3e+38: no task was finite", "lower --inner_lr or --outer_lr")
    check_message(refusal(run.train), *parts, "--accept_changed_settings")
    assert seen.last.equal(seen.thetas[0])


def test_a_stop_abandons_the_step_and_does_not_count_it(tmp_path, monkeypatch):
    seen, updates = Recorder(stop_at=1), recorded(monkeypatch, StaticSchedule, "update")
    with pytest.raises(Stopped, match=r"outer step 1, .*checkpoint-1"):
        trainer(tmp_path, seen).train()
    assert [update.result for update in updates] == [Outcome.APPLIED, Outcome.STOP]
    assert updates[1].args[0].run.state.outer_step == 1
    assert seen.last.equal(seen.thetas[-1])
    assert seen.hooks[-2:] == ["save checkpoint-1", "close"]


def test_a_validation_that_a_stop_cut_short_is_repeated_after_train_begin(tmp_path):
    class Stopping(Recorder):
        def on_log(self, run, metrics):
            self.signals.asked = "SIGTERM"  # the validation of this step follows

    first, second = Stopping(), Recorder()
    with pytest.raises(Stopped, match=r"outer step 1, .*checkpoint-1"):
        trainer(tmp_path, first, eval_episodes=2, eval_steps=1).train()
    assert not any(hook.startswith("evaluate") for hook in first.hooks)
    trainer(tmp_path, second, eval_episodes=2, eval_steps=1).train()
    assert [hook.split()[0] for hook in second.hooks[:4]] == ["train_begin", "log", "evaluate", "step_begin"]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_warm_up_as_long_as_the_run_is_warned_of(tmp_path, capsys, terminal, steps):
    trainer(tmp_path, lr_scheduler_type="linear", warmup_steps=steps).train()
    warned = "warmup_steps=2 with outer_steps=2: the run ends before the rate is outer_lr"
    assert (warned in "".join(capsys.readouterr())) == (steps == 2)


def test_the_stage_of_the_watchdog_names_task_and_pass_and_is_no_step_in_a_validation(tmp_path, monkeypatch):
    """A report of a hang names the pass that hangs; the bound of an outer step, which may be short, does not
    hold while a validation loads and gathers.
    """
    stages, runs, resume = [], [], Run.resume
    monkeypatch.setattr(Run, "resume", lambda run: (runs.append(run), resume(run)))

    def record(owner, name):
        original = getattr(owner, name)

        def recording(*arguments, **named):
            stages.append((runs[0].stage.text, runs[0].stage.is_step))
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, recording)

    class Recording(Callback):
        def on_train_begin(self, run):
            record(run.worker, "step")
            record(EpisodeReader, "read_share")
            record(Scoring, "_gather")

    settings = {"inner_steps": 2, "outer_steps": 1, "eval_episodes": 1, "eval_steps": 1}
    trainer(tmp_path, Recording(), algorithm="fomaml", **settings).train()
    passes = [f"task {task} of group 0, pass {number}" for task in (1, 2) for number in (1, 2, 3)]
    assert [*dict.fromkeys(stages)] == [
        *((f"outer step 1, {phase}", True) for phase in ("checking the inner loop", *passes)),
        ("validation, loading its episodes", False),
        ("an episode of an evaluation", False),
        ("validation, waiting for the other groups", False),
    ]


def test_the_worker_holds_theta_after_a_step_that_closes_during_a_task(tmp_path, monkeypatch):
    """With --max_staleness, where nothing is applied: the other group has counted tasks without episodes."""
    seen, between_passes = Recorder(), StaleSchedule.between_passes

    def count_both_tasks(ledger):
        ledger.counted += 2
        return 0

    def counting(self):
        if not seen.outcomes:
            self.ledger.change(count_both_tasks)
        between_passes(self)

    monkeypatch.setattr(StaleSchedule, "between_passes", counting)
    monkeypatch.setattr(StaleSchedule, "check_task_count", lambda self, tasks: None)
    trainer(tmp_path, seen, max_staleness=1).train()
    assert seen.outcomes == [Outcome.SKIPPED_NONFINITE, Outcome.APPLIED]
    assert seen.held == [True, True]


def test_a_callback_that_raises_ends_the_run_in_one_line(tmp_path):
    class Failing(Callback):
        def on_log(self, run, metrics):
            raise KeyError("name")

        def close(self, run):
            raise ValueError("not open")

    parts = "on_log", "KeyError: 'name' at outer step 1", "correct the callback, or leave it out"
    check_message(refusal(trainer(tmp_path, Failing()).train), "callbacks=Failing", *parts)
    assert "Not finished: logged to outer step 1" in (tmp_path / "report.html").read_text()


class FailsOnOne(Callback):
    def on_step_end(self, run, outcome):
        if run.ranks.layout.launch.global_rank == 1 and run.state.outer_step == 2:
            raise RuntimeError("disk is missing\nsecond line")


@pytest.mark.timeout(200)
@on_ranks(2, timeout_s=150)
def test_a_callback_that_raises_on_one_rank_ends_all(world, tmp_path):
    world.close()  # the run opens another
    line = refusal(trainer(tmp_path, FailsOnOne(), outer_steps=4, group_size="1").train)
    check_message(line, "callbacks=FailsOnOne", "on_step_end", "outer step 2", "correct the callback")
