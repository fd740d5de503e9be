"""Tells what happened to a run and what to do about it: in the command ``why``, and at the head of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_train.report.page.curves import evaluated
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, commands, joined, paragraphs, section, table
from hpc_train.run.events import Event, Level
from hpc_train.run.exits import Exit, Failure
from hpc_train.runs.cost import Prices
from hpc_train.runs.diagnosis import TAIL_LINES, Diagnosis, shown
from hpc_train.runs.job_status import TO_BE_REQUEUED
from hpc_train.telemetry.progress import final_result, spent_line
from hpc_train.telemetry.tracebacks import STACK, own_frames
from hpc_train.units import counted, format_bytes, format_duration, format_hours

Section = tuple[str, list[str]]

TODO = "what to do"  # the title of the section with the advice


def headline(found: Diagnosis) -> str:
    """Returns the run and how it stands, in one line."""
    head = f"{shown(Path(found.run))}: {found.state}"
    if found.waiting is not None or ended_badly(found) or found.state == TO_BE_REQUEUED:
        return head
    if found.ended_early is not None and found.cause is None:
        return f"{head}; ended early by a hook: {found.ended_early}"
    if found.message and found.exit_code is None:
        return f"{head}; {found.message}"
    return f"{head}; nothing failed" if found.cause is None else f"{head}; it recovered from the failure below"


def ended_badly(found: Diagnosis) -> bool:
    return found.exit_code not in (None, Exit.DONE)


def sections(found: Diagnosis) -> Iterator[Section]:
    """Yields titles with lines of text; a section without lines says nothing."""
    yield "why the job is pending", _waiting(found)
    yield "failure" if ended_badly(found) else "earlier failure", _cause(found)
    yield "Slurm", _slurm(found)
    yield "memory", _memory(found)
    yield "last checkpoint", _checkpoint(found)
    known = "" if found.cause is None else found.cause.message
    yield "recovery actions", [told(event, known) for event in found.done if not _is_refusal(event, found)]
    yield "excluded nodes", [node.words for node in found.excluded_nodes]
    yield "time", [spent_line(found.ledger)] if found.ledger.held_s or found.ledger.queue_s else []
    yield TODO, list(found.advice)


def _waiting(found: Diagnosis) -> list[str]:
    waiting = found.waiting
    if waiting is None:
        return []
    lines = [f"{waiting.words} ({waiting.reason})"]
    lines += [f"expected to start at {waiting.starts.replace('T', ' ')}"] if waiting.starts else []
    lines += [f"fix: {waiting.fix}"] if waiting.fix else []
    return lines + [f"to start sooner: {change}" for change in waiting.sooner]


def _cause(found: Diagnosis) -> list[str]:
    cause = found.cause
    if cause is None:
        return found.message.splitlines()[-TAIL_LINES:]
    head = f"{cause.kind}, {cause.who}, in attempt {cause.attempt} at {clock(cause.time)}: {cause.message}"
    lines = head.splitlines()
    if cause.kind != Failure.REFUSED:  # its traceback is the message
        traceback = own_frames(cause.traceback.rstrip()).removeprefix(cause.message).strip("\n")
        shown_lines = traceback.splitlines()
        lines += shown_lines[:TAIL_LINES] if STACK in traceback else shown_lines[-TAIL_LINES:]
    lines += [f"after the failure: {line}" for line in cause.gpus]
    lines += [f"NCCL on this rank: {warning}" for warning in cause.nccl]
    lines += [f"NCCL: {cause.nccl_problem.meaning}"] if cause.nccl_problem else []
    return lines + ([f"stacks of all ranks: {shown(Path(cause.stacks))}"] if cause.stacks else [])


def _is_refusal(event: Event, found: Diagnosis) -> bool:
    """Returns whether ``event`` only repeats why the run was refused."""
    refused = found.cause is not None and found.cause.kind == Failure.REFUSED
    return refused and event.kind.is_failure and event.failure == Failure.REFUSED


def _slurm(found: Diagnosis) -> list[str]:
    facts = found.slurm
    if facts is None:
        return []
    parts = [f"job {facts.job_id}: {facts.state}", f"ExitCode {facts.exit_code}" if facts.exit_code else ""]
    parts += [f"DerivedExitCode {facts.derived_exit_code}" if facts.derived_exit_code else ""]
    parts += [f"Reason {facts.reason}" if facts.reason else "", f"{facts.restarts} requeues" if facts.restarts else ""]
    parts += [f"depends on {facts.dependency}" if facts.dependency else ""]
    nodes = [f"{node.node} {node.state}" + (f" ({node.reason})" if node.reason else "") for node in facts.nodes]
    return [", ".join(filter(None, parts)), *([f"nodes: {', '.join(nodes)}"] if nodes else []), *facts.use]


def _memory(found: Diagnosis) -> list[str]:
    rss = found.slurm.max_rss_bytes if found.slurm else None
    lines = [f"largest task by Slurm's count (MaxRSS): {format_bytes(rss)}"] if rss else []
    return lines + (
        [f"peak of rank 0 in the metrics: {format_bytes(found.peak_memory_bytes)}"] if found.peak_memory_bytes else []
    )


def _checkpoint(found: Diagnosis) -> list[str]:
    kept = found.checkpoint
    where = f"step {kept.step}: {shown(Path(kept.path))}" if kept.path else "none"
    if found.cause is None or (kept.lost_s is None and not kept.lost_steps):
        return [where]
    lost = counted(kept.lost_steps, "logged step", "logged steps") + (
        f", {format_duration(kept.lost_s)}" if kept.lost_s is not None else ""
    )
    return [where, f"work lost by the failure: {lost}"]


def told(event: Event, known: str = "") -> str:
    """Returns an event as one line: when, in which attempt, what, where, at which step, and why, unless it is ``known``
    from the section of the failure."""
    details = [str(event[key]) for key in ("class", "reason", "message") if event.get(key) and event[key] != known]
    who = str(event.node) if event.rank is None else f"rank {event.rank} on {event.node}"
    step = "" if event.step is None else f"step {event.step}"
    parts = [clock(event.time), f"attempt {event.attempt}", event.name, who, step]
    return "  ".join(filter(None, parts)) + (f": {', '.join(details)}".splitlines()[0] if details else "")


def clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def verdict(facts_of_run: RunFacts) -> Html:
    """Returns the first section of the page: what happened, and what to do."""
    found = facts_of_run.diagnosis
    told_of = {title: lines for title, lines in sections(found) if lines}
    advice = told_of.pop(TODO, [])
    line = block("paragraph", headline(found), f"verdict {_level(found)}")
    box = block("todo", TODO.capitalize(), _advised(advice)) if advice else None
    rest = [
        joined([block("heading", title.capitalize()), _told_lines(title, lines)]) for title, lines in told_of.items()
    ]
    return section("Verdict", line, _figures(facts_of_run), box, *rest)


def _level(found: Diagnosis) -> str:
    if found.exit_code is None:
        return "warn" if found.waiting is not None or found.cause is not None else ""
    if found.exit_code == Exit.DONE:
        return "good"
    return "warn" if found.exit_code == Exit.STOPPED else "bad"


def _advised(lines: Sequence[str]) -> Html:
    """Returns the advice, with command lines as such."""
    typed = [line for line in lines if line.startswith("python -m hpc_train")]
    return joined(
        [
            paragraphs(line for line in lines if line not in typed),
            commands(typed, "commands that help") if typed else None,
        ]
    )


def _told_lines(title: str, lines: Sequence[str]) -> Html:
    if len(lines) > 1 and "failure" in title:
        return joined([block("paragraph", lines[0]), block("preformatted", "\n".join(lines[1:]), "traceback")])
    return paragraphs(lines) if len(lines) == 1 else block("bullets", lines)


def _figures(facts_of_run: RunFacts) -> Html:
    """Returns the figures of the run at a glance."""
    last = facts_of_run.shown[-1] if facts_of_run.shown else {}
    result = final_result(facts_of_run.record) or {}
    total, spent = facts_of_run.record.get("total_steps"), facts_of_run.ledger.total
    step = last.get("step") if last else None
    layout = next((event.get("layout") for event in reversed(facts_of_run.of_event("started"))), "")
    began = facts_of_run.attempts[0].began if facts_of_run.attempts else None
    ended = facts_of_run.attempts[-1].last_sign if facts_of_run.diagnosis.exit_code is not None and began else None
    validation = result.get("val_loss") or next(
        (line["val_loss"] for line in reversed(facts_of_run.kept) if line.get("val_loss") is not None), None
    )
    return block(
        "facts",
        (
            ("step", None if step is None else f"{step:,}" + (f" of {total:,}" if total else "")),
            ("training loss", _short(last.get("loss"))),
            ("validation loss", _short(validation)),
            *((f"validation {name}", _short(points[-1][1])) for name, points in evaluated(facts_of_run)),
            ("useful time (goodput)", f"{spent.useful_share:.0%}" if spent.held_s else None),
            ("time held", format_duration(spent.held_s) if spent.held_s else None),
            ("GPU-hours", format_hours(spent.gpu_hours) if spent.gpu_s else None),
            ("cost", Prices.of(facts_of_run.config.get("cluster", {}).get("price")).bill(spent.gpu_hours)),
            ("rank-hours, no GPU", format_hours(spent.rank_s / 3600) if spent.rank_s else None),
            ("started", None if began is None else clock(began)),
            ("ended", None if ended is None else clock(ended)),
            ("attempts", len(facts_of_run.attempts) or None),
            ("requeues", len(facts_of_run.of_event("requeued", "requeued_by_slurm")) or None),
            ("Slurm job", facts_of_run.diagnosis.job_id),
            ("layout", layout),
            ("chosen by strategy=auto", facts_of_run.found.choice),
        ),
    )


def _short(value: Any) -> str | None:
    return f"{value:.4f}" if isinstance(value, int | float) else None


MOST_EVENTS = 200  # the newest ones
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
    if len(told) > MOST_EVENTS:
        words.append(f"{len(told) - MOST_EVENTS} earlier events are left out.")
    columns = ("time", "attempt", "event", "where", "step", "details")
    known: set[str] = set()
    rows = [_event_row(event, known) for event in told[-MOST_EVENTS:]]
    events = table("Events, the oldest first", columns, rows)
    return section(title, block("paragraph", " ".join(words)) if words else None, events)


def _event_row(event: Event, known: set[str]) -> list[str]:
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
