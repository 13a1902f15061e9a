"""The sets of parameters that the inner and the outer loop change."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModel

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.learners.load import describe, load_learner
from fmmeta.learners.parameter_sets import trains_base
from tests.support.messages import check_message, refusal

ADAPTERS = {"lora_r": 2}
SHORT = {"meta_batch_size": 2, "k_shot": 2, "eval_episodes": 0, "num_workers": 0}


def config_of(**settings) -> Config:
    return Config(dataset=["letters"], **settings)


def learner_of(**settings):
    config = config_of(**settings)
    return load_learner(config, describe(config))


def moved_by(learner):
    """What the inner loop changes."""
    return {name for name, param in learner.named_parameters() if param.requires_grad} - learner.outer_only


def kinds(names):
    """What a set of names consists of."""
    return {
        "adapters" if ".lora_" in name else "head" if name.startswith("head.") else "body" for name in names
    }


@pytest.mark.parametrize(
    ("settings", "inner_only", "outer_only"),
    [
        ({}, "", ""),
        ({"algorithm": "anil"}, "", "body"),
        ({"algorithm": "boil"}, "", "head"),
        ({"inner_parameters": ["body"]}, "", "head"),
        ({"inner_parameters": ["head"], "outer_parameters": ["body"]}, "head", "body"),
        ({**ADAPTERS}, "", ""),
        ({**ADAPTERS, "algorithm": "boil"}, "", "head"),
        ({**ADAPTERS, "outer_parameters": ["all"]}, "", "body"),
        ({**ADAPTERS, "outer_parameters": ["body"]}, "adapters head", "body"),
        (
            {**ADAPTERS, "inner_parameters": ["adapters"], "outer_parameters": ["except", "adapters"]},
            "adapters",
            "body head",
        ),
        (
            {**ADAPTERS, "inner_parameters": ["all", "except", "body"], "outer_parameters": ["all"]},
            "",
            "body",
        ),
        ({"algorithm": "joint", **ADAPTERS, "outer_parameters": ["body"]}, "adapters", "body"),
        ({"outer_parameters": ["head"], "head_init": "learned"}, "body", ""),
    ],
    ids=str,
)
def test_sets_by_their_names(settings, inner_only, outer_only):
    learner = learner_of(**settings)
    assert kinds(learner.inner_only) == {*inner_only.split()}
    assert kinds(learner.outer_only) == {*outer_only.split()}
    trained = {name for name, param in learner.named_parameters() if param.requires_grad}
    assert {*learner.inner_only, *learner.outer_only} <= trained
    assert not any("pooler" in name for name in trained)  # it has no gradient
    assert trains_base(learner) == ("lora_r" not in settings or "outer_parameters" in settings)


def test_patterns_and_exceptions():
    learner = learner_of(inner_parameters=["*.layer.0.*", "head", "except", "norms", "*.bias"])
    moved = moved_by(learner)
    assert "head.weight" in moved
    assert all("layer.0" in name and "LayerNorm" not in name for name in moved - {"head.weight"})
    assert not any(name.endswith("bias") for name in moved)
    moved = moved_by(learner_of(inner_parameters=["norms"]))
    assert len(moved) > 2
    assert all("LayerNorm" in name for name in moved)


def test_a_pattern_fits_a_layer_with_and_without_adapters():
    """peft renames those with adapters."""
    learner = learner_of(**ADAPTERS, outer_parameters=["*.query.weight", "*.output.dense.weight"])
    base = {name for name in learner.outer_only if ".query." in name}
    assert base
    assert all("base_layer" in name for name in base)
    assert any(".output.dense.weight" in name for name in learner.outer_only)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"inner_parameters": ["hat"]},
            ["inner_parameters=hat fits no parameter", "use all, head, body or norms"],
        ),
        ({**ADAPTERS, "inner_parameters": ["body"]}, ["inner_parameters=body fits no parameter"]),
        ({"outer_parameters": ["*.lm_head.*"]}, ["outer_parameters=*.lm_head.* fits no parameter"]),
        ({"inner_parameters": ["except", "all"]}, ["inner_parameters=except all leaves no parameter"]),
        ({"inner_parameters": ["all", "except"]}, ["inner_parameters=all except takes nothing out"]),
        ({"inner_parameters": ["adapters"]}, ["fits no parameter", "or give --lora_r 8"]),
        ({"outer_parameters": ["head"]}, ["outer_parameters=head trains nothing", "--head_init learned"]),
        ({"outer_parameters": ["head"], "head_init": "prototype"}, ["trains nothing", "head_init=prototype"]),
        (
            {**ADAPTERS, "inner_parameters": ["adapters", "norms"], "outer_parameters": ["all"]},
            ["inner_parameters=adapters norms has weights below the adapters", "use adapters head"],
        ),
    ],
    ids=str,
)
def test_names_that_fit_nothing_are_refused(settings, parts):
    config = config_of(**settings)
    check_message(refusal(load_learner, config, describe(config)), *parts)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"algorithm": "reptile", "outer_parameters": ["norms"]}, ["outer_parameters=norms is not"]),
        ({"algorithm": "anil", "inner_parameters": ["norms"]}, ["inner_parameters=norms is not"]),
        (
            {**ADAPTERS, "outer_parameters": ["body"], "tasks_per_pass": "2"},
            ["tasks_per_pass=2 is not implemented with outer_parameters=body"],
        ),
    ],
    ids=str,
)
def test_rules_without_two_sets_refuse_them(settings, parts):
    check_message(refusal(config_of, **settings), *parts)


STILL = "head_init=zero: the inner loop does not change the head"


@pytest.mark.parametrize(
    "settings",
    [
        {"inner_parameters": ["norms"]},
        {"inner_parameters": ["*.bias"]},
        {"inner_lr_groups": ["head=0"]},
        {**ADAPTERS, "inner_parameters": ["adapters"], "outer_parameters": ["body"]},
    ],
    ids=str,
)
def test_a_head_of_zeros_has_to_be_in_the_inner_set(settings, tmp_path):
    """Else nothing has a gradient."""
    config = config_of(**settings, **SHORT, outer_steps=1, output_dir=str(tmp_path / "run"))
    check_message(refusal(MetaTrainer(config).train), STILL, "add head")
    if "lora_r" not in settings:
        flags = {"k_shot": [2], "episodes": 2, **settings}
        check_message(refusal(fmmeta.evaluate, "tiny", "letters", **flags), STILL, "--head_init prototype")
        assert fmmeta.evaluate("tiny", "letters", **flags, head_init="prototype")["loss"] > 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base that was trained to be adapted by fresh adapters, after a resume."""
    folder = tmp_path_factory.mktemp("sets")
    settings = {
        **ADAPTERS,
        "inner_parameters": ["adapters", "head"],
        "outer_parameters": ["body"],
        "lora_merge": True,
        **SHORT,
        "save_steps": 1,
        "output_dir": str(folder),
    }
    MetaTrainer(config_of(**settings, outer_steps=2)).train()
    return folder, config_of(**settings, outer_steps=2)


def test_a_base_that_is_trained_is_exported_below_fresh_adapters(trained, tmp_path):
    folder, config = trained
    start = load_learner(config, describe(config))
    base = AutoModel.from_pretrained(folder / "model" / "base")
    before = dict(start.hf.named_parameters())
    for name, param in base.named_parameters():
        if "pooler" not in name:
            layer, _, kind = name.rpartition(".")
            assert not torch.equal(param, before.get(name, before.get(f"{layer}.base_layer.{kind}"))), name
    stored = load_file(folder / "model" / "adapter_model.safetensors")
    for name, value in stored.items():
        own = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        torch.testing.assert_close(value, before[own])
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        plain = base.eval()(ids).last_hidden_state
        merged = AutoModel.from_pretrained(folder / "merged").eval()(ids).last_hidden_state
        adapted = PeftModel.from_pretrained(base, folder / "model").eval()(ids).last_hidden_state
    torch.testing.assert_close(merged, plain)  # an adapter begins with B = 0
    torch.testing.assert_close(adapted, plain)


def test_its_folder_is_adapted_and_the_base_stays(trained, tmp_path):
    """The folder may have moved: its base is found inside it."""
    folder, _ = trained
    moved = tmp_path / "moved"
    (folder / "model").rename(moved)
    try:
        rows = [{"text": text, "label": label} for text, label in (("abc", "x"), ("xyz", "y")) * 2]
        fmmeta.adapt(moved, rows, output_dir=tmp_path / "adapted", early_stopping=False)
        folders = moved, tmp_path / "adapted"
        before, after = (load_file(each / "adapter_model.safetensors") for each in folders)
        assert before.keys() <= after.keys()
        assert all(after[name].abs().max() > 0 for name in before if "lora_B" in name)
        assert not (tmp_path / "adapted" / "base").exists()
        card = (tmp_path / "adapted" / "README.md").read_text()
        assert "changed by the inner loop: `adapters head`" in card
    finally:
        moved.rename(folder / "model")
