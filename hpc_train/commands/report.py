"""``python -m hpc_train report RUN|SWEEP`` writes a page about a run or a sweep, as one HTML file."""

from __future__ import annotations

import json
from pathlib import Path

from hpc_train.config.options import OptionParser
from hpc_train.errors import UserError
from hpc_train.planner.machine import read_machine
from hpc_train.report.page.build import write_page
from hpc_train.run.exits import Exit
from hpc_train.run.processes import without_collector


def main(arguments: list[str]) -> int:
    """Writes the page. Raises UserError if there is no such run or sweep, or the file cannot be written."""
    parser = OptionParser(
        prog="python -m hpc_train report",
        description="Writes a page about a run or a sweep: what happened and what to do, loss, time, throughput, "
        "memory, waiting, nodes, faults, settings, and the commands that reproduce it. It is one HTML file without "
        "scripts.",
    )
    parser.add_argument("target", metavar="RUN|SWEEP", help="a run or sweep directory, or its name")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="the file (default: report.html in the directory of the run)"
    )
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="the machine of the run, if its CPUs or GPUs are not recognized; records the error of the prediction, "
        "which corrects later plans",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the file")
    options = parser.parse_args(arguments)
    try:
        with without_collector():  # which, for a long run, would take a tenth of the time and find nothing
            machine = None if options.machine is None else read_machine(options.machine)
            path = write_page(options.target, options.out, machine)
    except OSError as error:
        raise UserError(
            f"the report cannot be written: {error}",
            where="--out",
            fix="--out FILE in a directory that you may write to",
        ) from error
    print(json.dumps({"out": str(path)}) if options.json else f"report: {path}")
    return Exit.DONE
