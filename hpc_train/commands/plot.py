"""``python -m hpc_train plot RUN...`` draws loss, throughput, memory and time shares of runs, and results of sweeps."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from os.path import commonpath
from pathlib import Path

from hpc_train.config.evaluation import highest_is_best
from hpc_train.config.options import OptionParser
from hpc_train.errors import UserError, nearest
from hpc_train.report.plots import Curves, Results, check_plot, draw
from hpc_train.run.exits import Exit
from hpc_train.runs.comparison import Comparison
from hpc_train.runs.lookup import RunHandle, find_runs
from hpc_train.telemetry.progress import final_result
from hpc_train.units import counted

OVER = ("step", "hours", "samples", "tokens")
NOT_RESULTS = ("time", "step", "attempt", "epoch", "world_size")


def main(arguments: list[str]) -> int:
    """Writes the picture. Raises UserError if matplotlib is missing, no run has logged a step, or no run has the
    metric."""
    options = _parser().parse_args(arguments)
    check_plot(options.out, "--out")
    by_path = {item.run.path: item for target in options.targets for item in find_runs(target, "plot")}
    items = list(by_path.values())
    above = Path(commonpath([path.parent for path in by_path]))
    curves = [Curves(path.relative_to(above).as_posix(), item.run.read_metrics()) for path, item in by_path.items()]
    if not any(run.lines for run in curves):
        raise UserError("no run has logged a step yet", where="RUN", fix="plot them after telemetry.log_every steps")
    results = None
    best = None
    if len(items) > 1 and len({path.parent for path in by_path}) == 1 and all(path.name.isdigit() for path in by_path):
        results = sweep_results(items, curves, options.metric)
        if results.best is not None:
            best = str(items[results.best].run.path)
        for index, run in enumerate(curves):  # the varied values for the legend: lr=0.001 name=dp
            words = (f"{key.rpartition('.')[2]}={values[index]}" for key, values in results.varied.items())
            curves[index] = replace(run, name=f"{run.name}: {' '.join(words)}")
    elif options.metric is not None:
        fix = "name a sweep; `compare RUN... --metric NAME` compares single runs"
        raise UserError("--metric names the result of a sweep, and these are single runs", where="--metric", fix=fix)
    draw(options.out, [run for run in curves if run.lines], options.over, results)
    if options.json:
        print(json.dumps({"out": str(options.out), "runs": [str(path) for path in by_path], "best": best}))
    else:
        print(f"plotted {counted(len(items), 'run', 'runs')}: {options.out}")
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
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


def sweep_results(items: Sequence[RunHandle], curves: Sequence[Curves], metric: str | None) -> Results:
    """Returns the results of the runs of a sweep: the last value of each run, or the newest logged one, or NaN."""
    checkpoint = items[0].plain_config.get("checkpoint", {})
    ranked = checkpoint.get("keep_best")
    name = metric or ranked or "loss"
    if not (metric or ranked) and any(run.has("val_loss") for run in curves):
        name = "val_loss"
    values = []
    for item, run in zip(items, curves, strict=True):
        logged = [line[name] for line in run.lines if name in line]
        value = (final_result(item.run.record()) or {}).get(name, [math.nan, *logged][-1])
        values.append(float(value) if isinstance(value, int | float) else math.nan)
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        names = sorted({key for run in curves for line in run.lines for key in line} - set(NOT_RESULTS))
        raise UserError(f"no run has a value of {name}", where="--metric", fix=nearest(name, names))
    best = None
    mode = checkpoint.get("best_mode", "auto") if name == ranked else "auto"
    with suppress(UserError):  # it is unknown for some metrics whether high values are good
        choose = max if highest_is_best(name, mode, "checkpoint.best_mode") else min
        best = choose(finite, key=lambda index: values[index])
    compared = Comparison.of(item.run for item in items)
    varied = {key: [_number_or_text(compared.of_run(item.run)[key]) for item in items] for key in compared.keys}
    return Results(name, values, varied, best)


def _number_or_text(value: str) -> int | float | str:
    try:
        if value.lstrip("+-").isdigit():
            return int(value)
        return float(value)
    except ValueError:
        return value
