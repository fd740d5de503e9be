"""``python -m hpc_train status [RUN|SWEEP]`` prints the state of runs; by default of all below the run root, and of
all your runs in Slurm.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from hpc_train.config.run_path import default_root
from hpc_train.errors import UserError
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.ledger import Account, read_ledger
from hpc_train.runs.comparison import Comparison, best_metric_of, evaluated_parts
from hpc_train.runs.cost import Prices
from hpc_train.runs.diagnosis import excluded_nodes
from hpc_train.runs.job_status import JobStatus, SlurmStatuses, View, time_left
from hpc_train.runs.job_table import BEST, DIRECTORY, short_path
from hpc_train.runs.lookup import Overview, RunHandle, find_all_runs, find_runs, statuses_of, unreadable
from hpc_train.telemetry.progress import failing, saves, speed_column, spent_line
from hpc_train.telemetry.terminal import Terminal, text_table, wide
from hpc_train.units import counted, format_duration


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train status", description=__doc__)
    parser.add_argument("target", nargs="?", metavar="RUN|SWEEP", help="a directory, or its name (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    parser.add_argument(
        "--newest",
        type=int,
        default=NEWEST,
        metavar="N",
        help="without RUN: list the N newest runs (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.newest < 1:
        raise UserError(f"--newest must be at least 1, got {options.newest}", where="--newest", fix="--newest 100")
    overview = find_all_runs(Path(default_root()), options.newest) if options.target is None else None
    found = find_runs(options.target, "status", unreadable=True) if overview is None else overview.runs
    statuses = statuses_of(found, SlurmStatuses(silent=overview is not None and overview.silent))
    readable = [item for item in found if item.error is None]
    if overview is None and _is_alone(readable):
        load(readable[0].run)  # it raises the error of a damaged or changed config
    listed: list[tuple[RunHandle, View]] = []
    rows: list[tuple[dict[str, Any], Account | None]] = []
    errors = [(item, item.error) for item in found if item.error is not None]
    for item in readable:
        try:
            view = item.view(statuses)
            rows.append(_describe(item, view, statuses, with_ledger=_is_alone(found) or options.json))
            listed.append((item, view))
        except Exception as error:
            errors.append((item, unreadable(item.run, error)))
    readable = [item for item, _ in listed]
    _compare(listed, [row for row, _ in rows])
    if options.json:
        print("\n".join(json.dumps(row) for row, _ in rows))
    else:
        _print(rows, readable if _is_alone(found) and overview is None else [])
        for line in evaluated_parts(item.run for item in readable) if overview is None else []:
            print(line)
    for line in [] if overview is None else _notes(overview):
        print(line, file=sys.stderr)
    for item, problem in errors:
        print(f"{item.run.path}: {problem}", file=sys.stderr)
    return Exit.DONE if readable or not found else Exit.REFUSED


NEWEST = 100


def _is_alone(found: list[RunHandle]) -> bool:
    return len(found) == 1


def _print(rows: list[tuple[dict[str, Any], Account | None]], alone: list[RunHandle]) -> None:
    """Prints the table, and the time account and the excluded nodes of a run that is shown alone."""
    console = wide(Terminal())
    if rows:
        console.print(_table([row for row, _ in rows]), highlight=False)
    for row, _ in rows:
        if alone and row["message"] and row["exit_code"] is None:
            console.print(row["message"], highlight=False, markup=False, soft_wrap=True)
    for _, spent in rows:
        if spent is not None and (spent.held_s or spent.queue_s):
            console.print(spent_line(spent), highlight=False, soft_wrap=True)
    for row, spent in rows:
        if spent is not None and row["cost"] is not None:
            prices = Prices.of(row["price"])
            console.print(f"cost so far: {prices.bill(spent.gpu_hours)}", highlight=False, soft_wrap=True)
    for item in alone:
        if item.choice is not None:
            console.print(f"strategy=auto chose {item.choice}", highlight=False, soft_wrap=True)
        for node in excluded_nodes(item.run, item.config.elastic.exclude_hours):
            console.print(node.words, highlight=False, soft_wrap=True)


def _notes(overview: Overview) -> Iterator[str]:
    """Yields what the table of all runs does not say."""
    if overview.silent:
        yield "note: Slurm does not respond (squeue); the state of its jobs is what their run directories say"
    if overview.older:
        yield f"note: {counted(overview.older, 'older run is', 'older runs are')} not listed; --newest N lists more"
    if not overview.runs:
        yield f"no run below {default_root()}/ and no job of yours in Slurm; run.root or HPC_TRAIN_ROOT sets the place"


def _describe(
    item: RunHandle, view: View, statuses: dict[str, JobStatus], with_ledger: bool
) -> tuple[dict[str, Any], Account | None]:
    """Returns the state of a run, with null for unknown values, and its time account if ``with_ledger``."""
    job = statuses.get(item.job_id or "")
    metrics = view.metrics
    config = item.plain_config
    hours = config.get("elastic", {}).get("exclude_hours", 0.0)
    spent = read_ledger(item.run, time.time() if view.exit is None else None).total if with_ledger else None
    row = {
        "run": str(item.run.path),
        "job_id": item.job_id,
        "part": job.part if job else "",  # the position in a chain of jobs
        "pid": item.pid,
        "strategy": config.get("strategy", {}).get("name", ""),
        "state": view.state,
        "exit_code": view.exit,
        "nodes": view.nodes,
        "step": metrics.get("step"),
        "steps": view.steps,
        "loss": metrics.get("loss"),
        "tokens_per_s": metrics.get("tokens_per_s"),
        "samples_per_s": metrics.get("samples_per_s"),
        "time_left_s": time_left(view),
        "restarts": view.restarts,
        "failed_saves": 0 if view.exit is not None else _failed_saves(item),
        "message": view.message,
        "excluded_nodes": [asdict(node) for node in excluded_nodes(item.run, hours)],
        "ledger": None if spent is None else spent.as_json(),
        "price": config.get("cluster", {}).get("price"),
        "cost": None,
    }
    price = Prices.of(row["price"]).gpu_hour
    if spent is not None and price is not None and spent.gpu_s:
        row["cost"] = round(price * spent.gpu_hours, 2)
    return row, spent


def _compare(listed: Sequence[tuple[RunHandle, View]], rows: Sequence[dict[str, Any]]) -> None:
    """Adds to the ``rows`` of the runs of a sweep what their overrides differ in, the metric, and which is the best."""
    sweeps: dict[Path, list[int]] = {}
    for index, (item, _) in enumerate(listed):
        sweeps.setdefault(item.run.path.parent if item.run.path.name.isdigit() else item.run.path, []).append(index)
    for indices in sweeps.values():
        items, views = zip(*(listed[index] for index in indices), strict=True)
        compared = Comparison.of((item.run for item in items), best_metric_of(items[0].plain_config))
        best, name = compared.best(views), compared.ranked_by(views).name
        for place, (index, value) in enumerate(zip(indices, compared.values(views), strict=True)):
            overrides = compared.of_run(items[place].run)
            rows[index].update(overrides=overrides, metric=name, value=value, best=place == best)


def _failed_saves(item: RunHandle) -> int:
    """Returns the number of consecutive failed saves up to now."""
    attempt = item.run.newest_attempt()
    return failing(item.run.events_of("rank-0000", attempt)) if attempt >= 0 else 0


OVERRIDES = "overrides"


def _columns(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Returns the columns for the overrides that differ, and for the metrics that rank the runs besides the loss.

    Overrides have one column each in the table of one sweep, and share one in that of several.
    """
    keys = {tuple(key for key in row["overrides"] if key != "strategy") for row in rows}
    several = len(keys) > 1
    metrics = dict.fromkeys(row["metric"] for row in rows if row["value"] is not None and row["metric"] != "loss")
    return [OVERRIDES] if several else list(*keys), list(metrics)


def _override(row: dict[str, Any], key: str) -> str:
    shown: dict[str, str] = row["overrides"]
    return shown[key] if key != OVERRIDES else " ".join(f"{name}={value}" for name, value in shown.items())


def _measured(row: dict[str, Any], name: str, value: float | None) -> str:
    best = BEST if row["best"] and row["metric"] == name else ""
    return "" if value is None else f"{value:.4f}{best}"


def _table(rows: list[dict[str, Any]]) -> Table:
    keys, metrics = _columns(rows)
    unit, speeds = speed_column(rows)
    numbers = ("nodes", "step", "loss", *metrics, unit, "time left", "restarts")
    columns = ("job", "strategy", *keys, "state", *numbers, DIRECTORY)
    cells = [_cells(row, speed, keys, metrics) for row, speed in zip(rows, speeds, strict=True)]
    return text_table(columns, cells, numbers, [DIRECTORY])


def _cells(row: dict[str, Any], speed: str, keys: Sequence[str], metrics: Sequence[str]) -> tuple[str, ...]:
    return (
        row["part"].removeprefix("job ") or str(row["job_id"] or row["pid"] or ""),
        row["strategy"],
        *(_override(row, key) for key in keys),
        row["state"] + (f", {saves(row['failed_saves'])} failed" if row["failed_saves"] else ""),
        str(row["nodes"] or ""),
        "" if row["step"] is None else f"{row['step']}/{row['steps'] or '?'}",
        _measured(row, "loss", row["loss"]),
        *(_measured(row, name, row["value"] if row["metric"] == name else None) for name in metrics),
        speed,
        "" if row["time_left_s"] is None else format_duration(row["time_left_s"]),
        str(row["restarts"] or ""),
        short_path(Path(row["run"])),
    )
