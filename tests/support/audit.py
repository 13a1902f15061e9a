"""`make audit`: known holes in what is installed, by pip-audit where it can reach its data; else against the
locked list.

The list (constraints.txt) names what the tests last ran with, which `make` installs. Exit code 1: a hole, or
a package that is not as listed.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

LOCKED = Path(__file__).parents[2] / "constraints.txt"


def main() -> int:
    ran = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--timeout", "10"],
        capture_output=True,
        text=True,
        check=False,
    )
    if (
        "No known vulnerabilities" in ran.stderr
        or "Vulnerabilities" in ran.stdout
        or "vulnerabilit" in ran.stderr
    ):
        print(ran.stdout + ran.stderr)
        return ran.returncode
    print("pip-audit is missing or cannot reach its data; comparing with constraints.txt")
    wrong = deviations(LOCKED.read_text(encoding="utf-8"))
    print("\n".join(wrong) or "all as listed")
    return int(bool(wrong))


def deviations(locked: str) -> list[str]:
    """Packages that are not installed as listed; those that are not installed at all do not matter."""
    found = []
    for line in filter(None, (line.split("#")[0].strip() for line in locked.splitlines())):
        package, version = line.split("==")
        try:
            here = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if here.split("+")[0] != version:
            found.append(f"{package} {here} is here, {version} is listed")
    return found


if __name__ == "__main__":
    sys.exit(main())
