"""Callbacks run in a fixed order on every rank, and outcomes match the change of theta."""

from __future__ import annotations

import json

import pytest
import torch

import fmmeta
from fmmeta import Callback, Config, MetaTrainer
from fmmeta.common.errors import Stopped
from fmmeta.reliability.signals import Signals
from fmmeta.training import validation
from fmmeta.training.callbacks import Outcome
from fmmeta.training.episodes import EpisodeReader
from fmmeta.training.loop import Run
from tests.support.helpers import refusal
from tests.support.launch import run_ranks
from tests.support.messages import check_message

SHORT = {
    "n_way": 2,
    "k_shot": 1,
    "num_query": 1,
    "meta_batch_size": 2,
    "inner_steps": 1,
    "max_length": 16,
    "num_workers": "0",
    "outer_steps": 2,
    "outer_lr": 1e-3,
    "lr_scheduler_type": "constant",
    "eval_episodes": 0,
    "save_steps": 0,
    "logging_steps": 1,
}


def missing(episode, rng):
    """A transform: the tasks of the second outer step fail to load."""
    if episode.task.seed[2] == 1:
        raise OSError("disk is missing")
    return episode


class Recorder(Callback):
    """A callback that records hooks, outcomes and theta, and requests a stop before step `stop_at`."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.hooks: list[str] = []
        self.outcomes: list[Outcome] = []
        self.thetas: list[torch.Tensor] = []
        self.stop_at = stop_at

    def on_train_begin(self, run):
        self.hooks.append("train_begin")
        self.thetas.append(run.theta.clone())

    def on_step_begin(self, run):
        self.hooks.append(f"step_begin {run.state.outer_step}")
        if run.state.outer_step == self.stop_at:
            run.stop.signals.asked = "SIGTERM"

    def on_step_end(self, run, outcome):
        self.hooks.append(f"step_end {run.state.outer_step}")
        self.outcomes.append(outcome)
        self.thetas.append(run.theta.clone())

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

    @property
    def moved(self) -> list[bool]:
        """Whether theta changed in each outer step."""
        return [not one.equal(other) for one, other in zip(self.thetas, self.thetas[1:], strict=False)]


def test_hooks_run_in_the_documented_order(tmp_path):
    """A line is logged before the validation; the checkpoint is saved last."""
    seen = Recorder()
    settings = {**SHORT, "eval_episodes": 2, "test_episodes": 2, "eval_steps": 1, "save_steps": 1}
    MetaTrainer(Config(**settings, output_dir=str(tmp_path)), callbacks=[seen]).train()
    metrics = "evaluate ['valid_accuracy', 'valid_loss']"
    assert seen.hooks == [
        "train_begin",
        *("step_begin 0", "log 1 False", "log 1 False", metrics, "step_end 1", "save checkpoint-1"),
        *("step_begin 1", "log 2 False", "log 2 False", metrics, "step_end 2"),
        *("save checkpoint-2", "log 2 True", "train_end True", "close"),
    ]
    assert fmmeta.Callback is Callback


@pytest.mark.parametrize(
    ("settings", "outcomes", "moved"),
    [
        ({}, ["APPLIED", "APPLIED"], [True, True]),
        ({"max_task_loss": 1e-9}, ["SKIPPED_NONFINITE"] * 2, [False, False]),
        (
            {"on_bad_task": "skip", "episode_transforms": f"{__name__}:missing"},
            ["APPLIED", "NO_DATA"],
            [True, False],
        ),
    ],
)
def test_outcome_matches_the_change_of_theta(tmp_path, settings, outcomes, moved):
    seen = Recorder()
    MetaTrainer(Config(**{**SHORT, **settings}, output_dir=str(tmp_path)), callbacks=[seen]).train()
    assert [outcome.name for outcome in seen.outcomes] == outcomes
    assert seen.moved == moved


def test_a_stop_abandons_the_step_and_does_not_count_it(tmp_path, monkeypatch):
    seen, ends = Recorder(stop_at=1), []
    run_step = Run.run_step

    def recording(self):
        ends.append((run_step(self), self.state.outer_step, self.theta.clone()))
        return ends[-1][0]

    monkeypatch.setattr(Run, "run_step", recording)
    with pytest.raises(Stopped, match=r"outer step 1, .*checkpoint-1"):
        MetaTrainer(Config(**SHORT, output_dir=str(tmp_path)), Signals(), [seen]).train()
    assert [end[0] for end in ends] == [Outcome.APPLIED, Outcome.STOP]
    assert ends[1][1] == 1
    assert ends[1][2].equal(seen.thetas[-1])
    assert seen.hooks[-2:] == ["save checkpoint-1", "close"]


def test_a_validation_that_a_stop_cut_short_is_repeated_after_train_begin(tmp_path):
    class Stopping(Recorder):
        def on_log(self, run, metrics):
            run.stop.signals.asked = "SIGTERM"  # the validation of this step follows

    settings = {**SHORT, "eval_episodes": 2, "test_episodes": 0, "eval_steps": 1}
    first, second = Stopping(), Recorder()
    with pytest.raises(Stopped, match=r"outer step 1, .*checkpoint-1"):
        MetaTrainer(Config(**settings, output_dir=str(tmp_path)), Signals(), [first]).train()
    assert not any(hook.startswith("evaluate") for hook in first.hooks)
    MetaTrainer(Config(**settings, output_dir=str(tmp_path)), callbacks=[second]).train()
    assert [hook.split()[0] for hook in second.hooks[:4]] == ["train_begin", "log", "evaluate", "step_begin"]


def test_a_warm_up_as_long_as_the_run_is_warned_of(tmp_path, capsys, terminal):
    settings = {**SHORT, "lr_scheduler_type": "linear", "outer_steps": 2, "test_episodes": 0}
    for steps in (1, 2):
        MetaTrainer(Config(**settings, warmup_steps=steps, output_dir=str(tmp_path / f"{steps}"))).train()
        warned = "warmup_steps=2 with outer_steps=2: the run ends before the rate is outer_lr" in (
            "".join(capsys.readouterr())
        )
        assert warned == (steps == 2)


def test_the_stage_of_the_watchdog_names_task_and_pass(tmp_path):
    """A report of a hang names the pass that hangs."""
    stages = []

    class Recording(Callback):
        def on_train_begin(self, run):
            step = run.worker.step

            def recording(*arguments, **named):
                stages.append(run.stage.text)
                return step(*arguments, **named)

            run.worker.step = recording

    settings = {**SHORT, "algorithm": "fomaml", "inner_steps": 2, "outer_steps": 1, "test_episodes": 0}
    MetaTrainer(Config(**settings, output_dir=str(tmp_path)), callbacks=[Recording()]).train()
    tasks = [f"outer step 1, task {task} of group 0" for task in (1, 2)]
    checks = ["outer step 1, checking the inner loop"] * 2  # its steps
    assert stages == [f"{task}, pass {number}" for task in tasks for number in (1, 2, 3)] + checks


def test_the_worker_holds_theta_after_a_step_that_closes_during_a_task(tmp_path):
    """With --max_staleness, where nothing is applied: the other group has counted tasks without episodes."""
    held = []

    class OtherGroup(Callback):
        def on_train_begin(self, run):
            steps, look = run.stale_steps, run.stale_steps._between_passes

            def count_both_tasks(ledger):
                ledger.counted += 2
                return 0

            def counting():
                if not held:
                    steps.ledger.change(count_both_tasks)
                look()

            steps._between_passes, run._check_claims = counting, lambda metrics: None

        def on_step_end(self, run, outcome):
            held.append((outcome.name, run.worker.read().equal(run.theta)))

    settings = {**SHORT, "max_staleness": 1, "test_episodes": 0}
    MetaTrainer(Config(**settings, output_dir=str(tmp_path)), callbacks=[OtherGroup()]).train()
    assert held == [("SKIPPED_NONFINITE", True), ("APPLIED", True)]


def test_the_stage_of_the_watchdog_while_a_validation_loads_and_gathers(tmp_path, monkeypatch):
    """The bound of an outer step, which may be short, does not hold there."""
    stages, runs = [], []

    class Keeping(Callback):
        def on_train_begin(self, run):
            runs.append(run)

    def recorded(original):
        def recording(*arguments):
            stages.append((runs[0].stage.name, runs[0].stage.is_step))
            return original(*arguments)

        return recording

    monkeypatch.setattr(EpisodeReader, "read_share", recorded(EpisodeReader.read_share))
    monkeypatch.setattr(validation, "gather_scores", recorded(validation.gather_scores))
    settings = {**SHORT, "eval_episodes": 1, "eval_steps": 2, "test_episodes": 0}
    MetaTrainer(Config(**settings, output_dir=str(tmp_path)), callbacks=[Keeping()]).train()
    assert stages == [
        ("validation, loading its episodes", False),
        ("validation, waiting for the other groups", False),
    ]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"inner_lr": 3e38, "inner_steps": 2},
            ["inner_lr=3e+38: no task was finite", "lower --inner_lr or --outer_lr"],
        ),
        ({"max_task_loss": 1e-9}, ["max_task_loss=1e-09: no task was within", "raise --max_task_loss"]),
        ({"max_task_norm": 1e-9}, ["max_task_norm=1e-09: no task was within", "raise --max_task_norm"]),
    ],
)
def test_a_run_without_finite_tasks_names_the_setting(tmp_path, settings, parts):
    config = Config(**{**SHORT, **settings}, max_bad_steps=1, output_dir=str(tmp_path))
    check_message(refusal(MetaTrainer(config).train), *parts, "--accept_changed_settings")


def test_a_callback_that_raises_ends_the_run_in_one_line(tmp_path):
    class Failing(Callback):
        def on_log(self, run, metrics):
            raise KeyError("name")

        def close(self, run):
            raise ValueError("not open")

    run = MetaTrainer(Config(**SHORT, output_dir=str(tmp_path)), callbacks=[Failing()])
    check_message(
        refusal(run.train),
        "callbacks=Failing",
        "on_log",
        "KeyError: 'name' at outer step 1",
        "correct the callback, or leave it out",
    )
    assert "Not finished: logged to outer step 1" in (tmp_path / "report.html").read_text()


@pytest.mark.timeout(200)
def test_a_callback_that_raises_on_one_rank_ends_all(tmp_path):
    flags = [f"--{name}={value}" for name, value in {**SHORT, "outer_steps": 4, "group_size": "1"}.items()]
    ended = run_ranks(
        ["-m", "tests.support.callback_run", "1", *flags, f"--output_dir={tmp_path}"], 2, timeout_s=150
    )
    assert ended.codes == [2, 2]
    for output in ended.output:
        (line,) = [line for line in output.splitlines() if line.startswith("refused: ")]
        check_message(line, "callbacks=FailsOn", "on_step_end", "outer step 2", "correct the callback")
