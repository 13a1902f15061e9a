"""Lets torch.cuda show the pretended device; sitecustomize.py calls it after `import torch`."""

from __future__ import annotations

import contextlib
import os
import types
from typing import Any

import torch

from tests.support import nccl_rules
from tests.support.pretended_cuda import COUNT
from tests.support.pretended_cuda.events import device, listener, note

BYTES = 80 * 2**30
NAME = "Pretended GPU"


class Stream:
    """The one stream of a device, on which all work has ended when it is issued."""

    def __init__(self, of: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", device.pretended_device())
        self.stream_id = self.cuda_stream = 0
        self.device_index, self.device_type = self.device.index, 1

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note("wait", "stream.synchronize")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """A mark on the stream; it has been reached."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        note("wait", "event.synchronize")


def exchange_device(index: int) -> int:
    before = device.pretended_device()
    if index >= 0:
        device.pretended_set_device(index)
    return before


def properties(given: Any = None) -> Any:
    index = torch.cuda._utils._get_device_index(given, optional=True)
    return types.SimpleNamespace(
        name=NAME,
        uuid=f"GPU-pretended-{index}",
        total_memory=BYTES,
        major=9,
        minor=0,
        multi_processor_count=132,
        warp_size=32,
        gcnArchName="",
    )


def memory_stats(device_: Any = None, **_: Any) -> dict[str, int]:
    used, most = device.pretended_in_use(), device.pretended_peak()
    numbers = {"current": used, "peak": most}
    return {f"{kind}_bytes.all.{key}": n for kind in ("allocated", "reserved") for key, n in numbers.items()}


def install() -> None:
    """Replace what the CPU build of torch lacks. Local."""
    count = int(os.environ[COUNT])
    device.pretended_set_count(count)
    device.pretended_listen(listener)
    nothing = lambda *_, **__: None  # noqa: E731
    of_library: dict[str, Any] = {
        "getDevice": lambda: device.pretended_device(),
        "setDevice": lambda index: device.pretended_set_device(index),
        "getDeviceCount": lambda: count,
        "synchronize": lambda: note("wait", "synchronize"),
        "getCurrentRawStream": lambda index: 0,
        "emptyCache": nothing,
        "resetPeakMemoryStats": lambda index: device.pretended_reset_peak(),
        "isCurrentStreamCapturing": lambda: False,
        "canDeviceAccessPeer": lambda *_: True,
    }
    for name, value in of_library.items():
        setattr(torch._C, f"_cuda_{name}", value)
    shown: dict[str, Any] = {
        "_initialized": True,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "default_generators": (torch.default_generator,) * count,
        "device_count": lambda: count,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": properties,
        "is_bf16_supported": lambda *_, **__: True,
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "default_stream": Stream,
        "set_stream": nothing,
        "stream": lambda stream: contextlib.nullcontext(),
        "memory_stats": memory_stats,
        "mem_get_info": lambda device=None: (BYTES - memory_stats()["allocated_bytes.all.current"], BYTES),
        "_sleep": nothing,
    }
    for name, value in shown.items():
        setattr(torch.cuda, name, value)
    for name in ("memory_stats", "mem_get_info"):
        setattr(torch.cuda.memory, name, shown[name])
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, nothing)
    torch.Tensor.record_stream = nothing  # type: ignore[method-assign]
    nccl_rules.install_nccl()
