"""Secrets, links, oversized files, control characters, and the checks of doctor."""

import gzip
import importlib.metadata
import json
import os
import stat
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from fmmeta import doctor
from fmmeta.adaptation.model import Answer
from fmmeta.cli import main
from fmmeta.common.install import CHECKED, versions, warn_untested
from fmmeta.common.progress import Progress, terminal_log
from fmmeta.common.security import CONTROL, disk_trouble, redact
from fmmeta.config.settings import Config
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.tasks import loader
from fmmeta.tasks.data.files import data_files, read_file
from fmmeta.tasks.data.images import encoded_image
from fmmeta.tasks.sources.load import load_sources, task_files
from fmmeta.training.build import settings_of
from fmmeta.training.run_files import Metrics, write_run
from tests.support import audit
from tests.support.helpers import ROOT, read_rows
from tests.support.messages import check_message, refusal
from tests.support.models import write_classes

ROW = b'{"text": "a b c", "label": "x"}\n'


def row_in(path: Path) -> Path:
    """Write a file of one row, and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ROW)
    return path


def test_secrets_are_not_written(tmp_path, monkeypatch, capfd):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"hunter2-{name}")
    monkeypatch.setenv("SHORT_TOKEN", "a")  # would blank every a
    url = "https://me:hunter2-url@host/set"
    write_run(tmp_path, settings_of(Config(dataset=[f"{url}/hunter2-HF_TOKEN"]), "f"), "one rank")
    Metrics(tmp_path, 0, writes=True).write(
        {"step": 1, "bad_tasks": [{"error": "token hunter2-WANDB_API_KEY refused"}]}
    )
    with pytest.raises(SystemExit):
        main(["train", f"--{'hunter2-AWS_SECRET_ACCESS_KEY'}=1"])
    texts = [(tmp_path / name).read_text() for name in ("run.json", "metrics.jsonl")] + [
        capfd.readouterr().err
    ]
    assert all("hunter2" not in text and "***" in text for text in texts)
    assert redact("a banana") == "a banana"


def test_disk_errors_are_told_from_other_errors():
    assert disk_trouble(OSError(28, "No space left on device", "x")) == "x: No space left on device"
    assert disk_trouble(RuntimeError("I/O error: No space left on device (os error 28)")) is not None
    assert disk_trouble(FileNotFoundError(2, "No such file")) is None
    assert disk_trouble(RuntimeError("error 28")) is None


def test_links_out_of_a_folder_are_refused_and_a_hub_cache_is_not(tmp_path):
    outside, root = row_in(tmp_path / "outside.jsonl"), tmp_path / "data"
    (root / "again.jsonl").symlink_to(row_in(root / "own.jsonl"))
    assert len(data_files(str(root)) or []) == 2
    (root / "x.jsonl").symlink_to(outside)
    check_message(refusal(data_files, str(root)), f"{root / 'x.jsonl'}", f"{outside}")
    tasks = tmp_path / "tasks"
    (tasks / "s").mkdir(parents=True)
    (tasks / "s" / "t.jsonl").symlink_to(outside)
    assert "leaves its folder" in refusal(task_files, str(tasks), 64)
    cache, blob = tmp_path / "hub" / "snapshots" / "abc", row_in(tmp_path / "hub" / "blobs" / "0a")
    cache.mkdir(parents=True)
    (cache / "x.jsonl").symlink_to(blob)
    assert data_files(str(cache)) == [cache / "x.jsonl"]
    (cache / "x.png").symlink_to(blob)
    assert encoded_image("x.png", "image", "here", cache)[0] == "x.png"
    (cache / "y.png").symlink_to(outside)
    assert "outside of" in refusal(encoded_image, "y.png", "image", "here", cache)


def test_a_stratum_or_a_split_file_that_links_out_of_the_data_is_refused(tmp_path):
    outside, tasks = tmp_path / "outside", tmp_path / "tasks"
    for folder in (outside, tasks / "own"):
        row_in(folder / "t.jsonl")
    (tasks / "again").symlink_to(tasks / "own")
    assert [file.name for file in task_files(str(tasks), 64) or []] == ["again/t", "own/t"]
    (tasks / "stratum").symlink_to(outside)
    check_message(
        refusal(task_files, str(tasks), 64),
        f"{tasks / 'stratum'}",
        f"{outside}",
        "copy the file, or remove the link",
    )
    (tasks / "stratum").unlink()
    (outside / "splits.json").write_text('{"train": ["own/t", "again/t"]}')
    (tasks / "task_splits.json").symlink_to(outside / "splits.json")
    settings = {"dataset": [str(tasks)], "task_type": "causal_lm", "k_shot": 1, "num_query": 1}
    check_message(
        refusal(load_sources, Config(**settings), byte_tokenizer(), lambda text: None),
        f"{tasks / 'task_splits.json'}",
        f"{outside / 'splits.json'}",
    )
    named = Config(**settings, task_splits=str(tasks / "task_splits.json"))  # the user's own word
    assert len(load_sources(named, byte_tokenizer(), lambda text: None).train.items) == 2


def test_only_the_blobs_of_the_same_cache_may_be_linked_to(tmp_path):
    cache = tmp_path / "hub" / "snapshots" / "abc"
    cache.mkdir(parents=True)
    (cache / "x.jsonl").symlink_to(row_in(tmp_path / "private" / "blobs" / "x.jsonl"))
    assert "leaves its folder" in refusal(data_files, str(cache))
    (cache / "x.jsonl").unlink()
    (cache / "x.jsonl").symlink_to("x.jsonl")  # to itself
    assert "cannot be read" in refusal(read_rows, str(cache))


EVIL = "\x1b[2J\x9b31m\u202e a\rb\nfmmeta: forged"


def test_control_characters_in_names_are_escaped(monkeypatch, tmp_path, capsys):
    progress = Progress(enabled=True)
    with terminal_log():
        progress.notice(f"left out: {EVIL}")
        progress.notice("several", "lines")
    progress.table(EVIL, ["", EVIL], [[EVIL, "1"]])
    with pytest.raises(SystemExit):
        main(["evaluate", "--dataset", f"./{EVIL}"])
    print(Answer("a", EVIL, 0.5).line())
    shown = capsys.readouterr()
    lines = (shown.out + shown.err).splitlines()
    assert not any(CONTROL.search(line) for line in lines)
    check_message(lines[0], "fmmeta: left out")
    assert lines[1:3] == ["fmmeta: several", "lines"]
    assert not any(line.startswith("fmmeta: forged") for line in lines)
    assert json.loads(Answer("a", EVIL, 0.5).line()) == {"text": "a", "label": EVIL, "score": 0.5}


def test_names_in_data_and_splits_are_never_paths(tmp_path, monkeypatch):
    """A task, a class or a stratum may be called what it likes; a split names them or is refused."""
    rows = write_classes(tmp_path / "rows.jsonl")
    evil = rows.read_text().replace('"c1"', '"../../../etc/passwd"').replace('"s1"', '"/tmp/x"')
    rows.write_text(evil)
    before = {path for path in tmp_path.rglob("*")}
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": ["../../../etc/passwd", "c0", "c2"]}))
    settings = {"dataset": [str(rows)], "class_splits": str(splits), "n_way": 2, "k_shot": 1, "num_query": 1}
    made = load_sources(Config(**settings), byte_tokenizer(), lambda text: None)
    assert len(made.train.items) == 3
    assert {path for path in tmp_path.rglob("*")} - before == {splits}
    splits.write_text(json.dumps({"train": ["c0", "/etc/passwd"]}))
    check_message(
        refusal(load_sources, Config(**settings), byte_tokenizer(), lambda text: None),
        "'/etc/passwd'",
        "names the class '/etc/passwd'",
    )


def test_an_oversized_archive_is_not_unpacked(tmp_path):
    oversized = tmp_path / "oversized.jsonl.gz"
    with gzip.open(oversized, "wb") as file:
        for _ in range(64):
            file.write(b" " * 2**20)
        file.write(b"\n" + ROW)
    assert oversized.stat().st_size < 2**17
    assert len(read_file(oversized)) == 1
    check_message(
        refusal(read_file, oversized, most_gib=1 / 64),
        "max_file_gib=0.015625",
        f"{oversized}",
        "raise it if you trust the file",
    )


def test_episode_files_are_private_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "SHM", str(tmp_path))
    left = tmp_path / "fmmeta-loader-1-x"
    left.mkdir()
    load = SimpleNamespace(timeout_s=0)
    one = loader.EpisodeLoader(load, lambda task: [], "1")  # type: ignore[arg-type]
    one._start(None)  # type: ignore[arg-type]
    assert one.folder is not None
    assert stat.S_IMODE(os.stat(one.folder.path).st_mode) == 0o700
    assert list(tmp_path.iterdir()) == [one.folder.path]
    one.close()
    assert not list(tmp_path.iterdir())


def test_doctor_prints_a_line_and_a_fix_for_each_check(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert next(doctor.build_locks()).level == "ok"  # a compiler may be at work
    os.utime(lock, (time.time() - 4000,) * 2)
    check_message(str(next(doctor.build_locks())), "1 stale", f"{lock}", f"rm {lock}")
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 2
    names = {line.split()[1].rstrip(":") for line in lines[:-1]}
    assert {
        "torch",
        "deepspeed",
        "accelerator",
        "gloo",
        "build",
        "disk",
        "shared",
        "open",
        "host",
        "launcher",
        "loopback",
    } <= names
    assert all(line.split()[0] in ("ok", "warning", "problem") for line in lines[:-1])
    assert all(";" in line for line in lines[:-1] if line.startswith(("warning", "problem")))
    lock.unlink()
    monkeypatch.setattr(doctor, "CHECKS", (doctor.loopback, doctor.build_locks))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 problems, 0 warnings"


def test_doctor_reports_a_check_that_fails(monkeypatch):
    def broken():
        raise RuntimeError("CUDA driver\nversion is insufficient")

    (found,) = doctor.findings_of(broken)
    check_message(str(found), "problem  broken: RuntimeError", "fix that first")


def test_doctor_warns_about_untested_versions(monkeypatch):
    monkeypatch.setattr(
        "importlib.metadata.version", lambda package: {"torch": "2.14.1+cu128"}.get(package, "5.0")
    )
    check_message(str(next(doctor.versions())), "warning  torch", "pip install 'torch<2.14,>=2.6'")


def test_audit_names_packages_that_differ_from_the_lock():
    here = importlib.metadata.version("numpy")
    assert audit.deviations(f"# list\nnumpy=={here}\nno-such-package==1.0\n") == []
    assert audit.deviations("numpy==0.0.1\n") == [f"numpy {here} is here, 0.0.1 is listed"]
    assert len(audit.LOCKED.read_text().splitlines()) > 30


def test_tested_ranges_are_those_of_the_metadata():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    named = {one.name: one for one in map(Requirement, wanted)}
    assert [wanted for wanted, _, _ in versions()] == [named[package] for package in CHECKED]


def test_a_checkout_that_is_not_installed_warns_of_no_version(monkeypatch, capfd):
    def missing(package: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.requires", missing)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0.1")
    warn_untested.cache_clear()
    warn_untested(0)
    assert capfd.readouterr().err == ""
    assert [*versions()] == []


def test_untested_versions_are_named_once_on_rank_0(monkeypatch, capfd):
    here = {"torch": "2.14.1+cu130", "transformers": "4.57.0", "accelerate": "1.10.0", "datasets": "6.0.0rc1"}
    monkeypatch.setattr("importlib.metadata.version", lambda package: here.get(package, "0.19.8"))
    warn_untested.cache_clear()
    warn_untested(1)
    assert capfd.readouterr().err == ""
    warn_untested(0)
    text = capfd.readouterr().err
    known = "torch 2.14.1+cu130, transformers 4.57.0, datasets 6.0.0rc1"
    check_message(text, known, "pip install", "'torch<2.14,>=2.6' 'transformers<6,>=5.0'")
    assert "accelerate" not in text
    warn_untested(0)
    assert capfd.readouterr().err == ""
