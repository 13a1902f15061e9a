"""Settings are checked one by one; some defaults depend on other settings; some may change on resume."""

import math
import re
from dataclasses import fields

import numpy
import pytest

from fmmeta.config.fields import of_type, rules
from fmmeta.config.resume import FREE_ON_RESUME, HIDDEN_ON_RESUME, changed_settings
from fmmeta.config.settings import KEYED, REMEMBERED, Config, InnerConfig
from tests.support.messages import check_message, refusal

COMPANIONS = {  # settings without which a choice is refused
    ("inner_optimizer", "adamw"): {"algorithm": "reptile"},
    ("algorithm", "in_context"): {"task_type": "causal_lm"},
    ("algorithm", "meta_icl"): {"task_type": "causal_lm"},
    ("pipeline_balance", "time"): {"pipeline_stages": 2},
    ("n_way", 1): {"task_type": "regression"},
    ("second_order", "autograd"): {"algorithm": "maml"},
    ("second_order", "differences"): {"algorithm": "maml"},
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
    assert re.match(
        f"{name}=nonsense is unknown(; did you mean .*)?; use ", refusal(Config, **{name: "nonsense"})
    )
    for choice in CHOICES[name]:
        assert getattr(Config(**{name: choice, **COMPANIONS.get((name, choice), {})}), name) in (
            choice,
            [choice],
        )


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
        ("head_init", "x", ("head_init=x", "use zero, learned or prototype")),
        ("engine", "x", ("engine=x", "use auto, deepspeed or plain")),
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
        ("algorithm", None, ("algorithm=None", "give one")),
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
        (
            "inner_lr_groups",
            ["head=1e40"],
            (
                "inner_lr_groups=head=1e40",
                "PATTERN=FACTOR",
                "0 or more",
                "write, say, head=10 or '*embeddings*=0'",
            ),
        ),
        (
            "inner_lr_groups",
            ["head=nan"],
            (
                "inner_lr_groups=head=nan",
                "PATTERN=FACTOR",
                "0 or more",
                "write, say, head=10 or '*embeddings*=0'",
            ),
        ),
    ],
)
def test_unknown_choices_and_values_of_wrong_type_or_range_are_refused(name, value, parts):
    check_message(refusal(Config, **{name: value}), *parts)


def test_values_are_converted_to_their_types(tmp_path):
    config = Config(n_way=numpy.int64(5), inner_lr=1, dataset=tmp_path, group_size=2, report_to="tensorboard")
    assert (config.n_way, config.inner_lr, config.dataset) == (5, 1.0, [str(tmp_path)])
    assert (config.group_size, config.report_to) == ("2", ["tensorboard"])
    assert [type(value) for value in (config.n_way, config.inner_lr)] == [int, float]


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
    ],
)
def test_default_rates_follow_model_and_optimizer(settings, name, rate):
    config = Config(**settings)
    assert getattr(config, name) == config.as_dict()[name] == rate


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
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
        ({"num_workers": "²"}, ("num_workers=²", "use auto, or 0 or more")),
        (
            {"tasks_per_pass": "²"},
            ("tasks_per_pass=²", "use auto, or 1 or more"),
        ),
        (
            {"trajectory_memory_gib": math.inf, "algorithm": "maml"},
            ("trajectory_memory_gib=inf", "use 0 or more, up to 3.4e+38"),
        ),
        (
            {"trajectory_memory_gib": math.nan, "algorithm": "maml"},
            ("trajectory_memory_gib=nan", "use 0 or more, up to 3.4e+38"),
        ),
        ({"max_bad_fraction": 1.5}, ("max_bad_fraction=1.5", "use 0 or more, up to 1")),
        (
            {"task_type": "causal_lm", "text_column": "t"},
            ("text_column=t", "task_type=causal_lm", "leave it out"),
        ),
        (
            {"task_type": "causal_lm", "pooling": "mean"},
            ("pooling=mean", "task_type=causal_lm", "leave it out"),
        ),
        ({"output_column": "o"}, ("output_column=o", "task_type=classification", "leave it out")),
    ],
)
def test_settings_of_the_data_and_of_the_other_task_type_are_checked(settings, parts):
    check_message(refusal(Config, **settings), *parts)


def test_defaults_are_not_shared():
    Config().dataset.append("other")
    assert len(Config().dataset) == 1


def test_every_setting_has_a_help_text():
    assert [item.name for item in fields(Config) if len(item.metadata.get("help", "")) < 10] == []


def test_changed_settings_are_listed():
    before, now = Config().as_dict(), Config(seed=7, group_size="2", output_dir="x", inner_lr=0.5).as_dict()
    assert changed_settings(before, now) == {
        "inner_lr": f"inner_lr: {Config().inner_lr} -> 0.5",
        "seed": "seed: 42 -> 7",
    }
    assert changed_settings({**before, "dataset_fingerprint": "a"}, before) == {
        "dataset_fingerprint": "dataset_fingerprint: a -> None"
    }
    assert changed_settings(before, {**before, "new_setting": 1}) == {"new_setting": "new_setting: None -> 1"}


def test_rules_of_settings_decide_resume_and_storage():
    """A setting without rules is compared on resume and not stored with models."""
    assert {"save_steps", "micro_batch_size", "output_dir"} <= FREE_ON_RESUME
    assert not {"seed", "inner_lr", "bf16", "max_length"} & FREE_ON_RESUME
    assert {
        "output_dir",
        "run_name",
        "log_level",
        "resume_from_checkpoint",
        "accept_changed_settings",
    } == HIDDEN_ON_RESUME
    assert {item.name for item in fields(InnerConfig)} < set(REMEMBERED)
    assert {"max_length", "lora_r"} <= set(REMEMBERED)
    assert "seed" not in REMEMBERED
    assert {"max_length", "text_column", "max_file_gib"} <= set(KEYED)
    assert "n_way" not in KEYED


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lora_alpha": 8.0}, "lora_alpha=8.0"),
        ({"lora_target_modules": ["query", "key"]}, "lora_target_modules=query key"),
        ({"lora_merge": True}, "lora_merge=True"),
    ],
)
def test_settings_of_lora_need_a_rank(settings, named):
    check_message(refusal(Config, **settings), named, "lora_r=0", "leave it out, or give --lora_r")
    assert Config(lora_r=4, **settings)


def test_lora_alpha_is_positive_and_twice_the_rank_by_default():
    assert Config(lora_r=6).lora_alpha == 12
    assert Config(lora_r=6, lora_alpha=3).lora_alpha == 3
    check_message(refusal(Config, lora_r=6, lora_alpha=0), "lora_alpha=0.0", "use one, such as twice lora_r")
