"""Several tasks in one pass, over ranks of a group and groups: the oracle's theta, and ZeRO 3 gathers the
base once.
"""

from __future__ import annotations

import re

import pytest

from tests.support.launch import run_ranks
from tests.support.matrix import Case, ParityFixture, tolerance
from tests.support.models import save_bert, save_llama, write_classes, write_pairs

ROWS = [
    ((1, 2), 3, "fomaml", "llama", "fp32", "zero", "none"),
    ((1, 2), 3, "reptile", "bert", "fp32", "learned", "micro"),
    ((1, 2), 2, "fomaml", "bert", "fp32", "prototype", "none"),
    ((1, 2), 0, "fomaml", "llama", "fp32", "zero", "micro"),
    ((1, 2), 3, "fomaml", "llama", "bf16", "zero", "none"),
    ((2, 1), "plain", "fomaml", "bert", "fp32", "zero", "none"),
]
POOLED = [
    ((1, 2), 3, "anil", "zero", 1),
    ((1, 2), 2, "protonet", "prototype", 1),
    ((1, 2), 0, "anil", "learned", 2),  # stages
    ((2, 1), "plain", "anil", "prototype", 1),
]
CASES = [
    Case(layout, stage, algorithm, "several", "default", model, dtype, "sgd", head, extra, "multi_task")
    for layout, stage, algorithm, model, dtype, head, extra in ROWS
]
CASES += [
    Case(
        layout, stage, algorithm, "several", "default", "bert", "fp32", "sgd", head, "micro", "pooled", stages
    )
    for layout, stage, algorithm, head, stages in POOLED
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ParityFixture(tmp_path_factory.mktemp("multi_task"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [pytest.param((1, 2), marks=pytest.mark.slow), (2, 1)], ids=str)
def test_ends_where_the_oracle_ends(bench, layout):
    chosen = [case for case in CASES if case.layout == layout]
    outcomes = bench.run(chosen)
    errors = {case.id: bench.error(case, outcomes[case.id][0]) for case in chosen}
    assert {
        name: error
        for name, error in errors.items()
        if error >= tolerance(next(case for case in chosen if case.id == name))
    } == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["adapters", "heads"])
def test_zero_3_gathers_the_base_once_for_eight_tasks(kind, tmp_path):
    if kind == "adapters":
        model, data = save_llama(tmp_path / "llama"), write_pairs(tmp_path / "pairs.jsonl")
    else:
        model, data = save_bert(tmp_path / "bert"), write_classes(tmp_path / "rows.jsonl")
    ended = run_ranks(
        ["-m", "tests.support.scenarios", "gathers", str(model), str(data), kind], 2, timeout_s=560
    ).ok()
    for text in ended.output:
        found = re.search(r"gathers (\d+) (\d+) apart (\S+)", text)
        assert found, text[-2000:]
        single, pooled = int(found[1]), int(found[2])
        # passes of several tasks leave out the adapters' modules: DeepSpeed then gathers for the forward and
        # for the backward pass, and in passes of one task for both together
        assert 0 < {"adapters": 4, "heads": 8}[kind] * pooled <= single
        assert float(found[3]) < 1e-5
