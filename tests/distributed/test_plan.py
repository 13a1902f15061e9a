"""What `fmmeta plan` says of bytes on the wire and of machines, against real engines and real ranks."""

from __future__ import annotations

import json
from itertools import chain

import pytest

from fmmeta.planning import machines
from fmmeta.planning.command import profile_of
from fmmeta.planning.settings import PlanConfig
from tests.support.launch import run_ranks
from tests.support.models import save_family


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows of one length, so that padding does not blur the counts."""
    folder = tmp_path_factory.mktemp("plan")
    rows = [
        {"task": f"t{t}", "input": "river stone maple candle", "output": "quiet pepper"}
        for t in range(3)
        for _ in range(9)
    ]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({**row, "input": f"{row['input']} {i:03}"}) + "\n" for i, row in enumerate(rows))
    )
    return save_family(folder / "llama", "llama", tied=False, layers=4), folder / "rows.jsonl", folder


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "cases",
    [
        ("zero0", "zero1", "zero2", "zero3", "zero2 in rounds", "zero3 in rounds", "zero3 released"),
        ("tensor",),
        ("pipeline",),
    ],
    ids=lambda cases: cases[0],
)
def test_planned_bytes_equal_the_bytes_communicated(files, cases):
    """ZeRO pads parameters to the ranks and to its alignment, which 2 % allow for."""
    model, data, folder = files
    run_ranks(
        ["-m", "tests.support.comm_dtype_cases", str(model), str(data), str(folder), *cases], 2, timeout_s=400
    ).ok()
    found = [json.loads((folder / f"{cases[0]}{rank}.json").read_text()) for rank in range(2)]
    for one in chain(*found):
        counted, planned = one["counted"], one["planned"]
        if (
            one["case"] == "zero3 released"
        ):  # the output layer, last of the forward pass, is still there for the backward pass
            assert 0.9 * planned["gather"] < counted["gather"] < planned["gather"], one
        else:
            assert counted["gather"] == pytest.approx(planned["gather"], rel=0.02), one
        assert counted["reduce"] + counted["sum"] == pytest.approx(
            planned["reduce"] + planned["tensor"], rel=0.02
        ), one
    sent = [ranks[0]["counted"]["send"] for ranks in found]
    if cases == ("pipeline",):  # the first stage sends hidden states, ids and mask, the second one gradients
        assert sum(sent) == found[0][0]["planned"]["send"]
        assert min(sent) > 0
    else:
        assert sent == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_calibration_measures_the_machine(files, tmp_path):
    model, _, _ = files
    plan = PlanConfig(
        model_name_or_path=str(model),
        task_type="causal_lm",
        gpus=2,
        gpu_memory_gib=1.0,
        calibrate=True,
        save_profile=str(tmp_path / "here.json"),
        max_length=32,
        dataset=["rows"],
    )
    found = profile_of(plan)
    assert machines.find(str(tmp_path / "here.json")) == found
    assert found.source.startswith("measured on 2 ranks (cpu")
    assert all(1e6 < rate < 1e13 for rate in (found.matmul_bf16, found.matmul_fp32))
    assert found.matmul_bf16 != found.matmul_fp32  # each is measured: a profile serves plans of both
    assert 1e7 < found.memory < 1e12
    assert 1e6 < found.group_link < 1e12
    assert 0 < found.latency < 1
