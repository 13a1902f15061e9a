"""Converts a GGUF file to a Hugging Face folder, once for its content; everything else reads the folder.

    model.gguf --> check of the header --> HF_HOME/fmmeta/models/<name>-<digest>/  config, weights, tokenizer

The file is not trusted: sizes, offsets and counts are compared with its length before the gguf package and
transformers, which allocate what a header says, read it. Weights become fp32 one tensor at a time.
"""

import hashlib
import importlib.metadata
import json
import math
import mmap
import os
import re
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.constants import HF_HOME

import fmmeta
from fmmeta.common.errors import UsageError
from fmmeta.common.processes import hide_download_bars, quiet_logger
from fmmeta.common.progress import Progress, Warn
from fmmeta.common.security import GIB, one_line, publishing
from fmmeta.common.text import shortened
from fmmeta.config.fields import refuse_first, setting
from fmmeta.models.files import GENERATION_FILE

TEMPLATE = "tokenizer.chat_template"
CONVERTER = 2  # part of every key: raise it when the same file gives another folder
PROVENANCE = "gguf.json"
MOST_VALUES = 2**22  # values of all arrays of a header; each takes about 400 bytes in the gguf package
MOST_NAME, MOST_TOKEN, MOST_TEXT = 2**8, 2**16, 2**24  # bytes of a name, of a text in a list, of another text
MOST_ALIGNMENT = 2**20
WIDTHS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
TENSOR_DIMENSIONS = 4
ARCHITECTURE = "general.architecture"
SAMPLE = "In 2024, the other day:\n  1. a r\u00e9sum\u00e9  <|endoftext|>"
"""A text on which the stored tokenizer is compared with that of the file."""


@dataclass
class ConvertConfig:
    """`fmmeta convert`."""

    model_name_or_path: str = setting("", "GGUF file of a language model")
    output_dir: str = setting("", "Folder for the converted model, which must not exist or be empty")


def run(settings: ConvertConfig) -> None:
    """`fmmeta convert`: write a folder that transformers and all commands read. Raises `UsageError`."""
    source, folder = Path(settings.model_name_or_path), Path(os.path.realpath(settings.output_dir))
    refuse_first(
        [
            (not settings.model_name_or_path, "model_name_or_path is missing; give a GGUF file and a folder"),
            (not settings.output_dir, f"output_dir is missing; write fmmeta convert {source} FOLDER"),
        ]
    )
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise UsageError(f"output_dir={folder} cannot be read ({error.strerror}); choose another") from None
    if taken:
        raise UsageError(f"output_dir={folder} is not empty; choose another, so that nothing is overwritten")
    progress = Progress(enabled=True)
    convert(source, read_header(source), folder, digest_of(source), progress.notice)
    progress.notice(f"model {folder}")


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
    header, digest = read_header(source), digest_of(source)
    key = hashlib.sha256(f"{digest} {CONVERTER}".encode()).hexdigest()[:16]
    folder = Path(HF_HOME) / "fmmeta" / "models" / f"{header.slug}-{key}"
    if folder.is_dir():
        notice(f"{source} was converted before; its weights are read from {folder}")
    else:
        notice(f"{source} is converted once, to {folder}")
        convert(source, header, folder, digest, notice)
    return str(folder)


@dataclass
class Header:
    """What a checked GGUF file holds.

    values: its metadata by name; of an array, the number of values. tensors: name to (elements, type).
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return self.values[ARCHITECTURE]

    @property
    def slug(self) -> str:
        """The model's name in letters, digits and hyphens."""
        name = self.values.get("general.name")
        text = re.sub(r"[^A-Za-z0-9.]+", "-", name if isinstance(name, str) else "")[:60].strip("-.")
        return text or "gguf"


class HeaderReader:
    """Reads values of a header in their order; nothing is read, or allocated, past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.values = path, data, 0, 0

    def damaged(self, why: str) -> UsageError:
        return UsageError(f"model_name_or_path={self.path} {why}; download it again, or give another file")

    def skip(self, size: int, what: str) -> int:
        """Pass `size` bytes; return where they begin."""
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise self.damaged(
                f"is truncated or damaged: {what} ends at byte {self.at:,}, and the file has"
                f" {len(self.data):,}"
            )
        return begin

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(struct.calcsize(f"<{code}"), what))[0]

    def skip_text(self, what: str, most: int) -> int:
        """Pass a text; return where it begins."""
        size = self.number("Q", f"the length of {what}")
        if most < size <= len(self.data):
            raise self.damaged(f"holds {what} of {size:,} bytes, and {most:,} are the most")
        return self.skip(size, what)

    def text(self, what: str, most: int = MOST_NAME) -> str:
        begin = self.skip_text(what, most)
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError:
            raise self.damaged(f"holds {what} that is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        """A value of the metadata; of an array, its length."""
        if kind in WIDTHS:
            return self.number(WIDTHS[kind], key)
        if kind == TEXT:
            return self.text(key, MOST_NAME if key == ARCHITECTURE else MOST_TEXT)
        if kind != ARRAY:
            raise self.damaged(f"holds {key} of the unknown type {kind}")
        inner, count = self.number("I", key), self.number("Q", key)
        if inner != TEXT and inner not in WIDTHS:
            raise self.damaged(
                f"holds {key}, a list of values of type {inner}, which transformers cannot read"
            )
        least = struct.calcsize(f"<{WIDTHS[inner]}") if inner in WIDTHS else 8
        if count > len(self.data) // least:  # before the multiplication and the loop
            raise self.damaged(
                f"is truncated or damaged: {key} has {count:,} values, and the file {len(self.data):,} bytes"
            )
        self.values += count
        if self.values > MOST_VALUES:
            raise self.damaged(f"holds more than {MOST_VALUES:,} values in the lists of its header")
        if inner == TEXT:
            for _ in range(count):
                self.skip_text(f"a text in {key}", MOST_TOKEN)
        else:
            self.skip(count * least, key)
        return count


def read_header(path: Path) -> Header:
    """The checked header of a GGUF file. Raises `UsageError` for a file that is damaged or cannot be read."""
    given = f"model_name_or_path={path}"
    try:
        importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            f"{given} needs the package gguf, which is not installed; pip install 'fmmeta[gguf]'"
        ) from None
    try:
        if not path.is_file():
            raise UsageError(f"{given} is not a file; check the path, or download the file first")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UsageError(f"{given} is no GGUF file: it does not begin with GGUF; give another file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read_header(HeaderReader(path, data))
    except OSError as error:
        raise UsageError(f"{given} cannot be read ({error.strerror}); give another file") from None


def _read_header(reader: HeaderReader) -> Header:
    header, size = Header(), len(reader.data)
    reader.skip(4, "the magic number")
    version = reader.number("I", "the version")
    if version not in (2, 3):
        other = " (or of a machine with the other byte order)" if not version & 0xFFFF else ""
        raise reader.damaged(f"is of GGUF version {version}{other}, and versions 2 and 3 can be read")
    counts = {what: reader.number("Q", f"the number of {what}") for what in ("tensors", "values")}
    for (what, count), least in zip(counts.items(), (24, 13), strict=True):
        if count * least > size:
            raise reader.damaged(f"says that it holds {count:,} {what}, and it has {size:,} bytes")
        if count > MOST_VALUES:
            raise reader.damaged(f"holds {count:,} {what}, and {MOST_VALUES:,} are the most")
    for _ in range(counts["values"]):
        key = reader.text("the name of a value")
        if key in header.values:
            raise reader.damaged(f"holds {key} twice")
        header.values[key] = reader.value(reader.number("I", f"the type of {key}"), key)
    check_values(reader, header, counts["tensors"])
    places = [read_tensor_place(reader, header) for _ in range(counts["tensors"])]
    check_places(reader, places, header.values.get("general.alignment", 32))
    return header


def check_values(reader: HeaderReader, header: Header, tensors: int) -> None:
    """Raise `UsageError` for metadata that no model has."""
    values = header.values
    if not isinstance(values.get(ARCHITECTURE), str):
        raise reader.damaged(f"names no {ARCHITECTURE}")
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        raise reader.damaged(f"has general.alignment={alignment}, which is no power of two")
    blocks = values.get(f"{header.architecture}.block_count", 0)
    if not isinstance(blocks, int) or not 0 <= blocks <= tensors:
        raise reader.damaged(
            f"has {header.architecture}.block_count={blocks}, and only {tensors} tensors for its layers"
        )


def read_tensor_place(reader: HeaderReader, header: Header) -> tuple[int, int, str]:
    """Offset, bytes and name of the next tensor, which is added to `header`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    name = reader.text("the name of a tensor")
    if name in header.tensors:
        raise reader.damaged(f"holds the tensor {name} twice")
    dimensions = reader.number("I", f"the dimensions of {name}")
    if not 1 <= dimensions <= TENSOR_DIMENSIONS:
        raise reader.damaged(f"holds {name} with {dimensions} dimensions, and 1 to {TENSOR_DIMENSIONS} exist")
    shape = [reader.number("Q", f"the shape of {name}") for _ in range(dimensions)]
    kind, offset = reader.number("I", f"the type of {name}"), reader.number("Q", f"the offset of {name}")
    try:
        named = GGMLQuantizationType(kind)
        block, width = GGML_QUANT_SIZES[named]
        dequantize(np.zeros((1, width), np.uint8), named)
    except (ValueError, KeyError, NotImplementedError):
        known = f"{named.name} ({kind})" if kind in list(GGMLQuantizationType) else str(kind)
        raise UsageError(
            f"model_name_or_path={reader.path} stores {name} in the quantisation {known}, which the"
            " installed gguf cannot read; give a file in another one, such as Q8_0"
        ) from None
    elements = math.prod(shape)
    if not elements or shape[0] % block:
        raise reader.damaged(
            f"holds {name} of shape {shape[::-1]}, and rows of {named.name} are multiples of {block}"
        )
    header.tensors[name] = elements, named.name
    return offset, elements // block * width, name


def check_places(reader: HeaderReader, places: list[tuple[int, int, str]], alignment: int) -> None:
    """Raise `UsageError` for tensors that overlap, are not aligned, or end behind the file."""
    begin = (reader.at + alignment - 1) // alignment * alignment
    for offset, size, name in places:
        if offset % alignment:
            raise reader.damaged(f"holds {name} at offset {offset:,}, which is no multiple of {alignment}")
        reader.at = begin + offset
        reader.skip(size, f"the tensor {name}")
    for (first, size, name), (second, _, other) in pairwise(sorted(places)):
        if first + size > second:
            raise reader.damaged(f"holds {name} and {other} in the same place")


def digest_of(path: Path) -> str:
    """The sha256 of a file. Raises `UsageError`."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(
            f"model_name_or_path={path} cannot be read ({error.strerror}); give another"
        ) from None


def convert(source: Path, header: Header, folder: Path, digest: str, notice: Callable[[str], None]) -> None:
    """Write `folder`, complete or not at all; another process may write the same. Raises `UsageError`."""
    hide_download_bars()
    quiet_logger("transformers")
    given = f"model_name_or_path={source}"
    scaling = {
        name: header.values[key]
        for name in ("type", "factor")
        if (key := f"{header.architecture}.rope.scaling.{name}") in header.values
    }
    if scaling.get("type", "none") != "none" or scaling.get("factor", 1) not in (0, 1):
        raise UsageError(
            f"{given} scales its rotary positions ({shortened(scaling)}), which transformers does not read"
            " from GGUF files; give the model's Hugging Face folder"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        needed = 4 * sum(elements for elements, _ in header.tensors.values())
        free = shutil.disk_usage(folder.parent).free
        if needed > free:
            raise UsageError(
                f"{given} takes {needed / GIB:.3g} GiB in fp32, and {folder.parent} has {free / GIB:.3g} GiB;"
                " set HF_HOME to a folder with room, or use fmmeta convert"
            )
        # alone in its folder, so that no file beside it is read
        with publishing(folder) as temporary, tempfile.TemporaryDirectory() as alone:
            temporary.mkdir()
            link = Path(alone) / "model.gguf"
            link.symlink_to(source.resolve())
            ignored = write_model(link, header, temporary, given)
            write_tokenizer(link, header, temporary, given)
            facts = provenance(source, header, digest, ignored)
            (temporary / PROVENANCE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        if ignored:
            notice(Warn(f"{source}: transformers does not read {', '.join(ignored[:5])}; left out"))
    except OSError as error:
        where = error.filename or folder
        raise UsageError(
            f"{given} cannot be converted: {where} cannot be written or read ({error.strerror}); set HF_HOME"
            " to a folder with room, or use fmmeta convert"
        ) from None


def provenance(source: Path, header: Header, digest: str, ignored: Sequence[str]) -> dict[str, Any]:
    """Where a converted folder comes from. ignored: names of the tensors that were left out."""
    return {
        "file": source.name,
        "sha256": digest,
        "bytes": source.stat().st_size,
        "name": header.values.get("general.name"),
        "license": header.values.get("general.license"),
        "architecture": header.architecture,
        "tensors": dict(Counter(kind for _, kind in header.tensors.values())),
        "ignored_tensors": ignored,
        "converter": CONVERTER,
        "versions": {
            "fmmeta": fmmeta.__version__,
            **{name: importlib.metadata.version(name) for name in ("gguf", "transformers")},
        },
    }


def write_model(link: Path, header: Header, folder: Path, given: str) -> list[str]:
    """Write config.json and model.safetensors; return the tensors that the model does not have."""
    from gguf import GGUFReader, dequantize
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
    )

    try:
        parsed = load_gguf_checkpoint(str(link))["config"]
        config = AutoConfig.from_pretrained(link.parent, gguf_file=link.name)
    except Exception as error:  # values of an untrusted file: any type
        if "not supported" in str(error):
            raise UsageError(
                f"{given} has the architecture {header.architecture!r}, which the installed"
                " transformers cannot read from GGUF; give a safetensors folder of it"
            ) from None
        raise unreadable(given, "its settings", error) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"{given} is a {config.model_type}, which is no decoder; give a causal language model, or a"
            " safetensors folder"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=parsed)
        names = get_gguf_hf_weights_map(model, processor)
    except Exception as error:
        raise unreadable(
            given, f"a causal language model of its settings ({config.model_type})", error
        ) from None
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    reader = GGUFReader(link)
    stored = {names[one.name]: one for one in reader.tensors if names.get(one.name) in shapes}
    missing = [name for name, _ in model.named_parameters() if name not in stored]
    wrong = [name for name, one in stored.items() if int(one.n_elements) != math.prod(shapes[name])]

    def other_shape(name: str, shape: list[int]) -> UsageError:
        return UsageError(
            f"{given} holds {name} of shape {shape}, and its settings say {shapes[name]}; give another file"
        )

    if missing:
        raise UsageError(
            f"{given} lacks {len(missing)} of the model's {len(shapes)} tensors, {missing[0]} among them;"
            " give a complete file"
        )
    for name in wrong:
        raise other_shape(name, stored[name].shape[::-1].tolist())

    def tensor_of(name: str) -> np.ndarray:
        one, kept = stored[name], {"tensors": dict[str, Any]()}
        try:
            weights, renamed, _ = processor.process(
                weights=dequantize(one.data, one.tensor_type),
                name=one.name,
                tensor_key_mapping=names,
                parsed_parameters=kept,
            )
            if renamed is None:  # the processor of GPT-2 stores the output layer by itself
                weights = kept["tensors"][name].numpy()
        except Exception as error:
            raise unreadable(given, one.name, error) from None
        if list(weights.shape) != shapes[name]:
            raise other_shape(name, list(weights.shape))
        return np.ascontiguousarray(weights, dtype=np.float32)

    write_safetensors(folder / "model.safetensors", {name: shapes[name] for name in stored}, tensor_of)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.name_or_path = ""
    config.save_pretrained(folder)
    return sorted(one.name for one in reader.tensors if names.get(one.name) not in shapes)


def write_safetensors(
    path: Path, shapes: dict[str, list[int]], tensor_of: Callable[[str], np.ndarray]
) -> None:
    """Write fp32 tensors one after the other, so that one of them at a time is in memory."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        described[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in shapes:
            file.write(tensor_of(name).data)


def write_tokenizer(link: Path, header: Header, folder: Path, given: str) -> None:
    """Write the tokenizer with all chat templates, and the tokens that end a text; nothing for a file without
    a tokenizer.
    """
    from transformers import AutoTokenizer

    if "tokenizer.ggml.tokens" not in header.values:
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(link.parent, gguf_file=link.name)
        templates = {
            key[len(TEMPLATE) + 1 :] or "default": value
            for key, value in header.values.items()
            if f"{key}.".startswith(f"{TEMPLATE}.") and isinstance(value, str)
        }
        if templates.keys() - {"default"}:
            tokenizer.chat_template = templates
        tokenizer.save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        # the classes of some families would replace parts of tokenizer.json by their own
        plain = {**json.loads(file.read_text("utf-8")), "tokenizer_class": "PreTrainedTokenizerFast"}
        file.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", "utf-8")
        if AutoTokenizer.from_pretrained(folder)(SAMPLE)["input_ids"] != tokenizer(SAMPLE)["input_ids"]:
            raise ValueError("stored as tokenizer.json, it gives other tokens")
        ids = [header.values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        ends = [one for one in dict.fromkeys(ids) if type(one) is int and 0 <= one < len(tokenizer)]
        facts = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends or None}
        (folder / GENERATION_FILE).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    except Exception as error:
        raise unreadable(given, "its tokenizer", error) from None


def unreadable(given: str, what: str, error: Exception) -> UsageError:
    """A part of the file that transformers cannot use."""
    why = f"{type(error).__name__}: {one_line(error)}"[:200]
    return UsageError(f"{given}: transformers cannot read {what} ({why}); give a safetensors folder of it")
