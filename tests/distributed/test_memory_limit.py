"""A model that one process may not hold is refused in a group of one, with the arithmetic, and trained by a
group of four.
"""

import json
import re
import resource

import pytest
import torch

from fmmeta.common.processes import status_bytes
from fmmeta.common.progress import Progress
from fmmeta.config.settings import Config
from fmmeta.parallel.workers.zero import import_deepspeed
from fmmeta.training import build
from fmmeta.training.loop import train
from fmmeta.training.run import Run
from fmmeta.training.run_files import RunStart
from tests.support.messages import refusal
from tests.support.models import save, tiny, write_pairs
from tests.support.ranks import on_ranks


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A Llama of 30 M parameters: 7 x 4 bytes each are 0.78 GiB, and a process is allowed 0.63 GiB beyond its
    libraries.
    """
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8}
    folder = tmp_path_factory.mktemp("limits")
    model = tiny("llama", **sizes, intermediate_size=1408, vocab_size=4000, tie_word_embeddings=False)
    zero = {
        "stage": 3,
        "stage3_max_live_parameters": 4_000_000,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": 1_000_000,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 1000,
    }
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": zero}))
    return save(model, folder / "llama"), write_pairs(folder / "pairs.jsonl"), folder


# glibc would keep freed blocks below 32 MB and give every thread an arena, all of which counts as data
TIGHT = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}
ROOM = 640 * 2**20


@on_ranks(4, timeout_s=400, per_rank=dict.fromkeys(range(4), TIGHT), fresh=True)
def train_within_a_limit(world, model, data, folder, kind):
    """How a group of one is refused, and the square of theta that all ranks in one group end at."""
    settings = {
        "model_name_or_path": str(model),
        "dataset": [str(data)],
        "task_type": "causal_lm",
        "k_shot": 2,
        "num_query": 2,
        "meta_batch_size": 1,
        "inner_steps": 1,
        "outer_steps": 2,
        "max_length": 32,
        "save_steps": 0,
        "eval_episodes": 0,
        "outer_lr": 1e-3,
    }
    deepspeed = f"{folder}/zero3.json" if kind == "zero3" else None
    alone = Config(**settings, group_size="1", deepspeed=deepspeed)
    small = build.read_inputs(alone, world, quiet)
    params = build.sizes_of(alone, small, world.device)(1).params
    spread = {"zero3": {"deepspeed": deepspeed}, "pipeline": {"pipeline_stages": 4}}[kind]
    config = Config(**settings, group_size="4", **spread)
    inputs = build.read_inputs(config, world, quiet)
    # libraries are no part of the model's memory
    import transformers.models.llama.modeling_llama  # noqa: F401

    limit = status_bytes("VmData") + ROOM
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    refused = refusal(build.plan_parallel, alone, small, world, quiet)
    with pytest.raises(RuntimeError):  # the limit is real
        torch.zeros(7 * params)
    plan = build.plan_parallel(config, inputs, world, quiet)
    ranks = world.split(plan.group_size, plan.engine == "deepspeed")
    import_deepspeed()
    parts = build.build(config, inputs, plan, ranks)
    run = Run(config, inputs, ranks, parts, RunStart(folder, None, False), Progress(enabled=False))
    run.resume()
    train(run)
    assert run.state.outer_step == 2
    return refused, parts.worker.dot(run.theta, run.theta)


def quiet(text):
    pass


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        pytest.param("zero3", ("group_size 4", "group_size 2 or 4"), marks=pytest.mark.long),
        ("pipeline", ("ZeRO 3, --pipeline_stages, --gradient_checkpointing, --lora_r or more ranks",)),
    ],
)
def test_four_ranks_train_a_model_that_one_rank_cannot_hold(files, kind, fix):
    texts, ends = zip(*train_within_a_limit(*files, kind), strict=True)
    for text in texts:
        refused = re.search(
            r"group_size=1 needs (.*) = ([\d.]+) GiB .* ZeRO 0, and ([\d.]+) GiB .*; use (.*)", text
        )
        assert refused, text
        assert refused[1].startswith("weights 0.111 + gradients 0.111 + meta 0.444")
        assert float(refused[2]) > 0.68 > 0.63 >= float(refused[3])
        assert refused[4] in fix
    assert len({f"{end:.6f}" for end in ends}) == 1
