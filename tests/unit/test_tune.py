"""`fmmeta tune`: the lowest loss over heads, rates and numbers of steps, as evaluation sees it, and stored
with the model.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import fmmeta
from fmmeta import Config, MetaTrainer, cli
from fmmeta.common.progress import Progress
from fmmeta.evaluation.command import evaluate
from fmmeta.evaluation.settings import TuneConfig
from fmmeta.evaluation.tune import CHOSEN, Choice, TuneRun, tune
from fmmeta.models.files import remembered
from tests.support.helpers import refusal
from tests.support.messages import check_message
from tests.support.models import write_pairs

FLAGS: dict[str, Any] = {"n_way": "3", "k_shot": [2], "num_query": 3, "episodes": 4, "max_steps": 3}


def test_the_choice_is_the_best_of_all_evaluations(bert, classes, tmp_path):
    model = shutil.copytree(bert, tmp_path / "model")
    settings = TuneConfig(
        model_name_or_path=str(model), dataset=[str(classes)], inner_lrs=[0.05, 0.5], pooling="mean", **FLAGS
    )
    tried = tune(settings, progress=Progress(False))
    same: dict[str, Any] = {
        "eval_split": "valid",
        "pooling": "mean",
        "n_way": "3",
        "k_shot": 2,
        "num_query": 3,
        "episodes": 4,
    }
    losses = {
        (head, rate, steps): fmmeta.evaluate(
            str(bert), str(classes), **same, head_init=head, inner_lr=rate, inner_steps=steps
        )["loss"]
        for head in ("zero", "prototype")
        for rate in (0.05, 0.5)
        for steps in (1, 2, 3)
    }
    best = min(losses, key=lambda key: losses[key])
    assert (tried[0].head_init, tried[0].inner_lr, tried[0].inner_steps) == best
    assert len(tried) == 4
    for one in tried:
        assert one.loss == pytest.approx(losses[one.head_init, one.inner_lr, one.inner_steps], rel=1e-5)
    memory = json.loads((model / "fmmeta.json").read_text())
    assert (memory["head_init"], memory["inner_lr"], memory["inner_steps"]) == best
    found = fmmeta.evaluate(str(model), str(classes), **same)
    assert found["loss"] == pytest.approx(tried[0].loss, rel=1e-5)  # needs no flags any more


@pytest.mark.parametrize("case", ["pooling", "schedule", "class weights"])
def test_the_stored_loss_is_that_of_the_stored_settings(bert, classes, tmp_path, case, capsys, terminal):
    model, weights = shutil.copytree(bert, tmp_path / "model"), tmp_path / "weights.json"
    weights.write_text(json.dumps({f"c{number}": 1.0 + number for number in range(15)}))
    kept: dict[str, Any] = {
        "pooling": {},  # stored with the choice
        "schedule": {"inner_lr_schedule": "cosine"},
        "class weights": {"class_weights": str(weights)},
    }[case]
    asked = {"pooling": "mean", "feature_norm": 3.0} if case == "pooling" else kept
    settings = TuneConfig(
        model_name_or_path=str(model),
        dataset=[str(classes)],
        inner_lrs=[0.5],
        head_inits=["zero"],
        **FLAGS,
        **asked,
    )
    best = tune(settings, progress=Progress(True))[0]
    assert (case == "schedule") == ("3 steps are tried" in "".join(capsys.readouterr()))
    assert best.inner_steps == 3 or case != "schedule"
    found = fmmeta.evaluate(str(model), str(classes), **SAME, **kept)
    assert found["loss"] == pytest.approx(best.loss, rel=1e-5)
    plain = fmmeta.evaluate(str(bert), str(classes), **SAME, inner_lr=0.5, inner_steps=best.inner_steps)
    assert abs(plain["loss"] - best.loss) > 1e-4


def test_rates_of_a_model_keep_their_proportions(bert, classes, tmp_path):
    """A model that learns with its head alone still does: the stored rates are scaled."""
    model = shutil.copytree(bert, tmp_path / "model")
    layers = [
        "bert.encoder.layer.0",
        "bert.encoder.layer.1",
        "bert.embeddings.LayerNorm",
        "bert.embeddings.position_embeddings",
        "bert.embeddings.token_type_embeddings",
        "bert.embeddings.word_embeddings",
        "bert.pooler.dense",
    ]
    rates = {"head": [0.4], **{layer: [0.0] for layer in layers}}
    (model / "fmmeta.json").write_text(
        json.dumps({"inner_lr": 0.4, "inner_rates": rates, "algorithm": "anil"})
    )
    settings = TuneConfig(
        model_name_or_path=str(model),
        dataset=[str(classes)],
        inner_lrs=[0.1, 0.2],
        head_inits=["zero"],
        **FLAGS,
    )
    tried = tune(settings, progress=Progress(False))
    memory = json.loads((model / "fmmeta.json").read_text())
    assert memory["inner_rates"] == {
        "head": [pytest.approx(tried[0].inner_lr)],
        **{layer: [0.0] for layer in layers},
    }
    assert memory["algorithm"] == "anil"
    found = fmmeta.evaluate(
        str(model), str(classes), eval_split="valid", n_way="3", k_shot=2, num_query=3, episodes=4
    )
    assert found["loss"] == pytest.approx(tried[0].loss, rel=1e-5)


def trained(folder, **settings):
    """The folder of a model that was trained for two outer steps on 3-way tasks."""
    few: dict[str, Any] = {
        "n_way": 3,
        "k_shot": 2,
        "num_query": 3,
        "inner_steps": 2,
        "outer_steps": 2,
        "meta_batch_size": 2,
    }
    config = Config(
        **{**few, **settings}, outer_lr=0.05, eval_episodes=0, save_steps=0, output_dir=str(folder)
    )
    return str(MetaTrainer(config).train().output_dir / "model")


SAME: dict[str, Any] = {"eval_split": "valid", "n_way": "3", "k_shot": 2, "num_query": 3, "episodes": 4}


def test_a_learned_head_is_tried_beside_zeros(tmp_path):
    model = trained(tmp_path / "run", head_init="learned")
    settings = TuneConfig(
        model_name_or_path=model,
        dataset=["letters"],
        inner_lrs=[0.1],
        output=str(tmp_path / "tuned"),
        **FLAGS,
    )
    tried = {one.head_init: one for one in tune(settings, progress=Progress(False))}
    assert sorted(tried) == ["learned", "prototype", "zero"]
    for head, one in tried.items():
        found = fmmeta.evaluate(
            model, "letters", **SAME, head_init=head, inner_lr=0.1, inner_steps=one.inner_steps
        )
        assert found["loss"] == pytest.approx(one.loss, rel=1e-5), head
    assert tried["zero"].loss != pytest.approx(tried["learned"].loss, rel=1e-3)


@pytest.mark.parametrize(
    ("run", "flags"),
    [
        ({"algorithm": "meta_sgd"}, {"inner_lrs": [0.5]}),
        ({}, {"inner_lrs": [0.01], "inner_optimizer": "adamw", "feature_norm": 2.0}),
        ({"algorithm": "meta_sgd"}, {"inner_lrs": [0.01], "inner_optimizer": "adamw"}),
        ({"inner_lr_learned": "layer"}, {"inner_lrs": [0.01], "inner_optimizer": "adamw"}),
    ],
)
def test_evaluation_of_the_tuned_model_gives_the_scored_loss(run, flags, tmp_path):
    """Rates by element are scaled, or dropped with another optimizer; settings given by flags are stored."""
    model = trained(tmp_path / "run", **run)
    for _ in range(2):  # again: from what the first one stored
        settings = TuneConfig(
            model_name_or_path=model, dataset=["letters"], head_inits=["zero"], **flags, **FLAGS
        )
        best = tune(settings, progress=Progress(False))[0]
        found = fmmeta.evaluate(model, "letters", **SAME)
        assert found["loss"] == pytest.approx(best.loss, rel=1e-5)
    memory = json.loads((Path(model) / "fmmeta.json").read_text())
    assert {name: memory[name] for name in flags if name != "inner_lrs"} == {
        name: value for name, value in flags.items() if name != "inner_lrs"
    }


def test_a_learned_head_needs_the_same_number_of_classes(tmp_path, capsys):
    model = trained(tmp_path / "run", head_init="learned", n_way_max=5)
    head = load_file(Path(model) / "head.safetensors")["head.weight"]
    assert len(head) == 5
    assert json.loads((Path(model) / "fmmeta.json").read_text())["classes"] == 5
    flags = {**SAME, "inner_steps": 0}
    chance = fmmeta.evaluate(model, "letters", **flags, quiet=False)["loss"]
    assert "head is for 5 classes; those of 3 " in capsys.readouterr().out
    assert chance == pytest.approx(math.log(3))
    assert fmmeta.evaluate(model, "letters", **flags, n_way_max=5)["loss"] != pytest.approx(
        math.log(3), abs=1e-3
    )
    check_message(
        refusal(fmmeta.evaluate, model, "letters", **flags, head_init="learned"),
        "head_init=learned",
        f"{model}",
        f"{head.shape[1]}]",
        f"{head.shape[1]}]",
        "use --head_init zero",
    )


def test_a_frozen_head_needs_its_number_of_classes(tmp_path):
    model = trained(tmp_path / "run", algorithm="boil")
    assert fmmeta.evaluate(model, "letters", **SAME)["accuracy"] > 0
    check_message(
        refusal(fmmeta.evaluate, model, "letters", **{**SAME, "n_way": "4"}),
        f"model_name_or_path={model}",
        "3 classes",
        "give tasks of as many classes",
    )


@pytest.mark.parametrize("algorithm", ["anil", "meta_sgd"])
def test_stored_rates_survive_other_numbers_of_steps_and_an_adaptation(algorithm, tmp_path):
    model = trained(tmp_path / "run", algorithm=algorithm)
    pairs = [(letter * 4, letter) for letter in "abc" for _ in range(2)]
    pairs = [(f"{text}{place}", letter) for place, (text, letter) in enumerate(pairs)]
    adapted = fmmeta.adapt(model, pairs, output_dir=tmp_path / "one", inner_steps=3, early_stopping=False)
    began, here = AutoModel.from_pretrained(model), AutoModel.from_pretrained(tmp_path / "one")
    moved = [name for name, param in here.named_parameters() if not param.equal(began.get_parameter(name))]
    assert adapted.inner_steps == 3
    assert (moved == []) == (algorithm == "anil")
    rates = [
        json.loads((Path(folder) / "fmmeta.json").read_text())["inner_rates"]
        for folder in (model, tmp_path / "one")
    ]
    if algorithm == "anil":
        first, second = ({name: column[0] for name, column in one.items()} for one in rates)
        assert first == second
    else:
        files = [load_file(Path(folder) / "inner_lr.safetensors") for folder in (model, tmp_path / "one")]
        assert all(files[0][name].equal(files[1][name]) for name in files[0])


def test_a_choice_in_a_file_is_a_recipe_of_the_other_commands(bert, classes, tmp_path):
    file = tmp_path / "choice.json"
    flags = {"dataset": [str(classes)], "model_name_or_path": str(bert), "output": str(file)}
    best = tune(TuneConfig(**flags, inner_lrs=[0.5], pooling="mean", **FLAGS), progress=Progress(False))[0]
    words = ["--config", str(file), "--model_name_or_path", str(bert)]
    same = {"--dataset": classes, "--n_way": 3, "--k_shot": 2, "--num_query": 3, "--episodes": 4}
    more = [str(word) for pair in {**same, "--eval_split": "valid"}.items() for word in pair]
    found = evaluate(cli.parse([*words, *more], "evaluate"), progress=Progress(False))
    assert found["loss"] == pytest.approx(best.loss, rel=1e-5)
    adapting = cli.parse([*words, "--support", str(classes), "--output_dir", str(tmp_path / "out")], "adapt")
    assert [getattr(adapting, name) for name in CHOSEN] == [getattr(best, name) for name in CHOSEN]
    file.write_text('{"tuned": {}, "method": "finetune+in_context", "task_type": "causal_lm"}')
    assert cli.parse(words, "evaluate").method == ["finetune+in_context"]
    plain = {"tuned": {}, "inner_lr": 0.3, "inner_rates": {"head": [0.1 * 3, 0.3], "layers.0": [0.3, 0.3]}}
    file.write_text(json.dumps(plain))  # of every model that was trained without learned rates
    assert cli.parse(words, "evaluate").inner_lr == 0.3
    file.write_text(json.dumps({**plain, "inner_rates": {"head": [0.3], "layers.0": [0]}}))
    check_message(refusal(cli.parse, words, "evaluate"), f"config={file}", "learned inner rates", "copy it")


def test_language_models_have_rates_and_steps_only(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    settings = TuneConfig(
        dataset=[str(pairs)],
        task_type="causal_lm",
        k_shot=[2],
        num_query=2,
        episodes=2,
        max_steps=2,
        inner_lrs=[0.1],
        output=str(tmp_path / "deep" / "choice.json"),
    )
    tried = tune(settings, progress=Progress(False))
    assert {(one.head_init, one.inner_lr) for one in tried} == {("zero", 0.1)}
    assert sorted(one.inner_optimizer for one in tried) == ["adamw", "sgd"]
    chosen = json.loads((tmp_path / "deep" / "choice.json").read_text())
    assert [chosen[name] for name in ("inner_steps", "inner_optimizer")] == [
        tried[0].inner_steps,
        tried[0].inner_optimizer,
    ]
    assert not (tmp_path / "deep" / "choice.trials.json").exists()


def test_optimizers_are_tried_without_the_stored_settings_of_another(tmp_path):
    """SGD beside AdamW whose decay is stored; the choice of SGD is stored without it."""
    pairs, model = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "model"
    flags = {"inner_optimizer": "adamw", "inner_beta1": 0.0, "early_stopping": False, "lora_r": 2}
    fmmeta.adapt("tiny", [("a b", "c"), ("d", "e")], task_type="causal_lm", output_dir=model, **flags)
    settings = TuneConfig(
        model_name_or_path=str(model),
        dataset=[str(pairs)],
        k_shot=[2],
        num_query=2,
        episodes=1,
        max_steps=1,
        inner_lrs=[0.1],
    )
    tried = tune(settings, progress=Progress(False))
    assert sorted(one.inner_optimizer for one in tried) == ["adamw", "sgd"]
    stored = remembered(str(model))
    assert stored["inner_beta1"] == (0.0 if stored["inner_optimizer"] == "adamw" else 0.9)
    message = refusal(lambda: tune(replace(settings, head_inits=["zero"]), progress=Progress(False)))
    check_message(message, "head_inits=zero means nothing for task_type=causal_lm", "leave it out")


def test_an_inner_loop_with_prompts_is_tuned_and_becomes_the_default(llama, tmp_path, capsys, terminal):
    """What evaluate and adapt do with the tuned model is what was scored."""
    pairs, model = write_pairs(tmp_path / "pairs.jsonl"), shutil.copytree(llama, tmp_path / "model")
    same: dict[str, Any] = {"num_query": 2, "episodes": 3, "eval_split": "valid"}
    tuned = TuneConfig(
        model_name_or_path=str(model),
        dataset=[str(pairs)],
        task_type="causal_lm",
        k_shot=[2],
        max_steps=3,
        inner_lrs=[0.02],
        inner_optimizers=["sgd"],
        method=["finetune+in_context"],
        **same,
    )
    best = tune(tuned, progress=Progress(True))[0]
    shown = "".join(capsys.readouterr())
    assert "best: method finetune+in_context, inner_optimizer sgd, inner_lr 0.02" in shown
    results = fmmeta.evaluate(str(model), str(pairs), k_shot=2, **same)
    assert [cell["method"] for cell in results["cells"]] == ["finetune+in_context"]
    assert results["loss"] == pytest.approx(best.loss, rel=1e-5)
    adapted = fmmeta.adapt(model, [("a", "b"), ("c", "d")], early_stopping=False)
    assert (len(adapted.loaded.prompt_examples), adapted.inner_steps) == (2, best.inner_steps)


def test_trials_are_logged_as_they_finish_and_resumed_with_the_same_settings(
    tmp_path, monkeypatch, capsys, terminal
):
    """A signal or a failure after two of four trials leaves two to score."""
    score, scored = TuneRun.score, []

    def fails_at_the_third(run, *choice):
        if len(scored) == 2:
            raise RuntimeError("the device failed")
        scored.append(score(run, *choice))
        return scored[-1]

    data = str(write_pairs(tmp_path / "pairs.jsonl"))
    flags: dict[str, Any] = {
        "task_type": "causal_lm",
        "k_shot": [2],
        "num_query": 2,
        "episodes": 2,
        "max_steps": 2,
        "inner_lrs": [0.01, 0.1],
        "output": str(tmp_path / "choice.json"),
    }
    settings, trials = TuneConfig(dataset=[data], **flags), tmp_path / "choice.trials.json"
    monkeypatch.setattr(TuneRun, "score", fails_at_the_third)
    with pytest.raises(RuntimeError, match="the device failed"):
        tune(settings, progress=Progress(True))
    out = capsys.readouterr().out
    assert [f"trial {number} of 4: sgd" in out for number in (1, 2, 3)] == [True, True, False]
    assert "min left" in out
    other = TuneConfig(dataset=[data], **{**flags, "max_steps": 3})
    message = refusal(lambda: tune(other, progress=Progress(False)))
    check_message(message.replace(str(tmp_path), "."), "max_steps=3", "2 trials", "max_steps=2", "remove it")
    monkeypatch.setattr(TuneRun, "score", score)
    resumed = tune(settings, progress=Progress(True))
    out = capsys.readouterr().out
    assert "2 trials of 4 from" in out
    assert [f"trial {number} of 4" in out for number in (2, 3, 4)] == [False, True, True]
    assert not trials.exists()
    again = tune(settings, progress=Progress(False))
    assert resumed == again
    assert all(one in again for one in scored)
    trials.write_text("{}")
    message = refusal(lambda: tune(settings, progress=Progress(False)))
    check_message(message.replace(str(tmp_path), "."), "holds no trials", "remove it")


def test_trials_with_other_content_of_a_file_are_refused(bert, classes, tmp_path):
    weights, options = tmp_path / "weights.json", tmp_path / "peft.json"
    settings = {
        "model_name_or_path": str(shutil.copytree(bert, tmp_path / "model")),
        "dataset": [str(classes)],
        **FLAGS,
        "max_steps": 1,
        "head_inits": ["zero"],
        "inner_lrs": [0.1, 0.2],
        "minutes": 1e-9,
    }
    for name, file, before, now in (
        ("class_weights", weights, '{"c0": 2.0}', '{"c0": 3.0}'),
        ("peft_config", options, '{"r": 2}', '{"r": 4}'),
    ):
        file.write_text(before)
        given = {**settings, name: str(file), "output": str(tmp_path / f"{name}.json")}
        tune(TuneConfig(**given), progress=Progress(False))
        file.write_text(now)
        message = refusal(lambda given=given: tune(TuneConfig(**given), progress=Progress(False)))
        check_message(message, f"{name}=", "holds 1 trial", "remove it to begin again")


def test_a_learned_head_that_was_chosen_is_used(bert, classes, tmp_path):
    """Also of a classifier that fmmeta has not written."""
    model = shutil.copytree(bert, tmp_path / "model")
    settings = TuneConfig(
        model_name_or_path=str(model),
        dataset=[str(classes)],
        head_inits=["learned"],
        inner_lrs=[0.1],
        **FLAGS,
    )
    best = tune(settings, progress=Progress(False))[0]
    assert json.loads((model / "fmmeta.json").read_text())["classes"] == 3
    assert fmmeta.evaluate(str(model), str(classes), **SAME)["loss"] == pytest.approx(best.loss, rel=1e-5)


def test_trials_of_other_weights_are_refused(bert, classes, tmp_path):
    model = shutil.copytree(bert, tmp_path / "model")
    settings = TuneConfig(
        model_name_or_path=str(model),
        dataset=[str(classes)],
        k_shot=[1],
        num_query=1,
        n_way="2",
        episodes=1,
        max_steps=1,
        inner_lrs=[0.1, 0.2],
        minutes=1e-9,
        output=str(tmp_path / "choice.json"),
    )
    tune(settings, progress=Progress(False))
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: 0.9 * one for name, one in weights.items()}, model / "model.safetensors", {"format": "pt"}
    )
    message = refusal(tune, settings, progress=Progress(False))
    assert message.startswith("weights=")
    assert "holds 1 trial" in message


def test_time_that_is_over_leaves_trials_for_the_same_command(tmp_path):
    data, out = str(write_pairs(tmp_path / "pairs.jsonl")), tmp_path / "choice.json"
    flags: dict[str, Any] = {"k_shot": [2], "num_query": 2, "episodes": 2, "max_steps": 1, "output": str(out)}
    settings = TuneConfig(dataset=[data], task_type="causal_lm", inner_lrs=[0.1], minutes=1e-9, **flags)
    for number in (1, 2):
        assert len(tune(settings, progress=Progress(False))) == number
        assert json.loads(out.read_text())["tuned"]["trials"] == number


def test_optuna_finds_a_rate(bert, classes, tmp_path):
    pytest.importorskip("optuna", reason="optuna is optional")
    settings = TuneConfig(
        model_name_or_path=str(bert),
        dataset=[str(classes)],
        tuner="optuna",
        trials=5,
        inner_lrs=[0.01, 1.0],
        output=str(tmp_path / "choice.json"),
        **FLAGS,
    )
    tried = tune(settings, progress=Progress(False))
    assert len(tried) == 5
    assert all(0.01 <= one.inner_lr <= 1.0 for one in tried)
    losses = [round(one.loss, 4) for one in tried]
    assert losses == sorted(losses)
    assert len({one.inner_lr for one in tried}) == 5
    assert (
        tune(settings, progress=Progress(False)) == tried
    )  # the same trials every time, as every rank needs them


def test_optuna_finds_the_trials_of_an_interrupted_run(tmp_path, monkeypatch):
    """The interrupted run has stored another head with the model, which has a learned one."""
    pytest.importorskip("optuna", reason="optuna is optional")
    settings = TuneConfig(
        model_name_or_path=trained(tmp_path / "run", head_init="learned"),
        dataset=["letters"],
        tuner="optuna",
        trials=9,
        **FLAGS,
    )
    scored, most = list[tuple[str, float]](), 3

    def score(_, head, rate, optimizer):
        if len(scored) == most:
            raise RuntimeError("the device failed")
        scored.append((head, rate))
        return Choice(head, rate, 1, 1.0 + (head == "learned"), 0.5, optimizer)

    monkeypatch.setattr(TuneRun, "score", score)
    with pytest.raises(RuntimeError, match="the device failed"):
        tune(settings, progress=Progress(False))
    assert remembered(settings.model_source)["head_init"] != "learned"
    most = 9
    resumed = tune(settings, progress=Progress(False))
    assert sorted((one.head_init, one.inner_lr) for one in resumed) == sorted(scored)
    assert len(scored) == 9
    assert "learned" in {head for head, _ in scored}


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
        ({"output": "/dev/null"}, ["output=/dev/null is no regular file", "give a file"]),
        (
            {"model_name_or_path": "acme/model"},
            ["model_name_or_path=acme/model", "give --output FILE"],
        ),
    ],
)
def test_settings_that_cannot_be_tuned_are_refused(flags, text):
    check_message(refusal(lambda: tune(TuneConfig(**flags), progress=Progress(False))), *text)


def test_a_missing_optuna_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    message = refusal(
        lambda: tune(
            TuneConfig(tuner="optuna", output=str(tmp_path / "x.json"), episodes=1, max_steps=1),
            progress=Progress(False),
        )
    )
    assert message.startswith("tuner=optuna needs optuna (")
    check_message(message, "pip install 'fmmeta[tune]', or use grid")


def test_heads_that_the_model_cannot_use_are_left_out_or_refused(llama, classes, tmp_path):
    """The score layer of a Llama has no bias, so that it cannot hold prototypes."""
    flags = {
        **FLAGS,
        "model_name_or_path": str(llama),
        "dataset": [str(classes)],
        "inner_lrs": [0.1],
        "max_steps": 1,
        "output": str(tmp_path / "choice.json"),
    }
    assert [one.head_init for one in tune(TuneConfig(**flags), progress=Progress(False))] == ["zero"]
    for call in (
        lambda: tune(TuneConfig(**flags, head_inits=["zero", "prototype"]), progress=Progress(False)),
        lambda: fmmeta.evaluate(str(llama), str(classes), n_way="3", k_shot=2, head_init="prototype"),
    ):
        message = refusal(call)
        check_message(message, "head_init=prototype", "LlamaForSequenceClassification", "--pooling mean")
    assert refusal(lambda: tune(TuneConfig(**flags, feature_norm=2.0), progress=Progress(False))).startswith(
        "feature_norm=2 scales "
    )


def test_rates_that_diverge_are_never_the_best(bert, classes, tmp_path, capsys):
    choice = tmp_path / "choice.json"
    flags = {
        **FLAGS,
        "model_name_or_path": str(bert),
        "dataset": [str(classes)],
        "output": str(choice),
        "head_inits": ["zero"],
    }
    message = refusal(lambda: tune(TuneConfig(**flags, inner_lrs=[1e30, 1e35]), progress=Progress(True)))
    check_message(message, "inner_lrs=1e+30 1e+35", "try lower ones")
    assert not choice.exists()
    assert [
        one.inner_lr for one in tune(TuneConfig(**flags, inner_lrs=[1e30, 0.1]), progress=Progress(True))
    ] == [
        0.1,
        1e30,
    ]
    assert json.loads(choice.read_text())["inner_lr"] == 0.1
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("zero") and "1e+30" in line
    ]
    assert line.split() == ["zero", "sgd", "1e+30", "-", "diverged", "-"]


def test_an_output_that_cannot_be_written_is_refused_before_tuning(tmp_path, monkeypatch):
    monkeypatch.setattr("fmmeta.evaluation.tune.TuneRun", lambda *_: pytest.fail("computed before the check"))
    check_message(
        refusal(lambda: tune(TuneConfig(output=str(tmp_path)), progress=Progress(False))),
        f"output={tmp_path}",
        f"give a file in it, such as {tmp_path / 'results.json'}",
    )


@pytest.mark.parametrize(
    ("own", "rates", "chosen"), [(0.1, [1e-8, 1e-10, 1e-9], 1e-10), (1e-9, [1e-8, 1e-10, 1e-9], 1e-9)]
)
def test_among_equal_rates_the_model_default_or_the_smallest_is_stored(
    own, rates, chosen, bert, classes, tmp_path
):
    """Steps this small change no printed digit of the loss."""
    model = shutil.copytree(bert, tmp_path / "model")
    (model / "fmmeta.json").write_text(json.dumps({"inner_lr": own}))
    settings = TuneConfig(
        model_name_or_path=str(model), dataset=[str(classes)], inner_lrs=rates, head_inits=["zero"], **FLAGS
    )
    tried = tune(settings, progress=Progress(False))
    assert len({f"{one.loss:.4f}" for one in tried}) == 1
    memory = json.loads((model / "fmmeta.json").read_text())
    assert (memory["inner_lr"], memory["inner_steps"]) == (chosen, 1)


@pytest.mark.parametrize("error", [RuntimeError("the device failed"), KeyboardInterrupt()])
def test_a_failure_keeps_the_best_so_far(error, bert, classes, tmp_path, monkeypatch, capsys, terminal):
    model, score, scored = shutil.copytree(bert, tmp_path / "model"), TuneRun.score, []

    def fails_at_the_third(bench, *choice):
        if len(scored) == 2:
            raise error
        scored.append(score(bench, *choice))
        return scored[-1]

    monkeypatch.setattr(TuneRun, "score", fails_at_the_third)
    settings = TuneConfig(
        model_name_or_path=str(model),
        dataset=[str(classes)],
        inner_lrs=[0.05, 0.5, 1.0],
        head_inits=["zero"],
        **FLAGS,
    )
    with pytest.raises(type(error)):
        tune(settings, progress=Progress(True))
    best = min(scored, key=lambda one: one.loss)
    memory = json.loads((model / "fmmeta.json").read_text())
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
    out = capsys.readouterr().out
    assert "2 of 3 trials" in out
    assert [f"{one.loss:.4f}" in out for one in scored] == [True, True]
    assert [file.name for file in model.iterdir() if "tmp" in file.name] == []


def test_a_failure_of_the_first_trial_stores_nothing(bert, classes, tmp_path, monkeypatch):
    monkeypatch.setattr(TuneRun, "score", lambda *_: (_ for _ in ()).throw(RuntimeError("at once")))
    choice = tmp_path / "choice.json"
    settings = TuneConfig(model_name_or_path=str(bert), dataset=[str(classes)], output=str(choice), **FLAGS)
    with pytest.raises(RuntimeError, match="at once"):
        tune(settings, progress=Progress(False))
    assert not choice.exists()
