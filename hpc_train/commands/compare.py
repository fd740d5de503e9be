"""``python -m hpc_train compare RUN...`` shows the settings in which runs differ, and their metrics, the best first."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from hpc_train.commands.threshold import Threshold
from hpc_train.config.evaluation import BestMetric, highest_is_best
from hpc_train.config.identity import flat
from hpc_train.config.secrets import shown
from hpc_train.errors import UserError
from hpc_train.run.exits import Exit
from hpc_train.run.ledger import read_ledger
from hpc_train.runs.comparison import (
    DEFAULT,
    UNCOMPARED,
    Comparison,
    Settings,
    evaluated_parts,
    is_number,
    metric_of,
    varied,
)
from hpc_train.runs.job_status import SlurmStatuses, View
from hpc_train.runs.job_table import BEST, short_path
from hpc_train.runs.lookup import RunHandle, find_run, find_runs, statuses_of
from hpc_train.telemetry.progress import speed_column
from hpc_train.telemetry.terminal import Terminal, text_table, wide
from hpc_train.units import format_duration

COLUMNS = 6  # with more settings that differ, each is a line of a second table


@dataclass(frozen=True)
class Row:
    """Describes a compared run. ``value`` is its metric, None if it has none; ``held_s`` is the seconds of its jobs."""

    name: str
    run: str
    view: View
    settings: Settings
    value: float | None
    held_s: float
    best: bool = False


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN|SWEEP", help="run or sweep directories, or their names")
    parser.add_argument(
        "--metric", metavar="NAME", help="rank by this metric (default: checkpoint.keep_best, else val_loss, else loss)"
    )
    parser.add_argument(
        "--mode", choices=("auto", "min", "max"), default="auto", help="whether the lowest or highest value is the best"
    )
    parser.add_argument(
        "--fail-if",
        metavar="CONDITION",
        action="append",
        default=[],
        help="exit with 1 if it holds for a run, e.g. 'val_loss>1.02*baseline' or 'samples_per_s<1000'; repeatable",
    )
    parser.add_argument("--baseline", metavar="RUN", help="the baseline of --fail-if (default: the first run)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table with all metrics to FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    options = parser.parse_args(arguments)
    conditions = [Threshold.parse(text) for text in options.fail_if]
    found = list({item.run.path: item for target in options.runs for item in find_runs(target, "compare")}.values())
    statuses = statuses_of(found, SlurmStatuses())
    views = [item.view(statuses) for item in found]
    compared = _compared(found)
    if options.metric is not None:
        _check_metric(options.metric, views)
        highest = highest_is_best(options.metric, options.mode, "--mode")
        compared = replace(compared, metric=BestMetric(options.metric, highest))
    metric, rows = compared.ranked_by(views), _rows(found, views, compared)
    if options.csv is not None:
        _write_csv(options.csv, rows, compared.keys)
    if options.json:
        print("\n".join(json.dumps(_as_json(row, metric)) for row in rows))
        return _judged(conditions, found, views, options.baseline)
    console = wide(Terminal())
    own = compared.keys if len(compared.keys) <= COLUMNS else ()
    console.print(_results(rows, metric, own), highlight=False)
    for line in evaluated_parts(item.run for item in found):
        console.print(line, highlight=False)
    if not own and compared.keys:
        console.print(Text("\nsettings that differ", style="bold"))
        console.print(_settings(rows, compared.keys), highlight=False)
    return _judged(conditions, found, views, options.baseline)


def _judged(
    conditions: Sequence[Threshold], found: Sequence[RunHandle], views: Sequence[View], baseline: str | None
) -> Exit:
    """Prints on standard error how the runs meet the conditions; returns FAILED if one holds, or if a run is not done.

    Raises:
        UserError: a condition needs a baseline, and there is none.
    """
    if not conditions:
        return Exit.DONE
    base = _baseline(conditions, found, baseline)
    reference = {} if base is None else base.view(statuses_of([base], SlurmStatuses())).metrics
    code = Exit.DONE
    for item, view in zip(found, views, strict=True):
        if base is not None and item.run.path == base.run.path:
            continue
        problems = [] if view.exit == Exit.DONE else [f"the run is {view.state}"]
        for condition in conditions:
            holds, words = condition.verdict(view.metrics, reference)
            problems += [f"{words} (--fail-if '{condition.text}')"] if holds else []
        code = Exit.FAILED if problems else code
        print(f"{item.run.path}: {'; '.join(problems) or 'passed'}", file=sys.stderr)
    return code


def _baseline(conditions: Sequence[Threshold], found: Sequence[RunHandle], given: str | None) -> RunHandle | None:
    if given is not None:
        return find_run(given, "compare --baseline")
    if all(condition.factor is None for condition in conditions):
        return None
    if len(found) == 1:
        raise UserError("there is no run to compare with", where="--fail-if", fix="name two runs, or --baseline RUN")
    return found[0]


def _compared(found: Sequence[RunHandle]) -> Comparison:
    """Returns the overrides in which the runs of one sweep differ, or the keys of the configs of other runs."""
    metric = metric_of(found[0].config)
    if len({item.run.path.parent for item in found}) == 1 and found[0].run.path.name.isdigit():
        of_sweep = Comparison.of((item.run for item in found), metric)
        if of_sweep.keys:
            return of_sweep
    settings = {item.run.path: _config_of(item) for item in found}
    return Comparison(tuple(varied([*settings.values()])), settings, metric)


def _config_of(item: RunHandle) -> Settings:
    pairs = flat(item.config).items()
    return {key: str(shown(key, value)) for key, value in pairs if not key.startswith(UNCOMPARED)}


def _check_metric(name: str, views: Sequence[View]) -> None:
    known = sorted({key for view in views for key, value in view.metrics.items() if is_number(value)})
    if name not in known:
        fix = f"one of {', '.join(known)}" if known else "wait until the runs have logged a step"
        raise UserError(f"no run has the metric {name}", where="--metric", fix=fix)


def _rows(found: Sequence[RunHandle], views: Sequence[View], compared: Comparison) -> list[Row]:
    """Returns the rows, the best first and those without a value last."""
    metric, best = compared.ranked_by(views), compared.best(views)
    rows = []
    for index, (item, view) in enumerate(zip(found, views, strict=True)):
        value = view.metrics.get(metric.name)
        name = short_path(item.run.path)
        held = read_ledger(item.run, time.time() if view.exit is None else None).total.held_s
        settings = compared.of_run(item.run)
        rows.append(
            Row(name, str(item.run.path), view, settings, value if is_number(value) else None, held, index == best)
        )
    sign = -1 if metric.highest else 1
    return sorted(rows, key=lambda row: (row.value is None, 0.0 if row.value is None else sign * row.value))


def _results(rows: Sequence[Row], metric: BestMetric, settings: Sequence[str]) -> Table:
    others = dict.fromkeys(key for row in rows for key in row.view.metrics if key == "loss" or key.startswith("val_"))
    measured = [metric.name, *(key for key in others if key != metric.name)]
    unit, speeds = speed_column(row.view.metrics for row in rows)
    right = ("step", *measured, unit, "time")
    return text_table(
        ("run", *settings, "state", *right),
        [_cells(row, speed, settings, measured) for row, speed in zip(rows, speeds, strict=True)],
        right,
    )


def _cells(row: Row, speed: str, settings: Sequence[str], measured: Sequence[str]) -> tuple[str, ...]:
    metrics = row.view.metrics
    numbers = [_number(metrics.get(name), "{:.4f}") for name in measured]
    numbers[0] += BEST if row.best else ""
    time_held = format_duration(row.held_s) if row.held_s else ""
    own = [row.settings[key] for key in settings]
    return (row.name, *own, row.view.state, str(metrics.get("step", "")), *numbers, speed, time_held)


def _number(value: Any, form: str) -> str:
    return form.format(value) if is_number(value) else ""


def _settings(rows: Sequence[Row], keys: Sequence[str]) -> Table:
    columns = ("key", *(row.name for row in rows))
    return text_table(
        columns, [(key, *(row.settings.get(key, DEFAULT) for row in rows)) for key in keys], folded=columns
    )


def _write_csv(path: Path, rows: Sequence[Row], settings: Sequence[str]) -> None:
    metrics = dict.fromkeys(key for row in rows for key, value in row.view.metrics.items() if is_number(value))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *settings, "state", *metrics, "held_s"])
        for row in rows:
            own = [row.settings.get(key, DEFAULT) for key in settings]
            writer.writerow([row.name, *own, row.view.state, *map(row.view.metrics.get, metrics), row.held_s])


def _as_json(row: Row, metric: BestMetric) -> dict[str, Any]:
    return {
        "run": row.run,
        "state": row.view.state,
        "settings": row.settings,
        "metric": metric.name,
        "value": row.value,
        "best": row.best,
        "metrics": row.view.metrics,
        "held_s": row.held_s,
    }
