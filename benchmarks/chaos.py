"""What share of the time of all ranks is useful in a long run, while faults hit it one after the other?

    python -m benchmarks.chaos --minutes 120 --every 300 --json benchmarks/results/chaos.json
    python -m benchmarks.chaos --minutes 30 --every 30 90 --json benchmarks/results/chaos.json

`elastic`: three groups of one process, which claim their tasks. `restarted`: two groups of one process in one
launch, with assigned tasks. A launch whose rank has failed is started again, with the same command, as
launchers do; Python and its imports start again. The faults, each kind once before any comes again:

    kill     SIGKILL to a random rank
    stop     SIGSTOP to a random rank for --hold seconds, then SIGCONT
    full     the disk of the run is full for --hold seconds (a tmpfs; root)
    slow     every fsync takes 3 s for --hold seconds
    cut      the cable of a host is unplugged for --hold seconds (network namespaces; root)
    rows     every other file of rows is cut off in the middle for --hold seconds

`--task_seconds` stands for the computation of a larger model: each task sleeps between its passes. The
undisturbed run, which theta is compared with, does not sleep. The floor of goodput is the median useful share
of the outer steps of the same run that no fault has hit. `launched` is the stricter share: the useful seconds
over those of every rank from the first start to the end, a lost group's included.

The exit code is 0 if the run has ended well, each task was counted once, and theta is that of the undisturbed
run: bit for bit where it is restarted, to 1e-5 of its distance from the start where it is elastic.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import machine, table, write_json
from fmmeta import Config
from fmmeta.parallel.network import unused_port
from harness.elastic import lines_of, parity
from harness.fork_server import ROOT, environment
from harness.namespaces import Hosts

KINDS = ("kill", "stop", "full", "slow", "cut", "rows")
NEED_ROOT = ("full", "cut")
THRESHOLDS = {"elastic": 85.0, "restarted": 75.0}  # percent, where a fault comes every 5 minutes
PARITY = 1e-5
NAMES = ("alpha", "beta", "gamma")
DISK_MIB, FSYNC_S, KILL_S, AGAIN_S = 64, 3.0, 30.0, 1.0
WORDS = ("river", "stone", "lantern", "quiet", "maple", "thunder", "copper", "ribbon", "silver", "meadow")
SETTINGS: dict[str, Any] = {
    "algorithm": "harness.chaos:SLOW",
    "n_way": 2,
    "k_shot": 1,
    "num_query": 1,
    "inner_steps": 1,
    "max_length": 32,
    "meta_batch_size": 6,
    "num_workers": "0",
    "eval_episodes": 0,
    "test_episodes": 0,
    "logging_steps": 1,
    "save_steps": 8,
    "step_timeout": 20.0,
}


def write_data(folder: Path) -> Path:
    """Two strata of files of rows, each a task of two classes."""
    names = [f"s{stratum}/t{number:02}" for stratum in range(2) for number in range(24)]
    for name in names:
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        first = WORDS[int(name[-2:]) % len(WORDS)]
        rows = [{"text": f"{first} {WORDS[row]}", "label": "ab"[row % 2]} for row in range(8)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task_splits.json").write_text(json.dumps({"train": names}))
    return folder


@dataclass
class Launch:
    """Processes that are started together, and again when one of them has failed.

    start: starts all of them; their output is added to `log`. codes: of the starts that have failed.
    """

    start: Callable[[Path], list[subprocess.Popen[Any]]]
    log: Path
    ranks: list[subprocess.Popen[Any]] = field(default_factory=list)
    starts: int = 0
    failed_at: float | None = None
    codes: list[int] = field(default_factory=list)

    def tend(self) -> bool:
        """Start the ranks if they have to be; whether all have ended well."""
        now = time.monotonic()
        codes = [rank.poll() for rank in self.ranks]
        if self.ranks and not any(codes):
            return None not in codes
        if self.ranks and self.failed_at is None:
            self.failed_at = now
            self.codes.append(next(filter(None, codes)))
        if None in codes:
            for rank in self.ranks if now - (self.failed_at or now) > KILL_S else ():
                kill(rank)
        elif not self.ranks or now - (self.failed_at or now) > AGAIN_S:
            self.ranks, self.failed_at, self.starts = self.start(self.log), None, self.starts + 1
        return False


def kill(rank: subprocess.Popen[Any], number: int = signal.SIGKILL) -> None:
    """Send a signal to the session of a rank, if it has not ended."""
    if rank.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, number)


class Trial:
    """One row: a run with faults. kinds: of the faults that this machine can make."""

    def __init__(self, row: str, args: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.row, self.args, self.folder, self.stack = row, args, folder, stack
        self.rng, self.counts = random.Random(args.seed), Counter[str]()
        self.groups = 3 if row == "elastic" else 2
        self.disk, self.run = folder / "disk", folder / "disk" / "run"
        self.knobs = folder / "knobs"
        for made in (self.disk, self.knobs):
            made.mkdir(parents=True)
        self.data = write_data(folder / "rows")
        self.kinds = [kind for kind in args.kinds if os.geteuid() == 0 or kind not in NEED_ROOT]
        self.hosts: Hosts | None = None
        if "cut" in self.kinds:
            try:
                self.hosts = stack.enter_context(Hosts(names=NAMES[: self.groups]))
            except OSError as error:
                self.kinds.remove("cut")
                print(f"{row}: no faults of the kind cut: {error}", flush=True)
        if "full" in self.kinds:
            words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(self.disk)]
            mounted = subprocess.run(words, capture_output=True, text=True, check=False)
            if mounted.returncode:
                self.kinds.remove("full")
                print(f"{row}: no faults of the kind full: {mounted.stderr.strip()}", flush=True)
            else:
                stack.callback(subprocess.run, ["umount", "-l", str(self.disk)], check=False)
        for kind in set(args.kinds) - set(self.kinds):
            print(f"{row}: no faults of the kind {kind} here", flush=True)
        step_s = args.task_seconds * SETTINGS["meta_batch_size"] / self.groups
        self.settings = {
            **SETTINGS,
            "dataset": str(self.data),
            "outer_steps": max(12, round(60 * args.minutes * args.share / step_s)),
            "outer_lr": 1e-3,
        }
        self.launches = self.elastic() if row == "elastic" else self.restarted()

    def flags(self, folder: Path, **also: Any) -> list[str]:
        settings = {**self.settings, "output_dir": folder, **also}
        return [f"--{name}={value}" for name, value in settings.items()]

    def process(self, host: int, words: Sequence[str], log: Path, **env: str) -> subprocess.Popen[Any]:
        """Start Python on a host, or here if there are no hosts; it ends with the row."""
        command = [sys.executable, *words]
        with log.open("ab") as output:
            options: dict[str, Any] = {
                "cwd": ROOT,
                "env": environment(FMMETA_CHAOS=str(self.knobs), RUST_LOG="warn", **env),
            }
            if self.hosts is not None:
                started = self.hosts.run(host, command, output, **options)
            else:
                options |= {"stderr": subprocess.STDOUT, "start_new_session": True}
                started = subprocess.Popen(command, stdout=output, **options)
        self.stack.callback(kill, started)
        return started

    def restarted(self) -> list[Launch]:
        """One launch, whose ranks are a group each."""

        def start(log: Path) -> list[subprocess.Popen[Any]]:
            place = {
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1" if self.hosts else "2",
                "MASTER_ADDR": self.hosts.addresses[0] if self.hosts else "127.0.0.1",
                "MASTER_PORT": str(unused_port()),
            }
            return [
                self.process(
                    rank,
                    ["launch/train.py", *self.flags(self.run, group_size=1)],
                    log.with_name(f"{log.stem}-{rank}.log"),
                    **place,
                    RANK=str(rank),
                    LOCAL_RANK="0" if self.hosts else str(rank),
                )
                for rank in range(2)
            ]

        return [Launch(start, self.folder / "launch.log")]

    def elastic(self) -> list[Launch]:
        """A launch for each group, and a lighthouse beside the first."""
        port = unused_port()
        address = f"http://{self.hosts.addresses[0] if self.hosts else '127.0.0.1'}:{port}"
        listen = "0.0.0.0" if self.hosts else "127.0.0.1"
        self.process(
            0,
            ["-m", "fmmeta", "lighthouse", f"--port={port}", f"--host={listen}"],
            self.folder / "lighthouse.log",
        )
        flags = self.flags(self.run, elastic=True, lighthouse=address, task_schedule="dynamic")

        def starter(number: int) -> Callable[[Path], list[subprocess.Popen[Any]]]:
            words = ["launch/train.py", *flags, f"--group_name=group{number}"]
            return lambda log: [self.process(number, words, log)]

        return [Launch(starter(number), self.folder / f"group{number}.log") for number in range(self.groups)]

    @property
    def ranks(self) -> list[subprocess.Popen[Any]]:
        return [rank for launch in self.launches for rank in launch.ranks if rank.poll() is None]

    def tend(self, seconds: float) -> bool:
        """Look after the launches for so long; whether the run has ended."""
        until = time.monotonic() + seconds
        while not (ended := all([launch.tend() for launch in self.launches])) and time.monotonic() < until:
            time.sleep(0.1)
        return ended

    @contextmanager
    def fault(self, kind: str) -> Iterator[float]:
        """A fault of a kind; gives how long it holds, and ends it."""
        hold, victim = float(self.args.hold), self.rng.choice(self.ranks) if self.ranks else None
        if kind == "kill" and victim:
            kill(victim)
            yield 0.0
        elif kind == "stop" and victim:
            kill(victim, signal.SIGSTOP)
            yield hold
            kill(victim, signal.SIGCONT)
        elif kind == "slow":
            (self.knobs / "fsync_seconds").write_text(str(FSYNC_S))
            yield hold
            (self.knobs / "fsync_seconds").unlink()
        elif kind == "full":
            filler = self.disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**16))
            yield hold
            filler.unlink()
        elif kind == "cut" and self.hosts:
            self.hosts.unplug()
            yield hold
            self.hosts.plug()
        elif kind == "rows":
            whole = {file: file.read_bytes() for file in sorted(self.data.glob("s*/*.jsonl"))[::2]}
            for file in whole:
                os.truncate(file, file.stat().st_size // 2 + 1)
            yield hold
            for file, content in whole.items():
                file.write_bytes(content)
        else:
            yield 0.0

    def measure(self) -> dict[str, Any]:
        """Run to the end, with faults for --minutes."""
        (self.knobs / "task_seconds").write_text(str(self.args.task_seconds))
        began, faults, deck = time.monotonic(), list[dict[str, Any]](), list[str]()
        while not lines_of(self.run) and not self.tend(0.5):
            if time.monotonic() - began > 300:
                raise TimeoutError(f"no outer step after 300 s; see {self.folder}")
        steady, ended = time.monotonic(), False
        low, high, since = self.args.every[0], self.args.every[-1], steady
        while not ended and time.monotonic() - steady < 60 * self.args.minutes:
            due = since + self.rng.uniform(low, high) - time.monotonic()
            if (ended := self.tend(max(due, AGAIN_S))) or time.monotonic() - steady > 60 * self.args.minutes:
                break
            deck = deck or self.rng.sample(self.kinds, len(self.kinds))
            if self.args.faults is not None and len(faults) >= self.args.faults:
                continue
            kind = deck.pop()
            if not self.ranks:
                deck.append(kind)
                continue
            since = time.monotonic()
            at, step = since - began, len(lines_of(self.run))
            with self.fault(kind) as hold:
                ended = self.tend(hold)
            self.counts[kind] += 1
            faults.append({"kind": kind, "at_s": round(at, 1), "step": step})
            print(f"{self.row}: {kind} at {at:.0f} s, outer step {step}", flush=True)
        deadline = time.monotonic() + 60 * self.args.minutes + 600
        while not self.tend(1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run goes on; see {self.folder}")
        took = time.monotonic() - began
        (self.knobs / "task_seconds").unlink()
        lines, stored = lines_of(self.run), json.loads((self.run / "run.json").read_text())
        goodput, shares = stored["goodput"], [line["useful_share"] for line in lines[1:]]
        state = json.loads((self.last(self.run) / "state.json").read_text())
        batch, steps = SETTINGS["meta_batch_size"], self.settings["outer_steps"]
        return {
            "row": self.row,
            "minutes": round(took / 60, 2),
            "outer_steps": steps,
            "faults": dict(self.counts),
            "each_fault": faults,
            "starts": {launch.log.stem: launch.starts for launch in self.launches},
            "exit_codes_of_failures": {launch.log.stem: launch.codes for launch in self.launches},
            "goodput": goodput["percent"],
            "launched": 100 * goodput["useful_seconds"] / (self.groups * took),
            "floor": 100 * statistics.median(shares),
            "no_step_logged_twice": len({line["step"] for line in lines}) == len(lines),
            "lines_lost": steps - len(lines),
            "tasks_counted_once": state["tasks"] == {"seen": batch * steps, "bad": 0}
            and not any(line["skipped_tasks"] for line in lines),
        }

    def last(self, run: Path) -> Path:
        return run / f"checkpoint-{self.settings['outer_steps']}"

    def compare(self) -> dict[str, Any]:
        """theta beside that of the same run without faults, whose tasks do not sleep."""
        alone = self.folder / "undisturbed"
        log = self.folder / "undisturbed.log"
        count = 1 if self.row == "elastic" else 2
        place = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
        port, flags = str(unused_port()), self.flags(alone, group_size=1)
        hosts, self.hosts = self.hosts, None
        ranks = [
            self.process(
                0,
                ["launch/train.py", *flags],
                log.with_name(f"undisturbed-{rank}.log"),
                **place,
                MASTER_PORT=port,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
            )
            for rank in range(count)
        ]
        self.hosts = hosts
        if codes := [code for rank in ranks if (code := rank.wait(3600))]:
            raise RuntimeError(f"the undisturbed run ended with {codes}; see {self.folder}")
        config = Config(**{**self.settings, "dataset": [str(self.data)], "output_dir": str(alone)})
        model = "model/model.safetensors"
        return {
            "parity": parity(config, self.run, alone),
            "theta_equal_bit_for_bit": (self.run / model).read_bytes() == (alone / model).read_bytes(),
        }


def is_good(found: Mapping[str, Any]) -> bool:
    """Whether nothing was lost, whatever the goodput."""
    same = found["theta_equal_bit_for_bit"] if found["row"] == "restarted" else found["parity"] < PARITY
    return bool(found["no_step_logged_twice"] and found["tasks_counted_once"] and same)


def show(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of docs/explanation/failures.md."""
    header = ["run", "minutes", "faults", "goodput %", "of all launched %", "floor %", "theta"]
    return table(
        header,
        [
            [
                name,
                f"{one['minutes']:.0f}",
                ", ".join(f"{one['faults'][kind]} {kind}" for kind in KINDS if kind in one["faults"]),
                *(f"{one[key]:.1f}" for key in ("goodput", "launched", "floor")),
                "bit for bit" if one["theta_equal_bit_for_bit"] else f"to {one['parity']:.1e}",
            ]
            for name, one in rows.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=list(THRESHOLDS), choices=THRESHOLDS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--minutes", type=float, default=120.0, help="so long there are faults")
    parser.add_argument("--every", type=float, nargs="+", default=[300.0], help="seconds, or a range")
    parser.add_argument("--hold", type=float, default=30.0, help="seconds that a fault lasts")
    parser.add_argument("--faults", type=int, default=None, help="at most; default: no limit")
    parser.add_argument("--task_seconds", type=float, default=1.0)
    parser.add_argument(
        "--share", type=float, default=0.85, help="of the time that steps are expected to take"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default=None)
    parser.add_argument("--folder", default=None, help="keep the runs and their logs there")
    args = parser.parse_args()
    file = Path(args.json) if args.json else None
    known = json.loads(file.read_text())["rows"] if file and file.is_file() else {}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    good = True
    for row in args.rows:
        every = " to ".join(f"{seconds:g}" for seconds in args.every)
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            folder = Path(args.folder or place) / row
            shutil.rmtree(folder, ignore_errors=True)
            trial = Trial(row, args, folder, stack)
            found = trial.measure()
            found |= trial.compare()
        found |= {"every_s": args.every, "hold_s": args.hold, "task_seconds": args.task_seconds}
        print(json.dumps(found, indent=1), flush=True)
        known[f"{row}, a fault every {every} s"] = {"measured": machine(), **found}
        good = good and is_good(found)
        write_json(args.json, {"rows": known})
    print(show(known))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
