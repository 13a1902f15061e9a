"""The layout does not change the result: every case of the matrix ends where the oracle ends."""

import itertools
import os

import pytest
import torch

from tests.support.matrix import (
    AXES,
    LAYOUTS,
    Case,
    Launches,
    ParityFixture,
    cases,
    diagonal,
    fast_and_slow_cases,
    full,
    pairs,
    pairwise,
    selected,
    tolerance,
)

CHOSEN = full() if os.environ.get("FMMETA_PARITY") == "full" else pairwise()
WRAPPERS = {
    "plain": None,
    0: "ShardOptimizer",
    1: "DeepSpeedZeroOptimizer",
    2: "DeepSpeedZeroOptimizer",
    3: "DeepSpeedZeroOptimizer_Stage3",
}


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Error and facts of every chosen case, each layout run once for all its cases."""
    bench = ParityFixture(tmp_path_factory.mktemp("parity"))
    launches = Launches(bench, selected(request), lambda case: case.layout)

    def outcome(case: Case):
        theta, facts = launches.outcome(case)
        return bench.error(case, theta), facts

    return outcome


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case", fast_and_slow_cases(diagonal(), CHOSEN, lambda case: LAYOUTS.index(case.layout))
)
def test_ends_where_the_oracle_ends(case, outcomes):
    error, facts = outcomes(case)
    assert error < tolerance(case)
    assert facts["start_off"] == 0  # the masters are the checkpoint's weights, not a rounded copy
    assert facts["engine"] == ("PlainWorker" if case.stage == "plain" else "DeepSpeedWorker")
    assert facts["effects"] == case.settings  # none was ignored
    # also after a ZeRO 3 case of the same process, which replaces it
    assert facts["linear"] == ("zero3_linear_wrap" if case.stage == 3 else "linear")
    several = {name for name, size in zip(("cross", "group"), case.layout, strict=True) if size > 1}
    assert several <= set(facts["checked"]) or torch.cuda.is_available()  # under NCCL's rules
    if case.dtype == "fp32":
        assert facts["wrapper"] == WRAPPERS[case.stage]


def test_the_cover_holds_every_pair():
    everything, covered = ({pair for case in some for pair in pairs(case)} for some in (cases(), pairwise()))
    assert everything == covered
    assert len(everything) > len(pairwise()) > 0


def test_the_full_matrix_holds_every_axis_value():
    listed = full()
    assert len(listed) == len({case.id for case in listed})
    for layout, stage, algorithm, model in itertools.product(
        LAYOUTS, (0, 1, 2, 3), ("fomaml", "reptile"), ("llama", "bert")
    ):
        found = [
            c
            for c in listed
            if (c.layout, c.stage, c.algorithm, c.model) == (layout, stage, algorithm, model)
        ]
        assert {c.dtype for c in found} == {"fp32", "bf16"}
        assert {c.groups for c in found} == {"one", "several"}
    everything = set(
        itertools.product(AXES["stage"], AXES["also"], AXES["dtype"])
    )  # the salt of full() is chosen for this
    assert {(c.stage, c.also, c.dtype) for c in listed} == everything
