"""The noise scale of the meta-gradient equals that of the oracle's gradients, task by task, on every kind of
layout; the outer rate is scaled by the meta-batch size.
"""

from dataclasses import replace

import pytest
import torch

from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from fmmeta.meta.noise_scale import NoiseScale
from fmmeta.meta.reference import reference_gradient, reference_run
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.load import load_sources
from tests.support.matrix import Case, ParityFixture, fast_and_slow_cases, tolerance

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
    description = describe(config)
    source = load_sources(config, load_tokenizer(config, description, print), print).train
    learner = load_learner(config, description).double()
    schedule = Schedule(source.items, config.meta_batch_size, config.seed)
    steps = [
        [source.draw(task).episode() for task in schedule.meta_batch(step)]
        for step in range(config.outer_steps)
    ]
    theta = {name: p.detach().clone() for name, p in learner.named_parameters() if p.requires_grad}
    found = []
    for episodes, after in zip(steps, reference_run(learner, steps, config).thetas, strict=True):
        tasks = [reference_gradient(learner, theta, one, config, False)[0] for one in episodes]
        shared = [name for name in theta if name not in learner.head_names]
        vectors = torch.stack([torch.cat([task[name].flatten() for name in shared]) for task in tasks])
        noise = float(vectors.var(0).sum())  # over tasks, divided by their number minus one
        found.append((float(vectors.mean(0).square().sum()) - noise / len(tasks), noise))
        theta = after
    return found


FAST = [case for case in CASES if case.layout[1] == 1]


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
    wanted, smoothed = oracle(bench, case), NoiseScale()
    for step, line in enumerate(lines):
        assert line["gradient_square"] == pytest.approx(wanted[step][0], rel=1e-3, abs=1e-5 * wanted[step][1])
        assert line["gradient_variance"] == pytest.approx(wanted[step][1], rel=1e-3)
    for signal, noise in wanted:
        smoothed.signal += signal / len(wanted)
        smoothed.noise += noise / len(wanted)
    assert lines[-1]["noise_scale"] == pytest.approx(smoothed.tasks, rel=2e-3, nan_ok=True) or (
        smoothed.signal <= 0 and lines[-1]["noise_scale"] is None
    )
