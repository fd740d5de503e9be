#!/bin/bash
# Trains in the foreground on nodes that salloc allocates:
#
#     slurm/interactive.sh +strategy=hybrid
#     SALLOC="--nodes=2 --time=01:00:00 --partition=debug" slurm/interactive.sh +strategy=hybrid run.name=mine
#
# Arguments are Hydra overrides; the variable SALLOC holds options of salloc. Ctrl-C saves a checkpoint and stops. The
# nodes are released as soon as the run ends.

set -euo pipefail

if [[ -z ${SLURM_JOB_ID:-} ]]; then # outside an allocation: get one, and run this script again inside it
    # shellcheck disable=SC2086  # SALLOC is a list of options
    exec salloc --job-name=hpc_train --nodes=1 --ntasks-per-node=1 --exclusive --mem=0 --time=00:30:00 \
        ${SALLOC:-} "$0" "$@"
fi

# Composes and checks the config for the nodes of the allocation, and freezes it in the run directory.
run=$(python -m hpc_train freeze "$@")
echo "run directory: $run"

# srun does not inherit the number of cores from salloc (Slurm >= 22.05). Without it all workers share one core. On
# exclusive nodes, an agent gets all cores of the smallest node.
cores=$(tr , '\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sort -n | head -n 1) # of 64(x2),32
cores=${SLURM_CPUS_PER_TASK:-${cores%%(*}}

# Passes the GPUs of the allocation on to srun. srun does not do this itself if only --exclusive requested them.
source "$run/gpus.sh"

# One agent per node; the agent of the first node prints the training here. --interactive is not needed, since agents
# use no terminal. Ctrl-C reaches the agents, not srun. Inside a step, such as `srun --pty bash`, srun would wait for the
# end of that step.
srun ${SLURM_STEP_ID:+--overlap} --ntasks-per-node=1 --cpus-per-task="$cores" --kill-on-bad-exit=1 \
    python -m hpc_train agent --progress "$run"
