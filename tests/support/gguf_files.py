"""Small GGUF files of random weights."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fmmeta.learners import from_gguf
from tests.support.helpers import ROOT

SMOLLM2 = ROOT.parent / "shared" / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = (
    "{% for turn in messages %}<|start|>{{ turn['role'] + '\n' + turn['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ALPHABET = [*bytes_to_unicode().values(), "\u0120t", "he", "<|start|>", "<|end|>"]
VOCABULARY = len(ALPHABET)
WORDS = [*map(chr, range(97, 123)), "\u2581", "\u2581t", "he", "the", "\u2581the"]
PIECES = ["<unk>", "<s>", "</s>", *WORDS]  # of sentencepiece, with texts of bytes to the same number
PIECES += [f"<0x{byte:02X}>" for byte in range(VOCABULARY - len(PIECES))]
UNKNOWN, CONTROL, NORMAL = TokenType.UNKNOWN, TokenType.CONTROL, TokenType.NORMAL
KINDS = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * len(WORDS)]  # of the pieces; the others are bytes
TOKENIZERS: dict[str, dict[str, Any]] = {
    "llama": {
        "tokenizer_model": "llama",
        "token_list": PIECES,
        "token_scores": [-float(index) for index in range(VOCABULARY)],
        "token_types": [*KINDS, *[TokenType.BYTE] * (VOCABULARY - len(KINDS))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        "add_bos_token": True,
    },
    "gpt2": {
        "tokenizer_model": "gpt2",
        "token_list": ALPHABET,
        "token_types": [CONTROL if token.startswith("<|") else NORMAL for token in ALPHABET],
        "token_merges": ["\u0120 t", "h e"],
        "unk_token_id": 0,
        "eos_token_id": VOCABULARY - 1,
        "bos_token_id": VOCABULARY - 2,
        "chat_template": TEMPLATE,
        "eot_token_id": VOCABULARY - 3,
    },
    "none": {},
}
SETTINGS = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.key_length": 8,
    "rope.freq_base": 10000.0,
}
MATRICES = {
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}
HEADS_OF_128 = {"attn_q": (512, 32), "attn_k": (256, 32), "attn_v": (256, 32), "attn_output": (32, 512)}
NORMS = {
    "llama": ("attn_norm", "ffn_norm"),
    "qwen2": ("attn_norm", "ffn_norm"),
    "qwen3": ("attn_norm", "ffn_norm"),
    "gemma2": ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
}


def tensors_of(architecture: str) -> dict[str, np.ndarray]:
    """Random fp32 tensors of a model of two layers by their GGUF names."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    found = {"token_embd.weight": draw(VOCABULARY, 32), "output_norm.weight": 1 + draw(32)}
    if architecture == "gpt2":
        found |= {"position_embd.weight": draw(1024, 32), "output_norm.bias": draw(32)}
    for layer in range(2):
        block = f"blk.{layer}"
        if architecture == "gpt2":
            for norm in ("attn_norm", "ffn_norm"):
                found |= {f"{block}.{norm}.weight": 1 + draw(32), f"{block}.{norm}.bias": draw(32)}
            for name, rows, columns in (
                ("attn_qkv", 96, 32),
                ("attn_output", 32, 32),
                ("ffn_up", 128, 32),
                ("ffn_down", 32, 128),
            ):
                found |= {f"{block}.{name}.weight": draw(rows, columns), f"{block}.{name}.bias": draw(rows)}
            continue
        matrices = MATRICES | (HEADS_OF_128 if architecture == "qwen3" else {})
        found |= {f"{block}.{name}.weight": draw(*shape) for name, shape in matrices.items()}
        found |= {f"{block}.{norm}.weight": 1 + draw(32) for norm in NORMS[architecture]}
        if architecture == "qwen2":
            found |= {f"{block}.attn_{name}.bias": draw(MATRICES[f"attn_{name}"][0]) for name in "qkv"}
        if architecture == "qwen3":
            found |= {f"{block}.attn_{name}_norm.weight": 1 + draw(128) for name in "qk"}
    return found


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kind: str = "Q8_0",
    settings: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: str = "gpt2",
) -> Path:
    """Write a file whose matrices have the quantisation `kind`.

    settings: changes of the architecture's settings; None leaves one out. tokenizer: gpt2 (bytes), llama
    (sentencepiece), or none.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_name("Tiny model (test)")
    writer.add_license("apache-2.0")
    for name, value in {**SETTINGS, **(settings or {})}.items():
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{name}", value)
    for name, value in TOKENIZERS[tokenizer].items():
        getattr(writer, f"add_{name}")(value)
    if not TOKENIZERS[tokenizer]:
        writer.add_uint32(f"{architecture}.vocab_size", VOCABULARY)
    for name, value in (tensors or tensors_of(architecture)).items():
        if kind != "F32" and value.ndim > 1:
            quantised = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(value, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def use_test_cache() -> None:
    """Convert into the folder that a test names, instead of that of Hugging Face."""
    from_gguf.HF_HOME = os.environ["FMMETA_TEST_CACHE"]
