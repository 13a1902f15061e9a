"""What is lost when processes die, freeze, and find a damaged checkpoint?

Kills at random and at every file boundary of a save, SIGTERM, SIGSTOP, harm to the newest checkpoint, and
stop signals in every phase of a whole run, of a two-rank run.

    python -m benchmarks.faults --kills 100 --terms 30 --json benchmarks/results/faults.json --minutes 9
    python -m benchmarks.faults --only stop --stops 200 --json benchmarks/results/faults.json --minutes 60

The floor is the run that nothing happens to: every run that was harmed and started again, with the same
command, has to end with its theta, bit for bit; after a stop signal with all files of its `model/` and its
table on held-out tasks.

Stops after --minutes; the next call goes on from the counts in the JSON file. Ranks are forked from
a process that has imported everything (harness/fork_server.py), and they are killed for real.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import table, write_json
from harness.fork_server import ForkServer, Rank

WORDS = [
    "river",
    "stone",
    "lantern",
    "quiet",
    "maple",
    "thunder",
    "copper",
    "ribbon",
    "silver",
    "meadow",
    "harbor",
    "candle",
]
FLAGS = {
    "n_way": 2,
    "k_shot": 1,
    "num_query": 1,
    "meta_batch_size": 2,
    "inner_steps": 1,
    "max_length": 16,
    "num_workers": 0,
    "eval_episodes": 0,
    "logging_steps": 1,
    "outer_steps": 16,
    "save_steps": 2,
}
STOPS = {
    "outer_steps": 6,
    "eval_steps": 2,
    "eval_episodes": 4,
    "test_episodes": 6,
    "init_interpolation": 0.75,
    "logging_steps": 1,
}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PHASES = {
    "model ": "held-out tasks",
    "outer step 6/6": "export",
    "validation": "validation",
    "outer step": "training",
}
# that a signal may take on this machine: a task, the agreement, a save, and the 3 s by which rank 0 goes
# first
BOUND_S = 10.0


class Bench:
    """Starts the run in a folder, harms it, starts it again, compares."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fork_server = folder, ForkServer()
        data = folder / "rows.jsonl"
        rows = [{"text": f"{WORDS[c]} {WORDS[r]}", "label": f"c{c}"} for c in range(12) for r in range(6)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.flags = [f"--{key}={value}" for key, value in {**FLAGS, "dataset": data}.items()]
        self.wanted = self.end(
            folder / "straight"
        )  # imports included: the second one takes as long as the harmed ones
        began = time.monotonic()
        assert self.end(folder / "again") == self.wanted, "the straight run does not repeat itself"
        self.seconds = time.monotonic() - began
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0
        self.whole: dict[tuple[bool, ...], tuple[list[str], dict[str, bytes], float]] = {}

    def start(self, run: Path, before: str = "", step_timeout: float = 0, **env: str) -> list[Rank]:
        flags = [
            *self.flags,
            f"--output_dir={run}",
            *([f"--step_timeout={step_timeout}"] if step_timeout else []),
        ]
        return self.fork_server.train(flags, 2, run.with_name(f"{run.name}-logs"), before, **env)

    def end(self, run: Path) -> bytes:
        """Run to the end and return the model."""
        ranks = self.start(run)
        codes = self.fork_server.wait(ranks, 120)
        assert codes == [0, 0], f"{codes}\n{ranks[0].text}\n{ranks[1].text}"
        return (run / "model" / "model.safetensors").read_bytes()

    def undisturbed(self, variant: tuple[bool, ...]) -> tuple[list[str], dict[str, bytes], float]:
        """Flags, results and seconds after the start of a variant's whole run: periodic saves, interpolation,
        best weights.
        """
        if variant not in self.whole:
            saves, share, best = variant
            values = {
                **STOPS,
                "save_steps": 2 if saves else 0,
                "init_interpolation": STOPS["init_interpolation"] if share else 1,
            }
            flags = [
                f"--{key}={value}"
                for key, value in {**FLAGS, **values, "dataset": self.folder / "rows.jsonl"}.items()
            ]
            flags += ["--load_best_model_at_end=true"] if best else []
            run = self.folder / f"whole-{''.join(str(int(one)) for one in variant)}"
            ranks = self.fork_server.train(
                [*flags, f"--output_dir={run}"], 2, run.with_name(f"{run.name}-logs")
            )
            while "output_dir" not in ranks[0].text and ranks[0].code is None:
                self.fork_server.poll(0.01)
            began = time.monotonic()
            assert self.fork_server.wait(ranks, 120) == [0, 0], ranks[0].text + ranks[1].text
            self.whole[variant] = flags, results(run), time.monotonic() - began
        return self.whole[variant]

    def stop(self, number: int) -> None:
        """A stop signal to all ranks or to one at a random moment of a whole run; then the same command until
        it ends.
        """
        draw, run = random.Random(2 * 10**6 + number), self.folder / f"stop-{number}"
        flags, wanted, seconds = self.undisturbed(tuple(bool(number >> bit & 1) for bit in range(3)))
        logs = run.with_name(f"{run.name}-logs")
        ranks = self.fork_server.train([*flags, f"--output_dir={run}"], 2, logs)
        if draw.random() < 0.75:  # half of a short run is its start
            while "output_dir" not in ranks[0].text and ranks[0].code is None:
                self.fork_server.poll(0.01)
        time.sleep(draw.uniform(0.1, seconds))
        phase = next((phase for mark, phase in PHASES.items() if mark in ranks[0].text), "start")
        told = ranks if phase == "start" else draw.choice((ranks, ranks, ranks[1:]))
        number = draw.choice(SIGNALS)
        sent = [self.fork_server.signal(rank, number) for rank in told]
        codes = self.fork_server.wait(ranks, 120)
        self.counts[f"stops: {phase if any(sent) else 'after the end'}"] += 1
        early = phase == "start" and all(
            code in (-number, 75, 0, 1) for code in codes
        )  # -2 and 1: before the handlers are there
        if not (early or codes in ([75, 75], [0, 0])):
            self.counts["stops: other exit codes"] += 1
            print(codes, ranks[0].text, ranks[1].text, flush=True)
        while codes != [0, 0]:
            ranks = self.fork_server.train([*flags, f"--output_dir={run}"], 2, logs)
            codes = self.fork_server.wait(ranks, 120)
            assert codes in ([0, 0], [75, 75]), ranks[0].text + ranks[1].text
        self.counts["stops: equal" if results(run) == wanted else "stops: different"] += 1
        shutil.rmtree(run)

    def check(self, run: Path) -> None:
        """Every checkpoint of the run is whole, and the same command ends where the straight run ended."""
        import torch

        from fmmeta import checkpoint
        from fmmeta.parallel.collectives import Communicator

        alone = Communicator(None, 0, 1, torch.device("cpu"))
        self.counts["checkpoints"] += len(checkpoint.list_complete(run))
        self.counts["unreadable"] += sum(
            bool(checkpoint.find_corruption(folder, alone)) for folder in checkpoint.list_complete(run)
        )
        self.counts["equal" if self.end(run) == self.wanted else "different"] += 1
        shutil.rmtree(run)

    def kill(self, number: int) -> None:
        """SIGKILL to both ranks or to one, at a random moment; some runs are killed more than once before
        they may end.
        """
        draw, run = random.Random(number), self.folder / f"kill-{number}"
        times = draw.choice((1, 1, 1, 2, 3))
        for _ in range(times):
            ranks = self.start(run)
            latest = time.monotonic() + draw.uniform(0.1, self.seconds)
            if draw.random() < 0.5:  # wait for a save that is under way
                latest += self.seconds
                while time.monotonic() < latest and not list(run.glob("tmp-checkpoint-*/*")):
                    time.sleep(0.0005)
            else:
                time.sleep(latest - time.monotonic())
            killed = [
                self.fork_server.signal(rank, signal.SIGKILL)
                for rank in draw.choice((ranks, ranks[:1], ranks[1:]))
            ]
            self.counts["kills"] += any(killed)
            self.counts["kills that came too late"] += not any(killed)
            self.reap(ranks, any(killed))
            self.counts["kills that left half a save"] += any(killed) and bool(
                list(run.glob("tmp-checkpoint-*"))
            )
        self.check(run)

    def reap(self, ranks: list[Rank], killed: bool) -> None:
        """Do as launchers do: what another rank's death has not ended after a while is ended too."""
        deadline = time.monotonic() + (5 if killed else 60)
        while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
            self.fork_server.poll(0.1)
        self.counts["ranks that had to be ended"] += sum(
            self.fork_server.signal(rank, signal.SIGKILL) for rank in ranks
        )
        self.fork_server.wait(ranks, 10)

    def boundary(self, number: int) -> bool:
        """Kill rank 0 just before its NUMBERth operation on files after two saves; False if there are not so
        many.
        """
        run = self.folder / f"boundary-{number}"
        ranks = self.start(run, "benchmarks.faults:arm", FAULTS_KILL_AT=str(number))
        codes = self.fork_server.wait(ranks, 60)
        if codes == [0, 0]:
            return False
        assert codes[0] == -signal.SIGKILL, f"{codes} {ranks[0].text}"
        self.counts["kills at file boundaries"] += 1
        self.check(run)
        return True

    def freeze(self, number: int) -> None:
        """SIGSTOP to one rank in the middle of an outer step, for longer than the bound of a step."""
        run, frozen = self.folder / f"freeze-{number}", number % 2
        ranks = self.start(run, step_timeout=3)
        while not checkpoints(run) and ranks[0].code is None:
            self.fork_server.poll(0.01)
        self.fork_server.signal(ranks[frozen], signal.SIGSTOP)
        codes = self.fork_server.wait(ranks, 60)
        named = f"fmmeta: watchdog: rank {frozen} (process {ranks[frozen].pid} " in ranks[1 - frozen].text
        self.counts["ranks frozen"] += 1
        self.counts["frozen ranks named, job ended"] += (
            named and codes[1 - frozen] == 70 and codes[frozen] == -signal.SIGKILL
        )
        self.check(run)

    def damage(self, number: int) -> None:
        """Damage the newest checkpoint of a killed run: it is refused by name, and an older one resumed."""
        run, how = self.folder / f"damage-{number}", HARM[number % len(HARM)]
        ranks = self.start(run)
        while len(checkpoints(run)) < 2 and ranks[0].code is None:
            self.fork_server.poll(0.01)
        for rank in ranks:
            self.fork_server.signal(rank, signal.SIGKILL)
        self.fork_server.wait(ranks, 10)
        newest = checkpoints(run)[-1]
        how(newest)
        self.counts["checkpoints damaged"] += 1
        self.counts["equal" if self.end(run) == self.wanted else "different"] += 1
        text = (run.with_name(f"{run.name}-logs") / "rank-0.log").read_text()
        self.counts["damaged checkpoints refused by name"] += f"{newest}" in text and "Traceback" not in text
        shutil.rmtree(run)

    def term(self, number: int) -> None:
        """SIGTERM at a random moment to all ranks, or to one of them."""
        draw, run = random.Random(10**6 + number), self.folder / f"term-{number}"
        ranks = self.start(run)
        time.sleep(draw.uniform(0.1, self.seconds * 0.9))
        told = [
            rank
            for rank in draw.choice((ranks, ranks, ranks[1:]))
            if self.fork_server.signal(rank, signal.SIGTERM)
        ]
        asked = time.monotonic()
        if len(told) == 1 and "outer step" not in ranks[0].text:
            self.reap(ranks, True)
        codes = self.fork_server.wait(ranks, 60)
        took = max(rank.ended for rank in ranks) - asked
        if not told or codes == [0, 0]:
            self.counts["signals that came too late"] += 1
        elif codes == [75, 75]:
            self.counts["signals, exit 75"] += 1
            self.counts["signals within the bound"] += took <= BOUND_S
            self.slowest = max(self.slowest, took)
        elif (
            len(told) == 1 and "outer step" not in ranks[0].text
        ):  # one rank alone, while it started: it leaves, the other loses it
            self.counts["signals to one rank while it started"] += 1
        else:
            self.counts["signals, other exit codes"] += 1
            print(codes, ranks[0].text, ranks[1].text)
        self.check(run)


def results(run: Path) -> dict[str, bytes]:
    """The files of the exported model but its card, which names the run, and the table on held-out tasks."""
    held_out = json.dumps(json.loads((run / "run.json").read_text())["held_out"]).encode()
    files = {
        str(file.relative_to(run)): file.read_bytes()
        for file in sorted((run / "model").rglob("*"))
        if file.is_file() and file.name != "README.md"
    }
    return files | {"held_out": held_out}


def checkpoints(run: Path) -> list[Path]:
    return sorted(run.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))


def flip(folder: Path) -> None:
    shard = next(folder.glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


HARM: list[Callable[[Path], Any]] = [
    flip,
    lambda folder: next(folder.glob("shard-*")).unlink(),
    lambda folder: os.truncate(folder / "manifest.json", 100),
    lambda folder: os.truncate(next(folder.glob("shard-*")), 1000),
]


def arm() -> None:
    """In a rank: count the file operations of the thread that writes checkpoints, from its third save on; die
    before one.
    """
    at, seen, saves = int(os.environ["FAULTS_KILL_AT"]), [0], [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "saver":
                saves[0] += real.__name__ == "mkdir"
                if saves[0] >= 3:
                    seen[0] += 1
                    if seen[0] == at:
                        os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    if os.environ["RANK"] == "0":
        for owner, name in (
            (os, "fsync"),
            (os, "rename"),
            (Path, "mkdir"),
            (Path, "open"),
            (shutil, "rmtree"),
        ):
            setattr(owner, name, counted(getattr(owner, name)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--terms", type=int, default=30)
    parser.add_argument(
        "--boundaries",
        type=int,
        default=20,
        help="operations of a save before which rank 0 is killed, one a time",
    )
    parser.add_argument("--freezes", type=int, default=4)
    parser.add_argument("--damages", type=int, default=4)
    parser.add_argument(
        "--stops",
        type=int,
        default=0,
        help="stop signals at random moments of a whole run, evaluation included",
    )
    parser.add_argument(
        "--only", default=None, choices=("kill", "boundary", "term", "freeze", "damage", "stop")
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    known = json.loads(Path(args.json).read_text()) if args.json and Path(args.json).is_file() else {}
    harms = ("boundary", "freeze", "damage", "term", "kill", "stop")
    done = dict.fromkeys(harms, 0) | known.get("done", {})
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        bench.counts.update(known.get("counts", {}))
        bench.slowest = known.get("slowest_stop_s", 0.0)
        reached = {
            "boundary": lambda: done["boundary"] >= args.boundaries,
            "freeze": lambda: done["freeze"] >= args.freezes,
            "damage": lambda: done["damage"] >= args.damages,
            "term": lambda: bench.counts["signals, exit 75"] >= args.terms,
            "kill": lambda: bench.counts["kills"] >= args.kills,
            "stop": lambda: done["stop"] >= args.stops,
        }
        for harm in [args.only] if args.only else harms:
            while time.monotonic() < deadline and not reached[harm]():
                done[harm] += 1
                if getattr(bench, harm)(done[harm]) is False:  # there are no more boundaries
                    done[harm] = args.boundaries
                facts = {
                    "done": done,
                    "counts": dict(bench.counts),
                    "slowest_stop_s": bench.slowest,
                    "bound_s": BOUND_S,
                }
                write_json(args.json, {**facts, "straight_run_s": bench.seconds})
                print(harm, done[harm], f"{deadline - time.monotonic():.0f} s left at most", flush=True)
        bench.fork_server.close()
        print(table(["what", "count"], sorted(bench.counts.items())))
        print(
            f"slowest stop after a signal: {bench.slowest:.1f} s (bound {BOUND_S:.0f} s); a straight run:"
            f" {bench.seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
