"""What a run says about its gain: in words, over how many classes or tasks, and what to do."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from fmmeta import Config, MetaTrainer
from fmmeta.metrics.scores import EpisodeScore
from fmmeta.training.final import BaselineLoop, compare, verdict_of
from tests.support.messages import check_message
from tests.support.models import write_classes, write_pairs

UNITS = 20
AFTER = [0.5 + 0.02 * (unit % 5) for unit in range(2 * UNITS)]  # accuracies of two episodes of each


def text_of(gain: float, units: int = UNITS, kind: str = "class", spread: float = 0.02, **settings) -> Any:
    """The verdict on `gain` in accuracy and in loss, in two episodes of each of `units`."""
    trained, started = (
        [
            EpisodeScore(slot, f"u{slot % units}", "", [2.0, 1 - value], [0.2, value])
            for slot, value in enumerate(values)
        ]
        for values in (
            AFTER,
            [value - gain + spread * (-1) ** slot for slot, value in enumerate(AFTER)],
        )
    )
    sources: Any = SimpleNamespace(train=SimpleNamespace(kind=kind, items=range(12)))
    compared = compare(trained, started, BaselineLoop(1.0, 0), kind)
    return verdict_of(compared, Config(k_shot=5, **settings), sources)


@pytest.mark.parametrize(
    ("gain", "name", "said", "todo"),
    [
        (0.1, "better", "better than the weights at the start at 5 shots: +10.0 ±", "exported weights"),
        (0.0, "no significant difference", "not distinguishable from the weights at the start", "classes"),
        (-0.1, "worse", "worse than the weights at the start at 5 shots: -10.0 ±", "fewer --outer_steps"),
    ],
)
def test_the_verdict_follows_the_interval(gain, name, said, todo):
    found = text_of(gain)
    assert found["name"] == name
    check_message(found["text"], said, todo, "over 20 classes, 40 episodes")
    assert "hold out" not in found["text"]


def test_fewer_than_fifteen_classes_or_tasks_say_little_about_others():
    assert "14 classes say little about others; hold out 15 or more" in text_of(0.1, 14)["text"]
    assert "say little" not in text_of(0.1, 15)["text"]
    text = text_of(0.1, 3, "task", task_type="causal_lm", dataset=["x.jsonl"])["text"]
    check_message(text, "+0.1000 ±", "nats (over 3 tasks, 40 episodes)", "3 tasks say little")


def test_repeated_episodes_of_a_task_are_no_more_tasks():
    """Two of four tasks gain 0.2 and two lose 0.1 in each of ten episodes: by episodes alone it is better."""
    trained, started = (
        [
            EpisodeScore(slot, f"u{slot % 4}", "", [1.0, 1.0], [0.2, 0.5 + (slot % 4 < 2) * gain])
            for slot in range(40)
        ]
        for gain in (0.3, 0.0)
    )
    for score in started:
        score.accuracies[-1] += 0.1
    sources: Any = SimpleNamespace(train=SimpleNamespace(kind="task", items=range(12)))
    compared = compare(trained, started, BaselineLoop(1.0, 0), "task")
    assert compared.gain[0][0] == pytest.approx(0.05)
    assert verdict_of(compared, Config(), sources)["name"] == "no significant difference"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"init_interpolation": 1.0, "test_episodes": 0}, "test_episodes=0; give 100, say"),
        ({"n_way": 8}, "all 12 classes are trained on and none is held out; give 24 classes or more"),
    ],
)
def test_a_run_without_a_table_says_why(settings, why):
    sources: Any = SimpleNamespace(train=SimpleNamespace(kind="class", items=range(12)))
    found = verdict_of(None, Config(**settings), sources)
    assert found["name"] == ""
    check_message(found["text"], "no comparison with the weights at the start: ", why)


def test_a_single_task_and_a_loss_that_diverged_have_no_verdict():
    assert "one of the tasks is in all episodes, so there is no interval" in text_of(0.1, 1, "task")["text"]
    causal = {"task_type": "causal_lm", "dataset": ["x.jsonl"]}
    assert "a loss is not finite" in text_of(float("inf"), kind="task", **causal)["text"]


@pytest.mark.parametrize("kind", ["classification", "causal_lm"])
def test_log_report_card_and_result_have_the_same_verdict(kind, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    settings: dict[str, Any] = {"n_way": 2, "inner_steps": 1}
    if kind == "classification":
        write_classes(data)
    else:
        write_pairs(data)
        settings = {"task_type": kind}
    result = MetaTrainer(
        Config(
            dataset=[str(data)],
            output_dir=str(tmp_path / "run"),
            k_shot=2,
            num_query=3,
            outer_steps=1,
            eval_episodes=4,
            save_steps=0,
            **settings,
        )
    ).train()
    stored = json.loads((tmp_path / "run/run.json").read_text())["held_out"]
    assert result.verdict == stored["verdict"]["text"]
    assert f"verdict: {result.verdict}\n" in capsys.readouterr().out
    assert "the weights at the start" in result.verdict
    card = (tmp_path / "run/model/README.md").read_text().replace("\\", "")
    assert f"| verdict | {result.verdict} |" in card
    page = (tmp_path / "run/report.html").read_text()
    look = {"better": "better", "worse": "worse"}.get(stored["verdict"]["name"], "same")
    assert f'<p class="verdict {look}">Verdict: {result.verdict}.</p>' in page
    assert re.search(rf'<div class="hero {look}"><b>.*gain', page)
