"""Defaults that follow the algorithm, and settings that are refused together with the reason."""

from __future__ import annotations

import pytest

from fmmeta.cli import parse
from fmmeta.config.algorithms import NOT_ELEMENTWISE
from fmmeta.config.settings import Config
from tests.support.helpers import refusal
from tests.support.messages import check_message

ADAM = {"inner_optimizer": "adamw"}


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
            {"inner_optimizer_state": "kept"},
            ("inner_optimizer_state=kept", "algorithm=fomaml", "inner_optimizer=sgd", "use reset"),
        ),
        (
            {"algorithm": "reptile", "inner_lr_learned": "layer"},
            ("inner_lr_learned=layer", "algorithm=reptile", "leave it out, or use fomaml or maml"),
        ),
        (
            {"inner_lr_learned": "element", "inner_lr_schedule": "linear"},
            (
                "inner_lr_schedule=linear",
                "inner_lr_learned=element",
                "use constant, or inner_lr_learned=layer",
            ),
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
        ({"inner_beta2": 1.0}, ("inner_beta2=1.0", "[0, 1)", "use 0.999, say")),
        ({"outer_lr": 0.0}, ("outer_lr=0.0", "use one, such as 2e-5 for all weights of a checkpoint")),
        ({"inner_epsilon": 0.0}, ("inner_epsilon=0.0", "use one, such as 1e-08")),
    ],
)
def test_conflicts_are_refused_with_the_reason(settings, parts):
    check_message(refusal(Config, **settings), *parts)


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


STAGES, TENSOR = {"pipeline_stages": 2}, {"tensor_parallel_size": 2}
CAUSAL = {"task_type": "causal_lm"}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {**STAGES, "engine": "plain"},
            ("engine=plain", "leave out pipeline_stages"),
        ),
        ({"tensor_parallel_size": 0}, ("tensor_parallel_size=0", "use 1 or more")),
        (
            {**TENSOR, "lora_r": 4, "tasks_per_pass": "2"},
            ("tasks_per_pass=2", "tensor_parallel_size=2", "use --tasks_per_pass 1"),
        ),
    ],
)
def test_parallelism_conflicts_are_refused(settings, parts):
    check_message(refusal(Config, **settings), *parts)


@pytest.mark.parametrize(
    "algorithm", ["maml", "imaml", "boil", "meta_sgd", "proto_maml", "joint", "reptile", "none", "meta_icl"]
)
@pytest.mark.parametrize("spread", [STAGES, TENSOR])
def test_algorithms_supported_with_model_parallelism(spread, algorithm):
    assert Config(**spread, algorithm=algorithm, **(CAUSAL if algorithm == "meta_icl" else {}))


@pytest.mark.parametrize(
    "setting",
    [{"inner_steps": 3}, {"inner_lr": 0.3}, {"inner_optimizer": "adamw"}, {"support_batch_size": 4}],
)
def test_meta_icl_refuses_settings_of_the_inner_loop(setting):
    ((name, value),) = setting.items()
    message = refusal(Config, algorithm="meta_icl", **CAUSAL, **setting)
    check_message(message, f"{name}={value}", "algorithm=meta_icl", "leave it out")


def test_loss_on_support_needs_a_second_example():
    settings = {"algorithm": "meta_icl", "loss_on_support": True, **CAUSAL}
    check_message(
        refusal(Config, **settings, k_shot=1), "loss_on_support=True", "k_shot=1", "use k_shot=2 or more"
    )
    assert Config(**settings, k_shot=2)


def test_meta_icl_is_for_language_models():
    message = refusal(Config, algorithm="meta_icl", task_type="classification")
    check_message(message, "task_type=classification", "algorithm=meta_icl", "use another algorithm")


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "anil"},
        {"algorithm": "protonet"},
        {"algorithm": "proto_maml", "prototype_gradient": True},
    ],
)
def test_feature_gradients_are_supported_with_stages(settings):
    assert Config(**STAGES, **settings)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        *(
            ({"algorithm": name}, (f"with algorithm={name}", "use fomaml or reptile"))
            for name in ("maml", "anil", "imaml")
        ),
        ({"lora_r": 4, "tasks_per_pass": "2"}, ("with tasks_per_pass=2", "leave one out")),
        ({"support_batch_size": -1}, ("support_batch_size=-1", "use 0 or more")),
    ],
)
def test_samples_of_the_support_set_are_for_first_order_rules(settings, parts):
    check_message(refusal(Config, **{"support_batch_size": 16, **settings}), "support_batch_size=", *parts)
