"""`fmmeta tune`: the lowest loss over heads, rates and numbers of steps, as evaluation sees it, and stored
with the model.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
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
from fmmeta.evaluation.tune import CHOSEN, TuneRun, tune
from tests.support.helpers import refusal
from tests.support.messages import check_message
from tests.support.models import write_pairs

FLAGS: dict[str, Any] = {"n_way": "3", "k_shot": [2], "num_query": 3, "episodes": 4, "max_steps": 3}
SAME: dict[str, Any] = {"eval_split": "valid", "n_way": "3", "k_shot": 2, "num_query": 3, "episodes": 4}
PAIRS: dict[str, Any] = {"task_type": "causal_lm", "k_shot": [2], "num_query": 2, "episodes": 2}


def tuned(model, data, shown: bool = False, **flags):
    """The choices that `fmmeta tune` tried, the best one first."""
    settings = TuneConfig(model_name_or_path=str(model), dataset=[str(data)], **flags)
    return tune(settings, progress=Progress(shown))


def stored(model) -> dict[str, Any]:
    return json.loads(Path(model, "fmmeta.json").read_text())


def fail_at_the_third(monkeypatch, error: BaseException) -> list:
    """Let the third trial raise an error; the list gets the results of those before it."""
    score, scored = TuneRun.score, []

    def failing(run, *choice):
        if len(scored) == 2:
            raise error
        scored.append(score(run, *choice))
        return scored[-1]

    monkeypatch.setattr(TuneRun, "score", failing)
    return scored


def test_the_choice_is_the_best_of_all_evaluations(bert, classes, tmp_path):
    model = shutil.copytree(bert, tmp_path / "model")
    tried = tuned(model, classes, inner_lrs=[0.05, 0.5], pooling="mean", **FLAGS)
    losses = {
        (head, rate, steps): fmmeta.evaluate(
            bert, classes, **SAME, pooling="mean", head_init=head, inner_lr=rate, inner_steps=steps
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
    memory = stored(model)
    assert (memory["head_init"], memory["inner_lr"], memory["inner_steps"]) == best
    found = fmmeta.evaluate(model, classes, **SAME, pooling="mean")
    assert found["loss"] == pytest.approx(tried[0].loss, rel=1e-5)  # needs no flags any more


@pytest.mark.parametrize("case", ["pooling", "class weights", "learned head"])
def test_the_stored_loss_is_that_of_the_stored_settings(bert, classes, tmp_path, case):
    model, weights = shutil.copytree(bert, tmp_path / "model"), tmp_path / "weights.json"
    weights.write_text(json.dumps({f"c{number}": 1.0 + number for number in range(15)}))
    kept = {"class_weights": str(weights)} if case == "class weights" else {}
    asked: dict[str, Any] = {
        "pooling": {"pooling": "mean", "feature_norm": 3.0, "head_inits": ["zero"]},
        "class weights": {"head_inits": ["zero"], **kept},
        "learned head": {"head_inits": ["learned"]},  # of a classifier that fmmeta has not written
    }[case]
    best = tuned(model, classes, inner_lrs=[0.5], **FLAGS, **asked)[0]
    found = fmmeta.evaluate(model, classes, **SAME, **kept)
    assert found["loss"] == pytest.approx(best.loss, rel=1e-5)
    plain = fmmeta.evaluate(bert, classes, **SAME, inner_lr=0.5, inner_steps=best.inner_steps)
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
    best = tuned(model, classes, inner_lrs=[0.1, 0.2], head_inits=["zero"], **FLAGS)[0]
    assert stored(model)["inner_rates"] == {**rates, "head": [pytest.approx(best.inner_lr)]}
    assert stored(model)["algorithm"] == "anil"
    assert fmmeta.evaluate(model, classes, **SAME)["loss"] == pytest.approx(best.loss, rel=1e-5)


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


def test_a_learned_head_is_tried_beside_zeros(tmp_path):
    model = trained(tmp_path / "run", head_init="learned")
    output = str(tmp_path / "tuned")
    tried = {one.head_init: one for one in tuned(model, "letters", inner_lrs=[0.1], output=output, **FLAGS)}
    assert sorted(tried) == ["learned", "prototype", "zero"]
    for head, one in tried.items():
        found = fmmeta.evaluate(
            model, "letters", **SAME, head_init=head, inner_lr=0.1, inner_steps=one.inner_steps
        )
        assert found["loss"] == pytest.approx(one.loss, rel=1e-5), head
    assert tried["zero"].loss != pytest.approx(tried["learned"].loss, rel=1e-3)


@pytest.mark.parametrize(
    ("run", "rate", "flags"),
    [
        ({"algorithm": "meta_sgd"}, 0.5, {}),
        ({}, 0.01, {"inner_optimizer": "adamw", "feature_norm": 2.0}),
        ({"algorithm": "meta_sgd"}, 0.01, {"inner_optimizer": "adamw"}),
        ({"inner_lr_learned": "layer"}, 0.01, {"inner_optimizer": "adamw"}),
    ],
)
def test_evaluation_of_the_tuned_model_gives_the_scored_loss(run, rate, flags, tmp_path):
    """Rates by element are scaled, or dropped with another optimizer; settings given by flags are stored."""
    model = trained(tmp_path / "run", **run)
    for _ in range(2):  # again: from what the first one stored
        best = tuned(model, "letters", head_inits=["zero"], inner_lrs=[rate], **flags, **FLAGS)[0]
        found = fmmeta.evaluate(model, "letters", **SAME)
        assert found["loss"] == pytest.approx(best.loss, rel=1e-5)
    assert flags.items() <= stored(model).items()


def test_a_learned_head_needs_the_same_number_of_classes(tmp_path, capsys):
    model = trained(tmp_path / "run", head_init="learned", n_way_max=5)
    head = load_file(Path(model) / "head.safetensors")["head.weight"]
    assert len(head) == 5
    assert stored(model)["classes"] == 5
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
    model, one = trained(tmp_path / "run", algorithm=algorithm), tmp_path / "one"
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
    pairs, output = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "deep" / "choice.json"
    tried = tuned("tiny", pairs, **PAIRS, max_steps=2, inner_lrs=[0.1], output=str(output))
    assert {(one.head_init, one.inner_lr) for one in tried} == {("zero", 0.1)}
    assert sorted(one.inner_optimizer for one in tried) == ["adamw", "sgd"]
    chosen = json.loads(output.read_text())
    assert chosen["inner_steps"] == tried[0].inner_steps
    assert chosen["inner_optimizer"] == tried[0].inner_optimizer
    assert [file.name for file in output.parent.iterdir()] == ["choice.json"]


def test_optimizers_are_tried_without_the_stored_settings_of_another(tmp_path):
    """SGD beside AdamW whose epsilon is stored; the choice of SGD is stored without it."""
    pairs, model = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "model"
    flags = {"inner_optimizer": "adamw", "inner_epsilon": 1e-3, "early_stopping": False, "lora_r": 2}
    fmmeta.adapt("tiny", [("a b", "c"), ("d", "e")], task_type="causal_lm", output_dir=model, **flags)
    asked = {**PAIRS, "episodes": 1, "max_steps": 1, "inner_lrs": [0.1]}
    assert sorted(one.inner_optimizer for one in tuned(model, pairs, **asked)) == ["adamw", "sgd"]
    memory = stored(model)
    assert memory["inner_epsilon"] == (1e-3 if memory["inner_optimizer"] == "adamw" else 1e-8)
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
    results = fmmeta.evaluate(model, pairs, k_shot=2, **same)
    assert [cell["method"] for cell in results["cells"]] == ["finetune+in_context"]
    assert results["loss"] == pytest.approx(best.loss, rel=1e-5)
    adapted = fmmeta.adapt(model, [("a", "b"), ("c", "d")], early_stopping=False)
    assert (len(adapted.loaded.prompt_examples), adapted.inner_steps) == (2, best.inner_steps)


def test_trials_are_logged_as_they_finish_and_resumed_with_the_same_settings(
    tmp_path, monkeypatch, capsys, terminal
):
    """A signal or a failure after two of four trials leaves two to score, with the same settings."""
    data, trials = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "choice.trials.json"
    flags = {**PAIRS, "max_steps": 2, "inner_lrs": [0.01, 0.1], "output": str(tmp_path / "choice.json")}
    with monkeypatch.context() as patch:
        scored = fail_at_the_third(patch, RuntimeError("the device failed"))
        with pytest.raises(RuntimeError, match="the device failed"):
            tuned("tiny", data, shown=True, **flags)
    out = capsys.readouterr().out
    assert [f"trial {number} of 4: sgd" in out for number in (1, 2, 3)] == [True, True, False]
    assert "min left" in out
    kept = trials.read_bytes()
    tuned("tiny", data, shown=True, **{**flags, "max_steps": 3})
    assert "trial 1 of 4: sgd" in capsys.readouterr().out
    trials.write_bytes(kept)
    resumed = tuned("tiny", data, shown=True, **flags)
    out = capsys.readouterr().out
    assert "2 trials of 4 from" in out
    assert [f"trial {number} of 4" in out for number in (2, 3, 4)] == [False, True, True]
    assert not trials.exists()
    trials.write_text("damaged")
    assert tuned("tiny", data, **flags) == resumed
    assert all(one in resumed for one in scored)


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


def test_optuna_finds_a_rate(bert, classes, tmp_path):
    pytest.importorskip("optuna", reason="optuna is optional")
    flags = {**FLAGS, "tuner": "optuna", "trials": 5, "output": str(tmp_path / "choice.json")}
    tried = tuned(bert, classes, inner_lrs=[0.01, 1.0], **flags)
    assert len({one.inner_lr for one in tried}) == len(tried) == 5
    assert all(0.01 <= one.inner_lr <= 1.0 for one in tried)
    losses = [round(one.loss, 4) for one in tried]
    assert losses == sorted(losses)
    # the same trials every time, as every rank needs them
    assert tuned(bert, classes, inner_lrs=[0.01, 1.0], **flags) == tried


def test_optuna_finds_the_trials_of_an_interrupted_run(tmp_path, monkeypatch):
    """The interrupted run has stored another head with the model, which has a learned one."""
    pytest.importorskip("optuna", reason="optuna is optional")
    model, flags = trained(tmp_path / "run", head_init="learned"), {**FLAGS, "tuner": "optuna", "trials": 9}
    score, scored, most = TuneRun.score, list[tuple[str, float]](), 3

    def prefers_zero(run, head, rate, optimizer):
        return replace(score(run, head, rate, optimizer), loss=1.0 + (head == "learned"))

    def log(run, choice):
        scored.append((choice.head_init, choice.inner_lr))
        if len(scored) == most:
            raise RuntimeError("the device failed")

    monkeypatch.setattr(TuneRun, "score", prefers_zero)
    monkeypatch.setattr(TuneRun, "log_trial", log)
    with pytest.raises(RuntimeError, match="the device failed"):
        tuned(model, "letters", **flags)
    assert stored(model)["head_init"] != "learned"
    most = None
    resumed = tuned(model, "letters", **flags)
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
    message = refusal(tuned, "tiny", "letters", **few)
    check_message(message, "tuner=optuna needs optuna (", "pip install 'fmmeta[tune]', or use grid")


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


def test_an_output_that_cannot_be_written_is_refused_before_tuning(tmp_path, monkeypatch):
    monkeypatch.setattr("fmmeta.evaluation.tune.TuneRun", lambda *_: pytest.fail("computed before the check"))
    check_message(
        refusal(tuned, "tiny", "letters", output=str(tmp_path)),
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
    tried = tuned(model, classes, inner_lrs=rates, head_inits=["zero"], **FLAGS)
    assert len({f"{one.loss:.4f}" for one in tried}) == 1
    memory = stored(model)
    assert (memory["inner_lr"], memory["inner_steps"]) == (chosen, 1)


@pytest.mark.parametrize("error", [RuntimeError("the device failed"), KeyboardInterrupt()])
def test_a_failure_keeps_the_best_so_far(error, bert, classes, tmp_path, monkeypatch, capsys, terminal):
    model = shutil.copytree(bert, tmp_path / "model")
    scored = fail_at_the_third(monkeypatch, error)
    with pytest.raises(type(error)):
        tuned(model, classes, shown=True, inner_lrs=[0.05, 0.5, 1.0], head_inits=["zero"], **FLAGS)
    best = min(scored, key=lambda one: one.loss)
    memory = stored(model)
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
    monkeypatch.setattr(TuneRun, "score", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tuned(bert, classes, output=str(tmp_path / "choice.json"), **FLAGS)
    assert not (tmp_path / "choice.json").exists()
