"""Computes the ledger of a run: how its time was spent, over all of its jobs and attempts.

It is derived from the events, the metrics and the submissions in the run directory, so nothing can be lost with a
process.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import Event
from hpc_train.run.exits import Failure
from hpc_train.run.rows import Line, seconds


class Interval(NamedTuple):
    """Holds the time between two lines of metrics: steps after ``first`` up to ``last``, and pauses."""

    time: float
    first: int
    last: int
    steps_s: float
    evaluation_s: float
    checkpoint_s: float
    verification_s: float

    @classmethod
    def until(cls, line: Line | Event, first: int) -> Interval:
        last = line.step or 0
        steps_s = max(0, last - first) * (line.step_s or 0.0)  # including the verification
        verification_s = min(steps_s, line.verify_s or 0.0)
        return cls(
            line.time, first, last, steps_s - verification_s, line.eval_s or 0.0, line.save_s or 0.0, verification_s
        )

    @property
    def began(self) -> float:
        return self.time - self.steps_s - self.evaluation_s - self.checkpoint_s - self.verification_s

    def without(self, seconds: float) -> Interval:
        """Returns the interval without ``seconds`` in which nothing executed, taken from the longest part."""
        parts = {name: getattr(self, name) for name in ("steps_s", "evaluation_s", "checkpoint_s")}
        longest = max(parts, key=lambda name: parts[name])
        return self._replace(**{longest: max(0.0, parts[longest] - seconds)})

    def useful_share(self, limit: float) -> float:
        """Returns the share of its steps that is useful if all work up to the step ``limit`` is useful."""
        steps = self.last - self.first
        if not steps:
            return 1.0
        return min(1.0, max(0.0, (limit - self.first) / steps))


@dataclass(frozen=True)
class Stretch:
    """Holds consecutive steps from the ``step`` of a checkpoint, loaded at ``time``, until the next load."""

    step: int
    time: float
    intervals: list[Interval] = field(default_factory=list)


@dataclass(frozen=True)
class Attempt:
    """Holds the events and intervals of one attempt, in order of time."""

    number: int
    events: Sequence[Event]
    stretches: Sequence[Stretch]
    frozen: Mapping[str, float]

    @classmethod
    def of(cls, number: int, events: Iterable[Event], lines: Iterable[Line], frozen: Mapping[str, float]) -> Attempt:
        in_order = sorted(events, key=attrgetter("time"))
        closing = [event for event in in_order if event.kind.ends == "training" and event.save_s is not None]
        beginnings = [event for event in in_order if event.kind.continues_from]
        stretches: list[Stretch] = []
        step = 0
        points: list[Line | Event] = sorted([*lines, *beginnings, *closing], key=attrgetter("time"))
        for point in points:
            if isinstance(point, Event) and point.kind.continues_from:
                step = point.continues_from
                stretches.append(Stretch(step, point.time))
                continue
            if not stretches:
                stretches.append(Stretch(step, point.time))
            interval = Interval.until(point, step)
            stretches[-1].intervals.append(interval)
            step = interval.last
        return cls(number, in_order, stretches, frozen)

    @cached_property
    def start(self) -> Event:
        """Returns the ``started`` event; an empty one if it is missing."""
        return next((event for event in self.events if event.name == "started"), Event())

    @property
    def launch(self) -> str:
        return self.start.launch or str(self.number)

    @property
    def began(self) -> float:
        """Returns the time when the agent's process was started."""
        return self.start.began or self.start.time

    @property
    def last_interval(self) -> Interval | None:
        if not self.stretches or not self.stretches[-1].intervals:
            return None
        return self.stretches[-1].intervals[-1]

    @cached_property
    def last_sign(self) -> float:
        intervals = [interval.time for stretch in self.stretches for interval in stretch.intervals]
        return max([event.time for event in self.events if not event.kind.is_late] + intervals)

    @cached_property
    def released(self) -> float:
        """Returns the last known time at which its job, of which it is the last attempt, held its nodes."""
        parts = self.launch.split(".")  # job, step and restart
        return max(self.last_sign, self.frozen.get(f"{parts[0]}.{parts[-1]}", 0.0))

    @cached_property
    def stops(self) -> list[tuple[str, float, float]]:
        """Returns the account, beginning and end of each time in which the job did not execute."""
        return [
            (event.kind.account, event.until - event.seconds, event.until)
            for event in self.events
            if event.kind.account
        ]

    @cached_property
    def failed_at(self) -> float | None:
        """Returns the time when its failure was noticed; None if it is running or ended normally."""
        last = self.last_interval
        failures = (event.time for event in self.events if event.kind.is_failure)
        return min((time for time in failures if last is None or time >= last.time), default=None)

    @cached_property
    def corruption(self) -> Event | None:
        """Returns the event about the wrong numbers (``train.verify``) that ended it; None if nothing or another
        failure did."""
        ends = [event.failure for event in self.events if event.kind.is_failure]
        found = [event for event in self.events if event.name == "corruption"]
        return found[-1] if found and {*ends} & {Failure.CORRUPTION, Failure.UNFIT_NODE} else None

    @property
    def closed(self) -> bool:
        """Returns whether training reached its end or a requested stop with its state saved."""
        ends = [event for event in self.events if event.kind.ends and not event.kind.is_failure]
        return any(event.save_s is not None for event in ends) or (bool(ends) and self.failed_at is None)

    @property
    def ended(self) -> float:
        return self.last_sign if self.failed_at is None else self.failed_at


def attempts_of(events: Iterable[Event], metrics: Iterable[Line], frozen: Mapping[str, float]) -> list[Attempt]:
    """Returns the attempts in their order, without those that never started and without damaged lines.

    Args:
        metrics: lines of all attempts, including those of repeated steps.
        frozen: until when a frozen node held a job after its last attempt, by job and restart.
    """
    by_attempt: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_attempt[event.attempt].append(event)
    lines: defaultdict[int, list[Line]] = defaultdict(list)
    for line in metrics:
        if "attempt" in line and "time" in line:
            lines[line.attempt].append(line)
    attempts = [Attempt.of(number, by_attempt[number], lines[number], frozen) for number in sorted(by_attempt)]
    return [attempt for attempt in attempts if attempt.start]


@dataclass(frozen=True)
class Account:
    """Holds the seconds of one attempt, or of several attempts together.

    Attributes:
        queue_s: the time from a submission or requeue until an agent started; no device is held.
        start_up_s: the time from the agent's start to the first step, at each start of a job.
        steps_s: the time in steps whose result was kept.
        evaluation_s: the time in evaluations whose result was kept.
        checkpoint_s: the time for which saves blocked training.
        verification_s: the time in which ``train.verify`` repeated passes.
        lost_s: the time in steps that were or will be repeated, and the time until their failure was noticed, unless it
            counts as ``corrupted_s``.
        corrupted_s: the same time of attempts that ended because of wrong numbers (``train.verify``).
        restart_s: the time from a failure to the first step of the next attempt in the same start of a job.
        frozen_s: the time in which the batch host did not execute, or a frozen node held the job after its last
            attempt.
        other_s: the remaining time, mostly shutdown.
        suspended_s: the time in which Slurm had suspended the job and may have given its devices to other jobs.
        gpu_s: the time above, except ``queue_s`` and ``suspended_s``, times the GPUs that were held, and the time for
            which joiners held nodes that did not belong to the run yet; 0 without GPUs.
        rank_s: the same time, times the number of ranks, for runs without GPUs.
        corrupted_steps: the number of steps that were repeated because of wrong numbers.
    """

    queue_s: float = 0.0
    start_up_s: float = 0.0
    steps_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    verification_s: float = 0.0
    lost_s: float = 0.0
    corrupted_s: float = 0.0
    restart_s: float = 0.0
    frozen_s: float = 0.0
    other_s: float = 0.0
    suspended_s: float = 0.0
    gpu_s: float = 0.0
    rank_s: float = 0.0
    corrupted_steps: float = 0.0

    def __add__(self, other: Account) -> Account:
        return Account(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Account)))

    @property
    def held_s(self) -> float:
        """Returns the seconds with a usable allocation: all except ``queue_s`` and ``suspended_s``."""
        parts = (self.start_up_s, self.steps_s, self.evaluation_s, self.checkpoint_s, self.verification_s)
        return sum(parts) + self.lost_s + self.corrupted_s + self.restart_s + self.frozen_s + self.other_s

    @property
    def useful_share(self) -> float:
        """Returns the share of the allocated time spent in steps and evaluations that were kept (goodput), 0 to 1."""
        return (self.steps_s + self.evaluation_s) / self.held_s if self.held_s > 0 else 0.0

    @property
    def gpu_hours(self) -> float:
        return self.gpu_s / 3600

    def as_json(self) -> dict[str, float]:
        """Returns all values, rounded to milliseconds."""
        parts = {part.name: round(getattr(self, part.name), 3) for part in fields(self)}
        return parts | {"held_s": round(self.held_s, 3), "useful_share": round(self.useful_share, 4)}


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
    events = run.read_events()
    if closing is not None:
        events.append(closing)
    submitted = [entry["time"] for entry in run.record().get("submissions", []) if "time" in entry]
    return account_for(attempts_of(events, run.read_all_metrics(), read_frozen(run)), submitted, now)


def read_frozen(run: RunDirectory) -> dict[str, float]:
    """Returns the times at which batch scripts gave up waiting for a frozen node, by job and restart: 12.0."""
    times: dict[str, float] = {}
    for path in run.attempts.glob("end-*.frozen"):
        with suppress(OSError, ValueError):  # it is being written
            time = float(run.read(path))
            if seconds(time):
                times[path.stem.removeprefix("end-")] = time
    return times


def account_for(attempts: Sequence[Attempt], submitted: Sequence[float], now: float | None = None) -> Ledger:
    """Accounts for each of ``attempts``.

    Args:
        submitted: the times of the submissions.
        now: seconds since 1970 if the run is live; otherwise None, in which case an attempt without a recorded end has
            died.
    """
    if not attempts:
        return Ledger((), _waiting(attempts, submitted, now))
    alive = None if attempts[-1].closed else now
    limit = math.inf  # the step up to which work is kept: the last step, or the step of the newest checkpoint
    if not attempts[-1].closed and (now is None or attempts[-1].failed_at is not None):
        limit = newest_checkpoint_step(event for attempt in attempts for event in attempt.events)
    accounts: list[tuple[str, Account]] = []
    after: Attempt | None = None
    for attempt, before in zip(reversed(attempts), [*attempts[-2::-1], None], strict=True):
        ends_launch = after is None or after.launch != attempt.launch
        accounting = _Accounting(attempt, before, ends_launch, alive if after is None else None, submitted)
        account, limit = accounting.account(limit)
        accounts.append((attempt.launch, account))
        after = attempt
    return Ledger(tuple(reversed(accounts)), _waiting(attempts, submitted, now))


def newest_checkpoint_step(events: Iterable[Event]) -> int:
    """Returns the step of the newest checkpoint; 0 if there is none."""
    saved = (event for event in events if event.name == "checkpoint_saved")
    return max(saved, key=lambda event: (event.attempt, event.time), default=Event()).step or 0


def _waiting(attempts: Sequence[Attempt], submitted: Sequence[float], now: float | None) -> Account:
    """Returns the account of a job that was submitted or requeued and has not started yet."""
    last = attempts[-1].last_sign if attempts else 0.0
    since = max((time for time in submitted if time > last), default=None)
    if since is None and attempts and any(event.name == "requeued" for event in attempts[-1].events):
        since = attempts[-1].released
    if now is None or since is None:
        return Account()
    return Account(queue_s=max(0.0, now - since))


@dataclass
class _Accounting:
    """Computes the account of one attempt. ``now`` is None if the attempt is over."""

    attempt: Attempt
    before: Attempt | None
    ends_launch: bool
    now: float | None
    submitted: Sequence[float]
    spent: dict[str, float] = field(default_factory=lambda: {part.name: 0.0 for part in fields(Account)})

    def account(self, limit: float) -> tuple[Account, float]:
        """Returns the account, and the step up to which the work of earlier attempts is kept.

        Args:
            limit: the step up to which the work of this attempt is kept.
        """
        attempt = self.attempt
        if self.before is not None and self.before.launch == attempt.launch:
            self._add("restart_s", self._executed(self.before.ended, self._first_step_at()))
        else:
            self._add("queue_s", self._waited(attempt.began))
            self._add("start_up_s", self._executed(attempt.began, self._first_step_at()))
        if attempt.corruption is not None:
            self._add("corrupted_steps", (attempt.corruption.step or 0) - limit)
        self._account_tail(limit)
        for stretch in reversed(attempt.stretches):
            for interval in stretch.intervals:
                self._enter(interval, limit)
            limit = min(limit, stretch.step)
        if self.ends_launch and self.now is None:
            self._add("other_s", attempt.last_sign - attempt.ended)
            self._add("frozen_s", attempt.released - attempt.last_sign)
        held = Account(**self.spent).held_s
        waited = [event for event in attempt.events if event.name in ("joined", "left")]
        if attempt.start.gpus:
            self._add("gpu_s", held * attempt.start.gpus + sum(event.seconds * event["gpus"] for event in waited))
        else:
            ranks = attempt.start.world_size / max(1, len(attempt.start.get("nodes", [])))  # of a node
            self._add("rank_s", held * attempt.start.world_size + sum(event.seconds * ranks for event in waited))
        return Account(**self.spent), limit

    @property
    def _lost(self) -> str:
        """Returns the account of its work that is repeated."""
        return "lost_s" if self.attempt.corruption is None else "corrupted_s"

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
        job = self.attempt.start.job_id
        if self.before is None or job is None or self.before.start.job_id != job:
            return 0.0
        return begin - self.before.released

    def _first_step_at(self) -> float:
        for stretch in self.attempt.stretches:
            return stretch.intervals[0].began if stretch.intervals else stretch.time
        if self.now is None or self.attempt.failed_at is not None:
            return self.attempt.ended
        return self.now

    def _enter(self, interval: Interval, limit: float) -> None:
        share = interval.useful_share(limit)
        if self.attempt.stops:
            interval = interval.without(interval.time - interval.began - self._executed(interval.began, interval.time))
        self._add("steps_s", share * interval.steps_s)
        self._add(self._lost, (1 - share) * interval.steps_s)
        self._add("evaluation_s" if interval.last <= limit else self._lost, interval.evaluation_s)
        self._add("verification_s", interval.verification_s)
        self._add("checkpoint_s", interval.checkpoint_s)

    def _account_tail(self, limit: float) -> None:
        """Accounts for the time after the last metrics line.

        In a failed attempt, steps up to the newest checkpoint count at the pace of the last line; the rest is lost.
        """
        attempt = self.attempt
        if not attempt.stretches or (self.now is not None and attempt.failed_at is None):
            return
        line = attempt.last_interval
        last = attempt.stretches[-1].time if line is None else line.time
        rest = self._executed(last, attempt.ended)
        if attempt.closed:
            self._add("other_s", rest)
            return
        useful = 0.0
        if line is not None and line.last > line.first:
            pace = line.steps_s / (line.last - line.first)
            useful = min(rest, max(0.0, min(newest_checkpoint_step(attempt.events), limit) - line.last) * pace)
        self._add("steps_s", useful)
        self._add(self._lost, rest - useful)
