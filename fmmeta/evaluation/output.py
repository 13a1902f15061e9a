"""Output files of the commands: checked before the work, complete or absent after it."""

import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from fmmeta.common.errors import UsageError
from fmmeta.common.security import make_folders, publish, remove_empty
from fmmeta.common.text import to_json


def check_output(path: Path) -> None:
    """Raise `UsageError` for a file that cannot be written, before its content is computed."""
    if path.is_dir():
        raise UsageError(f"output={path} is a folder; give a file in it, such as {path / 'results.json'}")
    new = not path.exists()
    if not new and not path.is_file():
        return  # opening a pipe or a device would disturb its reader
    try:
        made = make_folders(path.parent)
        path.open("a").close()
        if new:
            path.resolve().unlink()
        remove_empty(made)
    except FileExistsError:
        raise UsageError(
            f"output={path} cannot be written ({path.parent} is no folder); give another file"
        ) from None
    except OSError as error:
        raise unwritable(path, error) from None


@contextmanager
def open_output(path: str | Path, create_folder: bool = False) -> Iterator[TextIO]:
    """A text file that appears under its name when the block ends without an error; - is standard output.

    Pipes and devices are written directly. Raises `UsageError` for a file that cannot be written.
    """
    if path == "-":
        yield sys.stdout
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    replaceable = not target.exists() or (target.is_file() and os.access(target, os.W_OK))
    try:
        if create_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        with (temporary if replaceable else target).open("w", encoding="utf-8") as file:
            yield file
        if replaceable:
            publish(temporary, target)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write results or settings as strict JSON; its folder is created. Raises `UsageError`."""
    with open_output(path, create_folder=True) as file:
        file.write(to_json(values, indent=1) + "\n")


def unwritable(path: str | Path, error: OSError) -> UsageError:
    return UsageError(f"output={path} cannot be written ({error.strerror}); give another file")
