"""GGUF files: converted once to a folder with transformers' own logits; damaged files end in one line."""

import errno
import hashlib
import json
import os
import shutil
import struct
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import fmmeta
from fmmeta import Config, MetaTrainer, UsageError, cli
from fmmeta.evaluation.settings import TuneConfig
from fmmeta.evaluation.tune import tune
from fmmeta.learners import from_gguf
from fmmeta.learners.from_gguf import ConvertConfig, as_folder
from tests.support.gguf_files import SMOLLM2, VOCABULARY, tensors_of, write_gguf
from tests.support.messages import check_message, refusal
from tests.support.models import write_pairs

TEXTS = ["the other day he said", "<|start|>user\nhe<|end|>", "1024 \u00e9t\u00e9"]

TENSORS = tensors_of("llama")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(from_gguf, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fmmeta" / "gguf"


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "model.gguf")


def refused(file: Path | str) -> str:
    """The message for a file that is no model."""
    return refusal(as_folder, str(file), print)


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


UNTIED = {**TENSORS, "output.weight": TENSORS["token_embd.weight"][::-1].copy()}


@pytest.mark.parametrize(
    ("architecture", "given"),
    [
        *(("llama", {"kind": kind}) for kind in ("Q8_0", "Q4_1", "Q5_0", "F16", "BF16", "F32")),
        ("llama", {"tokenizer": "llama"}),
        ("llama", {"tensors": UNTIED}),
        ("qwen2", {}),
        ("qwen3", {"kind": "Q4_0"}),
        ("gemma2", {"tokenizer": "llama"}),
        ("gpt2", {}),
    ],
)
def test_the_folder_has_the_logits_of_the_file(architecture, given, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", architecture, **given)
    check_same_model(Path(as_folder(str(file), print)), file)


def test_a_file_is_converted_once_for_its_content(file, cache, tmp_path, monkeypatch):
    notes: list[str] = []
    folder = as_folder(str(file), notes.append)
    assert Path(folder).parent == cache
    assert [path.name for path in tmp_path.iterdir() if path != tmp_path / "cache"] == ["model.gguf"]
    assert [path.name for path in cache.iterdir()] == [Path(folder).name]  # nothing temporary is left
    facts = json.loads((Path(folder) / "gguf.json").read_text())
    assert (facts["file"], facts["license"]) == ("model.gguf", "apache-2.0")
    assert facts["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()

    assert as_folder(str(write_gguf(tmp_path / "other.gguf", kind="Q4_0")), print) != folder
    with monkeypatch.context() as patched:
        patched.setattr(from_gguf, "convert", None)
        assert as_folder(str(shutil.copy(file, tmp_path / "renamed.gguf")), notes.append) == folder
    for note, said in zip(notes, ("is converted once", "converted in", "was converted before"), strict=True):
        assert said in note


def test_other_names_of_models_stay_as_they_are(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    for name in ("tiny", "org/model", str(tmp_path / "folder.gguf"), "org/model-GGUF"):
        assert as_folder(name, print) == name


def test_files_beside_the_file_are_not_read(file, tmp_path):
    """Nor what ends a text, which the file has."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    model = AutoModelForCausalLM.from_pretrained(folder := as_folder(str(file), print))
    assert model.config.model_type == "llama"
    assert model.generation_config.eos_token_id == [VOCABULARY - 1, VOCABULARY - 3]
    assert AutoTokenizer.from_pretrained(folder).chat_template.startswith("{% for turn")


def test_a_process_that_was_slower_uses_the_folder_of_the_other(file, cache, monkeypatch):
    first = as_folder(str(file), print)
    stamp = (Path(first) / "model.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_dir", lambda self: str(self) != first and os.path.isdir(self))
        assert as_folder(str(file), print) == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == stamp
    assert len(list(cache.iterdir())) == 1


def test_convert_writes_a_folder_and_refuses_a_full_one(file, tmp_path, monkeypatch):
    """Also into the current folder."""
    target = tmp_path / "new" / "folder"
    settings = cli.parse([str(file), str(target)], "convert")
    assert settings == ConvertConfig(str(file), str(target))
    from_gguf.run(settings)
    check_same_model(target, file)
    check_message(refusal(from_gguf.run, settings), "output_dir=", "choose another")
    check_message(refusal(from_gguf.run, cli.parse([str(file)], "convert")), "output_dir", "FOLDER")
    check_message(refusal(from_gguf.run, cli.parse([], "convert")), "model_name_or_path is missing", "give")
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    from_gguf.run(ConvertConfig(model_name_or_path=str(file), output_dir="."))
    assert (here / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({"tensors": {**TENSORS, "rope_freqs.weight": np.ones(4, np.float32)}}, "does not read rope_freqs"),
        ({"tokenizer": "none"}, "converted in"),
        ({"settings": {"rope.scaling.factor": 1.0}}, "converted in"),  # which is no scaling
    ],
)
def test_files_with_less_or_more_are_converted(given, note, tmp_path):
    notes: list[str] = []
    folder = Path(as_folder(str(write_gguf(tmp_path / "model.gguf", **given)), notes.append))
    assert note in notes[1]
    assert bool(list(folder.glob("token*"))) == ("tokenizer" not in given)


def test_every_command_reads_a_file(file, tmp_path):
    """train, evaluate with a comparison, adapt, load, inspect and plan."""
    data = write_pairs(tmp_path / "pairs.jsonl")
    causal = {"task_type": "causal_lm", "max_length": 48}
    short = {"k_shot": 2, "num_query": 2, "outer_steps": 1, "inner_steps": 1, "meta_batch_size": 1}
    given = {"model_name_or_path": str(file), "dataset": [str(data)], **causal, **short, "eval_episodes": 0}
    MetaTrainer(Config(**given, num_workers="0", output_dir=str(tmp_path / "run"))).train()
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


HUGE = struct.pack("<Q", 2**60)
DAMAGE = {  # bytes at a place of the file
    "magic": (0, b"GGML", "does not begin with GGUF"),
    "version": (4, struct.pack("<I", 1), "version 1"),
    "byte order": (4, struct.pack(">I", 3), "and its header says"),
    "number of tensors": (8, HUGE, "damaged"),
    "number of values": (16, HUGE, "damaged"),
    "length of a name": (24, HUGE, "and its header says"),
    # the reader of the gguf package continues with empty values, as often as the header says
    "number of tokens": (b"token_type", HUGE, "and its header says"),
    "tokenizer": (b"gpt2", b"none", "transformers cannot read the tokenizer"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_header_is_refused(what, file):
    at, damage, cause = DAMAGE[what]
    content = file.read_bytes()
    if isinstance(at, bytes):  # the length of a list follows its name, its type and that of its values
        at = content.index(at) + (len(at) + 8 if damage == HUGE else 0)
    file.write_bytes(content[:at] + damage + content[at + len(damage) :])
    check_message(refused(file), f"model_name_or_path={file}", cause, " give a")


def test_a_truncated_file_is_refused_at_every_length(file):
    content = file.read_bytes()
    for size in range(0, len(content), 997):
        file.write_bytes(content[:size])
        assert "give another file" in refused(file)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(4, 8000), st.integers(0, 255)), min_size=1, max_size=3))
def test_flipped_bytes_of_a_header_end_in_a_model_or_in_one_line(file, flipped):
    """No error of transformers or gguf reaches the user as a traceback."""
    content = bytearray(file.read_bytes())
    for place, byte in flipped:
        content[place] = byte
    changed = file.with_name("flipped.gguf")
    changed.write_bytes(content)
    shutil.rmtree(file.with_name("out"), ignore_errors=True)
    with suppress(UsageError):
        from_gguf.convert(changed, file.with_name("out"), "", lambda text: None)


INCOMPLETE = {name: value for name, value in TENSORS.items() if name != "blk.1.ffn_up.weight"}


@pytest.mark.parametrize(
    ("architecture", "given", "parts"),
    [
        ("flux", {"tensors": TENSORS}, ("architecture flux", "give a safetensors folder")),  # of diffusion
        ("t5", {"tensors": TENSORS}, ("transformers cannot", "a safetensors folder")),  # an encoder-decoder
        ("llama", {"tensors": INCOMPLETE}, ("lacks 1 of", "give a complete file")),
        ("llama", {"settings": {"feed_forward_length": 96}}, ("lacks 6 of", "give a complete file")),
        # transformers reads no scaling from GGUF files: the converted model would be another one
        ("llama", {"settings": {"rope.scaling.factor": 4.0}}, ("rotary positions", "Hugging Face folder")),
        # transformers gives a Qwen2 with a vocabulary of sentencepiece another tokenizer from a folder
        ("qwen2", {"tokenizer": "llama"}, ("the tokenizer", "gives other tokens")),
        # transformers would leave blocks out that the file does not count
        (
            "llama",
            {"settings": {"block_count": 1}},
            ("llama.block_count=1", "tensors of block 1", "give a file whose block_count"),
        ),
    ],
    ids=["diffusion", "encoder-decoder", "tensor", "sizes", "positions", "tokenizer", "blocks"],
)
def test_models_that_cannot_be_converted_are_refused(architecture, given, parts, tmp_path):
    check_message(refused(write_gguf(tmp_path / "model.gguf", architecture, **given)), *parts)


@pytest.mark.parametrize("kind", ["eos", "bos", "unknown", "padding", "eot"])
@pytest.mark.parametrize("number", [VOCABULARY, -1])
def test_ids_of_no_token_are_refused(kind, number, tmp_path, monkeypatch):
    key, write = f"tokenizer.ggml.{kind}_token_id", GGUFWriter.write_header_to_file

    def changed(self):
        self.kv_data[0].pop(key, None)
        self.add_int32(key, number)
        write(self)

    monkeypatch.setattr(GGUFWriter, "write_header_to_file", changed)
    message = refused(write_gguf(tmp_path / "model.gguf"))
    check_message(message, f"{key}={number},", f"its vocabulary has {VOCABULARY} tokens", "give a file with")


def test_what_is_no_file_and_a_missing_package_are_refused(file, monkeypatch):
    for name in (str(file.with_name("missing.gguf")), "org/repository/model.gguf"):
        check_message(refused(name), f"model_name_or_path={name}", "check the path")
    in_cache = TuneConfig(model_name_or_path=str(file), dataset=["letters"])  # which tune does not change
    check_message(refusal(tune, in_cache), "model_name_or_path=", "give --output FILE")
    monkeypatch.setitem(sys.modules, "gguf", None)
    check_message(refused(file), "needs the package gguf", "fmmeta[gguf]")


def test_a_full_disk_is_named(file, cache, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")
    monkeypatch.setattr(from_gguf, "write_tokenizer", Mock(side_effect=full))
    check_message(refused(file), "No space left", "set HF_HOME")
    assert list(cache.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is missing")
@pytest.mark.timeout(600)
def test_smollm2_has_the_logits_of_the_file(cache):
    check_same_model(Path(as_folder(str(SMOLLM2), print)), SMOLLM2)
