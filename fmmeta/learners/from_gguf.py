"""Converts a GGUF file to a Hugging Face folder with transformers, once for its content; everything else
reads the folder.

    model.gguf --> check of the file --> HF_HOME/fmmeta/gguf/<digest>/  config, weights in fp32, tokenizer
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.constants import HF_HOME

from fmmeta.common.errors import UsageError, one_line, usage_errors
from fmmeta.common.processes import hide_download_bars, quiet_logger
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.security import disk_trouble, publishing
from fmmeta.config.fields import check_values, refuse_first, setting
from fmmeta.learners.files import GENERATION_FILE
from fmmeta.learners.prime_mlps import add_prime_mlps

TOKENS = ("bos", "eos", "eot", "eom", "unknown", "padding")  # whose ids are read
UNREAD = "rope_freqs.weight"  # scaling of rotary frequencies, which transformers leaves out
SAMPLE = "In 2024, the other day:\n  1. a r\u00e9sum\u00e9  <|endoftext|>"
"""A text on which the stored tokenizer is compared with that of the file."""


@dataclass
class ConvertConfig:
    """`fmmeta convert`."""

    model_name_or_path: str = setting("", "GGUF file of a language model; with prime_mlps a folder")
    output_dir: str = setting("", "Folder for the converted model, which must not exist or be empty")
    prime_mlps: int = setting(
        0,
        "Add an MLP behind each of so many last blocks, for an inner loop that changes them alone: a quarter"
        " of the blocks in test-time training end to end",
        least=0,
    )


def run(settings: ConvertConfig) -> None:
    """`fmmeta convert`: write a folder that transformers and all commands read. Raises `UsageError`."""
    check_values(settings)
    source, folder = Path(settings.model_name_or_path), Path(os.path.realpath(settings.output_dir))
    refuse_first(
        [
            (not settings.model_name_or_path, "model_name_or_path is missing; give a GGUF file and a folder"),
            (not settings.output_dir, f"output_dir is missing; write fmmeta convert {source} FOLDER"),
        ]
    )
    with usage_errors(f"output_dir={folder} cannot be read", "choose another"):
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken:
        raise UsageError(f"output_dir={folder} is not empty; choose another, so that nothing is overwritten")
    notice = Progress(enabled=True).notice
    if settings.prime_mlps:
        flags = add_prime_mlps(as_folder(str(source), notice), folder, settings.prime_mlps)
        notice(f"model {folder}; {flags}")
    else:
        convert(source, folder, digest_of(source), notice)


def is_gguf(model_name_or_path: str) -> bool:
    """Whether a model is named by a GGUF file."""
    return model_name_or_path.lower().endswith(".gguf") and not Path(model_name_or_path).is_dir()


def as_folder(model_name_or_path: str, notice: Callable[[str], None]) -> str:
    """The folder that a GGUF file is converted to, in the cache of Hugging Face; any other name unchanged.

    The folder depends on the content of the file only. Raises `UsageError`.
    """
    if not is_gguf(model_name_or_path):
        return model_name_or_path
    source = Path(model_name_or_path)
    digest = digest_of(source)
    folder = Path(HF_HOME) / "fmmeta" / "gguf" / digest[:16]
    if folder.is_dir():
        notice(f"{source} was converted before; its weights are read from {folder}")
    else:
        convert(source, folder, digest, notice)
    return str(folder)


def digest_of(path: Path) -> str:
    """The sha256 of a GGUF file. Raises `UsageError`."""
    given = f"model_name_or_path={path}"
    with usage_errors(f"{given} cannot be read", "give another file"):
        if not path.is_file():
            raise UsageError(f"{given} is not a file; check the path, or download the file first")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UsageError(f"{given} is no GGUF file: it does not begin with GGUF; give another file")
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()


def convert(source: Path, folder: Path, digest: str, notice: Callable[[str], None]) -> None:
    """Write `folder`, complete or not at all; another process may write the same. Raises `UsageError`."""
    hide_download_bars()
    quiet_logger("transformers")
    given, began = f"model_name_or_path={source}", time.perf_counter()
    facts = check_file(source, given)
    notice(f"{source} is converted once, to {folder}")
    if UNREAD in facts["tensors"]:
        notice(Warn(f"{source}: transformers does not read {UNREAD}; left out"))
    step = "a causal language model"
    try:
        with publishing(folder) as temporary:
            temporary.mkdir(parents=True)
            write_model(source, temporary, given)
            step = "the tokenizer"
            if facts["has_tokenizer"]:
                write_tokenizer(source, temporary, facts["ends"])
            stored = {"file": source.name, "sha256": digest, **facts["described"]}
            (temporary / "gguf.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    except UsageError:
        raise
    except Exception as error:  # transformers raises any type for values of a file
        if isinstance(error, OSError) or disk_trouble(error):
            raise UsageError(
                f"{given} cannot be converted: {disk_trouble(error) or one_line(error)}; set HF_HOME to a"
                " folder with room, or use fmmeta convert"
            ) from None
        why = f"{type(error).__name__}: {one_line(error)}"[:200]
        raise UsageError(
            f"{given}: transformers cannot read {step} from the file ({why}); give a safetensors folder of it"
        ) from None
    notice(f"model {folder}, converted in {time.perf_counter() - began:.0f} s")


def check_file(source: Path, given: str) -> dict[str, Any]:
    """What a complete file says of itself. Raises `UsageError`."""
    with usage_errors(f"{given} needs the package gguf", "pip install 'fmmeta[gguf]'"):
        from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):  # the base class would read on, as often as the header says
                raise ValueError(f"it has {len(self.data):,} bytes, and its header says {end:,} or more")
            return super()._get(offset, dtype, count, override_order)

    with usage_errors(f"{given} is truncated or damaged", "download it again, or give another file"):
        reader = Reader(source)
        values = {name: one.contents() for name, one in reader.fields.items() if len(one.data) == 1}
        architecture = values["general.architecture"]
    scaling = f"{architecture}.rope.scaling"
    if values.get(f"{scaling}.type", "none") != "none" or values.get(f"{scaling}.factor", 1) not in (0, 1):
        raise UsageError(
            f"{given} scales its rotary positions ({scaling}), which transformers does not read from GGUF"
            " files; give the model's Hugging Face folder"
        )
    tensors = {one.name for one in reader.tensors}
    key, blocks = f"{architecture}.block_count", (re.match(r"blk\.(\d+)\.", name) for name in tensors)
    last, count = max((int(block[1]) for block in blocks if block), default=-1), values.get(key)
    if isinstance(count, int) and last >= count:
        raise UsageError(
            f"{given} has {key}={count}, and tensors of block {last}, which would be left out; give a file"
            " whose block_count counts all blocks, from 0"
        )
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    for key in (f"tokenizer.ggml.{kind}_token_id" for kind in TOKENS):
        if tokens and values.get(key, 0) not in range(size := len(tokens.data)):
            raise UsageError(
                f"{given} has {key}={values[key]}, and its vocabulary has {size} tokens, from 0; give a file"
                " with the id of one of them"
            )
    ids = [values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return {
        "described": {name: values.get(f"general.{name}") for name in ("name", "license", "architecture")},
        "tensors": tensors,
        "has_tokenizer": tokens is not None,
        "ends": [one for one in dict.fromkeys(ids) if one is not None],
    }


def write_model(source: Path, folder: Path, given: str) -> None:
    """Write config.json and the weights."""
    dense = {}
    if hasattr(transformers, "GgufConfig"):  # versions that can keep weights quantised
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **dense,
    )
    model, found = loaded
    if lacking := [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]:
        raise UsageError(
            f"{given} lacks {len(lacking)} of the model's tensors, or has others in their place"
            f" ({min(lacking)}); give a complete file"
        )
    model.save_pretrained(folder)


def write_tokenizer(source: Path, folder: Path, ends: list[int]) -> None:
    """Write the tokenizer with its chat template, and the tokens that end a text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    if (
        transformers.AutoTokenizer.from_pretrained(folder)(SAMPLE)["input_ids"]
        != tokenizer(SAMPLE)["input_ids"]
    ):
        raise ValueError("stored as tokenizer.json, it gives other tokens")
    facts = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends or None}
    (folder / GENERATION_FILE).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
