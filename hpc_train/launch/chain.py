"""``launch.chain``: jobs of which each begins when the one before has ended, for sites that do not requeue.

All are submitted at once. A job that stops ahead of its time limit, or is lost with its node, leaves the rest of the
run to the next one, unless it has saved nothing that the one before had not. A run that has ended in any other way
cancels the jobs that are left: the batch script does so, from a file with their ids that the submitter writes into
``attempts/``; should a job begin before it is written or cancelled, it sees the end of the chain beside that file and
leaves.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.launch.standing import Standing
from hpc_train.run.directory import RunDirectory

BEFORE = """\
# One job of a chain. It leaves when the run has ended in an earlier one, or a person has cancelled an earlier one.
[ ! -e "$CHAIN.over" ] || exit 0
if [ -s "$CHAIN" ] && squeue --noheader --states=CANCELLED --jobs="$(paste -sd, "$CHAIN")" | grep -q .; then
  scancel $(cat "$CHAIN")
  exit 75
fi
saved=$(ls "$RUN/checkpoints")
""".rstrip()

AFTER = """\
# The next job of the chain goes on where this one has stopped, or where its time limit or a preemption has ended it.
if scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
  cancelled=
elif scontrol show job "$SLURM_JOB_ID" | grep -q 'Reason=TimeLimit'; then
  cancelled=
  if [ "$saved" = "$(ls "$RUN/checkpoints")" ]; then cancelled=yes; fi # the next would get no further
elif [ ! -e "$end.requeue" ]; then
  cancelled=yes
elif [ -e "$end.exclude" ]; then # nodes that have failed more than once
  for next in $(grep -vx "$SLURM_JOB_ID" "$CHAIN"); do
    scontrol update JobId="$next" ExcNodeList="$(cat "$end.exclude")" || true
  done
fi
if [ -n "$cancelled" ]; then # done, failed, given up, or cancelled: nothing is left to do for the others
  : > "$CHAIN.over"
  others=$(grep -vx "$SLURM_JOB_ID" "$CHAIN") && scancel $others
fi
exit "$status"
""".rstrip()


def chain_file(run: RunDirectory) -> Path:
    """With the ids of the chain that is submitted next, one per line."""
    return run.attempts / f"chain-{len(run.record().get('submissions', [])):03d}"


def lines_before(file: Path) -> list[str]:
    return [f"CHAIN={shlex.quote(str(file))}", *BEFORE.splitlines()]


def script_lines() -> list[str]:
    """The last lines of the batch script, in place of those that ask for a requeue."""
    return AFTER.splitlines()


def submit(count: int, one: Callable[[str | None], str]) -> list[str]:
    """Submits ``count`` jobs by ``one``, which takes a dependency; returns their ids in order."""
    ids = [one(None)]
    while len(ids) < count:
        ids.append(one(f"afterany:{ids[-1]}"))
    return ids


def folded(chains: Mapping[str, Sequence[str]], known: Mapping[str, Standing]) -> dict[str, Standing]:
    """``known``, with that of a whole chain under the id of its first job."""
    whole = {first: standing for first, ids in chains.items() if (standing := _of_chain(ids, known)) is not None}
    return {**known, **whole}


def _of_chain(ids: Sequence[str], known: Mapping[str, Standing]) -> Standing | None:
    """Of the job that runs, else of the next to run, else of the last that has ended by itself."""
    present = [job_id for job_id in ids if job_id in known and known[job_id].present]
    running = [job_id for job_id in present if known[job_id].state != "PENDING"]
    ended = [job_id for job_id in ids if job_id in known and job_id not in present]
    by_themselves = [job_id for job_id in ended if known[job_id].state != "CANCELLED"]
    current = next(iter([*running, *present, *reversed(by_themselves), *ended]), None)
    if current is None:
        return None
    return replace(known[current], part=f"job {current}, {ids.index(current) + 1} of {len(ids)}")
