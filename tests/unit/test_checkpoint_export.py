"""Checkpoints that every layout reads, exported Hugging Face folders, and resumed or refused runs."""

import errno
import itertools
import json
import resource
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from fmmeta import checkpoint
from fmmeta.checkpoint import hf_export as export_module
from fmmeta.config.settings import Config
from fmmeta.learners.load import describe
from fmmeta.parallel.collectives import Communicator
from fmmeta.parallel.param_map import Fragment, ParamMap
from fmmeta.parallel.workers.base import Worker
from fmmeta.parallel.workers.full_model import PlainWorker
from fmmeta.training import run_files
from fmmeta.training.build import settings_of
from fmmeta.training.run_files import Metrics, RunLogger, lock_folder, write_run
from tests.support.checkpoints import (
    CUT,
    SHAPES,
    WHOLE,
    assert_holds,
    laid_out,
    param_map,
    parameters,
    saved,
    write_manifest,
)
from tests.support.exports import assert_same_logits, exported, inputs
from tests.support.fake_runs import start_of
from tests.support.messages import check_message, refusal
from tests.support.models import save_llama
from tests.support.short_runs import metrics_of

FIRST = param_map(("a", 0, 12), ("b", 0, 2), gap=1)  # the two ranks of a group
SECOND = param_map(("b", 2, 3), ("c", 0, 4))


def two_shards(tmp_path: Path, *writers: ParamMap) -> Path:
    """A checkpoint with the files of two ranks."""
    folder, second = (
        saved(tmp_path / str(rank), params) for rank, params in enumerate(writers or (FIRST, SECOND))
    )
    (second / "shard-00000.safetensors").rename(folder / "shard-00001.safetensors")
    write_manifest(folder)
    return folder


@pytest.mark.parametrize(
    ("write", "reader"),
    [
        *itertools.product(
            (partial(saved, params=WHOLE), partial(saved, params=CUT)), (WHOLE, CUT, FIRST, SECOND)
        ),
        *itertools.product([two_shards], (WHOLE, CUT, SECOND)),
    ],
)
def test_every_layout_reads_checkpoints_of_every_layout(tmp_path, write, reader):
    folder = write(tmp_path)
    assert_holds(folder, reader)
    assert checkpoint.read_state(folder)["outer_step"] == 3
    assert not list(folder.parent.glob("tmp-*"))


ACROSS = [
    ParamMap(
        (
            Fragment("a", (4, 3), 0, 0, 4, True, (1, 0, 1)),
            Fragment("b", (5,), 4, 0, 5),
            Fragment("c", (2, 2), 9, 0, 2),
        ),
        11,
        {},
        False,
    ),
    ParamMap(
        (
            Fragment("a", (4, 3), 0, 0, 8, True, (1, 1, 2)),
            Fragment("b", (5,), 8, 0, 5, False),
            Fragment("c", (2, 2), 13, 2, 2),
        ),
        15,
        {},
        False,
    ),
]


def test_tensor_parallel_shards_are_one_checkpoint(tmp_path):
    """Two tensor ranks hold the first column and the other columns of `a`; `b` is replicated."""
    folder, whole = two_shards(tmp_path, *ACROSS), saved(tmp_path / "whole", WHOLE)
    one, two = (load_file(folder / f"shard-0000{rank}.safetensors") for rank in range(2))
    assert torch.equal(one["theta/a@0#1:0:1"], torch.tensor([100.0, 103.0, 106.0, 109.0]))
    assert "theta/b@0" not in two
    for reader in (*ACROSS, WHOLE, CUT, SECOND):
        assert_holds(folder, reader)
    for reader in ACROSS:
        assert_holds(whole, reader)


def test_replicated_parameters_count_once():
    """In the tensors that are put together, and in inner products, by layer and in total."""
    assert [params.owned_slices() for params in ACROSS] == [[slice(0, 11)], [slice(0, 8), slice(13, 15)]]
    parts: dict[str, Any] = dict.fromkeys(SHAPES, 0.0)
    sums, total = torch.zeros(3, dtype=torch.float64), 0.0
    for params in ACROSS:
        group = SimpleNamespace(sum_=lambda t: t)
        worker: Any = SimpleNamespace(params=params, device=torch.device("cpu"), group=group)
        a, b = laid_out(params, parameters(100)), laid_out(params, parameters(7))
        segments = [(f.here.start, f.here.stop, "abc".index(f.name)) for f in params.fragments]
        sums += Worker.dot_by_layer(worker, a, b, segments, 3)
        total += Worker.dot(worker, a, b)
        for name, shape in SHAPES.items():
            parts[name] = parts[name] + params.assemble(a, name, shape, lambda t: t)
    for name, found in parts.items():
        assert torch.equal(found.view(-1), parameters(100)[name]), name
    wanted = [torch.dot(parameters(100)[name].double(), parameters(7)[name].double()) for name in "abc"]
    torch.testing.assert_close(sums, torch.stack(wanted), rtol=0, atol=0)
    assert total == float(sums.sum())


def without(folder: Path) -> None:
    """A checkpoint whose manifest knows nothing of the second file."""
    (folder / "shard-00001.safetensors").unlink()
    write_manifest(folder)


def with_tensor(folder: Path, key: str) -> None:
    save_file({key: torch.zeros(3)}, folder / "shard-00000.safetensors")
    write_manifest(folder)


TURNED = replace(
    WHOLE, fragments=tuple(replace(f, shape=(3, 4)) if f.name == "a" else f for f in WHOLE.fragments)
)
SMALLER = replace(WHOLE, fragments=WHOLE.fragments[:2], numel=17)


@pytest.mark.parametrize(
    ("damage", "reader", "parts"),
    [
        (lambda f: (f / "shard-00001.safetensors").unlink(), WHOLE, (" cannot be read (",)),
        (without, WHOLE, (" lacks 3 elements of theta/b", "give another checkpoint")),
        (
            lambda f: (f / "shard-00000.safetensors").write_bytes(b"\x00" * 10),
            WHOLE,
            (" cannot be read (", "; give an older checkpoint"),
        ),
        *(
            (partial(with_tensor, key=key), WHOLE, (" cannot be read (",))
            for key in ("theta/a", "theta/a@x", "theta/a@0#1:2:y")
        ),
        (lambda f: None, TURNED, ("[4, 3]", "[3, 4]", "give a checkpoint of this one")),
        (lambda f: None, SMALLER, (" is of another model", "give a checkpoint of this one")),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_named(tmp_path, damage, reader, parts):
    folder = two_shards(tmp_path)
    damage(folder)
    message = refusal(checkpoint.load, folder, ["theta"], reader, torch.zeros(reader.numel))
    check_message(message, f"{folder}", *parts)


def test_saving_again_replaces_the_checkpoint_and_the_newest_are_kept(tmp_path):
    stray = saved(tmp_path, CUT, 10) / "stray"
    stray.write_text("x")
    kept = [saved(tmp_path, WHOLE, step, keep=2) for step in (9, 10, 11)][1:]
    assert checkpoint.list_complete(tmp_path) == kept
    assert sorted(tmp_path.iterdir()) == kept
    assert_holds(kept[0], CUT)
    assert not stray.exists()


def test_incomplete_folders_are_not_listed_as_checkpoints(tmp_path):
    whole = saved(tmp_path, WHOLE)
    for name in ("checkpoint-7", "tmp-checkpoint-8", "checkpoint-final", "checkpoint-٣"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-final" / "manifest.json").write_text("{}")
    assert checkpoint.list_complete(tmp_path) == [whole]
    folder = tmp_path / "checkpoint-7"
    message = refusal(checkpoint.read_state, folder)
    check_message(message, f"resume_from_checkpoint={folder} ", "give a checkpoint-N folder")


def check_logits(worker: PlainWorker, folder: Path, plain: Any) -> None:
    """The exported model gives the logits that the worker's model gives."""
    batch = inputs(folder)
    with torch.no_grad():
        wanted = worker.model.logits(worker.model(**batch))
        assert_same_logits(plain.eval()(**batch).logits, wanted, batch["attention_mask"])


def test_export_of_a_sequence_classifier(tmp_path, bert):
    source, tmp_path = shutil.copytree(bert, tmp_path / "source"), tmp_path / "out"
    names = {"id2label": {0: "NEGATIVE", 1: "POSITIVE", 2: "NEUTRAL"}}
    (source / "config.json").write_text(json.dumps({**read_json(source / "config.json"), **names}))
    _, worker = exported(source, tmp_path, pooling="model", head_init="learned")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    check_logits(worker, tmp_path, plain)
    assert plain.config.id2label == {number: f"LABEL_{number}" for number in range(3)}  # of no task
    assert plain.config.hidden_dropout_prob == AutoConfig.from_pretrained(bert).hidden_dropout_prob == 0.1
    assert plain.config.attention_probs_dropout_prob == 0.1


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("head_init", ["learned", "prototype"])
def test_export_of_a_pooled_encoder(tmp_path, bert, pooling, head_init):
    _, worker = exported(bert, tmp_path, pooling=pooling, head_init=head_init)
    batch, plain, features = features_of(tmp_path, pooling)
    with torch.no_grad():
        assert_same_logits(features, worker.model(**batch)[0], batch["attention_mask"])
        if head_init == "learned":
            head = load_file(tmp_path / "head.safetensors")
            logits = features @ head["head.weight"].T + head["head.bias"]
            assert_same_logits(logits, worker.model(**batch)[1], batch["attention_mask"])
    assert (tmp_path / "head.safetensors").exists() == (head_init == "learned")
    assert plain.config.hidden_dropout_prob == 0.1
    modules = [(one["path"], one["type"].split(".")[-1]) for one in read_json(tmp_path / "modules.json")]
    assert modules == [("", "Transformer"), ("1_Pooling", "Pooling")]
    modes = {"pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_cls_token": pooling == "cls"}
    modes["word_embedding_dimension"] = 32
    assert modes.items() <= read_json(tmp_path / "1_Pooling" / "config.json").items()
    assert read_json(tmp_path / "sentence_bert_config.json")["max_seq_length"] == 128


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


@torch.no_grad()
def features_of(folder: Path, pooling: str) -> tuple[dict[str, Any], Any, Any]:
    """Inputs, an exported encoder as transformers loads it, and what it gives, pooled."""
    batch, plain = inputs(folder), AutoModel.from_pretrained(folder).eval()
    mask, hidden = batch["attention_mask"][..., None], plain(**batch).last_hidden_state
    return batch, plain, hidden[:, 0] if pooling == "cls" else (hidden * mask).sum(1) / mask.sum(1)


def test_exported_encoder_is_loaded_with_its_pooling(tmp_path, bert):
    exported(bert, tmp_path / "one", pooling="cls")
    assert describe(Config(model_name_or_path=str(tmp_path / "one"), n_way=3)).pooling == "cls"
    listed = tmp_path / "one" / "modules.json"
    normalize = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
    listed.write_text(json.dumps([*read_json(listed), normalize]))
    exported(tmp_path / "one", tmp_path / "two", feature_norm=1.0)
    modules = read_json(tmp_path / "two" / "modules.json")
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]


@pytest.mark.parametrize("tied", [True, False])
def test_export_of_a_language_model(tmp_path, tied):
    source = save_llama(tmp_path / "llama", tied)
    _, worker = exported(source, tmp_path / "out", task_type="causal_lm")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    check_logits(worker, tmp_path / "out", plain)
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) is not tied
    assert plain.config.tie_word_embeddings is tied


def test_export_of_the_builtin_model(tmp_path):
    config, worker = exported("tiny", tmp_path)
    batch, _, features = features_of(tmp_path, "mean")
    with torch.no_grad():
        assert_same_logits(features, worker.model(**batch)[0], batch["attention_mask"])
    names = ("head_init", "inner_steps", "inner_lr", "n_way", "algorithm")
    wanted = {"pooling": "mean", **{name: getattr(config, name) for name in names}}
    assert wanted.items() <= read_json(tmp_path / "fmmeta.json").items()


def test_export_removes_weights_of_an_earlier_export(tmp_path, bert, monkeypatch):
    """Otherwise from_pretrained would load an old single file instead of the new files."""
    settings: dict[str, Any] = {"pooling": "mean"}
    (tmp_path / "notes.safetensors").write_text("mine")
    exported(bert, tmp_path, **settings, head_init="learned", lora_r=2)
    exported(bert, tmp_path, **settings, head_init="learned")
    assert weights(tmp_path) == {"head.safetensors", "model.safetensors", "notes.safetensors"}
    monkeypatch.setattr(export_module, "FILE_BYTES", (2**12, 2**16))
    _, worker = exported(bert, tmp_path, **settings, seed=1)
    several = weights(tmp_path)
    assert several > {"model.safetensors.index.json", "notes.safetensors"}
    assert len(several) >= 4
    assert not several & {"head.safetensors", "model.safetensors", "adapter_config.json"}
    found = AutoModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in worker.model.hf.named_parameters())
    monkeypatch.undo()
    exported(bert, tmp_path, **settings)
    assert weights(tmp_path) == {"model.safetensors", "notes.safetensors"}
    exported(bert, tmp_path, **settings, lora_r=2)
    assert weights(tmp_path) == {"adapter_config.json", "adapter_model.safetensors", "notes.safetensors"}


def test_adapters_exported_next_to_their_base_keep_it(tmp_path, bert):
    model = shutil.copytree(bert, tmp_path / "model")
    exported(model, model, pooling="mean", lora_r=2)
    assert weights(model) == {"adapter_config.json", "adapter_model.safetensors", "model.safetensors"}


@pytest.mark.parametrize("full", ["head.safetensors", "model.safetensors.index.json"])
def test_full_disk_is_reported_after_all_files_were_tried(tmp_path, bert, monkeypatch, full):
    """The error is raised after all files were tried, so that no other rank waits for this one."""

    def full_disk(tensors, path, metadata=None, write=export_module.save_file):
        if Path(path).name == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path, metadata)

    monkeypatch.setattr(export_module, "save_file", full_disk)
    monkeypatch.setattr(export_module, "FILE_BYTES", (2**12, 2**16))
    if full.endswith(".json"):
        (tmp_path / full).symlink_to("/dev/full")
        monkeypatch.setattr(export_module, "clear", lambda folder: None)
    message = refusal(exported, bert, tmp_path, pooling="mean", head_init="learned")
    remedy = "fix that, and run the same command again"
    check_message(message, "the disk: No space left", "exporting the weights", remedy)
    assert list(tmp_path.glob("model-00001-of-*.safetensors"))


def weights(folder: Path) -> set[str]:
    return {
        file.name
        for file in folder.iterdir()
        if "safetensors" in file.name or file.name == "adapter_config.json"
    }


@pytest.mark.parametrize(
    ("changes", "fingerprint", "parts"),
    [
        (
            {"seed": 2, "inner_steps": 9},
            "f",
            ("inner_steps: 5 -> 9; seed: 42 -> 2", "--accept_changed_settings"),
        ),
        ({}, "g", ("dataset_fingerprint: f -> g",)),
        (
            {"resume_from_checkpoint": "never"},
            "f",
            ("resume_from_checkpoint=never", "choose another output_dir"),
        ),
    ],
)
def test_run_is_resumed_or_refused(tmp_path, changes, fingerprint, parts):
    run = tmp_path / "run"
    config = Config(output_dir=str(run))
    settings = settings_of(config, "f")
    assert start_of(config, settings).checkpoint is None
    run.mkdir()
    write_run(run, settings, "1 group of 1 rank", finished=False)
    newest = saved(run, WHOLE, 4)
    start = start_of(config, settings)
    assert (start.checkpoint, start.finished) == (newest, False)
    other = config.but(**changes)
    message = refusal(start_of, other, settings_of(other, fingerprint))
    check_message(message, f"output_dir={run}", *parts)
    write_run(run, settings, "1 group of 1 rank", finished=True)
    assert start_of(config, settings).finished


def test_unusable_output_folders_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    check_message(refusal(lock_folder, folder), f"output_dir={folder}", "choose another")
    (tmp_path / "run.json").write_text("{")
    message = refusal(start_of, Config(output_dir=str(tmp_path)), "f")
    check_message(message, f"{tmp_path / 'run.json'}", "correct or remove it, or choose another")
    none = Config(output_dir=str(tmp_path / "new"), resume_from_checkpoint=str(tmp_path / "none"))
    message = refusal(start_of, none, settings_of(none, "f"))
    check_message(message, f"resume_from_checkpoint={tmp_path / 'none'} ", "checkpoint-N folder")


def test_metrics_after_the_checkpoint_are_dropped(tmp_path):
    lines = '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo'
    (tmp_path / "metrics.jsonl").write_text(lines)
    Metrics(tmp_path, 2, writes=True).write({"step": 3, "again": True})
    assert metrics_of(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_lines_that_a_full_disk_does_not_take_are_written_later(tmp_path, monkeypatch):
    """A limit of file sizes stands for the disk; the line that it cuts is whole afterwards."""
    metrics, said = Metrics(tmp_path, 0, writes=True), list[str]()
    monkeypatch.setattr(run_files.LOGGER, "warning", lambda text, *parts, **_: said.append(text % parts))
    metrics.write({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, hard))
    try:
        for step in (2, 3):
            metrics.write({"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert metrics_of(tmp_path) == [{"step": 1}]
    metrics.write({"step": 4})
    assert metrics_of(tmp_path) == [{"step": step} for step in (1, 2, 3, 4)]
    assert len(said) == 1
    assert "its next 1000 lines are kept until it can" in said[0]


def begin_writing(logger: RunLogger, folder: Path, outer_step: int) -> None:
    """What a group does that takes over the files of a run."""
    ranks = SimpleNamespace(first=True, world=Communicator(None, 0, 1, torch.device("cpu")))
    run: Any = SimpleNamespace(folder=folder, state=SimpleNamespace(outer_step=outer_step), ranks=ranks)
    logger.open(run)
    logger.write_pending_lines(run)


def test_a_new_writer_writes_the_lines_that_nobody_has_written(tmp_path):
    logger, seen = RunLogger(lambda line: seen.append(line["step"])), []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for step in (1, 2, 3, 4, 5):
        logger._log({"step": step})
    begin_writing(logger, tmp_path, 4)
    assert metrics_of(tmp_path) == [{"step": step} for step in (1, 2, 3, 4)]
    assert seen == [1, 2, 3, 4, 5, 2, 3, 4]


@pytest.mark.parametrize("written", [1, 2, 3])
def test_a_validation_that_the_last_writer_has_not_written_is_written(tmp_path, written):
    """Its step is that of the line before it."""
    lines = [{"step": 4, "seconds": 1.0}, {"step": 4, "valid_loss": 2.0}, {"step": 5, "seconds": 1.0}]
    logger = RunLogger(lambda line: None)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines[:written]))
    for line in lines:
        logger._log(line)
    begin_writing(logger, tmp_path, 5)
    begin_writing(logger, tmp_path, 5)
    assert metrics_of(tmp_path) == lines
