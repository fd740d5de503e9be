"""``python -m hpc_train bench machine`` measures the numbers of a machine file, which ``plan --machine FILE`` reads.

It runs on one node, on the nodes of a Slurm step with one task per node, or with ``--submit`` as a Slurm job.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.bench.job import submit, wait
from hpc_train.bench.machine_figures import machine_of
from hpc_train.bench.measuring import config_of, run_benchmark
from hpc_train.bench.request import MachineRequest
from hpc_train.config.schema import Config
from hpc_train.config.values import with_all_workers
from hpc_train.errors import UserError
from hpc_train.launch.executors.slurm import SlurmJobExecutor
from hpc_train.launch.request import check_job
from hpc_train.machine.allocation import current_allocation, workers_per_node
from hpc_train.planner.machine import Machine, parse_machine
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.files import write_text

ENTRY = "hpc_train.bench.machine_worker:measure_machine"
SECONDS = 1.5  # of a measurement, of which there are about forty

_EPILOG = """\
examples:
  python -m hpc_train bench machine --out my-node.json
  python -m hpc_train bench machine cluster.nodes=2 cluster.partition=gpu cluster.time=00:15:00 --submit
"""


def main(arguments: list[str]) -> int:
    """Measures, writes the file, prints what is in it and returns the exit code."""
    options, rest = _parser().parse_known_args(arguments)
    _check(options)
    if options.submit:
        return _submit(options, rest)
    config = config_of(rest, several_nodes=True)
    nodes = current_allocation().nodes
    gpus, workers = workers_per_node(config.cluster)
    cores = 0 if gpus else len(os.sched_getaffinity(0))
    ranks = workers if gpus else min(workers, cores)
    root = Path(config.run.root) if nodes > 1 else None
    code, result = run_benchmark(_measuring(config, nodes, ranks), MachineRequest(options.seconds), ENTRY, root)
    if result is None:
        return code
    machine = machine_of(result, cores, options.out.stem, _source(result)).shared_by(workers)
    try:
        write_text(options.out, json.dumps(machine.to_json(), indent=1) + "\n")
    except OSError as error:
        fix = "--out FILE in a directory that exists and that you may write to"
        raise UserError(f"{options.out}: {error.strerror}", where="--out", fix=fix) from error
    print(json.dumps(machine.to_json()) if options.json else report(machine, options.out))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train bench machine",
        usage="python -m hpc_train bench machine [overrides] [--out FILE] [--submit] [--seconds S] [--json]",
        description="Measures in about three minutes the rates of matrix products, attention, memory and copies, the"
        " time to start a kernel, and latency and bandwidth of collectives, and writes them as a machine file for plan."
        " With one node it does not measure the network between nodes. It takes the same overrides as a training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("machine.json"),
        metavar="FILE",
        help="the file to write (default: %(default)s)",
    )
    parser.add_argument("--submit", action="store_true", help="measure in a Slurm job on cluster.nodes nodes")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help="length of a measurement (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the content of the file")
    return parser


def _check(options: argparse.Namespace) -> None:
    if not 0 < options.seconds < float("inf"):
        raise UserError(f"--seconds is {options.seconds:g}", where="--seconds", fix="a positive number")
    if options.out.suffix != ".json":
        raise UserError(
            f"plan reads machine files whose names end in .json, not {options.out}",
            where="--out",
            fix="--out NAME.json",
        )


def _measuring(config: Config, nodes: int, ranks: int) -> Config:
    """Returns ``config`` with all ranks as replicas, without spare nodes, TF32 and the checks before a training."""
    config = with_all_workers(config, nodes * ranks)
    return replace(
        config,
        cluster=replace(config.cluster, nodes=nodes, cpu_workers=ranks, preflight="off"),
        elastic=replace(config.elastic, spares=0, min_nodes=None),
        precision=replace(config.precision, tf32=False),
    )


def _source(result: dict[str, Any]) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    device = result["device"] if result["units"] else f"CPU, {result['threads']} threads of a rank"
    ranks = f"{result['nodes']} x {result['ranks_per_node']} ranks"
    return f"bench machine on {current_allocation().node_name}, {today}, torch {result['torch']}, {device}, {ranks}"


def report(machine: Machine, path: Path) -> str:
    """Returns the figures, and which of them were not measured."""
    lines = [f"{machine.device}: {path}"]
    for name, figure in machine.figures.items():
        source = "" if figure.kind == "measured" else f": {figure.source}"
        lines.append(f"{name:<20} {figure.value:>10.4g}  {figure.kind}{source}")
    others = [name for name, figure in machine.figures.items() if figure.kind != "measured"]
    if others:
        lines.append(f"not measured here: {', '.join(others)}")
    lines.append(f"use it with: python -m hpc_train plan --machine {path}")
    return "\n".join(lines)


def _submit(options: argparse.Namespace, rest: list[str]) -> int:
    """Runs the same command in a Slurm job, which writes the file, and waits for it."""
    config = config_of(rest)
    executor = SlurmJobExecutor()
    shape = executor.shape(config)
    folder = Path(config.run.root).absolute() / f"machine-{secrets.token_hex(3)}"
    job = check_job(with_all_workers(config, shape.nodes * shape.workers), RunDirectory(folder))
    folder.mkdir(parents=True)
    out = options.out.absolute()
    words = ["machine", *rest, "--out", str(out), "--seconds", str(options.seconds), "--json"]
    measurement = submit(job, words, folder / "job", executor)
    print(f"Slurm job {measurement.job_id}, output in {measurement.log}", flush=True)
    try:
        result = wait(measurement)
    except KeyboardInterrupt:
        print(f"job {measurement.job_id} keeps running and writes {out}; scancel {measurement.job_id} cancels it")
        return Exit.DETACHED
    if result is None:
        return Exit.FAILED
    print(json.dumps(result) if options.json else report(parse_machine(result, str(out)), options.out))
    return Exit.DONE
