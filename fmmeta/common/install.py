"""The installation: tested versions of the packages that fmmeta uses, and the folders that ship with it."""

import importlib.metadata
import sys
from functools import cache
from pathlib import Path

from packaging.version import Version

PACKAGE = Path(__file__).parents[1]
TESTED = {
    "torch": ("2.6", "2.14"),
    "deepspeed": ("0.19.8", "0.20"),
    "transformers": ("5.0", "6"),
    "datasets": ("4.0", "6"),
    "accelerate": ("1.10", "2"),
    "safetensors": ("0.5", ""),
}
"""The first tested version, and the first untested one after it; as in pyproject.toml."""


def shipped(folder: str) -> Path:
    """`ds_configs` or `launch`: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


def is_tested(package: str, version: str) -> bool:
    """Whether a version is in the package's range of `TESTED`; a pre-release counts as its release."""
    (least, beyond), release = TESTED[package], Version(Version(version).base_version)
    return Version(least) <= release and (not beyond or release < Version(beyond))


def requirement(package: str) -> str:
    """The tested range as pip reads it, such as `torch>=2.6,<2.14`."""
    least, beyond = TESTED[package]
    return f"{package}>={least}" + (f",<{beyond}" if beyond else "")


@cache
def warn_untested(global_rank: int) -> None:
    """Print one line on rank 0 that names the packages outside their tested range; once in a process."""
    untested = []
    for package in TESTED:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # the import of it ends with a better message
        if not is_tested(package, version):
            untested.append((package, version))
    if untested and global_rank == 0:
        found = ", ".join(f"{package} {version}" for package, version in untested)
        wanted = " ".join(f"'{requirement(package)}'" for package, _ in untested)
        print(
            f"fmmeta: {found}: not tested with this fmmeta; if the run fails, try: pip install {wanted}",
            file=sys.stderr,
            flush=True,
        )
