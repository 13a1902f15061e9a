"""`fmmeta elastic`: starts the groups of an elastic run on this node, and a lighthouse if none is given.

A group is the processes of one launch, and none is restarted. A group that has to come back is started by
`torchrun --max-restarts` or by the scheduler (docs/how-to/elastic.md).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config, setting
from fmmeta.elastic.lighthouse import LighthouseConfig, coordination, open_lighthouse
from fmmeta.parallel.layout import without_ranks
from fmmeta.parallel.network import unused_port

KILL_S = 30.0  # that the other ranks of a group get to exit by themselves after one has failed
PAUSE_S = 0.2


@dataclass
class ElasticConfig(Config):
    """The settings of the run, and of its groups on this node."""

    groups: int = setting(2, "Groups of this node", least=1)
    ranks_per_group: int = setting(
        1, "Processes of each group; on GPU machines each has one of the node's GPUs", least=1
    )
    heartbeat_timeout: float = setting(
        5.0, "Of the lighthouse that is started if no --lighthouse is given", positive=True
    )

    def __post_init__(self) -> None:
        self.elastic, self.group_name = True, self.group_name or "group"
        super().__post_init__()


def run(config: ElasticConfig) -> None:
    """`fmmeta elastic`: exit with the code of the first group that failed, else with 0."""
    coordination()
    found, wanted = torch.cuda.device_count(), config.groups * config.ranks_per_group
    if 0 < found < wanted:
        raise UsageError(
            f"groups={config.groups} x ranks_per_group={config.ranks_per_group} needs {wanted} GPUs, and this"
            f" node has {found}; start fewer here"
        )
    if not (config.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")):
        _server, config.lighthouse = open_lighthouse(
            LighthouseConfig("127.0.0.1", 0, config.heartbeat_timeout)
        )
    stops = list[int]()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: stops.append(number))
    names = Config.__dataclass_fields__.keys() - {"group_name"}
    given = {name: x for name, x in asdict(config).items() if name in names and x not in (None, [])}
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="fmmeta-elastic-") as file:
        json.dump(given, file)
        file.flush()
        code = wait([start(config, number, file.name) for number in range(config.groups)], stops)
    os._exit(code if code >= 0 else 128 - code)  # the threads of the lighthouse would keep the process


def start(config: ElasticConfig, number: int, file: str) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a group, each the leader of a session. file: the settings of the run."""
    size, found = config.ranks_per_group, torch.cuda.device_count()
    name = f"{config.group_name}{number}"
    command = [sys.executable, "-m", "fmmeta", "train", "--config", file, "--group_name", name]
    env = {
        **without_ranks(os.environ),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port()),
    }
    if found:
        listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(found)))).split(",")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(listed[number * size : (number + 1) * size])
    return [
        subprocess.Popen(
            command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, start_new_session=True
        )
        for rank in range(size)
    ]


def wait(groups: Sequence[Sequence[subprocess.Popen[bytes]]], stops: list[int]) -> int:
    """Wait for all groups; the exit code of the first one that failed, or 0.

    stops: signals that have arrived; all ranks get a SIGTERM for each. If a rank fails, the others of its
    group are killed after `KILL_S`, with the other processes of their sessions.
    """
    ranks = [rank for group in groups for rank in group]
    failed: dict[int, tuple[float, int]] = {}  # time and code, by the number of the group
    running = True
    while running:
        running = any(rank.poll() is None for rank in ranks)
        for number, group in enumerate(groups):
            if code := next(filter(None, (rank.poll() for rank in group)), 0):
                since, _ = failed.setdefault(number, (time.monotonic(), code))
                for rank in group if time.monotonic() - since > KILL_S else ():
                    if rank.poll() is None:
                        os.killpg(rank.pid, signal.SIGKILL)
        while stops:
            stops.pop()
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
        time.sleep(PAUSE_S if running else 0)
    return next((code for _, code in failed.values()), 0)
