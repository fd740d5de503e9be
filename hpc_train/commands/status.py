"""``python -m hpc_train status [RUN|SWEEP]`` prints the state of runs; by default of all below the run root, and of
all your runs in Slurm.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from hpc_train.config.options import OptionParser
from hpc_train.config.run_path import default_root
from hpc_train.errors import UserError, UserErrors
from hpc_train.run.directory import RANK_0
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.ledger import Account, read_ledger
from hpc_train.runs.comparison import Comparison, best_metric_of, evaluated_parts
from hpc_train.runs.cost import Prices
from hpc_train.runs.diagnosis import excluded_nodes
from hpc_train.runs.job_status import JobStatuses, View, time_left
from hpc_train.runs.job_table import BEST, DIRECTORY, short_path
from hpc_train.runs.lookup import Overview, RunHandle, find_all_runs, find_runs, statuses_of, unreadable, with_roles
from hpc_train.schedulers.scheduler import JobStatus
from hpc_train.telemetry.progress import failing, speed_column, spent_line
from hpc_train.telemetry.terminal import Terminal, text_table, wide
from hpc_train.units import counted, format_duration, format_metric

NEWEST = 100  # runs that are listed by default


def main(arguments: list[str]) -> int:
    parser = OptionParser(prog="python -m hpc_train status", description=__doc__)
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
    overview = None
    if options.target is None:
        overview = find_all_runs(Path(default_root()), options.newest)
        items = overview.runs
    else:
        items = with_roles(find_runs(options.target, "status", unreadable=True))
    statuses = statuses_of(items, JobStatuses(silent=overview is not None and overview.silent))
    readable = [item for item in items if item.error is None]
    if overview is None and len(readable) == 1:
        load(readable[0].run)  # it raises the error of a damaged or changed config
    is_alone = overview is None and len(items) == 1
    listed: list[tuple[RunHandle, View]] = []
    rows: list[tuple[dict[str, Any], Account | None]] = []
    errors = [(item, item.error) for item in items if item.error is not None]
    for item in readable:
        try:
            view = item.view(statuses)
            rows.append(_describe(item, view, statuses, with_ledger=len(items) == 1 or options.json))
            listed.append((item, view))
        except Exception as error:
            errors.append((item, unreadable(item.run, error)))
    if items and not listed:
        raise errors[0][1] if len(errors) == 1 else UserErrors(error for _, error in errors)
    _compare(listed, [row for row, _ in rows])
    notes = [] if overview is None else [*_notes(overview)]
    if options.json:
        for row, _ in rows:
            print(json.dumps(row))
    else:
        of_command = len(listed) == 1 and listed[0][0].run.record().get("own_code") == "command"
        _print(rows, [item for item, _ in listed if is_alone], of_command)
        if overview is None:
            print("".join(f"{line}\n" for line in evaluated_parts(item.run for item, _ in listed)), end="")
    for line in [*notes, *(f"{item.run.path}: {problem}" for item, problem in errors)]:
        print(line, file=sys.stderr)
    return Exit.DONE


def _print(rows: list[tuple[dict[str, Any], Account | None]], alone: list[RunHandle], of_command: bool) -> None:
    """Prints the table, and the time account and the excluded nodes of a run that is shown alone. ``of_command`` states
    whether the only run is one of ``run.command``."""
    console = wide(Terminal())
    if rows:
        console.print(_table([row for row, _ in rows]), highlight=False)
    for row, _ in rows:
        if alone and row["message"] and row["exit_code"] is None:
            console.print(row["message"], highlight=False, markup=False, soft_wrap=True)
    accounts = [spent for _, spent in rows if spent is not None and (spent.held_s or spent.queue_s)]
    lines = [spent_line(spent, of_command) for spent in accounts]
    for row, spent in rows:
        if spent is not None and row["cost"] is not None:
            lines.append(f"cost so far: {Prices.of(row['price']).bill(spent.gpu_hours)}")
    for item in alone:
        if item.choice is not None:
            lines.append(f"strategy=auto chose {item.choice}")
        if item.withdrawn:
            lines.append(f"job {item.job_id} started first; {', '.join(item.withdrawn)} were withdrawn (cluster.first)")
        lines += [node.words for node in excluded_nodes(item.run, item.config.elastic.exclude_hours)]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _notes(overview: Overview) -> Iterator[str]:
    if overview.silent:
        yield "note: Slurm does not respond (squeue); the state of its jobs comes from their run directories"
    if overview.older:
        yield f"note: {counted(overview.older, 'older run is', 'older runs are')} not listed; --newest N lists more"
    if not overview.runs:
        yield f"no run below {default_root()}/ and no job of yours in Slurm; run.root or HPC_TRAIN_ROOT sets the place"


def _describe(
    item: RunHandle, view: View, statuses: dict[str, JobStatus], with_ledger: bool
) -> tuple[dict[str, Any], Account | None]:
    """Returns the state of a run, with null for unknown values, and its time account if ``with_ledger``."""
    metrics = view.metrics
    config = item.plain_config
    hours = config.get("elastic", {}).get("exclude_hours", 0.0)
    row = {
        "run": str(item.run.path),
        "job_id": item.job_id,
        "part": "",
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
        "failed_saves": 0,
        "message": view.message,
        "excluded_nodes": [asdict(node) for node in excluded_nodes(item.run, hours)],
        "ledger": None,
        "price": config.get("cluster", {}).get("price"),
        "cost": None,
    }
    if item.job_key in statuses:
        row["part"] = statuses[item.job_key].part  # the position in a chain of jobs
    attempt = item.run.newest_attempt()
    if view.exit is None and attempt >= 0:  # saves that have failed in succession up to now
        row["failed_saves"] = failing(item.run.events_of(RANK_0, attempt))
    spent = None
    if with_ledger:
        spent = read_ledger(item.run, time.time() if view.exit is None else None).total
        row["ledger"] = spent.as_json()
        price = Prices.of(row["price"]).gpu_hour
        if price is not None and spent.gpu_s:
            row["cost"] = round(price * spent.gpu_hours, 2)
    return row, spent


def _compare(listed: Sequence[tuple[RunHandle, View]], rows: Sequence[dict[str, Any]]) -> None:
    """Adds to the ``rows`` of a sweep the overrides that differ, the metric, and which run is the best."""
    sweeps: dict[Path, list[int]] = {}
    for index, (item, _) in enumerate(listed):
        sweep = item.run.path
        if sweep.name.isdigit():
            sweep = sweep.parent
        sweeps.setdefault(sweep, []).append(index)
    for indices in sweeps.values():
        items, views = zip(*(listed[index] for index in indices), strict=True)
        compared = Comparison.of((item.run for item in items), best_metric_of(items[0].plain_config))
        best = compared.best(views)
        name = compared.ranked_by(views).name
        for place, (index, value) in enumerate(zip(indices, compared.values(views), strict=True)):
            overrides = compared.of_run(items[place].run)
            rows[index].update(overrides=overrides, metric=name, value=value, best=place == best)


OVERRIDES = "overrides"  # the column of all overrides, in the table of several sweeps


def _table(rows: list[dict[str, Any]]) -> Table:
    """Returns the table, with columns for the overrides that differ and the metrics that rank the runs."""
    overrides = {tuple(key for key in row["overrides"] if key != "strategy") for row in rows}
    keys = [OVERRIDES]
    if len(overrides) == 1:
        keys = [*overrides.pop()]
    metrics = dict.fromkeys(row["metric"] for row in rows if row["value"] is not None and row["metric"] != "loss")
    unit, speeds = speed_column(rows)
    numbers = ("nodes", "step", "loss", *metrics, unit, "time left", "restarts")
    cells = []
    for row, speed in zip(rows, speeds, strict=True):
        state = row["state"]
        if row["failed_saves"]:
            state += f", {counted(row['failed_saves'], 'save', 'saves')} failed"
        step = ""
        if row["step"] is not None:
            step = f"{row['step']}/{row['steps'] or '?'}"
        left = ""
        if row["time_left_s"] is not None:
            left = format_duration(row["time_left_s"])
        values = {"loss": row["loss"]}
        if row["metric"] in metrics:
            values[row["metric"]] = row["value"]
        measured = {name: format_metric(value) for name, value in values.items() if value is not None}
        if row["best"] and row["metric"] in measured:
            measured[row["metric"]] += BEST
        shown = {**row["overrides"], OVERRIDES: " ".join(f"{key}={value}" for key, value in row["overrides"].items())}
        cells.append(
            (
                row["part"].removeprefix("job ") or str(row["job_id"] or row["pid"] or ""),
                row["strategy"],
                *(shown[key] for key in keys),
                state,
                str(row["nodes"] or ""),
                step,
                *(measured.get(name, "") for name in ("loss", *metrics)),
                speed,
                left,
                str(row["restarts"] or ""),
                short_path(Path(row["run"])),
            )
        )
    return text_table(("job", "strategy", *keys, "state", *numbers, DIRECTORY), cells, numbers, [DIRECTORY])
