"""The faults of a run and what was decided about them, in the order of time."""

from __future__ import annotations

from hpc_train.report.page.facts import Event, RunFacts
from hpc_train.report.page.markup import Html, block, section, table
from hpc_train.report.page.verdict import clock
from hpc_train.run.attempts import CLOSING
from hpc_train.runs.diagnosis import FAILURES, STEPS
from hpc_train.units import counted

MARKS = ("started", "straggler", "warning", "step_skipped", "ended_early", "stream_ended", *CLOSING)
SHOWN = 200  # the newest ones
DETAILS = ("class", "reason", "message", "layout")


def decisions(facts: RunFacts) -> Html:
    """Returns the section with the events."""
    title = "Faults and decisions"
    told = [event for event in facts.events if event["event"] in (*FAILURES, *STEPS, *MARKS)]
    if not told:
        return section(title, block("paragraph", "No event was recorded."))
    quiet = not any(event["event"] in (*FAILURES, *STEPS) and event["event"] != "resumed" for event in told)
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
    where = f"rank {event['rank']} on {event['node']}" if event.get("rank") is not None else str(event["node"])
    step = "" if event.get("step") is None else f"{event['step']:,}"
    details = dict.fromkeys(str(event[key]).partition("\n")[0] for key in DETAILS if event.get(key))
    message = str(event.get("message", "")).partition("\n")[0]
    shown = [part for part in details if part != message or part not in known]
    known.add(message)
    return [clock(event["time"]), str(event["attempt"]), event["event"], where, step, ", ".join(shown)]
