"""Messages are compared with tests/messages.json, and `--update-messages` writes it."""

from __future__ import annotations

import json

import pytest

from tests.support import messages
from tests.support.helpers import ROOT
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
    for test in json.loads(messages.SNAPSHOT.read_text(encoding="utf-8")):
        file, name = ROOT / test.split("::")[0], test.split("::")[1].split("[")[0]
        assert f"def {name}(" in file.read_text(), f"remove {test} from tests/messages.json"
