"""GGUF files: converted once to a folder with transformers' own logits; damaged files end in one line."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import fmmeta
from fmmeta import Config, MetaTrainer, UsageError, cli
from fmmeta.models import from_gguf
from fmmeta.models.from_gguf import ConvertConfig, as_folder, read_header
from tests.support import gguf_files
from tests.support.gguf_files import (
    LLAMA,
    SMOLLM2,
    VOCABULARY,
    entry,
    header,
    place,
    tensors_of,
    text,
    write_gguf,
)
from tests.support.helpers import refusal
from tests.support.messages import check_message
from tests.support.models import write_pairs

TEXTS = ["the other day he said", "<|start|>user\nhe<|end|>", "1024 \u00e9t\u00e9"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(from_gguf, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fmmeta" / "models"


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "model.gguf")


def check_same_model(folder: Path, file: Path) -> None:
    """The folder has the logits and the tokens that transformers gives for the file itself, in fp32."""
    own = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    mine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(**own, dtype=torch.float32)
    tokenizers = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(**own)
    for one in TEXTS:
        ids, expected = (tokenizer(one)["input_ids"] for tokenizer in tokenizers)
        assert ids == expected
        batch = torch.tensor([ids])
        with torch.no_grad():
            assert torch.equal(mine(batch).logits, theirs(batch).logits)
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert tokenizers[0].special_tokens_map == tokenizers[1].special_tokens_map


@pytest.mark.parametrize(
    ("architecture", "kind", "tokenizer"),
    [
        *(("llama", kind, "gpt2") for kind in ("Q8_0", "Q4_1", "Q5_0", "F16", "BF16", "F32")),
        ("llama", "Q8_0", "llama"),
        ("qwen2", "Q8_0", "gpt2"),
        ("qwen3", "Q4_0", "gpt2"),
        ("gemma2", "Q8_0", "llama"),
        ("gpt2", "Q8_0", "gpt2"),
    ],
)
def test_the_folder_has_the_logits_of_the_file(architecture, kind, tokenizer, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", architecture, kind, tokenizer=tokenizer)
    check_same_model(Path(as_folder(str(file), print)), file)


def test_a_tokenizer_that_would_change_is_refused(tmp_path):
    """transformers gives a Qwen2 with a vocabulary of sentencepiece another tokenizer from a folder."""
    file = write_gguf(tmp_path / "model.gguf", "qwen2", tokenizer="llama")
    check_message(refusal(as_folder, str(file), print), "its tokenizer", "gives other tokens")


def test_an_untied_output_layer_is_converted(tmp_path):
    tensors = tensors_of("llama")
    tensors["output.weight"] = tensors["token_embd.weight"][::-1].copy()
    file = write_gguf(tmp_path / "model.gguf", tensors=tensors)
    check_same_model(Path(as_folder(str(file), print)), file)


def test_a_file_is_converted_once_for_its_content(file, cache, tmp_path, monkeypatch):
    notes: list[str] = []
    folder = as_folder(str(file), notes.append)
    assert Path(folder).parent == cache
    assert [path.name for path in tmp_path.iterdir() if path != tmp_path / "cache"] == ["model.gguf"]
    assert [path.name for path in cache.iterdir()] == [Path(folder).name]  # nothing temporary is left
    facts = json.loads((Path(folder) / "gguf.json").read_text())
    assert facts["file"] == "model.gguf"
    assert facts["license"] == "apache-2.0"
    assert facts["tensors"] == {"Q8_0": 15, "F32": 5}
    assert facts["sha256"] == from_gguf.digest_of(file)

    other = write_gguf(tmp_path / "other.gguf", kind="Q4_0")
    assert as_folder(str(other), print) != folder
    with monkeypatch.context() as patched:
        patched.setattr(from_gguf, "convert", None)
        copy = shutil.copy(file, tmp_path / "renamed.gguf")
        assert as_folder(str(copy), notes.append) == folder
    monkeypatch.setattr(from_gguf, "CONVERTER", 0)
    assert as_folder(str(file), print) != folder
    assert "is converted once" in notes[0]
    assert "was converted before" in notes[1]


def test_all_chat_templates_and_end_tokens_are_converted(tmp_path, monkeypatch):
    both = {"default": "a", "tool_use": "b"}
    named = [{"name": name, "template": template} for name, template in both.items()]
    monkeypatch.setattr(gguf_files, "TEMPLATE", named)
    folder = Path(as_folder(str(write_gguf(tmp_path / "model.gguf")), print))
    assert AutoTokenizer.from_pretrained(folder).chat_template == both
    ends = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    assert ends == [VOCABULARY - 1, VOCABULARY - 3]


def test_other_names_of_models_stay_as_they_are(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    for name in ("tiny", "org/model", str(tmp_path / "folder.gguf"), "org/model-GGUF"):
        assert as_folder(name, print) == name


def test_files_beside_the_file_are_not_read(file, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    folder = Path(as_folder(str(file), print))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert AutoTokenizer.from_pretrained(folder).chat_template.startswith("{% for turn")


def test_a_failed_conversion_leaves_nothing(file, cache, monkeypatch):
    monkeypatch.setattr(from_gguf, "write_tokenizer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        as_folder(str(file), print)
    assert list(cache.iterdir()) == []


def test_a_process_that_was_slower_uses_the_folder_of_the_other(file, cache, monkeypatch):
    first = as_folder(str(file), print)
    stamp = (Path(first) / "model.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_dir", lambda self: str(self) != first and os.path.isdir(self))
        assert as_folder(str(file), print) == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == stamp
    assert len(list(cache.iterdir())) == 1


def test_tensors_that_transformers_leaves_out_are_named(tmp_path):
    tensors = {**tensors_of("llama"), "rope_freqs.weight": np.ones(4, np.float32)}
    notes: list[str] = []
    folder = as_folder(str(write_gguf(tmp_path / "model.gguf", tensors=tensors)), notes.append)
    assert json.loads((Path(folder) / "gguf.json").read_text())["ignored_tensors"] == ["rope_freqs.weight"]
    assert "rope_freqs.weight" in notes[-1]


def test_convert_writes_a_folder_and_refuses_a_full_one(file, tmp_path, capsys):
    target = tmp_path / "new" / "folder"
    settings = cli.parse([str(file), str(target)], "convert")
    assert settings == ConvertConfig(str(file), str(target))
    from_gguf.run(settings)
    check_same_model(target, file)
    check_message(refusal(from_gguf.run, settings), "output_dir=", "choose another")
    check_message(refusal(from_gguf.run, cli.parse([str(file)], "convert")), "output_dir", "FOLDER")
    check_message(refusal(from_gguf.run, cli.parse([], "convert")), "model_name_or_path is missing", "give")


def test_every_command_reads_a_file(file, tmp_path):
    """train, evaluate with a comparison, adapt, load, inspect and plan."""
    data = write_pairs(tmp_path / "pairs.jsonl")
    causal = {"task_type": "causal_lm", "max_length": 48}
    config = Config(
        model_name_or_path=str(file),
        dataset=[str(data)],
        **causal,
        k_shot=2,
        num_query=2,
        outer_steps=1,
        inner_steps=1,
        meta_batch_size=1,
        eval_episodes=0,
        num_workers="0",
        output_dir=str(tmp_path / "run"),
    )
    MetaTrainer(config).train()
    results = fmmeta.evaluate(
        str(file),
        str(data),
        compare=str(file),
        method=["finetune", "in_context"],
        k_shot=1,
        num_query=2,
        episodes=2,
        inner_steps=1,
        eval_split="train",
        **causal,
    )
    assert results["model"] == results["compare"]["with"] == str(file)
    assert [cell["loss_gain"] for cell in results["compare"]["cells"]] == [0.0, 0.0]
    fmmeta.adapt(str(file), [("a", "b"), ("c", "d")], output_dir=tmp_path / "out", inner_steps=1, **causal)
    answers = fmmeta.load(tmp_path / "out").predict(["a"], max_new_tokens=2)
    assert len(answers) == len(fmmeta.load(str(file), task_type="causal_lm").predict(["a"])) == 1
    for command, more in {
        "inspect": ["--dataset", str(data), "--k_shot", "2", "--num_query", "2"],
        "plan": ["--gpus", "1", "--max_length", "48"],
    }.items():
        with pytest.raises(SystemExit) as ended:
            cli.main([command, *more, "--model_name_or_path", str(file), "--task_type", "causal_lm"])
        assert ended.value.code == 0


def test_tune_does_not_store_into_the_cache(file, tmp_path):
    from fmmeta.evaluation.settings import TuneConfig
    from fmmeta.evaluation.tune import tune

    text = refusal(tune, TuneConfig(model_name_or_path=str(file), dataset=["letters"]))
    check_message(text, "model_name_or_path=", "give --output FILE")


HUGE = 2**60
ROOM = bytes(4096)  # of the tensors' data
DAMAGE = {
    "magic": (b"GGML" + ROOM, "give another file"),
    "version": (header([LLAMA], [], version=1), "versions 2 and 3"),
    "byte order": (header([LLAMA], [], version=3 << 24), "byte order"),
    "number of tensors": (header([LLAMA], [], (HUGE, 1)), f"{HUGE:,} tensors"),
    "number of values": (header([LLAMA], [], (0, HUGE)), f"{HUGE:,} values"),
    "one value more": (header([LLAMA], [], (0, 2)), "ends at byte"),
    "one tensor more": (header([LLAMA], [place("a", 4)], (2, 1)), "ends at byte"),
    "length of a name": (header([struct.pack("<Q", HUGE)], []) + ROOM, f"{HUGE + 32:,}"),
    "length of a text": (header([entry("a", 8, struct.pack("<Q", 2**64 - 1))], []) + ROOM, "ends at byte"),
    "type of a value": (header([entry("a", 77, b"")], []) + ROOM, "unknown type 77"),
    "list of lists": (
        header([entry("a", 9, struct.pack("<IQ", 9, 4))], []) + ROOM,
        "transformers cannot read",
    ),
    "length of a list": (header([entry("a", 9, struct.pack("<IQ", 4, HUGE))], []) + ROOM, f"{HUGE:,} values"),
    "list of texts": (header([entry("a", 9, struct.pack("<IQ", 8, 600))], []) + ROOM, "values"),
    "bytes of a name": (header([entry(b"\xff\xfe", 4, bytes(4))], []) + ROOM, "UTF-8"),
    "value twice": (header([LLAMA, LLAMA], []), "general.architecture twice"),
    "no architecture": (header([], []), "names no general.architecture"),
    "number as architecture": (header([entry("general.architecture", 4, bytes(4))], []), "names no"),
    "alignment 0": (header([LLAMA, entry("general.alignment", 4, bytes(4))], []), "general.alignment=0"),
    "alignment 24": (header([LLAMA, entry("general.alignment", 4, b"\x18\0\0\0")], []), "alignment=24"),
    "number of layers": (
        header([LLAMA, entry("llama.block_count", 4, b"\xff\xff\xff\x7f")], []),
        "llama.block_count=2147483647",
    ),
    "tensor twice": (header([LLAMA], [place("a", 4), place("a", 4, offset=32)]) + ROOM, "tensor a twice"),
    "no dimensions": (header([LLAMA], [place("a")]) + ROOM, "0 dimensions"),
    "many dimensions": (header([LLAMA], [place("a", *[1] * 99)]) + ROOM, "99 dimensions"),
    "empty tensor": (header([LLAMA], [place("a", 0, 4)]) + ROOM, "of shape [4, 0]"),
    "rows of half a block": (header([LLAMA], [place("a", 48, 2, kind=8)]) + ROOM, "multiples of 32"),
    "shape": (header([LLAMA], [place("a", 2**40, 2**40)]) + ROOM, "the tensor a ends at byte"),
    "offset": (header([LLAMA], [place("a", 4, offset=HUGE)]) + ROOM, "the tensor a ends at byte"),
    "end of the data": (header([LLAMA], [place("a", 32, 32, offset=32)]) + ROOM, "the tensor a ends at byte"),
    "offset between": (header([LLAMA], [place("a", 4, offset=5)]) + ROOM, "no multiple of 32"),
    "overlap": (
        header([LLAMA], [place("a", 64), place("b", 4, offset=32)]) + ROOM,
        "holds a and b in the same place",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_header_is_refused(what, tmp_path):
    content, cause = DAMAGE[what]
    file = tmp_path / "damaged.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        message = refusal(read_header, file)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    check_message(message, f"model_name_or_path={file}", cause, "give another file")


def test_lists_that_would_take_much_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(from_gguf, "MOST_VALUES", 100)
    monkeypatch.setattr(from_gguf, "MOST_TOKEN", 10)
    file = tmp_path / "large.gguf"
    numbers = entry("a", 9, struct.pack("<IQ", 0, 60) + bytes(60))
    words = entry("a", 9, struct.pack("<IQ", 8, 1) + text("a long text"))
    for values, cause in (
        ([numbers, numbers.replace(b"a", b"b", 1)], "more than 100"),
        ([words], "11 bytes"),
    ):
        file.write_bytes(header([LLAMA, *values], []))
        check_message(refusal(read_header, file), "model_name_or_path=", cause)


@pytest.mark.parametrize(("kind", "name"), [(99, "99"), (26, "I32 (26)"), (10, "Q2_K")])
def test_an_unknown_quantisation_is_refused(kind, name, tmp_path):
    """26 is a type of integers, which no weights have; 10 is known."""
    file = tmp_path / "model.gguf"
    file.write_bytes(header([LLAMA], [place("a", 256, kind=kind)]) + ROOM)
    if kind == 10:
        assert read_header(file).tensors == {"a": (256, name)}
        return
    check_message(refusal(read_header, file), f"the quantisation {name}", "such as Q8_0")


def test_a_truncated_file_is_refused_at_every_length(file):
    content = file.read_bytes()
    for size in range(0, len(content), 61):
        file.write_bytes(content[:size])
        assert "give another file" in refusal(read_header, file)


def flipped(folder: Path, once: Path, data: st.DataObject) -> Path:
    """A copy of a file in which one to three bytes of the header are others."""
    content = bytearray(once.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, 8000))] = data.draw(st.integers(0, 255))
    file = folder / "model.gguf"
    file.write_bytes(content)
    return file


@given(st.data())
def test_flipped_bytes_of_a_header_are_read_or_refused(tmp_path_factory, data):
    with suppress(UsageError):
        read_header(flipped(tmp_path_factory.mktemp("flipped"), write_once(tmp_path_factory), data))


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_flipped_bytes_of_a_header_end_in_a_model_or_in_one_line(tmp_path_factory, data):
    """No error of transformers or gguf reaches the user as a traceback."""
    file = flipped(tmp_path_factory.mktemp("flipped"), write_once(tmp_path_factory), data)
    with suppress(UsageError):
        from_gguf.convert(file, read_header(file), file.with_name("out"), "", lambda text: None)


def write_once(factory) -> Path:
    file = factory.getbasetemp() / "once.gguf"
    return file if file.exists() else write_gguf(file)


def test_what_is_no_file_is_refused(tmp_path):
    for name in (str(tmp_path / "missing.gguf"), "org/repository/model.gguf"):
        check_message(refusal(as_folder, name, print), f"model_name_or_path={name}", "check the path")


def test_models_that_cannot_be_converted_are_refused(tmp_path):
    """An architecture of diffusion, an encoder-decoder, tensors and settings that do not belong together."""
    file, tensors = tmp_path / "model.gguf", tensors_of("llama")
    file.write_bytes(header([entry("general.architecture", 8, text("flux"))], []))
    check_message(refusal(as_folder, str(file), print), "architecture 'flux'", "give a safetensors folder")
    write_gguf(file, "t5", tensors=tensors)
    check_message(refusal(as_folder, str(file), print), "is a t5", "a safetensors folder")
    del tensors["blk.1.ffn_up.weight"]
    write_gguf(file, tensors=tensors)
    check_message(refusal(as_folder, str(file), print), "lacks 1 of", "give a complete file")
    write_gguf(file, settings={"feed_forward_length": 96})
    check_message(refusal(as_folder, str(file), print), "[64, 32]", "[96, 32]", "give another file")
    write_gguf(file, settings={"attention.head_count": 0})
    check_message(
        refusal(as_folder, str(file), print), "transformers cannot read", "give a safetensors folder"
    )
    write_gguf(file, settings={"embedding_length": None})
    check_message(refusal(as_folder, str(file), print), "model_name_or_path=", "give")


def test_a_tokenizer_that_transformers_cannot_read_is_refused(file):
    content = file.read_bytes()
    file.write_bytes(content.replace(text("gpt2"), text("none"), 1))
    message = refusal(as_folder, str(file), print)
    assert "transformers cannot read its tokenizer" in message
    assert "'none'" in message


def test_a_file_without_a_tokenizer_is_converted(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", tokenizer="none")
    assert not list(Path(as_folder(str(file), print)).glob("token*"))


def test_without_the_package_the_command_that_installs_it_is_named(file, monkeypatch):
    from importlib import metadata

    version = metadata.version

    def missing(name: str) -> str:
        if name == "gguf":
            raise metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(metadata, "version", missing)
    check_message(refusal(as_folder, str(file), print), "needs the package gguf", "fmmeta[gguf]")


def test_a_full_disk_is_named_before_anything_is_written(file, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    check_message(refusal(as_folder, str(file), print), "in fp32", "set HF_HOME")
    assert list(cache.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is missing")
def test_smollm2_is_converted_tensor_by_tensor_within_three_minutes(cache):
    """The same logits as transformers, and at no time half of the weights in memory."""
    digest, began = from_gguf.digest_of(SMOLLM2), time.process_time()
    header = read_header(SMOLLM2)
    from_gguf.convert(SMOLLM2, header, cache / "smollm2", digest, print)
    assert time.process_time() - began < 180
    check_same_model(cache / "smollm2", SMOLLM2)


@pytest.mark.slow
def test_the_memory_of_a_conversion_is_that_of_a_tensor(tmp_path):
    """24 layers of 1 MiB matrices: the peak is a small part of the weights."""
    rng = np.random.default_rng(0)
    sizes = {"embedding_length": 256, "feed_forward_length": 1024, "block_count": 24}
    shapes = {
        **dict.fromkeys(("attn_q", "attn_output"), (256, 256)),
        **dict.fromkeys(("attn_k", "attn_v"), (128, 256)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (1024, 256)),
        "ffn_down": (256, 1024),
    }
    tensors = {"token_embd.weight": rng.normal(size=(VOCABULARY, 256)).astype(np.float32)}
    tensors["output_norm.weight"] = np.ones(256, np.float32)
    for layer in range(24):
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = np.ones(256, np.float32)
    file = write_gguf(tmp_path / "model.gguf", settings=sizes, tensors=tensors)
    as_folder(str(write_gguf(tmp_path / "small.gguf")), print)  # imports
    total = sum(one.nbytes for one in tensors.values())
    del tensors
    tracemalloc.start()
    try:
        as_folder(str(file), print)
        assert tracemalloc.get_traced_memory()[1] < total / 5
    finally:
        tracemalloc.stop()


def test_scaled_positions_are_refused(tmp_path):
    """transformers reads no scaling from GGUF files: the converted model would be another one."""
    file = write_gguf(tmp_path / "model.gguf", settings={"rope.scaling.factor": 4.0})
    check_message(refusal(as_folder, str(file), print), "factor", "rotary positions", "Hugging Face folder")
    write_gguf(file, settings={"rope.scaling.factor": 1.0})
    assert Path(as_folder(str(file), print)).is_dir()


def test_convert_into_the_current_folder(file, tmp_path, monkeypatch):
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    from_gguf.run(ConvertConfig(model_name_or_path=str(file), output_dir="."))
    assert (folder / "model.safetensors").is_file()
