"""Defaults that follow the algorithm, and settings that are refused together with the reason."""

from typing import Any

import pytest

from fmmeta.cli import parse
from fmmeta.config.algorithms import NOT_ELEMENTWISE
from fmmeta.config.conflicts import without_effect
from fmmeta.config.fields import default_of, kind_of, rules, shown
from fmmeta.config.settings import Config
from tests.support.messages import check_message, refusal

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
            {"algorithm": "maml", "trajectory_memory_gib": -1.0},
            ("trajectory_memory_gib=-1.0", "below 0", "use 0 or more"),
        ),
        (
            {"algorithm": "reptile", "inner_lr_learned": "layer"},
            ("inner_lr_learned=layer", "algorithm=reptile", "leave it out, or use fomaml or maml"),
        ),
        (
            {"inner_lr_groups": ["head"]},
            (
                "inner_lr_groups=head",
                "PATTERN=FACTOR",
                "0 or more",
                "write, say, head=10 or '*embeddings*=0'",
            ),
        ),
        (
            {"inner_lr_groups": ["head=-1"]},
            (
                "inner_lr_groups=head=-1",
                "PATTERN=FACTOR",
                "0 or more",
                "write, say, head=10 or '*embeddings*=0'",
            ),
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
        ({"max_staleness": -1}, ("max_staleness=-1", "0")),
        ({"drop_stale": True}, ("drop_stale=True", "max_staleness")),
        (
            {"algorithm": "none", "task_schedule": "dynamic"},
            ("task_schedule=dynamic means nothing for algorithm=none", "leave it out"),
        ),
        ({"tensor_parallel_size": 0}, ("tensor_parallel_size=0", "use 1 or more")),
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
        ({"support_batch_size": -1}, ("support_batch_size=-1", "use 0 or more")),
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


def test_layer_patterns_are_read_from_flags_and_files(tmp_path):
    assert parse(["--inner_lr_groups", "head=2", "*embed*=0"]).inner_lr_groups == ["head=2", "*embed*=0"]
    (tmp_path / "run.yaml").write_text("inner_lr_groups: [head=2, '*embed*=0']\n")
    assert parse(["--config", str(tmp_path / "run.yaml")]).inner_lr_groups == ["head=2", "*embed*=0"]


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
    ],
    ids=str,
)
def test_combinations_are_supported(settings):
    assert Config(**settings)
