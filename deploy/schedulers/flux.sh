#!/bin/bash
# Trains on all nodes of a Flux instance: flux batch -N 2 --exclusive -t 4h deploy/schedulers/flux.sh
# Never run on a real Flux as of 2026-11-29; a test starts it with a stand-in for flux. The commands follow flux-batch(1),
# flux-run(1), flux-job(1), flux-hostlist(1) and flux-shell-options(7): https://flux-framework.readthedocs.io/projects/flux-core
OVERRIDES=(+strategy=hybrid)
HPC_TRAIN_JOB_ID=${HPC_TRAIN_JOB_ID:-flux-$(flux getattr jobid | tr -cs '[:alnum:]\n' -)} # see HPC_TRAIN_REQUEUE
HPC_TRAIN_NODES=$(flux hostlist --expand --delimiter=, local)
left=$(flux job timeleft) # in seconds; 4294967295 (UINT_MAX) without a limit
unset HPC_TRAIN_END_TIME
[ "$left" -eq 4294967295 ] || export HPC_TRAIN_END_TIME=$(($(date +%s) + left))
nodes=$(tr -cd , <<< "$HPC_TRAIN_NODES," | wc -c)
# the next job of the run is submitted to the enclosing instance
HPC_TRAIN_REQUEUE="cd $(printf %q "$PWD") && flux --parent batch -N $nodes --exclusive -t 4h \
  --env=HPC_TRAIN_JOB_ID=$HPC_TRAIN_JOB_ID deploy/schedulers/flux.sh"
export HPC_TRAIN_JOB_ID HPC_TRAIN_NODES HPC_TRAIN_REQUEUE

RUN=$(python -m hpc_train freeze "${OVERRIDES[@]}") || exit
source "$RUN/job.sh"
# without this exit-timeout, Flux ends the job 30 s after the agent of a lost node
flux run -N "$nodes" --tasks-per-node=1 --exclusive -o exit-timeout=none \
  bash -c 'exec bash "$0" "$FLUX_TASK_RANK"' "$AGENT" &
first=$!
agents_end
