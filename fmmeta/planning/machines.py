"""What a machine can do, in a dozen numbers: stated from data sheets, read from a file, or measured
(calibrate.py).

A stated rate of matrix products is a share of the peak that trainers of large models report (their "MFU"):
0.45 in bf16, and 0.7 of the vector units' peak in fp32, where torch uses no tensor cores. It is an
assumption, and the first thing to measure.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.text import to_json

MFU_BF16, MFU_FP32, ATTAINED = 0.45, 0.7, 0.8  # ATTAINED: of memory and link rates


@dataclass(frozen=True)
class Profile:
    """Rates of one rank while all ranks of its node work: flop/s, bytes/s, seconds.

    matmul_bf16, matmul_fp32: through the layers of a model. memory: read and written by vector arithmetic on
    the device; host_memory: the same by a rank's share of the host. group_link: to another rank of the node;
    cross_link: to another node; host_link: between device and host. latency: of a collective; step_overhead:
    of a pass with an update, beside its work. hidden: share of ZeRO 3's gathers that computing hides.
    page_in: seconds per byte of newly allocated memory, besides writing to it: page faults of a CPU;
    0 where an allocator keeps what was freed, as on GPUs. device: cuda, or cpu, where memory that is not
    touched costs nothing and gloo makes a reduce-scatter out of an all-reduce.
    """

    name: str
    device: str
    matmul_bf16: float
    matmul_fp32: float
    memory: float
    group_link: float
    cross_link: float
    host_link: float
    host_memory: float
    latency: float
    step_overhead: float
    hidden: float
    page_in: float
    source: str

    def matmul(self, bf16: bool) -> float:
        return self.matmul_bf16 if bf16 else self.matmul_fp32

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.matmul_bf16 / 1e12:.3g} Tflop/s bf16, {self.matmul_fp32 / 1e12:.3g} fp32,"
            f" memory {self.memory / 1e9:.3g} GB/s, links {self.group_link / 1e9:.3g} GB/s in a node,"
            f" {self.cross_link / 1e9:.3g} between nodes, {self.latency * 1e6:.3g} us; {self.source}"
        )


def stated(
    name: str, bf16: float, fp32: float, memory: float, node: float, network: float, pcie: float
) -> Profile:
    """From a data sheet: peak flop/s; bytes/s of memory, and each way of the node's links, a GPU's share of
    the network, PCIe.
    """
    return Profile(
        name,
        "cuda",
        MFU_BF16 * bf16,
        MFU_FP32 * fp32,
        ATTAINED * memory,
        ATTAINED * node,
        ATTAINED * network,
        ATTAINED * pcie,
        20e9,
        30e-6,
        5e-3,
        0.5,
        0.0,
        "from data sheets",
    )


PROFILES = {
    "a100": stated(
        "a100", 312e12, 19.5e12, 2.0e12, 300e9, 25e9, 32e9
    ),  # SXM 80 GB; HDR InfiniBand, one port per GPU
    "h100": stated(
        "h100", 989e12, 67e12, 3.35e12, 450e9, 50e9, 64e9
    ),  # SXM; NDR InfiniBand, one port per GPU
    "h200": stated("h200", 989e12, 67e12, 4.8e12, 450e9, 50e9, 64e9),
}
MAY_BE_0 = ("hidden", "step_overhead", "latency", "page_in")
POSITIVE = [item.name for item in fields(Profile) if item.name not in ("name", "device", "source", *MAY_BE_0)]


def find(name: str) -> Profile:
    """A built-in profile or one from a JSON file. Raises `UsageError`."""
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"machine={name} is neither a file nor one of {', '.join(PROFILES)}; measure one with --calibrate"
            " --save_profile FILE.json"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"machine={name} is not JSON ({error}); fix the file") from None
    return from_values(name, values)


def from_values(name: str, values: Any) -> Profile:
    known = [item.name for item in fields(Profile)]
    given = list(values) if isinstance(values, dict) else []
    wrong = [key for key in known if key not in given] or [key for key in given if key not in known]
    if wrong:
        raise UsageError(
            f"machine={name} {'lacks' if wrong[0] in known else 'sets'} {wrong[0]}; it holds"
            f" {', '.join(known)}"
        )
    for key in known:
        if key not in ("name", "device", "source"):
            number = isinstance(values[key], (int, float)) and not isinstance(values[key], bool)
            least = 0 if key in POSITIVE else -math.ulp(0)
            if not (number and least < values[key] < math.inf) or (key == "hidden" and values[key] > 1):
                raise UsageError(
                    f"machine={name} sets {key}={json.dumps(values[key])}, which is no rate; give a positive"
                    f" number{' up to 1' if key == 'hidden' else ''}"
                )
    if values["device"] not in ("cuda", "cpu"):
        raise UsageError(f"machine={name} sets device={json.dumps(values['device'])}; use cuda or cpu")
    return Profile(**{**values, "name": str(values["name"]), "source": str(values["source"])})


def save(profile: Profile, path: str) -> None:
    """Raises `UsageError` where the file cannot be written."""
    try:
        Path(path).write_text(to_json(asdict(profile), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"save_profile={path} cannot be written ({error.strerror}); choose another file"
        ) from None
