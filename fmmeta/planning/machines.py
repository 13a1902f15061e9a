"""Profiles of machines: rates from data sheets, and from a file of the user.

A rate of matrix products from a data sheet is a share of the peak that trainers of large models report
(their "MFU"): 0.45 in bf16, and 0.7 of the vector units' peak in fp32, where torch uses no tensor cores.
These shares are assumptions.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.config.fields import check_values, of_type, refuse_first, setting

MFU_BF16, MFU_FP32, ATTAINED = 0.45, 0.7, 0.8  # ATTAINED: share of memory and link rates


@dataclass(frozen=True)
class Profile:
    """Rates of one rank while all ranks of its node work: flop/s, bytes/s, seconds."""

    name: str = setting("", "Name of the machine")
    device: str = setting(
        "cuda",
        "cpu: untouched memory costs nothing, and gloo implements a reduce-scatter as an all-reduce",
        ("cuda", "cpu"),
    )
    matmul_bf16: float = setting(1e12, "Through the layers of a model, in bf16", positive=True)
    matmul_fp32: float = setting(1e12, "The same in fp32", positive=True)
    memory: float = setting(1e12, "Read and written by vector arithmetic on the device", positive=True)
    group_link: float = setting(1e11, "To another rank of the node", positive=True)
    cross_link: float = setting(1e10, "To another node", positive=True)
    host_link: float = setting(1e10, "Between device and host", positive=True)
    host_memory: float = setting(20e9, "As memory, by a rank's share of the host", positive=True)
    latency: float = setting(30e-6, "Of a collective", least=0)
    step_overhead: float = setting(5e-3, "Of a pass with an update, beside its work", least=0)
    hidden: float = setting(0.5, "Share of ZeRO 3's gathers that computing hides", least=0, most=1)
    source: str = setting("from data sheets", "Where the rates are from")
    gpu_memory_gib: float = setting(0.0, "Of a rank; 0: not known", least=0)

    def matmul(self, bf16: bool) -> float:
        return self.matmul_bf16 if bf16 else self.matmul_fp32

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.matmul_bf16 / 1e12:.3g} Tflop/s bf16, {self.matmul_fp32 / 1e12:.3g} fp32,"
            f" memory {self.memory / 1e9:.3g} GB/s, links {self.group_link / 1e9:.3g} GB/s in a node,"
            f" {self.cross_link / 1e9:.3g} between nodes, {self.latency * 1e6:.3g} us; {self.source}"
        )


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


def find(name: str) -> Profile:
    """A built-in profile, or the one of h100 with the rates of a JSON file. Raises `UsageError`."""
    if name in PROFILES:
        return PROFILES[name]
    with usage_errors(
        f"machine={name} is none of {', '.join(PROFILES)}, and cannot be read",
        "give one of them, or a JSON file",
    ):
        values = json.loads(Path(name).read_text(encoding="utf-8"))
    known = [item.name for item in fields(Profile)]
    listed = f"it holds one or more of {', '.join(known)}"
    refuse_first([(not isinstance(values, dict), f"machine={name} is no JSON object; {listed}")])
    refuse_first((key not in known, f"machine={name} sets {key}; {listed}") for key in values)
    given = {"name": Path(name).stem, "source": f"from {name}", **values}
    try:
        typed = {key: of_type(Profile, key, value) for key, value in given.items()}
        profile = replace(PROFILES["h100"], **typed)
        check_values(profile)
    except UsageError as error:
        raise UsageError(f"machine={name}: {error}") from None
    return profile
