"""Runs the workers that measure without training: those of ``bench collectives`` and ``doctor --measure``."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.bench.request import CollectivesRequest, write_progress, write_result
from hpc_train.parallel.mesh import Mesh
from hpc_train.preflight.bandwidth import OPERATIONS, Rate, expected_bandwidths, read_fabric
from hpc_train.preflight.measure import Ranks, measure
from hpc_train.preflight.run import nccl_log, preflight
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag
from hpc_train.train.processes import join, leave


def measure_all(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Times each operation at each size along all axes of the layout; rank 0 writes ``bench-result.json``."""
    run = RunDirectory(Path(spec.run_dir))
    config = load(run)
    request = CollectivesRequest.read(run)
    mesh = join(spec, config)
    groups = _groups(mesh)
    points = [(name, operation, size) for name in groups for operation in OPERATIONS for size in request.sizes]
    rates: list[dict[str, Any]] = []
    for done, (name, operation, size) in enumerate(points):
        if mesh.rank == 0:
            write_progress(run, done, len(points))
        rates.append(_rate_as_json(name, measure(operation, size, groups[name], request.seconds)))
        if groups["world"].largest(float(stop.requested)):
            leave(mesh)
            return Exit.STOPPED
    if mesh.rank == 0:
        write_result(run, _environment(mesh, spec, run) | {"rates": rates})
    leave(mesh)
    return Exit.DONE


def run_preflight(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Runs the preflight; rank 0 writes its event as ``bench-result.json``."""
    run = RunDirectory(Path(spec.run_dir))
    config = load(run)
    writer = f"rank-{spec.rank:04d}"
    with closing(EventLog.open(run, writer, spec.attempt, spec.rank)) as events, nccl_log(spec, config, run) as log:
        mesh = join(spec, config)
        preflight(spec, config, run, mesh, events, log, always=True)
    if mesh.rank == 0:
        write_result(run, next(event for event in run.read_events() if event.name == "preflight"))
    leave(mesh)
    return Exit.DONE


def _groups(mesh: Mesh) -> dict[str, Ranks]:
    """Returns the group of all ranks, and this rank's groups along axes that are neither trivial nor all ranks."""
    all_ranks = dist.group.WORLD
    assert all_ranks is not None, "join() has initialized it"
    world = Ranks(all_ranks, mesh.device)
    axes = {axis: Ranks(mesh.group(axis), mesh.device) for axis in ("pp", "dp", "cp", "tp")}
    return {"world": world} | {axis: ranks for axis, ranks in axes.items() if 1 < ranks.size < world.size}


def _rate_as_json(group: str, rate: Rate) -> dict[str, Any]:
    return {"group": group} | asdict(rate) | {
        "algorithm_gb_per_s": rate.algorithm / 1e9,
        "bus_gb_per_s": rate.bus / 1e9,
    }  # fmt: skip


def _environment(mesh: Mesh, spec: WorkerSpec, run: RunDirectory) -> dict[str, Any]:
    cuda = mesh.device.type == "cuda"
    expected = expected_bandwidths(read_fabric(run), spec.gpus_per_node).world
    return {
        "world_size": mesh.layout.world_size,
        "nodes": spec.nodes,
        "device": torch.cuda.get_device_name(mesh.device) if cuda else "cpu",
        "backend": "nccl" if cuda else "gloo",
        "torch": torch.__version__,
        "expected": None if expected is None else {"bus_gb_per_s": expected.bus / 1e9, "reason": expected.reason},
    }
