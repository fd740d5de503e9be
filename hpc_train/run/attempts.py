"""Orders the attempts of a run in time: its events and lines of metrics, ordered, as the ledger accounts for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from hpc_train.run.events import Event
from hpc_train.run.rows import Line

NUMBER = (int, float)


class Interval(NamedTuple):
    """Holds the time between two lines of metrics: steps after ``first`` up to ``last``, and pauses."""

    time: float
    first: int
    last: int
    steps_s: float
    evaluation_s: float
    checkpoint_s: float

    @classmethod
    def until(cls, line: Line | Event, first: int) -> Interval:
        last = line["step"]
        steps_s = (last - first) * (line.step_s or 0.0) if last > first else 0.0
        return cls(line.time, first, last, steps_s, line.eval_s or 0.0, line.save_s or 0.0)

    @property
    def began(self) -> float:
        return self.time - self.steps_s - self.evaluation_s - self.checkpoint_s

    def without(self, seconds: float) -> Interval:
        """Returns the interval without a time in which nothing executed, which made one of its parts so long."""
        parts = {name: getattr(self, name) for name in ("steps_s", "evaluation_s", "checkpoint_s")}
        longest = max(parts, key=lambda name: parts[name])
        return self._replace(**{longest: max(0.0, parts[longest] - seconds)})

    def kept_share(self, kept: float) -> float:
        """Returns the share of its steps that is kept if work up to the step ``kept`` is kept."""
        steps = self.last - self.first
        return min(1.0, max(0.0, (kept - self.first) / steps)) if steps else 1.0


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
        own = sorted(events, key=attrgetter("time"))
        closing = [event for event in own if event.kind.ends == "training" and event.save_s is not None]
        beginnings = [event for event in own if event.kind.continues_from]
        stretches: list[Stretch] = []
        step = 0
        points: list[Line | Event] = sorted([*lines, *beginnings, *closing], key=attrgetter("time"))
        for point in points:
            if isinstance(point, Event) and point.kind.continues_from:
                step = point[point.kind.continues_from]
                stretches.append(Stretch(step, point.time))
                continue
            if not stretches:
                stretches.append(Stretch(step, point.time))
            stretches[-1].intervals.append(Interval.until(point, step))
            step = point["step"]
        return cls(number, own, stretches, frozen)

    @cached_property
    def start(self) -> Event | None:
        """Returns the ``started`` event; None if it is missing."""
        return next((event for event in self.events if event.name == "started"), None)

    def start_value(self, key: str, default: Any = None) -> Any:
        """Returns the value of ``key`` in the ``started`` event."""
        return default if self.start is None else self.start.get(key, default)

    @property
    def launch(self) -> str:
        return str(self.start_value("launch", self.number))

    @property
    def began(self) -> float:
        """Returns the time when the agent's process was started."""
        return float(self.start_value("began") or self.start_value("time"))

    @property
    def last_interval(self) -> Interval | None:
        return self.stretches[-1].intervals[-1] if self.stretches and self.stretches[-1].intervals else None

    @cached_property
    def last_sign(self) -> float:
        intervals = [interval.time for stretch in self.stretches for interval in stretch.intervals]
        return max([event.time for event in self.events if not event.kind.is_late] + intervals)

    @cached_property
    def released(self) -> float:
        """Returns the time at which its job, of which it is the last attempt, gave its nodes back, as far as known."""
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
        after = self.last_interval.time if self.last_interval else 0.0
        times = [event.time for event in self.events if event.kind.is_failure and event.time >= after]
        return min(times, default=None)

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
    own: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        own[event.attempt].append(event)
    lines: defaultdict[int, list[Line]] = defaultdict(list)
    for line in metrics:
        if "attempt" in line and "time" in line:
            lines[line.attempt].append(line)
    attempts = [Attempt.of(number, own[number], lines[number], frozen) for number in sorted({*own, *lines})]
    return [attempt for attempt in attempts if attempt.start is not None]
