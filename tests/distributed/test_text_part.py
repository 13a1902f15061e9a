"""The language model of a checkpoint with other parts ends where the oracle ends on it alone, on every
layout, and the whole model works with what is written.
"""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

from fmmeta import Config, MetaTrainer, adapt, load
from fmmeta.checkpoint import hf_export
from fmmeta.learners.load import describe, empty_hf, load_learner
from tests.support.helpers import fast_or_slow
from tests.support.matrix import Case, Launches, ParityFixture, kind_of, selected, tolerance
from tests.support.messages import check_message, refusal
from tests.support.models import save, write_pairs

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"num_hidden_layers": 2, "head_dim": 8, "vocab_size": 259, "max_position_embeddings": 128}
TEXT |= {"initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION |= {"image_size": 16, "patch_size": 8}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 8}
WHOLES = {  # class of the configuration, language model, vision, more; the class of the language model
    "gemma3": (
        transformers.Gemma3Config,
        {"sliding_window": 8, "query_pre_attn_scalar": 8},
        VISION,
        {"mm_tokens_per_image": 4, "image_token_index": 255, "boi_token_index": 256, "eoi_token_index": 257},
        "Gemma3ForCausalLM",
    ),
    "llava": (
        transformers.LlavaConfig,
        {"model_type": "llama"},
        {"model_type": "clip_vision_model", **VISION},
        {"image_token_index": 258},
        "LlamaForCausalLM",
    ),
    "mistral3": (
        transformers.Mistral3Config,
        {"model_type": "mistral"},
        {"model_type": "pixtral", **VISION},
        {"image_token_index": 258, "tie_word_embeddings": False},
        "MistralForCausalLM",
    ),
    "llama4": (
        transformers.Llama4Config,
        {"intermediate_size_mlp": 48, "num_local_experts": 4, "intermediate_size": 16}
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": 8, "no_rope_layers": [1, 0]},
        {**VISION, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32}
        | {"projector_output_dim": 32},
        {"image_token_index": 258, "tie_word_embeddings": False},
        "Llama4ForCausalLM",
    ),
    "qwen3_5": (
        transformers.Qwen3_5Config,
        {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8, **LINEAR},
        {**QWEN_VISION, "out_hidden_size": 32, "num_position_embeddings": 16},
        {
            "image_token_id": 258,
            "video_token_id": 257,
            "vision_start_token_id": 255,
            "vision_end_token_id": 256,
        },
        "Qwen3_5ForCausalLM",
    ),
}
# layout, stage, algorithm, family, outer, also, pipeline stages, or tensor ranks as -T
FAST = [
    ((1, 1), "plain", "reptile", "qwen3_5", "sgd", "nothing", 1),
    ((1, 2), 3, "fomaml", "gemma3", "sgd", "nothing", 1),
    ((1, 2), 0, "fomaml", "llava", "sgd", "nothing", 2),
]
SLOW = [
    ((2, 1), "plain", "maml", "gemma3", "adamw", "lora", 1),
    ((1, 2), 2, "fomaml", "gemma3", "adamw", "nothing", 1),
    ((1, 2), 3, "fomaml", "llava", "sgd", "lora", 1),
    ((1, 2), 0, "fomaml", "mistral3", "sgd", "nothing", -2),
    ((2, 2), 3, "reptile", "mistral3", "sgd", "nothing", 1),
    ((1, 2), 3, "fomaml", "llama4", "adamw", "nothing", 1),
    ((1, 1), "plain", "maml", "llama4", "sgd", "lora-experts", 1),
    ((2, 2), 2, "fomaml", "qwen3_5", "sgd", "lora-linear", 1),
]
CASES = [
    Case.of_row(layout, stage, algorithm, family, "fp32", outer, "zero", also, spread)
    for layout, stage, algorithm, family, outer, also, spread in [*FAST, *SLOW]
]


def whole(family: str):
    """A whole model with random weights."""
    kind, text, vision, more, _ = WHOLES[family]
    torch.manual_seed(0)
    config = kind(text_config={**TEXT, **text}, vision_config=vision, **more)
    return transformers.AutoModelForImageTextToText.from_config(config).float().eval()


def text_alone(family: str):
    """The language model of `whole`, by its own class."""
    model = whole(family)
    text = model.config.get_text_config()
    text.tie_word_embeddings = model.config.tie_word_embeddings
    alone = getattr(transformers, WHOLES[family][-1])(text)
    tensors = {
        name.replace("model.language_model.", "model.").removeprefix("language_model."): tensor
        for name, tensor in model.state_dict().items()
        if "language_model" in name or name.startswith("lm_head")
    }
    alone.load_state_dict(tensors)
    return alone.eval()


class WholeFixture(ParityFixture):
    def _model(self, name):
        return save(whole(name), self.folder / name)

    def _reference(self, settings, counted="[]"):
        given = json.loads(settings)
        family = Path(given["model_name_or_path"]).name
        given["model_name_or_path"] = str(save(text_alone(family), self.folder / f"{family}-text"))
        return super()._reference(json.dumps(given, sort_keys=True), counted)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return WholeFixture(tmp_path_factory.mktemp("wholes"))


@pytest.fixture(scope="module")
def outcomes(request, bench):
    return Launches(bench, selected(request), kind_of).outcome


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", fast_or_slow(CASES, CASES[: len(FAST)].__contains__, lambda case: case.id))
def test_ends_where_the_oracle_ends_on_the_language_model_alone(case, bench, outcomes):
    theta, _ = outcomes(case)
    assert bench.error(case, theta) < tolerance(case)


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 5, 6, 9, 30]])).logits


@pytest.mark.parametrize("family", fast_or_slow([*WHOLES], ["gemma3", "qwen3_5"].__contains__, str))
def test_the_whole_model_works_with_what_is_written(tmp_path, family):
    folder = save(whole(family).to(torch.bfloat16), tmp_path / "whole")
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    before = logits_of(base)
    run = {"task_type": "causal_lm", "dataset": [str(write_pairs(tmp_path / "pairs.jsonl"))]}
    run |= {"k_shot": 2, "num_query": 2, "meta_batch_size": 2, "inner_steps": 1, "outer_steps": 2}
    run |= {"eval_episodes": 0, "max_length": 32}

    def learned(source, **settings):
        config = Config(**{**run, "model_name_or_path": str(source), **settings})
        return logits_of(load_learner(config, describe(config)).hf)

    assert torch.allclose(learned(folder), before, atol=1e-5)
    given = {**run, "model_name_or_path": str(folder), "outer_lr": 0.05}
    MetaTrainer(Config(**given, output_dir=str(tmp_path / "full"))).train()
    result, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "full" / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert torch.allclose(logits_of(result), learned(tmp_path / "full" / "model"), atol=1e-5)
    assert not torch.allclose(logits_of(result), before, atol=1e-2)
    stored, files = load_file(folder / "model.safetensors"), (tmp_path / "full/model").glob("*-others-*")
    others = {name: value for file in files for name, value in load_file(file).items()}
    assert others
    assert all(
        value.dtype == stored[name].dtype and torch.equal(value, stored[name])
        for name, value in others.items()
    )
    assert not any("language_model" in name or "lm_head" in name for name in others)
    adapters = {"lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    MetaTrainer(Config(**given, **adapters, output_dir=str(tmp_path / "lora"))).train()
    adapted = PeftModel.from_pretrained(base, tmp_path / "lora" / "model").eval()
    names = {name for name, _ in adapted.named_modules() if name.endswith("lora_A")}
    assert names
    assert all("language_model" in name for name in names)
    for settings in (adapters, {}):  # trained further, and merged
        assert torch.allclose(logits_of(adapted), learned(tmp_path / "lora" / "model", **settings), atol=1e-5)
    answers = [one.output for one in load(str(tmp_path / "lora" / "model")).predict(["river"], 3)]
    support = [("river stone", "stone"), ("maple", "quiet")]
    again = adapt(str(folder), support, task_type="causal_lm", output_dir=str(tmp_path / "one"), **adapters)
    assert len(answers) == len(again.predict(["river"], 3)) == 1


def test_an_export_copies_one_file_of_the_other_parts_at_a_time(tmp_path, monkeypatch):
    whole("gemma3").save_pretrained(tmp_path / "whole", max_shard_size="8KB")
    config = Config(model_name_or_path=str(tmp_path / "whole"), task_type="causal_lm")
    hf, read, alive = empty_hf(config, describe(config)), list[Any](), list[int]()
    original = hf_export.StoredTensor.read

    def noted(tensor):
        value = original(tensor)
        read.append(weakref.ref(value))
        alive.append(sum(one.nbytes for one in (ref() for ref in read) if one is not None))
        return value

    monkeypatch.setattr(hf_export.StoredTensor, "read", noted)
    (tmp_path / "out").mkdir()
    written = hf_export.write_others(tmp_path / "out", hf, config)
    shards = [load_file(file) for file in (tmp_path / "whole").glob("*.safetensors")]
    sizes = [
        {name: value.nbytes for name, value in shard.items() if not name.startswith(("language", "lm_head"))}
        for shard in shards
    ]
    assert written.keys() == {name for shard in sizes for name in shard}
    most, total = (fold(sum(shard.values()) for shard in sizes) for fold in (max, sum))
    assert max(alive) == most < total / 2


def test_what_a_part_does_not_go_with_is_refused(tmp_path):
    folder = str(save(whole("llava"), tmp_path))
    classes = Config(model_name_or_path=folder)
    check_message(refusal(describe, classes), "llava", "--task_type causal_lm")
    merged = Config(model_name_or_path=folder, task_type="causal_lm", lora_r=4, lora_merge=True)
    check_message(refusal(describe, merged), "lora_merge=True", "leave it out")


def test_a_part_in_4_bits_computes_as_the_whole_model(tmp_path):
    pytest.importorskip("bitsandbytes")
    folder = save(whole("llava"), tmp_path)
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    wanted = transformers.AutoModelForImageTextToText.from_pretrained(folder, quantization_config=how)
    config = Config(model_name_or_path=str(folder), task_type="causal_lm", lora_r=4, load_in_4bit=True)
    found = load_learner(config, describe(config)).hf
    assert torch.allclose(logits_of(found), logits_of(wanted.train()), atol=1e-4)
