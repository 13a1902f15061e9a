"""`fmmeta elastic`: starts the groups of an elastic run on this node and restarts those that die.

A group is the processes of one launch; if one of them ends badly, all of them are ended and the group is
restarted. The supervisor stores no state. If it dies, groups of one rank continue (and need another
lighthouse, if it ran here); larger ones stop after a save, as without any launcher.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from fmmeta.common.errors import EXIT_FAULT, EXIT_STOPPED, UsageError
from fmmeta.config.settings import Config, setting
from fmmeta.elastic.lighthouse import LighthouseConfig, open_lighthouse
from fmmeta.elastic.lighthouse_client import coordination
from fmmeta.report.data import read_run
from fmmeta.training.run_folder import lock_folder

KILL_S = 30.0  # that the other ranks of a group in which one has died get to end by themselves
PAUSE_S = 0.2
WRITER_S = (
    60.0  # without a group that holds the folder, after which no other node is expected to finish the run
)


@dataclass
class ElasticConfig(Config):
    """The settings of the run, and of its groups on this node."""

    groups: int = setting(2, "Groups of this node")
    ranks_per_group: int = setting(
        1, "Processes of each group; on GPU machines each has one of the node's GPUs"
    )
    max_restarts: int = setting(100, "Times that each group is started again")
    heartbeat_timeout: float = setting(
        5.0, "Of the lighthouse that is started where no --lighthouse is given"
    )

    def __post_init__(self) -> None:
        self.elastic, self.group_name = True, self.group_name or "group"
        for name in ("groups", "ranks_per_group"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} is below 1; use 1 or more")
        if self.max_restarts < 0 or self.heartbeat_timeout <= 0:
            raise UsageError(
                "max_restarts or heartbeat_timeout is below what can be; use 0 or more, and a positive number"
            )
        super().__post_init__()


class Process(Protocol):
    """A rank as a subprocess, leader of a separate session."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, sig: int) -> None: ...


@dataclass
class Group:
    """A launch: how often it was started, its processes, and how it ended for good (None: it has not)."""

    name: str
    starts: int = 0
    processes: list[Process] = field(default_factory=list)
    ended: int | None = None

    def ask(self) -> None:
        """Send SIGTERM to every remaining rank; ranks end their loader processes."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill every remaining rank and the other processes of its session."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Supervisor:
    """Starts groups and restarts those that die. say: prints a line."""

    def __init__(self, config: ElasticConfig, say: Callable[[str], None] | None = None) -> None:
        self.config, self.say = config, say or (lambda text: print(text, flush=True))
        self.groups = [Group(f"{config.group_name}{number}") for number in range(config.groups)]
        self.asked = 0
        self.server: Any = None
        self.shared = bool(
            config.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        )  # with groups of other nodes
        self.file = ""

    def run(self) -> int:
        """Until all groups have ended for good.

        The exit code: 0 if the run is finished by its own record, else that of the first group that failed,
        or 70.
        """
        self.begin()
        try:
            while any(group.ended is None for group in self.groups):
                for group in self.groups:
                    self.look(group)
                time.sleep(PAUSE_S)
        finally:
            os.unlink(self.file)
            if self.server is not None:
                self.server.shutdown()  # its threads would keep the process
        if self.finished():
            return 0
        codes = [group.ended for group in self.groups]
        if not self.asked:
            self.say(
                f"fmmeta: error: output_dir={self.config.output_dir} holds no finished run, and all groups"
                f" have ended (exit codes {', '.join(map(str, codes))}); read their last lines, then run the"
                " same command again"
            )
        return next((code for code in codes if code), EXIT_STOPPED if self.asked else EXIT_FAULT)

    def finished(self) -> bool:
        """Whether run.json says so and the model is there.

        As long as a group of another node may be writing it, wait.
        """
        folder, free_since = Path(str(self.config.output_dir)), time.monotonic()
        while True:
            with suppress(UsageError):  # it cannot be read
                if (read_run(folder) or {}).get("finished") and (folder / "model").is_dir():
                    return True
            if (
                not self.shared
                or self.asked
                or not folder.is_dir()
                or time.monotonic() - free_since > WRITER_S
            ):
                return False
            try:
                lock_folder(folder, 0, quiet=True).close()
            except UsageError:
                free_since = time.monotonic()
            time.sleep(PAUSE_S)

    def begin(self) -> None:
        """Start a lighthouse if none is given, and write the settings file of the groups."""
        if not self.shared:
            light = LighthouseConfig(
                host="127.0.0.1", port=0, heartbeat_timeout=self.config.heartbeat_timeout
            )
            self.server, self.config.lighthouse = open_lighthouse(light)
        known = {item.name for item in fields(Config)}
        settings = {
            name: value
            for name, value in asdict(self.config).items()
            if name in known and value not in (None, [])
        }
        settings.pop("group_name")
        with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="fmmeta-elastic-", delete=False) as file:
            json.dump(settings, file)
        self.file = file.name

    def look(self, group: Group) -> None:
        """Start a group, check whether it has ended, end its remaining processes, restart it."""
        if group.ended is not None:
            return
        if not group.processes:
            self.start(group)
            return
        codes = [process.poll() for process in group.processes]
        if all(code == 0 for code in codes):
            group.ended = 0
        elif any(codes):
            code = next(code for code in codes if code)
            self.finish(group, code)
            if code in (2, EXIT_STOPPED) or self.asked:
                group.ended = code
            elif group.starts > self.config.max_restarts:
                self.say(
                    f"fmmeta: {group.name} has ended {group.starts} times, the last with {code}; it is not"
                    " started again"
                )
                group.ended = code
            else:
                self.say(f"fmmeta: {group.name} has ended with {code}; it is started again ({group.starts})")
                self.start(group)

    def finish(self, group: Group, code: int) -> None:
        """End the remaining ranks: after a usage error they end themselves, after a death they do not."""
        deadline = time.monotonic() + (KILL_S if code in (2, EXIT_STOPPED) else 0)
        while time.monotonic() < deadline and any(process.poll() is None for process in group.processes):
            time.sleep(PAUSE_S)
        group.kill()
        for process in group.processes:
            process.wait()

    def start(self, group: Group) -> None:
        """A separate launch: own ranks, own port."""
        size, number, port = self.config.ranks_per_group, self.groups.index(group), free_port()
        group.starts += 1
        group.processes = []
        for rank in range(size):
            env = {
                **os.environ,
                **self.devices(number),
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            command = [
                sys.executable,
                "-m",
                "fmmeta",
                "train",
                "--config",
                self.file,
                "--group_name",
                group.name,
            ]
            group.processes.append(self.spawn(group.name, command, env))

    def spawn(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Process:
        """A rank whose output is passed on."""
        process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        threading.Thread(target=self.pass_on, args=(name, process.stdout), daemon=True).start()
        return process

    def devices(self, number: int) -> dict[str, str]:
        """The GPUs of a group, out of those of this node."""
        size, found = self.config.ranks_per_group, torch.cuda.device_count()
        if not found:
            return {}
        listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(found)))).split(",")
        return {"CUDA_VISIBLE_DEVICES": ",".join(listed[number * size : (number + 1) * size])}

    def pass_on(self, name: str, output: Iterable[str]) -> None:
        for line in output:
            self.say(f"[{name}] {line.rstrip()}")

    def stop(self, number: int) -> None:
        """Ask every group to stop, once."""
        if not self.asked:
            self.asked = number
            for group in self.groups:
                group.ask()


def run(config: ElasticConfig) -> None:
    """`fmmeta elastic`."""
    coordination()
    found, wanted = torch.cuda.device_count(), config.groups * config.ranks_per_group
    if 0 < found < wanted:
        raise UsageError(
            f"groups={config.groups} x ranks_per_group={config.ranks_per_group} needs {wanted} GPUs, and this"
            f" node has {found}; start fewer here"
        )
    supervisor = Supervisor(config)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: supervisor.stop(number))
    code = supervisor.run()
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


__all__ = ["ElasticConfig", "Group", "Supervisor", "run"]
