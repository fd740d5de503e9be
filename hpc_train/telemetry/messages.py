"""Tells a webhook (Slack, Mattermost, or any that takes JSON) when a run fails, is requeued, finishes or is slow.

An agent sends a message for each such event that it writes itself, so that every event is told once. A thread of its
own makes the POST requests: a webhook that hangs or refuses delays nothing but the end of the agent, by a few seconds.
What could not be sent is an event; a command that waits for the run, e.g. on a login node, sends it then.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from hpc_train.config.schema import Config
from hpc_train.config.services import webhook
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.files import NewLines, read_or
from hpc_train.schedulers.slurm.client import own_job
from hpc_train.telemetry.sinks.identity import name_of
from hpc_train.units import format_duration

SEND_S = 5.0
CLOSE_S = 8.0
LOOK_S = 30.0  # between two looks at the rate
KINDS = {  # event of an agent -> what it is about
    "failed": "failed",
    "stopped_retrying": "failed",
    "requeued": "requeued",
    "requeued_by_slurm": "requeued",
    "finished": "finished",
    "gpu_idle": "idle",
}
VERBS = {"failed": "has", "finished": "has"}
SLOW = 0.5  # of the rate so far
RECENT = 3  # lines of metrics that must be slow
NOT_SENT = "message_not_sent"
LONGEST = 1500  # characters of an error; Slack cuts a text after 4,000

Event = dict[str, Any]
Post = Callable[[str, Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class Message:
    """Holds what a webhook is told; ``kind`` is one of ``config.services.KINDS``."""

    kind: str
    run: str
    text: str

    def body(self, url: str) -> dict[str, Any]:
        """Returns the JSON that ``url`` expects: only a text for Slack and Mattermost, else all fields."""
        address = urlsplit(url)
        chat = (address.hostname or "").endswith("slack.com") or "/hooks/" in address.path
        return {"text": self.text} if chat else {"kind": self.kind, "run": self.run, "text": self.text}


def post(url: str, body: Mapping[str, Any]) -> str | None:
    """Sends ``body`` as JSON; returns why it was not accepted, without the URL, which is a secret."""
    from urllib.error import HTTPError, URLError  # few runs have a webhook, and these imports delay every command
    from urllib.request import Request, urlopen

    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST")
    try:
        urlopen(request, timeout=SEND_S).close()
    except HTTPError as error:
        return f"the webhook answered {error.code} {error.reason}"
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        return f"the webhook cannot be reached: {reason}"
    return None


@dataclass
class Messenger:
    """Sends messages of one run from an agent.

    Args:
        looks: whether this agent looks at the rate, which only that of node 0 does.
    """

    run: RunDirectory
    kinds: frozenset[str]
    url: str
    looks: bool
    send: Post = post
    _events: EventLog | None = None
    _queue: queue.Queue[Event | None] = field(default_factory=queue.Queue)
    _rate: Rate = field(default_factory=lambda: Rate(-1))

    def attach(self, events: EventLog) -> EventLog:
        """Starts the thread; returns a log whose events are told."""
        self._events = events
        self._thread = threading.Thread(target=self._work, name="messages", daemon=True)
        self._thread.start()
        return events.heard_by(self._hear)

    def close(self) -> None:
        """Waits some seconds until everything is sent."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _hear(self, event: Event) -> None:
        if KINDS.get(event["event"]) in self.kinds:
            self._queue.put(event)

    def _work(self) -> None:
        while True:
            try:
                event = self._queue.get(timeout=LOOK_S)
            except queue.Empty:
                message = read_or(self._slow, None) if self.looks and "slow" in self.kinds else None
            else:
                if event is None:
                    return
                message = _message(self.run, KINDS[event["event"]], event)
            if message is not None:
                self._send(message)

    def _send(self, message: Message) -> None:
        problem = self.send(self.url, message.body(self.url))
        if problem is not None and self._events is not None:
            log = self._events.of(max(0, read_or(self.run.newest_attempt, 0)))
            log.write(NOT_SENT, kind=message.kind, text=message.text, problem=problem)

    def _slow(self) -> Message | None:
        """Returns a message, once per attempt, if the rate has fallen below half of what it was."""
        attempt = self.run.newest_attempt()
        if attempt != self._rate.attempt:
            self._rate = Rate(attempt, self.run.follow(self.run.metrics_file(attempt)))
        fallen = self._rate.fallen()
        if fallen is None:
            return None
        text = f"{name_of(self.run)} has become slow: {fallen}\npython -m hpc_train why {self.run.path}"
        return Message("slow", str(self.run.path), text)


@dataclass
class Rate:
    """Follows the samples per second of one attempt."""

    attempt: int
    lines: NewLines | None = None
    _rates: list[float] = field(default_factory=list)
    _told: bool = False

    def fallen(self) -> str | None:
        """Returns how far the rate has fallen, once, when it has fallen below half of its median."""
        new = [] if self.lines is None else [*self.lines.read()]
        self._rates += [line["samples_per_s"] for line in new if line.get("samples_per_s")]
        before, now = self._rates[1:-RECENT], self._rates[-RECENT:]  # the first line includes the start
        if self._told or len(before) < RECENT or max(now) > SLOW * median(before):
            return None
        self._told = True
        return f"{median(now):,.4g} samples/s, {median(before):,.4g} before"


class Relay:
    """Sends what the agents of runs could not, from a command that waits for them where there is a route out.

    Args:
        runs: each with its config.
    """

    def __init__(self, runs: Sequence[tuple[RunDirectory, Config]], send: Post = post) -> None:
        found = [(run, read_or(partial(webhook, config.telemetry.messages), None)) for run, config in runs]
        self._runs = [(run, url) for run, url in found if url is not None]
        self._since, self._next, self._send = time.time(), 0.0, send
        self._sent: set[tuple[Path, float]] = set()

    def look(self, now: bool = False) -> None:
        """Looks for messages twice a minute, or ``now``."""
        if not self._runs or (not now and time.monotonic() < self._next):
            return
        self._next = time.monotonic() + LOOK_S
        for run, url in self._runs:
            nothing: list[Event] = []
            for event in read_or(run.read_events, nothing):
                told = run.path, event["time"]
                if event["event"] == NOT_SENT and event["time"] > self._since and told not in self._sent:
                    self._sent.add(told)
                    self._send(url, Message(event["kind"], str(run.path), event["text"]).body(url))


def _message(run: RunDirectory, kind: str, event: Event) -> Message:
    nothing: dict[str, Any] = {}
    record = read_or(run.record, nothing)
    result = record.get("result") or {}
    newest = run.newest_metrics(event["attempt"])
    step = result.get("steps") if kind == "finished" else newest.get("step")
    of_total = f" of {record['total_steps']}" if "total_steps" in record and kind != "finished" else ""
    after = f" after step {step}{of_total}" if step else ""
    job = f" (job {own_job()})" if "SLURM_JOB_ID" in os.environ else ""
    lines = [f"{name_of(run)} {VERBS.get(kind, 'is')} {kind}{after}{job}"]
    if kind == "finished":
        lines.append(_results(result))
    else:
        lines.append(str(event.get("message") or event.get("reason") or "")[:LONGEST])
        lines.append(f"python -m hpc_train why {run.path}")
    return Message(kind, str(run.path), "\n".join(filter(None, lines)))


def _results(result: Mapping[str, Any]) -> str:
    shown = [key for key in result if key == "loss" or key.startswith("val_")]
    numbers = [f"{key} {result[key]:.4g}" for key in shown if isinstance(result[key], int | float)]
    if "seconds" in result:
        numbers.append(f"the last attempt took {format_duration(result['seconds'])}")
    return ", ".join(numbers)
