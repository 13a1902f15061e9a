"""Small checkpoints and data files that tests make for themselves."""

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fmmeta.learners.tiny import byte_tokenizer

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
ENCODER_DECODERS = ("t5", "bart")
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe")


WIDE: dict[str, Any] = {"intermediate_size": 48}
ENCODER = {**WIDE, "max_position_embeddings": 130, "type_vocab_size": 1, "initializer_range": 0.05}
GROUPED = {**WIDE, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {**ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8} | {
    "v_head_dim": 8
}
OWN = {  # Mistral and Qwen2 look back over a short window only, the latter not in its first layer
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 8, "head_dim": 8},
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {**GROUPED, "head_dim": 8},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_neox": {**WIDE, "rotary_pct": 0.5},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {**GROUPED, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi": WIDE,
    "phi3": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "granite": {**GROUPED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "smollm3": {**GROUPED, "no_rope_layer_interval": 2},
    "glm": {**GROUPED, "head_dim": 8},
    "t5": {
        "num_decoder_layers": 3,
        "d_kv": 8,
        "d_ff": 48,
        "decoder_start_token_id": 0,
        "initializer_factor": 1.0,
    },
    "bart": {
        **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
        **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **{"d_model": 32, "init_std": 0.1, "decoder_start_token_id": 2},
    },
    "bert": ENCODER,
    "roberta": ENCODER,
    # of 12 experts, so that their numbers sort otherwise than their names
    "qwen3_moe": {**EXPERTS, "num_experts": 12, "head_dim": 8},
    "mixtral": {**GROUPED, "num_local_experts": 12, "intermediate_size": 16},
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "intermediate_size": 16, "head_dim": 8}
    | {"num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": {"rope_type": "default"}},
    "deepseek_v3": {**EXPERTS, **LATENT, "n_routed_experts": 12, "num_key_value_heads": 4},
    "glm4_moe": {**EXPERTS, **ROUTED, "n_routed_experts": 12, "head_dim": 8},
    "olmoe": {**GROUPED, "num_experts": 12, "num_experts_per_tok": 2, "intermediate_size": 16},
}


def tiny(kind: str, seed: int = 0, auto: str = "", **sizes: Any) -> Any:
    """A model of a family with random weights: a language model or, of an encoder, a classifier.

    auto: another class of transformers. sizes: of the configuration, and other values.
    """
    import transformers

    shared = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 259,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.1,
    }
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **{**shared, **OWN[kind], **sizes})
    usual = "AutoModelForSequenceClassification" if kind in ENCODERS else "AutoModelForCausalLM"
    if kind in ENCODER_DECODERS:
        usual = "AutoModelForSeq2SeqLM"
    return getattr(transformers, auto or usual).from_config(config)


FROZEN = (
    *(f"bert.{name}" for name in ("encoder.layer.0", "encoder.layer.1", "pooler.dense")),
    *(f"bert.embeddings.{name}_embeddings" for name in ("position", "token_type", "word")),
    "bert.embeddings.LayerNorm",
)
"""The layers of `save_bert` that have inner rates, but the head."""


def with_settings(model: Path, folder: Path, **stored: Any) -> Path:
    """A copy of a model that stores these settings with it."""
    shutil.copytree(model, folder)
    (folder / "fmmeta.json").write_text(json.dumps(stored))
    return folder


def save_family(folder: Path, family: str, tied: bool = True, layers: int = 3) -> Path:
    if family in ENCODERS:
        return save_bert(folder, family, layers)
    return save(tiny(family, tie_word_embeddings=tied, num_hidden_layers=layers), folder)


def save_llama(folder: Path, tied: bool = True) -> Path:
    """A 2-layer Llama with RMSNorms and, by default, tied embeddings."""
    return save_family(folder, "llama", tied, layers=2)


def save_bert(folder: Path, family: str = "bert", layers: int = 2) -> Path:
    """A BERT or RoBERTa classifier with LayerNorms, biases and dropout in its configuration.

    It is trained for a second to tell words apart: at random weights it ignores the text, gradients are as
    small as rounding errors, and comparisons of them say nothing.
    """
    model = tiny(family, num_hidden_layers=layers, num_labels=len(WORDS)).eval()
    tokenizer, rng = byte_tokenizer(128), random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        labels = [rng.randrange(len(WORDS)) for _ in range(32)]
        texts = [f"{WORDS[c]} {rng.choice(WORDS)}" for c in labels]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        loss = model(ids, attention_mask=mask, labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return save(model, folder)


def save(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer(128).save_pretrained(folder)
    return folder


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def drawn(rng: random.Random, most: int) -> list[str]:
    """One to `most` words."""
    return [rng.choice(WORDS) for _ in range(rng.randint(1, most))]


def write_classes(path: Path, classes: int = 12, rows: int = 6, strata: int = 3) -> Path:
    """Labelled texts of unequal length."""
    rng = random.Random(0)
    made = [
        {"text": f"{WORDS[c]} {' '.join(drawn(rng, 6))}", "label": f"c{c}", "stratum": f"s{c % strata}"}
        for c in range(classes)
        for _ in range(rows)
    ]
    return write_lines(path, made)


def write_pairs(path: Path, tasks: int = 9, rows: int = 12, strata: int = 3) -> Path:
    """Named tasks of input/output pairs of unequal length."""

    def row(task: int, words: list[str]) -> dict[str, Any]:
        name, output = f"t{task}", words[task % len(words)][: task + 1]
        return {"task": name, "category": f"s{task % strata}", "input": " ".join(words), "output": output}

    rng = random.Random(0)
    return write_lines(path, [row(task, drawn(rng, 5)) for task in range(tasks) for _ in range(rows)])


def write_tasks(root: Path) -> Path:
    """Two strata of 24 files, each a task with two classes."""
    names = [f"s{s}/t{f:02}" for s in range(2) for f in range(24)]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        word = WORDS[int(name[-2:]) % 15]
        rows = [{"text": f"{word} {WORDS[i]}", "label": "ab"[i % 2]} for i in range(8)]
        write_lines(root / f"{name}.jsonl", rows)
    (root / "task_splits.json").write_text(json.dumps({"train": names}))
    return root


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Tasks of tagged sentences, whose tag sets differ in size, and of texts with two numbers."""
    rng, tagged, scored = random.Random(0), list[dict[str, Any]](), list[dict[str, Any]]()
    for task in range(9):
        kinds = ["O", "B-a", "I-a", "B-b"][: 3 + task % 2]
        for _ in range(12):
            words = drawn(rng, 5)
            tags = [kinds[WORDS.index(word) % len(kinds)] for word in words]
            tagged.append({"task": f"t{task}", "tokens": words, "tags": tags})
            target = [len(words) + task, rng.random()]
            scored.append({"task": f"t{task}", "text": " ".join(words), "target": target})
    return write_lines(folder / "tagged.jsonl", tagged), write_lines(folder / "numbers.jsonl", scored)


def write_preferences(path: Path) -> Path:
    """Tasks of prompts with two answers of unequal length, and log-probabilities of a reference."""
    rng, made = random.Random(0), list[dict[str, Any]]()
    for task in range(9):
        for _ in range(12):
            prompt, (good, bad) = " ".join(drawn(rng, 4)), rng.sample(WORDS, 2)
            row = {"task": f"t{task}", "prompt": prompt, "chosen": good, "rejected": bad}
            made.append({**row, **{f"{key}_logp": -30 * rng.random() for key in ("chosen", "rejected")}})
    return write_lines(path, made)
