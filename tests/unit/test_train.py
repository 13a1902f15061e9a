"""MetaTrainer in one process, as from a notebook."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from fmmeta import Config, MetaTrainer
from fmmeta.meta.reference import reference_run
from fmmeta.models.load import describe, load_learner, load_tokenizer
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.load import load_sources
from fmmeta.training import comparison, validation
from tests.support.models import save_bert, write_classes


def test_accumulated_meta_batches_are_one_larger_meta_batch(tmp_path):
    """Same tasks, one reduction, the same theta to the bit; half as many steps of twice the tasks differ."""
    model, data = save_bert(tmp_path / "bert"), write_classes(tmp_path / "rows.jsonl", classes=15)
    thetas = {}
    for meta_batch_size, accumulation in ((4, 1), (2, 2), (2, 1)):
        settings = {"k_shot": 1, "num_query": 2, "outer_steps": 2, "save_steps": 0, "eval_episodes": 3}
        batches = {"meta_batch_size": meta_batch_size, "meta_accumulation_steps": accumulation}
        folder = tmp_path / f"{meta_batch_size}x{accumulation}"
        config = Config(
            model_name_or_path=str(model), dataset=[str(data)], output_dir=str(folder), **settings, **batches
        )
        result = MetaTrainer(config).train()
        thetas[meta_batch_size, accumulation] = load_file(result.output_dir / "model" / "model.safetensors")
        held_out = json.loads((result.output_dir / "run.json").read_text())["held_out"]
        assert held_out["episodes"] == 3
        assert held_out["after adaptation, meta-trained"]["accuracy"][0] == result.after
    assert all(torch.equal(value, thetas[2, 2][name]) for name, value in thetas[4, 1].items())
    assert not all(torch.equal(value, thetas[2, 1][name]) for name, value in thetas[4, 1].items())


def test_episodes_of_changing_size_follow_the_oracle(tmp_path):
    """2 to 4 classes of 1 to 3 shots: an episode's loss covers its own classes, though the head has four."""
    settings = {
        "n_way": 2,
        "n_way_max": 4,
        "k_shot": 1,
        "k_shot_max": 3,
        "num_query": 2,
        "outer_steps": 2,
        "meta_batch_size": 3,
        "inner_lr": 0.3,
        "inner_steps": 2,
        "outer_optimizer": "sgd",
        "outer_lr": 0.5,
        "save_steps": 0,
        "eval_episodes": 0,
    }
    config = Config(
        model_name_or_path=str(save_bert(tmp_path / "bert")),
        output_dir=str(tmp_path / "out"),
        dataset=[str(write_classes(tmp_path / "rows.jsonl", classes=15))],
        **settings,
    )
    description = describe(config)
    source = load_sources(config, load_tokenizer(config, description, print), print).train
    schedule = Schedule(source.items, 3, config.seed, sizes=source.size)
    steps = [[source.draw(task).episode() for task in schedule.meta_batch(step)] for step in range(2)]
    assert {2, 3} <= {len(episode.classes) for episodes in steps for episode in episodes}
    learner = load_learner(config, description).double()
    began = {name: param.detach().clone() for name, param in learner.named_parameters()}
    wanted = reference_run(learner, steps, config).thetas[-1]
    MetaTrainer(config).train()
    made = load_file(tmp_path / "out" / "model" / "model.safetensors")
    body = [name for name in wanted if name not in learner.head_names]
    off, travelled = (
        sum(float((a[name].double() - b[name]).square().sum()) for name in body) ** 0.5
        for a, b in (({name: made[name.removeprefix("hf.")] for name in body}, wanted), (began, wanted))
    )
    assert off < 1e-5 * travelled


CONTINUED = {
    "learned rates by layer": {"algorithm": "fomaml", "inner_lr_learned": "layer"},
    "learned rates by element": {"algorithm": "meta_sgd", "first_order_steps": 3},
    "kept moments": {
        "algorithm": "reptile",
        "inner_optimizer": "adamw",
        "inner_lr": 0.01,
        "inner_optimizer_state": "kept",
    },
    "nesterov": {"algorithm": "fomaml", "outer_optimizer": "nesterov"},
    "annealed": {"algorithm": "fomaml", "multi_step_loss_steps": 3},
}


@pytest.mark.parametrize("settings", CONTINUED.values(), ids=CONTINUED)
def test_a_resumed_run_reaches_the_same_weights_and_rates(tmp_path, settings):
    model, data = save_bert(tmp_path / "bert"), write_classes(tmp_path / "rows.jsonl", classes=15)
    fixed = {
        "model_name_or_path": str(model),
        "dataset": [str(data)],
        "k_shot": 1,
        "num_query": 2,
        "outer_steps": 4,
        "save_steps": 2,
        "eval_episodes": 0,
        "meta_batch_size": 2,
        "inner_steps": 2,
        "outer_lr": 1e-3,
        **settings,
    }
    MetaTrainer(Config(**fixed, output_dir=str(tmp_path / "whole"))).train()
    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", stopped / "checkpoint-2")
    run = json.loads((tmp_path / "whole" / "run.json").read_text())
    run["settings"]["output_dir"], run["finished"] = str(stopped), False
    (stopped / "run.json").write_text(json.dumps(run))
    MetaTrainer(Config(**fixed, output_dir=str(stopped))).train()
    files = {path.name for path in (tmp_path / "whole" / "model").iterdir()}
    assert ("inner_lr.safetensors" in files) == (settings["algorithm"] == "meta_sgd")
    for name in ("model.safetensors", "fmmeta.json", *(files & {"inner_lr.safetensors"})):
        assert (stopped / "model" / name).read_bytes() == (
            tmp_path / "whole" / "model" / name
        ).read_bytes(), name
    saved = [load_file(tmp_path / "whole" / f"checkpoint-{n}" / "shard-00000.safetensors") for n in (2, 4)]
    assert any(not torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


@pytest.mark.parametrize("learned", ["no", "layer", "element"])
def test_exported_rates_are_those_that_were_learned(tmp_path, learned):
    model, data = save_bert(tmp_path / "bert"), write_classes(tmp_path / "rows.jsonl", classes=15)
    settings = {
        "algorithm": "fomaml",
        "inner_lr_learned": learned,
        "inner_lr_schedule": "constant" if learned == "element" else "linear",
        "inner_lr_groups": ["head=2"],
        "inner_steps": 2,
        **({} if learned == "no" else {"inner_lr_outer_lr": 0.02}),
    }
    MetaTrainer(
        Config(
            model_name_or_path=str(model),
            dataset=[str(data)],
            k_shot=1,
            num_query=2,
            outer_steps=2,
            eval_episodes=0,
            meta_batch_size=2,
            output_dir=str(tmp_path / "run"),
            **settings,
        )
    ).train()
    stored = json.loads((tmp_path / "run" / "model" / "fmmeta.json").read_text())["inner_rates"]
    if learned == "element":
        assert stored == "inner_lr.safetensors"
        rates = load_file(tmp_path / "run" / "model" / stored)
        weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
        assert {name: value.shape for name, value in rates.items()} == {
            name: value.shape for name, value in weights.items() if name in rates
        }
        assert {"classifier.weight", "classifier.bias", "bert.encoder.layer.1.output.dense.weight"} <= set(
            rates
        )
        moved = {
            name
            for name, value in rates.items()
            if (value - (0.2 if "classifier" in name else 0.1)).abs().max() > 1e-6
        }
        assert "classifier.bias" in moved
    else:
        assert {"head", "bert.encoder.layer.0", "bert.pooler.dense"} <= set(stored)
        start = {name: [0.2, 0.1] if name == "head" else [0.1, 0.05] for name in stored}
        if learned == "no":
            assert stored == start
        else:
            assert all(stored[name] != start[name] for name in stored)
            assert all(
                abs(a - b) < 0.1 for name in stored for a, b in zip(stored[name], start[name], strict=True)
            )


def test_the_exported_weights_interpolate_start_and_theta(tmp_path, monkeypatch):
    """And so is what is validated, while theta itself goes its way as if there were none."""
    model, data = save_bert(tmp_path / "bert"), write_classes(tmp_path / "rows.jsonl", classes=15)
    monkeypatch.setattr(
        comparison, "choose_loop", lambda *of: comparison.BaselineLoop(1.0, 5)
    )  # rows that differ by the weights alone

    def run(name, **settings):
        config = Config(
            model_name_or_path=str(model),
            dataset=[str(data)],
            output_dir=str(tmp_path / name),
            k_shot=1,
            num_query=2,
            n_way=3,
            outer_steps=4,
            logging_steps=1,
            save_steps=4,
            lr_scheduler_type="constant",
            outer_lr=0.05,
            meta_batch_size=2,
            **{"eval_steps": 2, "eval_episodes": 4, **settings},
        )
        result = MetaTrainer(config).train()
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        theta = load_file(tmp_path / name / "checkpoint-4" / "shard-00000.safetensors")
        return load_file(tmp_path / name / "model" / "model.safetensors"), lines, theta, result

    plain, mixed, nearly = (
        run("plain"),
        run("mixed", init_interpolation=0.75),
        run("nearly", init_interpolation=0.001),
    )
    began = load_file(model / "model.safetensors")
    unseen = run("unseen", init_interpolation=0.75, eval_episodes=0, eval_steps=0)[0]
    assert all(torch.equal(value, unseen[name]) for name, value in mixed[0].items())
    assert all(torch.equal(value, plain[2][name]) for name, value in mixed[2].items())
    assert [line["loss"] for line in mixed[1] if "loss" in line] == [
        line["loss"] for line in plain[1] if "loss" in line
    ]
    moved = 0.0
    for name, value in mixed[0].items():
        if name in began and began[name].shape == value.shape:  # the head is of other classes
            torch.testing.assert_close(value, 0.25 * began[name] + 0.75 * plain[0][name])
            moved += float((value - began[name]).abs().sum())
    assert moved > 1.0
    validated = [
        [line["valid_loss"] for line in lines if "valid_loss" in line]
        for _, lines, _, _ in (plain, mixed, nearly)
    ]
    assert abs(validated[2][1] - validated[2][0]) < 0.1 * abs(validated[0][1] - validated[0][0])
    assert validated[1] != validated[0]
    assert nearly[3].after == nearly[3].after_from_start


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
def test_the_final_table_has_a_separate_number_of_episodes(
    settings, validated, tested, tmp_path, monkeypatch
):
    scored, original = [], validation.HeldOut.scores

    def counting(*args, **named):
        found = original(*args, **named)
        if not named.get("each_step"):  # episodes that choose the baseline's number of steps do not count
            scored.append(len(found))
        return found

    monkeypatch.setattr(validation.HeldOut, "scores", counting)
    model, data = save_bert(tmp_path / "bert"), write_classes(tmp_path / "rows.jsonl", classes=15)
    given = {"eval_episodes": 4, **settings}
    config = Config(
        model_name_or_path=str(model),
        dataset=[str(data)],
        output_dir=str(tmp_path / "run"),
        k_shot=1,
        num_query=2,
        n_way=3,
        inner_steps=1,
        outer_steps=1,
        meta_batch_size=1,
        save_steps=0,
        eval_steps=int(validated > 0),
        **given,
    )
    result = MetaTrainer(config).train()
    assert scored == [validated] * (validated > 0) + [tested] * 2 * (tested > 0)
    assert (result.after is None) == (tested == 0)
    held_out = json.loads((tmp_path / "run" / "run.json").read_text())["held_out"]
    assert held_out.get("episodes", 0) == tested


def test_the_best_validated_weights_are_exported(tmp_path):
    """Bit for bit those of a run that ends there, also when the run resumed from a checkpoint that had met
    them.
    """
    model, data = save_bert(tmp_path / "bert"), write_classes(tmp_path / "rows.jsonl", classes=15)

    def run(name, outer_steps, **settings):
        config = Config(
            model_name_or_path=str(model),
            dataset=[str(data)],
            output_dir=str(tmp_path / name),
            k_shot=1,
            num_query=2,
            n_way=3,
            outer_steps=outer_steps,
            eval_steps=2,
            eval_episodes=4,
            save_steps=4,
            save_total_limit=9,
            lr_scheduler_type="constant",
            outer_lr=0.05,
            meta_batch_size=2,
            **settings,
        )
        MetaTrainer(config).train()
        return load_file(tmp_path / name / "model" / "model.safetensors")

    whole = run("whole", 8, load_best_model_at_end=True)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    scores = {
        line["step"]: (line["valid_accuracy"], -line["valid_loss"])
        for line in lines
        if "valid_accuracy" in line
    }
    best = max(scores, key=lambda step: scores[step])
    assert best < 8  # else the test says nothing
    until = run("until", best)
    assert all(torch.equal(value, until[name]) for name, value in whole.items())
    assert best <= 4
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", stopped / "checkpoint-4")
    settings = json.loads((tmp_path / "whole" / "run.json").read_text())
    (stopped / "run.json").write_text(json.dumps({**settings, "finished": False}))
    again = run("stopped", 8, load_best_model_at_end=True)
    assert all(torch.equal(value, whole[name]) for name, value in again.items())
    last = load_file(tmp_path / "whole" / "checkpoint-8" / "shard-00000.safetensors")
    assert any(name.startswith("best theta/") for name in last)
    assert not all(
        torch.equal(value, last[name.removeprefix("best ")])
        for name, value in last.items()
        if name.startswith("best ")
    )
