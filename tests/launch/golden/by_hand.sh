# The part of a batch script after `freeze`, the same as in jobs that `-m` submits. The arguments start an agent:
#     source "$RUN/job.sh" python -m hpc_train agent "$RUN"
if [ -z "${SLURM_JOB_ID:-}" ]; then
  echo "$0 starts its agents with srun, and this shell is not in a Slurm job" >&2
  echo "  fix:    sbatch $0 with the same arguments; outside of Slurm: python -m hpc_train agent $RUN" >&2
  exit 2
fi

# variables of the shell that squeue, scontrol and srun would read as options
unset SLURM_CLUSTERS "${!SQUEUE_@}" "${!SINFO_@}" "${!SACCT_@}" "${!SCANCEL_@}" "${!SCONTROL_@}" SLURM_TIME_FORMAT \
  SLURM_BITSTR_LEN SLURM_TRES_PER_TASK "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" SLURM_GPU_BIND SLURM_TRES_BIND \
  SLURM_GRES SLURM_TIMELIMIT SLURM_DISTRIBUTION SLURM_HOSTFILE SLURM_OVERCOMMIT SLURM_CORE_SPEC SLURM_THREAD_SPEC \
  SLURM_STDINMODE SLURM_STDOUTMODE SLURM_STDERRMODE SLURM_LABELIO SLURM_REMOTE_CWD SLURM_EXIT_ERROR \
  SLURM_EXIT_IMMEDIATE SLURM_IMMEDIATE SLURM_NO_KILL SLURM_MULTI_PROG "${!SRUN_@}"
# with sbatch --export=NONE, the step would otherwise not get this environment
export SLURM_EXPORT_ENV=ALL
# srun does not inherit --cpus-per-task from the job; on exclusive nodes, and if the job requests several tasks per
# node, the agent gets all cores of the smallest node
if [ "${SLURM_NTASKS_PER_NODE:-1}" -gt 1 ] || [ "${SLURM_NTASKS:-0}" -gt "${SLURM_JOB_NUM_NODES:-1}" ]; then
  unset SLURM_CPUS_PER_TASK
fi
cores=$(tr , '\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sort -n | head -n 1) # of 64(x2),32
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-${cores%%(*}}"

# The agent is the only task of its node and uses all GPUs that the job has there, also if the script requests resources
# for one task per GPU.
unset SLURM_GPU_BIND SLURM_NTASKS_PER_GPU
tasks=one
if [ "${SLURM_NTASKS_PER_NODE:-1}" -gt 1 ] || [ "${SLURM_NTASKS:-0}" -gt "${SLURM_JOB_NUM_NODES:-1}" ]; then
  unset SLURM_GPUS_PER_TASK
  tasks=several
fi
# A step inherits the GPUs that its job requests per job, node or socket, but neither those that the job requests for
# several tasks of a node, nor those that it has only through --exclusive. To get these, the step requests as many per
# node as every node of the job has.
if [ -z "${SLURM_GPUS:-}${SLURM_GPUS_PER_NODE:-}${SLURM_GPUS_PER_TASK:-}" ]; then
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
  job=$(scontrol show job --details "$job" 2> /dev/null) || true
  [ "$tasks" = one ] || job=${job//TresPerTask=/}
  if ! grep -q 'TresPer[A-Za-z]*=[^ ]*gpu' <<< "$job"; then
    gpus=$(sed -n 's/(IDX:[^)]*)//g; s/^ *Nodes=.* GRES=//p' <<< "$job" | awk -F, '
      { n = 0; for (i = 1; i <= NF; i++) if ($i ~ /^gpu:/) { parts = split($i, part, ":"); n += part[parts] } }
      NR == 1 || n < fewest { fewest = n }
      END { if (NR) print fewest }')
    # if scontrol does not respond, use the number of the batch host
    gpus=${gpus:-${SLURM_GPUS_ON_NODE:-$(awk -F, '{ print NF }' <<< "${SLURM_JOB_GPUS:-}")}}
    if [ "$gpus" -gt 0 ]; then export SLURM_GPUS_PER_NODE=$gpus; fi
  fi
fi

# scancel also sends TERM to this script. A cancelled job is never requeued.
cancelled=
trap 'cancelled=yes' TERM
# Slurm sends the signal of --signal=B:USR1@SECONDS to this script alone, which passes it on to the agents as USR2.
announced=0
trap 'announced=1' USR1 USR2

# the prefix of the files in which the agents record how this start of the job ended, and the id of the job
end="$RUN/attempts/end-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}

# A step ends only when all of its tasks have ended, but a task on a frozen node (a hung file system, swapping) does
# not end. The agents record their end in a file. The step then has 25 s to end; after that, this script requests
# Slurm to kill it, and continues 10 s later in any case. Slurm kills the remaining processes at the end of the job.
srun_ends() { # returns 0 if srun ends within $1 seconds
  for ((second = 0; second < $1; second++)); do
    kill -0 "$srun" 2> /dev/null || return 0
    sleep 1 || true
  done
  return 1
}

# Each node runs one task, the agent, which starts one worker per GPU.
# If a node is lost, the agents of the other nodes continue without it.
# If signals have killed all agents, no agent has recorded an end, and another step continues the run.
rm -f "$end".node-* # left by an earlier run in the same allocation
trap : INT # srun handles Ctrl-C
for step in 1 2 3; do
  # the job may have given nodes back
  [ "$step" = 1 ] || SLURM_JOB_NUM_NODES=$(squeue -h -j "$job" -o %D || echo "$SLURM_JOB_NUM_NODES")
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
      --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered \
      "$@" &
  srun=$! recorded=
  while [ -z "$recorded" ] && kill -0 "$srun" 2> /dev/null; do
    sleep 1 || true # scancel interrupts the sleep with TERM
    recorded=$(ls "$end".node-* 2> /dev/null) || true
    if ((announced && SECONDS >= announced)); then # repeated after 10 s, since agents miss the signal while they start
      kill -USR2 "$srun" 2> /dev/null || true
      announced=$((SECONDS + 10))
    fi
  done
  if ! srun_ends 25; then
    echo "the agents have ended but their step has not (a node may be frozen): asking Slurm to kill the step" >&2
    number=$(sed -n 's/^step //p' "$end".node-* | tail -n 1)
    [ -z "$number" ] || timeout 15 scancel --signal=KILL "$job.$number" || true
    srun_ends 10 || kill -KILL "$srun" || true
    date +%s > "$end.frozen" || true # the frozen node held the job until now
  fi
  status=0
  wait "$srun" || status=$?
  if [ "$status" -le 128 ] || [ -n "$recorded$cancelled" ]; then break; fi
done
trap - INT

# The agents record the exit code; the exit code of srun only shows that something failed.
[ "$status" -eq 0 ] || status=1
for known in 1 2 93 75 0; do
  if grep -qsx "$known" "$end".node-*; then status=$known; break; fi
done
failed=$(sed -n 's/^command //p' "$end".node-* 2> /dev/null | tail -n 1) || true # the exit code of run.command
case $status in 1 | 2 | 93) status=${failed:-$status} ;; esac
# If the job stopped before its time limit or because of a preemption, this script requests a requeue once, unless the
# job is cancelled (`incomplete` also checks that), is held (priority 0), or is already being requeued by Slurm.
if [ "$status" -eq 75 ] && [ -e "$end.requeue" ] && [ -z "$cancelled" ]; then
  for wait in 0 5 10 20 40 60 60 60 60 120 120; do
    sleep "$wait"
    state=$(squeue --noheader --jobs="$job" --format='%T %Q') && break
  done
  if [[ "$state" == RUNNING* && "$state" != *" 0" && -z "$cancelled" ]]; then
    trap '' TERM # Slurm ends this script when it requeues the job, and scontrol must survive that
    if ! scontrol requeue incomplete "$job"; then
      echo "Slurm refuses to requeue the job. Resume the run with: python -m hpc_train resume $RUN" >&2
      exit 93
    fi
    # exclude nodes that have failed more than once; Slurm accepts the list once the job is pending again
    if [ -e "$end.exclude" ]; then
      for wait in 0 0.5 0.5 1 1; do
        sleep "$wait"
        if scontrol update JobId="$job" ExcNodeList="$(cat "$end.exclude")"; then break; fi
      done
    fi
  fi
fi
rm -f "$end".node-*; exit "$status"
