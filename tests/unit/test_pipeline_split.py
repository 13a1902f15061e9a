"""Cutting a model into stages, and reading it tensor by tensor: in one process, compared with the whole
model.
"""

import functools
import itertools
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoConfig, AutoModelForCausalLM

from fmmeta.config.settings import Config
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.lazy_weights import LazyModel, open_lazy_model
from fmmeta.learners.load import describe, empty_learner, load_learner
from fmmeta.learners.stages import balance, plan_stages, take_stage
from fmmeta.parallel.layout import GroupCoordinates
from fmmeta.parallel.workers.create import frozen_tensors
from fmmeta.parallel.workers.pipeline import hold_stage
from tests.support.messages import check_message, refusal
from tests.support.models import DECODERS, ENCODERS, save_family


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder per family, made once."""

    @functools.cache
    def folder(family: str, tied: bool = True):
        return save_family(tmp_path_factory.mktemp(family), family, tied)

    return folder


def config_of(folder, family, **settings) -> Config:
    task = "causal_lm" if family in DECODERS and "pooling" not in settings else "classification"
    return Config(model_name_or_path=str(folder), task_type=task, n_way=4, **settings)


def held_stages(config: Config, stages: int):
    """Every stage of a model, each loaded separately."""
    for stage in range(stages):
        stream = open_lazy_model(config, describe(config))
        cut = plan_stages(stream.learner, stages)
        names = hold_stage(stream, cut, GroupCoordinates(stage, stages, stages))
        yield take_stage(stream.learner, cut, stage), names, cut, stream


CASES = [
    *((family, stages, {}) for family in (*DECODERS, *ENCODERS) for stages in (2, 3)),
    ("bert", 3, {"pooling": "mean"}),
    ("roberta", 2, {"pooling": "cls"}),
    ("bert", 2, {"pooling": "model", "head_init": "learned"}),
    ("llama", 3, {"pooling": "model", "head_init": "learned"}),  # scores the last token that is no padding
    ("gpt2", 2, {"pooling": "model", "head_init": "learned"}),
    *((family, 3, {"lora_r": 2, "lora_target_modules": ["all-linear"]}) for family in (*DECODERS, *ENCODERS)),
    ("bert", 2, {"lora_r": 2, "pooling": "mean", "head_init": "learned"}),
    (
        "llama",
        3,
        {"lora_r": 2, "lora_target_modules": ["layers.1.self_attn.q_proj"]},
    ),  # two stages train nothing
]


@pytest.mark.parametrize(("family", "stages", "settings"), CASES)
def test_consecutive_stages_equal_the_model(saved, family, stages, settings):
    config = config_of(saved(family), family, **settings)
    whole = load_learner(config, describe(config))
    found = list(held_stages(config, stages))
    ids = torch.randint(3, 259, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 12:] = mask[2, 15:] = 0
    ids[mask == 0] = 0
    passed = (ids, mask)
    for stage, *_ in found:
        passed = stage(passed)
    wanted = whole(input_ids=ids, attention_mask=mask)
    if whole.head_names:  # features and logits
        assert all(map(torch.equal, passed, wanted))
    else:
        assert torch.equal(passed[mask.bool()], wanted[mask.bool()])
    params = dict(whole.named_parameters())
    listed = [name for _, names, *_ in found for name, _ in names.values()]
    cut = found[0][2]
    double = cut.copied if "lora_r" in settings else cut.tied
    assert sorted(listed) == sorted([*params, *([double] if double else [])])
    assert [cut.tied, cut.copied].count(None) == (2 if double is None else 1)
    assert [sum(p.numel() for p in stage.body.parameters()) for stage, *_ in found] == list(cut.sizes)
    for (stage, names, *_), trained in zip(found, cut.trained, strict=True):
        mine = {names[id(p)][0]: p for p in stage.body.parameters() if p.requires_grad}
        assert sum(p.numel() for p in mine.values()) == trained
        assert all(torch.equal(p, params[name]) for name, p in mine.items())  # adapters of the seed
        assert (stage.idle is None) == (trained > 0)
    if any(stage.idle is not None for stage, *_ in found):
        assert passed.requires_grad


def test_a_stage_without_trained_weights_passes_gradients(saved):
    config = config_of(saved("llama"), "llama", lora_r=2, lora_target_modules=["layers.0.self_attn.q_proj"])
    _, (stage, *_) = held_stages(config, 2)
    ids = torch.randint(3, 259, (2, 9))
    hidden = torch.randn(2, 9, 32, requires_grad=True)
    stage((hidden, ids, torch.ones_like(ids))).square().sum().backward()
    assert float(hidden.grad.abs().max()) > 0
    assert [float(p.grad) for p in stage.parameters() if p.requires_grad] == [0.0]


def test_a_stage_reads_its_own_tensors_only(saved, monkeypatch):
    read = []
    ordinary = LazyModel.read
    monkeypatch.setattr(LazyModel, "read", lambda self, name: read.append(name) or ordinary(self, name))
    for stage, names, *_ in held_stages(config_of(saved("llama", False), "llama"), 3):
        assert sorted(read) == sorted(name for name, _ in names.values())
        assert not any(param.is_meta for param in stage.parameters())
        read.clear()


def test_stage_adapters_equal_those_of_the_model(saved):
    for family, settings in (
        ("gpt2", {"lora_target_modules": ["all-linear"]}),
        ("bert", {"head_init": "learned"}),
        ("bert", {"head_init": "learned", "pooling": "mean"}),
    ):
        assert_same_start(config_of(saved(family), family, lora_r=3, seed=7, **settings))


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.data())
def test_the_balance_is_optimal(weights, data):
    parts = data.draw(st.integers(1, len(weights)))
    bounds = balance(weights, parts)

    def heaviest(cut):
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(cut))

    every = [(0, *inner, len(weights)) for inner in itertools.combinations(range(1, len(weights)), parts - 1)]
    assert tuple(bounds) in every
    assert heaviest(bounds) == min(map(heaviest, every))


def test_a_fresh_head_is_drawn_as_transformers_draws_it(tmp_path, saved):
    """Out of a checkpoint without pooler and classifier, and of one whose classifier has another size."""
    assert_same_start(config_of(saved("bert"), "bert", head_init="learned"))
    tensors = load_file(saved("bert") / "model.safetensors")
    kept = {
        name: value for name, value in tensors.items() if not name.startswith(("classifier", "bert.pooler"))
    }
    (tmp_path / "config.json").write_text((saved("bert") / "config.json").read_text())
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_start(config_of(tmp_path, "bert", head_init="learned", pooling="model"))


def assert_same_start(config: Config) -> None:
    stream = open_lazy_model(config, describe(config))
    for name, param in load_learner(config, describe(config)).named_parameters():
        assert torch.equal(stream.read(name), param), name


def test_names_of_the_base_model_and_old_names_are_found(tmp_path, saved):
    """GPT-2's hub checkpoint lacks the prefix, BERT's oldest call LayerNorm's weight gamma, and files may be
    several.
    """
    for family, rename in (
        ("gpt2", lambda n: n.removeprefix("transformer.")),
        ("bert", lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma")),
    ):
        folder = tmp_path / family
        folder.mkdir()
        tensors = {rename(n): v for n, v in load_file(saved(family) / "model.safetensors").items()}
        (folder / "config.json").write_text((saved(family) / "config.json").read_text())
        files: dict[str, dict] = {"a.safetensors": {}, "b.safetensors": {}}
        for number, (name, value) in enumerate(tensors.items()):
            files["ab"[number % 2] + ".safetensors"][name] = value
        for file, part in files.items():
            save_file(part, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert_same_start(config_of(folder, family))
        os.remove(folder / "b.safetensors")
        config = config_of(folder, family)
        check_message(
            refusal(open_lazy_model, config, describe(config)),
            f"model_name_or_path={folder}",
            "fetch it again",
        )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3_text", "smollm3"])
def test_a_tied_weight_is_found_under_its_other_name(tmp_path, family):
    """save_model of safetensors keeps the first name of a tied weight in alphabetical order, which is
    lm_head.weight.
    """
    folder = save_family(tmp_path, family)
    file = folder / "model.safetensors"
    save_model(AutoModelForCausalLM.from_pretrained(folder), str(file), {"format": "pt"})
    assert [name for name in load_file(file) if name.endswith(("lm_head.weight", "embed_tokens.weight"))] == [
        "lm_head.weight"
    ]
    assert_same_start(config_of(folder, family))


def test_the_builtin_model_is_loaded_lazily():
    for task in ("classification", "causal_lm"):
        assert_same_start(Config(task_type=task))


def test_frozen_tensors_of_a_stage(saved):
    """With fmmeta's pooling BERT's pooler is frozen; it is on the last stage and is exported from there."""
    config = config_of(saved("bert"), "bert", pooling="mean")
    frozen = []
    for stage, (_, _, cut, stream) in enumerate(held_stages(config, 2)):
        held = [name for name, owner in cut.owner.items() if owner == stage]
        frozen.append(sorted(frozen_tensors(stream.learner, held)))
    assert frozen == [[], ["hf.pooler.dense.bias", "hf.pooler.dense.weight"]]


def test_models_that_cannot_be_split_are_refused(tmp_path, saved):
    learner = empty_learner(config := config_of(saved("llama"), "llama"), describe(config))
    check_message(refusal(plan_stages, learner, 4), "pipeline_stages=4", "3 layers", "use 3 or fewer")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "electra",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "embedding_size": 32,
                "intermediate_size": 48,
                "vocab_size": 259,
            }
        )
    )
    learner = empty_learner(config := config_of(tmp_path, "bert"), describe(config))
    check_message(refusal(plan_stages, learner, 2), "model_type=electra", "use --group_size with ZeRO 3")
    check_message(
        refusal(open_lazy_model, config, describe(config)),
        f"model_name_or_path={tmp_path}",
        "convert its weights to safetensors",
    )
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    check_message(
        refusal(open_lazy_model, config, describe(config)),
        f"model_name_or_path={tmp_path}: {tmp_path / 'model.safetensors'} cannot be read (",
    )


def test_a_tensor_of_another_shape_is_refused_in_a_language_model(tmp_path, saved):
    tensors = load_file(saved("llama") / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    (tmp_path / "config.json").write_text((saved("llama") / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = config_of(tmp_path, "llama")
    for read in (load_learner, open_lazy_model):
        check_message(
            refusal(read, config, describe(config)),
            f"model_name_or_path={tmp_path}",
            "[31]",
            "[32]",
            "fix config.json or the weights",
        )


@pytest.mark.parametrize(
    ("family", "settings", "part"),
    [
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, "per_layer"),
        (
            "gemma4_text",
            {
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 1,
                "layer_types": ["full_attention"] * 2,
            },
            "num_kv_shared_layers",
        ),
    ],
)
def test_models_with_parts_outside_of_their_plan_are_refused(family, settings, part):
    """Their stages would compute without what every layer reads beside the hidden states."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = AutoConfig.for_model(family, vocab_size=50, vocab_size_per_layer_input=50, **sizes, **settings)
    with torch.device("meta"):
        learner = CausalLearner(AutoModelForCausalLM.from_config(config))
    check_message(
        refusal(plan_stages, learner, 2), f"model_type={family}", part, "use --group_size with ZeRO 3"
    )
