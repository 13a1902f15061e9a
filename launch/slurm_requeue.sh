#!/bin/bash
# For sbatch files: run a step, hand USR1 on to it, and put the job back into the queue, where the same command resumes (with --resume_from_checkpoint PATH too).
#
#     source launch/slurm_requeue.sh; run_and_requeue srun COMMAND [ARGUMENTS]
#
# Exit codes of the ranks: 75 saved after a signal, 70 a machine misbehaves; srun passes the highest on, torchrun makes them 1.
# After any other code but 0 and 2 the job goes back if the step has written a checkpoint into its --output_dir: what fails
# without progress would fail again.
MAX_REQUEUES="${MAX_REQUEUES:-50}"

ended() { # wait for a child, past the traps that end `wait`, and return its exit code
    while kill -0 "$1" 2> /dev/null; do
        wait "$1"
    done
    wait "$1" # bash remembers
}

newest_checkpoint() { # of these arguments' last --output_dir; 0: none
    local word is_folder=0 folder="" path number newest=0
    for word in "$@"; do
        ((is_folder)) && folder="$word"
        is_folder=0
        case "$word" in
            --output_dir | --output-dir) is_folder=1 ;;
            --output_dir=* | --output-dir=*) folder="${word#*=}" ;;
        esac
    done
    for path in "$folder"/checkpoint-*/manifest.json; do
        number="${path%/manifest.json}"
        number="${number##*/checkpoint-}"
        [[ -n "$folder" && -f "$path" && "$number" =~ ^[0-9]+$ ]] && ((number > newest)) && newest="$number"
    done
    echo "$newest"
}

run_and_requeue() {
    local step code asked=0 before
    before="$(newest_checkpoint "$@")"
    "$@" &
    step=$!
    trap 'asked=1; kill -USR1 "$step" 2> /dev/null' USR1 # srun hands it on to its tasks
    ended "$step"
    code=$?
    if ((code == 75 || code == 70 || (code != 0 && code != 2 && (asked || $(newest_checkpoint "$@") > before)))); then
        if ((${SLURM_RESTART_COUNT:-0} >= MAX_REQUEUES)); then
            echo "fmmeta: exit code $code; not queued again: MAX_REQUEUES=$MAX_REQUEUES" >&2
        else
            echo "fmmeta: exit code $code; job $SLURM_JOB_ID goes back into the queue" >&2
            scontrol requeue "$SLURM_JOB_ID"
        fi
    fi
    return "$code"
}
