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
from unittest.mock import Mock

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


FULL = "I/O error: No space left on device (os error 28)"


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (OSError(28, "No space left on device", "x"), "x: No space left on device"),
        (RuntimeError(FULL), FULL),
        (FileNotFoundError(2, "No such file"), None),
        (RuntimeError("error 28"), None),
    ],
)
def test_disk_errors_are_told_from_other_errors(error, trouble):
    assert disk_trouble(error) == trouble


@pytest.fixture
def link(tmp_path):
    """link(path, target): a link in the folder of the test, and its folders; a target that is not there is a
    file of one row.
    """

    def make(path: str, target: str) -> Path:
        for one in (tmp_path / path, tmp_path / target):
            one.parent.mkdir(parents=True, exist_ok=True)
        if not (tmp_path / target).exists():
            (tmp_path / target).write_bytes(ROW)
        (tmp_path / path).symlink_to(tmp_path / target)
        return tmp_path / path

    return make


@pytest.mark.parametrize(
    ("path", "target", "taken"),
    [
        ("data/again.jsonl", "data/own.jsonl", True),
        ("data/x.jsonl", "outside.jsonl", False),
        ("hub/snapshots/abc/x.jsonl", "hub/blobs/0a", True),  # of a hub's cache
        ("hub/snapshots/abc/x.jsonl", "private/blobs/x.jsonl", False),
    ],
)
def test_links_out_of_a_folder_are_refused_and_a_hub_cache_is_not(tmp_path, link, path, target, taken):
    made = link(path, target)
    image = link(path.replace(".jsonl", ".png"), target)
    if taken:
        assert made in (data_files(str(made.parent)) or [])
        assert encoded_image(image.name, "image", "here", made.parent)[0] == image.name
        return
    parts = (f"{made}", f"{tmp_path / target}", "leaves its folder")
    check_message(refusal(data_files, str(made.parent)), *parts)
    assert "outside of" in refusal(encoded_image, image.name, "image", "here", made.parent)


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "x.jsonl").symlink_to("x.jsonl")
    assert "cannot be read" in refusal(read_rows, str(tmp_path))


def test_a_stratum_a_task_or_a_split_file_that_links_out_of_the_data_is_refused(tmp_path, link):
    tasks, remedy = tmp_path / "tasks", "copy the file, or remove the link"
    link("tasks/own/u.jsonl", "tasks/own/t.jsonl").unlink()
    link("tasks/again", "tasks/own")
    assert [file.name for file in task_files(str(tasks), 64) or []] == ["again/t", "own/t"]
    link("unused", "outside/t.jsonl")
    for path, target in (("tasks/stratum", "outside"), ("tasks/own/t2.jsonl", "outside/t.jsonl")):
        made = link(path, target)
        check_message(refusal(task_files, str(tasks), 64), made.name, f"{tmp_path / target}", remedy)
        made.unlink()
    splits = link("tasks/task_splits.json", "outside/splits.json")
    splits.write_text('{"train": ["own/t", "again/t"]}')
    settings = {"dataset": [str(tasks)], "task_type": "causal_lm", "k_shot": 1, "num_query": 1}
    check_message(refusal(load, settings), f"{splits}", f"{tmp_path / 'outside' / 'splits.json'}")
    named = load({**settings, "task_splits": str(splits)})  # the user's own word
    assert len(named.train.items) == 2


def load(settings):
    return load_sources(Config(**settings), byte_tokenizer(), lambda text: None)


def test_secrets_are_not_written(tmp_path, monkeypatch, capfd):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"hunter2-{name}")
    monkeypatch.setenv("SHORT_TOKEN", "a")  # would blank every a
    data = "https://me:hunter2-url@host/set/hunter2-HF_TOKEN"
    write_run(tmp_path, settings_of(Config(dataset=[data]), "f"), "one rank")
    error = {"error": "token hunter2-WANDB_API_KEY refused"}
    Metrics(tmp_path, 0, writes=True).write({"step": 1, "bad_tasks": [error]})
    with pytest.raises(SystemExit):
        main(["train", f"--{'hunter2-AWS_SECRET_ACCESS_KEY'}=1"])
    texts = [(tmp_path / name).read_text() for name in ("run.json", "metrics.jsonl")]
    assert all("hunter2" not in text and "***" in text for text in (*texts, capfd.readouterr().err))
    assert redact("a banana") == "a banana"


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


def test_names_in_data_and_splits_are_never_paths(tmp_path):
    """A task, a class or a stratum may be called what it likes; a split names them or is refused."""
    rows, splits = write_classes(tmp_path / "rows.jsonl"), tmp_path / "splits.json"
    rows.write_text(rows.read_text().replace('"c1"', '"../../../etc/passwd"').replace('"s1"', '"/tmp/x"'))
    splits.write_text(json.dumps({"train": ["../../../etc/passwd", "c0", "c2"]}))
    before = {*tmp_path.rglob("*")}
    settings = {"dataset": [str(rows)], "class_splits": str(splits), "n_way": 2, "k_shot": 1, "num_query": 1}
    assert len(load(settings).train.items) == 3
    assert {*tmp_path.rglob("*")} == before
    splits.write_text(json.dumps({"train": ["c0", "/etc/passwd"]}))
    check_message(refusal(load, settings), "'/etc/passwd'", "names the class '/etc/passwd'")


def test_an_oversized_archive_is_not_unpacked(tmp_path):
    oversized = tmp_path / "oversized.jsonl.gz"
    oversized.write_bytes(gzip.compress(b" " * 2**26 + b"\n" + ROW))
    assert oversized.stat().st_size < 2**17
    assert len(read_file(oversized)) == 1
    message = refusal(read_file, oversized, most_gib=1 / 64)
    check_message(message, "max_file_gib=0.015625", f"{oversized}", "raise it if you trust the file")


def test_episode_files_are_private_and_removed(tmp_path, monkeypatch):
    """Those that a killed trainer has left are removed when a loader starts."""
    monkeypatch.setattr(loader, "SHM", str(tmp_path))
    (tmp_path / "fmmeta-loader-1-x").mkdir()
    one = loader.EpisodeLoader(SimpleNamespace(timeout_s=0), lambda task: [], "1")
    one._start(None)
    assert list(tmp_path.iterdir()) == [one.folder.path]
    assert stat.S_IMODE(one.folder.path.stat().st_mode) == 0o700
    one.close()
    assert not list(tmp_path.iterdir())


def doctor_lines(capsys, code: int) -> list[str]:
    """What doctor prints before it exits with a code."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == code
    return capsys.readouterr().out.splitlines()


CHECKS_OF_DOCTOR = [
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
]


def test_doctor_prints_a_line_and_a_fix_for_each_check(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert next(doctor.build_locks()).level == "ok"  # a compiler may be at work
    os.utime(lock, (time.time() - 4000,) * 2)
    check_message(str(next(doctor.build_locks())), "1 stale", f"{lock}", f"rm {lock}")
    *lines, _ = doctor_lines(capsys, 2)
    assert {*CHECKS_OF_DOCTOR} <= {line.split()[1].rstrip(":") for line in lines}
    assert {line.split()[0] for line in lines} <= {"ok", "warning", "problem"}
    assert all(";" in line for line in lines if not line.startswith("ok"))
    lock.unlink()
    monkeypatch.setattr(doctor, "CHECKS", (doctor.loopback, doctor.build_locks))
    assert doctor_lines(capsys, 0)[-1] == "0 problems, 0 warnings"


def broken():
    raise RuntimeError("CUDA driver\nversion is insufficient")


def test_doctor_reports_checks_that_fail_and_untested_versions(monkeypatch):
    (found,) = doctor.findings_of(broken)
    check_message(str(found), "problem  broken: RuntimeError", "fix that first")
    here = {"torch": "2.14.1+cu128"}
    monkeypatch.setattr("importlib.metadata.version", lambda package: here.get(package, "5.0"))
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


def warnings_of(rank: int, capfd) -> str:
    warn_untested(rank)
    return capfd.readouterr().err


def test_a_checkout_that_is_not_installed_warns_of_no_version(monkeypatch, capfd):
    missing = Mock(side_effect=importlib.metadata.PackageNotFoundError("fmmeta"))
    monkeypatch.setattr("importlib.metadata.requires", missing)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0.1")
    warn_untested.cache_clear()
    assert warnings_of(0, capfd) == ""
    assert [*versions()] == []


def test_untested_versions_are_named_once_on_rank_0(monkeypatch, capfd):
    here = {"torch": "2.14.1+cu130", "transformers": "4.57.0", "accelerate": "1.10.0", "datasets": "6.0.0rc1"}
    monkeypatch.setattr("importlib.metadata.version", lambda package: here.get(package, "0.19.8"))
    warn_untested.cache_clear()
    assert warnings_of(1, capfd) == ""
    text = warnings_of(0, capfd)
    known = "torch 2.14.1+cu130, transformers 4.57.0, datasets 6.0.0rc1"
    check_message(text, known, "pip install", "'torch<2.14,>=2.6' 'transformers<6,>=5.0'")
    assert "accelerate" not in text
    assert warnings_of(0, capfd) == ""
