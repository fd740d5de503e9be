"""What the benchmarks have in common: the config of a command line, and workers that measure in a run directory."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from hpc_train.bench.request import REQUEST, read_progress, read_result
from hpc_train.cluster.allocation import Allocation, current_allocation
from hpc_train.config.arguments import CommandLine, expand, with_right_plus
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.elastic.agent import run_agent
from hpc_train.errors import UserError
from hpc_train.launch.launcher import register_launcher
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import freeze

PREFIX = "hpc_train-bench-"  # of run directories


class BenchRequest(Protocol):
    """What is to be measured."""

    def write(self, run: RunDirectory) -> None: ...


def config_of(arguments: list[str], several_nodes: bool = False) -> Config:
    """The config of ``arguments``, which are those of a training.

    Raises:
        UserError: they are none, or of several jobs; or this is a Slurm step of several nodes.
    """
    if current_allocation().nodes > 1 and not several_nodes:
        raise UserError(
            "bench measures the workers of one node",
            where="the Slurm step of several nodes",
            fix="srun --nodes=1 python -m hpc_train bench …",
        )
    register_launcher()
    line = CommandLine.parse(with_right_plus(arguments))
    if line.multirun or len(expand(line.overrides)) > 1:
        raise UserError("bench measures one job", where="the command line", fix="one value for each key, and no -m")
    with line.composer() as compose:
        return typed(compose(line.overrides))


def measured(
    config: Config, request: BenchRequest, entry: str, root: Path | None = None, failures: list[str] | None = None
) -> tuple[int, dict[str, Any] | None]:
    """Starts workers that do what ``request`` asks for; returns the exit code, and the result where they are done.

    In a Slurm step of several nodes each of them calls it, and the first has the result.

    Args:
        entry: what a worker calls, as "module:function".
        root: where the run directory lies meanwhile; the place for temporary files without it.
        failures: gets the class of each failure, and nothing of a failure stays; without it the log does.
    """
    allocation = current_allocation()
    if allocation.node_rank > 0:
        run = _run_of_step(allocation, root)
        _wait_for(run.path / REQUEST, config.elastic.join_timeout_s)
        return run_agent(run, entry=entry), None
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
    several = allocation.nodes > 1
    run = _run_of_step(allocation, root) if several else RunDirectory(Path(tempfile.mkdtemp(prefix=PREFIX, dir=root)))
    result = None
    try:
        freeze(config, run)
        request.write(run)  # the other nodes wait for it
        code = run_agent(run, (lambda: _show(run)) if sys.stderr.isatty() else None, entry=entry)
        if code == Exit.DONE:
            result = read_result(run)
        if failures is not None:
            failures += [event["class"] for event in run.read_events() if event["event"] == "worker_failed"]
        return code, result
    finally:
        if (
            failures is not None or result is not None or not any(run.logs.glob("*"))
        ):  # the log of a failure stays, where its message says
            shutil.rmtree(run.path)


def _run_of_step(allocation: Allocation, root: Path | None) -> RunDirectory:
    """The same on all nodes of this start of the step."""
    return RunDirectory((root or Path()) / f"{PREFIX}{allocation.launch_id}")


def _wait_for(path: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while path not in set(path.parent.glob("*")):  # listed: a network file system remembers what was not there
        if time.monotonic() > until:
            raise UserError(
                f"the first node has not written {path} in {seconds:g} s",
                where="run.root",
                fix="run.root=DIR that all nodes share",
            )
        time.sleep(0.2)


def _show(run: RunDirectory) -> None:
    progress = read_progress(run)
    text = "starting" if progress is None else f"{progress[0] + 1} of {progress[1]}"
    print(f"\r{text:<30}\r", end="", file=sys.stderr, flush=True)
