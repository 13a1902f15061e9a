"""--reduce_dtype bf16 halves the bytes across groups, and ends near the oracle."""

import pytest

from tests.support.matrix import Case, ParityFixture, fast_and_slow_cases

CASES = [  # layout, stage, algorithm, model, dtype, outer, head, also, pipeline stages
    Case.of_row((2, 1), "plain", "fomaml", "llama", "fp32", "sgd", "zero", "wire", 1),
    Case.of_row((2, 2), 3, "fomaml", "llama", "fp32", "sgd", "zero", "wire", 1),
]
FAR = 0.05  # 8 bits of the sum, and the steps that follow from it


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ParityFixture(tmp_path_factory.mktemp("reduce_dtype"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", fast_and_slow_cases(CASES[:1], CASES, CASES.index))
def test_the_meta_gradient_is_reduced_in_bf16(case, bench):
    theta, facts = bench.outcome(case, CASES)
    assert 1e-5 < bench.error(case, theta) < FAR
    assert facts["effects"] == case.settings
    if case.layout == (2, 1):
        assert [line["comm_bytes"] for line in bench.lines(case)] == [2 * facts["numel"]] * 3
