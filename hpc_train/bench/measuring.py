"""Composes the config of a benchmark's command line, and runs the workers that measure."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hpc_train.bench.request import REQUEST, read_progress, read_result
from hpc_train.config.schema import Config, MlflowConfig, WandbConfig
from hpc_train.elastic.agent import run_agent
from hpc_train.errors import UserError
from hpc_train.launch.gpus import depends_on_gpu_types, gpu_types_here
from hpc_train.launch.request import check_config, compose_job, parse_line
from hpc_train.layout.layout import JobShape, Layout
from hpc_train.machine.allocation import Allocation, current_allocation, workers_per_node
from hpc_train.machine.temporary import BENCH, TemporaryDirectory
from hpc_train.run.code import FrozenCode
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import freeze
from hpc_train.run.owner import open_run
from hpc_train.run.streams import unescaped


class BenchRequest(Protocol):
    """Describes what to measure."""

    def write(self, run: RunDirectory) -> None: ...


def config_of(arguments: list[str], several_nodes: bool = False) -> Config:
    """Composes the config of ``arguments``, which are those of a training.

    Raises:
        UserError: the arguments are invalid or describe several jobs, or this is a Slurm step of several nodes.
    """
    if current_allocation().nodes > 1 and not several_nodes:
        raise UserError(
            f"this benchmark runs on one node, but the Slurm step has {current_allocation().nodes}",
            where="srun --nodes",
            fix="srun --nodes=1 python -m hpc_train bench …",
        )
    return compose_job(parse_line(arguments), "bench measures one job").config


def check_here(config: Config) -> Layout:
    """Checks that ``config`` can run on the nodes of this Slurm step, or on this machine; returns its layout.

    Raises:
        UserError: as ``check_config``.
    """
    nodes = current_allocation().nodes
    gpus, workers = workers_per_node(config.cluster)
    types = gpu_types_here(config.cluster) if depends_on_gpu_types(config, gpus) else frozenset()
    return check_config(config, JobShape(nodes, nodes, gpus, workers, gpu_types=types))


def run_benchmark(
    config: Config,
    request: BenchRequest,
    entry: str,
    root: Path | None = None,
    failures: list[str] | None = None,
    code: FrozenCode | None = None,
    trust_owner: bool = False,
) -> tuple[int, dict[str, Any] | None]:
    """Runs workers that measure what ``request`` describes; returns the exit code and the result if they succeed.

    In a Slurm step of several nodes every node calls this function, and the first one gets the result.

    Args:
        entry: the function that a worker calls, as "module:function".
        root: parent of the temporary run directory; None uses the directory for temporary files.
        failures: receives the class of each failure, and all files are removed; None keeps the log of a failure.
        code: the frozen code that agents and workers start from; None uses the current directory.
        trust_owner: whether the code may be another user's.
    """
    allocation = current_allocation()
    if allocation.node_rank > 0:
        run = _run_of_step(allocation, root)
        _wait_for(run.path / REQUEST, config.elastic.join_timeout_s)
        open_run(run, "agent", trust_owner)
        return run_agent(run, entry=entry), None
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
    several = allocation.nodes > 1
    temporary = None
    if not several:
        temporary = TemporaryDirectory.make(BENCH, root or Path(tempfile.gettempdir()))
    run = _run_of_step(allocation, root) if temporary is None else RunDirectory(temporary.path)
    result = None
    try:
        freeze(_untracked(config), run, code=code, trust_owner=trust_owner)
        request.write(run)  # the other nodes wait for this file
        exit_code = run_agent(run, (lambda: _show(run)) if sys.stderr.isatty() else None, entry=entry)
        if exit_code == Exit.DONE:
            result = read_result(run)
        if failures is not None:
            failures += [event.failure for event in run.read_events() if event.kind.is_failure and event.failure]
        return exit_code, result
    finally:
        # the message of a failure names its log, so the log must remain
        keeps_files = failures is None and result is None and any(run.logs.glob("*"))
        if temporary is not None:
            temporary.keep() if keeps_files else temporary.remove()
        elif not keeps_files:
            shutil.rmtree(run.path)


def _untracked(config: Config) -> Config:
    """Returns ``config`` without trackers, whose process would run next to the workers that are measured."""
    off: dict[str, Any] = {
        "wandb": WandbConfig(mode="disabled"),
        "mlflow": MlflowConfig(),
        "tensorboard": False,
    }
    return replace(config, telemetry=replace(config.telemetry, **off))


def _run_of_step(allocation: Allocation, root: Path | None) -> RunDirectory:
    """Returns the run directory that all nodes of this Slurm step use."""
    return RunDirectory((root or Path()) / f"{BENCH}{allocation.launch_id}")


def _wait_for(path: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while path not in set(path.parent.glob("*")):  # a network file system would cache the failed lookup of a name
        if time.monotonic() > until:
            raise UserError(
                f"the first node did not write {path} within {seconds:g} s",
                where="run.root",
                fix="run.root=DIR with a directory that all nodes share",
            )
        time.sleep(0.2)


def _show(run: RunDirectory) -> None:
    progress = read_progress(run)
    status = "starting" if progress is None else f"{progress[0] + 1} of {progress[1]}"
    print(f"\r{status:<30}\r", end="", file=unescaped(sys.stderr), flush=True)
