"""A `tune` section with outer_lrs or init_interpolations chooses the outer loop by trials before training."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from fmmeta.cli import parse
from fmmeta.common.errors import Stopped
from fmmeta.config.settings import Config
from fmmeta.evaluation import tune_outer_loop
from fmmeta.evaluation.tune_outer_loop import (
    OuterChoice,
    OuterTuneConfig,
    OuterTuning,
    Trial,
    check_section,
    folds_of,
)
from fmmeta.reliability.signals import Signals
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.load import load_sources
from fmmeta.train import train
from tests.support.helpers import refusal
from tests.support.messages import check_message
from tests.support.models import byte_tokenizer, write_classes, write_pairs
from tests.support.short_runs import QUICK, same

RATES, SHARES, STEPS = [0.004, 0.02], [0.4, 1.0], 8
SHORT = {
    **QUICK,
    "outer_steps": STEPS,
    "save_steps": 0,
    "meta_batch_size": 2,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 2,
}
SECTION = {"outer_lrs": RATES, "init_interpolations": SHARES, "episodes": 5}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("data") / "rows.jsonl", classes=12, rows=6)


def config_of(folder, data, section=SECTION, **changes):
    return Config(
        **{
            **SHORT,
            "dataset": [str(data)],
            "tune": json.dumps(section),
            "output_dir": folder and str(folder),
            **changes,
        }
    )


def choice_in(folder):
    (file,) = Path(folder).glob("tuned-*.json")
    return json.loads(file.read_text())


def chosen_in(folder):
    settings = json.loads(Path(folder, "run.json").read_text())["settings"]
    assert settings["tune"] is None
    return settings["outer_lr"], settings["outer_steps"], settings["init_interpolation"]


def test_the_scores_of_trials_are_those_of_whole_runs_and_the_best_one_is_trained(rows, tmp_path, capsys):
    """Every score of a trial is the validation of a run with these settings."""
    train(config_of(tmp_path / "run", rows))
    choice = choice_in(tmp_path / "run")
    assert [trial["outer_lr"] for trial in choice["trials"]] == RATES
    found = {}
    for trial in choice["trials"]:
        for step, share, accuracies, loss in trial["scores"]:
            assert len(accuracies) == 5
            found[trial["outer_lr"], step, share] = sum(accuracies) / 5, loss
    assert {step for _, step, _ in found} == {0, 2, 4, 6, 8}
    for rate, share, steps in [
        (rate, share, steps) for rate in RATES for share in SHARES for steps in (4, 8)
    ]:
        alone = {"outer_lr": rate, "init_interpolation": share, "outer_steps": steps, "eval_steps": steps}
        folder = tmp_path / f"{rate}-{share}-{steps}"
        train(config_of(folder, rows, tune=None, eval_episodes=5, test_episodes=0, **alone))
        (line,) = (
            line
            for text in (folder / "metrics.jsonl").read_text().splitlines()
            if "valid_loss" in (line := json.loads(text))
        )
        assert found[rate, steps, share] == pytest.approx((line["valid_accuracy"], line["valid_loss"]))
    trained = {key: score for key, score in found.items() if key[1]}
    best = max(trained, key=lambda key: (round(trained[key][0], 4), -round(trained[key][1], 4)))
    assert chosen_in(tmp_path / "run") == best
    assert "5 episodes of validation tasks" in capsys.readouterr().out


def test_the_run_after_the_trials_is_the_run_of_the_chosen_settings(rows, tmp_path, capsys):
    train(config_of(tmp_path / "run", rows))
    train(parse([str(tmp_path / "run" / "config.yaml"), "--output_dir", str(tmp_path / "again")]))
    assert same(tmp_path / "run", tmp_path / "again")
    capsys.readouterr()
    train(config_of(tmp_path / "run", rows))  # the same command finds the choice and the run
    out = capsys.readouterr().out
    assert "holds this run, finished" in out
    assert "trial " not in out


def test_without_validation_classes_every_choice_is_scored_on_all_folds(rows, tmp_path, capsys):
    names = [f"c{number}" for number in range(12)]
    (tmp_path / "splits.json").write_text(json.dumps({"train": names, "valid": [], "test": []}))
    splits = {"class_splits": str(tmp_path / "splits.json")}
    train(config_of(tmp_path / "run", rows, {**SECTION, "folds": 3}, **splits))
    choice = choice_in(tmp_path / "run")
    assert [(trial["fold"], trial["outer_lr"]) for trial in choice["trials"]] == [
        (fold, rate) for fold in range(3) for rate in RATES
    ]
    found = defaultdict(list)
    for trial in choice["trials"]:
        for step, share, accuracies, loss in trial["scores"]:
            found[trial["outer_lr"], step, share].append((np.mean(accuracies), -loss))
    trained = {key: np.array(scores).mean(0) for key, scores in found.items() if key[1]}
    assert {len(found[key]) for key in trained} == {3}
    best = max(trained, key=lambda key: tuple(trained[key].round(4)))
    assert chosen_in(tmp_path / "run") == best
    assert "in each of 3 folds" in capsys.readouterr().out


def units_of(source) -> list[str]:
    return list(source.items.names)


@pytest.mark.parametrize("kind", ["classes", "joint", "tasks", "files", "two data sets"])
def test_folds_divide_the_training_part(tmp_path, kind):
    """Each class or task is held out once; an episode has no class of the other part."""
    settings = {"n_way": 2, "k_shot": 1, "num_query": 1, "max_length": 16}
    (tmp_path / "three").mkdir()
    classes = write_classes(tmp_path / "rows.jsonl", classes=11, rows=4, strata=2)
    if kind == "tasks":
        data = [write_pairs(tmp_path / "pairs.jsonl", tasks=7)]
        settings = {**settings, "task_type": "causal_lm", "task_column": "task"}
    elif kind == "files":
        for number in range(7):
            folder = tmp_path / "files" / f"s{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            write_classes(folder / f"t{number}.jsonl", classes=3, rows=4)
        data = [tmp_path / "files"]
    else:
        three = write_classes(tmp_path / "three" / "rows.jsonl", classes=3, rows=4)
        second = write_classes(tmp_path / "more.jsonl", classes=9, rows=4)
        data = [three, second] if kind == "two data sets" else [classes]
    if kind == "joint":
        settings["algorithm"] = "joint"
    config = Config(**settings, dataset=list(map(str, data)))
    sources = load_sources(config, byte_tokenizer(), lambda text: None)
    whole = sources.train
    sources.of_split = {"train": whole}
    folds = folds_of(sources, 3, config)
    held_out = [units_of(fold.valid) for fold in folds]
    assert len(folds) == (2 if kind == "two data sets" else 3)
    if kind != "two data sets":
        assert sorted(name for names in held_out for name in names) == sorted(units_of(whole))
        assert max(map(len, held_out)) - min(map(len, held_out)) <= 1
    for fold, held in zip(folds, held_out, strict=True):
        assert not {*units_of(fold.train)} & {*held}
        for part in (fold.train, fold.valid):
            here = {name.rpartition("/")[2] for name in units_of(part)}
            for task in Schedule(part.items, len(part.items), 1).meta_batch(0):
                draw = part.draw(task)
                assert len({label for _, label in draw.support}) == (1 if kind == "tasks" else 2)
                if kind in ("classes", "two data sets"):
                    assert {*draw.classes} <= here
    if kind == "two data sets":  # three classes of the first: the part of one class has none of it
        few = {name for name in units_of(whole) if name.startswith("rows/")}
        assert len(few) == 3
        assert sorted(len(few & {*held}) for held in held_out) == [0, 2]
    if kind == "joint":
        assert all(fold.train.classes == whole.classes for fold in folds)


def test_few_classes_make_two_folds_of_smaller_episodes(tmp_path):
    data = write_classes(tmp_path / "rows.jsonl", classes=5, rows=4)
    config = Config(n_way=4, k_shot=1, num_query=1, dataset=[str(data)])
    folds = folds_of(load_sources(config, byte_tokenizer(), lambda text: None), 3, config)
    assert [(len(fold.train.items), len(fold.valid.items)) for fold in folds] == [(2, 3), (3, 2)]
    draw = folds[0].valid.draw(Schedule(folds[0].valid.items, 1, 1).meta_batch(0)[0])
    assert len(draw.classes) == 3
    two = [write_classes(tmp_path / f"two-{number}.jsonl", classes=2, rows=4) for number in range(2)]
    config = Config(n_way=2, k_shot=1, num_query=1, dataset=list(map(str, two)))
    sources = load_sources(config, byte_tokenizer(), lambda text: None)
    check_message(refusal(folds_of, sources, 3, config), "dataset=two-0 two-1", "give validation classes")
    few = write_classes(tmp_path / "few.jsonl", classes=3, rows=4)
    config = Config(n_way=2, k_shot=1, num_query=1, dataset=[str(few)])
    sources = load_sources(config, byte_tokenizer(), lambda text: None)
    check_message(refusal(folds_of, sources, 3, config), "dataset=", "has 3", "leave the section out")


@pytest.mark.parametrize("changes", [{"lr_scheduler_type": "linear"}, {"warmup_steps": 0.25}], ids=str)
def test_where_fewer_steps_are_another_training_the_end_alone_is_scored(rows, tmp_path, changes):
    section = {"outer_lrs": [0.002], "init_interpolations": [1.0], "episodes": 2}
    train(config_of(tmp_path / "run", rows, section, **changes))
    (trial,) = choice_in(tmp_path / "run")["trials"]
    assert [step for step, *_ in trial["scores"]] == [0, STEPS]


def test_no_trial_begins_that_would_end_after_the_minutes(rows, tmp_path):
    train(config_of(tmp_path / "run", rows, {**SECTION, "minutes": 1e-4}))
    choice = choice_in(tmp_path / "run")
    assert (len(choice["trials"]), choice["of"]) == (1, 2)
    assert chosen_in(tmp_path / "run")[0] == RATES[0]


def test_with_more_minutes_the_trials_continue(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for minutes, name in ((1e-4, "short"), (5, "long")):
        train(config_of(None, rows, {**SECTION, "minutes": minutes}, run_name=name))
    out = capsys.readouterr().out
    assert out.count("trial 1 of 2: outer_lr") == out.count("trial 2 of 2: outer_lr") == 1
    assert "1 trial of 2 from runs/tuned-" in out


def test_groups_claim_the_tasks_of_every_trial(rows, tmp_path):
    train(config_of(tmp_path / "run", rows, task_schedule="dynamic"))
    train(config_of(tmp_path / "static", rows))
    dynamic, static = choice_in(tmp_path / "run"), choice_in(tmp_path / "static")
    assert [one["scores"] for one in dynamic["trials"]] == [one["scores"] for one in static["trials"]]


def test_a_signal_after_the_last_trial_stops_the_run(rows, tmp_path, monkeypatch):
    real = OuterTuning.store

    def stop_after_the_last(self):
        real(self)
        if len(self.done) == len(self.planned):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(OuterTuning, "store", stop_after_the_last)
    with pytest.raises(Stopped) as error:
        train(config_of(tmp_path / "run", rows))
    check_message(str(error.value), "stopped by SIGTERM", "the same command")


def test_other_values_in_a_deepspeed_file_are_tuned_for_again(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = {"outer_lrs": [0.002], "init_interpolations": [1.0], "episodes": 2}
    for bf16 in (False, True):
        Path("ds.json").write_text(json.dumps({"bf16": {"enabled": bf16}}))
        train(config_of(None, rows, section, run_name=f"bf16-{bf16}", deepspeed="ds.json"))
    assert len([*Path("runs").glob("tuned-*.json")]) == 2


SCORES = [[step, share, [0.5] * 5, 1.0] for step in (2, 4, 6, 8) for share in SHARES]
FIRST = {"fold": 0, "outer_lr": RATES[0], "seconds": 1.0, "scores": [[0, 0.0, [0.5] * 5, 1.0], *SCORES]}


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"trials": 3}',
        '{"trials": null}',
        '{"trials": "ab"}',
        json.dumps({"trials": [{**FIRST, "scores": None}]}),
        json.dumps({"trials": [{**FIRST, "scores": [[1, 2]]}]}),
        json.dumps({"trials": [{**FIRST, "scores": SCORES}]}),
        json.dumps({"trials": [{**FIRST, "fold": 7}]}),
        json.dumps({"trials": [{**FIRST, "outer_lr": 5.0}]}),
        json.dumps({"trials": [{**FIRST, "seconds": "x"}]}),
        json.dumps({"trials": [FIRST] * 3}),
        json.dumps(
            {"trials": [{**FIRST, "scores": [[step, share, [], 1.0] for step, share, *_ in FIRST["scores"]]}]}
        ),
    ],
    ids=[f"damage-{number}" for number in range(13)],
)
def test_a_damaged_file_of_trials_is_refused(tmp_path, content):
    tuned = object.__new__(OuterTuning)
    tuned.rates, tuned.steps, tuned.interpolations = RATES, [2, 4, 6, 8], SHARES
    tuned.section = OuterTuneConfig(episodes=5)
    tuned.planned, tuned.file = [(0, rate) for rate in RATES], tmp_path / "tuned-1.json"
    assert tuned.read(b"") == []
    assert len(tuned.read(json.dumps({"trials": [FIRST]}).encode())) == 1
    check_message(refusal(tuned.read, content.encode()), "tuned-1.json holds no choice", "remove it")


def test_a_folder_that_cannot_be_used_is_refused_before_the_first_trial(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(OuterTuning, "trial", None)
    (tmp_path / "file").write_text("")
    check_message(refusal(train, config_of(tmp_path / "file" / "run", rows)), "output_dir=", "cannot be made")
    train(config_of(tmp_path / "run", rows, tune=None))
    check_message(
        refusal(train, config_of(tmp_path / "run", rows)), "output_dir=", "holds a run, and no trials"
    )


def test_where_every_rate_diverges_nothing_is_trained(rows, tmp_path):
    section = {"outer_lrs": [1e30], "init_interpolations": [1.0], "episodes": 2}
    config = config_of(tmp_path / "run", rows, section, algorithm="protonet")
    check_message(refusal(train, config), "outer_lrs=1e+30", "diverges", "lower ones")
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_incomplete_fold_does_not_count():
    tuned = object.__new__(OuterTuning)
    tuned.rates, tuned.config = [1.0, 2.0], Config()
    tuned.done = [
        Trial(0, 1.0, 1.0, [[0, 0.0, [0.2], 1.0], [4, 1.0, [0.5], 1.0]]),
        Trial(0, 2.0, 1.0, [[4, 1.0, [0.6], 1.0]]),
        Trial(1, 1.0, 1.0, [[0, 0.0, [0.2], 1.0], [4, 1.0, [0.9], 1.0]]),
    ]
    first, second, initial = tuned.ranked()
    assert (first.outer_lr, second.outer_lr, initial.outer_steps) == (2.0, 1.0, 0)
    tuned.done.append(Trial(1, 2.0, 1.0, [[4, 1.0, [0.7], None]]))
    first, initial, diverged = tuned.ranked()
    assert (first.outer_lr, first.accuracies, initial.outer_steps) == (1.0, (0.5, 0.9), 0)
    assert (diverged.accuracy, diverged.loss) == (pytest.approx(0.65), float("inf"))


@pytest.mark.parametrize(
    ("gains", "is_above"), [([1, 1, 1, 0], False), ([1, 1, 1, 1, 0], True), ([0, 0], False)]
)
def test_others_are_above_the_own_settings_if_the_interval_excludes_zero(gains, is_above):
    """0.75 with an interval of 3.18 x 0.25 = 0.80; 0.8 with one of 2.78 x 0.2 = 0.56."""
    own = OuterChoice(0.1, 4, 1.0, (0.0,) * len(gains), 1.0)
    assert OuterChoice(0.2, 4, 1.0, tuple(map(float, gains)), 1.0).is_above(own) == is_above


@pytest.mark.parametrize(("others", "kept"), [([1.0, 1.0, 1.0, 0.9], False), ([1.0, 1.0, 1.0, 0.0], True)])
def test_the_own_settings_stay_unless_others_are_clearly_better(
    rows, tmp_path, monkeypatch, capsys, others, kept
):
    def trial(self, fold, rate, signals):
        accuracies = others if rate == RATES[1] else [0.0] * 4
        return Trial(fold, rate, 1.0, [[*point, accuracies, 1.0] for point in self.points(rate)])

    monkeypatch.setattr(OuterTuning, "trial", trial)
    section = {"outer_lrs": RATES, "init_interpolations": [1.0], "episodes": 4}
    train(config_of(tmp_path / "run", rows, section, outer_lr=RATES[0]))
    assert ("these are kept" in capsys.readouterr().out) == kept
    assert chosen_in(tmp_path / "run") == ((RATES[0], STEPS, 1.0) if kept else (RATES[1], 2, 1.0))


def test_a_stop_keeps_finished_trials_and_the_same_command_continues(rows, tmp_path, monkeypatch, capsys):
    signals, whole = Signals(leave=lambda code: None), tmp_path / "whole"
    train(config_of(whole, rows))
    real = tune_outer_loop.store

    def stop_after_the_first(file, values, world):
        real(file, values, world)
        signals.adopt("SIGTERM")

    monkeypatch.setattr(tune_outer_loop, "store", stop_after_the_first)
    with pytest.raises(Stopped) as error:
        train(config_of(tmp_path / "run", rows), signals)
    check_message(str(error.value), "stopped by SIGTERM", "after 1 of 2 trials", "the same command")
    monkeypatch.setattr(tune_outer_loop, "store", real)
    capsys.readouterr()
    train(config_of(tmp_path / "run", rows))
    out = capsys.readouterr().out
    assert "1 trial of 2 from" in out
    assert "trial 1 of 2:" not in out
    scores = [[trial["scores"] for trial in choice_in(one)["trials"]] for one in (whole, tmp_path / "run")]
    assert scores[0] == scores[1]
    assert same(whole, tmp_path / "run")


def test_trials_that_are_no_better_than_the_initial_weights_are_warned_of(rows, tmp_path, capsys):
    section = {"outer_lrs": [1e-12], "init_interpolations": [1.0], "episodes": 3}
    train(config_of(tmp_path / "run", rows, section))
    assert "the choice is not above the initial weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"outer_lrs": [0]}, ("outer_lrs=0.0", "no positive number")),
        ({"outer_lrs": ["nan"]}, ("outer_lrs=nan", "no positive number")),
        ({"init_interpolations": [1.5]}, ("init_interpolations=1.5", "(0, 1]")),
        ({"outer_lrs": [0.1], "folds": 1}, ("folds=1 is below 2",)),
        ({"outer_lrs": [0.1], "episodes": 0}, ("episodes=0 is below 1",)),
        ({"outer_lrs": [0.1], "minutes": 0}, ("minutes=0", "or leave it out")),
        ({"outer_lrs": [0.1], "inner_lrs": [0.1]}, ("tune sets inner_lrs and outer_lrs", "one loop")),
        ({"outer_lrs": [0.1], "max_step": 3}, ("tune sets max_step,", "did you mean max_steps?")),
        ({"outer_lrs": [1e33, 1e39]}, ("tune=", "outer_lr=1e+39")),
        ({"outer_lrs": "fast"}, ("tune sets outer_lrs=fast", "not a number")),
    ],
)
def test_a_bad_section_is_refused_in_one_line(values, parts):
    check_message(refusal(check_section, Config(tune=json.dumps(values))), *parts)


def test_an_algorithm_without_training_is_refused():
    config = Config(algorithm="none", tune=json.dumps(SECTION))
    check_message(
        refusal(check_section, config), "tune sets outer_lrs", "algorithm=none", "leave the section"
    )
