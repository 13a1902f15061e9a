"""A model spread over a group by layers ends where the oracle ends, and comes back from its folder as plain
transformers.
"""

import os

import pytest
import torch

from tests.support.matrix import (
    Case,
    Launches,
    ParityFixture,
    assert_export_gives_logits,
    fast_and_slow_cases,
    kind_of,
    selected,
    spread,
    spread_cover,
    spread_diagonal,
    tolerance,
)

CHOSEN = spread() if os.environ.get("FMMETA_PARITY") == "full" else spread_cover()


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ParityFixture(tmp_path_factory.mktemp("spread"))


@pytest.fixture(scope="module")
def outcomes(request, bench):
    """theta and facts by case; the cases of a layout and kind run in one launch (DeepSpeed keeps the first
    kind's groups).
    """
    return Launches(bench, selected(request), kind_of).outcome


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", fast_and_slow_cases(spread_diagonal(), CHOSEN, kind_of))
def test_ends_where_the_oracle_ends_and_exports_to_transformers(case: Case, bench, outcomes):
    theta, facts = outcomes(case)
    assert bench.error(case, theta) < tolerance(case)
    assert (
        facts["start_off"] == 0
    )  # every stage holds the checkpoint's weights, also where a new head is drawn
    assert case.tensor == 1 or not facts["mapped"]  # nor is the whole checkpoint kept in memory
    assert facts["engine"] == ("PipelineWorker" if case.stages > 1 else "DeepSpeedWorker")
    assert facts["effects"] == {
        name: value
        for name, value in case.settings.items()
        if name not in ("lora_target_modules", "peft_config")
    }
    assert "group" in facts["checked"] or torch.cuda.is_available()  # under NCCL's rules
    if case.export:
        assert_export_gives_logits(bench, case, theta)
