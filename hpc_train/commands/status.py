"""``python -m hpc_train status [RUN|SWEEP]`` prints the state of runs; by default of all your runs in Slurm."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from hpc_train.launch.diagnosis import excluded_nodes
from hpc_train.launch.job_status import JobStatus, SlurmStatuses, time_left
from hpc_train.launch.lookup import RunHandle, find_my_runs, find_runs, statuses_of
from hpc_train.run.exits import Exit
from hpc_train.run.files import read_lines
from hpc_train.run.ledger import Account, read_ledger
from hpc_train.telemetry.notices import failing, saves
from hpc_train.telemetry.progress import spent_line
from hpc_train.units import format_duration


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train status", description=__doc__)
    parser.add_argument("target", nargs="?", metavar="RUN|SWEEP", help="a directory, or its name (default: all yours)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    options = parser.parse_args(arguments)
    found = find_runs(options.target, unreadable=True) if options.target else find_my_runs()
    statuses = statuses_of(found, SlurmStatuses())
    readable = [item for item in found if item.error is None]
    rows = [_describe(item, statuses, with_ledger=options.json or len(found) == 1) for item in readable]
    if options.json:
        print("\n".join(json.dumps(row) for row, _ in rows))
    elif rows:
        console = Console()
        if not console.is_terminal:
            console.width = 200  # rich would squeeze the table of a pipe into 80 columns
        console.print(_table([row for row, _ in rows]), highlight=False)
        for _, spent in rows:
            if spent is not None and (spent.held_s or spent.queue_s):
                console.print(spent_line(spent), highlight=False, soft_wrap=True)
        for item in readable if len(found) == 1 else []:
            for node in excluded_nodes(item.run, item.config.elastic.exclude_hours):
                console.print(node.words, highlight=False, soft_wrap=True)
    elif not found:
        print("you have no jobs in Slurm's queue; `status RUN_DIR` shows a run")
    for item in found:
        if item.error is not None:
            print(f"{item.run.path}: {item.error}", file=sys.stderr)
    return Exit.DONE if readable or not found else Exit.REFUSED


def _describe(
    item: RunHandle, statuses: dict[str, JobStatus], with_ledger: bool
) -> tuple[dict[str, Any], Account | None]:
    """Returns the state of a run, with null for unknown values, and its time account if ``with_ledger``."""
    view = item.view(statuses)
    job = statuses.get(item.job_id or "")
    metrics = view.metrics
    spent = read_ledger(item.run, time.time() if view.exit is None else None).total if with_ledger else None
    row = {
        "run": str(item.run.path),
        "job_id": item.job_id,
        "part": job.part if job else "",  # the position in a chain of jobs
        "pid": item.pid,
        "strategy": item.config.strategy.name,
        "state": view.state,
        "exit_code": view.exit,
        "nodes": view.nodes,
        "step": metrics.get("step"),
        "steps": view.steps,
        "loss": metrics.get("loss"),
        "tokens_per_s": metrics.get("tokens_per_s"),
        "time_left_s": time_left(view),
        "restarts": view.restarts,
        "failed_saves": 0 if view.exit is not None else _failed_saves(item),
        "message": view.message,
        "excluded_nodes": [asdict(node) for node in excluded_nodes(item.run, item.config.elastic.exclude_hours)],
        "ledger": None if spent is None else spent.as_json(),
    }
    return row, spent


def _failed_saves(item: RunHandle) -> int:
    """Returns the number of consecutive failed saves up to now."""
    attempt = item.run.newest_attempt()
    return failing(read_lines(item.run.events_file("rank-0000", attempt))) if attempt >= 0 else 0


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("job", "strategy", "state"):
        table.add_column(name)
    for name in ("nodes", "step", "loss", "tokens/s", "time left", "restarts"):
        table.add_column(name, justify="right")
    table.add_column("run directory", overflow="fold")
    for row in rows:
        step = "" if row["step"] is None else f"{row['step']}/{row['steps'] or '?'}"
        table.add_row(
            row["part"].removeprefix("job ") or str(row["job_id"] or row["pid"] or ""),
            row["strategy"],
            row["state"] + (f", {saves(row['failed_saves'])} failed" if row["failed_saves"] else ""),
            str(row["nodes"] or ""),
            step,
            "" if row["loss"] is None else f"{row['loss']:.4f}",
            "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}",
            "" if row["time_left_s"] is None else format_duration(row["time_left_s"]),
            str(row["restarts"] or ""),
            min(row["run"], os.path.relpath(row["run"]), key=len),
        )
    return table
