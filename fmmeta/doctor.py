"""`fmmeta doctor`: checks whether this machine can train; a line per check, with what to do. `fmmeta env`:
what a bug report needs.

Both change nothing. Levels: ok, warning (a run works, but slower or up to a limit), problem (a run will
fail); exit code 0 without problems, else 2.
"""

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import fmmeta
from fmmeta.common import install
from fmmeta.common.errors import one_line
from fmmeta.common.processes import host_bytes, output_of
from fmmeta.common.security import GIB, SECRET, printable, redact

SHM_GIB, DISK_GIB, FILES = 1.0, 5.0, 4096
OLD_LOCK_S = 600.0
LAUNCHER = re.compile(
    "(GLOBAL_|LOCAL_|GROUP_|CROSS_|ROLE_)?(RANK|WORLD_SIZE|SIZE)$|MASTER_(ADDR|PORT)$|TORCHELASTIC_|SLURM_(N|PROCID"
    "|LOCALID|STEP_N|JOB_ID|JOB_N|TASKS|CPUS)|ACCELERATE_|DS_|DEEPSPEED_|FMMETA_|NCCL_|GLOO_|TP_|CUDA_VISIBLE|OMP_NUM"
    "|HF_(HUB_OFFLINE|ENDPOINT|HOME|DATASETS_(CACHE|OFFLINE))|TRANSFORMERS_OFFLINE|TORCH_(NCCL|DISTRIBUTED|FR_)"
    "|PYTORCH_(CUDA_)?ALLOC|TORCHFT_|UCX_|FI_|OMPI_COMM_WORLD|(PMI|PMIX|MV2|MVP|MPI|JSM|FLUX|PALS|HOROVOD)_"
)
"""Environment variables that change how a run starts, communicates or allocates."""


@dataclass(frozen=True)
class Finding:
    """The answer to a question. fix, severity: what to do if it is not good, and how bad that is."""

    name: str
    good: bool
    text: str
    fix: str = ""
    severity: str = "warning"  # or problem

    @property
    def level(self) -> str:
        return "ok" if self.good else self.severity

    def __str__(self) -> str:
        return f"{self.level:8} {self.name}: {self.text}" + ("" if self.good else f"; {self.fix}")


@dataclass
class DoctorConfig:
    """It takes no flags."""


def run(config: DoctorConfig) -> None:
    """Print the findings; end with exit code 2 where there is a problem."""
    findings = [finding for check in CHECKS for finding in findings_of(check)]
    levels = [finding.level for finding in findings]
    print("\n".join(map(str, findings)))
    print(f"{levels.count('problem')} problems, {levels.count('warning')} warnings")
    if "problem" in levels:
        sys.exit(2)


@dataclass
class EnvConfig:
    """It takes no flags."""


def print_environment(config: EnvConfig) -> None:
    """Print what a bug report needs, without secrets."""
    print("\n".join(f"{name:13} {printable(redact(text))}" for name, text in environment().items()))


def environment() -> dict[str, str]:
    """Versions, installation, machine, GPUs and launcher of this process, by name."""
    import torch.cuda.nccl

    from fmmeta.parallel.process_groups import backends
    from fmmeta.training.run_files import PACKAGES

    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    named = {f"{one.name}, {one.total_memory / GIB:.1f} GiB" for one in gpus}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = output_of(query).split("\n")[0]
    _, nccl = backends()
    launcher = {name: os.environ[name] for name in sorted(os.environ) if LAUNCHER.match(name)}
    return {
        "fmmeta": f"{install.version('fmmeta') or fmmeta.__version__}, {installation()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        **{name: install.version(name) or "not installed" for name in PACKAGES if name != "fmmeta"},
        "system": f"{platform.platform()}, {platform.machine()}",
        "CPUs": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, {torch.get_num_threads()} threads",
        "memory": f"{host_bytes(1) / GIB:.1f} GiB that a process may allocate",
        "GPUs": f"{len(gpus)} x {' and '.join(sorted(named))}" if gpus else "none that torch can use",
        "CUDA": f"{torch.version.cuda or 'not in this torch'}{f', driver {driver}' if driver else ''}",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not in this torch",
        "launcher": " ".join(
            f"{name}={'***' if SECRET.search(name) else one_line(value)}" for name, value in launcher.items()
        )
        or "no variables set",
    }


def installation() -> str:
    """How fmmeta was installed: from a wheel, editable, or used in a checkout; the commit of a checkout."""
    folder, how = Path(fmmeta.__file__).parents[1], "checkout"
    in_git = (folder / ".git").exists()
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):
        found = importlib.metadata.distribution("fmmeta")
        # a build may have left metadata in the checkout
        if not in_git and folder == Path(str(found.locate_file(""))).resolve():
            how = "wheel"
        source = json.loads(found.read_text("direct_url.json") or "{}")
        if source.get("dir_info", {}).get("editable") and source["url"].endswith(folder.as_posix()):
            how = "editable install"
    describe = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=, changed"]
    commit = output_of(["git", "-C", str(folder), *describe]) if in_git else ""
    return f"{how} in {folder}{', commit ' if commit else ''}{commit}"


def findings_of(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of a check; its error is a problem, so that a broken driver does not hide the others."""
    try:
        return list(check())
    except Exception as error:
        return [
            Finding(
                check.__name__,
                False,
                f"{type(error).__name__}: {one_line(error)}",
                "fix that first",
                "problem",
            )
        ]


def versions() -> Iterator[Finding]:
    """Versions of packages against those that are tested."""
    for wanted, here, tested in install.versions():
        fix = f"pip install '{wanted}'"
        if here is None:
            yield Finding(wanted.name, False, "is not installed", fix, "problem")
        else:
            yield Finding(wanted.name, tested, here, f"it is not tested; {fix}")


def accelerator() -> Iterator[Finding]:
    """GPUs with their memory, and the communication backends of torch."""
    import torch.cuda.nccl

    from fmmeta.parallel.process_groups import backends

    gloo, nccl = backends()
    official = "install an official build of torch"
    yield Finding("gloo", gloo, "is there" if gloo else "is missing from this torch", official, "problem")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "no GPU that torch can use" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
        yield Finding(
            "accelerator",
            False,
            why,
            "nvidia-smi is here: install a torch with CUDA"
            if shutil.which("nvidia-smi")
            else "runs use the CPU, over gloo",
        )
        return
    free = [torch.cuda.mem_get_info(number)[0] / GIB for number in range(torch.cuda.device_count())]
    yield Finding(
        "accelerator",
        True,
        f"{len(free)} x {torch.cuda.get_device_name(0)}, {min(free):.0f} GiB free at least",
    )
    if min(free) < 1:
        yield Finding(
            "gpu memory",
            False,
            f"GPU {free.index(min(free))} has less than 1 GiB free",
            "end what uses it (nvidia-smi)",
        )
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "is missing"
    yield Finding("nccl", nccl, version, official, "problem")


def build_locks() -> Iterator[Finding]:
    """A process that is killed while it compiles leaves a lock that every later one waits for."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    stale = [lock for lock in root.glob("**/lock") if age_s(lock) > OLD_LOCK_S]
    yield Finding(
        "build locks",
        not stale,
        f"{len(stale)} stale, such as {stale[0]}" if stale else "none",
        f"rm {' '.join(map(str, stale[:3]))}",
        "problem",
    )


def age_s(file: Path) -> float:
    """Seconds since the last change; 0 if another process has removed the file."""
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return 0.0


def disk() -> Iterator[Finding]:
    """Free space here and in the cache."""
    from fmmeta.tasks.data.token_store import cache_folder

    for what, folder in (("disk here", Path.cwd()), ("disk of the cache", cache_folder())):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free / GIB
        text = f"{free:.1f} GiB free in {there}"
        if os.access(there, os.W_OK):
            yield Finding(
                what, free > DISK_GIB, text, "a checkpoint takes 12 bytes per parameter; free some room"
            )
        else:
            yield Finding(
                what,
                False,
                text,
                "it cannot be written to; choose another --output_dir or HF_DATASETS_CACHE",
                "problem",
            )


def shared_memory() -> Iterator[Finding]:
    """Loader processes and NCCL pass data through /dev/shm."""
    from fmmeta.tasks.loader import stale

    name, place = "shared memory", Path("/dev/shm")
    if not place.is_dir():
        yield Finding(name, False, f"{place} is missing", "episodes pass through the temporary folder")
        return
    free = shutil.disk_usage(place).free / GIB
    yield Finding(
        name,
        free >= SHM_GIB,
        f"{free:.1f} GiB free in {place}",
        "start the container with --shm-size=8g",
    )
    if left := list(stale()):
        yield Finding(
            "left in memory",
            False,
            f"{len(left)} folders of trainers that were killed",
            f"rm -r {left[0]}",
        )


def limits() -> Iterator[Finding]:
    """Resource limits of this shell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding(
        "open files",
        soft == resource.RLIM_INFINITY or soft >= FILES,
        f"{soft} allowed",
        f"ulimit -n {min(FILES, hard) if hard > 0 else FILES}",
    )


def memory() -> Iterator[Finding]:
    """Memory that a process may allocate."""
    free = host_bytes(1) / GIB
    yield Finding(
        "host memory",
        free > 4,
        f"{free:.1f} GiB that a process may allocate",
        "end other processes, or raise the cgroup's limit",
    )


def launchers() -> Iterator[Finding]:
    """Whether the command `deepspeed` belongs to this Python."""
    here, folder = shutil.which("deepspeed"), Path(sys.executable).parent
    if here is None:
        yield Finding("launcher", False, "`deepspeed` is not on the PATH", f"PATH={folder}:$PATH")
    else:
        own = folder.resolve() in (Path(here).resolve().parent, Path(here).parent.resolve())
        yield Finding("launcher", own, here, f"it belongs to another Python than {sys.executable}")


def loopback() -> Iterator[Finding]:
    """Ranks of one node connect over the loopback address."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 5).close()
        yield Finding("loopback", True, "ranks can connect")
    except OSError as error:
        yield Finding("loopback", False, one_line(error), "allow connections to 127.0.0.1", "problem")


def network() -> Iterator[Finding]:
    """The interfaces named in GLOO_SOCKET_IFNAME, and this host's address."""
    from fmmeta.parallel.network import interfaces, is_loopback, issues, not_loopback, own_addresses

    known = interfaces()
    wrong = [text.split("; ") for text in issues(os.environ, known)]
    for text, fix in wrong:
        yield Finding("network", False, text, fix, "problem")
    up = [one.name for one in not_loopback(known) if one.addresses]
    if not wrong:
        yield Finding("network", True, f"{', '.join(up) or 'no interface but loopback'} up")
    if not os.environ.get("GLOO_SOCKET_IFNAME") and all(map(is_loopback, own_addresses())):
        yield Finding(
            "host name",
            False,
            f"{platform.node()} stands for a loopback address, which other nodes cannot reach",
            "runs on several nodes choose GLOO_SOCKET_IFNAME by MASTER_ADDR, or set it",
        )


CHECKS = (
    versions,
    accelerator,
    build_locks,
    disk,
    shared_memory,
    limits,
    memory,
    launchers,
    loopback,
    network,
)
