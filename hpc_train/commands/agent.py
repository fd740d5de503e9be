"""The command ``agent RUN_DIR`` of batch scripts: runs the agent of this node for a frozen run, without Hydra."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hpc_train.config.options import OptionParser
from hpc_train.config.roles import ROLE
from hpc_train.elastic.agent import AgentOptions, run_agent
from hpc_train.elastic.warm_parent.head_start import HeadStart
from hpc_train.machine.allocation import current_allocation, refuse_misplaced
from hpc_train.run.code import reexec_from_snapshot
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.run.owner import TRUST, open_run
from hpc_train.run.snapshot import check_copy
from hpc_train.run.streams import stdout_for_results
from hpc_train.schedulers.current import current_job


def start_agent(arguments: list[str], begun: HeadStart | None = None) -> int:
    refuse_misplaced()
    parser = OptionParser(prog="python -m hpc_train agent", description="Runs the agent of this node for a frozen run.")
    parser.add_argument("run_dir", type=Path, help="the run directory that `python -m hpc_train freeze …` printed")
    parser.add_argument(TRUST, action="store_true", help="continue the run although it belongs to another user")
    parser.add_argument(
        "--progress", action="store_true", help="print the progress on the first node, as a run in the foreground does"
    )
    parser.add_argument(
        "--json", action="store_true", help="print only one JSON object, on the first node at the end of the run"
    )
    parser.add_argument("--echo", action="store_true", help="print the output of this node's workers")
    parser.add_argument("--alternative", type=int, default=0, metavar="N", help="use job N of cluster.first")
    parser.add_argument(
        "--join", metavar="LAUNCH:FIRST", help="add the nodes of this job to a live run, with numbers from FIRST"
    )
    options = parser.parse_args(arguments)
    run = RunDirectory(options.run_dir.absolute())
    open_run(run, "agent", options.trust_owner)
    load(run)  # raises for a directory that is not a run, before this process is replaced
    is_first = current_allocation().node_rank == 0 and options.join is None
    if is_first:
        check_copy(run)
    reexec_from_snapshot(run)  # which also ends the head start, since its pipe is closed
    if not options.json:
        return _run(run, is_first, options, begun)
    with stdout_for_results() as results:
        code = _run(run, is_first, options, begun)
        if is_first:
            from hpc_train.runs.job_status import outcome, view_at_end

            print(outcome(run, view_at_end(run, code)), file=results)
    return code


def _run(run: RunDirectory, is_first: bool, options: argparse.Namespace, begun: HeadStart | None) -> int:
    if is_first and options.progress:
        from hpc_train.launch.executors.allocation import run_in_foreground  # other agents do not need its modules

        return run_in_foreground(run, None, begun)
    of_agent = AgentOptions(alternative=options.alternative, echo=options.echo, join=options.join)
    code = run_agent(run, of_agent, begun=begun)
    if is_first and ROLE not in os.environ:  # `report` writes the page of a role on demand
        from hpc_train.report.page.build import write_at_end  # other agents do not need its modules

        write_at_end(run)
    if current_job().job_id:
        return code  # the batch script reads the records of the agents
    from hpc_train.runs.job_status import final_code

    return final_code(code, run)
