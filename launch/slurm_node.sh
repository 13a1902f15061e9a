#!/bin/bash
# What srun starts once per node: torchrun with c10d rendezvous. USR1 is for the ranks; torchrun itself would die of it.
set -u
source launch/slurm_requeue.sh # ended

(
    trap '' USR1
    exec torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-gpu}}" \
        --rdzv-backend=c10d --rdzv-endpoint="$RDZV_HOST:$RDZV_PORT" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
        --rdzv-conf="is_host=$((SLURM_NODEID == 0))" "$@"
) &
agent=$!
trap 'pkill -USR1 -P "$agent"' USR1 # where SLURM signals this script alone
ended "$agent"
