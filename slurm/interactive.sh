#!/bin/bash
# Trains on nodes of a cluster while you watch, in the terminal:
#
#     slurm/interactive.sh +strategy=hybrid
#     SALLOC="--nodes=2 --time=01:00:00 --partition=debug" slurm/interactive.sh +strategy=hybrid run.name=mine
#
# The arguments are Hydra overrides; the variable SALLOC holds options of salloc. Ctrl-C saves a checkpoint and stops;
# the nodes are given back as soon as the run ends.

set -euo pipefail

if [[ -z ${SLURM_JOB_ID:-} ]]; then # not inside an allocation yet: get one, and run this script again inside it
    # shellcheck disable=SC2086  # SALLOC is a list of options
    exec salloc --job-name=hpc_train --nodes=1 --ntasks-per-node=1 --exclusive --mem=0 --time=00:30:00 \
        ${SALLOC:-} "$0" "$@"
fi

# Composes and checks the config for the nodes of the allocation, and freezes it into the run directory.
run=$(python -m hpc_train freeze "$@")
echo "run directory: $run"

# srun does not take the cores over from salloc (Slurm >= 22.05): without it all workers of a node share one.
cores=${SLURM_CPUS_PER_TASK:-${SLURM_JOB_CPUS_PER_NODE%%(*}}

# Lets srun hand down the GPUs of the allocation, which it does not by itself where they come with --exclusive alone.
source "$run/gpus.sh"

# One agent per node. --interactive is not needed: the agents ask for no terminal. A Ctrl-C goes to them, not to srun.
srun --ntasks-per-node=1 --cpus-per-task="${cores%%,*}" --kill-on-bad-exit=1 python -m hpc_train agent "$run"
