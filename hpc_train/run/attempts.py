"""Orders the attempts of a run in time: its events and lines of metrics, ordered, as the ledger accounts for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

Event = dict[str, Any]

FAILURES = ("worker_failed", "hang_detected", "node_lost", "failed")
# rank 0 writes these, with the keys of a metrics line for the steps since the last line
CLOSING = ("training_finished", "training_stopped")
WITH_STEP = (None, "checkpoint_saved", *CLOSING)  # None is a line of metrics
NUMBER = (int, float)
ENDS = (*CLOSING, "finished", "stopped")  # the last two are the agent's
STOPS = {"suspended": "suspended_s", "paused": "frozen_s"}  # the account of the seconds of each event
# written by an agent that was frozen, when it wakes up; Slurm may have requeued its job meanwhile
ECHOES = ("stop_requested", *STOPS)
BEGINNINGS = {"resumed": "step", "rolled_back": "to_step"}  # the key with the step that training continues from


class Interval(NamedTuple):
    """Holds the time between two lines of metrics: steps after ``first`` up to ``last``, and pauses."""

    time: float
    first: int
    last: int
    steps_s: float
    evaluation_s: float
    checkpoint_s: float

    @classmethod
    def until(cls, line: Event, first: int) -> Interval:
        last = line["step"]
        steps_s = (last - first) * (line.get("step_s") or 0.0) if last > first else 0.0
        return cls(line["time"], first, last, steps_s, line.get("eval_s") or 0.0, line.get("save_s") or 0.0)

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
    def of(cls, number: int, events: Iterable[Event], lines: Iterable[Event], frozen: Mapping[str, float]) -> Attempt:
        own = sorted(events, key=lambda event: event["time"])
        closing = [event for event in own if event["event"] in CLOSING and "save_s" in event]
        beginnings = [event for event in own if event["event"] in BEGINNINGS]
        stretches: list[Stretch] = []
        step = 0
        for point in sorted([*lines, *beginnings, *closing], key=itemgetter("time")):
            if point.get("event") in BEGINNINGS:
                step = point[BEGINNINGS[point["event"]]]
                stretches.append(Stretch(step, point["time"]))
                continue
            if not stretches:
                stretches.append(Stretch(step, point["time"]))
            stretches[-1].intervals.append(Interval.until(point, step))
            step = point["step"]
        return cls(number, own, stretches, frozen)

    @cached_property
    def start(self) -> Event | None:
        """Returns the ``started`` event; None if it is missing."""
        return next((event for event in self.events if event["event"] == "started"), None)

    def start_value(self, key: str, default: Any = None) -> Any:
        """Returns the value of ``key`` in the ``started`` event."""
        return (self.start or {}).get(key, default)

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
        return max([event["time"] for event in self.events if event["event"] not in ECHOES] + intervals)

    @cached_property
    def released(self) -> float:
        """Returns the time at which its job, of which it is the last attempt, gave its nodes back, as far as known."""
        parts = self.launch.split(".")  # job, step and restart
        return max(self.last_sign, self.frozen.get(f"{parts[0]}.{parts[-1]}", 0.0))

    @cached_property
    def stops(self) -> list[tuple[str, float, float]]:
        """Returns the account, beginning and end of each time in which the job did not execute."""
        return [
            (STOPS[event["event"]], event["until"] - event["seconds"], event["until"])
            for event in self.events
            if event["event"] in STOPS
        ]

    @cached_property
    def failed_at(self) -> float | None:
        """Returns the time when its failure was noticed; None if it is running or ended normally."""
        after = self.last_interval.time if self.last_interval else 0.0
        times = [event["time"] for event in self.events if event["event"] in FAILURES and event["time"] >= after]
        return min(times, default=None)

    @property
    def closed(self) -> bool:
        """Returns whether training reached its end or a requested stop with its state saved."""
        closing = [event for event in self.events if event["event"] in ENDS]
        return any("save_s" in event for event in closing) or (bool(closing) and self.failed_at is None)

    @property
    def ended(self) -> float:
        return self.last_sign if self.failed_at is None else self.failed_at


def attempts_of(events: Iterable[Event], metrics: Iterable[Event], frozen: Mapping[str, float]) -> list[Attempt]:
    """Returns the attempts in their order, without those that never started and without damaged lines.

    Args:
        metrics: lines of all attempts, including those of repeated steps.
        frozen: until when a frozen node held a job after its last attempt, by job and restart.
    """
    own, lines = _by_attempt(events), _by_attempt(metrics)
    attempts = [Attempt.of(number, own[number], lines[number], frozen) for number in sorted({*own, *lines})]
    return [attempt for attempt in attempts if attempt.start is not None]


def _by_attempt(points: Iterable[Event]) -> defaultdict[int, list[Event]]:
    """Returns the whole ones of ``points`` by attempt."""
    found = defaultdict(list)
    for point in filter(_is_whole, points):
        found[point["attempt"]].append(point)
    return found


def _is_whole(point: Event) -> bool:
    """Returns whether an event or a line of metrics has the numbers that the ledger needs; a damaged one may not."""
    event = point.get("event")
    step = BEGINNINGS.get(str(event), "step" if event in WITH_STEP else "attempt")
    attempt, at = point.get("attempt"), point.get("time")
    return isinstance(attempt, NUMBER) and isinstance(at, NUMBER) and isinstance(point.get(step), NUMBER)
