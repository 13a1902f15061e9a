"""Run the fast suite against planted defects, one at a time, in worktrees of the current commit.

    python -m tests.mutants.run [--only NAME ...] [--jobs 2] [--results FILE]

For each defect of table.py: check out the commit, plant the defect, run the test that noticed it at another
commit, its most relevant tests, then the whole fast suite, and stop at the first failure. The equivalent
rewrites are planted together, and one by one only if a test notices them. Results are written after each
mutant, the table of docs/explanation/testing.md at the end; a second call continues where the first ended. A
noticed mutant is repeated when its text, the file that it changes or the file of the test that noticed it has
changed since, another one at every new commit. Prints one line per mutant with the test that noticed it; exit
code 1 if fewer than REQUIRED of the defects were noticed or an equivalent rewrite was.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
REQUIRED = 0.95  # of the defects
TIMEOUT_S = (
    1200  # of the whole fast suite; a defect that makes ranks wait for each other ends by the tests' timeouts
)
NO_SUCH_TEST = 4  # pytest's exit code for an id that does not exist
DOCS = ROOT / "docs" / "explanation" / "testing.md"
MARKS = ("<!-- table: make mutants -->", "<!-- end of the table -->")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of the commit beside the repository, where tests find ../shared; removed afterwards."""
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:
        tree = Path(folder, "fmmeta")
        # a worktree in a folder beside the repository finds ../shared through a link
        (Path(folder) / "shared").symlink_to(ROOT.parent / "shared")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def plant(mutant: Mutant, folder: Path) -> None:
    """Replace the text. Raises `ValueError` unless it occurs exactly once."""
    file = folder / "fmmeta" / mutant.file
    source = file.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has its old text {source.count(mutant.old)} times")
    file.write_text(source.replace(mutant.old, mutant.new))


def first_failure(folder: Path, arguments: Sequence[str]) -> str | None:
    """The first failed test of a pytest call, or None if all passed."""
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    # that each mutant applies to the code is no longer true here
    skipped = ["--ignore", "tests/unit/test_mutants.py"]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *skipped, *arguments]
    try:
        ended = subprocess.run(
            command, cwd=folder, env=env, timeout=TIMEOUT_S, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return f"no test within {TIMEOUT_S} s"
    if ended.returncode in (0, NO_SUCH_TEST):
        return None
    failed = FAILED.search(ended.stdout)
    if failed is None:
        raise RuntimeError(
            f"pytest ended with {ended.returncode}:\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
        )
    return failed[1]


def attempt(mutants: Sequence[Mutant], commit: str, jobs: int, before: Sequence[str] = ()) -> dict[str, Any]:
    """The first test that fails with these mutants ("" if none does), and the time until then.

    before: tests that noticed them at another commit.
    """
    began = time.monotonic()
    with checkout(commit) as folder:
        for mutant in mutants:
            plant(mutant, folder)
        related = dict.fromkeys(f"tests/{test}" for mutant in mutants for test in mutant.tests)
        found = first_failure(folder, before) if before else None
        if found is None:
            found = first_failure(folder, list(related))
        if found is None:
            found = first_failure(folder, ["--numprocesses", str(jobs)])
    return {"test": found or "", "seconds": round(time.monotonic() - began)}


def key_of(mutant: Mutant, test: str, commit: str) -> str:
    """Of what a result depends on. test: the test that noticed the mutant, or ""."""
    file = test.partition("::")[0]
    read = [ROOT / "fmmeta" / mutant.file, ROOT / file] if (ROOT / file).is_file() else []
    depends = [mutant.old, mutant.new, [one.read_text() for one in read] or commit]
    return hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16]


def page(text: str, done: dict[str, dict[str, Any]]) -> str:
    """The page with the table of defects and the tests that notice them first, between its marks."""
    lines = ["", "| defect | noticed first by |", "|---|---|"]
    for mutant in MUTANTS:
        if not mutant.equivalent:
            test = done.get(mutant.name, {}).get("test", "").partition("[")[0]
            lines.append(f"| {mutant.name} | {f'`{test}`' if test else 'no test'} |")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return "\n".join([f"{before}{MARKS[0]}", *lines, "", f"{MARKS[1]}{after}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--only", nargs="*", default=[], choices=[mutant.name for mutant in MUTANTS])
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    done: dict[str, dict[str, Any]] = json.loads(args.results.read_text()) if args.results.exists() else {}
    args.results.parent.mkdir(parents=True, exist_ok=True)
    chosen = [mutant for mutant in MUTANTS if not args.only or mutant.name in args.only]
    defects = [mutant for mutant in chosen if not mutant.equivalent]

    def results(mutants: Sequence[Mutant]) -> Sequence[Mutant]:
        """Run those that have no result of this commit, and print all; returns those that were noticed."""
        missing = [
            one
            for one in mutants
            if one.name not in done or done[one.name]["key"] != key_of(one, done[one.name]["test"], commit)
        ]
        before = [test for one in missing if "::" in (test := done.get(one.name, {}).get("test", ""))]
        found = attempt(missing, commit, args.jobs, before) if missing else {}
        if len(missing) > 1 and found["test"]:
            print(f"planted together: {found['test']} ({found['seconds']} s)", flush=True)
            return [one for mutant in mutants for one in results([mutant])]
        for mutant in missing:
            done[mutant.name] = {"key": key_of(mutant, found["test"], commit), **found}
        args.results.write_text(json.dumps(done, indent=1))
        for mutant in mutants:
            result = done[mutant.name]
            noticed_by = result["test"] or "not noticed"
            number = f"[{chosen.index(mutant) + 1}/{len(chosen)}]"
            print(f"{number} {mutant.name}: {noticed_by} ({result['seconds']} s)", flush=True)
        return [mutant for mutant in mutants if done[mutant.name]["test"]]

    noticed = sum(len(results([defect])) for defect in defects)
    wrongly = [mutant.name for mutant in results([mutant for mutant in chosen if mutant.equivalent])]
    DOCS.write_text(page(DOCS.read_text(), done))
    print(f"{noticed} of {len(defects)} defects noticed; equivalent rewrites noticed: {wrongly or 'none'}")
    sys.exit(noticed < REQUIRED * len(defects) or bool(wrongly))


if __name__ == "__main__":
    main()
