"""Cutting a model into stages of equal parameters or time, and reading it tensor by tensor: in one process,
compared with the whole model.
"""

import functools
import itertools
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoConfig, AutoModelForCausalLM

from fmmeta.config.settings import Config
from fmmeta.learners import stages
from fmmeta.learners.causal_lm import CausalLearner
from fmmeta.learners.lazy_weights import LazyModel, open_lazy_model
from fmmeta.learners.load import describe, empty_learner, load_learner
from fmmeta.learners.stages import balance, layer_seconds, plan_stages, take_stage
from fmmeta.parallel.layout import GroupCoordinates
from fmmeta.parallel.workers.create import frozen_tensors
from fmmeta.parallel.workers.pipeline import hold_stage
from tests.support.messages import check_message, refusal
from tests.support.models import DECODERS, ENCODERS, save, save_family, tiny


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


def lazy(config: Config) -> LazyModel:
    return open_lazy_model(config, describe(config))


def held_stages(config: Config, count: int):
    """Every stage of a model, each loaded separately."""
    for stage in range(count):
        stream = lazy(config)
        cut = plan_stages(stream.learner, count)
        names = hold_stage(stream, cut, GroupCoordinates(stage, count, count))
        yield take_stage(stream.learner, cut, stage), names, cut, stream


def assert_same_start(config: Config) -> None:
    stream = lazy(config)
    for name, param in load_learner(config, describe(config)).named_parameters():
        assert torch.equal(stream.read(name), param), name


def with_tensors(folder, source, *files: dict[str, torch.Tensor]):
    """A checkpoint with the configuration of another and these tensors, in one file or several."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((source / "config.json").read_text())
    names = [f"{number}.safetensors" for number in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


CASES = [
    *((family, count, {}) for family in (*DECODERS, *ENCODERS) for count in (2, 3)),
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


@pytest.mark.parametrize(("family", "count", "settings"), CASES)
def test_consecutive_stages_equal_the_model(saved, family, count, settings):
    config = config_of(saved(family), family, **settings)
    whole = load_learner(config, describe(config))
    found = list(held_stages(config, count))
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


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.data())
def test_the_balance_is_optimal(weights, data):
    parts = data.draw(st.integers(1, len(weights)))
    bounds = balance(weights, parts)

    def heaviest(cut):
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(cut))

    every = [(0, *inner, len(weights)) for inner in itertools.combinations(range(1, len(weights)), parts - 1)]
    assert tuple(bounds) in every
    assert heaviest(bounds) == min(map(heaviest, every))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt2", {"lora_r": 3, "seed": 7, "lora_target_modules": ["all-linear"]}),
        ("bert", {"lora_r": 3, "seed": 7, "head_init": "learned"}),
        ("bert", {"lora_r": 3, "seed": 7, "head_init": "learned", "pooling": "mean"}),
        ("bert", {"head_init": "learned"}),  # a classifier of another size
    ],
)
def test_adapters_and_fresh_heads_are_drawn_as_for_the_whole_model(saved, family, settings):
    assert_same_start(config_of(saved(family), family, **settings))


@pytest.mark.parametrize("task", ["classification", "causal_lm"])
def test_the_builtin_model_is_loaded_lazily(task):
    assert_same_start(Config(task_type=task))


@pytest.mark.parametrize(
    ("family", "rename", "settings"),
    [
        ("gpt2", lambda name: name.removeprefix("transformer."), {}),
        ("bert", lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma"), {}),
        (  # without pooler and classifier
            "bert",
            lambda name: "" if name.startswith(("classifier", "bert.pooler")) else name,
            {"head_init": "learned", "pooling": "model"},
        ),
    ],
)
def test_names_of_the_base_model_and_old_names_are_found(tmp_path, saved, family, rename, settings):
    """GPT-2's hub checkpoint lacks the prefix, BERT's oldest call LayerNorm's weight gamma, and files may be
    several.
    """
    tensors = [(rename(n), v) for n, v in load_file(saved(family) / "model.safetensors").items() if rename(n)]
    folder = with_tensors(tmp_path / family, saved(family), dict(tensors[::2]), dict(tensors[1::2]))
    config = config_of(folder, family, **settings)
    assert_same_start(config)
    (folder / "1.safetensors").unlink()
    check_message(refusal(lazy, config), f"model_name_or_path={folder}", "fetch it again")


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
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    AutoConfig.for_model("electra", embedding_size=32, vocab_size=259, **sizes).save_pretrained(tmp_path)
    learner = empty_learner(config := config_of(tmp_path, "bert"), describe(config))
    check_message(refusal(plan_stages, learner, 2), "model_type=electra", "use --group_size with ZeRO 3")
    given = f"model_name_or_path={tmp_path}"
    check_message(refusal(lazy, config), given, "convert its weights to safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    check_message(refusal(lazy, config), f"{given}: {tmp_path / 'model.safetensors'} cannot be read (")
    tensors = load_file(saved("llama") / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    config = config_of(with_tensors(tmp_path / "shape", saved("llama"), tensors), "llama")
    for read in (load_learner, open_lazy_model):
        message = refusal(read, config, describe(config))
        check_message(message, f"{given}/shape", "[31]", "[32]", "fix config.json or the weights")


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


CPU = torch.device("cpu")


def test_a_large_head_takes_time_and_a_large_embedding_does_not(tmp_path):
    """Both have 8000 x 64 parameters: equal parts of parameters are not equal parts of time."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 96, "vocab_size": 8000}
    model = tiny("llama", **sizes, num_key_value_heads=4, tie_word_embeddings=False)
    learner = lazy(config_of(save(model, tmp_path), "llama")).learner
    seconds = layer_seconds(learner, 8, 64, CPU, bf16=False)
    assert len(seconds) == 8
    assert seconds[-1] > 3 * max(seconds[:-1])
    assert seconds[1:7] == [seconds[1]] * 6  # one kind, tried once
    assert all(param.is_meta for param in learner.parameters())
    by_parameters, by_time = plan_stages(learner, 2), plan_stages(learner, 2, seconds)
    assert by_parameters.bounds == (0, 4, 8)
    assert by_time.bounds[1] > 4
    assert sum(by_time.sizes) == sum(by_parameters.sizes) == sum(p.numel() for p in learner.parameters())


def test_the_cut_follows_the_costs(saved):
    learner = lazy(config_of(saved("llama"), "llama")).learner
    assert plan_stages(learner, 2, [1.0, 1.0, 3.0]).bounds == (0, 2, 3)
    assert plan_stages(learner, 2, [3.0, 1.0, 1.0]).bounds == (0, 1, 3)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_every_family_is_measured_layer_by_layer(tmp_path, monkeypatch, family):
    """Four stages: without layers, first, middle, last; Gemma 2's middle layers differ in how far they look,
    so that both are measured.
    """
    held, ordinary = [], stages.with_random_weights

    def counting(stage, *rest):
        names = " ".join(name for name, _ in stage.body.named_parameters())
        held.append(len(set(re.findall(r"\b(?:layers|h|layer)\.\d+\b", names))))
        return ordinary(stage, *rest)

    monkeypatch.setattr(stages, "with_random_weights", counting)
    settings = {
        "lora_r": 2,
        "lora_target_modules": ["all-linear"],
        "gradient_checkpointing": family == "bert",
    }
    learner = lazy(config_of(save_family(tmp_path, family, layers=4), family, **settings)).learner
    seconds = layer_seconds(learner, 2, 16, CPU, bf16=family == "gpt2")
    assert held == ([0, 1, 1, 1, 1] if family == "gemma2" else [0, 1, 1, 1])
    assert len(seconds) == 4
    assert min(seconds) > 0


def test_layers_with_different_attention_windows_are_two_kinds(tmp_path):
    learner = lazy(config_of(save_family(tmp_path, "qwen2", layers=4), "qwen2")).learner
    kinds = [stages.kind_of(learner, layer, at) for at, layer in enumerate(learner.hf.model.layers)]
    assert kinds[0] != kinds[1]
    assert kinds[1] == kinds[2] == kinds[3]


def test_pipeline_balance_without_stages_is_refused():
    message = refusal(Config, pipeline_balance="time")
    check_message(message, "pipeline_balance=time", "pipeline_stages=1", "leave it out")
    assert Config(pipeline_balance="time", pipeline_stages=2).pipeline_balance == "time"
