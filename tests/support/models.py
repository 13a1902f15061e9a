"""Small checkpoints and data files that tests make for themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from fmmeta.models.tiny import byte_tokenizer

WORDS = [
    "river",
    "stone",
    "lantern",
    "quiet",
    "maple",
    "thunder",
    "copper",
    "ribbon",
    "silver",
    "meadow",
    "harbor",
    "candle",
    "velvet",
    "orchard",
    "pepper",
]


def save_llama(folder: Path, tied: bool = True) -> Path:
    """A 2-layer Llama with RMSNorms and, by default, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=259,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    return save(LlamaForCausalLM(config), folder)


# a family for each kind of split and each part of a model that differs
TENSOR_FAMILIES = (
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gpt_neox",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi",
        "phi3",
        "olmo",
    ),
    *("olmo2", "granite", "smollm3", "glm"),
)
DECODERS = (*TENSOR_FAMILIES, "gpt2")
ENCODERS = ("bert", "roberta")


def save_family(folder: Path, family: str, tied: bool = True, layers: int = 3) -> Path:
    """A small model of a family; Mistral and Qwen2 look back over a short window only, the latter not in its
    first layer.
    """
    import transformers

    if family in ENCODERS:
        return save_bert(folder, family, layers)
    shared = {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "vocab_size": 259,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.1,
    }
    grouped = {"num_key_value_heads": 2, "intermediate_size": 48}
    own = {
        "llama": grouped,
        "mistral": {**grouped, "sliding_window": 8, "head_dim": 8},
        "qwen2": {**grouped, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "qwen3": {**grouped, "head_dim": 8},
        "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        "gpt_neox": {"intermediate_size": 48, "rotary_pct": 0.5},
        "gemma": {**grouped, "head_dim": 8},
        "gemma2": {**grouped, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
        "gemma3_text": {**grouped, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
        "phi": {"intermediate_size": 48},
        "phi3": grouped,
        "olmo": grouped,
        "olmo2": grouped,
        "granite": {
            **grouped,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        "smollm3": {**grouped, "no_rope_layer_interval": 2},
        "glm": {**grouped, "head_dim": 8},
    }[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **shared, **own)
    return save(transformers.AutoModelForCausalLM.from_config(config), folder)


def save_bert(folder: Path, family: str = "bert", layers: int = 2) -> Path:
    """A BERT or RoBERTa classifier with LayerNorms, biases and dropout in its configuration.

    It is trained for a second to tell words apart: at random weights it ignores the text, gradients are as
    small as rounding errors, and comparisons of them say nothing.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=259,
        max_position_embeddings=130,
        type_vocab_size=1,
        num_labels=len(WORDS),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.05,
    )
    model, tokenizer = AutoModelForSequenceClassification.from_config(config).eval(), byte_tokenizer(128)
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=3e-3), random.Random(1)
    for _ in range(30):
        labels = [rng.randrange(len(WORDS)) for _ in range(32)]
        batch = tokenizer(
            [f"{WORDS[c]} {rng.choice(WORDS)}" for c in labels], padding=True, return_tensors="pt"
        )
        loss = model(
            batch["input_ids"], attention_mask=batch["attention_mask"], labels=torch.tensor(labels)
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return save(model, folder)


def save(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer(128).save_pretrained(folder)
    return folder


def write_classes(path: Path, classes: int = 12, rows: int = 6, strata: int = 3) -> Path:
    """Labelled texts of unequal length."""
    rng = random.Random(0)
    with path.open("w") as file:
        for c in range(classes):
            for _ in range(rows):
                text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))
                file.write(
                    json.dumps({"text": f"{WORDS[c]} {text}", "label": f"c{c}", "stratum": f"s{c % strata}"})
                    + "\n"
                )
    return path


def write_pairs(path: Path, tasks: int = 9, rows: int = 12, strata: int = 3) -> Path:
    """Named tasks of input/output pairs of unequal length."""
    rng = random.Random(0)
    with path.open("w") as file:
        for t in range(tasks):
            for _ in range(rows):
                words = [rng.choice(WORDS) for _ in range(rng.randint(1, 5))]
                row = {
                    "task": f"t{t}",
                    "category": f"s{t % strata}",
                    "input": " ".join(words),
                    "output": words[t % len(words)][: t + 1],
                }
                file.write(json.dumps(row) + "\n")
    return path


def write_tasks(root: Path) -> Path:
    """Two strata of 24 files, each a task with two classes."""
    for s in range(2):
        (root / f"s{s}").mkdir(parents=True)
        for f in range(24):
            rows = [{"text": f"{WORDS[f % 15]} {WORDS[i]}", "label": "ab"[i % 2]} for i in range(8)]
            (root / f"s{s}" / f"t{f:02}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "task_splits.json").write_text(
        json.dumps({"train": [f"s{s}/t{f:02}" for s in range(2) for f in range(24)]})
    )
    return root
