"""`fmmeta doctor`: is this machine fit to train on? A line per question, with what to do where the answer is
no.

Looks and changes nothing. ok, warning (a run works, but slower or up to a limit), problem (a run will fail);
exit code 0 without problems, else 2.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fmmeta.common.security import GIB

TESTED = {
    "torch": ("2.6", "2.14"),
    "deepspeed": ("0.19.8", "0.20"),
    "transformers": ("5.0", "6"),
    "datasets": ("4.0", "6"),
    "accelerate": ("1.10", "2"),
    "safetensors": ("0.5", ""),
}
"""First version that is tested, and the first one that is not; as in setup.py."""
SHM_GIB, DISK_GIB, FILES = 1.0, 5.0, 4096
OLD_LOCK_S = 600.0


@dataclass(frozen=True)
class Finding:
    name: str
    level: str  # ok, warning, problem
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.name}: {self.text}" + (f"; {self.fix}" if self.fix else "")


@dataclass
class DoctorConfig:
    """It takes no flags."""


def run(config: DoctorConfig) -> None:
    """Print the findings; end with exit code 2 where there is a problem."""
    findings = [finding for look in LOOKS for finding in seen(look)]
    for finding in findings:
        print(finding)
    problems = sum(finding.level == "problem" for finding in findings)
    print(f"{problems} problems, {sum(finding.level == 'warning' for finding in findings)} warnings")
    if problems:
        sys.exit(2)


def seen(look: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return look()
    except Exception as error:  # a broken driver must not hide the other answers
        return [
            Finding(
                look.__name__,
                "problem",
                f"{type(error).__name__}: {' '.join(str(error).split())}",
                "fix that first",
            )
        ]


def python() -> list[Finding]:
    fits = (3, 10) <= sys.version_info[:2] < (3, 13)
    return [
        Finding(
            "python",
            "ok" if fits else "problem",
            platform.python_version(),
            "" if fits else "use 3.10 to 3.12",
        )
    ]


def versions() -> list[Finding]:
    found = []
    for package, (least, beyond) in TESTED.items():
        try:
            here = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(package, "problem", "is not installed", f"pip install '{package}>={least}'"))
            continue
        tested = numbers(here) >= numbers(least) and not (beyond and numbers(here) >= numbers(beyond))
        fix = "" if tested else f"tested are {least} to below {beyond or 'any'}; pip install -e ."
        found.append(Finding(package, "ok" if tested else "warning", here, fix))
    return found


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


def accelerator() -> list[Finding]:
    import torch
    import torch.cuda.nccl

    from fmmeta.parallel.process_groups import backends

    gloo, nccl = backends()
    backend = (
        [Finding("gloo", "ok", "is there")]
        if gloo
        else [Finding("gloo", "problem", "is missing from this torch", "install an official build")]
    )
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "no GPU that torch can use"
        has = shutil.which("nvidia-smi") is not None
        fix = "nvidia-smi is here: install a torch with CUDA" if has else "runs use the CPU, over gloo"
        return [Finding("accelerator", "warning", why, fix), *backend]
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    free = [torch.cuda.mem_get_info(number)[0] / GIB for number in range(len(names))]
    busy = [number for number, room in enumerate(free) if room < 1]
    found = [Finding("accelerator", "ok", f"{len(names)} x {names[0]}, {min(free):.0f} GiB free at least")]
    if busy:
        found.append(
            Finding(
                "gpu memory",
                "warning",
                f"GPU {busy[0]} has less than 1 GiB free",
                "end what uses it (nvidia-smi)",
            )
        )
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "is missing"
    found.append(
        Finding(
            "nccl", "ok" if nccl else "problem", version, "" if nccl else "install an official build of torch"
        )
    )
    return found + backend


def compilers() -> list[Finding]:
    """Nothing of ours is compiled; DeepSpeed's offload to CPUs and fused optimizers are."""
    missing = [name for name in ("c++", "ninja") if shutil.which(name) is None]
    if missing:
        return [
            Finding(
                "compilers",
                "warning",
                f"{' and '.join(missing)} not found",
                "only DeepSpeed's own ops need them",
            )
        ]
    return [Finding("compilers", "ok", "c++ and ninja")]


def build_locks() -> list[Finding]:
    """A process killed while it compiled leaves a lock that every later one waits for."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    stale = [lock for lock in root.glob("**/lock") if age_s(lock) > OLD_LOCK_S]
    if stale:
        return [
            Finding(
                "build locks",
                "problem",
                f"{len(stale)} stale, such as {stale[0]}",
                f"rm {' '.join(map(str, stale[:3]))}",
            )
        ]
    return [Finding("build locks", "ok", "none")]


def age_s(file: Path) -> float:
    """Seconds since the last change; 0 if another process has removed it."""
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return 0.0


def disk() -> list[Finding]:
    from fmmeta.tasks.data.token_store import cache_folder

    found = []
    for what, folder in (("disk here", Path.cwd()), ("disk of the cache", cache_folder())):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free / GIB
        level = "ok" if free > DISK_GIB else "warning"
        fix = "" if free > DISK_GIB else "a checkpoint takes 12 bytes per parameter; free some room"
        if not os.access(there, os.W_OK):
            level, fix = (
                "problem",
                "it cannot be written to; choose another --output_dir or HF_DATASETS_CACHE",
            )
        found.append(Finding(what, level, f"{free:.1f} GiB free in {there}", fix))
    return found


def shared_memory() -> list[Finding]:
    """Loader processes and NCCL pass data through it."""
    from fmmeta.tasks.episode_folder import stale

    place = Path("/dev/shm")
    if not place.is_dir():
        return [
            Finding(
                "shared memory",
                "warning",
                "/dev/shm is missing",
                "episodes pass through the temporary folder",
            )
        ]
    free = shutil.disk_usage(place).free / GIB
    left = list(stale())
    found = [
        Finding(
            "shared memory",
            "ok" if free >= SHM_GIB else "warning",
            f"{free:.1f} GiB free in /dev/shm",
            "" if free >= SHM_GIB else "start the container with --shm-size=8g",
        )
    ]
    if left:
        found.append(
            Finding(
                "left in memory",
                "warning",
                f"{len(left)} folders of trainers that were killed",
                f"rm -r {left[0]}",
            )
        )
    return found


def limits() -> list[Finding]:
    found = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= FILES
    found.append(
        Finding(
            "open files",
            "ok" if enough else "warning",
            f"{soft} allowed",
            "" if enough else f"ulimit -n {min(FILES, hard) if hard > 0 else FILES}",
        )
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY:
        found.append(
            Finding(
                "locked memory",
                "warning",
                f"{locked // 1024} KiB allowed",
                "InfiniBand needs `ulimit -l unlimited`",
            )
        )
    return found


def memory() -> list[Finding]:
    from fmmeta.common.host_memory import host_bytes

    free = host_bytes(1) / GIB
    return [
        Finding(
            "host memory",
            "ok" if free > 4 else "warning",
            f"{free:.1f} GiB that a process may take",
            "" if free > 4 else "end other processes, or raise the cgroup's limit",
        )
    ]


def launchers() -> list[Finding]:
    """Whether the command `deepspeed` is the one of this Python."""
    here = shutil.which("deepspeed")
    if here is None:
        return [
            Finding(
                "launcher",
                "warning",
                "`deepspeed` is not on the PATH",
                f"PATH={Path(sys.executable).parent}:$PATH",
            )
        ]
    own = (
        Path(here).resolve().parent == Path(sys.executable).parent.resolve()
        or Path(here).parent == Path(sys.executable).parent
    )
    return [
        Finding(
            "launcher",
            "ok" if own else "warning",
            here,
            "" if own else f"it belongs to another Python than {sys.executable}",
        )
    ]


def loopback() -> list[Finding]:
    """Loopback answers: ranks of one node meet there."""
    ran = subprocess.run(
        [sys.executable, "-c", LOOPBACK], capture_output=True, text=True, timeout=30, check=False
    )
    good = ran.returncode == 0
    return [
        Finding(
            "loopback",
            "ok" if good else "problem",
            "ranks can meet" if good else ran.stderr.strip().split("\n")[-1],
            "" if good else "allow connections to 127.0.0.1",
        )
    ]


def network() -> list[Finding]:
    """Interfaces, timeouts and the flight recorder as the environment sets them; the address that other nodes
    would be told.
    """
    import torch

    from fmmeta.parallel.network import interfaces, is_loopback, issues, own_addresses

    known = interfaces()
    wrong = list(issues(os.environ, known, torch.cuda.is_available()))
    found = [Finding("network", "problem" if one.fatal else "warning", one.text, one.fix) for one in wrong]
    up = [one.name for one in known if one.up and one.addresses and not any(map(is_loopback, one.addresses))]
    if not found:
        found.append(Finding("network", "ok", f"{', '.join(up) or 'no interface but loopback'} up"))
    if not os.environ.get("GLOO_SOCKET_IFNAME") and all(map(is_loopback, own_addresses())):
        text = f"{platform.node()} stands for a loopback address, which other nodes cannot reach"
        found.append(
            Finding(
                "host name",
                "warning",
                text,
                "runs on several nodes choose GLOO_SOCKET_IFNAME by MASTER_ADDR, or set it",
            )
        )
    return found


LOOPBACK = (
    "import socket as s; a = s.create_server(('127.0.0.1', 0)); s.create_connection(a.getsockname(), 5)"
)
LOOKS = (
    python,
    versions,
    accelerator,
    compilers,
    build_locks,
    disk,
    shared_memory,
    limits,
    memory,
    launchers,
    loopback,
    network,
)
