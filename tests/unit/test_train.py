"""MetaTrainer in one process, as from a notebook."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fmmeta import Config, MetaTrainer
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from fmmeta.meta.reference import reference_run
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.load import load_sources
from fmmeta.training import final, scoring
from tests.support.models import write_classes
from tests.support.short_runs import metrics_of, same, theta_of


@pytest.fixture
def run(bert, tmp_path):
    """run(name, **settings): a short run on 15 classes of 6 rows; its result, whose folder has that name."""
    data = write_classes(tmp_path / "rows.jsonl", classes=15)

    def train(name: str, **settings):
        given = {"k_shot": 1, "num_query": 2, "meta_batch_size": 2, "save_steps": 0, "eval_episodes": 0}
        paths = {"model_name_or_path": str(bert), "dataset": [str(data)], "output_dir": str(tmp_path / name)}
        return MetaTrainer(Config(**{**given, **paths, **settings})).train()

    return train


def held_out_of(result) -> dict:
    return json.loads((result.output_dir / "run.json").read_text())["held_out"]


def begin_at(checkpoint: Path, folder: Path) -> None:
    """Make a folder of the run of this checkpoint, as if it had been stopped there."""
    shutil.copytree(checkpoint, folder / checkpoint.name)
    run = json.loads((checkpoint.parent / "run.json").read_text())
    run["settings"]["output_dir"], run["finished"] = str(folder), False
    (folder / "run.json").write_text(json.dumps(run))


def test_accumulated_meta_batches_are_one_larger_meta_batch(run):
    """Same tasks, one reduction, the same theta to the bit; half as many steps of twice the tasks differ."""
    folders = []
    for tasks, accumulation in ((4, 1), (2, 2), (2, 1)):
        batches = {"meta_batch_size": tasks, "meta_accumulation_steps": accumulation}
        result = run(f"{tasks}x{accumulation}", outer_steps=2, eval_episodes=3, **batches)
        folders.append(result.output_dir)
        assert held_out_of(result)["episodes"] == 3
        assert held_out_of(result)["after adaptation, meta-trained"]["accuracy"][0] == result.after
    assert [same(folders[0], other) for other in folders[1:]] == [True, False]


def test_episodes_of_changing_size_follow_the_oracle(bert, tmp_path):
    """2 to 4 classes of 1 to 3 shots: an episode's loss covers its own classes, though the head has four."""
    sizes = {"n_way": 2, "n_way_max": 4, "k_shot": 1, "k_shot_max": 3, "num_query": 2}
    loops = {"inner_lr": 0.3, "inner_steps": 2, "outer_optimizer": "sgd", "outer_lr": 0.5}
    steps = {"outer_steps": 2, "meta_batch_size": 3, "save_steps": 0, "eval_episodes": 0}
    data = [str(write_classes(tmp_path / "rows.jsonl", classes=15))]
    paths = {"model_name_or_path": str(bert), "output_dir": str(tmp_path / "out"), "dataset": data}
    config = Config(**sizes, **loops, **steps, **paths)
    description = describe(config)
    source = load_sources(config, load_tokenizer(config, description, print), print).train
    schedule = Schedule(source.items, 3, config.seed, sizes=source.size)
    drawn = [[source.draw(task).episode() for task in schedule.meta_batch(step)] for step in range(2)]
    assert {2, 3} <= {len(episode.classes) for episodes in drawn for episode in episodes}
    learner = load_learner(config, description).double()
    began = {name: param.detach().clone() for name, param in learner.named_parameters()}
    wanted = reference_run(learner, drawn, config).thetas[-1]
    MetaTrainer(config).train()
    made, body = theta_of(tmp_path / "out"), wanted.keys() - learner.head_names
    off = sum(float((made[name.removeprefix("hf.")].double() - wanted[name]).square().sum()) for name in body)
    travelled = sum(float((began[name] - wanted[name]).square().sum()) for name in body)
    assert off < 1e-10 * travelled


CONTINUED = {
    "no": {"outer_optimizer": "nesterov"},
    "layer": {"inner_lr_learned": "layer", "inner_lr_outer_lr": 0.02},
    "element": {"algorithm": "meta_sgd", "first_order_steps": 3, "inner_lr_outer_lr": 0.02},
    "annealed": {"multi_step_loss_steps": 3},
}


@pytest.mark.parametrize("learned", CONTINUED)
def test_a_resumed_run_reaches_the_same_weights_and_exports_the_rates_that_were_learned(
    run, tmp_path, learned
):
    fixed = {"outer_steps": 4, "save_steps": 2, "inner_steps": 2, "outer_lr": 1e-3}
    settings = {**fixed, "inner_lr_groups": ["head=2"], **CONTINUED[learned]}
    run("whole", **settings)
    begin_at(tmp_path / "whole" / "checkpoint-2", tmp_path / "stopped")
    run("stopped", **settings)
    whole, again = tmp_path / "whole" / "model", tmp_path / "stopped" / "model"
    for file in ("model.safetensors", "fmmeta.json", *(["inner_lr.safetensors"] * (learned == "element"))):
        assert (again / file).read_bytes() == (whole / file).read_bytes(), file
    saved = [load_file(tmp_path / "whole" / f"checkpoint-{n}" / "shard-00000.safetensors") for n in (2, 4)]
    assert any(not torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert_rates(whole, learned)


def assert_rates(model: Path, learned: str) -> None:
    """Check the exported rates, which began at 0.2 in the head and at 0.1 elsewhere."""
    stored = json.loads((model / "fmmeta.json").read_text())["inner_rates"]
    if learned == "element":
        assert stored == "inner_lr.safetensors"
        rates, weights = load_file(model / stored), load_file(model / "model.safetensors")
        assert all(value.shape == weights[name].shape for name, value in rates.items())
        assert {"classifier.weight", "bert.encoder.layer.1.output.dense.weight"} <= set(rates)
        assert (rates["classifier.bias"] - 0.2).abs().max() > 1e-6
        return
    assert {"head", "bert.encoder.layer.0", "bert.pooler.dense"} <= set(stored)
    for name, found in stored.items():
        start = [0.2, 0.2] if name == "head" else [0.1, 0.1]
        assert (found == start) == (learned != "layer")
        assert found == pytest.approx(start, abs=0.1)


@pytest.mark.slow
def test_the_exported_weights_interpolate_start_and_theta(run, bert, tmp_path, monkeypatch):
    """And so is what is validated, while theta itself goes its way as if there were none."""
    # so that rows of the final table differ by the weights alone
    monkeypatch.setattr(final, "choose_loop", lambda *of: final.BaselineLoop(1.0, 5))
    fixed = {
        "n_way": 3,
        "outer_steps": 4,
        "logging_steps": 1,
        "save_steps": 4,
        "outer_lr": 0.05,
        "lr_scheduler_type": "constant",
        "eval_steps": 2,
        "eval_episodes": 4,
    }
    runs = {
        "plain": {"test_episodes": 0},
        "mixed": {"test_episodes": 0, "init_interpolation": 0.75},
        "nearly": {"init_interpolation": 0.001},
        "unseen": {"init_interpolation": 0.75, "eval_episodes": 0, "eval_steps": 0},
    }
    results = {name: run(name, **{**fixed, **settings}) for name, settings in runs.items()}
    assert results["nearly"].after == results["nearly"].after_from_start
    assert same(tmp_path / "mixed", tmp_path / "unseen")
    thetas = [
        load_file(tmp_path / name / "checkpoint-4" / "shard-00000.safetensors") for name in ("plain", "mixed")
    ]
    assert all(torch.equal(value, thetas[0][name]) for name, value in thetas[1].items())
    began, plain, moved = load_file(bert / "model.safetensors"), theta_of(tmp_path / "plain"), 0.0
    for name, value in theta_of(tmp_path / "mixed").items():
        if name in began and began[name].shape == value.shape:  # the head is of other classes
            torch.testing.assert_close(value, 0.25 * began[name] + 0.75 * plain[name])
            moved += float((value - began[name]).abs().sum())
    assert moved > 1.0
    lines = {name: metrics_of(tmp_path / name) for name in runs}
    losses = {name: [line["loss"] for line in of if "loss" in line] for name, of in lines.items()}
    assert losses["plain"] == losses["mixed"]
    valid = {name: [line["valid_loss"] for line in of if "valid_loss" in line] for name, of in lines.items()}
    assert abs(valid["nearly"][1] - valid["nearly"][0]) < 0.1 * abs(valid["plain"][1] - valid["plain"][0])
    assert valid["mixed"] != valid["plain"]


@pytest.mark.parametrize(
    ("settings", "validated", "tested"),
    [
        ({}, 4, 4),
        ({"test_episodes": 2}, 4, 2),
        ({"test_episodes": 0}, 4, 0),
        ({"eval_episodes": 0}, 0, 0),
        ({"eval_episodes": 0, "test_episodes": 3}, 0, 3),
    ],
)
def test_the_final_table_has_a_separate_number_of_episodes(settings, validated, tested, run, monkeypatch):
    scored, original = [], scoring.HeldOut.scores

    def counting(*args, **named):
        found = original(*args, **named)
        if not named.get("each_step"):  # episodes that choose the baseline's number of steps do not count
            scored.append(len(found))
        return found

    monkeypatch.setattr(scoring.HeldOut, "scores", counting)
    few = {"n_way": 3, "inner_steps": 1, "outer_steps": 1, "meta_batch_size": 1, "eval_episodes": 4}
    result = run("run", **{**few, **settings}, eval_steps=int(validated > 0))
    assert scored == [validated] * (validated > 0) + [tested] * 2 * (tested > 0)
    assert (result.after is None) == (tested == 0)
    assert held_out_of(result).get("episodes", 0) == tested


def test_the_best_validated_weights_are_exported(run, tmp_path):
    """Bit for bit those of a run that ends there, also when the run resumed from a checkpoint that had met
    them.
    """
    fixed = {
        "n_way": 3,
        "eval_steps": 2,
        "eval_episodes": 4,
        "save_steps": 4,
        "save_total_limit": 9,
        "lr_scheduler_type": "constant",
        "outer_lr": 0.05,
        "inner_steps": 2,
        "test_episodes": 0,
    }
    run("whole", outer_steps=8, load_best_model_at_end=True, **fixed)
    scores = {
        line["step"]: (line["valid_accuracy"], -line["valid_loss"])
        for line in metrics_of(tmp_path / "whole")
        if "valid_accuracy" in line
    }
    best = max(scores, key=lambda step: scores[step])
    assert best <= 4  # of 8, else the test says nothing
    run("until", outer_steps=best, **fixed)
    assert same(tmp_path / "whole", tmp_path / "until")
    begin_at(tmp_path / "whole" / "checkpoint-4", tmp_path / "stopped")
    run("stopped", outer_steps=8, load_best_model_at_end=True, **fixed)
    assert same(tmp_path / "whole", tmp_path / "stopped")
    last = load_file(tmp_path / "whole" / "checkpoint-8" / "shard-00000.safetensors")
    kept = [name for name in last if name.startswith("best ")]
    assert any(name.startswith("best theta/") for name in kept)
    assert not all(torch.equal(last[name], last[name.removeprefix("best ")]) for name in kept)
