"""Settings of algorithms: what each algorithm takes by default, and the reason for everything that is
refused.
"""

from __future__ import annotations

import pytest

from fmmeta.cli import parse
from fmmeta.config.conflicts import NOT_ELEMENTWISE
from fmmeta.config.settings import Config
from tests.support.helpers import refusal

ADAM = {"inner_optimizer": "adamw"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"algorithm": "maml", **ADAM},
            (
                "inner_optimizer=adamw with algorithm=maml: the meta-gradient through Adam's moments is not "
                "implemented; use sgd or momentum, or algorithm=fomaml or reptile"
            ),
        ),
        (
            {"inner_weight_decay": 0.1},
            (
                "inner_weight_decay=0.1 means nothing for inner_optimizer=sgd; leave it out, or use "
                "--inner_optimizer "
                "adamw"
            ),
        ),
        (
            {"cg_steps": 9},
            "cg_steps=9 is not supported by algorithm=fomaml; leave it out, or use imaml",
        ),
        (
            {"inner_lr_outer_lr": 0.1},
            (
                "inner_lr_outer_lr=0.1 means nothing for inner_lr_learned=no; leave it out, or use"
                " --inner_lr_learned layer or element"
            ),
        ),
        (
            {"trajectory_memory_gib": 1.0},
            (
                "trajectory_memory_gib=1.0 means nothing for algorithm=fomaml, which keeps no trajectory;"
                " leave it out"
            ),
        ),
        (
            {"algorithm": "maml", "trajectory_memory_gib": -1.0},
            "trajectory_memory_gib=-1.0 is below 0; use 0 or more",
        ),
        (
            {"inner_optimizer_state": "kept"},
            (
                "inner_optimizer_state=kept keeps Reptile's Adam moments, and here are algorithm=fomaml and "
                "inner_optimizer=sgd; "
                "use reset"
            ),
        ),
        (
            {"algorithm": "reptile", "inner_lr_learned": "layer"},
            (
                "inner_lr_learned=layer is not supported by algorithm=reptile; leave it out, or use fomaml or"
                " maml or proto_maml or meta_sgd"
            ),
        ),
        (
            {"inner_lr_learned": "element", "inner_lr_schedule": "linear"},
            (
                "inner_lr_schedule=linear with inner_lr_learned=element: "
                "one rate "
                "per element serves all steps; use constant, or inner_lr_learned=layer"
            ),
        ),
        (
            {"inner_lr_groups": ["head"]},
            (
                "inner_lr_groups=head is no PATTERN=FACTOR with a factor of 0 or more; write, say, "
                "head=10 or "
                "'*embeddings*=0'"
            ),
        ),
        (
            {"inner_lr_groups": ["head=-1"]},
            (
                "inner_lr_groups=head=-1 is no PATTERN=FACTOR with a factor of 0 or more; write, say, "
                "head=10 "
                "or '*embeddings*=0'"
            ),
        ),
        (
            {"eval_steps": 5, "eval_episodes": 0},
            "eval_steps=5 means nothing for eval_episodes=0; leave it out, or give --eval_episodes",
        ),
        ({"inner_steps": 0}, "inner_steps=0 leaves algorithm=fomaml nothing to learn through; use 1 or more"),
        (
            {"first_order_steps": 3},
            (
                "first_order_steps=3 is not supported by algorithm=fomaml; leave it out, or use maml or anil"
                " or boil or proto_maml or meta_sgd"
            ),
        ),
        (
            {"algorithm": "reptile", "multi_step_loss_steps": 3},
            (
                "multi_step_loss_steps=3 is not supported by algorithm=reptile; leave it out, or use fomaml"
                " or maml or boil or proto_maml or meta_sgd"
            ),
        ),
        (
            {"prototype_gradient": True},
            (
                "prototype_gradient=True means nothing for algorithm=fomaml and head_init=zero; use it with "
                "head_init=prototype and an algorithm that differentiates through the inner loop"
            ),
        ),
        (
            {"check_meta_gradient": True},
            (
                "check_meta_gradient=True is not supported by algorithm=fomaml; leave it out, or use maml or"
                " imaml or boil or proto_maml or meta_sgd"
            ),
        ),
        (
            {"algorithm": "anil", **ADAM},
            (
                "inner_optimizer=adamw with algorithm=anil: the meta-gradient through Adam's moments is not "
                "implemented; use sgd or momentum, or algorithm=fomaml or reptile"
            ),
        ),
        (
            {"algorithm": "imaml", "inner_optimizer": "momentum"},
            (
                "inner_optimizer=momentum with algorithm=imaml is not tested: the "
                "proximal "
                "loop only has to reach its minimum; use sgd with more --inner_steps"
            ),
        ),
        (
            {"algorithm": "boil", "head_init": "zero"},
            "head_init=zero contradicts algorithm=boil, whose head is learned; leave --head_init out",
        ),
        (
            {"algorithm": "protonet", "head_init": "learned"},
            (
                "head_init=learned contradicts algorithm=protonet, whose head is "
                "prototype; "
                "leave --head_init out"
            ),
        ),
        (
            {"algorithm": "anil", "task_type": "causal_lm"},
            (
                "task_type=causal_lm does not go with algorithm=anil, which is for classification; use"
                " another algorithm"
            ),
        ),
        (
            {"algorithm": "meta_sgd", "inner_lr_learned": "layer"},
            (
                "inner_lr_learned=layer contradicts algorithm=meta_sgd, which "
                "learns every "
                "element's; leave it out"
            ),
        ),
        (
            {"algorithm": "anil", "inner_lr_learned": "layer"},
            (
                "inner_lr_learned=layer is not supported by algorithm=anil; leave it out, or use fomaml or"
                " maml or proto_maml or meta_sgd"
            ),
        ),
        (
            {"algorithm": "boil", "inner_lr_groups": ["head=2"]},
            "inner_lr_groups=head=2 contradicts algorithm=boil, which is a choice of layers; leave it out",
        ),
        (
            {"algorithm": "in_context"},
            (
                "task_type=classification does not go with algorithm=in_context, which is for causal_lm; use"
                " another algorithm"
            ),
        ),
        (
            {"algorithm": "joint", "head_init": "learned"},
            (
                "head_init=learned with algorithm=joint: its head is that of the training "
                "classes and no start for others; use zero or prototype"
            ),
        ),
        ({"inner_momentum": 1.0}, "inner_momentum=1.0 is not in [0, 1); use 0.9, say"),
        ({"outer_momentum": -0.1}, "outer_momentum=-0.1 is not in [0, 1); use 0.9, say"),
    ],
)
def test_contradictions_are_refused_with_the_reason(settings, said):
    assert refusal(Config, **settings) == said


@pytest.mark.parametrize("name", [*NOT_ELEMENTWISE, "Muon", "LBFGS"])
def test_optimizers_that_need_whole_matrices_are_refused(name):
    said = refusal(Config, outer_optimizer=name)
    assert said.startswith(
        f"outer_optimizer={name} does not act element by element: {NOT_ELEMENTWISE[name.lower()]}, and"
        " theta is "
    )
    assert said == refusal(parse, ["--outer_optimizer", name])


def test_lists_of_layers_come_from_flags_and_files(tmp_path):
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
    ("settings", "said"),
    [
        (
            {**STAGES, **TENSOR},
            (
                "pipeline_stages=2 and tensor_parallel_size=2 are not combined; use one of them, with data "
                "parallelism beside it"
            ),
        ),
        (
            {**STAGES, "engine": "plain"},
            (
                "engine=plain holds a whole model on one rank; leave out pipeline_stages and "
                "tensor_parallel_size"
            ),
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 is below 1; use 1 or more"),
        (
            {**STAGES, **CAUSAL, "packing": True},
            (
                "pipeline_stages=2 with packing=True: stages before the last run the base model, "
                "which does not support packed rows; use ZeRO 3, or leave packing out"
            ),
        ),
        (
            {**TENSOR, "lora_r": 4},
            (
                "tensor_parallel_size=2 with lora_r=4: adapters are not split with the weights of "
                "their layers; use ZeRO 3, or leave lora_r out"
            ),
        ),
        (
            {**TENSOR, **CAUSAL, "packing": True},
            (
                "tensor_parallel_size=2 with packing=True: packed rows are not tested with split "
                "attention heads; use ZeRO 3, or leave packing out"
            ),
        ),
        (
            {**TENSOR, "algorithm": "anil"},
            (
                "tensor_parallel_size=2 with algorithm=anil: gradients through features are not"
                " implemented for split layers (each rank of a tensor set needs those of its rows, and one of"
                " them holds the rows); use ZeRO 3 or pipeline stages"
            ),
        ),
        (
            {**TENSOR, "algorithm": "proto_maml", "prototype_gradient": True},
            (
                "tensor_parallel_size=2 with prototype_gradient=True: gradients through features are not"
                " implemented for split layers (each rank of a tensor set needs those of its rows, and one of"
                " them holds the rows); use ZeRO 3 or pipeline stages"
            ),
        ),
        (
            {**STAGES, **CAUSAL, "algorithm": "in_context"},
            (
                "pipeline_stages=2 with algorithm=in_context is not tested: whole support "
                "sets travel as prompts; use ZeRO 3"
            ),
        ),
    ],
)
def test_ways_to_spread_a_model_and_what_they_do_not_go_with(settings, said):
    assert refusal(Config, **settings) == said


@pytest.mark.parametrize(
    "algorithm", ["maml", "imaml", "boil", "meta_sgd", "proto_maml", "joint", "reptile", "none"]
)
@pytest.mark.parametrize("spread", [STAGES, TENSOR])
def test_algorithms_that_go_with_stages_and_tensor_ranks(spread, algorithm):
    assert Config(**spread, algorithm=algorithm)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "anil"},
        {"algorithm": "protonet"},
        {"algorithm": "proto_maml", "prototype_gradient": True},
    ],
)
def test_gradients_through_features_go_with_stages(settings):
    assert Config(**STAGES, **settings)
