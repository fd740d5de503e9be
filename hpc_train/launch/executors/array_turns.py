"""Divides ``launch.array_parallelism`` among the job arrays of a sweep.

Slurm limits how many tasks of one array run at a time (``--array=0-99%8``), but a sweep becomes several arrays if its
jobs request different resources or are more than the site allows in one array. Each array gets a share of the limit by
its number of jobs. When all jobs of an array have started, each of them passes its place on at its end: its batch
script raises the limit of an array whose jobs still wait. It counts all places anew, so the place of a job that was
killed is passed on by the next job that ends.

If there are more arrays than jobs that may run at a time, each array runs one job at a time, and some wait for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.launch.shell import shell_word

# An awk program that reads lines "ARRAY STATE" of all pending and running jobs, and lines "share ARRAY ID" of the
# pending ones, whose ids show the limit of their array (12_[3-9%2]). Prints each array whose limit can be raised, and
# the new limit.
PLACES = """\
  $1 == "share" { if (match($3, /%[0-9]+\\]/)) share[$2] = substr($3, RSTART + 1) + 0; next }
  $2 == "PENDING" { waiting[$1]++; next }
  { running[$1]++ }
  END {
    if (own in running) running[own]-- # this job
    for (array in running) if (!(array in waiting)) places -= running[array]
    for (array in waiting) {
      if (!(array in share)) share[array] = waiting[array] + running[array] # none: jobs that were requeued
      places -= share[array]
    }
    for (; places > 0; places--) {
      most = 0
      for (array in waiting) {
        left = (waiting[array] + running[array]) / share[array]
        if (left > most) { most = left; slowest = array }
      }
      if (most > 1) { share[slowest]++; raised[slowest] }
    }
    for (array in raised) print array, share[array]
  }""".rstrip()
PASS_ON = """\
# The submissions of this sweep run at most {limit} jobs at a time (launch.array_parallelism). If all jobs of its array
# have started, a job that ends passes its place on to an array whose jobs still wait.
if [ ! -e "$end.requeue" ] && arrays=$(paste -sd, {file}) &&
  jobs=$(timeout 30 squeue --noheader --array --jobs="$arrays" --format='%F %T') &&
  shares=$(timeout 30 squeue --noheader --states=PENDING --jobs="$arrays" --format='share %F %i'); then
  awk -v places={limit} -v own="${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}" '
{places}' <<< "$jobs
$shares" | while read -r array share; do
    timeout 30 scontrol update JobId="$array" ArrayTaskThrottle="$share" || true
  done || true
fi
""".rstrip()


@dataclass(frozen=True)
class Turn:
    """When the jobs of one array may run.

    Attributes:
        at_once: how many of them run at a time; a text for no limit.
        after: the index of the array whose end it waits for; None if it does not wait.
        shared: the limit of all arrays together, if this array has a share of it that its jobs pass on; else None.
    """

    at_once: int | str
    after: int | None = None
    shared: int | None = None


def divide(sizes: Sequence[int], limit: int | str) -> list[Turn]:
    """Returns the turn of each array, so that at most ``limit`` jobs run at a time.

    Args:
        sizes: the number of jobs of each array, in the order of submission.
        limit: a text for no limit.
    """
    if not isinstance(limit, int) or len(sizes) == 1 or sum(sizes) <= limit:
        return [Turn(limit) for _ in sizes]
    if len(sizes) > limit:
        return _in_lanes(sizes, limit)
    shares = [1] * len(sizes)
    for _ in range(limit - len(sizes)):
        slowest = max(range(len(sizes)), key=lambda index: sizes[index] / shares[index])
        shares[slowest] += 1
    return [Turn(share, shared=limit) for share in shares]


def _in_lanes(sizes: Sequence[int], lanes: int) -> list[Turn]:
    """Returns turns in which each array runs one job at a time, after another array if no lane is free."""
    turns: list[Turn] = []
    jobs = [0] * lanes
    newest: list[int | None] = [None] * lanes
    for index, size in enumerate(sizes):
        lane = min(range(lanes), key=jobs.__getitem__)
        turns.append(Turn(1, newest[lane]))
        jobs[lane] += size
        newest[lane] = index
    return turns


def pass_on_lines(limit: int, file: Path) -> list[str]:
    """Returns lines of a batch script that pass the place of its job on, to be run at the end of the job.

    Args:
        limit: the number of jobs of all arrays that may run at a time.
        file: has the ids of the submissions, one per line.
    """
    return PASS_ON.format(limit=limit, file=shell_word(str(file)), places=PLACES).splitlines()
