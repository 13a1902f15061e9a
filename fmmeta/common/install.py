"""The installation: tested versions of the packages that fmmeta uses, and the folders that ship with it."""

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PACKAGE = Path(__file__).parents[1]
CHECKED = ("torch", "deepspeed", "transformers", "datasets", "accelerate", "safetensors")
"""Packages whose version decides whether a run works."""


def shipped(folder: str) -> Path:
    """`ds_configs` or `launch`: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


def version(package: str) -> str | None:
    """The installed version of a package; None without one."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def versions() -> Iterator[tuple[Requirement, str | None, bool]]:
    """The tested range of each package of `CHECKED` by the metadata of fmmeta, the installed version, and
    whether it is tested: a pre-release counts as its release. Of a checkout that is not installed nothing.
    """
    with suppress(importlib.metadata.PackageNotFoundError):
        for wanted in map(Requirement, importlib.metadata.requires("fmmeta") or ()):
            if wanted.name in CHECKED and wanted.marker is None:
                here = version(wanted.name)
                yield wanted, here, bool(here and wanted.specifier.contains(Version(here).base_version))


@cache
def warn_untested(global_rank: int) -> None:
    """Print one line on rank 0 that names the packages outside their tested range; once in a process."""
    # the import of a package that is not installed ends with a better message
    untested = [(wanted, here) for wanted, here, tested in versions() if here and not tested]
    if untested and global_rank == 0:
        found = ", ".join(f"{wanted.name} {here}" for wanted, here in untested)
        ranges = " ".join(f"'{wanted}'" for wanted, _ in untested)
        print(
            f"fmmeta: {found}: not tested with this fmmeta; if the run fails, try: pip install {ranges}",
            file=sys.stderr,
            flush=True,
        )
