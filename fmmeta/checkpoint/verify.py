"""Verifies checkpoints: the names in a folder, its manifest, the checksum of every file.

read.py and write.py define the content of the files. Names in a manifest are compared and never followed.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, TypedDict

from fmmeta.common.errors import UsageError
from fmmeta.config.renamed import translated
from fmmeta.config.settings import Config
from fmmeta.parallel.collectives import Communicator

STATE, TABLES, MANIFEST = "state.json", "tables.safetensors", "manifest.json"
FILES = re.compile(r"shard-[0-9]{5}\.safetensors|tables\.safetensors|state\.json")
NEEDED = {
    "outer_step": int,
    "bad_steps": int,
    "tasks": dict,
    "numbers": dict,
    "vectors": list,
    "settings": dict,
}


class Entry(TypedDict):
    """Size and checksum of a file in a manifest."""

    bytes: int
    sha256: str


def list_complete(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = [folder for folder in output_dir.glob("checkpoint-*") if (folder / MANIFEST).is_file()]
    numbered = [(folder.name.removeprefix("checkpoint-"), folder) for folder in folders]
    return [
        folder
        for _, folder in sorted((int(number), folder) for number, folder in numbered if number.isdecimal())
    ]


def find_corruption(folder: Path, comm: Communicator) -> str:
    """The first corruption of a checkpoint, as a message; "" if it is complete and intact.

    Every file is read once, divided over the ranks. Collective: comm.
    """
    message = ""
    try:
        files = read_manifest(folder)
        for name in sorted(files)[comm.rank :: comm.size]:
            message = message or find_file_corruption(folder / name, files[name])
    except UsageError as error:
        message = str(error)
    return next((text.decode() for text in comm.gather_bytes(message.encode()) if text), "")


def read_manifest(folder: Path) -> dict[str, Entry]:
    """The files of a checkpoint, by name. Raises `UsageError` for a damaged manifest."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        if STATE in files and all(
            FILES.fullmatch(name) and {"bytes", "sha256"} <= set(files[name]) for name in files
        ):
            return files
    except OSError as error:
        raise UsageError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UsageError(f"{MANIFEST} is damaged")


def find_file_corruption(file: Path, entry: Entry) -> str:
    """How a file differs from its entry in the manifest, as a message; "" if it does not."""
    try:
        size, checksum = file.stat().st_size, hashlib.sha256()
        if size != entry["bytes"]:
            return f"{file.name} has {size} bytes instead of {entry['bytes']}"
        with file.open("rb") as opened:
            while part := opened.read(2**24):
                checksum.update(part)
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if checksum.hexdigest() != entry["sha256"]:
        return f"{file.name} has another sha256 than {MANIFEST}"
    return ""


def read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json. Raises `UsageError` if no run can resume from it."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for name, kind in NEEDED.items():
            if not isinstance(state, dict) or not isinstance(state.get(name), kind):
                raise ValueError(f"{STATE} has no {name}")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"resume_from_checkpoint={folder} is no checkpoint ({error}); give a checkpoint-N folder"
        ) from None
    return {**state, "settings": translated(state["settings"], Config.__dataclass_fields__)}


def undo_partial_save(output_dir: Path) -> None:
    """Remove or restore the folders of a save that was interrupted."""
    for replaced in output_dir.glob("replaced-checkpoint-*"):
        name = replaced.with_name(replaced.name.removeprefix("replaced-"))
        if name.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(replaced, name)
    for incomplete in output_dir.glob("tmp-checkpoint-*"):
        shutil.rmtree(incomplete, ignore_errors=True)


def rename_aside(folder: Path) -> Path:
    """Rename a checkpoint that no run must resume from. It is no longer listed, and never removed."""
    number = 0
    while (aside := folder.with_name(f"aside-{folder.name}" + (f".{number}" if number else ""))).exists():
        number += 1
    os.rename(folder, aside)
    return aside
