"""Settings are checked one by one and together; some defaults depend on other settings; some may change on
resume.
"""

import math
import re
from dataclasses import fields
from typing import Any

import numpy
import pytest

from fmmeta.cli import parse
from fmmeta.config.algorithms import NOT_ELEMENTWISE
from fmmeta.config.conflicts import without_effect
from fmmeta.config.fields import default_of, kind_of, of_type, rules, shown
from fmmeta.config.resume import FREE_ON_RESUME, HIDDEN_ON_RESUME, changed_settings
from fmmeta.config.settings import KEYED, REMEMBERED, Config, InnerConfig
from tests.support.messages import check_message, refusal

NO_RANK = ("lora_r=0", "leave it out, or give --lora_r")
FACTOR = ("PATTERN=FACTOR", "0 or more", "write, say, head=10 or '*embeddings*=0'")
STREAM = {"task_type": "stream", "algorithm": "ttt", "dataset": ["ciphers"]}
COMPANIONS = {
    **{
        ("answers", choice): {"task_type": "causal_lm"} for choice in ("names", "symbols", "flipped")
    },  # settings without which a choice is refused
    ("inner_optimizer", "adamw"): {"algorithm": "reptile"},
    ("algorithm", "in_context"): {"task_type": "causal_lm"},
    ("algorithm", "meta_icl"): {"task_type": "causal_lm"},
    ("pipeline_balance", "time"): {"pipeline_stages": 2},
    ("n_way", 1): {"task_type": "regression"},
    ("chunk", 2): STREAM,
    ("context", 2): STREAM,
    ("chunks", 1): STREAM,
    ("second_order", "autograd"): {"algorithm": "maml"},
    ("second_order", "differences"): {"algorithm": "maml"},
    ("max_bad_fraction", 0): {"on_bad_task": "skip"},
}
LEAST_NEEDS = {
    "first_order_steps": "maml",
    "inner_steps": "none",
    "cg_steps": "imaml",
    "trajectory_memory_gib": "maml",
    "truncate_steps": "maml",
}
MINIMUM = {name: rule.least for name, rule in rules(Config).items() if rule.least is not None}
CHOICES = {item.name: item.metadata["choices"] for item in fields(Config) if "choices" in item.metadata}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_checked(name):
    unknown = f"{name}=nonsense is unknown(; did you mean .*)?; use "
    assert re.match(unknown, refusal(Config, **{name: "nonsense"}))
    for choice in CHOICES[name]:
        config = Config(**{name: choice, **COMPANIONS.get((name, choice), {})})
        kept = None if (name, choice) == ("answers", "none") else choice  # as if nothing were given
        assert getattr(config, name) in (kept, [kept])


@pytest.mark.parametrize(("name", "least"), MINIMUM.items())
def test_lower_bounds(name, least):
    below = of_type(Config, name, least - 1)
    assert refusal(Config, **{name: below}) == f"{name}={below} is below {least}; use {least} or more"
    beside = {"algorithm": LEAST_NEEDS.get(name, "fomaml"), **COMPANIONS.get((name, least), {})}
    assert getattr(Config(**{name: least}, **beside), name) == least


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        (
            "task_type",
            "x",
            ("task_type=x is unknown", "use classification, causal_lm, token_classification, regression"),
        ),
        ("outer_optimizer", "x", ("outer_optimizer=x", "use adamw, sgd, nesterov, adagrad, adamax")),
        *(
            ("group_size", value, (f"group_size={value}", "use auto, or 1 or more"))
            for value in ("0", "-2", "many", "1.5", "", "²")
        ),
        ("inner_lr", 0.0, ("inner_lr=0.0", "use one, such as 0.1 for inner SGD")),
        ("inner_lr", -0.1, ("inner_lr=-0.1", "use one, such as 0.1 for inner SGD")),
        ("n_way", "5", ("n_way='5'", "give one")),
        ("n_way", 5.0, ("n_way=5.0", "give one")),
        ("k_shot", None, ("k_shot=None", "give one")),
        ("inner_lr", "0.1", ("inner_lr='0.1'", "give one")),
        ("packing", 1, ("packing=1", "give one")),
        ("k_shot", True, ("k_shot=True", "give one")),
        ("mix_weights", ["1"], ("mix_weights='1'", "give one")),
        ("dataset_split", None, ("dataset_split=None", "give one")),
        ("inner_lr", 1e39, ("inner_lr=1e+39", "use one up to 3.4e+38")),
        ("inner_lr", math.nan, ("inner_lr=nan", "use one, such as 0.1 for inner SGD")),
        (
            "max_grad_norm",
            math.nan,
            ("max_grad_norm=nan", "use 0 or more, up to 3.4e+38"),
        ),
        (
            "weight_decay",
            math.inf,
            ("weight_decay=inf", "use 0 or more, up to 3.4e+38"),
        ),
        ("inner_lr", 10**400, ("inner_lr is no number", "use one up to 3.4e+38")),
        ("n_way", 10**400, ("n_way is no number", "use one up to 3.4e+38")),
        (
            "seed",
            2**64,
            ("seed=18446744073709551616", "use 0 or more, up to 18446744073709551615"),
        ),
        *(
            ("inner_lr_groups", [f"head{factor}"], (f"inner_lr_groups=head{factor}", *FACTOR))
            for factor in ("", "=-1", "=1e40", "=nan")
        ),
    ],
)
def test_unknown_choices_and_values_of_wrong_type_or_range_are_refused(name, value, parts):
    check_message(refusal(Config, **{name: value}), *parts)


def test_values_are_converted_to_their_types(tmp_path):
    config = Config(n_way=numpy.int64(5), inner_lr=1, dataset=tmp_path, group_size=2, report_to="tensorboard")
    found = (config.n_way, config.inner_lr, config.dataset, config.group_size, config.report_to)
    assert found == (5, 1.0, [str(tmp_path)], "2", ["tensorboard"])
    assert [type(value) for value in found[:2]] == [int, float]


@pytest.mark.parametrize(
    ("settings", "name", "rate"),
    [
        ({}, "inner_lr", 0.1),
        ({"inner_optimizer": "adamw"}, "inner_lr", 0.1),
        ({"task_type": "causal_lm"}, "inner_lr", 0.1),
        ({"task_type": "causal_lm", "inner_optimizer": "adamw"}, "inner_lr", 0.003),
        ({"task_type": "causal_lm", "model_name_or_path": "gpt2"}, "inner_lr", 0.001),
        ({"task_type": "causal_lm", "model_name_or_path": "gpt2", "lora_r": 4}, "inner_lr", 0.1),
        ({"task_type": "causal_lm", "inner_optimizer": "adamw", "inner_lr": 0.5}, "inner_lr", 0.5),
        ({}, "outer_lr", 2e-3),
        ({"model_name_or_path": "bert"}, "outer_lr", 2e-5),
        ({"model_name_or_path": "bert", "lora_r": 8}, "outer_lr", 2e-4),
        ({"outer_optimizer": "sgd"}, "outer_lr", 1.0),
        ({"outer_optimizer": "sgd", "outer_lr": 0.25}, "outer_lr", 0.25),
        ({"lora_r": 6}, "lora_alpha", 12),
        ({"lora_r": 6, "lora_alpha": 3}, "lora_alpha", 3),
    ],
)
def test_default_rates_follow_model_and_optimizer(settings, name, rate):
    config = Config(**settings)
    assert getattr(config, name) == config.as_dict()[name] == rate


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"report_to": ["tensorbord"]},
            ("report_to=tensorbord", "did you mean tensorboard?", "use none, all"),
        ),
        ({"report_to": ["wandb", "wandb"]}, ("report_to=wandb wandb", "name each once, or none")),
        ({"report_to": ["none", "wandb"]}, ("report_to=none", "leave out none")),
        ({"report_to": []}, ("report_to= names no tracker", "name each once, or none")),
        ({"step_timeout": 0.0}, ("step_timeout=0.0", "use one, or leave it out")),
        ({"max_file_gib": 0.0}, ("max_file_gib=0.0", "use one, or leave it out")),
        ({"dataset": []}, ("dataset= ", "name each once")),
        ({"dataset": ["a", "b", "a"]}, ("dataset=a b a", "name each once")),
        (
            {"dataset": ["a", "b"], "class_splits": "c.json"},
            ("class_splits=c.json", "2 data sets", "put a class_splits.json into the folder"),
        ),
        (
            {"dataset": ["a", "b"], "mix_weights": [1.0]},
            ("mix_weights=1.0 ", "dataset=a b", "give one positive number for each"),
        ),
        (
            {"dataset": ["a", "b"], "stratum_column": "topic"},
            ("stratum_column=topic", "2 data sets", "leave it out"),
        ),
        (
            {"dataset": ["a", "b"], "mix_weights": [1.0, 0.0]},
            ("mix_weights=1.0 0.0", "dataset=a b", "give one positive number for each"),
        ),
        (
            {"mix_temperature": 0.0},
            ("mix_temperature=0.0", "use one, such as 1"),
        ),
        (
            {"dataset": ["a", "b"], "mix_weights": [1.0, 2.0], "mix_temperature": 2.0},
            ("mix_temperature=2.0", "mix_weights", "leave one out"),
        ),
        ({"n_way_max": 4}, ("n_way_max=4", "n_way=5", "raise it or leave it out")),
        ({"k_shot_max": 1}, ("k_shot_max=1", "k_shot=5", "raise it or leave it out")),
        (
            {"k_shot_max": 9, "task_type": "causal_lm"},
            ("k_shot_max=9", "task_type=causal_lm", "leave it out"),
        ),
        (
            {"num_workers": "many"},
            ("num_workers=many", "use auto, or 0 or more"),
        ),
        (
            {"tasks_per_pass": "²"},
            ("tasks_per_pass=²", "use auto, or 1 or more"),
        ),
        ({"max_bad_fraction": 1.5}, ("max_bad_fraction=1.5", "use 0 or more, up to 1")),
        ({"max_bad_fraction": 0.5}, ("means nothing for on_bad_task=raise", "use --on_bad_task skip")),
        (
            {"task_type": "causal_lm", "text_column": "t"},
            ("text_column=t", "task_type=causal_lm", "leave it out"),
        ),
        (
            {"task_type": "causal_lm", "pooling": "mean"},
            ("pooling=mean", "task_type=causal_lm", "leave it out"),
        ),
        ({"lora_r": 6, "lora_alpha": 0}, ("lora_alpha=0.0", "use one, such as twice lora_r")),
        ({"lora_alpha": 8.0}, ("lora_alpha=8.0", *NO_RANK)),
        ({"lora_target_modules": ["query", "key"]}, ("lora_target_modules=query key", *NO_RANK)),
        ({"lora_merge": True}, ("lora_merge=True", *NO_RANK)),
        ({"output_column": "o"}, ("output_column=o", "task_type=classification", "leave it out")),
    ],
)
def test_settings_of_the_data_and_of_the_other_task_type_are_checked(settings, parts):
    check_message(refusal(Config, **settings), *parts)


def test_every_setting_has_a_help_text_and_a_default_that_is_not_shared():
    assert [item.name for item in fields(Config) if len(item.metadata.get("help", "")) < 10] == []
    Config().dataset.append("other")
    assert len(Config().dataset) == 1


def test_changed_settings_are_listed():
    before, now = Config().as_dict(), Config(seed=7, group_size="2", output_dir="x", inner_lr=0.5).as_dict()
    assert changed_settings(before, now) == {"inner_lr": "inner_lr: 0.1 -> 0.5", "seed": "seed: 42 -> 7"}
    assert changed_settings({**before, "gone": "a"}, before) == {"gone": "gone: a -> None"}
    assert changed_settings(before, {**before, "new": 1}) == {"new": "new: None -> 1"}


def test_rules_of_settings_decide_resume_and_storage():
    """A setting without rules is compared on resume and not stored with models."""
    assert {"save_steps", "micro_batch_size", "output_dir"} <= FREE_ON_RESUME
    assert not {"seed", "inner_lr", "bf16", "max_length"} & FREE_ON_RESUME
    hidden = "output_dir run_name log_level resume_from_checkpoint accept_changed_settings"
    assert set(hidden.split()) == HIDDEN_ON_RESUME
    assert {item.name for item in fields(InnerConfig)} | {"max_length", "lora_r"} <= set(REMEMBERED)
    assert {"max_length", "text_column", "max_file_gib"} <= set(KEYED)
    assert not {"seed"} & set(REMEMBERED) | {"n_way"} & set(KEYED)


ADAM, CAUSAL = {"inner_optimizer": "adamw"}, {"task_type": "causal_lm"}
STAGES, TENSOR = {"pipeline_stages": 2}, {"tensor_parallel_size": 2}
SAMPLES, ICL = {"support_batch_size": 16}, {"algorithm": "meta_icl", **CAUSAL}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"algorithm": "maml", **ADAM},
            ("inner_optimizer=adamw", "algorithm=maml", "use sgd or momentum"),
        ),
        (
            {"inner_weight_decay": 0.1},
            ("inner_weight_decay=0.1", "inner_optimizer=sgd", "leave it out, or use --inner_optimizer adamw"),
        ),
        (
            {"cg_steps": 9},
            ("cg_steps=9", "algorithm=fomaml", "leave it out, or use imaml"),
        ),
        (
            {"inner_lr_outer_lr": 0.1},
            ("inner_lr_outer_lr=0.1", "inner_lr_learned=no", "leave it out, or use --inner_lr_learned"),
        ),
        (
            {"trajectory_memory_gib": 1.0},
            ("trajectory_memory_gib=1.0", "algorithm=fomaml", "leave it out"),
        ),
        (
            {"algorithm": "reptile", "inner_lr_learned": "layer"},
            ("inner_lr_learned=layer", "algorithm=reptile", "leave it out, or use fomaml or maml"),
        ),
        (
            {"eval_steps": 5, "eval_episodes": 0},
            ("eval_steps=5", "eval_episodes=0", "leave it out, or give --eval_episodes"),
        ),
        ({"inner_steps": 0}, ("inner_steps=0", "algorithm=fomaml", "use 1 or more")),
        (
            {"first_order_steps": 3},
            ("first_order_steps=3", "algorithm=fomaml", "leave it out, or use maml or anil or boil"),
        ),
        (
            {"algorithm": "reptile", "multi_step_loss_steps": 3},
            ("multi_step_loss_steps=3", "algorithm=reptile", "leave it out, or use fomaml or maml or boil"),
        ),
        (
            {"prototype_gradient": True},
            (
                "prototype_gradient=True",
                "algorithm=fomaml",
                "head_init=zero",
                "use it with head_init=prototype",
            ),
        ),
        (
            {"check_meta_gradient": True},
            ("check_meta_gradient=True", "algorithm=fomaml", "leave it out, or use maml or imaml or boil"),
        ),
        (
            {"algorithm": "imaml", "inner_optimizer": "momentum"},
            ("inner_optimizer=momentum", "algorithm=imaml", "use sgd with more --inner_steps"),
        ),
        (
            {"algorithm": "boil", "head_init": "zero"},
            ("head_init=zero", "algorithm=boil", "leave --head_init out"),
        ),
        (
            {"algorithm": "protonet", "head_init": "learned"},
            ("head_init=learned", "algorithm=protonet", "leave --head_init out"),
        ),
        (
            {"algorithm": "anil", "task_type": "causal_lm"},
            ("task_type=causal_lm", "algorithm=anil", "use another algorithm"),
        ),
        (
            {"algorithm": "meta_sgd", "inner_lr_learned": "layer"},
            ("inner_lr_learned=layer", "algorithm=meta_sgd", "leave it out"),
        ),
        (
            {"algorithm": "anil", "inner_lr_learned": "layer"},
            ("inner_lr_learned=layer", "algorithm=anil", "leave it out, or use fomaml or maml"),
        ),
        (
            {"algorithm": "boil", "inner_lr_groups": ["head=2"]},
            ("inner_lr_groups=head=2", "algorithm=boil", "leave it out"),
        ),
        (
            {"algorithm": "in_context"},
            ("task_type=classification", "algorithm=in_context", "use another algorithm"),
        ),
        (
            {"algorithm": "joint", "head_init": "learned"},
            ("head_init=learned", "algorithm=joint", "use zero or prototype"),
        ),
        ({"inner_momentum": 1.0}, ("inner_momentum=1.0", "[0, 1)", "use 0.9, say")),
        ({"outer_momentum": -0.1}, ("outer_momentum=-0.1", "[0, 1)", "use 0.9, say")),
        ({"outer_lr": 0.0}, ("outer_lr=0.0", "use one, such as 2e-5 for all weights of a checkpoint")),
        ({"inner_epsilon": 0.0}, ("inner_epsilon=0.0", "use one, such as 1e-08")),
        (
            {"compile": True, "lora_r": 4, "tasks_per_pass": "2"},
            ("compile=True", "tasks_per_pass=2", "leave it out"),
        ),
        (
            {"algorithm": "maml", "max_staleness": 2},
            ("max_staleness=2", "algorithm=maml", "first-order", "fomaml or reptile"),
        ),
        ({"drop_stale": True}, ("drop_stale=True", "max_staleness")),
        (
            {"algorithm": "none", "task_schedule": "dynamic"},
            ("task_schedule=dynamic means nothing for algorithm=none", "leave it out"),
        ),
        (
            {**TENSOR, "lora_r": 4, "tasks_per_pass": "2"},
            ("tasks_per_pass=2", "tensor_parallel_size=2", "use --tasks_per_pass 1"),
        ),
        *(
            ({**ICL, name: value}, (f"{name}={value}", "algorithm=meta_icl", "leave it out"))
            for name, value in (
                *(("inner_steps", 3), ("inner_lr", 0.3)),
                *(("inner_optimizer", "adamw"), ("support_batch_size", 4)),
            )
        ),
        (
            {**ICL, "loss_on_support": True, "k_shot": 1},  # it needs a second example
            ("loss_on_support=True", "k_shot=1", "use k_shot=2 or more"),
        ),
        (
            {"algorithm": "meta_icl", "task_type": "classification"},
            ("task_type=classification", "algorithm=meta_icl", "use another algorithm"),
        ),
        *(  # samples of the support set are for first-order rules
            (
                {**SAMPLES, "algorithm": name},
                ("support_batch_size=16 with", f"with algorithm={name}", "use fomaml or reptile"),
            )
            for name in ("maml", "anil", "imaml")
        ),
        (
            {**SAMPLES, "lora_r": 4, "tasks_per_pass": "2"},
            ("support_batch_size=16", "with tasks_per_pass=2", "leave one out"),
        ),
    ],
)
def test_conflicts_are_refused_with_the_reason(settings, parts):
    check_message(refusal(Config, **settings), *parts)


PAIRS = [(name, other) for name, rule in rules(Config).items() for other in rule.excludes]


def other_value(name: str) -> Any:
    """A value of a setting that is not its default."""
    item = Config.__dataclass_fields__[name]
    default = default_of(item)
    choices = [one for one in item.metadata.get("choices") or () if one != default]
    kind, is_list = kind_of(Config, name)
    value = choices[0] if choices else {bool: True, int: 2, float: 2.0, str: "2"}[kind]
    return [value] if is_list else value


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_settings_that_exclude_each_other_are_refused(name, other):
    config = Config()
    other, _, value = other.partition("=")
    for setting, chosen in ((name, other_value(name)), (other, value or other_value(other))):
        setattr(config, setting, chosen)
    pair = [f"{one}={shown(getattr(config, one))}" for one in (name, other)]
    found = [line for line in without_effect(config) if line.startswith(f"{pair[0]} with {pair[1]}: ")]
    assert [line.rpartition("; ")[2] for line in found] == ["leave one out"]


@pytest.mark.parametrize("name", [*NOT_ELEMENTWISE, "Muon", "LBFGS"])
def test_optimizers_that_need_whole_matrices_are_refused(name):
    message = refusal(Config, outer_optimizer=name)
    check_message(message, f"outer_optimizer={name}", NOT_ELEMENTWISE[name.lower()], "use adamw or sgd")
    assert message == refusal(parse, ["--outer_optimizer", name])


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("fomaml", ("zero", 5, "no")),
        ("maml", ("zero", 5, "no")),
        ("proto_maml", ("prototype", 5, "no")),
        ("boil", ("learned", 5, "no")),
        ("protonet", ("prototype", 0, "no")),
        ("meta_sgd", ("zero", 5, "element")),
    ],
)
def test_defaults_follow_the_algorithm(algorithm, settings):
    config = Config(algorithm=algorithm)
    assert (config.head_init, config.inner_steps, config.inner_lr_learned) == settings


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {**spread, "algorithm": algorithm}
            for spread in (STAGES, TENSOR)
            for algorithm in ("maml", "imaml", "boil", "meta_sgd", "proto_maml", "joint", "reptile", "none")
        ),
        *({**STAGES, "algorithm": algorithm} for algorithm in ("anil", "protonet")),
        {**STAGES, "algorithm": "proto_maml", "prototype_gradient": True},
        *({**spread, **ICL} for spread in (STAGES, TENSOR)),
        {**ICL, "loss_on_support": True, "k_shot": 2},
        {"lora_r": 4, "lora_alpha": 8.0, "lora_merge": True, "lora_target_modules": ["query", "key"]},
    ],
    ids=str,
)
def test_combinations_are_supported(settings):
    assert Config(**settings)
