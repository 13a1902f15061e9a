"""Elastic runs on one machine, whose groups are started, killed and started again while it goes on.

Groups are real processes, forked from one that has imported everything (fork_server.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fmmeta import Config
from fmmeta.elastic.lighthouse import LighthouseConfig, open_lighthouse
from fmmeta.learners.load import describe, load_learner
from fmmeta.tasks.sources.base import EpisodeRows
from harness.fork_server import Rank, environment, places, shared

SLEEP = "FMMETA_TASK_SECONDS"  # a file with a number; none: do not sleep
ROLL = re.compile(r"outer step (\d+): \d+ groups? \((.*)\)")


def slowly(episode: EpisodeRows, rng: object) -> EpisodeRows:
    """A transform that changes nothing and takes its time."""
    file = Path(os.environ.get(SLEEP, "/nonexistent"))
    if file.is_file():
        time.sleep(float(file.read_text() or 0))
    return episode


class Born:
    """A rank from the fork_server, as subprocess would have it."""

    lock = threading.Lock()  # of the fork_server

    def __init__(self, rank: Rank) -> None:
        self.rank, self.pid = rank, rank.pid

    @classmethod
    def of(cls, words: Sequence[str], log: Path, env: Mapping[str, str], before: str = "") -> Born:
        with cls.lock:
            return cls(shared().start(words, log, env, before=before))

    def poll(self) -> int | None:
        with self.lock:
            shared().poll()
        return self.rank.code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def lines(self) -> Iterator[str]:
        """What it prints, line by line, until it has ended."""
        while not self.rank.log.exists() and self.poll() is None:
            time.sleep(0.05)  # the rank opens it itself
        with self.rank.log.open() as log:
            text, over = "", False
            while not over:
                over = self.rank.code is not None
                text += log.read()
                *whole, text = text.split("\n")
                yield from whole
                time.sleep(0.05)


@dataclass
class Group:
    """The ranks of a launch, and how often it was started."""

    name: str
    ranks: list[Born] = field(default_factory=list)
    starts: int = 0

    @property
    def ended(self) -> int | None:
        """Its exit code, once all ranks have ended: the first that is not 0."""
        codes = [rank.poll() for rank in self.ranks]
        return None if None in codes else next(filter(None, codes), 0)

    def send_signal(self, sig: int) -> None:
        for rank in self.ranks:
            rank.send_signal(sig)

    def kill(self) -> None:
        """Kill the sessions of all ranks."""
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


class Trial:
    """A run with kills. `log`: every line that its groups print."""

    def __init__(self, settings: dict[str, Any], task_seconds: float) -> None:
        self.folder, self.log = Path(settings["output_dir"]), list[str]()
        self.rolls: list[tuple[float, set[str]]] = [(0.0, set())]  # when, and who takes part, as logged
        self.file = self.folder.with_suffix(".seconds")
        self.file.write_text(str(task_seconds))
        os.environ[SLEEP] = str(self.file)
        settings = dict(settings)
        count, self.size = settings.pop("groups"), settings.pop("ranks_per_group", 1)
        timeout = settings.pop("heartbeat_timeout")
        self.server, address = open_lighthouse(LighthouseConfig("127.0.0.1", 0, timeout))
        self.file_of_settings = self.folder.with_suffix(".json")
        self.file_of_settings.write_text(json.dumps({**settings, "elastic": True, "lighthouse": address}))
        self.groups = {f"group{number}": Group(f"group{number}") for number in range(count)}
        self.kills: list[dict[str, Any]] = []
        self.before = "os:setsid"  # called first in every rank

    def launch(self, group: Group) -> None:
        """Start the ranks of a group, also again."""
        self.groups[group.name] = group
        words = ["-m", "fmmeta", "train", "--config", str(self.file_of_settings), "--group_name", group.name]
        group.starts += 1
        group.ranks = [
            Born.of(
                words,
                self.folder.with_name(f"{group.name}-{time.monotonic_ns()}.log"),
                environment(**place),
                before=self.before,
            )
            for place in places(self.size)
        ]
        for rank in group.ranks:
            threading.Thread(target=self.read, args=(group.name, rank), daemon=True).start()

    def read(self, name: str, rank: Born) -> None:
        for line in rank.lines():
            self.hear(f"[{name}] {line.rstrip()}")

    def hear(self, line: str) -> None:
        self.log.append(line)
        if found := ROLL.search(line):
            self.rolls.append((time.monotonic(), {name.strip() for name in found[2].split(",")}))

    def start(self) -> float:
        self.began = time.monotonic()
        for group in self.groups.values():
            self.launch(group)
        return self.began

    @property
    def code(self) -> int | None:
        """That of the first group that failed, once all have ended."""
        codes = [group.ended for group in self.groups.values()]
        return None if None in codes else next(filter(None, codes), 0)

    @property
    def taking_part(self) -> set[str]:
        """Groups of the last roll that have not been killed since."""
        since, named = self.rolls[-1]
        return named - {kill["group"] for kill in self.kills if kill["at"] >= since}

    def wait_for(self, enough: int, timeout_s: float) -> None:
        """Until so many groups take part. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while len(self.taking_part) < enough:
            if time.monotonic() > deadline or self.code is not None:
                raise TimeoutError(
                    f"{self.taking_part} take part after {timeout_s} s\n" + "\n".join(self.log[-40:])
                )
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        """Kill a group and start it again."""
        self.kills.append({"group": name, "at": time.monotonic(), "left": len(self.taking_part) - 1})
        self.groups[name].kill()
        self.launch(self.groups[name])

    def wait_for_step(self, groups: int, timeout_s: float) -> None:
        """Until so many groups have taken part in an outer step to its end. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while all(line["groups"] != groups for line in lines_of(self.folder)):
            if time.monotonic() > deadline or self.code is not None:
                raise TimeoutError(
                    f"no outer step of {groups} groups after {timeout_s} s\n" + "\n".join(self.log[-40:])
                )
            time.sleep(0.05)

    def hurry(self) -> None:
        self.file.unlink(missing_ok=True)

    def close(self) -> None:
        """End whatever is left."""
        for group in self.groups.values():
            group.kill()
        self.server.shutdown()

    def end(self, timeout_s: float) -> float:
        """Wait for the end of the run; seconds that it took."""
        deadline = time.monotonic() + timeout_s
        while self.code is None:
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(f"the run goes on after {timeout_s} s\n" + "\n".join(self.log[-60:]))
            time.sleep(0.1)
        time.sleep(0.2)  # for the threads that read
        return time.monotonic() - self.began


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics; none before there is a file."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def theta_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """theta out of the files of a checkpoint, by parameter."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in sorted(checkpoint.glob("shard-*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                if key.startswith("theta/"):
                    name, _, offset = key.removeprefix("theta/").partition("@")
                    parts.setdefault(name, []).append((int(offset), opened.get_tensor(key)))
    return {
        name: torch.cat([part for _, part in sorted(found, key=lambda one: one[0])])
        for name, found in sorted(parts.items())
    }


def parity(config: Config, folder: Path, other: Path) -> float:
    """|theta - other's| / |other's - theta_0|, at the last outer step of both."""
    mine, wanted = (theta_of(one / f"checkpoint-{config.outer_steps}") for one in (folder, other))
    assert list(mine) == list(wanted)
    begun = dict(load_learner(config, describe(config)).named_parameters())
    off = sum(float((mine[name] - wanted[name]).double().square().sum()) for name in wanted)
    far = sum(
        float((begun[name].detach().flatten() - wanted[name]).double().square().sum()) for name in wanted
    )
    return (off / far) ** 0.5


def alone(settings: dict[str, Any], folder: Path) -> Config:
    """The same run for one process: no groups, no lighthouse."""
    own = ("groups", "ranks_per_group", "heartbeat_timeout", "deepspeed")
    kept: dict[str, Any] = {name: value for name, value in settings.items() if name not in own} | {
        "output_dir": str(folder)
    }
    return Config(**kept)
