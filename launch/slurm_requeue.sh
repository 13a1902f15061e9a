#!/bin/bash
# For sbatch files: run a step, hand USR1 on to it, and put the job back into the queue, where the same command resumes (with --resume_from_checkpoint PATH too).
#
#     source launch/slurm_requeue.sh; run_and_requeue srun COMMAND [ARGUMENTS]
#
# Exit codes of the ranks: 75 saved after a signal, 70 a machine misbehaves; srun passes the highest on, torchrun makes them 1.
MAX_REQUEUES="${MAX_REQUEUES:-50}"

ended() { # wait for a child, past the traps that end `wait`, and return its exit code
    while kill -0 "$1" 2> /dev/null; do
        wait "$1"
    done
    wait "$1" # bash remembers
}

run_and_requeue() {
    local step code asked=0
    "$@" &
    step=$!
    trap 'asked=1; kill -USR1 "$step" 2> /dev/null' USR1 # srun hands it on to its tasks
    ended "$step"
    code=$?
    if ((code == 75 || code == 70 || (asked && code != 0 && code != 2))); then
        if ((${SLURM_RESTART_COUNT:-0} >= MAX_REQUEUES)); then
            echo "fmmeta: exit code $code; not queued again: MAX_REQUEUES=$MAX_REQUEUES" >&2
        else
            echo "fmmeta: exit code $code; job $SLURM_JOB_ID goes back into the queue" >&2
            scontrol requeue "$SLURM_JOB_ID"
        fi
    fi
    return "$code"
}
