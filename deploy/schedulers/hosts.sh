#!/bin/bash
# Trains on hosts that ssh reaches without a password, the first of which is this one:
#     deploy/schedulers/hosts.sh node1,node2 +strategy=hybrid run.name=NAME
# The hosts share the current directory, the run root and the environment of Python.
HPC_TRAIN_NODES=$1
shift
HPC_TRAIN_JOB_ID=hosts-$(date +%s)-$$
export HPC_TRAIN_NODES HPC_TRAIN_JOB_ID

RUN=$(python -m hpc_train freeze "$@") || exit
source "$RUN/job.sh"
bash "$AGENT" 0 &
first=$!
rank=0
for node in $(tr , '\n' <<< "$HPC_TRAIN_NODES" | tail -n +2); do
  rank=$((rank + 1))
  ssh -o BatchMode=yes "$node" "$(printf 'bash %q %s' "$AGENT" "$rank")" &
done
agents_end
