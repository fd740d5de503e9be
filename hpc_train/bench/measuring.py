"""Runs a benchmark: its command line, its workers on this machine or a Slurm step, and its job in Slurm."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from hpc_train.bench.request import REQUEST, WorkerRequest, read_progress, read_result
from hpc_train.config.options import OptionParser
from hpc_train.config.schema import Config, MlflowConfig, WandbConfig
from hpc_train.elastic.agent import AgentOptions, run_agent
from hpc_train.errors import UserError
from hpc_train.launch import command_job
from hpc_train.launch.command_job import CommandJob
from hpc_train.launch.executors.slurm import SlurmJobExecutor
from hpc_train.launch.gpus import depends_on_gpu_types, gpu_types_here
from hpc_train.launch.job import Job
from hpc_train.launch.request import check_config, compose_job, parse_line
from hpc_train.launch.sbatch import arguments, options
from hpc_train.layout.layout import JobShape, Layout
from hpc_train.machine.allocation import current_allocation, workers_per_node
from hpc_train.machine.temporary import BENCH, TemporaryDirectory
from hpc_train.run.code import FrozenCode
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import freeze
from hpc_train.run.owner import open_run
from hpc_train.run.streams import unescaped

NOT_FOR_MEASURING = ("signal", "requeue", "no-requeue", "no-kill", "open-mode")  # options of a job that trains
_POLL_S = 1.0


def bench_parser(name: str, usage: str, description: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of ``bench NAME``, which takes overrides and ``--json``.

    Args:
        usage: the other arguments. examples: arguments of example calls of ``bench NAME``.
    """
    command = f"python -m hpc_train bench {name}"
    parser = OptionParser(
        prog=command,
        usage=f"{command} {usage} [--json]",
        description=f"{description} It takes the same overrides as training.",
        epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def add_blocks(parser: argparse.ArgumentParser, steps: int, pairs: int) -> None:
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help="steps per block (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=pairs, metavar="N", help="number of blocks (default: %(default)s)")


def refuse_below_one(options: argparse.Namespace, *names: str) -> None:
    """Raises UserError if the number of one of the options is less than 1."""
    if min(getattr(options, name) for name in names) < 1:
        flags = [f"--{name}" for name in names]
        raise UserError(
            f"{', '.join(flags)} must be at least 1",
            where=", ".join(flags),
            fix="a positive number, or omit the option",
        )


def config_of(words: list[str], several_nodes: bool = False) -> Config:
    """Composes the config of ``words``, the command line of a training. Raises UserError if the words are invalid or
    describe several jobs, or this is a Slurm step of several nodes."""
    nodes = current_allocation().nodes
    if nodes > 1 and not several_nodes:
        raise UserError(
            f"this benchmark runs on one node, but the Slurm step has {nodes}",
            where="srun --nodes",
            fix="srun --nodes=1 python -m hpc_train bench …",
        )
    return compose_job(parse_line(words), "bench").config


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
    request: WorkerRequest,
    entry: str,
    root: Path | None = None,
    failures: list[str] | None = None,
    code: FrozenCode | None = None,
    trust_owner: bool = False,
    part: str = "",
) -> tuple[int, dict[str, Any] | None]:
    """Runs workers that measure what ``request`` describes; returns the exit code and, on success, the result.

    In a Slurm step of several nodes, every node calls this function and the first one gets the result.

    Args:
        entry: the function that a worker calls, as "module:function".
        root: parent of the temporary run directory; None uses the directory for temporary files, and on several nodes
            ``run.root``.
        failures: a list that receives the class of each failure; all files are then removed. With None, the log of a
        failure is kept. code: the frozen code that agents and workers start from; None uses the current directory.
        trust_owner: whether the code may be another user's. part: distinguishes the calls in one Slurm step.
    """
    allocation = current_allocation()
    if root is None and allocation.nodes > 1:
        root = Path(config.run.root)
    run = RunDirectory(
        (root or Path()) / f"{BENCH}{allocation.launch_id}{part}"
    )  # shared by all nodes of this Slurm step
    if allocation.node_rank > 0:
        _wait_for(run.path / REQUEST, config.elastic.join_timeout_s)
        open_run(run, "agent", trust_owner)
        return run_agent(run, AgentOptions(entry)), None
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
    temporary = None
    if allocation.nodes == 1:
        temporary = TemporaryDirectory.make(BENCH, root or Path(tempfile.gettempdir()))
        run = RunDirectory(temporary.path)
    # a tracker's process would run next to the workers that are measured
    untracked = replace(config.telemetry, wandb=WandbConfig(mode="disabled"), mlflow=MlflowConfig(), tensorboard=False)
    show = (lambda: _show(run)) if sys.stderr.isatty() else None
    result = None
    try:
        freeze(replace(config, telemetry=untracked), run, code=code, trust_owner=trust_owner)
        request.write(run)  # the other nodes wait for this file
        exit_code = run_agent(run, AgentOptions(entry), on_tick=show)
        if exit_code == Exit.DONE:
            result = read_result(run)
        if failures is not None:
            failures += [event.failure for event in run.read_events() if event.kind.is_failure and event.failure]
        return exit_code, result
    finally:
        # the message of a failure names its log, so the log must remain
        keeps_files = failures is None and result is None and any(run.logs.glob("*"))
        if keeps_files and temporary is not None:
            temporary.keep()
        elif temporary is not None:
            temporary.remove()
        elif not keeps_files:
            rmtree(run.path)


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
    status = "starting"
    if progress is not None:
        status = f"{progress[0] + 1} of {progress[1]}"
    print(f"\r{status:<30}\r", end="", file=unescaped(sys.stderr), flush=True)


def submit(job: Job, words: Sequence[str], folder: Path, executor: SlurmJobExecutor) -> CommandJob:
    """Submits ``bench WORDS`` with the resources of ``job``, as one task per node. Raises UserError if Slurm does not
    respond, or rejects the job.

    Args:
        words: the benchmark with its arguments, among them ``--json``.
        folder: directory for the output of the job.
    """
    sbatch_options = options(job, executor.site)
    resources = arguments({name: value for name, value in sbatch_options.items() if name not in NOT_FOR_MEASURING})
    return command_job.submit(["bench", *words], job.config, folder, resources, job=job)


def result_of(job: CommandJob) -> dict[str, Any] | None:
    """Waits for a job of ``submit``; returns its JSON object, or None if the job fails or prints none."""
    code = command_job.wait(job)
    until = time.monotonic() + command_job.SETTLE_S
    while code == Exit.DONE and time.monotonic() < until:  # on a network file system the log may arrive later
        with suppress(FileNotFoundError, StopIteration, ValueError):
            # on several nodes the agents print other lines as well
            lines = job.log.read_text(encoding="utf-8").splitlines()
            return dict(json.loads(next(line for line in reversed(lines) if line.startswith("{"))))
        time.sleep(_POLL_S)
    print(f"job {job.job_id} has no result (exit code {code}): {job.log}", file=sys.stderr)
    return None
