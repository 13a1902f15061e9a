"""The noise scale of the meta-gradient equals that of the oracle's gradients, task by task, on every kind of
layout; the outer rate is scaled by the meta-batch size.
"""

from dataclasses import replace

import pytest
import torch

from fmmeta.config.settings import Config
from fmmeta.meta.noise_scale import NoiseScale
from fmmeta.meta.reference import reference_gradient, reference_run
from tests.support.matrix import Case, ParityFixture, fast_and_slow_cases, oracle_inputs, tolerance

ROWS = [  # layout, stage, algorithm, model, head, also, pipeline stages (-T: tensor ranks)
    ((1, 1), "plain", "fomaml", "bert", "zero", "measured", 1),
    ((1, 1), "plain", "reptile", "llama", "zero", "measured", 1),
    ((1, 1), "plain", "fomaml", "bert", "learned", "scaled", 1),
    ((2, 1), "plain", "fomaml", "llama", "zero", "measured-tasks", 1),
    ((2, 1), 2, "fomaml", "bert", "zero", "measured", 1),
    ((2, 1), "plain", "fomaml-rates", "bert", "zero", "scaled", 1),
    ((1, 2), 0, "fomaml", "bert", "zero", "measured", 1),
    ((1, 2), 1, "reptile", "llama", "zero", "measured", 1),
    ((1, 2), 3, "fomaml", "bert", "zero", "measured", 1),
    ((1, 2), 0, "fomaml", "llama3", "zero", "measured", -2),
    ((1, 2), 0, "fomaml", "llama3", "zero", "measured", 2),  # last: DeepSpeed keeps the grid of a pipeline
]
CASES = [
    Case.of_row(layout, stage, algorithm, model, "fp32", "sgd", head, also, spread)
    for layout, stage, algorithm, model, head, also, spread in ROWS
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ParityFixture(tmp_path_factory.mktemp("noise"))


def oracle(bench: ParityFixture, case: Case) -> list[tuple[float, float]]:
    """|G|^2 and tr(Sigma) of every outer step, from the gradient of each task by itself."""
    config = Config(**bench.settings(case))
    learner, theta, steps = oracle_inputs(config)
    found = []
    for episodes, after in zip(steps, reference_run(learner, steps, config).thetas, strict=True):
        tasks = [reference_gradient(learner, theta, one, config, False)[0] for one in episodes]
        shared = [name for name in theta if name not in learner.head_names]
        vectors = torch.stack([torch.cat([task[name].flatten() for name in shared]) for task in tasks])
        noise = float(vectors.var(0).sum())  # over tasks, divided by their number minus one
        found.append((float(vectors.mean(0).square().sum()) - noise / len(tasks), noise))
        theta = after
    return found


FAST = [case for case in CASES if case.layout == (2, 1)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", fast_and_slow_cases(FAST, CASES, CASES.index))
def test_the_estimates_are_those_of_the_oracle_and_theta_is_as_without_them(case, bench):
    theta, _ = bench.outcome(case, CASES)
    assert bench.error(case, theta) < tolerance(case)
    lines = bench.lines(case)
    if "scaled" in case.also:
        unscaled = bench.settings(replace(case, also="nothing"))["outer_lr"]
        assert [line["lr"] for line in lines] == pytest.approx([0.0, unscaled / 2, unscaled / 4])
        return
    wanted = oracle(bench, case)
    for line, (square, variance) in zip(lines, wanted, strict=True):
        assert line["gradient_square"] == pytest.approx(square, rel=1e-3, abs=1e-5 * variance)
        assert line["gradient_variance"] == pytest.approx(variance, rel=1e-3)
    smoothed = NoiseScale([sum(each) / len(each) for each in zip(*wanted, strict=True)] + [len(wanted)])
    assert lines[-1]["noise_scale"] == pytest.approx(smoothed.tasks, rel=2e-3, nan_ok=True) or (
        smoothed.signal <= 0 and lines[-1]["noise_scale"] is None
    )
