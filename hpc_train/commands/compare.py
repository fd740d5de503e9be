"""``python -m hpc_train compare RUN...`` shows the settings in which runs differ, and their metrics, the best first."""

from __future__ import annotations

import csv
import json
import operator
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from hpc_train.config.evaluation import BestMetric, highest_is_best
from hpc_train.config.options import OptionParser
from hpc_train.config.secrets import shown
from hpc_train.errors import UserError
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import flat
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
from hpc_train.runs.job_status import JobStatuses, View
from hpc_train.runs.job_table import BEST, short_path
from hpc_train.runs.lookup import RunHandle, find_run, find_runs, statuses_of
from hpc_train.telemetry.progress import speed_column
from hpc_train.telemetry.terminal import Terminal, text_table, wide
from hpc_train.units import format_duration, format_metric

COLUMNS = 6  # if more settings differ, a second table has one line per setting
BASELINE = "baseline"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_FORM = re.compile(
    rf"\s*(?P<metric>\w+)\s*(?P<sign><=|>=|<|>)\s*"
    rf"(?:(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<baseline>{BASELINE})|(?P<number>{_NUMBER}))\s*"
)
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Row:
    """Describes a compared run. ``value`` is its metric, None if it has none; ``held_s`` the run time of its jobs."""

    name: str
    run: str
    view: View
    settings: Settings
    value: float | None
    held_s: float
    best: bool

    def as_json(self, metric: BestMetric) -> dict[str, Any]:
        return {
            "run": self.run,
            "state": self.view.state,
            "settings": self.settings,
            "metric": metric.name,
            "value": self.value,
            "best": self.best,
            "metrics": self.view.metrics,
            "held_s": self.held_s,
        }


def main(arguments: list[str]) -> int:
    parser = OptionParser(prog="python -m hpc_train compare", description=__doc__)
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
        help="exit with 1 if the condition is true for any run, e.g. 'val_loss>1.02*baseline' or 'samples_per_s<1000'; "
        "repeatable",
    )
    parser.add_argument("--baseline", metavar="RUN", help="the baseline of --fail-if (default: the first run)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table with all metrics to FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    options = parser.parse_args(arguments)
    conditions = [Threshold.parse(text) for text in options.fail_if]
    runs = list({item.run.path: item for target in options.runs for item in find_runs(target, "compare")}.values())
    statuses = statuses_of(runs, JobStatuses())
    views = [item.view(statuses) for item in runs]
    compared = _comparison(runs)
    if options.metric is not None:
        logged = sorted({key for view in views for key, value in view.metrics.items() if is_number(value)})
        if options.metric not in logged:
            fix = f"one of {', '.join(logged)}" if logged else "wait until the runs have logged a step"
            raise UserError(f"no run has the metric {options.metric}", where="--metric", fix=fix)
        highest = highest_is_best(options.metric, options.mode, "--mode")
        compared = replace(compared, metric=BestMetric(options.metric, highest))
    metric = compared.ranked_by(views)
    rows = _rows(runs, views, compared)
    if options.csv is not None:
        _write_csv(options.csv, rows, compared.keys)
    if options.json:
        for row in rows:
            print(json.dumps(row.as_json(metric)))
    else:
        _print(runs, rows, metric, compared.keys)
    return _judge(conditions, runs, views, options.baseline)


def _judge(
    conditions: Sequence[Threshold], runs: Sequence[RunHandle], views: Sequence[View], baseline: str | None
) -> Exit:
    """Prints the verdict on each run to standard error; returns FAILED if a condition holds or a run is not done.
    Raises UserError if a condition needs a baseline, and there is none."""
    if not conditions:
        return Exit.DONE
    base: RunHandle | None = None
    reference: Mapping[str, Any] = {}
    if baseline is not None:
        base = find_run(baseline, "compare --baseline")
    elif any(condition.factor is not None for condition in conditions):
        base = runs[0]
        if len(runs) == 1:
            fix = "name two runs, or --baseline RUN"
            raise UserError("there is no run to compare with", where="--fail-if", fix=fix)
    if base is not None:
        reference = base.view(statuses_of([base], JobStatuses())).metrics
    code = Exit.DONE
    for item, view in zip(runs, views, strict=True):
        if base is not None and item.run.path == base.run.path:
            continue
        problems = []
        if view.exit != Exit.DONE:
            problems.append(f"the run is {view.state}")
        for condition in conditions:
            holds, words = condition.verdict(view.metrics, reference)
            if holds:
                problems.append(f"{words} (--fail-if '{condition.text}')")
        if problems:
            code = Exit.FAILED
        print(f"{item.run.path}: {'; '.join(problems) or 'passed'}", file=sys.stderr)
    return code


def _comparison(runs: Sequence[RunHandle]) -> Comparison:
    """Returns the overrides in which the runs of one sweep differ, or the keys of the configs of other runs."""
    metric = metric_of(runs[0].config)
    if len({item.run.path.parent for item in runs}) == 1 and runs[0].run.path.name.isdigit():
        of_sweep = Comparison.of((item.run for item in runs), metric)
        if of_sweep.keys:
            return of_sweep
    settings = {}
    for item in runs:
        keys = {key: value for key, value in flat(item.config).items() if not key.startswith(UNCOMPARED)}
        settings[item.run.path] = {key: str(shown(key, value)) for key, value in keys.items()}
    return Comparison(tuple(varied([*settings.values()])), settings, metric)


def _rows(runs: Sequence[RunHandle], views: Sequence[View], compared: Comparison) -> list[Row]:
    """Returns the rows, the best first and those without a value last."""
    metric = compared.ranked_by(views)
    best = compared.best(views)
    rows = []
    for index, (item, view) in enumerate(zip(runs, views, strict=True)):
        value = view.metrics.get(metric.name)
        rows.append(
            Row(
                name=short_path(item.run.path),
                run=str(item.run.path),
                view=view,
                settings=compared.of_run(item.run),
                value=value if is_number(value) else None,
                held_s=read_ledger(item.run, time.time() if view.exit is None else None).total.held_s,
                best=index == best,
            )
        )
    sign = -1 if metric.highest else 1
    return sorted(rows, key=lambda row: (row.value is None, sign * (row.value or 0.0)))


def _print(runs: Sequence[RunHandle], rows: Sequence[Row], metric: BestMetric, keys: Sequence[str]) -> None:
    console = wide(Terminal())
    in_table = keys if len(keys) <= COLUMNS else ()
    logged = [key for row in rows for key in row.view.metrics if key == "loss" or key.startswith("val_")]
    names = dict.fromkeys([metric.name, *logged])
    unit, speeds = speed_column(row.view.metrics for row in rows)
    cells = []
    for row, speed in zip(rows, speeds, strict=True):
        numbers = []
        for name in names:
            value = row.view.metrics.get(name)
            number = format_metric(value) if is_number(value) else ""
            if row.best and name == metric.name:
                number += BEST
            numbers.append(number)
        held = format_duration(row.held_s) if row.held_s else ""
        settings = [row.settings[key] for key in in_table]
        step = str(row.view.metrics.get("step", ""))
        cells.append((row.name, *settings, row.view.state, step, *numbers, speed, held))
    right = ("step", *names, unit, "time")
    console.print(text_table(("run", *in_table, "state", *right), cells, right), highlight=False)
    for line in evaluated_parts(item.run for item in runs):
        console.print(line, highlight=False)
    if keys and not in_table:
        columns = ("key", *(row.name for row in rows))
        lines = [(key, *(row.settings.get(key, DEFAULT) for row in rows)) for key in keys]
        console.print(Text("\nsettings that differ", style="bold"))
        console.print(text_table(columns, lines, folded=columns), highlight=False)


def _write_csv(path: Path, rows: Sequence[Row], keys: Sequence[str]) -> None:
    metrics = dict.fromkeys(key for row in rows for key, value in row.view.metrics.items() if is_number(value))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *keys, "state", *metrics, "held_s"])
        for row in rows:
            settings = [row.settings.get(key, DEFAULT) for key in keys]
            writer.writerow([row.name, *settings, row.view.state, *map(row.view.metrics.get, metrics), row.held_s])


@dataclass(frozen=True)
class Threshold:
    """Holds a condition on a metric: ``val_loss>1.02*baseline``, ``samples_per_s<0.9*baseline``. ``factor`` is the
    factor of the baseline's value; None compares with ``number``."""

    text: str
    metric: str
    sign: str
    factor: float | None
    number: float

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Raises UserError if ``text`` is not a condition."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise UserError(
                f"{text!r} is not a condition",
                where="--fail-if",
                fix="METRIC, one of < <= > >=, and a number, baseline, or FACTOR*baseline: 'val_loss>1.02*baseline'",
            )
        factor = None
        if match["baseline"]:
            factor = float(match["factor"] or 1.0)
        return cls(text.strip(), match["metric"], match["sign"], factor, float(match["number"] or 0.0))

    def verdict(self, metrics: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[bool, str]:
        """Returns whether the condition holds, and a description of the values. It holds if a value is missing."""
        value = metrics.get(self.metric)
        if not is_number(value):
            return True, f"{self.metric} is unknown"
        limit = self.number
        if self.factor is not None:
            reference = baseline.get(self.metric)
            if not is_number(reference):
                return True, f"{self.metric} of the baseline is unknown"
            limit = self.factor * reference
        if _SIGNS[self.sign](value, limit):
            return True, f"{self.metric} {value:.6g} is {self.sign} {limit:.6g}"
        return False, f"{self.metric} {value:.6g} is not {self.sign} {limit:.6g}"
