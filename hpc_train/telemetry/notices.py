"""The lines that the console shows for events of a run: saves that fail, a checkpoint that is damaged, warnings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]

_KIND_OF_ERROR = re.compile(r"OSError: \[Errno \d+\] ")


@dataclass
class Notices:
    """Follows the events of rank 0. Of failed saves it reports the first of a series and counts the others.

    Attributes:
        kept: the step of the newest checkpoint; 0 before the first.
        failed: number of consecutive failed saves up to now.
        evaluating: the step of the newest evaluation that has begun.
    """

    kept: int = 0
    failed: int = 0
    evaluating: int | None = None

    def message(self, event: Event) -> str | None:
        """Returns the line that the console shows for ``event``; None for most kinds of event."""
        name = event["event"]
        step = int(event.get("step") or 0)
        if name == "evaluation_started":
            self.evaluating = step
        elif name in ("resumed", "rolled_back"):
            self.kept = int(event.get("to_step", step))
            self.failed = 0 if name == "resumed" else self.failed
            self.evaluating = None
            return _of_restore(event, self.kept)
        elif name == "checkpoint_set_aside" and not event.get("rolled_back"):
            return f"the checkpoint of step {step} is damaged and set aside as {event['path']}: {reason(event)}"
        elif name == "warning":
            return f"warning: {event['message']}"
        elif name == "checkpoint_saved":
            before = self.failed
            self.failed = 0
            self.kept = step
            if before:
                return f"saving works again: checkpoint of step {step} is saved after {saves(before)} failed"
        elif name == "checkpoint_failed":
            self.failed += 1
            if self.failed == 1 and not event.get("final"):
                return (
                    f"saving has failed since step {step}: {reason(event)}; training continues, but a failure would "
                    f"lose {self._at_stake}"
                )
        elif name == "save_deferred":
            return (
                f"the last save, of step {step}, failed: {reason(event)}\n"
                f"  retrying for up to {event['seconds']:.0f} s: free some space in {event['path']}; "
                f"otherwise the run fails and loses {self._at_stake}"
            )
        return None

    @property
    def _at_stake(self) -> str:
        return f"the steps after checkpoint {self.kept}" if self.kept else "all steps"


def _of_restore(event: Event, step: int) -> str:
    if event["event"] == "resumed":
        return f"resumed from the checkpoint of step {step}"
    return f"rolled back to step {step}: {event.get('reason', '')}"


def saves(count: int) -> str:
    return f"{count} save{'s' if count > 1 else ''}"


def reason(event: Event) -> str:
    """Returns the event's message without the name of the Python exception."""
    return _KIND_OF_ERROR.sub("", str(event["message"]))


def failing(events: Iterable[Event]) -> int:
    """Returns the number of consecutive failed saves at the end of ``events``."""
    found = Notices()
    for event in events:
        found.message(event)
    return found.failed
