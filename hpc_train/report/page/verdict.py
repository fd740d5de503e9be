"""Describes what happened to a run and what to do about it: in the command ``why``, and at the head of the page."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_train.config.run_path import relative
from hpc_train.report.page.curves import evaluated
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, commands, joined, paragraphs, section, table
from hpc_train.report.page.resources import held
from hpc_train.run.events import Event, Level
from hpc_train.run.exits import Exit, Failure
from hpc_train.run.rows import Line
from hpc_train.runs.cost import Prices
from hpc_train.runs.diagnosis import TAIL_LINES, Diagnosis
from hpc_train.runs.job_status import TO_BE_REQUEUED
from hpc_train.telemetry.progress import final_result, spent_line
from hpc_train.telemetry.tracebacks import STACK, own_frames
from hpc_train.units import counted, format_bytes, format_duration, format_metric

TODO = "what to do"  # the title of the section with the advice


def headline(diagnosis: Diagnosis) -> str:
    head = f"{relative(Path(diagnosis.run))}: {diagnosis.state}"
    if diagnosis.waiting is not None or ended_badly(diagnosis) or diagnosis.state == TO_BE_REQUEUED:
        return head
    if diagnosis.ended_early is not None and diagnosis.cause is None:
        return f"{head}; ended early by a hook: {diagnosis.ended_early}"
    if diagnosis.message and diagnosis.exit_code is None:
        return f"{head}; {diagnosis.message}"
    if diagnosis.cause is None:
        return f"{head}; nothing failed"
    return f"{head}; it recovered from the failure below"


def ended_badly(diagnosis: Diagnosis) -> bool:
    return diagnosis.exit_code not in (None, Exit.DONE)


def sections(diagnosis: Diagnosis, of_command: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yields titles with lines of text; a section without lines is not shown. ``of_command`` states whether the run is
    one of ``run.command``, which alone knows its checkpoints."""
    yield "what the job waits for", _waiting(diagnosis)
    yield "failure" if ended_badly(diagnosis) else "earlier failure", _cause(diagnosis)
    yield "Slurm", _slurm(diagnosis)
    memory = []
    if diagnosis.slurm and diagnosis.slurm.max_rss_bytes:
        memory.append(f"largest task by Slurm's count (MaxRSS): {format_bytes(diagnosis.slurm.max_rss_bytes)}")
    if diagnosis.peak_memory_bytes:
        memory.append(f"peak of rank 0 in the metrics: {format_bytes(diagnosis.peak_memory_bytes)}")
    yield "memory", memory
    yield "last checkpoint", [] if of_command else _checkpoint(diagnosis)
    yield "what happened", _actions(diagnosis)
    yield "excluded nodes", [node.words for node in diagnosis.excluded_nodes]
    spent = spent_line(diagnosis.ledger, of_command)
    yield "time", [spent] if diagnosis.ledger.held_s or diagnosis.ledger.queue_s else []
    yield TODO, list(diagnosis.advice)


def _waiting(diagnosis: Diagnosis) -> list[str]:
    waiting = diagnosis.waiting
    if waiting is None:
        return []
    lines = [f"{waiting.words} ({waiting.reason})"]
    if waiting.starts:
        lines.append(f"expected to start at {waiting.starts.replace('T', ' ')}")
    if waiting.fix:
        lines.append(f"fix: {waiting.fix}")
    return lines + [f"to start sooner: {change}" for change in waiting.sooner]


def _cause(diagnosis: Diagnosis) -> list[str]:
    cause = diagnosis.cause
    if cause is None:
        return diagnosis.message.splitlines()[-TAIL_LINES:]
    head = f"{cause.kind}, {cause.who}, in attempt {cause.attempt} at {clock(cause.time)}: {cause.message}"
    lines = head.splitlines()
    if cause.kind != Failure.REFUSED:  # its traceback is the message
        traceback = own_frames(cause.traceback.rstrip()).removeprefix(cause.message).strip("\n")
        frames = traceback.splitlines()
        if STACK not in traceback:
            frames = frames[-TAIL_LINES:]
        lines += frames[:TAIL_LINES]
    lines += [f"after the failure: {line}" for line in cause.gpus]
    lines += [f"NCCL on this rank: {warning}" for warning in cause.nccl]
    if cause.nccl_problem:
        lines.append(f"NCCL: {cause.nccl_problem.meaning}")
    if cause.stacks:
        lines.append(f"stacks of all ranks: {relative(Path(cause.stacks))}")
    return lines


def _slurm(diagnosis: Diagnosis) -> list[str]:
    facts = diagnosis.slurm
    if facts is None:
        return []
    values = {
        "ExitCode {}": facts.exit_code,
        "DerivedExitCode {}": facts.derived_exit_code,
        "Reason {}": facts.reason,
        "{} requeues": facts.restarts,
        "depends on {}": facts.dependency,
    }
    parts = [f"job {facts.job_id}: {facts.state}", *(words.format(value) for words, value in values.items() if value)]
    lines = [", ".join(parts)]
    nodes = [node.words for node in facts.nodes]
    if nodes:
        lines.append(f"nodes: {', '.join(nodes)}")
    if diagnosis.withdrawn:
        lines.append(f"it started before {', '.join(diagnosis.withdrawn)}, which were withdrawn (cluster.first)")
    return [*lines, *facts.use]


def _checkpoint(diagnosis: Diagnosis) -> list[str]:
    newest = diagnosis.checkpoint
    lines = ["none"]
    if newest.path:
        lines = [f"step {newest.step}: {relative(Path(newest.path))}"]
    if diagnosis.cause is not None and (newest.lost_s is not None or newest.lost_steps):
        lost = counted(newest.lost_steps, "step", "steps")
        if newest.lost_s is not None:
            lost += f", {format_duration(newest.lost_s)}"
        lines.append(f"lost: {lost}")
    return lines


def _actions(diagnosis: Diagnosis) -> list[str]:
    """Returns a line for each event: its time, attempt, name, place, step and reason; the reason is omitted if the
    section of the failure or the message of the event states it.
    """
    lines = []
    for event in diagnosis.done:
        refused = diagnosis.cause is not None and diagnosis.cause.kind == Failure.REFUSED
        if refused and event.kind.is_failure and event.failure == Failure.REFUSED:  # it repeats the section above
            continue
        step = "" if event.step is None else f"step {event.step}"
        line = "  ".join(filter(None, [clock(event.time), f"attempt {event.attempt}", event.name, _where(event), step]))
        reason = "" if event.reason in event.message else event.reason
        texts = (event.failure, reason, event.message)
        details = [text for text in texts if text and (diagnosis.cause is None or text != diagnosis.cause.message)]
        if details:
            line += f": {', '.join(details)}".splitlines()[0]
        lines.append(line)
    return lines


def _where(event: Event) -> str:
    return str(event.node) if event.rank is None else f"rank {event.rank} on {event.node}"


def clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def verdict(facts: RunFacts) -> Html:
    diagnosis = facts.diagnosis
    level = "bad"
    if diagnosis.exit_code is None:
        level = ""
        if diagnosis.waiting is not None or diagnosis.cause is not None:
            level = "warn"
    elif diagnosis.exit_code == Exit.DONE:
        level = "good"
    elif diagnosis.exit_code == Exit.STOPPED:
        level = "warn"
    advice = Html("")
    blocks = []
    for title, lines in sections(diagnosis, facts.is_command):
        if title == TODO and lines:
            typed = [line for line in lines if line.startswith("python -m hpc_train")]
            words = paragraphs(line for line in lines if line not in typed)
            advice = joined([words, commands(typed, "commands that help")])
        elif len(lines) > 1 and "failure" in title:
            traceback = block("preformatted", "\n".join(lines[1:]), "traceback")
            blocks.append(joined([block("heading", title.capitalize()), block("paragraph", lines[0]), traceback]))
        elif lines:
            content = paragraphs(lines) if len(lines) == 1 else block("bullets", lines)
            blocks.append(joined([block("heading", title.capitalize()), content]))
    return section(
        "Verdict",
        block("paragraph", headline(diagnosis), f"verdict {level}"),
        _figures(facts),
        block("todo", TODO.capitalize(), advice),
        *blocks,
    )


def _figures(facts: RunFacts) -> Html:
    last = facts.shown[-1] if facts.shown else Line()
    step = None
    if last:
        step = f"{last.step:,}"
        if facts.record.get("total_steps"):
            step += f" of {facts.record['total_steps']:,}"
    result = final_result(facts.record) or {}
    validation = result.get("val_loss") or next(
        (line.val_loss for line in reversed(facts.kept) if line.val_loss is not None), None
    )
    began = ended = None
    if facts.attempts:
        began = clock(facts.attempts[0].began)
        if facts.diagnosis.exit_code is not None:
            ended = clock(facts.attempts[-1].last_sign)
    spent = facts.ledger.total
    knows_use = spent.steps_s > 0 or not facts.is_command
    started = facts.of_event("started")
    return block(
        "facts",
        (
            ("step", step),
            ("training loss", _short(last.loss)),
            ("validation loss", _short(validation)),
            *((f"validation {name}", _short(points[-1][1])) for name, points in evaluated(facts)),
            ("useful time (goodput)", f"{spent.useful_share:.0%}" if spent.held_s and knows_use else None),
            *held(spent),
            ("cost", Prices.of(facts.config.get("cluster", {}).get("price")).bill(spent.gpu_hours)),
            ("started", began),
            ("ended", ended),
            ("attempts", len(facts.attempts) or None),
            ("requeues", len(facts.of_event("requeued", "requeued_by_slurm")) or None),
            ("Slurm job", facts.diagnosis.job_id),
            ("layout", started[-1].layout if started else ""),
            ("chosen by strategy=auto", facts.handle.choice),
        ),
    )


def _short(value: Any) -> str | None:
    return format_metric(value) if isinstance(value, int | float) else None


MOST_EVENTS = 200  # the newest ones


def decisions(facts: RunFacts) -> Html | None:
    """Returns the section with the faults and what was decided about them, in the order of time; None without any."""
    title = "Faults and decisions"
    events = [event for event in facts.events if event.kind.level >= Level.MARK]
    if not events:
        return None
    words = []
    if not any(event.kind.level >= Level.REACTION and event.name != "resumed" for event in events):
        words.append("No fault was recorded.")
    saves = len(facts.of_event("checkpoint_saved"))
    if saves:
        words.append(f"{counted(saves, 'checkpoint was', 'checkpoints were')} saved.")
    if len(events) > MOST_EVENTS:
        words.append(f"{len(events) - MOST_EVENTS} earlier events are left out.")
    rows = []
    messages: set[str] = set()  # messages of the rows above, which are not repeated
    for event in events[-MOST_EVENTS:]:
        step = "" if event.step is None else f"{event.step:,}"
        texts = (event.failure, event.reason, event.message, event.layout)
        lines = [text.partition("\n")[0] for text in texts if text]
        message = event.message.partition("\n")[0]
        details = [line for line in dict.fromkeys(lines) if line != message or line not in messages]
        messages.add(message)
        rows.append([clock(event.time), str(event.attempt), event.name, _where(event), step, ", ".join(details)])
    columns = ("time", "attempt", "event", "where", "step", "details")
    return section(title, block("paragraph", " ".join(words)), table("Events, the oldest first", columns, rows))
