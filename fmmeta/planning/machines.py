"""Profiles of machines: rates from data sheets, from a file, or measured (calibrate.py).

A rate of matrix products from a data sheet is a share of the peak that trainers of large models report
(their "MFU"): 0.45 in bf16, and 0.7 of the vector units' peak in fp32, where torch uses no tensor cores.
These shares are assumptions; measure them first.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fmmeta.common.errors import UsageError
from fmmeta.common.text import to_json

MFU_BF16, MFU_FP32, ATTAINED = 0.45, 0.7, 0.8  # ATTAINED: share of memory and link rates


@dataclass(frozen=True)
class Profile:
    """Rates of one rank while all ranks of its node work: flop/s, bytes/s, seconds.

    matmul_bf16, matmul_fp32: through the layers of a model. memory: read and written by vector arithmetic on
    the device; host_memory: the same by a rank's share of the host. group_link: to another rank of the node;
    cross_link: to another node; host_link: between device and host. latency: of a collective; step_overhead:
    of a pass with an update, beside its work. hidden: share of ZeRO 3's gathers that computing hides.
    page_in: seconds per byte of newly allocated memory, besides writing to it: page faults of a CPU;
    0 for an allocator that reuses freed memory, as on GPUs. device: cuda, or cpu, where untouched memory
    costs nothing and gloo implements a reduce-scatter as an all-reduce.
    """

    name: str
    device: str
    matmul_bf16: float
    matmul_fp32: float
    memory: float
    group_link: float
    cross_link: float
    host_link: float
    host_memory: float = 20e9
    latency: float = 30e-6
    step_overhead: float = 5e-3
    hidden: float = 0.5
    page_in: float = 0.0
    source: str = "from data sheets"

    def matmul(self, bf16: bool) -> float:
        return self.matmul_bf16 if bf16 else self.matmul_fp32

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.matmul_bf16 / 1e12:.3g} Tflop/s bf16, {self.matmul_fp32 / 1e12:.3g} fp32,"
            f" memory {self.memory / 1e9:.3g} GB/s, links {self.group_link / 1e9:.3g} GB/s in a node,"
            f" {self.cross_link / 1e9:.3g} between nodes, {self.latency * 1e6:.3g} us; {self.source}"
        )


DATA_SHEETS = {
    # name: peak flop/s in bf16 and fp32; bytes/s of memory, node link, network share of a GPU, PCIe
    "a100": (312e12, 19.5e12, 2.0e12, 300e9, 25e9, 32e9),  # SXM 80 GB; HDR InfiniBand, one port per GPU
    "h100": (989e12, 67e12, 3.35e12, 450e9, 50e9, 64e9),  # SXM; NDR InfiniBand, one port per GPU
    "h200": (989e12, 67e12, 4.8e12, 450e9, 50e9, 64e9),
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
    )
    for name, (bf16, fp32, memory, node, network, pcie) in DATA_SHEETS.items()
}
MAY_BE_0 = ("hidden", "step_overhead", "latency", "page_in")


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
    values = values if isinstance(values, dict) else {}
    known = [item.name for item in fields(Profile)]
    wrong = [f"lacks {key}" for key in known if key not in values]
    wrong += [f"sets {key}" for key in values if key not in known]
    if wrong:
        raise UsageError(f"machine={name} {wrong[0]}; it holds {', '.join(known)}")
    if values["device"] not in ("cuda", "cpu"):
        raise UsageError(f"machine={name} sets device={json.dumps(values['device'])}; use cuda or cpu")
    for key in known:
        if key not in ("name", "device", "source") and not is_rate(key, values[key]):
            raise UsageError(
                f"machine={name} sets {key}={json.dumps(values[key])}, which is no rate; give a positive"
                f" number{' up to 1' if key == 'hidden' else ''}"
            )
    return Profile(**{**values, "name": str(values["name"]), "source": str(values["source"])})


def is_rate(key: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    most = 1 if key == "hidden" else math.inf
    return (0 < value < math.inf or (value == 0 and key in MAY_BE_0)) and value <= most


def save(profile: Profile, path: str) -> None:
    """Raises `UsageError` if the file cannot be written."""
    write(path, "save_profile", to_json(asdict(profile), indent=1) + "\n")


def write(path: str, setting: str, text: str) -> None:
    """Write a file that a setting names. Raises `UsageError`."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{setting}={path} cannot be written ({error.strerror}); choose another file"
        ) from None
