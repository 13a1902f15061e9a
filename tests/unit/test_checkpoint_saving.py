"""A checkpoint is whole or refused by name; what the disk does to a save costs the save and nothing else."""

import errno
import itertools
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fmmeta import checkpoint
from fmmeta.checkpoint import read, write
from fmmeta.checkpoint.write import Saver
from fmmeta.common.progress import LOGGER
from fmmeta.config.settings import Config
from fmmeta.training.build import settings_of
from fmmeta.training.run_files import accept_changes, lock_folder, open_run, write_run
from tests.support.checkpoints import (
    CUT,
    WHOLE,
    assert_holds,
    laid_out,
    parameters,
    save,
    saved,
    state_of,
)
from tests.support.fake_runs import start_of
from tests.support.helpers import one_rank
from tests.support.launch import ROOT, environment
from tests.support.messages import check_message, refusal

TABLE = {"rates": torch.tensor([[0.5, 0.25]])}


def two_vectors() -> dict[str, torch.Tensor]:
    return {"theta": laid_out(WHOLE, parameters(100)), "exp_avg": laid_out(WHOLE, parameters(500))}


def with_table(folder: Path, step: int = 3) -> Path:
    vectors, path = two_vectors(), folder / f"checkpoint-{step}"
    save(path, vectors, WHOLE, state_of(step, vectors), 9, TABLE)
    return path


def unfinished(run: Path, *steps: int, **settings) -> tuple[Config, dict]:
    """A run with checkpoints that has not ended: its configuration and its settings."""
    config = Config(output_dir=str(run), **settings)
    run.mkdir()
    write_run(run, settings_of(config, "f"), "", finished=False)
    for step in steps:
        saved(run, WHOLE, step, keep=9)
    return config, settings_of(config, "f")


def saver_of(notice=pytest.fail) -> Saver:
    return Saver(WHOLE, Config(), one_rank(), notice)


def test_shards_are_safetensors(tmp_path):
    file = tmp_path / "x.safetensors"
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "empty": torch.zeros(0),
        "b": torch.arange(10.0)[::2],
        "c": torch.tensor([[1 / 3]], dtype=torch.float64),
    }
    entry = write.write_tensors(file, tensors, {"shapes": "{}"})
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(file).items())
    assert safe_open(file, "pt").metadata() == {"shapes": "{}"}
    assert entry["bytes"] == file.stat().st_size


def test_any_flipped_byte_is_found(tmp_path):
    """In every file, at its ends and at random places; the manifest's own bytes too."""
    folder, world, draw = with_table(tmp_path), one_rank().world, random.Random(0)
    for file in sorted(folder.iterdir()):
        good = file.read_bytes()
        for at in {0, len(good) - 1, *(draw.randrange(len(good)) for _ in range(12))}:
            bad = bytearray(good)
            bad[at] ^= 0x21
            file.write_bytes(bad)
            message = checkpoint.find_corruption(folder, world)
            if file.name != "manifest.json":
                assert message == f"{file.name} has another sha256 than manifest.json", at
            elif not message:  # a byte between words changes nothing
                assert json.loads(bad) == json.loads(good), at
        file.write_bytes(good)
        assert checkpoint.find_corruption(folder, world) == ""


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda f: (f / "shard-00000.safetensors").unlink(), "shard-00000.safetensors cannot be"),
        (
            lambda f: os.truncate(f / "shard-00000.safetensors", 100),
            "shard-00000.safetensors has 100 bytes",
        ),
        (lambda f: os.truncate(f / "state.json", 7), "state.json has 7 bytes instead"),
        (lambda f: os.truncate(f / "manifest.json", 40), "manifest.json is damaged"),
        (
            lambda f: (f / "manifest.json").write_text('{"files": {"../x": {"bytes": 1, "sha256": ""}}}'),
            "manifest.json is damaged",
        ),
        (lambda f: (f / "manifest.json").write_text("[" * 100000), "manifest.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_an_older_one_is_resumed(tmp_path, damage, part):
    run = tmp_path / "run"
    config, settings = unfinished(run, 4, 8)
    older, newer, aside = (run / name for name in ("checkpoint-4", "checkpoint-8", "aside-checkpoint-8"))
    damage(newer)
    start = open_run(config, settings, one_rank().world)
    start.lock.close()
    assert start.checkpoint == older
    assert start.warnings[0].startswith(f"{newer} is refused: ")
    assert part in start.warnings[0]
    check_message(start.warnings[1], f"{newer}", f"renamed to {aside.name}")
    assert aside.is_dir()  # neither lost nor chosen again
    damage(older)
    message = refusal(open_run, config, settings, one_rank().world)
    check_message(message, f"output_dir={run} ", f"{older} is refused", part)
    explicit = config.but(output_dir=str(tmp_path / "new"), resume_from_checkpoint=str(aside))
    if "state" not in part:  # whose damage is found later
        message = refusal(open_run, explicit, settings_of(explicit, "f"), one_rank().world)
        assert f"{aside.name} is not complete: " in message or "other settings" in message


def test_a_named_checkpoint_is_where_a_run_begins_once(tmp_path, monkeypatch):
    """A job that names a checkpoint and is requeued must not lose what it has saved since."""
    monkeypatch.chdir(tmp_path)
    run, settings = tmp_path / "run", settings_of(Config(), "f")

    def checkpoint_of(folder, step):
        vectors = {"theta": laid_out(WHOLE, parameters(100))}
        path = folder / f"checkpoint-{step}"
        save(path, vectors, WHOLE, {**state_of(step, vectors), "settings": settings}, 9)
        return path

    def begin(named, **given):
        config = Config(**{"output_dir": str(run), "resume_from_checkpoint": str(named), **given})
        start = open_run(config, settings, one_rank().world)
        write_run(start.folder, settings, "", begun_from=start.begun_from or None)
        start.lock.close()
        return start

    other = checkpoint_of(tmp_path / "other", 6)
    run.mkdir()
    write_run(run, settings, "", finished=False)
    older = checkpoint_of(run, 4)
    assert begin(other).checkpoint == other
    assert begin(other).checkpoint == other  # nothing was saved meanwhile
    saved_since = [checkpoint_of(run, step) for step in (8, 9)]
    start = begin(other.relative_to(tmp_path))
    assert (start.checkpoint, start.explicit) == (saved_since[1], False)
    check_message(start.warnings[0], "resume_from_checkpoint=other/checkpoint-6", "choose another output_dir")
    assert begin("latest").checkpoint == saved_since[1]
    shutil.rmtree(other)  # as by --save_total_limit of the other run
    assert begin(other).checkpoint == saved_since[1]

    assert begin(saved_since[0]).checkpoint == saved_since[0]  # goes back inside the run
    assert (run / "aside-checkpoint-9").is_dir()
    saved_since[1] = checkpoint_of(run, 9)
    assert begin(saved_since[0]).checkpoint == saved_since[1]

    os.truncate(saved_since[1] / "state.json", 7)
    assert begin(saved_since[0]).checkpoint == saved_since[0]  # the newest complete one since then
    for path in (saved_since[0], *run.glob("checkpoint-9")):
        os.truncate(path / "state.json", 7)
    config = Config(output_dir=str(run), resume_from_checkpoint=str(saved_since[0]))
    assert "no complete checkpoint" in refusal(open_run, config, settings, one_rank().world)
    assert older.is_dir()

    write_run(run, settings, "", begun_from=start.begun_from, finished=True)
    assert start_of(config.but(resume_from_checkpoint=start.begun_from["checkpoint"]), settings).finished

    named = checkpoint_of(tmp_path / "third", 2)  # without --output_dir too
    first = begin(named, output_dir=None)
    newest = checkpoint_of(first.folder, 5)
    assert begin(named, output_dir=None).checkpoint == newest


def test_a_checkpoint_removed_by_another_group_is_replaced_by_a_newer_one(tmp_path, monkeypatch):
    """An elastic group chooses while the writer saves: its checkpoint was removed when it is verified, and a
    newer one exists.
    """
    run = tmp_path / "run"
    config, settings = unfinished(run, 4, elastic=True)
    original, steps = read.find_file_corruption, [5, 6]

    def while_others_save(file, entry):
        if steps:
            saved(run, WHOLE, steps.pop(0), keep=1)
        return original(file, entry)

    monkeypatch.setattr(read, "find_file_corruption", while_others_save)
    start = open_run(config, settings, one_rank().world)
    assert (start.checkpoint, start.warnings) == (run / "checkpoint-6", [])
    assert sorted(path.name for path in run.glob("*checkpoint*")) == ["checkpoint-6"]


def test_missing_extra_tables_are_refused(tmp_path):
    folder = with_table(tmp_path)
    assert set(checkpoint.load_tables(folder)) == {"rates"}
    for remove in ((folder / "tables.safetensors").unlink, partial(shutil.rmtree, folder)):
        remove()
        message = refusal(checkpoint.load_tables, folder)
        check_message(message, f"{folder}: tables.safetensors cannot be read (No such file")


def test_a_kill_at_any_point_of_a_save_leaves_a_complete_checkpoint(tmp_path, monkeypatch):
    """The state of the folder before each rename, fsync, open and removal of a save can be resumed from."""
    saved(tmp_path / "run", WHOLE, 3)
    for name, step in (("new", 4), ("replacing", 3)):
        moments = tmp_path / name
        begun = shutil.copytree(tmp_path / "run", tmp_path / f"begun-{name}")
        numbers = itertools.count()
        for module, verb in ((os, "rename"), (os, "fsync"), (Path, "mkdir"), (shutil, "rmtree")):
            real = getattr(module, verb)

            def stop(*args, real=real, begun=begun, moments=moments, at=numbers, **kwargs):
                shutil.copytree(begun, moments / str(next(at)))
                return real(*args, **kwargs)

            monkeypatch.setattr(module, verb, stop)
        saved(begun, WHOLE, step, keep=1)
        monkeypatch.undo()
        assert next(numbers) > 8
        for moment in sorted(moments.iterdir()):
            checkpoint.undo_partial_save(moment)
            whole = checkpoint.list_complete(moment)
            assert whole, moment
            for folder in whole:
                assert checkpoint.find_corruption(folder, one_rank().world) == "", moment
                assert_holds(folder, CUT)
            assert not list(moment.glob("tmp-*")) + list(moment.glob("replaced-*"))
        assert [folder.name for folder in checkpoint.list_complete(begun)] == [f"checkpoint-{step}"]


def test_a_full_disk_fails_the_save_and_training_continues(tmp_path):
    """A real one: a file system of 64 KiB in a separate namespace."""
    code = f"""
from pathlib import Path
from fmmeta.checkpoint.write import Saver
from fmmeta.config.settings import Config
from fmmeta.common.errors import UsageError
from fmmeta import checkpoint
from tests.support.helpers import one_rank
from tests.support.checkpoints import WHOLE, saved, state_of
import os, torch
run = Path({str(tmp_path)!r})
good = saved(run, WHOLE, 3)
lines = []
saver = Saver(WHOLE, Config(), one_rank(), lines.append)
saver.last = good
(run / "filler").write_bytes(bytes(2 * 2**20 - 45000))
free = os.statvfs(run).f_bavail
for step in (4, 5, 6):
    big = {{"theta": torch.zeros(WHOLE.numel)}}
    state = {{**state_of(step, big), "ballast": "x" * 60000}}
    saver.save(run / f"checkpoint-{{step}}", big, state, {{}})
    try:
        saver.wait()
    except UsageError as error:
        lines.append(f"ends: {{error}}")
print("\\n".join(lines))
whole = [folder.name for folder in checkpoint.list_complete(run)]
print(whole, checkpoint.find_corruption(good, one_rank().world), os.statvfs(run).f_bavail == free)
"""
    mount = f'mount -t tmpfs -o size=2m none {tmp_path} && exec {sys.executable} -c "$CODE"'
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount],
        cwd=ROOT,
        text=True,
        env=environment(CODE=code),
        capture_output=True,
        timeout=100,
        check=False,
    )
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip("no namespaces here")
    lines = ended.stdout.splitlines()
    assert len(lines) == 4, ended.stderr
    parts = ("No space left on device", "free space", f"{tmp_path}/checkpoint-3")
    check_message(lines[0], f"{tmp_path}/checkpoint-4", *parts, "training continues")
    check_message(lines[2], f"ends: {tmp_path}/checkpoint-6", *parts, "3 in a row")
    assert lines[3] == "['checkpoint-3']  True"


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EIO])
def test_quota_and_read_only_errors_name_the_checkpoint(tmp_path, monkeypatch, number):
    good, reason = saved(tmp_path, WHOLE, 3), os.strerror(number)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(number, reason)))
    message = refusal(saved, tmp_path, WHOLE, 4)
    check_message(message, f"{tmp_path / 'checkpoint-4'}", reason, "free space or fix it")
    monkeypatch.undo()
    assert checkpoint.list_complete(tmp_path) == [good]
    assert not (tmp_path / "tmp-checkpoint-4").exists()


def test_a_background_save_writes_the_values_of_its_step(tmp_path, monkeypatch):
    gate, saver = threading.Event(), saver_of()
    first, second = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    real, vectors = write.write_tensors, two_vectors()
    monkeypatch.setattr(write, "write_tensors", lambda *args: (gate.wait(10), real(*args))[1])
    saver.warm(vectors)
    saver.save(first, vectors, state_of(1, vectors), {})
    assert not saver.done
    vectors["theta"].zero_()  # the next outer step
    assert checkpoint.list_complete(tmp_path) == []
    gate.set()
    saver.save(second, vectors, state_of(2, vectors), {})  # waits for the one before
    assert_holds(first, CUT)
    saver.wait()
    assert (saver.last, saver.thread) == (second, None)


@pytest.mark.parametrize("why", ["little memory", RuntimeError("CUDA error: out of memory"), MemoryError()])
def test_training_waits_when_there_is_no_room_for_copies(tmp_path, monkeypatch, why):
    """Pinned memory may be refused although host memory is free."""
    real, vectors = torch.empty, two_vectors()

    def refuse(*size, **given):
        if "pin_memory" in given and size == (5,):  # the second of three
            raise why
        return real(*size, **given)

    saver = saver_of()
    if why == "little memory":
        monkeypatch.setattr("fmmeta.checkpoint.write.host_bytes", lambda ranks: 100)
    else:
        monkeypatch.setattr(torch, "empty", refuse)
        saver.warm(vectors)
    saver.save(tmp_path / "checkpoint-1", vectors, state_of(1, vectors), {})
    assert saver.done
    assert not saver.copies
    saver.wait()
    assert_holds(tmp_path / "checkpoint-1", CUT)


def test_an_unexpected_error_of_the_save_thread_is_logged(tmp_path, monkeypatch):
    lines, folder = [], tmp_path / "checkpoint-1"
    saver = saver_of(lines.append)
    monkeypatch.setattr(write, "param_shapes", lambda params: 1 / 0)
    saver.save(folder, {"theta": torch.zeros(WHOLE.numel)}, state_of(1), {})
    saver.wait()
    (line,) = lines
    check_message(line, f"{folder}", "ZeroDivisionError", "training continues")


def test_a_locked_folder_is_refused_after_a_wait(tmp_path):
    held = lock_folder(tmp_path)
    assert refusal(lock_folder, tmp_path, 0.3).startswith(
        f"output_dir={tmp_path} is in use by process {os.getpid()} on "
    )
    began = time.monotonic()
    threading.Timer(0.4, held.close).start()
    lock_folder(tmp_path, 10).close()
    assert time.monotonic() - began > 0.3


def test_a_file_system_without_locks_is_warned_of_and_no_folder_is_chosen_there(tmp_path, monkeypatch):
    """An unfinished run may be running: only its --output_dir resumes it."""
    monkeypatch.chdir(tmp_path)
    config, folder = Config(), Path("runs") / "20260101-000000-fomaml-letters"
    settings = settings_of(config, "f")
    folder.mkdir(parents=True)
    write_run(folder, settings, "", finished=False)
    newest = saved(folder, WHOLE, 4)
    assert start_of(config, settings).folder == folder
    no_locks = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=no_locks))
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(LOGGER, "handle", records.append)
    assert start_of(config, settings).folder != folder
    assert not records
    start = open_run(Config(output_dir=str(folder)), settings, one_rank().world)
    start.lock.close()
    monkeypatch.undo()
    assert start.checkpoint == newest
    (record,) = records
    check_message(record.getMessage(), f"output_dir={folder}", "No locks available", "start only one")


def test_changed_settings_are_named_and_dangerous_ones_refused():
    before = {**Config(outer_lr=0.1, save_steps=5).as_dict(), "dataset_fingerprint": "f"}
    now = Config(outer_lr=0.2, save_steps=6, accept_changed_settings=["outer_lr"])
    accepted, harmless = accept_changes(before, now, settings_of(now, "f"), "here")
    check_message(accepted, "accepted", "outer_lr: 0.1 -> 0.2")
    check_message(harmless, "do not change theta", "save_steps: 5 -> 6")
    now = now.but(seed=1)
    message = refusal(accept_changes, before, now, settings_of(now, "f"), "here")
    check_message(message, "seed: 42 -> 1", "use the values before ->, another output_dir")
    message = refusal(Config, accept_changed_settings=["outer_rl"])
    check_message(message, "accept_changed_settings=outer_rl is no setting")


def test_the_command_without_output_dir_resumes_its_run(tmp_path, monkeypatch):
    """Without --output_dir: the newest unfinished run with these settings and a checkpoint that no process
    uses.
    """
    monkeypatch.chdir(tmp_path)
    config = Config()
    settings = settings_of(config, "f")
    begun = [Path("runs") / f"20260101-00000{n}-fomaml-letters" for n in range(4)]
    for number, folder in enumerate(begun):
        folder.mkdir(parents=True)
        own = settings_of(Config(seed=7), "f") if number == 3 else settings
        write_run(folder, own, "", finished=number == 2)
        if number:
            saved(folder, WHOLE, 4)
    assert start_of(config, settings).checkpoint == begun[1] / "checkpoint-4"
    held = lock_folder(begun[1])
    assert start_of(config, settings).folder not in begun
    held.close()
    never = config.but(resume_from_checkpoint="never")
    assert start_of(never, settings_of(never, "f")).folder not in begun
