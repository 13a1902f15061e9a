"""Full texts of error messages in one snapshot file; tests name only what a message must contain.

    check_message(refusal(Config, k_shot=0), "k_shot=0", "use 1 or more")

checks that the setting, the value and the remedy are in the text, and that the whole text is the one stored
for this test in tests/messages.json. After rewording a message run `python -m pytest --update-messages FILES`
and read the difference. That command also drops the messages of tests that no longer exist in these files, or
that no longer check one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

SNAPSHOT = Path(__file__).parents[1] / "messages.json"
TEMPORARY = re.compile(r"/[^\s'\"]*?/pytest-of-[^/\s]+/pytest-\d+(?:/popen-gw\d+)?/[^/\s,:;'\"]+")
update = False
"""Whether texts are stored instead of compared; set by the option --update-messages."""
collected: set[str] = set()
"""Ids of the tests of this session, those that are deselected too."""
complete: set[str] = set()
"""Their files, without those of which the command line names single tests."""
_seen: defaultdict[str, list[str]] = defaultdict(list)


def check_message(text: str, part: str, *more: str) -> None:
    """Check that a message contains its parts and that its full text is as in the snapshot file.

    part, more: the setting with its value, and the remedy. Temporary folders are stored as `<tmp>`. A test
    may check several messages; they are stored in the order of the calls.
    """
    missing = [one for one in (part, *more) if one not in text]
    assert not missing, f"{missing} not in {text!r}"
    test = os.environ["PYTEST_CURRENT_TEST"].rsplit(" (", 1)[0]
    seen = _seen[test]
    seen.append(TEMPORARY.sub("<tmp>", text))
    if update:
        store(test, seen)
        return
    stored = json.loads(SNAPSHOT.read_text(encoding="utf-8")).get(test, [])[len(seen) - 1 : len(seen)]
    assert [seen[-1]] == stored, "reworded? run: python -m pytest --update-messages, and read the difference"


def set_collected(tests: Sequence[str], arguments: Sequence[str]) -> None:
    """Store a session's tests; with --update-messages, drop the messages of tests that no longer exist.

    arguments: files, folders and tests of the command line.
    """
    collected.update(tests)
    partly = {argument.partition("::")[0] for argument in arguments if "::" in argument}
    complete.update({test.partition("::")[0] for test in tests} - partly)
    if update:
        _rewrite(lambda stored: [stored.pop(test) for test in stale(stored)])


def stale(stored: Sequence[str] | dict[str, list[str]]) -> list[str]:
    """The ids whose file does not exist, or was collected without such a test."""

    def is_stale(test: str) -> bool:
        file = test.partition("::")[0]
        return not (SNAPSHOT.parents[1] / file).exists() or (file in complete and test not in collected)

    return list(filter(is_stale, stored))


def store(test: str, texts: list[str]) -> None:
    """Write the texts of a test into the snapshot file; without texts, drop the test."""
    _rewrite(lambda stored: stored.update({test: texts}) if texts else stored.pop(test, None))


def _rewrite(change: Callable[[dict[str, list[str]]], object]) -> None:
    """Change the snapshot file; processes of a parallel run take turns."""
    with SNAPSHOT.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        stored = json.loads(file.read() or "{}")
        change(stored)
        file.truncate(0)
        file.write(json.dumps(dict(sorted(stored.items())), indent=1, ensure_ascii=False) + "\n")
