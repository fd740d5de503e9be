#!/bin/bash
# Trains on all nodes of a job of PBS Pro or OpenPBS: qsub deploy/schedulers/pbs.sh
# Never run on a real PBS as of 2026-11-29; a test starts it with stand-ins for qsub and pbs_tmrsh. The commands follow
# qsub(1B), qsig(1B), qrerun(1B) and pbs_tmrsh(8B): https://github.com/openpbs/openpbs/tree/master/doc
#PBS -N hpc_train
#PBS -l select=2:ncpus=32:ngpus=4:mpiprocs=1
#PBS -l place=scatter
#PBS -l walltime=04:00:00
#PBS -j oe
LIMIT_S=$((4 * 3600)) # the walltime above
OVERRIDES=(+strategy=hybrid)
cd "$PBS_O_WORKDIR" || exit

HPC_TRAIN_JOB_ID=${HPC_TRAIN_JOB_ID:-pbs-${PBS_JOBID//[^[:alnum:]]/-}} # a job that continues another has its id
HPC_TRAIN_NODES=$(awk '!seen[$1]++ { print $1 }' "$PBS_NODEFILE" | paste -sd,)
HPC_TRAIN_END_TIME=$(($(date +%s) + LIMIT_S))
# qrerun requires the privilege of an operator, so the next job of the run is submitted
HPC_TRAIN_REQUEUE="cd $(printf %q "$PWD") && qsub -W depend=afterany:$PBS_JOBID \
  -v HPC_TRAIN_JOB_ID=$HPC_TRAIN_JOB_ID deploy/schedulers/pbs.sh"
export HPC_TRAIN_JOB_ID HPC_TRAIN_NODES HPC_TRAIN_END_TIME HPC_TRAIN_REQUEUE

RUN=$(python -m hpc_train freeze "${OVERRIDES[@]}") || exit
source "$RUN/job.sh"
bash "$AGENT" 0 &
first=$!
rank=0
for node in $(tr , '\n' <<< "$HPC_TRAIN_NODES" | tail -n +2); do
  rank=$((rank + 1))
  pbs_tmrsh "$node" /bin/bash "$AGENT" "$rank" &
done
agents_end
