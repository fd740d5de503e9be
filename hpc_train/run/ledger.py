"""Computes the ledger of a run: how its time was spent, over all of its jobs and attempts.

It is derived from events and metrics (see ``attempts.py``) and the submissions in the run directory, so nothing can be
lost with a process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import add
from types import MappingProxyType

from hpc_train.run.attempts import Attempt, Interval, attempts_of
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import Event
from hpc_train.run.rows import Line, seconds


@dataclass(frozen=True)
class Account:
    """Seconds of one attempt, or summed over several.

    Attributes:
        queue_s: from a submission or requeue until an agent started; no device is held.
        start_up_s: from the agent's start to the first step, at each start of a job.
        steps_s: in steps whose result was kept.
        evaluation_s: in evaluations whose result was kept.
        checkpoint_s: during which saves blocked training.
        lost_s: in steps that were or will be repeated, and until their failure was noticed.
        restart_s: from a failure to the first step of the next attempt in the same start of a job.
        frozen_s: in which the batch host did not execute, or a frozen node held the job after its last attempt.
        other_s: the remainder, mostly shutdown.
        suspended_s: in which Slurm had suspended the job and may have given its devices to other jobs.
        gpu_s: the seconds above except the queue and the suspended ones, times the GPUs that were held; 0 without GPUs.
        rank_s: the same times the number of ranks, for runs without GPUs.
    """

    queue_s: float = 0.0
    start_up_s: float = 0.0
    steps_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    lost_s: float = 0.0
    restart_s: float = 0.0
    frozen_s: float = 0.0
    other_s: float = 0.0
    suspended_s: float = 0.0
    gpu_s: float = 0.0
    rank_s: float = 0.0

    def __add__(self, other: Account) -> Account:
        return Account(*(add(getattr(self, one.name), getattr(other, one.name)) for one in fields(Account)))

    @property
    def held_s(self) -> float:
        """Seconds with an allocation that could be used: all but the queue and the suspended ones."""
        parts = (self.start_up_s, self.steps_s, self.evaluation_s, self.checkpoint_s, self.frozen_s)
        return sum(parts) + self.lost_s + self.restart_s + self.other_s

    @property
    def useful_share(self) -> float:
        """The share of the held time spent in steps and evaluations that were kept (goodput), 0 to 1."""
        return (self.steps_s + self.evaluation_s) / self.held_s if self.held_s > 0 else 0.0

    @property
    def gpu_hours(self) -> float:
        return self.gpu_s / 3600

    def as_json(self) -> dict[str, float]:
        """Returns all values, rounded to milliseconds."""
        own = {one.name: round(getattr(self, one.name), 3) for one in fields(self)}
        return own | {"held_s": round(self.held_s, 3), "useful_share": round(self.useful_share, 4)}


@dataclass(frozen=True)
class Ledger:
    """Holds the time of a run by attempt.

    Attributes:
        attempts: (launch of the attempt, its account), in order.
        waiting: the account of a job that is queued now.
    """

    attempts: tuple[tuple[str, Account], ...]
    waiting: Account = Account()

    @property
    def jobs(self) -> tuple[Account, ...]:
        """Returns one account per start of a job: a requeue begins a new one, a restart in place does not."""
        grouped = groupby(self.attempts, key=lambda pair: pair[0])
        return tuple(sum((account for _, account in group), Account()) for _, group in grouped)

    @property
    def total(self) -> Account:
        return sum((account for _, account in self.attempts), self.waiting)


def read_ledger(run: RunDirectory, now: float | None = None, closing: Event | None = None) -> Ledger:
    """Returns the ledger of ``run`` from its directory.

    Args:
        now: seconds since 1970 if the run is live, otherwise None.
        closing: an event that is about to be written.
    """
    events = [*run.read_events(), *([closing] if closing else [])]
    submitted = [entry["time"] for entry in run.record().get("submissions", []) if "time" in entry]
    return ledger(events, run.read_all_metrics(), submitted, now, read_frozen(run))


def read_frozen(run: RunDirectory) -> dict[str, float]:
    """Returns the times at which batch scripts gave up waiting for a frozen node, by job and restart: 12.0."""
    found: dict[str, float] = {}
    for path in run.attempts.glob("end-*.frozen"):
        with suppress(OSError, ValueError):  # it is being written
            found[path.stem.removeprefix("end-")] = _time_in(run.read(path))
    return found


def _time_in(data: bytes) -> float:
    found = float(data)
    if not seconds(found):
        raise ValueError(f"{found} is not a time")
    return found


def ledger(
    events: Iterable[Event],
    metrics: Iterable[Line],
    submitted: Sequence[float],
    now: float | None = None,
    frozen: Mapping[str, float] = MappingProxyType({}),
) -> Ledger:
    """Accounts for each attempt.

    Args:
        metrics: lines of all attempts, including those of repeated steps.
        submitted: the times of the submissions.
        now: seconds since 1970 if the run is live; None otherwise, and then an attempt without a recorded end has died.
        frozen: until when a frozen node held a job after its last attempt, by job and restart.
    """
    return account_for(attempts_of(events, metrics, frozen), submitted, now)


def account_for(attempts: Sequence[Attempt], submitted: Sequence[float], now: float | None = None) -> Ledger:
    """Accounts for ``attempts`` as ``ledger`` does."""
    alive = None if attempts and attempts[-1].closed else now
    kept, accounts = _kept_at_end(attempts, now), []
    for index in reversed(range(len(attempts))):
        attempt = attempts[index]
        before = attempts[index - 1] if index else None
        last = index + 1 == len(attempts)
        ends_launch = last or attempts[index + 1].launch != attempt.launch
        accounting = _Accounting(attempt, before, ends_launch, alive if last else None, submitted)
        account, kept = accounting.account(kept)
        accounts.append((attempt.launch, account))
    return Ledger(tuple(reversed(accounts)), _waiting(attempts, submitted, now))


def _kept_at_end(attempts: Sequence[Attempt], now: float | None) -> float:
    """Returns the step up to which work is kept: infinity for all of it, or the step of the newest checkpoint."""
    if not attempts or attempts[-1].closed or (now is not None and attempts[-1].failed_at is None):
        return math.inf
    return _newest_checkpoint_step(event for attempt in attempts for event in attempt.events)


def _newest_checkpoint_step(events: Iterable[Event]) -> int:
    """Returns the step of the newest checkpoint; 0 if there is none."""
    saved = [event for event in events if event.name == "checkpoint_saved"]
    return max(saved, key=lambda event: (event.attempt, event.time))["step"] if saved else 0


def _waiting(attempts: Sequence[Attempt], submitted: Sequence[float], now: float | None) -> Account:
    """Returns the account of a job that was submitted or requeued and has not started yet."""
    last = attempts[-1].last_sign if attempts else 0.0
    since = max((time for time in submitted if time > last), default=None)
    if since is None and attempts and any(event.name == "requeued" for event in attempts[-1].events):
        since = attempts[-1].released
    return Account() if now is None or since is None else Account(queue_s=max(0.0, now - since))


@dataclass
class _Accounting:
    """Computes the account of one attempt. ``now`` is None if the attempt is over."""

    attempt: Attempt
    before: Attempt | None
    ends_launch: bool
    now: float | None
    submitted: Sequence[float]
    spent: dict[str, float] = field(default_factory=lambda: {one.name: 0.0 for one in fields(Account)})

    def account(self, kept: float) -> tuple[Account, float]:
        """Returns the account, and the step up to which earlier attempts keep their work.

        Args:
            kept: the step up to which later attempts keep the work.
        """
        attempt, before = self.attempt, self.before
        restarted = before is not None and before.launch == attempt.launch
        begin = before.ended if restarted and before else attempt.began
        if not restarted:
            self._add("queue_s", self._waited(begin))
        self._add("restart_s" if restarted else "start_up_s", self._executed(begin, self._first_step_at()))
        self._account_tail(kept)
        for stretch in reversed(attempt.stretches):
            for interval in stretch.intervals:
                self._enter(interval, kept)
            kept = min(kept, stretch.step)
        if self.ends_launch and self.now is None:
            self._add("other_s", attempt.last_sign - attempt.ended)
            self._add("frozen_s", attempt.released - attempt.last_sign)
        held, gpus = Account(**self.spent).held_s, attempt.start_value("gpus", 0)
        self._add("gpu_s" if gpus else "rank_s", held * (gpus or attempt.start_value("world_size", 0)))
        return Account(**self.spent), kept

    def _add(self, name: str, seconds: float) -> None:
        if seconds > 0:  # the clocks of two nodes may differ
            self.spent[name] += seconds

    def _executed(self, begin: float, end: float) -> float:
        """Returns the seconds of a span in which the job executed; adds the others to their accounts."""
        seconds = end - begin
        for name, since, until in self.attempt.stops:
            stopped = max(0.0, min(end, until) - max(begin, since))
            self._add(name, stopped)
            seconds -= stopped
        return seconds

    def _waited(self, begin: float) -> float:
        """Returns the queue time since the newest submission, or after a requeue since the job's previous start."""
        end = self.before.last_sign if self.before else 0.0
        submission = max((time for time in self.submitted if end < time <= begin), default=None)
        if submission is not None:
            return begin - submission
        job = self.attempt.start_value("job_id")
        if self.before is None or job is None or self.before.start_value("job_id") != job:
            return 0.0
        return begin - self.before.released

    def _first_step_at(self) -> float:
        stretches = self.attempt.stretches
        if stretches:
            return stretches[0].intervals[0].began if stretches[0].intervals else stretches[0].time
        failed = self.now is None or self.attempt.failed_at is not None
        return self.attempt.ended if failed or self.now is None else self.now

    def _enter(self, interval: Interval, kept: float) -> None:
        share = interval.kept_share(kept)
        evaluation_kept = interval.last <= kept
        if self.attempt.stops:
            interval = interval.without(interval.time - interval.began - self._executed(interval.began, interval.time))
        self._add("steps_s", share * interval.steps_s)
        self._add("evaluation_s", interval.evaluation_s if evaluation_kept else 0.0)
        self._add("lost_s", (1 - share) * interval.steps_s + (0.0 if evaluation_kept else interval.evaluation_s))
        self._add("checkpoint_s", interval.checkpoint_s)

    def _account_tail(self, kept: float) -> None:
        """Accounts for the time after the last metrics line.

        In a failed attempt, steps up to the newest checkpoint count at the pace of the last line; the rest is lost.
        """
        attempt, line = self.attempt, self.attempt.last_interval
        if not attempt.stretches or (self.now is not None and attempt.failed_at is None):
            return
        rest = self._executed(line.time if line else attempt.stretches[-1].time, attempt.ended)
        if attempt.closed:
            self._add("other_s", rest)
            return
        useful = 0.0
        if line is not None and line.last > line.first:
            pace = line.steps_s / (line.last - line.first)
            useful = min(rest, max(0.0, min(_newest_checkpoint_step(attempt.events), kept) - line.last) * pace)
        self._add("steps_s", useful)
        self._add("lost_s", rest - useful)
