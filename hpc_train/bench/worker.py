"""Runs the workers of a benchmark: the parts that all of them share, and the measurements of ``bench collectives`` and
``doctor --measure``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hpc_train.bench.request import CollectivesRequest, WorkerRequest, write_progress, write_result
from hpc_train.config.schema import Config
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import Dataset
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import EXPERT_AXES, Mesh, largest
from hpc_train.parallel.pipeline.balance import plan_split
from hpc_train.preflight.bandwidth import OPERATIONS, expected_bandwidths, read_fabric
from hpc_train.preflight.measure import Ranks, measure
from hpc_train.preflight.run import nccl_log, preflight
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory, rank_writer
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.processes import join, leave

Request = TypeVar("Request", bound=WorkerRequest)


@dataclass(frozen=True)
class BenchRank:
    run: RunDirectory
    config: Config
    mesh: Mesh
    spec: WorkerSpec
    stop: StopFlag

    def write_progress(self, done: int, total: int) -> None:
        """Writes on rank 0 how many of the measurements are done."""
        if self.mesh.rank == 0:
            write_progress(self.run, done, total)

    def is_stopped(self) -> bool:
        """Returns whether a stop was requested on any rank. Collective."""
        return largest(float(self.stop.requested), self.mesh) > 0

    def setting(self) -> dict[str, Any]:
        """Returns the description of hardware and software that every result contains."""
        return {
            "world_size": self.mesh.layout.world_size,
            "device": device_name(self.mesh.device),
            "torch": torch.__version__,
        }


def measure_on_ranks(
    spec: WorkerSpec,
    stop: StopFlag,
    requested: type[Request],
    measurement: Callable[[BenchRank, Request], dict[str, Any] | None],
) -> Exit:
    """Joins the ranks and calls ``measurement``; rank 0 writes the result as ``bench-result.json``.

    Args:
        requested: the class of the request in ``bench-request.json``.
        measurement: returns the result, of which only rank 0's is used, or None on all ranks after a request to stop.
    """
    run = RunDirectory(Path(spec.run_dir))
    config = load(run)
    request = requested.read(run)
    mesh = join(spec, config)
    result = measurement(BenchRank(run, config, mesh, spec, stop), request)
    if result is not None and mesh.rank == 0:
        write_result(run, result)
    leave(mesh)
    if result is None:
        return Exit.STOPPED
    return Exit.DONE


@dataclass(frozen=True)
class Training:
    """Holds the parts of a training that benchmarks use. ``layers`` lists the layers of each pipeline stage."""

    dataset: Dataset
    layers: Sequence[range] | None
    engine: Engine
    optimizer: Optimizer

    @classmethod
    def build(cls, config: Config, mesh: Mesh) -> Training:
        dataset = build_dataset(config.data, "train", config.train.seed, config.precision.name)
        plan = plan_split(config, mesh, dataset)
        layers = None if plan is None else plan.layers
        engine = build_engine(config, mesh, layers)
        optimizer = Optimizer(config.optim, engine.named_parameters(), config.strategy.offload == "optimizer")
        return cls(dataset, layers, engine, optimizer)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "cpu"


def measure_collectives(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Times each operation at each size over all ranks, and along each axis of the layout that has fewer ranks."""
    return measure_on_ranks(spec, stop, CollectivesRequest, _collectives)


def _collectives(bench: BenchRank, request: CollectivesRequest) -> dict[str, Any] | None:
    mesh = bench.mesh
    groups = {"world": Ranks.world(mesh.device)}
    for axis in ("pp", "dp", "cp", "tp", *(EXPERT_AXES[1:] if mesh.layout.ep > 1 else ())):
        ranks = Ranks(mesh.group(axis), mesh.device)
        if 1 < ranks.size < groups["world"].size:
            groups[axis] = ranks
    operations = request.operations or OPERATIONS
    points = [(name, operation, size) for name in groups for operation in operations for size in request.sizes]
    rates: list[dict[str, Any]] = []
    for done, (name, operation, size) in enumerate(points):
        bench.write_progress(done, len(points))
        rate = measure(operation, size, groups[name], request.seconds)
        speeds = {"algorithm_gb_per_s": rate.algorithm / 1e9, "bus_gb_per_s": rate.bus / 1e9}
        rates.append({"group": name, **asdict(rate), **speeds})
        if bench.is_stopped():
            return None
    expected = expected_bandwidths(read_fabric(bench.run), bench.spec.gpus_per_node).world
    return bench.setting() | {
        "nodes": bench.spec.nodes,
        "backend": "nccl" if mesh.device.type == "cuda" else "gloo",
        "expected": expected and {"bus_gb_per_s": expected.bus / 1e9, "reason": expected.reason},
        "rates": rates,
    }


def run_preflight(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Runs the preflight; rank 0 writes its event as ``bench-result.json``."""
    run = RunDirectory(Path(spec.run_dir))
    config = load(run)
    writer = rank_writer(spec.rank)
    with closing(EventLog.open(run, writer, spec.attempt, spec.rank)) as events, nccl_log(spec, config, run) as log:
        mesh = join(spec, config)
        preflight(spec, config, run, mesh, events, log, always=True)
    if mesh.rank == 0:
        write_result(run, next(event for event in run.read_events() if event.name == "preflight"))
    leave(mesh)
    return Exit.DONE
