"""MetaTrainer in one process, as from a notebook."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from fmmeta import Config, MetaTrainer
from fmmeta.meta.reference import reference_run
from fmmeta.models.load import describe, load_learner, load_tokenizer
from fmmeta.tasks.load import load_sources
from fmmeta.tasks.schedule import Schedule
from tests.models import save_bert, write_classes


def test_accumulated_meta_batches_are_one_larger_meta_batch(tmp_path):
    """Same tasks, one reduction, the same theta to the bit; half as many steps of twice the tasks differ."""
    model, data = save_bert(tmp_path / "bert"), write_classes(tmp_path / "rows.jsonl", classes=15)
    thetas = {}
    for meta_batch_size, accumulation in ((4, 1), (2, 2), (2, 1)):
        settings = {"k_shot": 1, "num_query": 2, "outer_steps": 2, "save_steps": 0, "eval_episodes": 3}
        batches = {"meta_batch_size": meta_batch_size, "meta_accumulation_steps": accumulation}
        folder = tmp_path / f"{meta_batch_size}x{accumulation}"
        config = Config(model_name_or_path=str(model), dataset=[str(data)], output_dir=str(folder), **settings, **batches)
        result = MetaTrainer(config).train()
        thetas[meta_batch_size, accumulation] = load_file(result.output_dir / "model" / "model.safetensors")
        held_out = json.loads((result.output_dir / "run.json").read_text())["held_out"]
        assert held_out["episodes"] == 3
        assert held_out["after adaptation, meta-trained"]["accuracy"][0] == result.after
    assert all(torch.equal(value, thetas[2, 2][name]) for name, value in thetas[4, 1].items())
    assert not all(torch.equal(value, thetas[2, 1][name]) for name, value in thetas[4, 1].items())


def test_episodes_of_changing_size_follow_the_oracle(tmp_path):
    """2 to 4 classes of 1 to 3 shots: an episode's loss sees its own classes alone, though the head has four."""
    settings = {
        "n_way": 2, "n_way_max": 4, "k_shot": 1, "k_shot_max": 3, "num_query": 2, "outer_steps": 2, "meta_batch_size": 3,
        "inner_lr": 0.3, "inner_steps": 2, "outer_optimizer": "sgd", "outer_lr": 0.5, "save_steps": 0, "eval_episodes": 0,
    }  # fmt: skip
    config = Config(model_name_or_path=str(save_bert(tmp_path / "bert")), output_dir=str(tmp_path / "out"),
                    dataset=[str(write_classes(tmp_path / "rows.jsonl", classes=15))], **settings)  # fmt: skip
    description = describe(config)
    source = load_sources(config, load_tokenizer(config, description, print), print).train
    schedule = Schedule(source.items, 3, config.seed, sizes=source.size)
    steps = [[source.episode(task) for task in schedule.meta_batch(step)] for step in range(2)]
    assert {2, 3} <= {len(episode.classes) for episodes in steps for episode in episodes}
    learner = load_learner(config, description).double()
    began = {name: param.detach().clone() for name, param in learner.named_parameters()}
    wanted = reference_run(learner, steps, config).thetas[-1]
    MetaTrainer(config).train()
    made = load_file(tmp_path / "out" / "model" / "model.safetensors")
    body = [name for name in wanted if name not in learner.head_names]
    off, travelled = (sum(float((a[name].double() - b[name]).square().sum()) for name in body) ** 0.5 for a, b in (
        ({name: made[name.removeprefix("hf.")] for name in body}, wanted), (began, wanted)))  # fmt: skip
    assert off < 1e-5 * travelled
