"""``python -m hpc_train why RUN|SWEEP`` explains why runs failed or why a job is pending, and what to do about it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hpc_train.launch.diagnosis import TAIL_LINES, Diagnosis, diagnose, shown, sweep_failures
from hpc_train.launch.job_status import TO_BE_REQUEUED, SlurmStatuses
from hpc_train.launch.job_table import common_directory, retry_lines
from hpc_train.launch.lookup import RunHandle, find_runs, statuses_of
from hpc_train.run.comparison import Comparison
from hpc_train.run.exits import Exit, Failure
from hpc_train.telemetry.progress import spent_line
from hpc_train.telemetry.tracebacks import own_frames
from hpc_train.units import counted, format_bytes, format_duration

Section = tuple[str, list[str]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train why", description=__doc__)
    parser.add_argument("target", metavar="RUN|SWEEP", help="a run or sweep directory, or its name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    runs = find_runs(options.target)
    if len(runs) > 1:
        _print_sweep(runs, options.json)
        return Exit.DONE
    found = diagnose(runs[0])
    if options.json:
        print(json.dumps(asdict(found) | {"ledger": found.ledger.as_json()}))
        return Exit.DONE
    console = Console()
    console.print(Text(_headline(found), style="bold"), soft_wrap=True)
    for title, lines in _sections(found):
        if lines:
            console.print(Text(f"\n{title}", style="bold"))
            console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)
    return Exit.DONE


def _print_sweep(runs: Sequence[RunHandle], as_json: bool) -> None:
    """Prints which runs of a sweep did not finish and why; runs with the same cause are told together."""
    statuses = statuses_of(runs, SlurmStatuses())
    views = [item.view(statuses) for item in runs]
    failures = sweep_failures(runs, views)
    compared = Comparison.of(item.run for item in runs)
    states = Counter(view.state for view in views)
    if as_json:
        named = [
            [{"run": str(runs[i].run.path), "overrides": compared.of_run(runs[i].run)} for i in failure.runs]
            for failure in failures
        ]
        found = [asdict(failure) | {"runs": own} for failure, own in zip(failures, named, strict=True)]
        print(json.dumps({"sweep": str(runs[0].run.path.parent), "states": states, "failures": found}))
        return
    console = Console()
    where = common_directory([item.run.path.parent for item in runs])
    head = f"{where}: {len(runs)} runs: {', '.join(f'{count} {state}' for state, count in states.most_common())}"
    console.print(Text(head if failures else f"{head}; nothing failed", style="bold"), soft_wrap=True)
    for failure in failures:
        title = f"\n{failure.kind} in {counted(len(failure.runs), 'run', 'runs')}"
        title += (f": {failure.message}" if failure.message else "") + (f" ({failure.place})" if failure.place else "")
        console.print(Text(title, style="bold"), soft_wrap=True)
        lines = [f"{shown(runs[i].run.path)}  {compared.words(runs[i].run)}".rstrip() for i in failure.runs]
        lines += [f"fix: {failure.advice}"] if failure.advice else []
        console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)
    if failures:
        first = shown(runs[failures[0].runs[0]].run.path)
        advice = [
            f"python -m hpc_train why {first}   shows all about the first one",
            *retry_lines(where, runs[0].run, views),
        ]
        console.print(Text("\nwhat to do", style="bold"))
        console.print(Text("\n".join(f"  {line}" for line in advice)), soft_wrap=True)


def _headline(found: Diagnosis) -> str:
    head = f"{shown(Path(found.run))}: {found.state}"
    if found.waiting is not None or _ended_badly(found) or found.state == TO_BE_REQUEUED:
        return head
    if found.ended_early is not None and found.cause is None:
        return f"{head}; ended early by a hook: {found.ended_early}"
    return f"{head}; nothing failed" if found.cause is None else f"{head}; it recovered from the failure below"


def _ended_badly(found: Diagnosis) -> bool:
    return found.exit_code not in (None, Exit.DONE)


def _sections(found: Diagnosis) -> Iterator[Section]:
    yield "why the job is pending", _waiting(found)
    yield "failure" if _ended_badly(found) else "earlier failure", _cause(found)
    yield "Slurm", _slurm(found)
    yield "memory", _memory(found)
    yield "last checkpoint", _checkpoint(found)
    told = "" if found.cause is None else found.cause.message
    yield "recovery actions", [_event(event, told) for event in found.done if not _is_refusal(event, found)]
    yield "excluded nodes", [node.words for node in found.excluded_nodes]
    yield "time", [spent_line(found.ledger)] if found.ledger.held_s or found.ledger.queue_s else []
    yield "what to do", list(found.advice)


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
    head = f"{cause.kind}, {cause.who}, in attempt {cause.attempt} at {_clock(cause.time)}: {cause.message}"
    lines = head.splitlines()
    if cause.kind != Failure.REFUSED:  # its traceback is the message
        traceback = own_frames(cause.traceback.rstrip())
        lines += traceback.splitlines()[-TAIL_LINES:] if traceback != cause.message else []
    lines += [f"after the failure: {line}" for line in cause.gpus]
    lines += [f"NCCL on this rank: {warning}" for warning in cause.nccl]
    lines += [f"NCCL: {cause.nccl_problem.meaning}"] if cause.nccl_problem else []
    return lines + ([f"stacks of all ranks: {shown(Path(cause.stacks))}"] if cause.stacks else [])


def _is_refusal(event: dict[str, Any], found: Diagnosis) -> bool:
    """Returns whether ``event`` only repeats why the run was refused."""
    refused = found.cause is not None and found.cause.kind == Failure.REFUSED
    return refused and event["event"] in ("worker_failed", "failed") and event.get("class") == Failure.REFUSED


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
    lost = f"{kept.lost_steps} logged steps" + (f", {format_duration(kept.lost_s)}" if kept.lost_s is not None else "")
    return [where, f"work lost by the failure: {lost}"]


def _event(event: dict[str, Any], told: str) -> str:
    """Returns one line; it leaves out the message that the section of the failure has ``told``."""
    details = [str(event[key]) for key in ("class", "reason", "message") if event.get(key) and event[key] != told]
    who = f"rank {event['rank']} on {event['node']}" if event.get("rank") is not None else str(event["node"])
    step = f"step {event['step']}" if event.get("step") is not None else ""
    parts = [_clock(event["time"]), f"attempt {event['attempt']}", event["event"], who, step]
    return "  ".join(filter(None, parts)) + (f": {', '.join(details)}".splitlines()[0] if details else "")


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
