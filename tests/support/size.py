"""Size of the package in AST statements without docstrings: `python -m tests.support.size [COMMIT]`.

Formatting changes lines, not statements. An expression statement that is only a constant (a docstring, `...`)
does not count.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def statements(source: str) -> int:
    """Number of statements at any depth, without those that are only a constant."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(ast.parse(source))
    )


def modules(commit: str | None = None) -> Iterator[tuple[str, str]]:
    """(path from the root of the repository, source) of every module of fmmeta/ in the working tree or in a
    commit.
    """
    if commit is None:
        for file in sorted((ROOT / "fmmeta").rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
        return
    for path in git("ls-tree", "-r", "--name-only", commit, "fmmeta").splitlines():
        if path.endswith(".py"):
            yield path, git("show", f"{commit}:{path}")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def by_folder(commit: str | None = None) -> Counter[str]:
    """Statements of each folder of fmmeta/, and of each module at its top level."""
    found: Counter[str] = Counter()
    for path, source in modules(commit):
        found["/".join(path.split("/")[:2])] += statements(source)
    return found


if __name__ == "__main__":
    sizes = by_folder(*sys.argv[1:])
    for name, size in sizes.most_common():
        print(f"{size:7,}  {name}")
    print(f"{sizes.total():7,}  fmmeta")
