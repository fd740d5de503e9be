"""What the console says of saves that fail, from the events of rank 0. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]

_KIND_OF_ERROR = re.compile(r"OSError: \[Errno \d+\] ")


@dataclass
class Saves:
    """How the saves of a run go. The first that fails is told in a line, those after it are counted.

    Attributes:
        kept: the step of the newest checkpoint; 0 before the first.
        failed: saves in a row, up to now.
    """

    kept: int = 0
    failed: int = 0

    def told(self, event: Event) -> str | None:
        """Returns the line that the console shows for ``event``; None for most kinds of event."""
        name, step = event["event"], int(event.get("step") or 0)
        if name in ("resumed", "rolled_back"):
            self.kept = int(event.get("to_step", step))
            self.failed = 0 if name == "resumed" else self.failed
        elif name == "checkpoint_saved":
            before, self.failed, self.kept = self.failed, 0, step
            if before:
                return f"saving works again: checkpoint of step {step} (failed before: {saves(before)})"
        elif name == "checkpoint_failed":
            self.failed += 1
            if self.failed == 1 and not event.get("final"):
                stake = f"{self._at_stake} would be lost"
                return f"saving fails since step {step}: {reason(event)}; training goes on, and {stake}"
        elif name == "save_waits":
            return (
                f"the last save, of step {step}, fails: {reason(event)}\n"
                f"  it is tried again for up to {event['seconds']:.0f} s: make room in {event['path']}; "
                f"else the run fails, and {self._at_stake} are lost"
            )
        return None

    @property
    def _at_stake(self) -> str:
        return f"the steps after checkpoint {self.kept}" if self.kept else "all its steps"


def saves(count: int) -> str:
    return f"{count} save{'s' if count > 1 else ''}"


def reason(event: Event) -> str:
    """Its message without the names of Python."""
    return _KIND_OF_ERROR.sub("", str(event["message"]))


def failing(events: Iterable[Event]) -> int:
    """How many saves in a row have failed up to the end of ``events``."""
    found = Saves()
    for event in events:
        found.told(event)
    return found.failed
