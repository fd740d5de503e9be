"""The faults of a run and what was decided about them, in the order of time."""

from __future__ import annotations

from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, section, table
from hpc_train.report.page.verdict import clock
from hpc_train.run.events import Event, Level
from hpc_train.units import counted

SHOWN = 200  # the newest ones
DETAILS = ("class", "reason", "message", "layout")


def decisions(facts: RunFacts) -> Html:
    """Returns the section with the events."""
    title = "Faults and decisions"
    told = [event for event in facts.events if event.kind.level >= Level.MARK]
    if not told:
        return section(title, block("paragraph", "No event was recorded."))
    quiet = not any(event.kind.level >= Level.REACTION and event.name != "resumed" for event in told)
    saves = len(facts.of_event("checkpoint_saved"))
    words = ["No fault was recorded."] if quiet else []
    if saves:
        words.append(f"{counted(saves, 'checkpoint was', 'checkpoints were')} saved.")
    if len(told) > SHOWN:
        words.append(f"{len(told) - SHOWN} earlier events are left out.")
    columns = ("time", "attempt", "event", "where", "step", "details")
    known: set[str] = set()
    rows = [_row(event, known) for event in told[-SHOWN:]]
    events = table("Events, the oldest first", columns, rows)
    return section(title, block("paragraph", " ".join(words)) if words else None, events)


def _row(event: Event, known: set[str]) -> list[str]:
    """Returns the cells of an event.

    Args:
        known: the messages of the rows above, which are not repeated; that of this event is added.
    """
    where = str(event.node) if event.rank is None else f"rank {event.rank} on {event.node}"
    step = "" if event.step is None else f"{event.step:,}"
    details = dict.fromkeys(str(event[key]).partition("\n")[0] for key in DETAILS if event.get(key))
    message = event.message.partition("\n")[0]
    shown = [part for part in details if part != message or part not in known]
    known.add(message)
    return [clock(event.time), str(event.attempt), event.name, where, step, ", ".join(shown)]
