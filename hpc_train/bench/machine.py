"""``python -m hpc_train bench machine`` measures the numbers of a machine file, which ``plan --machine FILE`` reads.

It runs on one node, on the nodes of a Slurm step with one task per node, or with ``--submit`` as a Slurm job. Numbers
that are not measured (such as the power, the fp8 rate and, on one node, the fabric) come from the shipped file of the
same GPU; without such a file, they are assumed. This module imports no torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.bench.measuring import bench_parser, config_of, result_of, run_benchmark, submit
from hpc_train.bench.request import MachineRequest
from hpc_train.config.values import with_all_workers
from hpc_train.errors import UserError
from hpc_train.launch.executors.slurm import SlurmJobExecutor
from hpc_train.launch.request import check_job
from hpc_train.layout.memory import COMMUNICATOR_BYTES
from hpc_train.machine.allocation import current_allocation, workers_per_node
from hpc_train.planner.machine import NAMES, OPTIONAL, Figure, Machine, parse_machine, recognized
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.files import write_text
from hpc_train.train.watch.peak_rates import peak_flops

ENTRY = "hpc_train.bench.machine_worker:measure_machine"
SECONDS = 1.5  # of one measurement; there are about forty

PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
UNMEASURED = ("fp8_flops", "fp8_share", "tp_matmul_share")
ASSUMED = {
    "fabric_bytes_per_s": (1.25e9, "10 Gbit/s Ethernet, which the ranks of a node share"),
    "fabric_latency_s": (5e-5, "an estimate for Ethernet"),
    "node_bytes_per_s": (10e9, "an estimate; the node has one device"),
    "node_latency_s": (2e-5, "an estimate; the node has one device"),
    "allocator_share": (0.05, "an estimate; it depends on the training"),
    "overlap_share": (0.3, "the share of the A100 and the H100; on CPUs nothing overlaps"),
}


def main(arguments: list[str]) -> int:
    options, rest = _parser().parse_known_args(arguments)
    if not 0 < options.seconds < float("inf"):
        raise UserError(f"--seconds is {options.seconds:g}", where="--seconds", fix="a positive number")
    if options.out.suffix != ".json":
        raise UserError(
            f"plan reads machine files whose names end in .json, not {options.out}",
            where="--out",
            fix="--out NAME.json",
        )
    if options.submit:
        return _submit(options, rest)
    config = config_of(rest, several_nodes=True)
    nodes = current_allocation().nodes
    gpus, workers = workers_per_node(config.cluster)
    ranks = workers
    cores = 0
    if not gpus:
        cores = len(os.sched_getaffinity(0))
        ranks = min(workers, cores)
    config = with_all_workers(config, nodes * ranks)
    config = replace(
        config,
        cluster=replace(config.cluster, nodes=nodes, cpu_workers=ranks, preflight="off"),
        elastic=replace(config.elastic, spares=0, min_nodes=None),
        precision=replace(config.precision, tf32=False),
    )
    code, result = run_benchmark(config, MachineRequest(options.seconds), ENTRY)
    if result is None:
        return code
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    device = result["device"]
    if gpus == 0:
        device = f"CPU, {result['threads']} threads of a rank"
    source = (
        f"bench machine on {current_allocation().node_name}, {today}, torch {result['torch']}, {device}, "
        f"{result['nodes']} x {result['ranks_per_node']} ranks"
    )
    machine = machine_of(result, cores, options.out.stem, source).shared_by(workers)
    try:
        write_text(options.out, json.dumps(asdict(machine), indent=1) + "\n")
    except OSError as error:
        fix = "--out FILE in a directory that exists and that you may write to"
        raise UserError(f"{options.out}: {error.strerror}", where="--out", fix=fix) from error
    print(json.dumps(asdict(machine)) if options.json else report(machine, options.out))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(
        "machine",
        "[overrides] [--out FILE] [--submit] [--seconds S]",
        "Measures in about three minutes the rates of matrix products, attention, memory and copies, the time to start"
        " a kernel, and latency and bandwidth of collectives, and writes them as a machine file for plan. With one node"
        " it does not measure the network between nodes.",
        [
            "python -m hpc_train bench machine --out my-node.json",
            "python -m hpc_train bench machine cluster.nodes=2 cluster.partition=gpu cluster.time=00:15:00 --submit",
        ],
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
    return parser


def report(machine: Machine, path: Path) -> str:
    lines = [f"{machine.device}: {path}"]
    others = []
    for name, figure in machine.figures.items():
        line = f"{name:<20} {figure.value:>10.4g}  {figure.kind}"
        if figure.kind != "measured":
            line += f": {figure.source}"
            others.append(name)
        lines.append(line)
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
    out = options.out.absolute()
    words = ["machine", *rest, "--out", str(out), "--seconds", str(options.seconds), "--json"]
    measurement = submit(job, words, folder, executor)
    print(f"Slurm job {measurement.job_id}, output in {measurement.log}", flush=True)
    try:
        result = result_of(measurement)
    except KeyboardInterrupt:
        print(f"job {measurement.job_id} keeps running and writes {out}; scancel {measurement.job_id} cancels it")
        return Exit.DETACHED
    if result is None:
        return Exit.FAILED
    print(json.dumps(result) if options.json else report(parse_machine(result, str(out)), options.out))
    return Exit.DONE


def fit_rate(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the rate R and the operations H in ``seconds = (operations + H) / R``: a product of H operations runs at
    R / 2.

    This is the least-squares fit of the relative errors; a negative H becomes 0. ``times`` holds the operations and the
    seconds of at least two products of different sizes."""
    flops, seconds = np.array(times).T
    per_flop, fixed = np.polyfit(flops, seconds, 1, w=1 / seconds)
    if fixed < 0 or per_flop <= 0:
        rates = flops / seconds
        return float((rates**2).sum() / rates.sum()), 0.0
    return float(1 / per_flop), float(fixed / per_flop)


def machine_of(result: Mapping[str, Any], cores: int, name: str, source: str) -> Machine:
    """Returns the machine that ``result`` describes.

    Args:
        result: what ``hpc_train.bench.machine_worker`` wrote.
        cores: the cores of a node without GPUs; 0 for a node with GPUs.
        source: the host, the date and the software of the measurement.
    """
    rates: dict[str, float] = dict(result["figures"])
    peaks = {}  # from the data sheet, or without one the rate of the largest product
    for precision in PRECISIONS:
        key = f"{precision}_flops"
        sheet = peak_flops(str(result["device"]), precision, units=result["units"])
        if sheet is None:
            peaks[key] = Figure(rates[key], "measured", f"{source}; the largest matrix product")
        else:
            peaks[key] = Figure(sheet, "table", "data sheet, without sparsity (hpc_train/train/watch/peak_rates.py)")
    peak = peaks[f"{result['precision']}_flops"].value
    measured = {key: value for key, value in rates.items() if key in NAMES and key not in peaks} | {
        "devices_per_node": result["ranks_per_node"],
        "matmul_share": min(1.0, rates["product_flops"] / peak),
        "attention_share": min(1.0, rates["attention_flops"] / peak),
        "cores": cores,
    }
    if not cores and result["nodes"] * result["ranks_per_node"] > 1:  # the planner adds the communicator of all ranks
        measured["reserved_bytes"] = max(0.0, rates["reserved_bytes"] - COMMUNICATOR_BYTES)
    figures = dict(OPTIONAL) | {key: Figure(value, "assumed", reason) for key, (value, reason) in ASSUMED.items()}
    device = f"{cores} CPU cores"
    if not cores:
        device = str(result["device"])
        shipped_machine = recognized(device)
        if shipped_machine is not None:
            figures |= {key: shipped_machine.figures[key] for key in (*ASSUMED, *UNMEASURED)}
    figures |= peaks
    figures |= {key: Figure(float(value), "measured", source) for key, value in measured.items()}
    return Machine(name, device, {key: figures[key] for key in NAMES})
