"""`fmmeta elastic`: starts the groups of an elastic run on this node and restarts those that die.

A group is the processes of one launch; if one of them fails, all of them are ended and the group is
restarted. The supervisor stores no state. If it dies, groups of one rank continue (and need another
lighthouse, if it ran here); larger ones stop after a save, as without any launcher.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fmmeta.common.errors import EXIT_FAULT, EXIT_STOPPED, UsageError
from fmmeta.config.settings import Config, setting
from fmmeta.elastic.lighthouse import LighthouseConfig, coordination, open_lighthouse
from fmmeta.parallel.layout import without_ranks
from fmmeta.parallel.network import unused_port
from fmmeta.report.data import read_run
from fmmeta.training.run_folder import lock_folder

KILL_S = 30.0  # that the other ranks of a group get to exit by themselves after a usage error or a stop
PAUSE_S = 0.2
WRITER_S = 60.0  # after which an unlocked folder means that no group of another node finishes the run


@dataclass
class ElasticConfig(Config):
    """The settings of the run, and of its groups on this node."""

    groups: int = setting(2, "Groups of this node", least=1)
    ranks_per_group: int = setting(
        1, "Processes of each group; on GPU machines each has one of the node's GPUs", least=1
    )
    max_restarts: int = setting(100, "Maximum number of restarts of each group", least=0)
    heartbeat_timeout: float = setting(
        5.0, "Of the lighthouse that is started if no --lighthouse is given", positive=True
    )

    def __post_init__(self) -> None:
        self.elastic, self.group_name = True, self.group_name or "group"
        super().__post_init__()


@dataclass
class Group:
    """A launch. starts: how often it was started; ended: its exit code when it is not restarted any more.

    processes: its ranks, each the leader of a separate session: `subprocess.Popen`, or objects with the same
    `pid`, `poll`, `wait` and `send_signal`.
    """

    name: str
    starts: int = 0
    processes: list[Any] = field(default_factory=list)
    ended: int | None = None

    def terminate(self) -> None:
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
    """Starts groups and restarts those that die. output: prints a line."""

    def __init__(self, config: ElasticConfig, output: Callable[[str], None] | None = None) -> None:
        self.config, self.output = config, output or (lambda text: print(text, flush=True))
        self.groups = [Group(f"{config.group_name}{number}") for number in range(config.groups)]
        self.stop_signal, self.file = 0, ""
        self.server: Any = None
        # with groups of other nodes
        self.shared = bool(config.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE"))

    def log(self, text: str) -> None:
        """Print a line. A line that cannot be printed (disk full, closed pipe) is dropped: the supervisor
        continues, and reads the output of the ranks, which would block.
        """
        with suppress(OSError, ValueError):
            self.output(text)

    def run(self) -> int:
        """Supervise until no group is restarted any more; return the exit code.

        It is 0 if run.json says that the run is finished, else that of the first group that failed, or 70.
        """
        self.begin()
        try:
            while running := [group for group in self.groups if group.ended is None]:
                for group in running:
                    self.check(group)
                time.sleep(PAUSE_S)
        finally:
            os.unlink(self.file)
            if self.server is not None:
                self.server.shutdown()  # its threads would keep the process
        if self.finished():
            return 0
        codes = [group.ended for group in self.groups]
        if not self.stop_signal:
            self.log(
                f"fmmeta: error: output_dir={self.config.output_dir} holds no finished run, and all groups"
                f" have ended (exit codes {', '.join(map(str, codes))}); read their last lines, then run the"
                " same command again"
            )
        return next((code for code in codes if code), EXIT_STOPPED if self.stop_signal else EXIT_FAULT)

    def finished(self) -> bool:
        """Whether run.json says so and the model exists; wait while a group of another node may write it."""
        folder, free_since = Path(str(self.config.output_dir)), time.monotonic()
        while True:
            with suppress(UsageError):  # run.json cannot be read
                if (read_run(folder) or {}).get("finished") and (folder / "model").is_dir():
                    return True
            if (  # no group of another node may still write
                not self.shared
                or self.stop_signal
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
            self.server, self.config.lighthouse = open_lighthouse(
                LighthouseConfig("127.0.0.1", 0, self.config.heartbeat_timeout)
            )
        names = Config.__dataclass_fields__.keys() - {"group_name"}
        given = {name: x for name, x in asdict(self.config).items() if name in names and x not in (None, [])}
        with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="fmmeta-elastic-", delete=False) as file:
            json.dump(given, file)
        self.file = file.name

    def check(self, group: Group) -> None:
        """Start a group, or restart it if one of its ranks has failed; note how it has ended."""
        if not group.processes:
            if self.stop_signal:
                group.ended = EXIT_STOPPED
            else:
                self.start(group)
            return
        codes = [process.poll() for process in group.processes]
        code = next(filter(None, codes), 0)
        if not code:
            group.ended = 0 if all(rank == 0 for rank in codes) else None
            return
        self.end(group, code)
        if code in (2, EXIT_STOPPED) or self.stop_signal:
            group.ended = code
        elif group.starts > self.config.max_restarts:
            self.log(
                f"fmmeta: {group.name} has ended {group.starts} times, the last with {code}; it is not"
                " started again"
            )
            group.ended = code
        else:
            self.log(f"fmmeta: {group.name} has ended with {code}; it is started again ({group.starts})")
            self.start(group)

    def end(self, group: Group, code: int) -> None:
        """End the remaining ranks: after a usage error they exit by themselves, after a crash they do not."""
        deadline = time.monotonic() + (KILL_S if code in (2, EXIT_STOPPED) else 0)
        while time.monotonic() < deadline and any(process.poll() is None for process in group.processes):
            time.sleep(PAUSE_S)
        group.kill()
        for process in group.processes:
            process.wait()

    def start(self, group: Group) -> None:
        """Start the processes of a separate launch, with separate ranks and port."""
        size = self.config.ranks_per_group
        command = [sys.executable, "-m", "fmmeta", "train", "--config", self.file, "--group_name", group.name]
        env = {
            **without_ranks(os.environ),
            **self.devices(self.groups.index(group)),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(unused_port()),
        }
        group.starts += 1
        group.processes = [
            self.spawn(group.name, command, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(size)
        ]
        if self.stop_signal:  # meanwhile
            group.terminate()

    def spawn(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Any:
        """Start a rank and log its output, with bytes that are no text escaped."""
        process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            start_new_session=True,
        )
        assert process.stdout is not None
        threading.Thread(target=self.log_output, args=(name, process.stdout), daemon=True).start()
        return process

    def devices(self, number: int) -> dict[str, str]:
        """The GPUs of a group, out of those of this node."""
        size, found = self.config.ranks_per_group, torch.cuda.device_count()
        if not found:
            return {}
        listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(found)))).split(",")
        return {"CUDA_VISIBLE_DEVICES": ",".join(listed[number * size : (number + 1) * size])}

    def log_output(self, name: str, output: Iterable[str]) -> None:
        for line in output:
            self.log(f"[{name}] {line.rstrip()}")

    def stop(self, number: int) -> None:
        """Send SIGTERM to every group, once."""
        if not self.stop_signal:
            self.stop_signal = number
            for group in self.groups:
                group.terminate()


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
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)
