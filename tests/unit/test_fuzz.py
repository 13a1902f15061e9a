"""Every input gives a run or one line of text: no traceback, no hang, no file elsewhere.

Each test tries 100 inputs, and 500 in a process with FMMETA_HYPOTHESIS=thorough.
"""

import gzip
import json
import os
import pkgutil
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fmmeta import checkpoint
from fmmeta.adaptation.model import LoadedModel
from fmmeta.adaptation.predict import inputs_of
from fmmeta.adaptation.task_learner import leave_out, read_task
from fmmeta.cli import COMMANDS, parse
from fmmeta.common.errors import UsageError
from fmmeta.common.processes import time_limit
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import AdaptConfig, PredictConfig
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.parallel import deepspeed_config
from fmmeta.tasks.sources.load import load_sources
from fmmeta.training.build import settings_of
from fmmeta.training.run_files import open_run, write_run
from tests.support.checkpoints import WHOLE, parameters, saved, write_manifest
from tests.support.helpers import one_rank
from tests.support.launch import ROOT
from tests.support.models import write_classes

HANG_S = 20
DEEP = "deep"  # a short name for a text that is too long to show
EXAMPLES = 500 if os.environ.get("FMMETA_HYPOTHESIS") == "thorough" else 100
IN_FOLDER = settings(
    max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
WORDS = "-1 0 1 1e309 nan inf auto true ../.. /etc/passwd latest { tiny letters -- 0x10 1_000"
TEXTS = st.sampled_from(["", "\0", *WORDS.split()]) | st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=8,
)


def written(file: Path, content: str) -> Path:
    """A file with a text, which may hold what is no UTF-8."""
    text = "[" * 50000 if content == DEEP else content
    file.write_text(text, encoding="utf-8", errors="replace")
    return file


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    """A separate working folder, with the cache of data sets; a file that appears next to it is an error."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(work / "cache"))
    yield work
    assert {*tmp_path.iterdir()} == {work}


def load(file: Path, task_type: str = "classification", **settings) -> None:
    """Open a data set as a run does."""
    n_way = {} if task_type == "causal_lm" else {"n_way": 2}
    shape = {"k_shot": 1, "num_query": 1, "task_type": task_type, **n_way}
    load_sources(Config(dataset=[str(file)], **shape, **settings), byte_tokenizer(), lambda text: None)


@contextmanager
def one_line_at_most(folder: Path, *files: str) -> Iterator[None]:
    """Accept a UsageError of one line, a help text (a text may be -h), and no other exception.

    files: what the folder holds afterwards, but for the cache of data sets.
    """
    message, code = "nothing", 0
    with time_limit(HANG_S):
        try:
            yield
        except UsageError as error:
            message = str(error)
        except SystemExit as end:
            code = end.code
    assert code == 0
    assert message.strip()
    assert "\n" not in message
    assert "Traceback" not in message
    assert {file.name for file in folder.iterdir()} - {"cache"} == {*files}


OTHERS = ["evaluate", "tune", "adapt", "predict", "report", "doctor"]


@IN_FOLDER
@pytest.mark.parametrize("commands", [["train"], OTHERS], ids=["train", "others"])
@given(data=st.data())
def test_flags(commands, data, work_folder):
    command = data.draw(st.sampled_from(commands))
    names = [item.name for item in fields(pkgutil.resolve_name(COMMANDS[command].settings))]
    pair = st.tuples(st.sampled_from([*names, "config", "x" * 9]), TEXTS, st.booleans())
    argv = []
    for name, value, joined in data.draw(st.lists(pair, max_size=4)):
        argv += [f"--{name}={value}"] if joined else [f"--{name}", value]
    with one_line_at_most(work_folder):
        parse(argv, command)


@IN_FOLDER
@given(
    rows=st.data(),
    raw=st.binary(max_size=60),
    name=st.sampled_from(["s.jsonl", "s.csv", "s.jsonl.gz", "none.jsonl"]),
    task_type=st.sampled_from(["classification", "causal_lm"]),
)
def test_support_files(rows, raw, name, task_type, work_folder):
    content = "".join(json.dumps(row) + "\n" for row in rows.draw(ROWS)).encode() + raw
    file, there = work_folder / name, [name] if name != "none.jsonl" else []
    if there:
        file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with one_line_at_most(work_folder, *there):
        settings = AdaptConfig(support=str(file), task_type=task_type, model_name_or_path="tiny")
        table = read_task("support", str(file), settings.run_config(n_way=2), lambda text: None)
        assert len(table.input) == len(table.target)
        leave_out(table, sorted(set(table.target)))
    file.unlink(missing_ok=True)


@IN_FOLDER
@given(
    content=st.one_of(
        st.binary(max_size=60),
        JSON.map(lambda value: json.dumps({"text": value, "x": value}).encode()),
        st.just(b'{"text": ' + b"[" * 50000),
    ),
    column=st.sampled_from([None, "x", ""]),
)
def test_lines_to_predict(content, column, work_folder):
    file = work_folder / "lines"
    file.write_bytes(content)
    description: Any = SimpleNamespace(images=False)
    model: Any = LoadedModel(Config(), description, *cast(Any, [None] * 6))  # what reads inputs
    with one_line_at_most(work_folder, "lines"):
        settings = PredictConfig(model_name_or_path="x", input=str(file), text_column=column)
        assert all(isinstance(one.text, str) for one in inputs_of(settings, model))


STORED = [
    "task_type",
    "n_way",
    "inner_lr",
    "labels",
    "head_init",
    "inner_optimizer",
    "max_length",
    "feature_norm",
]


@IN_FOLDER
@given(
    content=st.one_of(
        JSON.map(json.dumps),
        st.text(max_size=20),
        st.just(DEEP),
        st.dictionaries(st.sampled_from(STORED), JSON, max_size=4).map(json.dumps),
    )
)
def test_stored_settings_of_a_model(content, work_folder):
    written(work_folder / "fmmeta.json", content)
    with one_line_at_most(work_folder, "fmmeta.json"):
        AdaptConfig(model_name_or_path=str(work_folder)).run_config(n_way=2)


KNOWN = [
    "enabled",
    "zero_optimization",
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "train_batch_size",
    "fp16",
    "bf16",
    "stage",
    "offload_optimizer",
    "offload_param",
    "device",
    "sub_group_size",
    "train_micro_batch_size_per_gpu",
]
BLOCKS = st.dictionaries(
    st.sampled_from(KNOWN),
    st.one_of(JSON, st.dictionaries(st.sampled_from(KNOWN), JSON, max_size=4)),
    max_size=5,
)


@IN_FOLDER
@given(
    content=st.one_of(BLOCKS.map(json.dumps), JSON.map(json.dumps), st.text(max_size=30), st.just(DEEP)),
    bf16=st.booleans(),
)
def test_deepspeed_files(content, bf16, work_folder):
    file = written(work_folder / "ds.json", content)
    with one_line_at_most(work_folder, "ds.json"):
        deepspeed_config.read(str(file), bf16).complete(64)


CELLS = st.one_of(
    st.text(max_size=10), st.sampled_from(["x", "../../x", "/etc/passwd", "\0", "\ud800", "a\nb", ""]), JSON
)
ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(["text", "label", "task", "stratum", "input", "output", "z"]), CELLS, max_size=4
    ),
    max_size=12,
)


@IN_FOLDER
@given(
    rows=ROWS,
    raw=st.binary(max_size=60),
    kind=st.sampled_from(["rows", "raw", "both"]),
    seed=st.integers(0, 99),
    name=st.sampled_from(["d.jsonl", "d.csv", "d.parquet", "d.jsonl.gz", "d.csv.gz"]),
    policy=st.sampled_from([{}, {"on_bad_task": "skip", "max_bad_fraction": 1.0}]),
    task_type=st.sampled_from(["classification", "causal_lm"]),
)
def test_data_files(rows, raw, kind, seed, name, policy, task_type, work_folder):
    content = b"" if kind == "raw" else "".join(json.dumps(row) + "\n" for row in rows).encode()
    content += b"" if kind == "rows" else raw
    if name.endswith(".gz") and seed % 3:
        content = gzip.compress(content)
        content = content[: len(content) - seed % 7]
    file = work_folder / name
    file.write_bytes(content)
    with one_line_at_most(work_folder, name):
        load(file, task_type, **policy)
    file.unlink()


CLASSES = st.lists(st.sampled_from(["c0", "c1", "c2", "c3", "c4", "../../x", "/etc/passwd", ""]), max_size=6)
PARTS = st.sampled_from(["train", "valid", "test", "01", ".."])


@IN_FOLDER
@given(
    content=st.one_of(
        JSON.map(json.dumps),
        st.text(max_size=20),
        st.just(DEEP),
        st.dictionaries(PARTS, JSON | CLASSES, max_size=4).map(json.dumps),
    ),
    split=st.sampled_from([None, "01", "..", ""]),
)
def test_split_files(content, split, work_folder):
    rows, file = work_folder / "rows.jsonl", written(work_folder / "splits.json", content)
    if not rows.exists():
        write_classes(rows)
    with one_line_at_most(work_folder, "splits.json", "rows.jsonl"):
        load(rows, class_splits=str(file), class_split=split)


REPLACEMENTS = st.one_of(
    JSON.map(json.dumps),
    st.text(max_size=20),
    st.just(DEEP),
    st.just('{"files": {"/etc/passwd": {}}}'),
    st.just('{"files": {"state.json": {"bytes": 2, "sha256": "x"}}}'),
)


@IN_FOLDER
@given(
    file=st.sampled_from(["manifest.json", "state.json", "shard-00000.safetensors", "../run.json"]),
    seed=st.integers(0, 9**6),
    how=st.sampled_from(["flip", "cut", "replace", "remove", "append"]),
    replacement=REPLACEMENTS,
    listed=st.booleans(),
)
def test_checkpoints(file, seed, how, replacement, listed, work_folder):
    """Random damage with or without a matching manifest; an accepted checkpoint holds the saved values."""
    run, draw = work_folder / "run", random.Random(seed)
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    config = Config(output_dir=str(run))
    write_run(run, settings_of(config, "f"), "", finished=False)
    folder = saved(run, WHOLE, 4)
    target = folder / file
    content = bytearray(target.read_bytes())
    at = draw.randrange(len(content))
    if how == "flip":
        content[at] ^= 1 << draw.randrange(8)
    target.write_bytes({"cut": content[:at], "append": content + b"x"}.get(how, content))
    if how == "remove":
        target.unlink()
    if how == "replace":
        written(target, replacement)
    if listed and target.parent == folder:
        write_manifest(folder)
    with one_line_at_most(work_folder, "run"):
        start = open_run(config, settings_of(config, "f"), one_rank().world)
        start.lock.close()
        if start.checkpoint is not None:
            checkpoint.read_state(start.checkpoint)
            found = checkpoint.load(start.checkpoint, ["theta"], WHOLE, torch.zeros(WHOLE.numel))["theta"]
            if not listed:
                assert float(found.sum()) == float(sum(value.sum() for value in parameters(100).values()))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_five_hundred_inputs_of_each_kind():
    env = {**os.environ, "FMMETA_HYPOTHESIS": "thorough"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-5000:]
    assert re.search(r"^9 passed, 1 deselected", ran.stdout, re.MULTILINE), ran.stdout[-500:]
