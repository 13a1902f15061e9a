"""The gradient noise scale by hand, its smoothing, its state, and how a run shows it."""

import json
import math

import pytest
import torch

from fmmeta import Config, MetaTrainer
from fmmeta.meta.noise_scale import DECAY, NoiseScale, TaskSquares, estimates
from tests.support.models import write_classes
from tests.support.short_runs import QUICK


def squares_of(gradients: torch.Tensor, weights: torch.Tensor) -> tuple[TaskSquares, float]:
    """The sums of gradients [B, S] with weights [B], and the norm of their weighted mean."""
    mean = (weights[:, None] * gradients).sum(0) / weights.sum()
    square = float((weights * gradients.square().sum(1)).sum())
    return TaskSquares(float(weights.sum()), float(weights.square().sum()), square), float(mean.norm())


@pytest.mark.parametrize("weights", [[1.0] * 8, [0.5, 1, 2, 4, 1, 1, 3, 0.25]])
def test_estimates_are_unbiased_for_equal_and_unequal_weights(weights):
    """Gradients with a mean of squared norm 3 and a covariance of trace 12, 4,000 times."""
    generator = torch.Generator().manual_seed(3)
    mean, deviation = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([2.0, 2.0, 2.0])
    found = torch.tensor(
        [
            estimates(
                *squares_of(
                    mean + deviation * torch.randn(8, 3, generator=generator, dtype=torch.float64),
                    torch.tensor(weights, dtype=torch.float64),
                )
            )
            for _ in range(4000)
        ]
    )
    error = found.std(0) / 4000**0.5
    assert ((found.mean(0) - torch.tensor([3.0, 12.0])).abs() < 4 * error).all()
    assert (error < 0.15).all()


def test_the_ratio_of_averages_is_smoothed_and_continues_from_its_state():
    noise = NoiseScale()
    assert math.isnan(noise.tasks)
    noise.add(TaskSquares(2.0, 2.0, 10.0), 2.0)  # |G|^2 = 3, tr(Sigma) = 2
    assert noise.tasks == pytest.approx(2 / 3)
    noise.add(TaskSquares(2.0, 2.0, 8.0), 2.0)  # 4 and 0: the first steps are a plain mean
    assert (noise.signal, noise.noise, noise.tasks) == pytest.approx((3.5, 1.0, 1 / 3.5))
    for empty in (TaskSquares(0.0, 0.0, 0.0), TaskSquares(1.0, 1.0, 4.0)):  # none, one task
        noise.add(empty, 2.0)
        assert math.isnan(noise.values["gradient_square"])
    noise.add(TaskSquares(2.0, 2.0, 8.0), math.nan)
    assert noise.count == 2
    again = NoiseScale(noise.state)
    for _ in range(2000):
        again.add(TaskSquares(2.0, 2.0, 10.0), 2.0)
    assert again.tasks == pytest.approx(2 / 3, rel=DECAY**1900)


def test_a_mean_hidden_by_noise_suggests_no_number():
    noise = NoiseScale()
    noise.add(TaskSquares(2.0, 2.0, 20.0), 1.0)  # |G|^2 = 2 - 10 < 0
    assert math.isnan(noise.tasks)
    assert "hides the mean gradient; use more tasks" in noise.advice(2)
    assert "makes 25 %" in NoiseScale([1.0, 12.0, 1]).advice(4)


@pytest.mark.timeout(120)
def test_a_run_logs_reports_and_stores_it(tmp_path, capsys):
    config = Config(
        **{**QUICK, "num_workers": "0"},
        dataset=[str(write_classes(tmp_path / "classes.jsonl"))],
        output_dir=str(tmp_path / "run"),
        outer_steps=3,
        gradient_noise_scale=True,
    )
    assert all("noise_scale" in line for line in MetaTrainer(config).train().log_history)
    assert "noise scale" in capsys.readouterr().out
    assert ">noise scale</th>" in (tmp_path / "run" / "report.html").read_text()
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "state.json").read_text())
    assert state["noise_scale"][2] == 3


@pytest.mark.parametrize(
    ("optimizer", "base", "tasks", "steps", "factor"),
    [
        ("sgd", 4, 8, 1, 2.0),
        ("nesterov", 4, 2, 1, 0.5),
        ("adamw", 4, 8, 2, 2.0),
        ("adamw", None, 8, 1, 1.0),
    ],
)
def test_the_outer_rate_is_scaled_by_the_tasks_of_an_outer_step(optimizer, base, tasks, steps, factor):
    config = Config(
        outer_optimizer=optimizer,
        base_meta_batch_size=base,
        meta_batch_size=tasks,
        meta_accumulation_steps=steps,
    )
    assert config.outer_lr_factor == pytest.approx(factor)
