"""`outer_epochs` counts outer steps; a `tune` section with init_interpolations chooses what is exported."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fmmeta.cli import parse
from fmmeta.common.errors import Stopped
from fmmeta.config.settings import Config
from fmmeta.evaluation import tune
from fmmeta.evaluation.tune import (
    InterpolationConfig,
    choose,
    class_accuracies,
    folds_of,
    section_of,
    with_stored_choice,
)
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.load import load_sources
from fmmeta.train import train
from fmmeta.training.build import with_outer_epochs
from tests.support.helpers import refusal
from tests.support.messages import check_message
from tests.support.models import byte_tokenizer, write_classes, write_pairs
from tests.support.short_runs import QUICK, same, theta_of

SHORT = {
    **QUICK,
    "algorithm": "protonet",
    "inner_steps": 0,
    "feature_norm": 3.0,
    "outer_steps": 6,
    "outer_lr": 0.01,
    "save_steps": 0,
    "meta_batch_size": 2,
}
SECTION = {"init_interpolations": [0, 0.4, 1], "episodes": 30, "folds": 2}
NO_LOOP = {"algorithm": "fomaml", "inner_steps": 1, "feature_norm": 0.0}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("data") / "rows.jsonl", classes=12, rows=6)


@pytest.fixture(scope="module")
def all_trained(rows):
    """A file of splits that holds no class out."""
    path = rows.parent / "splits.json"
    path.write_text(json.dumps({"train": [f"c{number}" for number in range(12)], "valid": [], "test": []}))
    return str(path)


def config_of(folder, data, section=SECTION, **changes):
    values = {**SHORT, "dataset": [str(data)], "output_dir": str(folder), **changes}
    return Config(**values, tune=section and json.dumps(section))


def run_of(folder):
    return json.loads(Path(folder, "run.json").read_text())


@pytest.mark.parametrize("changes", [{}, NO_LOOP], ids=["class means", "inner loop"])
def test_with_validation_classes_the_choice_is_made_at_the_end_and_exported(rows, tmp_path, changes, capsys):
    """The exported weights are those of a run with the chosen interpolation."""
    train(config_of(tmp_path / "run", rows, {**SECTION, "outer_steps_with_folds": 4}, **changes))
    out, run = capsys.readouterr().out, run_of(tmp_path / "run")
    assert "accuracy on validation tasks: " in out
    assert "fold 1" not in out
    assert not [*(tmp_path / "run").glob("tuned-*.json")]
    assert run["init_interpolation"] in (0, 0.4, 1)
    assert run["outer_steps"] == 6
    if run["init_interpolation"]:
        fixed = {"init_interpolation": run["init_interpolation"], "test_episodes": 3}
        train(config_of(tmp_path / "fixed", rows, None, **changes, **fixed))
        torch.testing.assert_close(theta_of(tmp_path / "run"), theta_of(tmp_path / "fixed"))


def test_without_validation_classes_folds_are_scored_before_training(rows, all_trained, tmp_path, capsys):
    """The run after the trials is the run of the chosen settings, and the same command finds the choice."""
    section = {**SECTION, "outer_steps_with_folds": 5}
    train(config_of(tmp_path / "run", rows, section, class_splits=all_trained))
    out = capsys.readouterr().out
    assert run_of(tmp_path / "run")["outer_steps"] == 5
    assert "fold 1 of 2: 3 outer steps without 6 classes; accuracy on them: " in out
    assert "fold 2 of 2: " in out
    (file,) = (tmp_path / "run").glob("tuned-*.json")
    choice = json.loads(file.read_text())
    assert [(alpha, len(each)) for alpha, each in choice["scores"]] == [(0, 12), (0.4, 12), (1, 12)]
    assert all(0 <= one <= 1 for _, each in choice["scores"] for one in each)
    settings = run_of(tmp_path / "run")["settings"]
    assert (settings["tune"], settings["init_interpolation"]) == (None, choice["init_interpolation"])
    train(parse([str(tmp_path / "run" / "config.yaml"), "--output_dir", str(tmp_path / "again")]))
    assert same(tmp_path / "run", tmp_path / "again")
    capsys.readouterr()
    train(config_of(tmp_path / "run", rows, section, class_splits=all_trained))
    out = capsys.readouterr().out
    assert "holds this run, finished" in out
    assert "fold 1" not in out


def test_an_inner_loop_is_scored_in_episodes(rows, all_trained, tmp_path):
    train(config_of(tmp_path / "run", rows, class_splits=all_trained, **NO_LOOP))
    (file,) = (tmp_path / "run").glob("tuned-*.json")
    assert [len(each) for _, each in json.loads(file.read_text())["scores"]] == [60, 60, 60]


@pytest.mark.parametrize("changes", [{"outer_lr": 1e30}, {"task_schedule": "dynamic"}], ids=str)
def test_a_training_that_diverges_keeps_the_initial_weights(
    rows, all_trained, tmp_path, changes, monkeypatch
):
    """Interpolation 0: nothing is trained, also where groups claim tasks."""
    worst = {0.0: [0.9] * 4, 0.4: [0.1] * 4, 1.0: [0.1] * 4}
    if "task_schedule" in changes:
        monkeypatch.setattr(tune, "interpolation_scores", lambda *args: worst)
    train(config_of(tmp_path / "run", rows, class_splits=all_trained, **changes))
    assert run_of(tmp_path / "run")["settings"]["init_interpolation"] == 0
    train(config_of(tmp_path / "none", rows, None, algorithm="none", class_splits=all_trained))
    assert same(tmp_path / "run", tmp_path / "none")


@pytest.mark.parametrize(
    ("initial", "more", "offered", "chosen", "says"),
    [
        ([0.5] * 4, [0.9, 0.9, 0.9, 0.5], [0, 0.6], 0.3, "none is significantly above it"),
        ([0.5] * 4, [0.9, 0.9, 0.9, 0.8], [0, 0.6], 0.6, "0.6, significantly above the run's own 0.3"),
        ([0.7] * 4, [0.6] * 4, [0, 0.6], 0.0, "0, significantly above the run's own 0.3"),
        ([0.7] * 4, [0.6] * 4, [0.6], 0.3, "the weights at the start are above that"),
        ([0.9, 0.9, 0.9, 0.5], [0.6] * 4, [0, 0.6], 0.3, "the weights at the start are above that"),
        ([0.6] * 4, [0.6] * 4, [0, 0.6], 0.3, "none is significantly above it"),
    ],
)
def test_the_own_interpolation_stays_unless_another_is_clearly_better(initial, more, offered, chosen, says):
    """0.2 with an interval of 3.18 x 0.1 = 0.32 is not above; 0.275 with one of 3.18 x 0.025 = 0.08 is."""
    scores, lines = {0.0: initial, 0.3: [0.6] * 4, 0.6: more}, []
    section, progress = InterpolationConfig(init_interpolations=offered), SimpleNamespace(notice=lines.append)
    assert choose(scores, 0.3, section, "2 folds", progress) == chosen
    assert says in "\n".join(map(str, lines))


def test_class_accuracies_are_those_of_class_means():
    """Two classes on axes and one that is random between them; a class of two rows has one example."""
    apart = [torch.eye(3)[one].repeat(8, 1) for one in range(3)]
    assert class_accuracies(apart, 5, 5, 20).tolist() == [1, 1, 1]
    mixed = [torch.eye(2).repeat(400, 1), *(torch.eye(2)[one].repeat(2, 1) for one in range(2))]
    found = class_accuracies(mixed, 5, 1, 300)
    assert found[0] == pytest.approx(0.25, abs=0.1)  # one example of another row's kind, or a tie
    rare = class_accuracies([torch.eye(2)[[one % 2] * 2] for one in range(50)], 2, 1, 1)
    assert np.isfinite(rare).sum() == 2


def test_a_stop_in_a_fold_ends_the_run_with_nothing_stored(rows, all_trained, tmp_path, monkeypatch):
    real = tune.interpolation_scores

    def stop_after_the_first(*args):
        found = real(*args)
        signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(tune, "interpolation_scores", stop_after_the_first)
    with pytest.raises(Stopped) as error:
        train(config_of(tmp_path / "run", rows, class_splits=all_trained))
    check_message(str(error.value), "stopped by SIGTERM while settings", "the same command begins again")
    assert not [*(tmp_path / "run").glob("tuned-*.json")]


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_fold(
    rows, all_trained, tmp_path, monkeypatch
):
    monkeypatch.setattr(tune, "interpolation_scores", None)
    (tmp_path / "file").write_text("")
    config = config_of(tmp_path / "file" / "run", rows, class_splits=all_trained)
    check_message(refusal(train, config), "output_dir=", "cannot be made")


@pytest.mark.parametrize("text", ["[]", "{}", "3", '"a"', '{"scores": []}', "{", "[" * 10**5])
def test_a_file_without_a_choice_is_refused(text):
    check_message(
        refusal(with_stored_choice, Config(), text.encode(), Path("tuned-1.json"), ["init_interpolation"]),
        "tuned-1.json holds no choice",
        "remove it",
    )


@pytest.mark.parametrize(
    ("epochs", "most", "steps"), [(5, 100, 30), (5, 7, 7), (0.01, 100, 1)], ids=["epochs", "at most", "least"]
)
def test_outer_epochs_count_the_steps_that_draw_each_row_as_often(rows, epochs, most, steps):
    """72 rows; episodes of two classes, two rows of each; three tasks a step: 12 rows."""
    config = Config(
        **{**SHORT, "meta_batch_size": 3, "outer_steps": most}, dataset=[str(rows)], outer_epochs=epochs
    )
    sources, lines = load_sources(config.but(n_way=2), byte_tokenizer(), lambda text: None), []
    train_rows = sources.train.num_rows()
    found = with_outer_epochs(config, sources.train, lines.append)
    assert found.outer_steps == max(1, min(most, round(epochs * train_rows / 12)))
    assert (found.outer_steps == steps) or epochs == 5
    check_message(lines[0], f"outer_steps {found.outer_steps}: ", f"{train_rows} training rows, 12 of them")


def test_outer_epochs_of_several_data_sets_and_of_a_folder_of_files(rows, tmp_path):
    more = write_classes(tmp_path / "more.jsonl", classes=9, rows=4)
    config = Config(**SHORT, dataset=[str(rows), str(more)], outer_epochs=2)
    sources = load_sources(config, byte_tokenizer(), lambda text: None)
    assert sources.train.num_rows() == sum(one.num_rows() for one in sources.train.sources)
    joint = Config(**{**SHORT, "algorithm": "joint", "inner_steps": 1}, dataset=[str(rows)])
    assert load_sources(joint, byte_tokenizer(), lambda text: None).train.num_rows() % 6 == 0
    (tmp_path / "files" / "s").mkdir(parents=True)
    for number in range(4):
        write_classes(tmp_path / "files" / "s" / f"t{number}.jsonl", classes=3, rows=4)
    config = Config(**SHORT, dataset=[str(tmp_path / "files")], outer_epochs=2)
    files = load_sources(config, byte_tokenizer(), lambda text: None).train
    check_message(refusal(with_outer_epochs, config, files, print), "outer_epochs", "give outer_steps")


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
    held_out = [[*fold.valid.items.names] for fold in folds]
    assert len(folds) == (2 if kind == "two data sets" else 3)
    if kind != "two data sets":
        assert sorted(name for names in held_out for name in names) == sorted(whole.items.names)
        assert max(map(len, held_out)) - min(map(len, held_out)) <= 1
    for fold, held in zip(folds, held_out, strict=True):
        assert not {*fold.train.items.names} & {*held}
        for part in (fold.train, fold.valid):
            here = {name.rpartition("/")[2] for name in part.items.names}
            for task in Schedule(part.items, len(part.items), 1).meta_batch(0):
                draw = part.draw(task)
                assert len({label for _, label in draw.support}) == (1 if kind == "tasks" else 2)
                if kind in ("classes", "two data sets"):
                    assert {*draw.classes} <= here
    if kind == "two data sets":  # three classes of the first: the part of one class has none of it
        few = {name for name in whole.items.names if name.startswith("rows/")}
        assert len(few) == 3
        assert sorted(len(few & {*held}) for held in held_out) == [0, 2]
    if kind == "joint":
        assert len(sources.numbers) == len(whole.items)
        assert all(fold.numbers == sources.numbers for fold in folds)


def test_few_classes_make_two_folds_of_smaller_episodes(tmp_path):
    def sources_of(n_way, *counts):
        data = [write_classes(tmp_path / f"{n}-{i}.jsonl", classes=n, rows=4) for i, n in enumerate(counts)]
        config = Config(n_way=n_way, k_shot=1, num_query=1, dataset=list(map(str, data)))
        return load_sources(config, byte_tokenizer(), lambda text: None), 3, config

    folds = folds_of(*sources_of(4, 5))
    assert [(len(fold.train.items), len(fold.valid.items)) for fold in folds] == [(2, 3), (3, 2)]
    draw = folds[0].valid.draw(Schedule(folds[0].valid.items, 1, 1).meta_batch(0)[0])
    assert len(draw.classes) == 3
    message = refusal(folds_of, *sources_of(2, 2, 2))
    check_message(message, "dataset=2-0 2-1", "give validation classes")
    check_message(refusal(folds_of, *sources_of(2, 3)), "dataset=", "has 3", "leave the section out")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"init_interpolations": [1.5]}, ("init_interpolations=1.5", "[0, 1]")),
        ({"init_interpolations": ["nan"]}, ("init_interpolations=nan", "[0, 1]")),
        ({"init_interpolations": [0], "folds": 1}, ("folds=1 is below 2",)),
        ({"init_interpolations": [0], "episodes": 0}, ("episodes=0 is below 1",)),
        ({"init_interpolations": [0], "inner_lrs": [0.1]}, ("tune sets inner_lrs and init_interpolations",)),
        ({"init_interpolations": [0], "fold": 3}, ("tune sets fold,", "did you mean folds?")),
        ({"init_interpolations": "fast"}, ("tune sets init_interpolations=fast", "not a number")),
        (SECTION, ("tune sets init_interpolations", "algorithm=none", "leave the section")),
    ],
)
def test_a_bad_section_is_refused_in_one_line(values, parts):
    algorithm = "none" if values is SECTION else "fomaml"
    check_message(refusal(section_of, Config(algorithm=algorithm, tune=json.dumps(values))), *parts)
