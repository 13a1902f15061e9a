"""Size of the package in AST statements without docstrings: `python -m tests.support.size`.

Formatting changes lines, not statements. An expression statement that is only a constant (a docstring, `...`)
does not count.
"""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def statements(source: str) -> int:
    """Number of statements at any depth, without those that are only a constant."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(ast.parse(source))
    )


def by_folder() -> Counter[str]:
    """Statements of each folder of fmmeta/, and of each module at its top level."""
    found: Counter[str] = Counter()
    for file in sorted((ROOT / "fmmeta").rglob("*.py")):
        folder = file.relative_to(ROOT).parts[:2]
        found["/".join(folder)] += statements(file.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sizes = by_folder()
    for name, size in sizes.most_common():
        print(f"{size:7,}  {name}")
    print(f"{sizes.total():7,}  fmmeta")
