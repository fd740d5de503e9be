"""The lines that the console shows for events of a run: saves that fail, a checkpoint that is damaged, warnings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hpc_train.run.events import Event

_KIND_OF_ERROR = re.compile(r"(OSError: )?\[Errno \d+\] ")


@dataclass
class Notices:
    """Follows the events of rank 0. Of failed saves it reports the first of a series; it counts the saves.

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
        name = event.name
        step = event.step or 0
        if name == "evaluation_started":
            self.evaluating = step
        elif name in ("resumed", "rolled_back"):
            return self._of_restore(event, step)
        elif name == "checkpoint_saved":
            return self._of_save(step)
        elif name in ("checkpoint_failed", "save_deferred"):
            return self._of_failed_save(event, step)
        return _of_other(event, step)

    def _of_restore(self, event: Event, step: int) -> str:
        self.evaluating = None
        self.kept = int(event.get("to_step", step))
        if event.name == "rolled_back":
            return f"rolled back to step {self.kept}: {event.reason}"
        self.failed = 0
        return f"resumed from the checkpoint of step {step}"

    def _of_save(self, step: int) -> str | None:
        before, self.failed, self.kept = self.failed, 0, step
        if not before:
            return None
        return f"saving works again: checkpoint of step {step} is saved after {saves(before)} failed"

    def _of_failed_save(self, event: Event, step: int) -> str | None:
        if event.name == "save_deferred":
            return (
                f"the last save, of step {step}, failed: {reason(event)}\n"
                f"  retrying for up to {event.seconds:.0f} s: free some space in {event.path}; "
                f"otherwise the run fails and loses {self._at_stake}"
            )
        self.failed += 1
        if self.failed > 1 or event.get("final"):
            return None
        return (
            f"saving has failed since step {step}: {reason(event)}; training continues, but a failure would "
            f"lose {self._at_stake}"
        )

    @property
    def _at_stake(self) -> str:
        return f"the steps after checkpoint {self.kept}" if self.kept else "all steps"


def _of_other(event: Event, step: int) -> str | None:
    if event.name == "warning":
        return f"warning: {event.message}"
    if event.name == "no_progress":
        return event.message
    if event.name == "checkpoint_set_aside" and not event.get("rolled_back"):
        return f"the checkpoint of step {step} is damaged and set aside as {event.path}: {reason(event)}"
    return None


def saves(count: int) -> str:
    return f"{count} save{'s' if count > 1 else ''}"


def reason(event: Event) -> str:
    """Returns the event's message without the name of the Python exception."""
    return _KIND_OF_ERROR.sub("", event.message)


def failing(events: Iterable[Event]) -> int:
    """Returns the number of consecutive failed saves at the end of ``events``."""
    found = Notices()
    for event in events:
        found.message(event)
    return found.failed
