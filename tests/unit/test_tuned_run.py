"""A recipe's tune section chooses the inner loop before training; `minutes` bounds it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fmmeta.cli import parse
from fmmeta.common.errors import Stopped
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import TuneConfig
from fmmeta.evaluation.tune import section_of, tune
from fmmeta.train import train
from tests.support.helpers import refusal
from tests.support.messages import check_message
from tests.support.models import write_classes
from tests.support.short_runs import QUICK, same

SHORT = {**QUICK, "outer_steps": 2, "save_steps": 0}
SECTION = "tune:\n  minutes: 5\n  episodes: 2\n  inner_lrs: [0.02, 0.7]\n  max_steps: 2\n"


def recipe(tmp_path, text: str) -> str:
    lines = "".join(f"{name}: {value}\n" for name, value in SHORT.items())
    (tmp_path / "mine.yaml").write_text(lines + text)
    return str(tmp_path / "mine.yaml")


def test_the_choice_is_trained_with_and_config_yaml_holds_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = [recipe(tmp_path, SECTION), "--output_dir", "run"]
    train(parse(argv))
    assert "2 episodes of the valid split" in capsys.readouterr().out
    settings = json.loads(Path("run/run.json").read_text())["settings"]
    (stored,) = Path("run").glob("tuned-*.json")
    chosen = json.loads(stored.read_text())
    assert chosen["inner_lr"] in (0.02, 0.7)
    assert chosen["trials"] == 2
    assert {name: settings[name] for name in ("head_init", "inner_lr", "inner_steps", "tune")} == {
        **{name: chosen[name] for name in ("head_init", "inner_lr", "inner_steps")},
        "tune": None,
    }
    train(parse(argv))  # the same command finds its choice, and its run
    out = capsys.readouterr().out
    assert "of the valid split" not in out
    assert "holds this run, finished" in out
    train(parse(["run/config.yaml", "--output_dir", "again"]))
    assert same(Path("run"), Path("again"))
    for damaged in ("[1", "[]", "{}", "\xff", json.dumps({**chosen, "inner_lr": "fast"})):
        stored.write_bytes(damaged.encode("latin-1"))
        assert refusal(train, parse(argv)).startswith(
            f"{stored} holds no choice of this tune section; remove it"
        )


def test_the_section_takes_model_and_tasks_from_the_run(tmp_path):
    config = parse([recipe(tmp_path, SECTION), "--dataset", "rows.csv", "--max_length", "24"])
    settings = section_of(config)
    assert (settings.minutes, settings.episodes, settings.inner_lrs) == (5.0, 2, [0.02, 0.7])
    assert (settings.dataset, settings.max_length, settings.n_way, settings.k_shot) == (
        ["rows.csv"],
        24,
        "2",
        [1],
    )
    assert (settings.head_inits, settings.seed) == (["zero"], 42)


def test_a_section_tunes_the_inner_loop_of_the_training_whatever_the_base_was_tuned_for(llama, tmp_path):
    """Training puts no examples into prompts, also if the base stores a method that does."""
    model = shutil.copytree(llama, tmp_path / "model")
    (model / "fmmeta.json").write_text(json.dumps({"method": "in_context"}))
    config = Config(model_name_or_path=str(model), dataset=["words"], task_type="causal_lm", tune="{}")
    assert section_of(config).with_method().method == ["finetune"]
    config = TuneConfig(model_name_or_path=str(model), dataset=["words"], task_type="causal_lm")
    assert config.with_method().method == ["finetune+in_context"]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"tune": "minutes"}, ("tune='minutes'", "write, say,")),
        ({"tune": "[1]"}, ("tune='[1]'", "write, say,")),
        ({"tune": '{"minute": 5}'}, ("tune sets minute", "did you mean minutes?", "use ")),
        ({"tune": '{"dataset": "letters"}'}, ("tune sets dataset", "use ")),
        ({"tune": '{"minutes": "soon"}'}, ("tune sets minutes=soon", "not a number")),
        ({"tune": '{"minutes": 0}'}, ("minutes=0", "or leave it out")),
        ({"tune": '{"minutes": [1, 2]}'}, ("tune sets minutes=[1, 2]", "write `minutes: value`")),
        ({"tune": '{"inner_lrs": [[1]]}'}, ("tune sets inner_lrs", "nested")),
        (
            {"tune": "{}", "algorithm": "protonet"},
            ("inner_steps=0", "algorithm=protonet", "leave the section out"),
        ),
        ({"tune": "{}", "inner_lr_groups": ["head=10"]}, ("inner_lr_groups=", "leave it out")),
    ],
)
def test_a_bad_section_is_refused_in_one_line(values, parts):
    check_message(refusal(section_of, Config(**values)), *parts)


def test_an_inner_loop_that_the_run_cannot_use_is_refused_before_the_first_trial():
    second = {"algorithm": "maml", "tune": '{"inner_optimizers": ["adamw"]}'}
    check_message(refusal(section_of, Config(**second)), "tune=", "inner_optimizer=adamw", "algorithm=maml")
    head = {"algorithm": "proto_maml", "tune": '{"head_inits": ["zero"]}'}
    check_message(refusal(section_of, Config(**head)), "tune=", "head_init=zero", "algorithm=proto_maml")


def test_the_inner_loop_is_chosen_again_for_other_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for stored, classes in ((1, 15), (2, 14)):
        write_classes(tmp_path / "rows.jsonl", classes=classes)
        argv = [recipe(tmp_path, SECTION), "--dataset", "rows.jsonl", "--run_name", f"run-{classes}"]
        train(parse(argv))
        assert len([*Path("runs").glob("tuned-*.json")]) == stored
    assert "2 episodes of the valid split" in capsys.readouterr().out


def test_no_choice_is_tried_after_the_minutes(tmp_path, capsys, terminal):
    settings = TuneConfig(
        n_way="2",
        k_shot=[1],
        num_query=1,
        max_length=16,
        episodes=2,
        inner_lrs=[0.1, 0.2, 0.4],
        max_steps=1,
        head_inits=["zero"],
        minutes=1e-6,
        output=str(tmp_path / "choice.json"),
    )
    (first,) = tune(settings)
    assert first.inner_lr == 0.1
    assert "minutes=1e-06 are over after 1 of 3 trials" in capsys.readouterr().out
    stored = json.loads((tmp_path / "choice.json").read_text())["tuned"]
    assert (stored["trials"], stored["of"]) == (1, 3)


def test_a_signal_while_tuning_says_what_is_stored(tmp_path, monkeypatch):
    def stop(self):
        raise Stopped("SIGTERM")

    monkeypatch.setattr("fmmeta.evaluation.tune.TuneRun.run", stop)
    config = Config(tune='{"episodes": 1}', output_dir=str(tmp_path), num_workers="0")
    with pytest.raises(Stopped) as error:
        train(config)
    check_message(str(error.value), "stopped by SIGTERM", "nothing is stored", "the same command")
