"""Profiles of machines: rates from data sheets, from a file, or measured.

A rate of matrix products from a data sheet is a share of the peak that trainers of large models report
(their "MFU"): 0.45 in bf16, and 0.7 of the vector units' peak in fp32, where torch uses no tensor cores.
These shares are assumptions; measure them first.

`--calibrate` starts one rank per GPU (two on a machine without), and all ranks measure at the same time:

    matmul        flop/s of a forward and backward pass through each kind of layer (models/layer_timing.py),
                  in the precision that is planned
    memory        bytes/s of theta <- theta - lr gradient on vectors that no cache holds
    page_in       seconds to allocate and fill a vector, less those to fill an existing one
    link          bytes/s of an all-reduce of 32 MB between the ranks; seconds of a tiny one
    host          the vectors once more in host memory, and copies of pinned memory to the device

The overhead of an engine per pass is not measured and counts as 0. One machine cannot measure a network:
links between nodes count as links inside the node.
"""

import json
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, spawn

from fmmeta.common.errors import UsageError
from fmmeta.common.processes import end_with_parent, hidden_main_module, host_bytes
from fmmeta.config.fields import refuse_first
from fmmeta.config.settings import Config
from fmmeta.meta.costs import rows_of
from fmmeta.models.lazy_weights import initialize, wrap_lazily
from fmmeta.models.load import describe, empty_hf
from fmmeta.models.pipeline_split import FAMILIES, layer_seconds
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.network import unused_port
from fmmeta.parallel.process_groups import World, pick_device
from fmmeta.planning.compute import Profile, count_matmuls
from fmmeta.planning.memory import micro_batches
from fmmeta.planning.settings import PlanConfig

MFU_BF16, MFU_FP32, ATTAINED = 0.45, 0.7, 0.8  # ATTAINED: share of memory and link rates

DATA_SHEETS = {
    # name: peak flop/s in bf16 and fp32; bytes/s of memory, node link, network share of a GPU, PCIe; GiB
    "a100": (312e12, 19.5e12, 2.0e12, 300e9, 25e9, 32e9, 80),  # SXM 80 GB; HDR InfiniBand, one port per GPU
    "h100": (989e12, 67e12, 3.35e12, 450e9, 50e9, 64e9, 80),  # SXM; NDR InfiniBand, one port per GPU
    "h200": (989e12, 67e12, 4.8e12, 450e9, 50e9, 64e9, 141),
}
PROFILES = {
    name: Profile(
        name,
        "cuda",
        MFU_BF16 * bf16,
        MFU_FP32 * fp32,
        memory=ATTAINED * memory,
        group_link=ATTAINED * node,
        cross_link=ATTAINED * network,
        host_link=ATTAINED * pcie,
        gpu_memory_gib=gib,
    )
    for name, (bf16, fp32, memory, node, network, pcie, gib) in DATA_SHEETS.items()
}
MAY_BE_0 = ("step_overhead", "latency", "page_in", "gpu_memory_gib")
MAY_BE_ABSENT = ("gpu_memory_gib",)


def find(name: str) -> Profile:
    """A built-in profile or one from a JSON file. Raises `UsageError`."""
    if name in PROFILES:
        return PROFILES[name]
    try:
        values = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(
            f"machine={name} is neither a file nor one of {', '.join(PROFILES)}; measure one with --calibrate"
            " --save_profile FILE.json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"machine={name} is not JSON ({error}); fix the file") from None
    values = values if isinstance(values, dict) else {}
    known = [item.name for item in fields(Profile)]
    wrong = [f"lacks {key}" for key in known if key not in values and key not in MAY_BE_ABSENT]
    wrong += [f"sets {key}" for key in values if key not in known]
    if wrong:
        raise UsageError(f"machine={name} {wrong[0]}; it holds {', '.join(known)}")
    refuse_first(
        [
            (
                values["device"] not in ("cuda", "cpu"),
                f"machine={name} sets device={json.dumps(values['device'])}; use cuda or cpu",
            ),
            *(
                (
                    key in values
                    and key not in ("name", "device", "source")
                    and not is_rate(key, values[key]),
                    f"machine={name} sets {key}={json.dumps(values.get(key))}, which is no rate; give a"
                    f" positive number{' up to 1' if key == 'hidden' else ''}",
                )
                for key in known
            ),
        ]
    )
    return Profile(**{**values, "name": str(values["name"]), "source": str(values["source"])})


def is_rate(key: str, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key == "hidden":
        return is_number and 0 <= value <= 1
    return is_number and (0 < value < math.inf or (value == 0 and key in MAY_BE_0))


def write(path: str, setting: str, text: str) -> None:
    """Write a file that a setting names. Raises `UsageError`."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{setting}={path} cannot be written ({error.strerror}); choose another file"
        ) from None


VECTOR, LINK, REPEATS, ROWS = 2**24, 2**23, 5, 8  # elements, elements, times, most rows of a micro-batch
TIMEOUT_S = 600


def measure(plan: PlanConfig) -> Profile:
    """Start the ranks and return what rank 0 wrote. Raises `UsageError` if one fails."""
    count = min(plan.gpus, plan.gpus_per_node, torch.cuda.device_count() or 2)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile.json"
        try:
            with hidden_main_module():
                spawn(run_rank, (count, unused_port(), asdict(plan), out), nprocs=count, daemon=True)
        except ProcessException as error:
            raise UsageError(
                f"calibrate=True: a rank failed, or was not done after {TIMEOUT_S} s"
                f" ({str(error).strip().splitlines()[-1]}); give --machine instead"
            ) from None
        return Profile(**json.loads(out.read_text()))


def run_rank(rank: int, count: int, port: int, plan: dict[str, Any], out: Path) -> None:
    """Measure as one of `count` ranks; rank 0 writes the profile to `out`."""
    end_with_parent()
    signal.alarm(TIMEOUT_S)
    silent = os.open(os.devnull, os.O_WRONLY)  # the plan's stdout may be JSON
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    launch = Launch(rank, count, rank, count, master_port=port)
    world = World(launch, pick_device(launch))
    profile = measure_together(PlanConfig(**{**plan, "save_profile": None}), world.split(count, count > 1))
    if rank == 0:
        out.write_text(json.dumps(asdict(profile)))
    world.close()


def measure_together(plan: PlanConfig, ranks: Any) -> Profile:
    """The profile of ranks that form one group (parallel/process_groups.py: ProcessGroups).

    Collective: world.
    """
    device, size, found = ranks.device, ranks.world.size, {}
    for name, bf16 in (("matmul_bf16", True), ("matmul_fp32", False)):
        ranks.world.barrier()
        found[name] = matmul_rate(plan, size, device, bf16)
    ranks.world.barrier()
    found["memory"] = found["host_memory"] = found["host_link"] = vector_rate(device)
    theta = torch.zeros(VECTOR, device=device)
    allocated = median_s(lambda: torch.ones(VECTOR, device=device), device)
    found["page_in"] = max(0.0, allocated - median_s(lambda: theta.fill_(1.0), device)) / (4 * VECTOR)
    if device.type != "cpu":
        found["host_memory"] = vector_rate(torch.device("cpu"))
        pinned = torch.zeros(VECTOR, pin_memory=True)
        found["host_link"] = 4 * VECTOR / median_s(lambda: theta.copy_(pinned), device)
    found["link"], found["latency"] = link_rates(ranks.group, device)
    gathered = list(map(json.loads, ranks.world.gather_bytes(json.dumps(found).encode())))
    mean = {name: statistics.mean(one[name] for one in gathered) for name in found}
    link = mean.pop("link")
    return Profile(
        name="measured",
        device=device.type,
        group_link=link,
        cross_link=link,
        step_overhead=0.0,
        hidden=0.0,
        source=f"measured on {size} ranks ({device.type}); between nodes as inside",
        gpu_memory_gib=memory_gib(device, size),
        **mean,
    )


def memory_gib(device: torch.device, ranks: int) -> float:
    """Memory of a rank's GPU; without GPUs its share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    return host_bytes(ranks) / 2**30


def matmul_rate(plan: PlanConfig, ranks: int, device: Any, bf16: bool) -> float:
    """Flop/s through the model's layers, in a micro-batch of a group of all ranks."""
    config = Config(
        **{
            **plan.run_settings(),
            "pipeline_stages": 1,
            "tensor_parallel_size": 1,
            "lora_r": 0,
            "gradient_checkpointing": False,
        }
    )
    description = describe(config)
    tokens = plan.row_tokens or plan.max_length
    rows = min(micro_batches(rows_of(config)[0], ranks, config.micro_batch_size)[1], ROWS)
    if description.hf_config.model_type not in FAMILIES:
        return linear_rate(description.hf_config.get_text_config(), rows * tokens, device, bf16)
    hf = empty_hf(config, description)
    initialize(hf, [])  # buffers only
    learner = wrap_lazily(hf, config, description)
    flops = rows * tokens * count_matmuls(learner, config).flops(tokens, True, False)
    return flops / sum(layer_seconds(learner, rows, tokens, device, bf16))


def linear_rate(text: Any, tokens: int, device: Any, bf16: bool) -> float:
    """Flop/s of a matrix product [tokens, H] x [H, 4 H] and its two gradients, for a family whose layers
    cannot be run one by one.
    """
    hidden, dtype = getattr(text, "hidden_size", 768), torch.bfloat16 if bf16 else torch.float32
    weight = torch.randn(4 * hidden, hidden, device=device, dtype=dtype, requires_grad=True)
    inputs = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    ones = torch.ones(tokens, 4 * hidden, device=device, dtype=dtype)
    return (3 * 2 * tokens * 4 * hidden * hidden) / median_s(
        lambda: torch.nn.functional.linear(inputs, weight).backward(ones), device
    )


def vector_rate(device: Any) -> float:
    """Bytes/s of an inner step's arithmetic: two vectors read, one written."""
    theta, gradient = torch.zeros(VECTOR, device=device), torch.ones(VECTOR, device=device)
    return 12 * VECTOR / median_s(lambda: theta.add_(gradient, alpha=-0.1), device)


def link_rates(group: Any, device: Any) -> tuple[float, float]:
    """Bytes/s that a rank sends in an all-reduce, and seconds of a tiny one. Collective: group."""
    if group.size == 1:
        return vector_rate(device), 0.0
    vector, tiny = torch.ones(LINK, device=device), torch.ones(1, device=device)
    latency = median_s(lambda: group.sum_(tiny), device)
    seconds = median_s(lambda: group.sum_(vector), device)
    return 2 * (group.size - 1) / group.size * 4 * LINK / max(seconds - latency, 1e-9), latency


def median_s(work: Callable[[], Any], device: Any) -> float:
    """Seconds of a repetition; the first two warm up."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = []
    for _ in range(REPEATS + 2):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])
