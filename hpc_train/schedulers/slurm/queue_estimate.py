"""Asks Slurm when jobs would start, and tells how far off its earlier answers were.

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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from hpc_train.opening import DamagedFile, read_tail
from hpc_train.schedulers.slurm.client import QUERY_S, Problem, SlurmError, check_submission, query
from hpc_train.schedulers.slurm.records import rows, time_of
from hpc_train.users import user_cache

ESTIMATES = ".queue-estimates.jsonl"  # in the run root
FRESH_S = 300.0
NEWEST = 20  # jobs that count
FEWEST = 3
LEAST_S = 60.0  # a shorter wait counts as this one: Slurm starts jobs at intervals
SUBMITTED_WITHIN_S = 120.0  # a job with another time of submission was requeued, or its id was used again
TAIL_BYTES = 1 << 16  # of the file with estimates that are read, about 400 submissions


@dataclass(frozen=True)
class Start:
    """When a job would start, in seconds since 1970; None with the words of Slurm, which refuses it."""

    at: float | None
    refusal: str = ""


@dataclass(frozen=True)
class Estimate:
    """A job with the times, in seconds since 1970, of its submission and of the start that Slurm expected then."""

    cluster: str
    partition: str | None
    job_id: str
    submitted: float
    expected: float


def starts_of(shapes: Iterable[Sequence[str]]) -> dict[tuple[str, ...], Start]:
    """Returns the start of a job of each shape, with one ``sbatch --test-only`` for each that is not in the cache.

    Args:
        shapes: the options of sbatch that determine when a job starts.

    Raises:
        SlurmError: Slurm is missing or does not respond; it is not asked about the other shapes.
    """
    file, now = _cache_file(), time.time()
    kept = {key: entry for key, entry in _read_cache(file).items() if 0 <= now - entry["asked"] < FRESH_S}
    found: dict[tuple[str, ...], Start] = {}
    try:
        for shape in dict.fromkeys(map(tuple, shapes)):
            key = _key(shape)
            if key not in kept:
                start = _ask(shape)
                kept[key] = {"asked": now, "at": start.at, "refusal": start.refusal}
            at = kept[key]["at"]
            found[shape] = Start(None if at is None else max(at, now), kept[key]["refusal"])
    finally:
        _write_cache(file, kept)
    return found


def _ask(shape: Sequence[str]) -> Start:
    try:
        return Start(check_submission(shape, QUERY_S).starts)
    except SlurmError as error:
        if error.problem is not Problem.REFUSED or "fatal:" in error.said:  # e.g. Slurm has no configuration here
            raise
        return Start(None, error.said)


def _cache_file() -> Path:
    return user_cache() / "queue-starts.json"


def _key(shape: Sequence[str]) -> str:
    """Returns the key of a shape on the cluster that SLURM_CONF selects."""
    return hashlib.sha256(json.dumps([os.environ.get("SLURM_CONF"), *shape]).encode()).hexdigest()[:16]


def _read_cache(file: Path) -> dict[str, dict[str, Any]]:
    with suppress(OSError, ValueError, AttributeError):
        entries = json.loads(file.read_text()).items()
        return {key: entry for key, entry in entries if {"asked", "at", "refusal"} <= entry.keys()}
    return {}


def _write_cache(file: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces the file, so that another process reads one that is whole. Without room, the next plan asks again."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(entries))
        new.replace(file)


@dataclass(frozen=True)
class Accuracy:
    """How many times as long as Slurm had said the user's jobs waited: the median and the middle half."""

    jobs: int
    times: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"your last {self.jobs} jobs here waited {self.times:.2g} times as long as Slurm had said "
            f"(half of them {self.low:.2g} to {self.high:.2g} times)"
        )


def read_estimates(root: Path, cluster: str, partition: str | None) -> list[Estimate]:
    """Returns the newest submissions from ``root`` to a partition, the newest last; damaged lines are skipped."""
    try:
        lines = read_tail(root / ESTIMATES, root, TAIL_BYTES).splitlines()
    except (OSError, DamagedFile):
        return []
    found = [each for each in map(_estimate, lines) if each is not None]
    return [each for each in found if (each.cluster, each.partition) == (cluster, partition)][-NEWEST:]


def _estimate(line: str) -> Estimate | None:
    names = [field.name for field in fields(Estimate)]
    with suppress(ValueError, KeyError, TypeError):
        content = json.loads(line)
        cluster, partition, job_id, submitted, expected = (content[name] for name in names)
        return Estimate(str(cluster), partition, str(job_id), float(submitted), float(expected))
    return None


def accuracy_of(submissions: Sequence[Estimate]) -> Accuracy | None:
    """Compares the expected starts of ``submissions`` with the real ones, by one query of accounting.

    Returns:
        None if fewer than three of them have started, or accounting does not respond.
    """
    if len(submissions) < FEWEST:
        return None
    ids = ",".join(each.job_id for each in submissions)
    text = query(["sacct", "-X", "--noheader", "--parsable2", f"--jobs={ids}", "--format=JobID,Submit,Start"]) or ""
    times = {row["JobID"]: row for row in rows(text, ("JobID", "Submit", "Start"))}
    found = (_ratio(each, times.get(each.job_id, {})) for each in submissions)
    ratios = [ratio for ratio in found if ratio is not None]
    if len(ratios) < FEWEST:
        return None
    low, _, high = quantiles(ratios, method="inclusive")
    return Accuracy(len(ratios), median(ratios), low, high)


def _ratio(said: Estimate, job: Mapping[str, str]) -> float | None:
    begin = time_of(job.get("Submit"))
    start = time_of(job.get("Start"))
    if begin is None or start is None or abs(begin - said.submitted) > SUBMITTED_WITHIN_S:
        return None
    return max(start - begin, LEAST_S) / max(said.expected - said.submitted, LEAST_S)
