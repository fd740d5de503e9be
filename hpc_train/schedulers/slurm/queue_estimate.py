"""Asks Slurm when jobs would start, and reports the error of its earlier answers.

``sbatch --test-only`` plans with the time limits of the jobs that run and wait now, so a start is an estimate: jobs
that end early make it earlier, and jobs of a higher priority that are submitted later make it later. An answer is kept
for ``FRESH_S`` seconds in ``hpc_train/queue-starts.json`` in the user's cache directory.

``sacct`` knows when a job was submitted and when it started, but not what Slurm had expected. Each submission of
hpc_train therefore appends the expected start to ``.queue-estimates.jsonl`` in the run root.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from hpc_train.opening import DamagedFile, read_tail
from hpc_train.schedulers.slurm.client import QUERY_S, Problem, SlurmError, check_submission, query
from hpc_train.schedulers.slurm.records import rows, time_of
from hpc_train.users import user_cache

ESTIMATES = ".queue-estimates.jsonl"  # a file in the run root
FRESH_S = 300.0
NEWEST = 20  # the number of jobs that are compared
FEWEST = 3
LEAST_S = 60.0  # a shorter wait counts as this one: Slurm starts jobs at intervals
SUBMITTED_WITHIN_S = 120.0  # a job with another time of submission was requeued, or its id was used again
TAIL_BYTES = 1 << 16  # the part of the file with estimates that is read, about 400 submissions


@dataclass(frozen=True)
class Start:
    """Holds when a job would start, in seconds since 1970; or None and Slurm's message if Slurm refuses the job."""

    at: float | None
    refusal: str = ""


@dataclass(frozen=True)
class Estimate:
    """Describes a job with the times, in seconds since 1970, of its submission and of the start that Slurm expected."""

    cluster: str
    partition: str | None
    job_id: str
    submitted: float
    expected: float


def starts_of(shapes: Iterable[Sequence[str]]) -> dict[tuple[str, ...], Start]:
    """Returns the start of a job of each shape, with one ``sbatch --test-only`` for each that is not in the cache.

    Raises SlurmError if Slurm is missing or does not respond; it is not asked about the other shapes. ``shapes`` are
    the options of sbatch that determine when a job starts.
    """
    file = user_cache() / "queue-starts.json"
    now = time.time()
    cache: dict[str, dict[str, Any]] = {}
    with suppress(OSError, ValueError, AttributeError):
        entries = json.loads(file.read_text()).items()
        recent = {key: entry for key, entry in entries if {"asked", "at", "refusal"} <= entry.keys()}
        cache = {key: entry for key, entry in recent.items() if 0 <= now - entry["asked"] < FRESH_S}
    starts: dict[tuple[str, ...], Start] = {}
    try:
        for shape in dict.fromkeys(map(tuple, shapes)):
            text = json.dumps([os.environ.get("SLURM_CONF"), *shape])  # the cluster is a part of the key
            key = hashlib.sha256(text.encode()).hexdigest()[:16]
            if key not in cache:
                start = _ask(shape)
                cache[key] = {"asked": now, "at": start.at, "refusal": start.refusal}
            at = cache[key]["at"]
            starts[shape] = Start(None if at is None else max(at, now), cache[key]["refusal"])
    finally:
        # replaced at once, so that another process reads all of it; without room, the next plan asks again
        new = file.with_name(f"{file.name}.{os.getpid()}")
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(cache))
            new.replace(file)
    return starts


def _ask(shape: Sequence[str]) -> Start:
    try:
        return Start(check_submission(shape, QUERY_S).starts)
    except SlurmError as error:
        if error.problem is not Problem.REFUSED or "fatal:" in error.said:  # e.g. Slurm has no configuration here
            raise
        return Start(None, error.said)


def read_estimates(root: Path, cluster: str, partition: str | None) -> list[Estimate]:
    """Returns the newest submissions from ``root`` to a partition, the newest last; damaged lines are skipped."""
    estimates = []
    with suppress(OSError, DamagedFile):
        for line in read_tail(root / ESTIMATES, root, TAIL_BYTES).splitlines():
            with suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                times = float(row["submitted"]), float(row["expected"])
                estimates.append(Estimate(str(row["cluster"]), row["partition"], str(row["job_id"]), *times))
    return [item for item in estimates if (item.cluster, item.partition) == (cluster, partition)][-NEWEST:]


def describe_accuracy(submissions: Sequence[Estimate]) -> str | None:
    """Compares the expected starts of ``submissions`` with the real ones, by one query of accounting; returns a text
    with the ratio of the waiting times to Slurm's estimates: the median and the middle half.

    Returns None if fewer than three of them have started, or accounting does not respond.
    """
    if len(submissions) < FEWEST:
        return None
    ids = ",".join(item.job_id for item in submissions)
    text = query(["sacct", "-X", "--noheader", "--parsable2", f"--jobs={ids}", "--format=JobID,Submit,Start"]) or ""
    jobs = {row["JobID"]: row for row in rows(text, ("JobID", "Submit", "Start"))}
    ratios = []
    for item in submissions:
        job = jobs.get(item.job_id, {})
        submitted = time_of(job.get("Submit"))
        start = time_of(job.get("Start"))
        if submitted is None or start is None or abs(submitted - item.submitted) > SUBMITTED_WITHIN_S:
            continue
        ratios.append(max(start - submitted, LEAST_S) / max(item.expected - item.submitted, LEAST_S))
    if len(ratios) < FEWEST:
        return None
    low, _, high = quantiles(ratios, method="inclusive")
    return (
        f"your last {len(ratios)} jobs here waited {median(ratios):.2g} times as long as Slurm had said "
        f"(half of them {low:.2g} to {high:.2g} times)"
    )
