"""``python -m hpc_train agent RUN_DIR`` runs the agent of this node for a frozen run; batch scripts call it."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpc_train.cluster.allocation import refuse_misplaced
from hpc_train.elastic.agent import run_agent
from hpc_train.run.code import reexec_from_snapshot
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load


def main(arguments: list[str]) -> int:
    refuse_misplaced()
    parser = argparse.ArgumentParser(prog="python -m hpc_train agent", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="the run directory that `python -m hpc_train freeze …` printed")
    run = RunDirectory(parser.parse_args(arguments).run_dir.absolute())
    load(run)
    reexec_from_snapshot(run)
    return run_agent(run)
