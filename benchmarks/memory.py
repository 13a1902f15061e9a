"""Resident memory of each rank while a random Llama of 200 M parameters is meta-trained, beside the estimate.

    # writes the checkpoint; qwen3_moe: a mixture of 81 M parameters, 4 layers of 16 experts
    python benchmarks/memory.py model FOLDER [qwen3_moe]
    # a JSON line per rank
    torchrun --nproc_per_node 2 benchmarks/memory.py run FOLDER --group_size 2 [flags]
    # ordinary training
    torchrun --nproc_per_node 2 benchmarks/memory.py deepspeed FOLDER [DEEPSPEED.json [fused]]
    # the same in stages, one per rank
    torchrun --nproc_per_node 2 benchmarks/memory.py pipeline FOLDER
    # `# title` and JSON lines to a file
    python benchmarks/memory.py collect LINES OUT.json

The peak is VmHWM less the resident set before the weights are read (interpreter, libraries, process groups).
`deepspeed` is training as DeepSpeed's documentation has it, without fmmeta but for the completed JSON:
transformers loads the model (sharded while loading at stage 3), deepspeed.initialize gets torch's AdamW, four
rows are divided over the ranks. AdamW as it comes makes temporary copies of its shard; `fused` does not.
`pipeline` is DeepSpeed's pipeline engine with fused AdamW over the same stages.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
EXACT = {
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
}  # glibc keeps freed blocks below 32 MB otherwise


RUN = {
    "task_type": "causal_lm",
    "k_shot": 4,
    "num_query": 4,
    "meta_batch_size": 1,
    "inner_steps": 1,
    "outer_steps": 2,
    "max_length": 24,
    "eval_episodes": 0,
    "save_steps": 0,
    "outer_lr": 1e-4,
}


SHARED = {
    "num_attention_heads": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 1024,
        "num_hidden_layers": 13,
        "num_key_value_heads": 16,
        "intermediate_size": 2816,
        "vocab_size": 16000,
    },
    "qwen3_moe": {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "vocab_size": 2000,
    },
}


def make_model(folder: Path, kind: str = "llama") -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fmmeta.learners.tiny import byte_tokenizer

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHARED, **MODELS[kind]))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def write_pairs(path: Path) -> None:
    rows = [{"task": f"t{t}", "input": f"{t} {i}", "output": f"{i * t}"} for t in range(4) for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def libraries(engine: bool) -> None:
    """Import the libraries of a run first: they take 0.1 GB and are not part of a model's memory."""

    import fmmeta.train  # noqa: F401

    if engine:
        from fmmeta.parallel.workers.zero import import_deepspeed

        import_deepspeed()


def run(folder: str, flags: list[str]) -> None:
    from fmmeta.cli import parse
    from fmmeta.common.progress import Progress
    from fmmeta.parallel.layout import Launch
    from fmmeta.parallel.memory import estimate
    from fmmeta.parallel.process_groups import World, pick_device
    from fmmeta.training import build
    from fmmeta.training.loop import train
    from fmmeta.training.run import Run
    from fmmeta.training.run_files import RunStart

    launch = Launch.from_env(os.environ)
    work = Path(tempfile.mkdtemp())
    write_pairs(work / "pairs.jsonl")
    given = {**RUN, "dataset": work / "pairs.jsonl", "model_name_or_path": folder}
    config = parse([*(f"--{key}={value}" for key, value in given.items()), *flags])
    world = World(launch, pick_device(launch))
    inputs = build.read_inputs(config, world, lambda text: None)
    plan = build.plan_parallel(config, inputs, world, lambda text: None)
    ranks = world.split(plan.group_size, plan.engine == "deepspeed")
    libraries(engine=ranks.layout.group_size > 1 or config.engine == "deepspeed")
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    parts = build.build(config, inputs, plan, ranks)
    loaded = resident("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")
    trainer = Run(config, inputs, ranks, parts, RunStart(work, None, False), Progress(enabled=False))
    trainer.resume()
    train(trainer)
    peak = resident("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")
    from fmmeta.checkpoint.hf_export import export

    export(
        Path(f"{folder}-exported"),
        trainer.theta,
        parts.worker,
        parts.frozen,
        config,
        inputs.description,
        inputs.tokenizer,
        ranks,
    )
    exporting = resident("VmHWM") - before
    own = sum(fragment.length for fragment in parts.worker.params.fragments)
    sizes = build.sizes_of(config, inputs, world.device)(plan.data)
    estimated = estimate(sizes, plan.deepspeed, plan.data)
    line = {
        "rank": launch.global_rank,
        "parameters": own,
        "load_gb": loaded / 1e9,
        "train_gb": peak / 1e9,
        "export_gb": exporting / 1e9,
        "estimate_gb": estimated.total / 1e9,
        "estimate": str(estimated),
    }
    for text in world.comm.gather_bytes(json.dumps(line).encode()):
        if launch.global_rank == 0:
            print(text.decode(), flush=True)
    world.close()


def ordinary(folder: str, deepspeed_json: str | None = None, fused: str = "") -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from fmmeta.parallel import deepspeed_config
    from fmmeta.parallel.layout import Launch
    from fmmeta.parallel.process_groups import World, pick_device
    from fmmeta.parallel.workers.zero import import_deepspeed

    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    world.split(launch.world_size)
    deepspeed = import_deepspeed()
    precision = deepspeed_config.read(deepspeed_json, False, print)
    settings = precision.complete(1024)
    before = resident("VmRSS")
    kept = HfDeepSpeedConfig(settings) if precision.zero_stage == 3 else None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=bool(fused))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    Path("/proc/self/clear_refs").write_text("5")
    ids = torch.randint(3, 16000, (max(1, 4 // launch.world_size), 24))
    for _ in range(4):
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
    line = {
        "rank": launch.global_rank,
        "train_gb": (resident("VmHWM") - before) / 1e9,
        "zero": 0 if kept is None else 3,
        "fused": bool(fused),
    }
    for text in world.comm.gather_bytes(json.dumps(line).encode()):
        if launch.global_rank == 0:
            print(text.decode(), flush=True)
    world.close()


def staged(folder: str) -> None:
    """Ordinary training in a pipeline: fmmeta's stages and batches, torch's optimizer in the engine, none of
    fmmeta's vectors.
    """
    import torch

    from fmmeta.cli import parse
    from fmmeta.parallel.layout import Launch
    from fmmeta.parallel.process_groups import World, pick_device
    from fmmeta.parallel.workers import create, pipeline
    from fmmeta.parallel.workers.zero import import_deepspeed
    from fmmeta.tasks.loader import LoadEpisode
    from fmmeta.training import build

    class Trainer(pipeline.PipelineWorker):
        def start_engine(self, model: Any, groups: Any, config: Any, *_: Any) -> None:
            optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
            self.shard_optimizer: Any = optimizer
            self.engine = import_deepspeed().initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )[0]

    create.PipelineWorker = Trainer  # type: ignore[misc]
    launch = Launch.from_env(os.environ)
    work = Path(tempfile.mkdtemp())
    write_pairs(work / "pairs.jsonl")
    config = parse(
        [
            f"--{key}={value}"
            for key, value in {
                **RUN,
                "dataset": work / "pairs.jsonl",
                "group_size": launch.world_size,
                "pipeline_stages": launch.world_size,
                "model_name_or_path": folder,
            }.items()
        ]
    )
    world = World(launch, pick_device(launch))
    inputs = build.read_inputs(config, world, lambda text: None)
    plan = build.plan_parallel(config, inputs, world, lambda text: None)
    ranks = world.split(plan.group_size, plan.engine == "deepspeed")
    import_deepspeed()
    before = resident("VmRSS")
    worker: Any = create.create_worker(config, inputs.description, plan, ranks)[0]
    Path("/proc/self/clear_refs").write_text("5")
    task = build.training_schedule(config, inputs, ranks.layout).meta_batch(0)[0]
    coordinates = plan.coordinates(ranks.layout.group_rank)
    batches = (
        LoadEpisode(inputs.sources.train, build.batcher(config, inputs, coordinates)).batches(task).support
    )
    for _ in range(4):
        worker.engine.train_batch(worker._begin(batches, "logits"))
    line = {
        "rank": launch.global_rank,
        "train_gb": (resident("VmHWM") - before) / 1e9,
        "stages": launch.world_size,
    }
    for text in world.comm.gather_bytes(json.dumps(line).encode()):
        if launch.global_rank == 0:
            print(text.decode(), flush=True)
    world.close()


def collect(lines: str, out: str) -> None:
    from benchmarks.common import write_json

    results: dict[str, list[Any]] = {}
    for line in Path(lines).read_text().splitlines():
        if line.startswith("# "):
            results[line[2:]] = []
        elif line.startswith("{"):
            results[list(results)[-1]].append(json.loads(line))
    write_json(out, {"runs": results})


if __name__ == "__main__":
    if not EXACT.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**EXACT, **os.environ})
    if sys.argv[1] == "model":
        make_model(Path(sys.argv[2]), *sys.argv[3:])
    elif sys.argv[1] == "collect":
        collect(*sys.argv[2:])
    elif sys.argv[1] == "pipeline":
        staged(sys.argv[2])
    elif sys.argv[1] == "deepspeed":
        ordinary(*sys.argv[2:])
    else:
        run(sys.argv[2], sys.argv[3:])
