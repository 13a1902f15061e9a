"""Files that a run writes are strict JSON, whatever numbers are in them, and the run reads them again."""

import json
import math
from typing import Any

import pytest
import torch

from fmmeta.config.settings import Config
from fmmeta.meta.parameters import MetaParameters, StateDict
from fmmeta.report import page
from fmmeta.train import train
from fmmeta.training.run_files import Metrics
from fmmeta.training.state import Best
from fmmeta.training.trackers import flat


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_lines_of_metrics(tmp_path):
    metrics = Metrics(tmp_path, 0, True)
    metrics.write({"step": 1, "query_loss": math.nan, "wait_seconds_by_group": [0.5, math.inf]})
    metrics.write({"step": 2, "valid_loss": -math.inf, "valid_accuracy": 0.5})
    first, second = (strict_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == {"step": 1, "query_loss": None, "wait_seconds_by_group": [0.5, None]}
    assert second == {"step": 2, "valid_loss": None, "valid_accuracy": 0.5}
    assert [flat(line) for line in (first, second)] == [
        {"step": 1, "wait_seconds_by_group/0": 0.5},
        {"step": 2, "valid_accuracy": 0.5},
    ]
    assert Metrics(tmp_path, 1, True).last == (1, 1)


def best_of(*validations: tuple[float, float], rates=None) -> Best:
    """The best weights after steps of (accuracy, loss)."""
    best = Best(MetaParameters(torch.zeros(2), rates))
    for step, (accuracy, loss) in enumerate(validations, 1):
        best.update(best.live, step, accuracy, loss)
    return best


def resumed(best: Best, rates=None) -> Best:
    """As a run reads the best weights back from its files."""
    state = StateDict()
    best.add_state(state)
    text = json.dumps(state.facts["best"]).replace("Infinity", "null").replace("NaN", "null")
    state.facts["best"] = strict_json(text)
    found = Best(MetaParameters(torch.zeros(2), rates))
    found.load_state(state)
    return found


def test_a_nonfinite_loss_is_the_worst_also_after_a_resume():
    best = best_of((0.5, math.nan))
    for one in (best, resumed(best)):
        one.update(one.live, 2, 0.5, math.inf)
        assert one.step == 1
        one.update(one.live, 3, 0.5, 7.0)
        assert one.step == 3


def test_of_equal_accuracies_the_lower_loss_is_the_best():
    best = best_of((0.5, 1.0), (0.5, 2.0), (0.5, 0.9), (0.4, 0.1))
    assert (best.step, best.loss) == (3, 0.9)


@pytest.mark.parametrize(
    ("rates", "kept"), [(None, False), (torch.ones(3, 1), False), (torch.ones(2, 1), True)]
)
def test_the_best_weights_with_rates_of_another_shape_are_forgotten(rates, kept):
    """The score of a validation with other learned rates is no bound for those to come."""
    found = resumed(best_of((0.5, 0.1), rates=torch.zeros(2, 1)), rates)
    assert (found.meta_params is not None, found.accuracy == 0.5) == (kept, kept)


def test_all_files_of_a_run_are_strict_and_an_infinite_setting_is_no_change_on_resume(tmp_path):
    """One held-out episode has no interval, and an inner loop of such steps no finite loss."""
    run = tmp_path / "run"
    every_step = {"eval_steps": 1, "eval_episodes": 1, "save_steps": 1, "logging_steps": 1}
    steps = {"outer_steps": 2, "inner_steps": 2, "inner_lr": 1e30, "meta_batch_size": 1, "max_bad_steps": 9}
    best = {"load_best_model_at_end": True, "num_workers": "0", "mix_temperature": math.inf}
    config = Config(output_dir=str(run), **every_step, **steps, **best)
    train(config)
    files = [file for end in ("json", "jsonl") for file in run.rglob(f"*.{end}")]
    names = {"run.json", "metrics.jsonl", "state.json", "manifest.json", "fmmeta.json"}
    assert names <= {file.name for file in files}
    for file in files:
        for text in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            strict_json(text)
    assert '"query_loss": null' in (run / "metrics.jsonl").read_text()
    assert "Infinity" not in page.write(run).read_text()
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "finished": False}))
    assert train(config).output_dir == run
