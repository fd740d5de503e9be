#!/bin/bash
# Trains on all nodes of a job of IBM Spectrum LSF: bsub < deploy/schedulers/lsf.sh
# Never run on a real LSF as of 2026-11-29; a test starts it with a stand-in for blaunch. Manuals of the options and the
# variables: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0, bsub -Q, bsub -W, blaunch, "Environment variables set for job
# execution". At the limit of -W, LSF sends SIGUSR2 and waits for ten minutes.
#BSUB -J hpc_train
#BSUB -n 2
#BSUB -R "span[ptile=1]"
#BSUB -gpu "num=4"
#BSUB -W 4:00
#BSUB -o hpc_train-%J.out
#BSUB -Q "85"
LIMIT_S=$((4 * 3600)) # -W above
OVERRIDES=(+strategy=hybrid)

export HPC_TRAIN_JOB_ID=lsf-$LSB_JOBID-$LSB_JOBINDEX # the index is 0 without an array
HPC_TRAIN_NODES=$(awk '!seen[$1]++ { print $1 }' "$LSB_DJOB_HOSTFILE" | paste -sd,)
HPC_TRAIN_END_TIME=$(($(date +%s) + LIMIT_S))
export HPC_TRAIN_NODES HPC_TRAIN_END_TIME
export HPC_TRAIN_REQUEUE=true # LSF requeues a job that exits with 85, because of -Q

RUN=$(python -m hpc_train freeze "${OVERRIDES[@]}") || exit
source "$RUN/job.sh"
bash "$AGENT" 0 &
first=$!
rank=0
for node in $(tr , '\n' <<< "$HPC_TRAIN_NODES" | tail -n +2); do
  rank=$((rank + 1))
  blaunch "$node" bash "$AGENT" "$rank" &
done
agents_end 85
