"""Committed results are of a machine, and name nothing that lies on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import portable, write_json
from tests.unit.helpers import ROOT

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_results_name_no_path_of_one_machine(file):
    found = json.loads(file.read_text(encoding="utf-8"))
    assert portable(found) == found


def test_written_results_lose_such_paths(tmp_path):
    file = tmp_path / "results.json"
    write_json(file, {"data": ["/home/me/data/clinc150"], "flags": {"deepspeed": "ds_configs/zero2.json"}, "model": Path("/m")})
    found = json.loads(file.read_text(encoding="utf-8"))
    assert {name: found[name] for name in ("data", "flags", "model")} == {
        "data": ["data/clinc150"], "flags": {"deepspeed": "ds_configs/zero2.json"}, "model": "m",
    }  # fmt: skip
    assert set(found["machine"]) >= {"date", "cores", "torch"}
