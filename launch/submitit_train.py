"""Training as a submitit job, from Python instead of an sbatch file: `pip install 'fmmeta[submitit]'`, then

    python launch/submitit_train.py --nodes 2 --gpus_per_node 8 --slurm_partition gpu --deepspeed zero3

With the wheel installed it is `python -m fmmeta.launch.submitit_train`.

One task per GPU. What is no flag of this script is a flag of training, and is checked before anything is
submitted. Before the time limit SLURM sends USR1; the run then saves, and only then does submitit get the
signal, with which it queues the job again; so it does after the fault of a machine that is no hanging rank
(exit code 70), up to 50 times. `--cluster local` starts the tasks here and waits for them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ["SUBMITIT_PREEMPT_SIGNAL"] = (
    "USR1"  # which training answers; submitit reads it when it is imported
)
REQUEUED, MAX_REQUEUES = 75, 50


class Training:
    """What submitit pickles: the flags, and what to do when the job is queued again."""

    def __init__(self, flags: list[str]) -> None:
        self.flags, self.faults = flags, 0

    def __call__(self) -> str:
        """On every task: train, to the end, a signal or a machine's fault. Returns the run's folder."""
        import submitit

        from fmmeta.cli import parse
        from fmmeta.common.errors import MachineFault, Stopped
        from fmmeta.reliability.signals import Signals
        from fmmeta.train import train

        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        job = submitit.JobEnvironment()
        os.environ["GROUP_RANK"] = str(job.node)
        config = parse(self.flags)
        config.output_dir = config.output_dir or f"runs/submitit-{job.job_id}"
        try:
            with Signals() as signals:
                return str(train(config, signals).output_dir)
        except Stopped as stopped:
            print(f"fmmeta: {stopped}", file=sys.stderr, flush=True)
        except MachineFault as fault:
            print(f"fmmeta: error: {fault}", file=sys.stderr, flush=True)
            self.faults += 1  # stored with the job when it is queued again
            if self.faults > MAX_REQUEUES:
                raise
        os.kill(
            os.getpid(), signal.SIGUSR1
        )  # submitit's turn: its first task queues the job again and does not come back
        sys.exit(REQUEUED)

    def checkpoint(self, *args: Any) -> Any:
        """The same command goes on from the checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cluster", choices=("slurm", "local"), default="slurm")
    parser.add_argument("--folder", default="runs/submitit", help="where submitit keeps logs and pickles")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks_per_node", type=int, default=None, help="default: gpus_per_node")
    parser.add_argument("--gpus_per_node", type=int, default=0)
    parser.add_argument("--cpus_per_task", type=int, default=8)
    parser.add_argument("--timeout_min", type=int, default=1440)
    parser.add_argument(
        "--signal_delay_s",
        type=int,
        default=300,
        help="seconds before the limit at which the run saves and ends",
    )
    parser.add_argument("--slurm_partition", default=None)
    given, flags = parser.parse_known_args(argv)
    try:
        import submitit
    except ImportError:
        sys.exit("fmmeta: error: submitit is not installed; pip install 'fmmeta[submitit]'")
    from fmmeta.cli import parse
    from fmmeta.common.errors import UsageError

    try:
        parse(flags)
    except UsageError as error:
        print(f"fmmeta: error: {error}", file=sys.stderr)
        sys.exit(2)
    executor = submitit.AutoExecutor(
        folder=Path(given.folder), cluster=given.cluster, slurm_max_num_timeout=MAX_REQUEUES
    )
    tasks = given.tasks_per_node or max(1, given.gpus_per_node)
    settings: dict[str, Any] = {
        "name": "fmmeta",
        "nodes": given.nodes,
        "tasks_per_node": tasks,
        "timeout_min": given.timeout_min,
        "gpus_per_node": given.gpus_per_node,
        "cpus_per_task": given.cpus_per_task,
        "slurm_signal_delay_s": given.signal_delay_s,
    }
    if given.slurm_partition:
        settings["slurm_partition"] = given.slurm_partition
    executor.update_parameters(**settings)
    job = executor.submit(Training(flags))
    print(f"job {job.job_id}; logs in {job.paths.folder}", flush=True)
    if given.cluster == "local":
        print(f"finished in {job.results()[0]}", flush=True)


if __name__ == "__main__":
    main()
