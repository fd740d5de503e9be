"""What a batch script does before and after its ``srun``: the job's exit code, and asking Slurm to run it again.

Shell, because a batch script stands outside of containers and may have no Python.
"""

from __future__ import annotations

BEFORE = """\
# A cancelled job never comes back: scancel sends TERM to this script too.
cancelled=
trap 'cancelled=yes' TERM

# the names of the files in which the agents tell how this start of the job ended, and the job in Slurm's commands
end="$RUN/attempts/end-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
""".rstrip()

END = """\
# How it ended, from the agents; srun's own code tells no more than that something failed.
[ "$status" -eq 0 ] || status=1
for known in 1 2 93 75 0; do
  if grep -qsx "$known" "$end".node-*; then status=$known; break; fi
done
""".rstrip()

AFTER = """\
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
""".rstrip()


def lines_before() -> list[str]:
    """The lines before the ``srun`` of the agents; ``$RUN`` is the run directory."""
    return BEFORE.splitlines()


def lines_of_end() -> list[str]:
    """What turns ``$status``, the exit code of ``srun``, into the job's."""
    return END.splitlines()


def script_lines() -> list[str]:
    """The last lines of a batch script."""
    return [*lines_of_end(), *AFTER.splitlines()]
