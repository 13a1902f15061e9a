"""`fmmeta tune`: the lowest loss over heads, rates and numbers of steps, as evaluation sees it, and stored
with the model; the `tune` section of a recipe, which chooses the inner loop before training (`minutes` bounds
it) or, with init_interpolations, what is exported; `outer_epochs`, which counts outer steps.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import fmmeta
from fmmeta import Config, MetaTrainer, cli
from fmmeta.cli import parse
from fmmeta.common.errors import Stopped
from fmmeta.common.progress import Progress
from fmmeta.evaluation import tune as tuning
from fmmeta.evaluation.settings import TuneConfig
from fmmeta.evaluation.tune import (
    CHOSEN,
    InterpolationConfig,
    TuneRun,
    choose,
    class_accuracies,
    folds_of,
    section_of,
    tune,
    with_stored_choice,
)
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.load import load_sources
from fmmeta.train import train
from fmmeta.training.build import with_outer_epochs
from tests.support.helpers import recorded, refusal
from tests.support.messages import check_message, check_text
from tests.support.models import FROZEN, with_settings, write_classes, write_pairs
from tests.support.short_runs import QUICK, same, theta_of

FLAGS: dict[str, Any] = {"n_way": "3", "k_shot": [2], "num_query": 3, "episodes": 4, "max_steps": 3}
SAME: dict[str, Any] = {"eval_split": "valid", "n_way": "3", "k_shot": 2, "num_query": 3, "episodes": 4}
PAIRS: dict[str, Any] = {"task_type": "causal_lm", "k_shot": [2], "num_query": 2, "episodes": 2}


def tuned(model, data, shown: bool = False, **flags):
    """The choices that `fmmeta tune` tried, the best one first."""
    settings = TuneConfig(model_name_or_path=str(model), dataset=[str(data)], **flags)
    return tune(settings, progress=Progress(shown))


def same_loss(choice, model, data, **flags):
    """The choice has the loss of an evaluation."""
    found = fmmeta.evaluate(model, data, **{**SAME, **flags})
    assert found["loss"] == pytest.approx(choice.loss, rel=1e-5), choice


def stored(model) -> dict[str, Any]:
    return json.loads(Path(model, "fmmeta.json").read_text())


def fail_at_the_third(patch, error: BaseException) -> list:
    """Let the third trial raise an error; the list gets the results of those before it."""
    return recorded(patch, TuneRun, "score", at=2, error=error)


@pytest.mark.slow
def test_the_choice_is_the_best_of_all_evaluations(bert, tmp_path):
    """Of a model that has a learned head; the tuned model needs no flags any more."""
    model, rates = trained(bert, tmp_path / "run", head_init="learned"), [0.05, 0.5]
    tuned_model = shutil.copytree(model, tmp_path / "model")
    tried = tuned(tuned_model, "letters", inner_lrs=rates, **FLAGS)
    losses = {
        choice: fmmeta.evaluate(
            model, "letters", **SAME, head_init=choice[0], inner_lr=choice[1], inner_steps=choice[2]
        )["loss"]
        for choice in itertools.product(("zero", "learned", "prototype"), rates, (1, 2, 3))
    }
    assert len(tried) == 6
    for one in tried:
        assert one.loss == pytest.approx(losses[one.head_init, one.inner_lr, one.inner_steps], rel=1e-5)
    best, memory = min(losses, key=lambda key: losses[key]), stored(tuned_model)
    assert (tried[0].head_init, tried[0].inner_lr, tried[0].inner_steps) == best
    assert (memory["head_init"], memory["inner_lr"], memory["inner_steps"]) == best
    same_loss(tried[0], tuned_model, "letters")
    heads = {one.head_init: one.loss for one in tried}
    assert heads["zero"] != pytest.approx(heads["learned"], rel=1e-3)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"pooling": "mean", "feature_norm": 3.0, "head_inits": ["zero"]}, {}),
        ({"head_inits": ["zero"]}, {"class_weights": "weights.json"}),
        ({"head_inits": ["learned"]}, {}),  # of a classifier that fmmeta has not written
    ],
)
def test_the_stored_loss_is_that_of_the_stored_settings(bert, classes, tmp_path, monkeypatch, asked, kept):
    model = shutil.copytree(bert, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    Path("weights.json").write_text(json.dumps({f"c{number}": 1.0 + number for number in range(15)}))
    best = tuned(model, classes, inner_lrs=[0.5], **FLAGS, **asked, **kept)[0]
    same_loss(best, model, classes, **kept)
    plain = fmmeta.evaluate(bert, classes, **SAME, inner_lr=0.5, inner_steps=best.inner_steps)
    assert abs(plain["loss"] - best.loss) > 1e-4


def test_rates_of_a_model_keep_their_proportions(bert, classes, tmp_path):
    """A model that learns with its head alone still does: the stored rates are scaled."""
    rates = {"head": [0.4], **{layer: [0.0] for layer in FROZEN}}
    own = {"inner_lr": 0.4, "inner_rates": rates, "algorithm": "anil"}
    model = with_settings(bert, tmp_path / "model", **own)
    best = tuned(model, classes, inner_lrs=[0.1, 0.2], head_inits=["zero"], **FLAGS)[0]
    assert stored(model)["inner_rates"] == {**rates, "head": [pytest.approx(best.inner_lr)]}
    assert stored(model)["algorithm"] == "anil"
    same_loss(best, model, classes)


def trained(model, folder, **settings):
    """The folder of a model that was trained for two outer steps on 3-way tasks."""
    few: dict[str, Any] = {
        "model_name_or_path": str(model),
        "pooling": "mean",
        "n_way": 3,
        "k_shot": 2,
        "num_query": 3,
        "inner_steps": 2,
        "meta_batch_size": 2,
        "outer_steps": 2,
        "outer_lr": 0.05,
        "eval_episodes": 0,
        "save_steps": 0,
    }
    run = MetaTrainer(Config(**{**few, **settings, "output_dir": str(folder)})).train()
    return str(run.output_dir / "model")


@pytest.mark.parametrize(
    ("run", "rate", "flags"),
    [
        ({"algorithm": "meta_sgd"}, 0.5, {}),
        ({}, 0.01, {"inner_optimizer": "adamw", "feature_norm": 2.0}),
        ({"algorithm": "meta_sgd"}, 0.01, {"inner_optimizer": "adamw"}),
        ({"inner_lr_learned": "layer"}, 0.01, {"inner_optimizer": "adamw"}),
    ],
)
def test_evaluation_of_the_tuned_model_gives_the_scored_loss(bert, run, rate, flags, tmp_path):
    """Rates by element are scaled, or dropped with another optimizer; settings given by flags are stored."""
    model = trained(bert, tmp_path / "run", **run)
    for _ in range(2):  # again: from what the first one stored
        best = tuned(model, "letters", head_inits=["zero"], inner_lrs=[rate], **flags, **FLAGS)[0]
        same_loss(best, model, "letters")
    assert flags.items() <= stored(model).items()


def test_a_learned_head_needs_the_same_number_of_classes(bert, tmp_path, capsys):
    model = trained(bert, tmp_path / "run", head_init="learned", n_way_max=5)
    classes, width = load_file(Path(model) / "head.safetensors")["head.weight"].shape
    assert classes == stored(model)["classes"] == 5
    flags = {**SAME, "inner_steps": 0}
    chance = fmmeta.evaluate(model, "letters", **flags, quiet=False)["loss"]
    assert "head is for 5 classes; those of 3 " in capsys.readouterr().out
    assert chance == pytest.approx(math.log(3))
    learned = fmmeta.evaluate(model, "letters", **flags, n_way_max=5)["loss"]
    assert learned != pytest.approx(math.log(3), abs=1e-3)
    check_message(
        refusal(fmmeta.evaluate, model, "letters", **flags, head_init="learned"),
        "head_init=learned",
        model,
        f"{width}]",
        "use --head_init zero",
    )


def test_a_frozen_head_needs_its_number_of_classes(bert, tmp_path):
    model = trained(bert, tmp_path / "run", algorithm="boil")
    assert fmmeta.evaluate(model, "letters", **SAME)["accuracy"] > 0
    check_message(
        refusal(fmmeta.evaluate, model, "letters", **{**SAME, "n_way": "4"}),
        "head_init=zero: the inner loop does not change the head (inner_parameters=all except head",
        "tasks of as many classes",
    )


@pytest.mark.parametrize("algorithm", ["anil", "meta_sgd"])
def test_stored_rates_survive_other_numbers_of_steps_and_an_adaptation(bert, algorithm, tmp_path):
    model, one = trained(bert, tmp_path / "run", algorithm=algorithm), tmp_path / "one"
    pairs = [(f"{letter * 4}{place}", letter) for letter in "abc" for place in range(2)]
    adapted = fmmeta.adapt(model, pairs, output_dir=one, inner_steps=3, early_stopping=False)
    began, here = AutoModel.from_pretrained(model), AutoModel.from_pretrained(one)
    moved = [name for name, param in here.named_parameters() if not param.equal(began.get_parameter(name))]
    assert adapted.inner_steps == 3
    assert (moved == []) == (algorithm == "anil")
    if algorithm == "anil":
        first, second = (
            {name: column[0] for name, column in stored(folder)["inner_rates"].items()}
            for folder in (model, one)
        )
        assert first == second
    else:
        first, second = (load_file(Path(folder) / "inner_lr.safetensors") for folder in (model, one))
        assert all(first[name].equal(second[name]) for name in first)


def test_a_choice_in_a_file_is_a_recipe_of_the_other_commands(bert, classes, tmp_path):
    file = tmp_path / "choice.json"
    best = tuned(bert, classes, output=str(file), inner_lrs=[0.5], pooling="mean", **FLAGS)[0]
    words = ["--config", str(file), "--model_name_or_path", str(bert)]
    found = cli.parse([*words, "--support", str(classes), "--output_dir", str(tmp_path / "out")], "adapt")
    assert [getattr(found, name) for name in CHOSEN] == [getattr(best, name) for name in CHOSEN]
    same = vars(cli.parse([*words, "--dataset", str(classes)], "evaluate"))
    given = {
        name: same[name] for name in ("head_init", "inner_lr", "inner_optimizer", "inner_steps", "pooling")
    }
    same_loss(best, bert, classes, **given)
    file.write_text('{"tuned": {}, "method": "finetune+in_context", "task_type": "causal_lm"}')
    assert cli.parse(words, "evaluate").method == ["finetune+in_context"]
    plain = {"tuned": {}, "inner_lr": 0.3, "inner_rates": {"head": [0.1 * 3, 0.3], "layers.0": [0.3, 0.3]}}
    file.write_text(json.dumps(plain))  # of every model that was trained without learned rates
    assert cli.parse(words, "evaluate").inner_lr == 0.3
    file.write_text(json.dumps({**plain, "inner_rates": {"head": [0.3], "layers.0": [0]}}))
    check_message(refusal(cli.parse, words, "evaluate"), f"config={file}", "learned inner rates", "copy it")


def test_language_models_have_rates_and_steps_only(tmp_path):
    """SGD is tried beside AdamW, without the stored epsilon of that, which is not stored with SGD either."""
    pairs, model = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "model"
    flags = {"inner_optimizer": "adamw", "inner_epsilon": 1e-3, "early_stopping": False, "lora_r": 2}
    fmmeta.adapt("tiny", [("a b", "c"), ("d", "e")], task_type="causal_lm", output_dir=model, **flags)
    asked, output = {**PAIRS, "max_steps": 2, "inner_lrs": [0.1]}, tmp_path / "deep" / "choice.json"
    tried = tuned(model, pairs, **asked)
    assert sorted(one.inner_optimizer for one in tried) == ["adamw", "sgd"]
    best, memory = tried[0], stored(model)
    assert (memory["inner_steps"], memory["inner_optimizer"]) == (best.inner_steps, best.inner_optimizer)
    assert memory["inner_epsilon"] == (1e-3 if best.inner_optimizer == "adamw" else 1e-8)
    tried = tuned("tiny", pairs, **asked, output=str(output))
    assert {(one.head_init, one.inner_lr) for one in tried} == {("zero", 0.1)}
    assert json.loads(output.read_text())["inner_optimizer"] == tried[0].inner_optimizer
    assert [*output.parent.iterdir()] == [output]
    check_message(
        refusal(tuned, model, pairs, **asked, head_inits=["zero"]),
        "head_inits=zero means nothing for task_type=causal_lm",
        "leave it out",
    )


def test_an_inner_loop_with_prompts_is_tuned_and_becomes_the_default(llama, tmp_path, capsys, terminal):
    """What evaluate and adapt do with the tuned model is what was scored."""
    pairs, model = write_pairs(tmp_path / "pairs.jsonl"), shutil.copytree(llama, tmp_path / "model")
    same: dict[str, Any] = {"num_query": 2, "episodes": 3, "eval_split": "valid"}
    asked = {**PAIRS, "max_steps": 3, "inner_lrs": [0.02], "inner_optimizers": ["sgd"], **same}
    best = tuned(model, pairs, shown=True, **asked, method=["finetune+in_context"])[0]
    shown = "".join(capsys.readouterr())
    assert "best: method finetune+in_context, inner_optimizer sgd, inner_lr 0.02" in shown
    same_loss(best, model, pairs, **same, n_way=None)
    adapted = fmmeta.adapt(model, [("a", "b"), ("c", "d")], early_stopping=False)
    assert (len(adapted.loaded.prompt_examples), adapted.inner_steps) == (2, best.inner_steps)


def test_trials_are_logged_as_they_finish_and_resumed_with_the_same_settings(
    tmp_path, monkeypatch, capsys, terminal
):
    """A signal or a failure after two of four trials leaves two to score, with the same settings."""
    data, trials = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "choice.trials.json"
    flags = {**PAIRS, "max_steps": 2, "inner_lrs": [0.01, 0.1], "output": str(tmp_path / "choice.json")}

    def logged(**more):
        """The choices, and the numbers of the trials that are logged."""
        found = tuned("tiny", data, shown=True, **{**flags, **more})
        return found, {int(number) for number in re.findall(r"trial (\d) of 4", capsys.readouterr().out)}

    with monkeypatch.context() as patch:
        scored = fail_at_the_third(patch, RuntimeError("the device failed"))
        with pytest.raises(RuntimeError, match="the device failed"):
            logged()
    out = capsys.readouterr().out
    assert [f"trial {number} of 4: sgd" in out for number in (1, 2, 3)] == [True, True, False]
    assert "min left" in out
    kept = trials.read_bytes()
    assert 1 in logged(max_steps=3)[1]
    trials.write_bytes(kept)
    resumed, numbers = logged()
    assert numbers == {3, 4}
    assert not trials.exists()
    trials.write_text("damaged")
    assert logged() == (resumed, {1, 2, 3, 4})
    assert all(one.result in resumed for one in scored)


def test_trials_of_other_settings_or_weights_are_not_used(bert, classes, tmp_path):
    """Each command completes one trial, and one more for each that it finds."""
    model, file = shutil.copytree(bert, tmp_path / "model"), tmp_path / "file.json"
    output = tmp_path / "choice.json"
    flags = {**FLAGS, "max_steps": 1, "head_inits": ["zero"], "minutes": 1e-9, "output": str(output)}

    def tried(rates=(0.1, 0.2, 0.3), **more):
        found = len(tuned(model, classes, **flags, inner_lrs=[*rates], **more))
        assert json.loads(output.read_text())["tuned"]["trials"] == found
        return found

    assert tried() == 1
    for name, contents in (
        ("class_weights", ('{"c0": 2.0}', '{"c0": 3.0}')),
        ("peft_config", ('{"r": 2}', '{"r": 4}')),
    ):
        for content in contents:
            file.write_text(content)
            assert tried(**{name: str(file)}) == 1
    changed = {name: 0.9 * one for name, one in load_file(model / "model.safetensors").items()}
    assert tried((0.1, 0.4, 0.5)) == 2  # a trial of the first command is among these
    save_file(changed, model / "model.safetensors", {"format": "pt"})
    assert tried() == 1


def test_optuna_finds_a_rate_and_the_trials_of_an_interrupted_run(bert, tmp_path, monkeypatch):
    """The interrupted run has stored another head with the model, which has a learned one."""
    pytest.importorskip("optuna", reason="optuna is optional")
    model, flags = (
        trained(bert, tmp_path / "run", head_init="learned"),
        {**FLAGS, "tuner": "optuna", "trials": 9},
    )
    score, rates = TuneRun.score, [0.01, 1.0]

    def prefers_zero(run, head, rate, optimizer):
        return replace(score(run, head, rate, optimizer), loss=1.0 + (head == "learned"))

    monkeypatch.setattr(TuneRun, "score", prefers_zero)
    with monkeypatch.context() as patch:
        first = recorded(patch, TuneRun, "log_trial", at=2, error=RuntimeError("the device failed"))
        with pytest.raises(RuntimeError, match="the device failed"):
            tuned(model, "letters", inner_lrs=rates, **flags)
    assert stored(model)["head_init"] != "learned"
    later = recorded(monkeypatch, TuneRun, "log_trial")
    resumed = tuned(model, "letters", inner_lrs=rates, **flags)
    # the same trials every time, as every rank needs them
    assert len(first) + 1 + len(later) == len({(one.head_init, one.inner_lr) for one in resumed}) == 9
    scored = {(call.args[1].head_init, call.args[1].inner_lr) for call in (*first, *later)}
    assert scored < {(one.head_init, one.inner_lr) for one in resumed}
    assert all(0.01 <= one.inner_lr <= 1.0 for one in resumed)
    assert [one.loss for one in resumed] == sorted(one.loss for one in resumed)
    assert "learned" in {one.head_init for one in resumed}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"inner_lr": 0.1}, ["inner_lr=0.1", "leave it out"]),
        ({"method": ["knn"]}, ["method=knn is unknown", "use finetune or finetune+in_context"]),
        (
            {"method": ["finetune", "finetune+in_context"]},
            ["method=finetune finetune+in_context", "give one"],
        ),
        (
            {"method": ["finetune+in_context"], "dataset": ["letters"], "output": "choice.json"},
            ["method=finetune+in_context", "task_type=classification has none", "use finetune"],
        ),
        ({"k_shot": [1, 5]}, ["k_shot=1", "give one"]),
        ({"inner_lrs": [0.0]}, ["inner_lrs=0.0", "use some such as 0.01 0.1 1"]),
        ({"head_inits": ["best"]}, ["head_inits=best", "use zero, learned or prototype"]),
        ({"max_steps": 0}, ["max_steps=0", "use 1 or more"]),
        ({"inner_optimizers": ["adam"]}, ["inner_optimizer=adam is unknown", "adamw"]),
        ({"tuner": "luck"}, ["tuner=luck", "use grid or optuna"]),
        ({"trials": 5}, ["trials=5 means nothing for tuner=grid", "use --tuner optuna"]),
        ({"max_new_tokens": 5}, ["max_new_tokens=5 means nothing for tune", "leave it out"]),
        (
            {"model_name_or_path": "acme/model"},
            ["model_name_or_path=acme/model", "give --output FILE"],
        ),
    ],
)
def test_settings_that_cannot_be_tuned_are_refused(flags, text):
    check_message(refusal(lambda: tune(TuneConfig(**flags), progress=Progress(False))), *text)


def test_a_missing_optuna_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    few = {"tuner": "optuna", "episodes": 1, "max_steps": 1, "output": str(tmp_path / "x.json")}
    check_message(
        refusal(tuned, "tiny", "letters", **few),
        "tuner=optuna needs optuna (",
        "pip install 'fmmeta[tune]', or use grid",
    )


def test_heads_that_the_model_cannot_use_are_left_out_or_refused(llama, classes, tmp_path):
    """The score layer of a Llama has no bias, so that it cannot hold prototypes."""
    flags = {**FLAGS, "inner_lrs": [0.1], "max_steps": 1, "output": str(tmp_path / "choice.json")}
    assert [one.head_init for one in tuned(llama, classes, **flags)] == ["zero"]
    for message in (
        refusal(tuned, llama, classes, **flags, head_inits=["zero", "prototype"]),
        refusal(fmmeta.evaluate, llama, classes, n_way="3", k_shot=2, head_init="prototype"),
    ):
        check_message(message, "head_init=prototype", "LlamaForSequenceClassification", "--pooling mean")
    assert refusal(tuned, llama, classes, **flags, feature_norm=2.0).startswith("feature_norm=2 scales ")


def test_rates_that_diverge_are_never_the_best(bert, classes, tmp_path, capsys):
    choice = tmp_path / "choice.json"
    flags = {**FLAGS, "output": str(choice), "head_inits": ["zero"], "shown": True}
    check_message(
        refusal(tuned, bert, classes, **flags, inner_lrs=[1e30, 1e35]),
        "inner_lrs=1e+30 1e+35",
        "try lower ones",
    )
    assert not choice.exists()
    tried = tuned(bert, classes, **flags, inner_lrs=[1e30, 0.1])
    assert [one.inner_lr for one in tried] == [0.1, 1e30]
    assert json.loads(choice.read_text())["inner_lr"] == 0.1
    lines = map(str.split, capsys.readouterr().out.splitlines())
    assert ["zero", "sgd", "1e+30", "-", "diverged", "-"] in lines


@pytest.mark.parametrize(("own", "chosen"), [(0.1, 1e-10), (1e-9, 1e-9)])
def test_among_equal_rates_the_model_default_or_the_smallest_is_stored(own, chosen, bert, classes, tmp_path):
    """Steps this small change no printed digit of the loss."""
    model = with_settings(bert, tmp_path / "model", inner_lr=own)
    tried = tuned(model, classes, inner_lrs=[1e-8, 1e-10, 1e-9], head_inits=["zero"], **FLAGS)
    assert len({f"{one.loss:.4f}" for one in tried}) == 1
    memory = stored(model)
    assert (memory["inner_lr"], memory["inner_steps"]) == (chosen, 1)


@pytest.mark.parametrize("error", [RuntimeError("the device failed"), KeyboardInterrupt()])
def test_a_failure_keeps_the_best_so_far(error, bert, classes, tmp_path, monkeypatch, capsys, terminal):
    """One of the first trial keeps nothing."""
    model = shutil.copytree(bert, tmp_path / "model")
    run = partial(tuned, model, classes, inner_lrs=[0.05, 0.5, 1.0], head_inits=["zero"], **FLAGS)
    with monkeypatch.context() as patch:
        recorded(patch, TuneRun, "score", at=0, error=error)
        with pytest.raises(type(error)):
            run()
    assert not (model / "fmmeta.json").exists()
    calls = fail_at_the_third(monkeypatch, error)
    with pytest.raises(type(error)):
        run(shown=True)
    scored, memory = [one.result for one in calls], stored(model)
    best = min(scored, key=lambda one: one.loss)
    assert (memory["inner_lr"], memory["inner_steps"]) == (best.inner_lr, best.inner_steps)
    (chosen_on,) = memory["tuned"].pop("datasets")
    assert sorted(chosen_on["splits"]) == ["valid"]
    assert memory["tuned"] == {
        "dataset": [classes.name],
        "eval_split": "valid",
        "n_way": "3",
        "k_shot": 2,
        "num_query": 3,
        "episodes": 4,
        "seed": 42,
        "loss": best.loss,
        "accuracy": best.accuracy,
        "trials": 2,
        "of": 3,
        "head_inits": ["zero"],
    }
    check_text(capsys.readouterr().out, "2 of 3 trials", *(f"{one.loss:.4f}" for one in scored))
    assert [file.name for file in model.iterdir() if "tmp" in file.name] == []


LOOP_SECTION = "tune:\n  minutes: 5\n  episodes: 2\n  inner_lrs: [0.02, 0.7]\n  max_steps: 2\n"


def recipe(tmp_path) -> str:
    """A short run that tunes its inner loop."""
    settings = {**QUICK, "outer_steps": 2, "save_steps": 0}
    lines = "".join(f"{name}: {value}\n" for name, value in settings.items())
    (tmp_path / "mine.yaml").write_text(lines + LOOP_SECTION)
    return str(tmp_path / "mine.yaml")


def test_the_choice_is_trained_with_and_config_yaml_holds_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = [recipe(tmp_path), "--output_dir", "run"]
    train(parse(argv))
    assert "2 episodes of the valid split" in capsys.readouterr().out
    settings = json.loads(Path("run/run.json").read_text())["settings"]
    (stored,) = Path("run").glob("tuned-*.json")
    chosen = json.loads(stored.read_text())
    assert chosen["inner_lr"] in (0.02, 0.7)
    assert chosen["trials"] == 2
    assert settings["tune"] is None
    for name in ("head_init", "inner_lr", "inner_steps"):
        assert settings[name] == chosen[name]
    train(parse(argv))  # the same command finds its choice, and its run
    out = capsys.readouterr().out
    assert "of the valid split" not in out
    assert "holds this run, finished" in out
    train(parse(["run/config.yaml", "--output_dir", "again"]))
    assert same(Path("run"), Path("again"))
    for damaged in ("[1", "[]", "{}", "\xff", json.dumps({**chosen, "inner_lr": "fast"})):
        stored.write_bytes(damaged.encode("latin-1"))
        line = f"{stored} holds no choice of this tune section; remove it"
        assert refusal(train, parse(argv)).startswith(line)


def test_the_section_takes_model_and_tasks_from_the_run(tmp_path):
    found = section_of(parse([recipe(tmp_path), "--dataset", "rows.csv", "--max_length", "24"]))
    of_section = {"minutes": 5.0, "episodes": 2, "inner_lrs": [0.02, 0.7], "head_inits": ["zero"], "seed": 42}
    of_run = {"dataset": ["rows.csv"], "max_length": 24, "n_way": "2", "k_shot": [1]}
    for name, value in {**of_section, **of_run}.items():
        assert getattr(found, name) == value


def test_a_section_tunes_the_inner_loop_of_the_training_whatever_the_base_was_tuned_for(llama, tmp_path):
    """Training puts no examples into prompts, also if the base stores a method that does."""
    model = with_settings(llama, tmp_path / "model", method="in_context")
    given = {"model_name_or_path": str(model), "dataset": ["words"], "task_type": "causal_lm"}
    assert section_of(Config(**given, tune="{}")).with_method().method == ["finetune"]
    assert TuneConfig(**given).with_method().method == ["finetune+in_context"]


@pytest.mark.parametrize(
    ("section", "settings", "parts"),
    [
        ("minutes", {}, ("tune='minutes'", "write, say,")),
        ("[1]", {}, ("tune='[1]'", "write, say,")),
        ({"minute": 5}, {}, ("tune sets minute", "did you mean minutes?", "use ")),
        ({"dataset": "letters"}, {}, ("tune sets dataset", "use ")),
        ({"minutes": "soon"}, {}, ("tune sets minutes=soon", "not a number")),
        ({"minutes": 0}, {}, ("minutes=0", "or leave it out")),
        ({"minutes": [1, 2]}, {}, ("tune sets minutes=[1, 2]", "write `minutes: value`")),
        ({"inner_lrs": [[1]]}, {}, ("tune sets inner_lrs", "nested")),
        ({}, {"algorithm": "protonet"}, ("inner_steps=0", "algorithm=protonet", "leave the section out")),
        ({}, {"inner_lr_groups": ["head=10"]}, ("inner_lr_groups=", "leave it out")),
        # an inner loop that the run cannot use
        (
            {"inner_optimizers": ["adamw"]},
            {"algorithm": "maml"},
            ("tune=", "inner_optimizer=adamw", "algorithm=maml"),
        ),
        (
            {"head_inits": ["zero"]},
            {"algorithm": "proto_maml"},
            ("tune=", "head_init=zero", "algorithm=proto_maml"),
        ),
        ({"init_interpolations": [1.5]}, {}, ("init_interpolations=1.5", "[0, 1]")),
        ({"init_interpolations": ["nan"]}, {}, ("init_interpolations=nan", "[0, 1]")),
        ({"init_interpolations": [0], "folds": 1}, {}, ("folds=1 is below 2",)),
        ({"init_interpolations": [0], "episodes": 0}, {}, ("episodes=0 is below 1",)),
        (
            {"init_interpolations": [0], "inner_lrs": [0.1]},
            {},
            ("tune sets inner_lrs and init_interpolations",),
        ),
        ({"init_interpolations": [0], "fold": 3}, {}, ("tune sets fold,", "did you mean folds?")),
        ({"init_interpolations": "fast"}, {}, ("tune sets init_interpolations=fast", "not a number")),
        (
            {"init_interpolations": [0, 0.4, 1]},
            {"algorithm": "none"},
            ("tune sets init_interpolations", "algorithm=none", "leave the section"),
        ),
    ],
)
def test_a_bad_section_is_refused_in_one_line(section, settings, parts):
    text = section if isinstance(section, str) else json.dumps(section)
    check_message(refusal(section_of, Config(**settings, tune=text)), *parts)


def test_the_inner_loop_is_chosen_again_for_other_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for stored, classes in ((1, 15), (2, 14)):
        write_classes(tmp_path / "rows.jsonl", classes=classes)
        train(parse([recipe(tmp_path), "--dataset", "rows.jsonl", "--run_name", f"run-{classes}"]))
        assert len([*Path("runs").glob("tuned-*.json")]) == stored
    assert "2 episodes of the valid split" in capsys.readouterr().out


def test_no_choice_is_tried_after_the_minutes(tmp_path, capsys, terminal):
    few = {"n_way": "2", "k_shot": [1], "num_query": 1, "max_length": 16, "episodes": 2, "max_steps": 1}
    output = tmp_path / "choice.json"
    tried = {"inner_lrs": [0.1, 0.2, 0.4], "head_inits": ["zero"], "minutes": 1e-6, "output": str(output)}
    (first,) = tuning.tune(TuneConfig(**few, **tried))
    assert first.inner_lr == 0.1
    assert "minutes=1e-06 are over after 1 of 3 trials" in capsys.readouterr().out
    stored = json.loads(output.read_text())["tuned"]
    assert (stored["trials"], stored["of"]) == (1, 3)


def test_a_signal_while_tuning_says_what_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning.TuneRun, "run", Mock(side_effect=Stopped("SIGTERM")))
    config = Config(tune='{"episodes": 1}', output_dir=str(tmp_path), num_workers="0")
    with pytest.raises(Stopped) as error:
        train(config)
    check_message(str(error.value), "stopped by SIGTERM", "nothing is stored", "the same command")


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


def sources_of(config):
    return load_sources(config, byte_tokenizer(), lambda text: None)


def choice_in(folder):
    """What a run stored of the choice that it made before training."""
    (file,) = Path(folder).glob("tuned-*.json")
    return json.loads(file.read_text())


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
    section, run = {**SECTION, "outer_steps_with_folds": 5}, tmp_path / "run"
    train(config_of(run, rows, section, class_splits=all_trained))
    fold = "fold 1 of 2: 3 outer steps without 6 classes; accuracy on them: "
    check_text(capsys.readouterr().out, fold, "fold 2 of 2: ")
    assert run_of(run)["outer_steps"] == 5
    choice, settings = choice_in(run), run_of(run)["settings"]
    assert [(alpha, len(each)) for alpha, each in choice["scores"]] == [(0, 12), (0.4, 12), (1, 12)]
    assert all(0 <= one <= 1 for _, each in choice["scores"] for one in each)
    assert (settings["tune"], settings["init_interpolation"]) == (None, choice["init_interpolation"])
    train(parse([str(run / "config.yaml"), "--output_dir", str(tmp_path / "again")]))
    assert same(run, tmp_path / "again")
    capsys.readouterr()
    train(config_of(run, rows, section, class_splits=all_trained))
    out = capsys.readouterr().out
    assert "holds this run, finished" in out
    assert "fold 1" not in out


def test_an_inner_loop_is_scored_in_episodes(rows, all_trained, tmp_path):
    train(config_of(tmp_path / "run", rows, class_splits=all_trained, **NO_LOOP))
    assert [len(each) for _, each in choice_in(tmp_path / "run")["scores"]] == [60, 60, 60]


@pytest.mark.parametrize("changes", [{"outer_lr": 1e30}, {"task_schedule": "dynamic"}], ids=str)
def test_a_training_that_diverges_keeps_the_initial_weights(
    rows, all_trained, tmp_path, changes, monkeypatch
):
    """Interpolation 0: nothing is trained, also where groups claim tasks."""
    worst = {0.0: [0.9] * 4, 0.4: [0.1] * 4, 1.0: [0.1] * 4}
    if "task_schedule" in changes:
        monkeypatch.setattr(tuning, "interpolation_scores", lambda *args: worst)
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
    real = tuning.interpolation_scores

    def stop_after_the_first(*args):
        found = real(*args)
        signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(tuning, "interpolation_scores", stop_after_the_first)
    with pytest.raises(Stopped, match=r"stopped by SIGTERM while settings.* the same command begins again"):
        train(config_of(tmp_path / "run", rows, class_splits=all_trained))
    assert not [*(tmp_path / "run").glob("tuned-*.json")]


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_fold(
    rows, all_trained, tmp_path, monkeypatch
):
    monkeypatch.setattr(tuning, "interpolation_scores", None)
    (tmp_path / "file").write_text("")
    config = config_of(tmp_path / "file" / "run", rows, class_splits=all_trained)
    check_message(refusal(train, config), "output_dir=", "cannot be made")


@pytest.mark.parametrize("text", ["[]", "{}", "3", '"a"', '{"scores": []}', "{", "[" * 10**5])
def test_a_file_without_a_choice_is_refused(text):
    given = Config(), text.encode(), Path("tuned-1.json"), ["init_interpolation"]
    check_message(refusal(with_stored_choice, *given), "tuned-1.json holds no choice", "remove it")


@pytest.mark.parametrize(
    ("epochs", "most", "steps"),
    [(5, 100, None), (5, 7, 7), (0.01, 100, 1)],
    ids=["epochs", "at most", "least"],
)
def test_outer_epochs_count_the_steps_that_draw_each_row_as_often(rows, epochs, most, steps):
    """Episodes of two classes, two rows of each; three tasks a step: 12 rows."""
    settings = {**SHORT, "meta_batch_size": 3, "outer_steps": most, "dataset": [str(rows)]}
    config, lines = Config(**settings, outer_epochs=epochs), []
    source = sources_of(config.but(n_way=2)).train
    train_rows = source.num_rows()
    found = with_outer_epochs(config, source, lines.append)
    assert found.outer_steps == steps or round(epochs * train_rows / 12)
    check_message(lines[0], f"outer_steps {found.outer_steps}: ", f"{train_rows} training rows, 12 of them")


def test_outer_epochs_of_several_data_sets_and_of_a_folder_of_files(rows, tmp_path):
    more, files = write_classes(tmp_path / "more.jsonl", classes=9, rows=4), tmp_path / "files"
    both = sources_of(Config(**SHORT, dataset=[str(rows), str(more)], outer_epochs=2)).train
    assert both.num_rows() == sum(one.num_rows() for one in both.sources)
    joint = Config(**{**SHORT, "algorithm": "joint", "inner_steps": 1}, dataset=[str(rows)])
    assert sources_of(joint).train.num_rows() % 6 == 0
    write_files(files, 4, strata=1)
    config = Config(**SHORT, dataset=[str(files)], outer_epochs=2)
    check_message(
        refusal(with_outer_epochs, config, sources_of(config).train, print),
        "outer_epochs",
        "give outer_steps",
    )


def write_files(folder, count, strata):
    """Task files of three classes."""
    for number in range(count):
        (folder / f"s{number % strata}").mkdir(parents=True, exist_ok=True)
        write_classes(folder / f"s{number % strata}" / f"t{number}.jsonl", classes=3, rows=4)
    return folder


@pytest.mark.parametrize("kind", ["classes", "joint", "tasks", "files", "two data sets"])
def test_folds_divide_the_training_part(tmp_path, kind):
    """Each class or task is held out once; an episode has no class of the other part."""
    few = {"n_way": 2, "k_shot": 1, "num_query": 1, "max_length": 16}
    settings = {"joint": {"algorithm": "joint"}, "tasks": {"task_type": "causal_lm", "task_column": "task"}}
    data = {
        "tasks": lambda: [write_pairs(tmp_path / "pairs.jsonl", tasks=7)],
        "files": lambda: [write_files(tmp_path / "files", 7, strata=2)],
        "two data sets": lambda: [
            write_classes(tmp_path / f"{name}.jsonl", classes=count, rows=4)
            for name, count in (("rows", 3), ("more", 9))
        ],
    }.get(kind, lambda: [write_classes(tmp_path / "rows.jsonl", classes=11, rows=4, strata=2)])()
    config = Config(**few, **settings.get(kind, {}), dataset=list(map(str, data)))
    sources = sources_of(config)
    whole = sources.train
    sources.of_split = {"train": whole}
    folds = folds_of(sources, 3, config)
    held_out = [[*fold.valid.items.names] for fold in folds]
    if kind == "two data sets":  # three classes of the first: the part of one class has none of it
        few = {name for name in whole.items.names if name.startswith("rows/")}
        assert sorted(len(few & {*held}) for held in held_out) == [0, 2]
        assert len(few) == 3
    else:
        assert len(folds) == 3
        assert sorted(name for names in held_out for name in names) == sorted(whole.items.names)
        assert max(map(len, held_out)) - min(map(len, held_out)) <= 1
    for fold, held in zip(folds, held_out, strict=True):
        assert not {*fold.train.items.names} & {*held}
        assert fold.numbers == sources.numbers or kind != "joint"
        for part in (fold.train, fold.valid):
            here = {name.rpartition("/")[2] for name in part.items.names}
            for task in Schedule(part.items, len(part.items), 1).meta_batch(0):
                draw = part.draw(task)
                assert len({label for _, label in draw.support}) == (1 if kind == "tasks" else 2)
                assert {*draw.classes} <= here or kind not in ("classes", "two data sets")
    assert kind != "joint" or len(sources.numbers) == len(whole.items)


def test_few_classes_make_two_folds_of_smaller_episodes(tmp_path):
    def folds(n_way, *counts):
        data = [write_classes(tmp_path / f"{n}-{i}.jsonl", classes=n, rows=4) for i, n in enumerate(counts)]
        config = Config(n_way=n_way, k_shot=1, num_query=1, dataset=list(map(str, data)))
        return folds_of(sources_of(config), 3, config)

    found = folds(4, 5)
    assert [(len(fold.train.items), len(fold.valid.items)) for fold in found] == [(2, 3), (3, 2)]
    draw = found[0].valid.draw(Schedule(found[0].valid.items, 1, 1).meta_batch(0)[0])
    assert len(draw.classes) == 3
    check_message(refusal(folds, 2, 2, 2), "dataset=2-0 2-1", "give validation classes")
    check_message(refusal(folds, 2, 3), "dataset=", "has 3", "leave the section out")
