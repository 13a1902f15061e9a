"""Messages are compared with tests/messages.json, and `--update-messages` writes it."""

from __future__ import annotations

import json

import pytest

from tests.support import messages
from tests.support.launch import python
from tests.support.messages import check_message


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "SNAPSHOT", tmp_path / "messages.json")
    monkeypatch.setattr(messages, "_seen", messages.defaultdict(list))
    monkeypatch.setattr(messages, "update", True)
    return tmp_path / "messages.json"


def test_a_reworded_message_fails_until_it_is_updated(snapshot, tmp_path, monkeypatch, request):
    texts = [f"input={tmp_path}/x.jsonl is empty; add rows", "k_shot=0 is below 1; use 1 or more"]
    for text in texts:
        check_message(text, text.split("; ")[1])
    stored = json.loads(snapshot.read_text())[request.node.nodeid]
    assert stored == ["input=<tmp>/x.jsonl is empty; add rows", texts[1]]
    monkeypatch.setattr(messages, "update", False)
    messages._seen.clear()
    check_message(texts[0], "input=")
    with pytest.raises(AssertionError, match="--update-messages"):
        check_message("k_shot=0 is less than 1; use 1 or more", "k_shot=0")
    with pytest.raises(AssertionError, match=r"\['lower it'\] not in"):
        check_message(texts[0], "input=", "lower it")


def test_every_stored_message_belongs_to_a_test():
    """Of the files that this session collects as a whole; their tests were collected by pytest."""
    stale = messages.stale(json.loads(messages.SNAPSHOT.read_text(encoding="utf-8")))
    assert not stale, f"run: python -m pytest --update-messages, with the files of {', '.join(stale)}"


def test_a_suggestion_is_the_only_remedy():
    """No message says to remove what it suggests another name for."""
    stored = json.loads(messages.SNAPSHOT.read_text(encoding="utf-8"))
    both = [
        text
        for texts in stored.values()
        for text in texts
        if "did you mean" in text and ("remove it" in text or "leave it out" in text)
    ]
    assert not both


def test_an_update_drops_the_messages_of_removed_tests(tmp_path):
    """A run of one file of three: what is not collected, or no longer checked, is dropped there alone."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import *\nfrom tests.support import messages\n"
        f"messages.SNAPSHOT = messages.Path({str(folder / 'messages.json')!r})\n"
    )
    (folder / "test_a.py").write_text(
        "from tests.support.messages import check_message\n"
        "def test_kept(): check_message('k_shot=0 is below 1', 'k_shot=0')\n"
        "def test_without(): pass\n"
    )
    (folder / "test_b.py").write_text("")
    ids = ("a.py::test_kept", "a.py::test_kept[1]", "a.py::test_without", "b.py::test_x", "c.py::test_y")
    stored = {f"tests/test_{one}": ["text"] for one in ids}
    (folder / "messages.json").write_text(json.dumps(stored))
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--import-mode=importlib"]
    ended = python([*words, "--update-messages", "tests/test_a.py"], tmp_path, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((folder / "messages.json").read_text()) == {
        "tests/test_a.py::test_kept": ["k_shot=0 is below 1"],
        "tests/test_b.py::test_x": ["text"],
    }
