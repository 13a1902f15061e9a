"""MetaTrainer in one process, as from a notebook."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from fmmeta import Config, MetaTrainer
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
