"""Inner steps on samples of the support set end where the oracle ends, on every kind of layout."""

import pytest

from tests.support.matrix import Case, ParityFixture, fast_and_slow_cases, tolerance

ROWS = [  # layout, stage, algorithm, model, dtype, head, pipeline stages
    ((1, 1), "plain", "fomaml", "llama", "fp32", "zero", 1),
    ((1, 1), "plain", "reptile", "bert", "fp32", "learned", 1),
    ((2, 1), "plain", "fomaml", "bert", "fp32", "prototype", 1),
    ((2, 1), 2, "reptile", "llama", "fp32", "zero", 1),
    ((1, 2), 2, "fomaml-rates", "bert", "fp32", "zero", 1),
    ((1, 2), 3, "fomaml", "llama", "bf16", "zero", 1),
    ((1, 2), 0, "fomaml", "llama3", "fp32", "zero", 2),  # last: DeepSpeed keeps the grid of a pipeline
]
CASES = [
    Case.of_row(layout, stage, algorithm, model, dtype, "sgd", head, "sampled", stages, groups="one")
    for layout, stage, algorithm, model, dtype, head, stages in ROWS
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ParityFixture(tmp_path_factory.mktemp("sampled"))


FAST = [case for case in CASES if case.layout[1] == 1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", fast_and_slow_cases(FAST, CASES, CASES.index))
def test_ends_where_the_oracle_ends(case, bench):
    theta, _ = bench.outcome(case, CASES)
    assert bench.error(case, theta) < tolerance(case)
