#!/bin/bash
# Trains on all nodes of a Flux instance: flux batch -N 2 --exclusive -t 4h deploy/schedulers/flux.sh
# Never run on a real Flux as of 2026-11-29; a test starts it with a stand-in for flux.
OVERRIDES=(+strategy=hybrid)
HPC_TRAIN_JOB_ID=${HPC_TRAIN_JOB_ID:-flux-$(flux getattr jobid | tr -cs '[:alnum:]\n' -)} # see HPC_TRAIN_REQUEUE
HPC_TRAIN_NODES=$(flux hostlist --expand --delimiter=, local)
left=$(flux job timeleft) # seconds, or infinity
unset HPC_TRAIN_END_TIME
[[ $left == inf* ]] || export HPC_TRAIN_END_TIME=$(($(date +%s) + ${left%.*}))
nodes=$(tr -cd , <<< "$HPC_TRAIN_NODES," | wc -c)
# Flux does not requeue jobs of users, so the next job of the run is submitted to the enclosing instance
HPC_TRAIN_REQUEUE="cd $(printf %q "$PWD") && flux proxy \$(flux getattr parent-uri) flux batch -N $nodes --exclusive -t 4h \
  --env=HPC_TRAIN_JOB_ID=$HPC_TRAIN_JOB_ID deploy/schedulers/flux.sh"
export HPC_TRAIN_JOB_ID HPC_TRAIN_NODES HPC_TRAIN_REQUEUE

RUN=$(python -m hpc_train freeze "${OVERRIDES[@]}") || exit
source "$RUN/job.sh"
flux run -N "$nodes" --tasks-per-node=1 --exclusive \
  bash -c 'exec bash "$0" "$FLUX_TASK_RANK"' "$AGENT" &
first=$!
agents_end
