"""Stand-ins for `sbatch`, `srun` and `scontrol` on one machine. They stand for the cluster; the tasks that
they start are real.

What they do is what the manual pages say of the options that launch/ uses; any other option is an error.
`sbatch` reads #SBATCH lines, runs the script with SLURM's variables, hands `--signal=B:...` to the script's
shell alone (once the file of $STAND_IN_SIGNAL_AT has its number of lines), and restarts it after `scontrol
requeue`. `srun` starts its tasks with theirs, hands signals on to all processes of each, and ends with the
highest exit code.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

HOSTS = ["localhost", "127.0.0.1"]  # names of two nodes that mean this machine
BATCH = {
    "job-name",
    "nodes",
    "ntasks-per-node",
    "gpus-per-node",
    "distribution",
    "time",
    "signal",
    "requeue",
    "open-mode",
    "output",
}
STEP = {"kill-on-bad-exit", "wait"}


def install(folder: Path) -> Path:
    """Make the three commands in a folder for the PATH."""
    folder.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        file = folder / name
        file.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} {name} "$@"\n'
        )
        file.chmod(0o755)
    return folder


def options(words: list[str], known: set[str]) -> tuple[dict[str, str], list[str]]:
    """Leading `--name=value`s, and the rest."""
    found = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0)[2:].partition("=")
        assert name in known, f"unrecognized option '--{name}'"
        found[name] = value
    return found, words


def sbatch(*words: str) -> int:
    given, (script, *arguments) = options(list(words), BATCH)
    lines = Path(script).read_text().splitlines()
    asked, rest = options(
        [word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]], BATCH
    )
    assert not rest, rest
    asked |= given
    nodes, tasks = int(asked["nodes"]), int(os.environ.get("STAND_IN_TASKS") or asked["ntasks-per-node"])
    folder = Path(os.environ["STAND_IN_FOLDER"])
    env = {
        **os.environ,
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_JOB_NODELIST": ",".join(HOSTS[:nodes]),
    }
    env |= {"SLURM_GPUS_ON_NODE": os.environ["STAND_IN_GPUS"]} if "STAND_IN_GPUS" in os.environ else {}
    for restart in range(3):
        if restart:
            env["SLURM_RESTART_COUNT"] = str(restart)
        with Path(asked["output"].replace("%j", "4711")).open(
            "a" if asked["open-mode"] == "append" else "w"
        ) as output:
            spooled = folder / "slurm_script"  # the script runs from a copy
            spooled.write_text(Path(script).read_text())
            job = subprocess.Popen(["bash", str(spooled), *arguments], env=env, stdout=output, stderr=output)
            warned = False
            while job.poll() is None:
                where, least = os.environ["STAND_IN_SIGNAL_AT"].rsplit(":", 1)
                if (
                    not warned
                    and not restart
                    and Path(where).is_file()
                    and len(Path(where).read_text().splitlines()) >= int(least)
                ):
                    warned = True
                    to, number = re.fullmatch(r"(B:)?(\w+)@\d+", asked["signal"]).groups()
                    assert to == "B:"
                    job.send_signal(getattr(signal, f"SIG{number}"))
                time.sleep(0.02)
        queued = folder / "requeued"
        if "requeue" not in asked or not queued.is_file():
            return job.returncode
        queued.rename(folder / f"requeued-{restart}")
    return 1


def srun(*words: str) -> int:
    _, command = options(list(words), STEP)
    nodes, tasks = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    shared = {
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
    }
    started: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, _: object) -> None:
        for one in started:
            if one.poll() is None:
                os.killpg(one.pid, number)

    for rank in range(nodes * tasks):
        place = {
            "SLURM_PROCID": rank,
            "SLURM_NODEID": rank // tasks,
            "SLURM_LOCALID": rank % tasks,
            "SLURMD_NODENAME": HOSTS[rank // tasks],
        }
        env = {**os.environ, **shared, **{name: str(value) for name, value in place.items()}}
        started.append(subprocess.Popen(command, env=env, start_new_session=True))
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, hand_on)
    codes = [one.wait() for one in started]
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(verb: str, *words: str) -> int:
    if verb == "show":
        assert words[0] == "hostnames"
        sys.stdout.write("\n".join([*words[1].split(","), ""]))  # at once: `head -n 1` may not wait for more
    else:
        assert (verb, *words) == ("requeue", "4711")
        Path(os.environ["STAND_IN_FOLDER"], "requeued").touch()
    return 0


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](*sys.argv[2:]))
