"""A delayed outer step ends where the oracle's delayed loop ends, on every kind of layout; bf16 on the wire
stays near it.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.launch import run_ranks
from tests.support.matrix import Case, ParityFixture, fast_and_slow_cases, tolerance

ROWS = [  # layout, stage, algorithm, model, dtype, outer, head, also, pipeline stages (-T: tensor ranks)
    ((1, 1), "plain", "fomaml", "bert", "fp32", "adamw", "learned", "delay", 1),
    ((1, 1), 1, "meta_sgd", "llama", "fp32", "sgd", "zero", "delay", 1),
    ((2, 1), "plain", "fomaml", "llama", "fp32", "sgd", "zero", "delay", 1),
    ((2, 1), 2, "reptile", "bert", "fp32", "adamw", "zero", "delay", 1),
    ((2, 1), "plain", "fomaml-rates", "bert", "fp32", "adamw", "learned", "delay", 1),
    ((1, 2), 0, "fomaml", "bert", "fp32", "sgd", "prototype", "delay", 1),
    ((1, 2), 0, "fomaml", "llama3", "fp32", "adamw", "zero", "delay", 2),
    ((1, 2), 1, "fomaml", "llama3", "fp32", "adamw", "zero", "delay", -2),
    ((2, 2), 1, "maml", "llama", "fp32", "adamw", "zero", "delay", 1),
    ((2, 2), 2, "fomaml", "bert", "fp32", "sgd", "learned", "delay", 1),
    ((2, 2), 3, "reptile", "llama", "fp32", "adamw", "zero", "delay", 1),
    ((2, 2), 3, "fomaml", "bert", "bf16", "adamw", "learned", "delay", 1),
    ((2, 1), "plain", "fomaml", "llama", "fp32", "sgd", "zero", "wire", 1),
    ((2, 2), 3, "fomaml", "llama", "fp32", "sgd", "zero", "delay-wire", 1),
]
CASES = [Case.of_row(*row) for row in ROWS]
FAR = 0.05  # bf16 on the wire: 8 bits of the sum, and the steps that follow from it


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ParityFixture(tmp_path_factory.mktemp("delay"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case", fast_and_slow_cases([case for case in CASES if case.work < 7], CASES, CASES.index)
)
def test_ends_where_the_delayed_oracle_ends(case, bench):
    theta, facts = bench.outcome(case, CASES)
    error = bench.error(case, theta)
    assert error < (FAR if "wire" in case.also else tolerance(case))
    assert facts["effects"] == case.settings
    if "wire" in case.also:
        assert error > 1e-5  # it did travel in bf16
    groups, members = case.layout
    lines = bench.lines(case)
    assert [line["lr"] is None for line in lines] == [
        bool(case.settings.get("outer_delay")),
        False,
        False,
    ]  # nothing was due
    if groups == 2 and members == 1 and case.algorithm != "fomaml-rates":
        wide = 2 if "wire" in case.also else 4
        assert [line["comm_bytes"] for line in lines] == [wide * facts["numel"]] * 3


def test_the_delayed_oracle_differs_from_the_oracle_without_delay(bench):
    """If the two oracles agreed, the comparison above could not tell a run without delay."""
    ends = []
    for delay in (0, 1):
        settings = {**bench.settings(CASES[2]), "outer_delay": delay}
        run, began = bench.reference(json.dumps(settings, sort_keys=True))
        ends.append(torch.cat([value.float().flatten() for value in run.thetas[-1].values()]))
        moved = torch.cat([(run.thetas[1][name] - start).flatten() for name, start in began.items()])
        assert bool(moved.any()) == (delay == 0)
    start = torch.cat([value.flatten() for value in began.values()])
    assert (ends[0] - ends[1]).norm() > 100 * tolerance(CASES[2]) * (ends[0] - start).norm()


@pytest.mark.timeout(300)
def test_an_interrupted_delayed_run_equals_the_uninterrupted_run_bit_for_bit(tmp_path):
    """A checkpoint holds what is pending, and that one is saved does not change what follows."""
    flags = [
        "launch/train.py",
        "--outer_delay",
        "1",
        "--group_size",
        "1",
        "--num_query",
        "2",
        "--k_shot",
        "1",
        "--inner_steps",
        "1",
        "--eval_episodes",
        "0",
        "--logging_steps",
        "1",
        "--meta_batch_size",
        "2",
        "--outer_steps",
        "5",
        "--inner_lr_learned",
        "layer",
    ]
    whole, part = tmp_path / "whole", tmp_path / "part"
    run_ranks([*flags, "--output_dir", str(whole), "--save_steps", "1", "--save_total_limit", "9"], 2).ok()
    state = json.loads((whole / "checkpoint-3/state.json").read_text())
    assert state["pending"] == {"outer_step": 2, "unread": False, "finite": True}
    assert {"theta", "pending theta"} <= set(state["vectors"])
    assert "pending rates" in load_file(whole / "checkpoint-3/tables.safetensors")
    assert json.loads((whole / "checkpoint-5/state.json").read_text())["pending"] is None
    taken = str(whole / "checkpoint-3")
    run_ranks(
        [*flags, "--output_dir", str(part), "--save_steps", "0", "--resume_from_checkpoint", taken], 2
    ).ok()
    ends = [load_file(folder / "model/model.safetensors") for folder in (whole, part)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    rates = [
        json.loads((folder / "model/fmmeta.json").read_text())["inner_rates"] for folder in (whole, part)
    ]
    assert rates[0] == rates[1]
    lines = (part / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 5]
