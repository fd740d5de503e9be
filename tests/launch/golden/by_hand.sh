# The rest of a batch script by hand whose run is frozen, as submitted jobs have it. The arguments start an agent:
#     source "$RUN/job.sh" python -m hpc_train agent "$RUN"

# sites that submit with --export=NONE would leave the step without this environment
export SLURM_EXPORT_ENV=ALL
# srun does not take over the cores per task of the job by itself; a node of its own has all of its cores
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}"

# A cancelled job never comes back: scancel sends TERM to this script too.
cancelled=
trap 'cancelled=yes' TERM

# one task per node, the agent; it starts a worker per GPU. Where a node is lost, the others go on without it.
# Agents that were all killed by a signal have told no end: another step of the same job takes over.
for step in 1 2 3; do
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
      --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered \
      "$@"
  status=$?
  told=$(ls "$RUN/attempts/end-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}".node-* 2> /dev/null)
  if [ "$status" -le 128 ] || [ -n "$told$cancelled" ]; then break; fi
done

# How it ended, from the agents; srun's own code tells no more than that something failed.
end="$RUN/attempts/end-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
[ "$status" -eq 0 ] || status=1
for known in 1 2 93 75 0; do
  if grep -qsx "$known" "$end".node-*; then status=$known; break; fi
done
# Stopped ahead of the time limit or by a preemption: ask Slurm, once, to run the job again. Not where it is being
# cancelled (`incomplete` sees that too, should it happen now), is held (priority 0), or where Slurm requeues it itself.
if [ "$status" -eq 75 ] && [ -e "$end.requeue" ] && [ -z "$cancelled" ]; then
  for wait in 0 5 10 20; do
    sleep "$wait"
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format='%T %Q') && break
  done
  if [[ "$state" == RUNNING* && "$state" != *" 0" && -z "$cancelled" ]]; then
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
    trap '' TERM # Slurm ends this script when it takes the job back: scontrol is not to die of that
    if ! scontrol requeue incomplete "$job"; then
      echo "Slurm refuses to run the job again. This goes on: python -m hpc_train resume $RUN" >&2
      exit 93
    fi
    # nodes that have failed more than once; Slurm takes the list as soon as the job waits again
    if [ -e "$end.exclude" ]; then
      for wait in 0 0.5 0.5 1 1; do
        sleep "$wait"
        if scontrol update JobId="$job" ExcNodeList="$(cat "$end.exclude")"; then break; fi
      done
    fi
  fi
fi
exit "$status"
