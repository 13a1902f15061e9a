"""Full texts of error messages in one snapshot file; tests name only what a message must contain.

    check_message(refusal(Config, k_shot=0), "k_shot=0", "use 1 or more")

checks that the setting, the value and the remedy are in the text, and that the whole text is the one stored
for this test in tests/messages.json. After rewording a message run `python -m pytest --update-messages FILES`
and read the difference.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections import defaultdict
from pathlib import Path

SNAPSHOT = Path(__file__).parents[1] / "messages.json"
TEMPORARY = re.compile(r"/[^\s'\"]*?/pytest-of-[^/\s]+/pytest-\d+(?:/popen-gw\d+)?/[^/\s,:;'\"]+")
update = False
"""Whether texts are stored instead of compared; set by the option --update-messages."""
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
        _store(test, seen)
        return
    stored = json.loads(SNAPSHOT.read_text(encoding="utf-8")).get(test, [])[len(seen) - 1 : len(seen)]
    assert [seen[-1]] == stored, "reworded? run: python -m pytest --update-messages, and read the difference"


def _store(test: str, texts: list[str]) -> None:
    """Write the texts of a test into the snapshot file; processes of a parallel run take turns."""
    with SNAPSHOT.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        stored = json.loads(file.read() or "{}")
        stored[test] = texts
        file.truncate(0)
        file.write(json.dumps(dict(sorted(stored.items())), indent=1, ensure_ascii=False) + "\n")
