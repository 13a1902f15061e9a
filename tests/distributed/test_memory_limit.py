"""A model that one process may not hold is refused in a group of one, with the arithmetic, and trained by a
group of four.
"""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.support.launch import run_ranks
from tests.support.models import save, write_pairs


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A Llama of 30 M parameters: 7 x 4 bytes each are 0.78 GiB, and a process is allowed 0.63 GiB beyond its
    libraries.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("limits")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=1408,
        vocab_size=4000,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    zero = {
        "stage": 3,
        "stage3_max_live_parameters": 4_000_000,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": 1_000_000,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 1000,
    }
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": zero}))
    return save(LlamaForCausalLM(config), folder / "llama"), write_pairs(folder / "pairs.jsonl"), folder


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", ["zero3", "pipeline"])
def test_four_ranks_train_a_model_that_one_rank_cannot_hold(files, kind):
    model, data, folder = files
    arguments = ["-m", "tests.support.limited", str(model), str(data), str(folder), kind]
    # glibc would keep freed blocks below 32 MB and give every thread an arena, all of which counts as data
    tight = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}
    outputs = (
        run_ranks(arguments, 4, timeout_s=400, per_rank=dict.fromkeys(range(4), tight), fresh=True)
        .ok()
        .output
    )
    for text in outputs:
        refused = re.search(
            r"group_size=1 needs (.*) = ([\d.]+) GiB .* ZeRO 0, and ([\d.]+) GiB .*; use (.*)",
            text,
        )
        assert refused, text
        assert refused[1].startswith("weights 0.111 + gradients 0.111 + meta 0.444")
        assert float(refused[2]) > 0.68 > 0.63 >= float(refused[3])
        assert (
            refused[4]
            in {
                "zero3": ("group_size 4", "group_size 2 or 4"),
                "pipeline": ("ZeRO 3, --pipeline_stages, --gradient_checkpointing, --lora_r or more ranks",),
            }[kind]
        )
        assert "the limit is real" in text
        assert "trained 2 steps" in text
    assert len({re.search(r"trained.*", text)[0] for text in outputs}) == 1
