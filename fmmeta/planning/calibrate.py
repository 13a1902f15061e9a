"""Measure a machine for the plan: `--calibrate` starts as many ranks as there are GPUs (two on a machine
without) and tries

    products      a forward and backward pass through each kind of layer (models/layer_timing.py), all ranks
                  at the same time; its flops by seconds, in the precision that is planned
    memory        theta <- theta - rate gradient on vectors that no cache holds
    page_in       a new vector allocated and filled, minus filling an existing one
    link          an all-reduce of 32 MB between the ranks, and a tiny one for the latency
    host          the vectors once more in host memory, and copies of pinned memory to another device

What an engine adds to a pass is not measured and counts as nothing. One machine cannot measure a network:
between nodes the link is taken to be that of the node.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import end_with_parent
from fmmeta.planning.machines import Profile
from fmmeta.planning.settings import PlanConfig

VECTOR, LINK, REPEATS, ROWS = 2**24, 2**23, 5, 8  # elements, elements, times, rows of a micro-batch at most
TIMEOUT_S = 600


def measure(plan: PlanConfig) -> Profile:
    """Start the ranks and read what the first one found. Raises `UsageError` where they fail."""
    import torch

    there = torch.cuda.device_count() or 2
    count = min(plan.gpus, plan.gpus_per_node, there)
    with tempfile.TemporaryDirectory() as folder:
        settings, out = Path(folder) / "plan.json", Path(folder) / "profile.json"
        settings.write_text(json.dumps({**asdict(plan), "save_profile": None}))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        ranks = []
        for rank in range(count):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_PORT": port,
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
            }
            words = [sys.executable, "-m", "fmmeta.planning.calibrate", str(settings), str(out)]
            ranks.append(
                subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        try:
            failure = wait(ranks)
        finally:
            for one in ranks:
                one.kill()
        if not out.is_file():
            raise UsageError(f"calibrate=True: a rank failed ({failure}); give --machine instead")
        return Profile(**json.loads(out.read_text()))


def wait(ranks: list[subprocess.Popen[str]]) -> str:
    """The last line of the first rank that failed; all have ended."""
    failure = ""
    deadline = time.monotonic() + TIMEOUT_S
    for rank in ranks:
        try:
            text, _ = rank.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            text, _ = rank.communicate()
            text = f"not done after {TIMEOUT_S} s"
        if rank.returncode and not failure:
            failure = (text.strip().splitlines() or ["no output"])[-1]
    return failure


def rank_main(settings: str, out: str) -> None:
    """One of the ranks that measure."""
    end_with_parent()
    from fmmeta.parallel.layout import Launch
    from fmmeta.parallel.process_groups import World, pick_device

    plan = PlanConfig(**json.loads(Path(settings).read_text()))
    launch = Launch.from_env(os.environ)
    world = World(launch, pick_device(launch))
    ranks = world.split(launch.world_size, default_group=launch.world_size > 1)
    profile = of_ranks(plan, ranks)
    if ranks.first:
        Path(out).write_text(json.dumps(asdict(profile)))
    world.close()


def of_ranks(plan: PlanConfig, ranks: Any) -> Profile:
    """What ranks that form one group (parallel/process_groups.py: ProcessGroups) can do together.

    Collective: world.
    """
    import torch

    device, bf16, size = ranks.device, plan.bf16_planned, ranks.world.size
    ranks.world.barrier()
    found = {"products": product_rate(plan, size, device, bf16)}
    ranks.world.barrier()
    found["memory"] = found["host"] = found["host_link"] = vector_rate(device)
    found["page_in"] = page_in(device)
    if device.type != "cpu":
        found["host"], found["host_link"] = vector_rate(torch.device("cpu")), copy_rate(device)
    found["link"], found["latency"] = link_rates(ranks.group, device)
    gathered = [json.loads(text) for text in ranks.world.gather_bytes(json.dumps(found).encode())]
    mean = {name: statistics.mean(one[name] for one in gathered) for name in found}
    precision = "bf16" if bf16 else "fp32"
    return Profile(
        "measured",
        device.type,
        mean["products"],
        mean["products"],
        mean["memory"],
        mean["link"],
        mean["link"],
        mean["host_link"],
        mean["host"],
        mean["latency"],
        0.0,
        0.0,
        mean["page_in"],
        f"measured on {size} ranks ({device.type}, {precision}); between nodes as inside",
    )


def product_rate(plan: PlanConfig, ranks: int, device: Any, bf16: bool) -> float:
    """Flop/s through the model's layers, in a micro-batch of a group of all ranks."""
    from fmmeta.config.settings import Config
    from fmmeta.meta.costs import rows_of
    from fmmeta.models.layer_timing import layer_seconds
    from fmmeta.models.lazy_weights import initialize, wrap_lazily
    from fmmeta.models.load import describe, empty_hf
    from fmmeta.models.pipeline_split import FAMILIES
    from fmmeta.planning.compute import count_matmuls
    from fmmeta.planning.sizes import micro_batches

    alone = {"pipeline_stages": 1, "tensor_parallel_size": 1, "lora_r": 0, "gradient_checkpointing": False}
    config = Config(**{**plan.run_settings(), **alone})
    description = describe(config)
    tokens = plan.row_tokens or plan.max_length
    rows = min(micro_batches(rows_of(config)[0], ranks, config.micro_batch_size)[1], ROWS)
    if description.hf_config.model_type not in FAMILIES:
        return plain_rate(description.hf_config.get_text_config(), rows * tokens, device, bf16)
    hf = empty_hf(config, description)
    initialize(hf, [])  # buffers only
    learner = wrap_lazily(hf, config, description)
    seconds = sum(layer_seconds(learner, rows, tokens, device, bf16))
    return rows * tokens * count_matmuls(learner, config).flops(tokens, True, False) / seconds


def plain_rate(text: Any, tokens: int, device: Any, bf16: bool) -> float:
    """Flop/s of products [tokens, H] x [H, 4 H] and their two gradients, for a family whose layers are not
    tried.
    """
    import torch

    hidden = getattr(text, "hidden_size", 768)
    dtype = torch.bfloat16 if bf16 else torch.float32
    weight = torch.randn(4 * hidden, hidden, device=device, dtype=dtype, requires_grad=True)
    inputs = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    ones = torch.ones(tokens, 4 * hidden, device=device, dtype=dtype)
    seconds = median_s(lambda: torch.nn.functional.linear(inputs, weight).backward(ones), device)
    return 3 * 2 * tokens * 4 * hidden * hidden / seconds


def vector_rate(device: Any) -> float:
    """Bytes/s of an inner step's arithmetic: two vectors read, one written."""
    import torch

    theta, gradient = torch.zeros(VECTOR, device=device), torch.ones(VECTOR, device=device)
    return 12 * VECTOR / median_s(lambda: theta.add_(gradient, alpha=-0.1), device)


def page_in(device: Any) -> float:
    """Seconds per byte of newly allocated memory, besides writing to it."""
    import torch

    there = torch.zeros(VECTOR, device=device)
    allocated = median_s(lambda: torch.ones(VECTOR, device=device), device)
    return max(0.0, allocated - median_s(lambda: there.fill_(1.0), device)) / (4 * VECTOR)


def copy_rate(device: Any) -> float:
    """Bytes/s from pinned host memory to the device."""
    import torch

    host, there = torch.zeros(VECTOR, pin_memory=True), torch.zeros(VECTOR, device=device)
    return 4 * VECTOR / median_s(lambda: there.copy_(host), device)


def link_rates(group: Any, device: Any) -> tuple[float, float]:
    """Bytes/s that a rank sends in an all-reduce, and seconds of a tiny one. Collective: group."""
    import torch

    if group.size == 1:
        return vector_rate(device), 0.0
    vector, tiny = torch.ones(LINK, device=device), torch.ones(1, device=device)
    latency = median_s(lambda: group.sum_(tiny), device)
    seconds = median_s(lambda: group.sum_(vector), device)
    return 2 * (group.size - 1) / group.size * 4 * LINK / max(seconds - latency, 1e-9), latency


def median_s(work: Callable[[], Any], device: Any) -> float:
    """Seconds of a repetition; the first two warm up."""
    import torch

    found = []
    for _ in range(REPEATS + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
