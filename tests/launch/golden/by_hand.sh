# The rest of a batch script by hand whose run is frozen, as submitted jobs have it. The arguments start an agent:
#     source "$RUN/job.sh" python -m hpc_train agent "$RUN"

# sites that submit with --export=NONE would leave the step without this environment
export SLURM_EXPORT_ENV=ALL
# srun does not take over the cores per task of the job by itself; a node of its own has all of its cores
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}"

# A step inherits the GPUs that its job requests, but not those that the job has only through --exclusive. To get these,
# the step requests as many per node as every node of the job has.
if [ -z "${SLURM_GPUS:-}${SLURM_GPUS_PER_NODE:-}${SLURM_GPUS_PER_TASK:-}" ]; then
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
  job=$(scontrol show job --details "$job" 2> /dev/null) || true
  if ! grep -q 'TresPer[A-Za-z]*=[^ ]*gpu' <<< "$job"; then
    gpus=$(sed -n 's/(IDX:[^)]*)//g; s/^ *Nodes=.* GRES=//p' <<< "$job" | awk -F, '
      { n = 0; for (i = 1; i <= NF; i++) if ($i ~ /^gpu:/) { parts = split($i, part, ":"); n += part[parts] } }
      NR == 1 || n < fewest { fewest = n }
      END { if (NR) print fewest }')
    # without an answer of scontrol: as many as the batch host has
    gpus=${gpus:-${SLURM_GPUS_ON_NODE:-$(awk -F, '{ print NF }' <<< "${SLURM_JOB_GPUS:-}")}}
    if [ "$gpus" -gt 0 ]; then export SLURM_GPUS_PER_NODE=$gpus; fi
  fi
fi

# A cancelled job never comes back: scancel sends TERM to this script too.
cancelled=
trap 'cancelled=yes' TERM

# the names of the files in which the agents tell how this start of the job ended, and the job in Slurm's commands
end="$RUN/attempts/end-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}

# A step ends only when all of its tasks have, and one on a frozen node (a file system that hangs, memory that swaps)
# does not. The agents tell the end when they have nothing more to do: the step then has 25 s to end, Slurm is asked to
# kill it, and after 10 s more this script goes on without it. What cannot be killed, Slurm ends with the job.
srun_ends() { # whether srun has ended, within so many seconds
  for ((second = 0; second < $1; second++)); do
    kill -0 "$srun" 2> /dev/null || return 0
    sleep 1 || true
  done
  return 1
}

# one task per node, the agent; it starts a worker per GPU. Where a node is lost, the others go on without it.
# Agents that were all killed by a signal have told no end: another step of the same job takes over.
rm -f "$end".node-* # of an earlier run in the same allocation
trap : INT # a Ctrl-C is srun's to judge
for step in 1 2 3; do
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
      --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered \
      "$@" &
  srun=$! told=
  while [ -z "$told" ] && kill -0 "$srun" 2> /dev/null; do
    sleep 1 || true # scancel ends it with TERM
    told=$(ls "$end".node-* 2> /dev/null) || true
  done
  if ! srun_ends 25; then
    echo "the agents have told their end, and the step still runs (is a node frozen?): Slurm is asked to kill it" >&2
    number=$(sed -n 's/^step //p' "$end".node-* | tail -n 1)
    [ -z "$number" ] || timeout 15 scancel --signal=KILL "$job.$number" || true
  fi
  srun_ends 10 || kill -KILL "$srun" || true
  status=0
  wait "$srun" || status=$?
  if [ "$status" -le 128 ] || [ -n "$told$cancelled" ]; then break; fi
done
trap - INT

# How it ended, from the agents; srun's own code tells no more than that something failed.
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
