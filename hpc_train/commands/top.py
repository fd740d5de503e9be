"""``python -m hpc_train top [RUN|SWEEP...]`` shows runs live in the terminal."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from hpc_train.config.import_path import install_extra
from hpc_train.config.options import OptionParser
from hpc_train.config.run_path import default_root
from hpc_train.errors import UserError
from hpc_train.report.live_runs import Runs
from hpc_train.run.exits import Exit
from hpc_train.runs.lookup import find_runs


def main(arguments: list[str]) -> int:
    """Shows the view until the user quits. Raises UserError if textual is missing, standard output is not a terminal,
    or there is no such run."""
    parser = OptionParser(
        prog="python -m hpc_train top",
        description="Shows runs live: progress, loss, speed, and for the chosen run its curves, waiting times, "
        "pipeline stages and events. By default it shows all runs below the run root and all your runs in Slurm. It "
        "needs textual.",
    )
    parser.add_argument("targets", nargs="*", metavar="RUN|SWEEP", help="directories, or names (default: all)")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds (default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="print the rows once, one JSON object per run")
    options = parser.parse_args(arguments)
    if not 0.5 <= options.interval <= 3600:
        raise UserError(f"--interval is {options.interval:g}", where="--interval", fix="0.5 to 3600 seconds")
    for target in options.targets:
        find_runs(target, "top", unreadable=True)
    runs = Runs(Path(default_root()), options.targets)
    if options.json:
        for row in runs.rows():
            shown = {"state": row.view.state, "steps": row.view.steps, "metrics": row.view.metrics}
            print(json.dumps({"run": str(row.run.run.path), **shown}))
        return Exit.DONE
    if find_spec("textual") is None:
        fix = f"{install_extra('top')}, or use python -m hpc_train status"
        raise UserError("top needs the package textual, which is not installed", where="top", fix=fix)
    if not sys.stdout.isatty():
        raise UserError(
            "standard output is not a terminal", where="top", fix="use python -m hpc_train status, or --json"
        )
    from hpc_train.report.top import Top

    Top(runs, options.interval).run()
    return Exit.DONE
