"""What a run does after its last outer step: held-out episodes, also where a signal stops them, the confusion
matrix of the first, and the verdict: in words, over how many classes or tasks, and what to do.
"""

import itertools
import json
import math
import re
import signal
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fmmeta import Callback, Config, MetaTrainer
from fmmeta.common.errors import Stopped
from fmmeta.common.progress import Progress
from fmmeta.learners.tiny import byte_tokenizer
from fmmeta.meta.inner_loop import InnerLoop
from fmmeta.metrics.scores import EpisodeScore
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World
from fmmeta.reliability.signals import Signals
from fmmeta.training import build, final
from fmmeta.training.final import BaselineLoop, compare, confusion, verdict_of
from fmmeta.training.scoring import FINISHED, TEST, HeldOut, Scoring
from tests.support.messages import check_message
from tests.support.models import write_classes, write_pairs
from tests.support.plain import PlainClassifier
from tests.support.short_runs import metrics_of

UNITS = 20
CAUSAL = {"task_type": "causal_lm", "dataset": ["x.jsonl"]}


def verdict(gains, units, kind="class", **settings) -> Any:
    """What a run says whose model gains this much accuracy, and as much in loss, in each episode."""
    after = [0.5 + 0.02 * (slot % 5) for slot in range(len(gains))]
    before = [value - gain for value, gain in zip(after, gains, strict=True)]
    trained, started = (
        [
            EpisodeScore(slot, f"u{slot % units}", "", [2.0, 1 - value], [0.2, value])
            for slot, value in enumerate(values)
        ]
        for values in (after, before)
    )
    compared = compare(trained, started, BaselineLoop(1.0, 0), kind)
    return verdict_of(compared, Config(k_shot=5, **settings), sources_of(kind))


def sources_of(kind) -> Any:
    return SimpleNamespace(train=SimpleNamespace(kind=kind, items=range(12)))


def text_of(gain: float, units: int = UNITS, kind: str = "class", **settings) -> Any:
    """The verdict on `gain`, a bit more and less in turn, in forty episodes."""
    return verdict([gain - 0.02 * (-1) ** slot for slot in range(2 * UNITS)], units, kind, **settings)


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


@pytest.mark.parametrize(
    ("gain", "units", "kind", "settings", "parts"),
    [
        (0.1, 14, "class", {}, ["14 classes say little about others; hold out 15 or more"]),
        (0.1, 3, "task", CAUSAL, ["+0.1000 ±", "nats (over 3 tasks, 40 episodes)", "3 tasks say little"]),
        (0.1, 1, "task", {}, ["one of the tasks is in all episodes, so there is no interval"]),
        (math.inf, UNITS, "task", CAUSAL, ["a loss is not finite"]),
    ],
)
def test_the_verdict_says_what_little_it_knows(gain, units, kind, settings, parts):
    check_message(text_of(gain, units, kind, **settings)["text"], *parts)
    assert "say little" not in text_of(0.1, 15)["text"]


def test_repeated_episodes_of_a_task_are_no_more_tasks():
    """Two of four tasks gain 0.2 and two lose 0.1 in each of ten episodes: by episodes alone it is better."""
    gains = [0.2, 0.2, -0.1, -0.1] * 10
    assert verdict(gains, 4, "task")["name"] == "no significant difference"
    assert verdict(gains, 40, "task")["name"] == "better"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"init_interpolation": 1.0, "test_episodes": 0}, "test_episodes=0; give 100, say"),
        ({"n_way": 8}, "all 12 classes are trained on and none is held out; give 24 classes or more"),
    ],
)
def test_a_run_without_a_table_says_why(settings, why):
    found = verdict_of(None, Config(**settings), sources_of("class"))
    assert found["name"] == ""
    check_message(found["text"], "no comparison with the weights at the start: ", why)


@pytest.mark.parametrize(
    ("write", "settings"),
    [(write_classes, {"n_way": 2, "inner_steps": 1}), (write_pairs, {"task_type": "causal_lm"})],
)
def test_log_report_card_and_result_have_the_same_verdict(write, settings, tmp_path, capsys):
    data, run = str(write(tmp_path / "rows.jsonl")), tmp_path / "run"
    few = {"k_shot": 2, "num_query": 3, "outer_steps": 1, "eval_episodes": 4, "save_steps": 0}
    result = MetaTrainer(Config(dataset=[data], output_dir=str(run), **few, **settings)).train()
    stored = json.loads((run / "run.json").read_text())["held_out"]["verdict"]
    assert result.verdict == stored["text"]
    assert f"verdict: {result.verdict}\n" in capsys.readouterr().out
    assert "the weights at the start" in result.verdict
    assert f"| verdict | {result.verdict} |" in (run / "model/README.md").read_text().replace("\\", "")
    page = (run / "report.html").read_text()
    look = stored["name"] if stored["name"] in ("better", "worse") else "same"
    assert f'<p class="verdict {look}">Verdict: {result.verdict}.</p>' in page
    assert re.search(rf'<div class="hero {look}"><b>.*gain', page)


def held_out_of(config: Config) -> tuple[HeldOut, Any, build.Runtime]:
    """The held-out evaluation, its source and the runtime of a run before its first outer step."""
    world, messages = World(Launch(), torch.device("cpu")), []
    inputs = build.read_inputs(config, world, messages.append)
    plan = build.plan_parallel(config, inputs, world, messages.append)
    ranks = world.split(plan.group_size, plan.engine == "deepspeed")
    parts = build.build(config, inputs, plan, ranks)
    scoring = Scoring(parts.worker, ranks, Progress(enabled=False))
    return HeldOut(config, scoring, parts.load), inputs.sources.test, parts


def test_counts_equal_those_of_a_plain_loop(bert, classes):
    """The report's confusion matrix is that of the first held-out episode."""
    tasks = {"n_way": 3, "n_way_max": 4, "k_shot": 1, "num_query": 4, "eval_episodes": 6, "seed": 3}
    loop = {"inner_lr": 0.05, "inner_steps": 2, "micro_batch_size": 5}
    config = Config(model_name_or_path=str(bert), dataset=[str(classes)], **tasks, **loop)
    held_out, source, parts = held_out_of(config)
    theta = parts.meta_params.theta.clone()
    found = confusion(held_out, source, parts.meta_params.theta, parts.setup.evaluation_method())
    assert torch.equal(parts.worker.read(), theta)  # as it was
    episode = source.draw(held_out.tasks(source, TEST)[0]).episode()
    (support, labels), (query, truth) = (
        (
            byte_tokenizer().pad({"input_ids": [row.input_ids for row in rows]}, return_tensors="pt"),
            torch.tensor([row.labels for row in rows]),
        )
        for rows in (episode.support, episode.query)
    )
    model = PlainClassifier(bert, len(episode.classes))
    model.learn(support, labels, [0.05] * 2)
    counts = torch.zeros(len(episode.classes), len(episode.classes), dtype=torch.long)
    for right, answer in zip(truth, model(query).argmax(1), strict=True):
        counts[right, answer] += 1
    task = {"task": episode.task.name, "stratum": episode.task.stratum}
    assert found == {**task, "classes": [*episode.classes], "counts": counts.tolist()}
    assert (counts.sum(1) == 4).all()
    assert (counts.sum(0) > 0).sum() > 1  # not one answer to everything
    assert not counts.equal(counts.T)


def test_language_models_have_no_confusion(tmp_path, llama):
    data = [str(write_pairs(tmp_path / "pairs.jsonl"))]
    few = {"k_shot": 2, "num_query": 2, "eval_episodes": 2}
    config = Config(model_name_or_path=str(llama), dataset=data, task_type="causal_lm", **few)
    held_out, source, parts = held_out_of(config)
    found = confusion(held_out, source, parts.meta_params.theta, parts.setup.evaluation_method())
    assert found.keys() == {"left_out"}
    check_message(found["left_out"], "task_type=causal_lm", "not classes")


VARIANTS = {
    "last weights": {},
    "best, interpolated, learned rates": {
        "load_best_model_at_end": True,
        "eval_steps": 1,
        "init_interpolation": 0.75,
        "inner_lr_learned": "layer",
        "inner_lr_outer_lr": 0.05,
    },
}


FIXED = {
    "k_shot": 1,
    "num_query": 2,
    "n_way": 3,
    "outer_steps": 3,
    "meta_batch_size": 2,
    "inner_steps": 1,
    "outer_lr": 0.05,
    "lr_scheduler_type": "constant",
    "save_steps": 0,
    "eval_episodes": 3,
    "test_episodes": 3,
}


@pytest.fixture
def config_of(bert, classes, tmp_path):
    def make(name: str, **settings) -> Config:
        given = {"model_name_or_path": str(bert), "dataset": [str(classes)], **FIXED, **settings}
        return Config(output_dir=str(tmp_path / name), **given)

    return make


def scored_by(config: Config, stop_at: int | None = None, why: str = "the same command", callbacks=()) -> int:
    """Train, and count held-out episodes; a signal in the episode `stop_at` ends the run."""
    signals, numbers = Signals(leave=lambda code: None), itertools.count(1)

    def counting(original):
        def scoring(*args, **kwargs):
            if next(numbers) == stop_at:
                signals.receive("SIGTERM", 128 + signal.SIGTERM)
            return original(*args, **kwargs)

        return scoring

    with pytest.MonkeyPatch.context() as patch:
        for name in ("score", "scores_after_each_step"):
            patch.setattr(InnerLoop, name, counting(getattr(InnerLoop, name)))
        with pytest.raises(Stopped, match=why) if stop_at else nullcontext():
            MetaTrainer(config, signals, callbacks).train()
    return next(numbers) - 1


def exported(folder) -> dict[str, bytes]:
    """The files of the model by name; the name of the run is left out of its card."""
    files = {file.name: file.read_bytes() for file in sorted((folder / "model").iterdir())}
    return {**files, "README.md": files["README.md"].replace(folder.name.encode(), b"")}


def train(config: Config, *callbacks: Callback) -> Any:
    return MetaTrainer(config, callbacks=[*callbacks]).train()


def table_of(folder) -> dict:
    return json.loads((folder / "run.json").read_text())["held_out"]


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_stop_in_the_final_evaluation_keeps_the_trained_model(config_of, tmp_path, settings):
    """The signal arrives in the first, a middle and the last pass; only the stop saves a checkpoint."""
    whole = scored_by(config_of("whole", **settings))
    confused, rates = 1, len(final.SCALES)
    for number in (whole - 3 * rates - 3 - confused - 2, whole - 4, whole):
        name = f"stopped-{number}"
        stopped, again = (scored_by(config_of(name, **settings), stop_at) for stop_at in (number, None))
        for part in (exported, table_of):
            assert part(tmp_path / name) == part(tmp_path / "whole")
        assert stopped + again - whole <= confused  # no finished episode was scored twice
        assert not (tmp_path / name / FINISHED).exists()


def test_finished_episodes_of_other_data_are_not_used(config_of, classes, tmp_path):
    """The rows of the same classes change between the stop in the last episode and the second run."""
    data = tmp_path / "rows.jsonl"
    data.write_text(classes.read_text())
    given: dict[str, Any] = {"dataset": [str(data)]}
    whole = scored_by(config_of("whole", **given))
    scored_by(config_of("run", **given), whole)
    data.write_text(data.read_text().replace('"text": "', '"text": "another '))
    given["accept_changed_settings"] = ["dataset_fingerprint"]
    assert scored_by(config_of("run", **given)) == whole


def test_stop_in_a_validation_repeats_the_validation(config_of, tmp_path):
    """The best weights then equal those of an undisturbed run."""
    settings = {"load_best_model_at_end": True, "eval_steps": 1, "test_episodes": 0, "eval_episodes": 4}
    train(config_of("whole", **settings))
    lines = metrics_of(tmp_path / "whole")
    validated = [(line["valid_accuracy"], -line["valid_loss"]) for line in lines if "valid_loss" in line]
    best = max(range(3), key=lambda step: validated[step])
    scored_by(config_of("stopped", **settings), 4 * best + 2)
    train(config_of("stopped", **settings))
    assert exported(tmp_path / "stopped") == exported(tmp_path / "whole")


class EndsEarly(Callback):
    """Ends the run after its second outer step."""

    def on_step_end(self, run, outcome):
        run.ends_early = run.state.outer_step == 2


@pytest.mark.parametrize("save_steps", [0, 1])
def test_a_run_ended_by_a_callback_stays_ended(config_of, tmp_path, save_steps):
    """A stop in its final evaluation and a second run give the model of an undisturbed run, whose card names
    the steps that were done; more --outer_steps continue it.
    """
    settings: dict[str, Any] = {"outer_steps": 4, "save_steps": save_steps}
    train(config_of("whole", **settings), EndsEarly())
    scored_by(config_of("stopped", **settings), 2, "after outer step 2", [EndsEarly()])
    assert train(config_of("stopped", **settings), EndsEarly()).outer_steps == 2
    assert exported(tmp_path / "stopped") == exported(tmp_path / "whole")
    assert b"2 steps of adamw" in exported(tmp_path / "whole")["README.md"].lower()
    settings |= {"outer_steps": 5, "accept_changed_settings": ["outer_steps"]}
    assert train(config_of("stopped", **settings)).outer_steps == 5


class Thetas(Callback):
    """theta at the start of each evaluation, but of those that choose the baseline's number of steps."""

    def on_train_begin(self, run):
        self.seen, evaluate = [], HeldOut.scores

        def scores(held_out, *args, **named):
            if not named.get("each_step"):
                self.seen.append(run.theta.clone())
            return evaluate(held_out, *args, **named)

        self.patch.setattr(HeldOut, "scores", scores)


def test_held_out_episodes_see_the_trained_weights_and_a_baseline_with_its_best_inner_loop(
    config_of, tmp_path, capsys, monkeypatch
):
    """theta holds the trained weights at every held-out episode, so that a checkpoint can be saved at any.

    The inner loop is chosen among rates and numbers of steps on validation episodes; the table and run.json
    name it.
    """
    thetas = Thetas()
    thetas.patch = monkeypatch
    train(config_of("run", inner_lr=1e-4, init_interpolation=0.75, eval_steps=3, save_steps=3), thetas)
    saved = load_file(tmp_path / "run" / "checkpoint-3" / "shard-00000.safetensors")
    first, *others = thetas.seen  # validation, table, table of the weights at the start
    assert len(first) == sum(value.numel() for name, value in saved.items() if name.startswith("theta/"))
    assert [first.equal(other) for other in others] == [True, True]
    loop = table_of(tmp_path / "run")["baseline_inner_loop"]
    assert loop["episodes"] == 3
    assert loop["steps"] in (1, 2)
    assert loop["scale"] in final.SCALES
    rate = f"inner_lr {1e-4 * loop['scale']:.3g}, {loop['steps']} steps"
    assert f"weights at the start ({rate})" in capsys.readouterr().out


@pytest.mark.parametrize(("settings", "chosen"), [({}, (0.3, 2)), (CAUSAL, (1.0, 2))])
def test_best_inner_loop_has_the_highest_accuracy_then_the_lowest_loss(settings, chosen):
    """The scores are given by rate and step, in any order; a language model has its loss alone."""
    table = {
        0.1: [(0.2, 1.6)] * 3,
        0.3: [(0.2, 1.6), (0.5, 1.2), (0.5, 1.0)],
        1.0: [(0.2, 1.6), (0.5, 1.1), (0.4, 0.9)],
        3.0: [(0.2, 1.6), (0.5, 1.0), (0.1, 2.0)],
        10.0: [(0.2, 1.6), (1.0, float("nan")), (1.0, float("inf"))],
    }

    def scores(source, stream, what, theta, inner, each_step, count):
        accuracies, losses = zip(*table[inner], strict=True)
        return [EpisodeScore(0, "", "", [*losses], [*accuracies])]

    inner = SimpleNamespace(steps=1, variant=lambda learned, scale, steps: scale)
    setup: Any = SimpleNamespace(inner=inner, config=Config(**settings))
    scored, start = SimpleNamespace(scores=scores), SimpleNamespace(theta=None, rates=None)
    given: Any = scored, None, start, setup
    found = final.choose_loop(*given, lambda: None)
    assert (found.scale, found.steps) == chosen
