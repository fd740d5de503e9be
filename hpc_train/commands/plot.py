"""``python -m hpc_train plot RUN...`` draws loss, throughput, memory and time shares of runs, and results of sweeps."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import commonpath
from pathlib import Path
from typing import Any

from hpc_train.config.evaluation import highest_is_best
from hpc_train.errors import UserError, nearest
from hpc_train.report.plots import Curves, Results, check_plot, draw
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.runs.comparison import Comparison
from hpc_train.runs.lookup import RunHandle, find_runs
from hpc_train.telemetry.progress import final_result

OVER = ("step", "hours", "samples", "tokens")
NOT_RESULTS = ("time", "step", "attempt", "epoch", "world_size")


def main(arguments: list[str]) -> int:
    """Writes the picture.

    Raises:
        UserError: matplotlib is missing, no run has logged a step, or no run has the metric.
    """
    options = _parser().parse_args(arguments)
    check_plot(options.out, "--out")
    found = {item.run.path: item for target in options.targets for item in find_runs(target, "plot")}
    items, curves = list(found.values()), _curves(list(found))
    if not any(run.lines for run in curves):
        raise UserError("no run has logged a step yet", where="RUN", fix="plot them after telemetry.log_every steps")
    results = None
    if options.metric is not None and not _is_sweep(items):
        fix = "name a sweep; `compare RUN... --metric NAME` compares single runs"
        raise UserError("--metric names the result of a sweep, and these are single runs", where="--metric", fix=fix)
    if _is_sweep(items):
        results = _results(items, curves, options.metric)
        curves = [replace(run, name=f"{run.name}: {_words(results, index)}") for index, run in enumerate(curves)]
    draw(options.out, [run for run in curves if run.lines], options.over, results)
    if options.json:
        best = None if results is None or results.best is None else str(items[results.best].run.path)
        print(json.dumps({"out": str(options.out), "runs": [str(path) for path in found], "best": best}))
    else:
        print(f"plotted {len(items)} run{'s' if len(items) > 1 else ''}: {options.out}")
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train plot",
        description="Draws loss, throughput, memory and time shares of runs in one picture. For a sweep, it also draws "
        "the metric against each varied key. It needs matplotlib.",
    )
    parser.add_argument("targets", nargs="+", metavar="RUN|SWEEP", help="directories, or names")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("plot.png"),
        metavar="FILE",
        help="a .png, .svg or .pdf (default: plot.png)",
    )
    parser.add_argument("--over", choices=OVER, default=OVER[0], help="the horizontal axis (default: %(default)s)")
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="the result of a sweep (default: checkpoint.keep_best, else val_loss, else loss)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the file and the best run")
    return parser


def _curves(paths: Sequence[Path]) -> list[Curves]:
    above = Path(commonpath([path.parent for path in paths]))
    runs = [RunDirectory(path) for path in paths]
    return [Curves(run.path.relative_to(above).as_posix(), run.read_metrics()) for run in runs]


def _is_sweep(items: Sequence[RunHandle]) -> bool:
    parents = {item.run.path.parent for item in items}
    return len(items) > 1 and len(parents) == 1 and all(item.run.path.name.isdigit() for item in items)


def _results(items: Sequence[RunHandle], curves: Sequence[Curves], metric: str | None) -> Results:
    checkpoint = items[0].plain_config.get("checkpoint", {})
    name = (
        metric or checkpoint.get("keep_best") or ("val_loss" if any(run.has("val_loss") for run in curves) else "loss")
    )
    values = [_final(item, run, name) for item, run in zip(items, curves, strict=True)]
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        known = sorted({key for run in curves for line in run.lines for key in line} - set(NOT_RESULTS))
        raise UserError(f"no run has a value of {name}", where="--metric", fix=nearest(name, known))
    best = _best({index: values[index] for index in finite}, name, checkpoint)
    return Results(name, values, _varied(items), best)


def _words(results: Results, index: int) -> str:
    """Returns the varied values of a run for the legend: lr=0.001 name=dp."""
    return " ".join(f"{key.rpartition('.')[2]}={values[index]}" for key, values in results.varied.items())


def _best(values: Mapping[int, float], name: str, checkpoint: Mapping[str, Any]) -> int | None:
    """Returns the index of the best run; None for a metric of which it is unknown whether high values are good."""
    mode = checkpoint.get("best_mode", "auto") if name == checkpoint.get("keep_best") else "auto"
    try:
        choose = max if highest_is_best(name, mode, "checkpoint.best_mode") else min
    except UserError:
        return None
    return choose(values, key=lambda index: values[index])


def _final(item: RunHandle, run: Curves, name: str) -> float:
    """Returns the result of a run, or its newest logged value; NaN without one."""
    logged = [line[name] for line in run.lines if name in line]
    result = final_result(item.run.record()) or {}
    value = result.get(name, logged[-1] if logged else None)
    return float(value) if isinstance(value, int | float) else math.nan


def _varied(items: Sequence[RunHandle]) -> dict[str, list[float | str]]:
    """Returns the values of each override that differs between the runs, one per run."""
    compared = Comparison.of(item.run for item in items)
    return {key: [_number_or_text(compared.of_run(item.run)[key]) for item in items] for key in compared.keys}


def _number_or_text(value: str) -> int | float | str:
    try:
        return int(value) if value.lstrip("+-").isdigit() else float(value)
    except ValueError:
        return value
