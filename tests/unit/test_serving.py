"""peft, vLLM, SGLang and llama.cpp read folders of adapters, but for those that how-to/serve.md names."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import fmmeta
from fmmeta.adaptation import folder as folders
from fmmeta.learners.files import ADAPTER_FILE
from fmmeta.learners.load import describe, load_learner
from tests.support.exports import inputs
from tests.support.models import save_bert, write_classes
from tests.support.serving import (
    gguf_problems,
    resolved,
    settings_of,
    sglang_problems,
    shapes_of,
    vllm_problems,
)
from tests.support.short_runs import QUICK, QUICK_PAIRS

PAIRS = [("river", "stone"), ("maple", "copper"), ("silver", "quiet"), ("ribbon", "pepper")]
CLASSES = [("river stone", "a"), ("river maple", "a"), ("copper quiet", "b"), ("copper ribbon", "b")]
LANGUAGE = {"task_type": "causal_lm"}
LORA = {"lora_r": 8, "inner_steps": 3, "inner_lr": 0.1, "early_stopping": False}
RULES = {"vllm", "sglang", "gguf"}
MADE = {
    # name: base, how it is made, settings, programs that read it
    "adapt": ("llama", "adapt", LANGUAGE, RULES),
    "adapt, all layers": ("llama", "adapt", {**LANGUAGE, "lora_target_modules": ["all-linear"]}, RULES),
    "adapt_many": ("llama", "adapt_many", LANGUAGE, RULES),
    "adapt_many, decoder with classes": ("llama", "adapt_many", {"pooling": "model"}, {"vllm"}),
    "adapt_many, encoder with classes": ("bert", "adapt_many", {"pooling": "model"}, {"vllm"}),
    "adapt_many, encoder": ("bert", "adapt_many", {"pooling": "mean"}, RULES),
    "adapt_many, head of two layers": ("roberta", "adapt_many", {"pooling": "model"}, set()),
    "train": ("llama", "train", LANGUAGE, RULES),
    "train, decoder with classes": ("llama", "train", {"pooling": "model"}, {"vllm"}),
    "adapt, patterns": (
        "llama",
        "adapt",
        {
            **LANGUAGE,
            "peft_config": '{"use_rslora": true, "rank_pattern": {"layers.0.self_attn.v_proj": 5},'
            ' "alpha_pattern": {".*v_proj": 2}}',
        },
        {"vllm"},
    ),
}


def made(base: Path, how: str, out: Path, **settings) -> Path:
    """The folder of adapters."""
    examples = PAIRS if settings.get("task_type") else CLASSES
    if how == "adapt":
        fmmeta.adapt(base, examples, output_dir=out / "alice", **LORA, **settings)
        return out / "alice"
    if how == "adapt_many":
        fmmeta.adapt_many(base, {"alice": examples, "bob": examples[1:]}, output_dir=out, **LORA, **settings)
        return out / "alice"
    data = write_classes(out.with_suffix(".jsonl"), classes=8, rows=3)
    if settings.get("task_type"):
        rows = [json.loads(line) for line in data.read_text().splitlines()]
        pairs = [{"task": row["label"], "input": row["text"], "output": row["text"][:5]} for row in rows]
        data.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    short = QUICK_PAIRS if settings.get("task_type") else QUICK
    given = {**short, **settings, "model_name_or_path": str(base), "dataset": [str(data)], "lora_r": 8}
    config = fmmeta.Config(**given, outer_steps=2, save_steps=0, output_dir=str(out))
    return fmmeta.MetaTrainer(config).train().output_dir / "model"


def layers_of(base: Path) -> set[str]:
    """Last names of the linear layers of the model that is served."""
    model = AutoModelForCausalLM if "llama" in base.name else AutoModelForSequenceClassification
    found = model.from_pretrained(base).named_modules()
    return {name.split(".")[-1] for name, module in found if isinstance(module, nn.Linear)}


@pytest.fixture(scope="module")
def bases(bert, llama, tmp_path_factory):
    roberta = save_bert(tmp_path_factory.mktemp("roberta"), "roberta")
    return {"bert": bert, "llama": llama, "roberta": roberta}


@pytest.mark.parametrize("name", MADE)
def test_a_folder_is_read_by_the_programs_that_the_page_names(name, bases, tmp_path):
    """They also find it by its name, for the model that was its base."""
    base, how, settings, readers = MADE[name]
    folder = made(bases[base], how, tmp_path / "out", **settings)
    problems = {
        "vllm": [*vllm_problems(folder, layers_of(bases[base]), 8)],
        "sglang": [*sglang_problems(folder, 259)],
        "gguf": [*gguf_problems(folder)],
    }
    assert {program for program, found in problems.items() if not found} == readers, problems
    served = os.path.abspath(bases[base])
    assert resolved(folder.parent, folder.name, served) == folder
    assert resolved(folder.parent, folder.name, os.path.relpath(served)) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"r": 9}, "rank 9 at --max-lora-rank 8"),
        ({"rank_pattern": {"q_proj": 16}}, "rank 16 at --max-lora-rank 8"),
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save lm_head"),
    ],
)
def test_the_rules_refuse_what_vllm_refuses(change, problem, llama, tmp_path):
    folder = made(llama, "adapt", tmp_path / "out", **LANGUAGE)
    changed = {**settings_of(folder), **change}
    (folder / "adapter_config.json").write_text(json.dumps(changed))
    assert problem in [*vllm_problems(folder, layers_of(llama), 8)]
    assert any("no layer" in one for one in vllm_problems(folder, {"k_proj"}, 8))


@pytest.mark.parametrize(
    ("base", "auto", "settings"),
    [
        ("llama", AutoModelForCausalLM, LANGUAGE),
        ("llama", AutoModelForSequenceClassification, {"pooling": "model"}),
        ("bert", AutoModelForSequenceClassification, {"pooling": "model"}),
    ],
)
def test_logits_through_peft_are_bit_equal(base, auto, settings, bases, tmp_path):
    """Adapters beside the weights as in `fmmeta train`, merged as in `fmmeta predict`, and merged/ through
    transformers alone.
    """
    folder = made(bases[base], "adapt", tmp_path / "out", lora_merge=True, **settings)
    labels = {} if settings == LANGUAGE else {"num_labels": 2, "ignore_mismatched_sizes": True}
    batch = inputs(folder)
    beside = PeftModel.from_pretrained(auto.from_pretrained(bases[base], **labels), folder).eval()
    heads = {} if settings == LANGUAGE else {"n_way": 2, "head_init": "learned"}
    config = fmmeta.Config(model_name_or_path=str(folder), lora_r=8, **heads, **settings)
    ours = load_learner(config, describe(config)).eval()
    loaded = fmmeta.load(folder).loaded.worker.learner.eval()
    plain = auto.from_pretrained(folder / "merged").eval()
    with torch.no_grad():
        wanted = beside(**batch).logits
        assert torch.equal(ours.hf(**batch).logits, wanted)
        merged = beside.merge_and_unload()(**batch).logits
        assert torch.equal(loaded.hf(**batch).logits, merged)
        assert torch.equal(plain(**batch).logits, merged)
        assert not torch.equal(wanted, auto.from_pretrained(bases[base], **labels)(**batch).logits)


def test_tokenizers_of_many_tasks_are_one_file(llama, tmp_path, monkeypatch):
    """A copy is not: it can be changed alone. Weights and settings are of each task."""
    monkeypatch.setattr(folders, "SHARED_BYTES", 2**12)
    tasks = {name: PAIRS for name in ("alice", "bob", "carol")} | {"dave": PAIRS[:2]}
    fmmeta.adapt_many(llama, tasks, output_dir=tmp_path / "out", **LORA, **LANGUAGE)
    tokenizers = {(tmp_path / "out" / name / "tokenizer.json").stat().st_ino for name in tasks}
    configs = {(tmp_path / "out" / name / "fmmeta.json").stat().st_ino for name in tasks}
    assert (len(tokenizers), len(configs)) == (1, 4)
    weights = {(tmp_path / "out" / name / ADAPTER_FILE).read_bytes() for name in ("alice", "dave")}
    assert len(weights) == 2
    assert all(len(file) > 2**12 for file in weights)
    assert not [*(tmp_path / "out").glob("*/.*")]
    shutil.copytree(tmp_path / "out" / "bob", tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").stat().st_ino not in tokenizers


def test_a_file_system_without_hard_links_gets_copies(llama, tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(folders, "SHARED_BYTES", 2**12)
    monkeypatch.setattr(os, "link", refused)
    fmmeta.adapt_many(llama, {"alice": PAIRS, "bob": PAIRS}, output_dir=tmp_path, **LORA, **LANGUAGE)
    one, other = (tmp_path / name / "tokenizer.json" for name in ("alice", "bob"))
    assert one.read_bytes() == other.read_bytes()
    assert one.stat().st_ino != other.stat().st_ino


@pytest.mark.parametrize("settings", [{"pooling": "mean", "head_init": "learned"}, {"pooling": "model"}])
def test_weights_are_as_readable_as_settings(settings, bert, tmp_path):
    """A server of another user reads them."""
    folder = made(bert, "adapt", tmp_path / "out", lora_merge=True, **settings)
    for each in (folder, folder / "merged"):
        mode = (each / "fmmeta.json").stat().st_mode
        assert {file.stat().st_mode for file in each.glob("*.safetensors")} == {mode}
    assert shapes_of(folder)
