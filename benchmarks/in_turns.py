"""Times the steps of several layouts of the same number of ranks, which take turns in the same processes.

What slows the machine slows all layouts. A measurement of a layout takes only its steps; processes start once.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.bench.step_worker import StepBench
from hpc_train.config.compose import compose, typed
from hpc_train.layout.validate import validate
from hpc_train.parallel.mesh import Mesh, join_mesh
from hpc_train.run.requests import StopFlag

WARMUP = 3  # steps of each layout
PATIENCE_S = 3600.0

Overrides = Sequence[str]


def seconds_in_turns(layouts: Mapping[str, Overrides], ranks: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Returns the seconds of a step of each layout in each round, each the mean of ``steps`` steps with one thread.

    Args:
        layouts: the overrides of each layout, for ``ranks`` ranks on the CPUs of this node.

    Raises:
        queue.Empty: a rank has failed, or the measurement took more than ``PATIENCE_S``.
    """
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    results = context.Queue()
    asked = ({name: [*each] for name, each in layouts.items()}, rounds, steps)
    processes = [context.Process(target=_measure, args=(rank, ranks, port, *asked, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        return dict(results.get(timeout=PATIENCE_S))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _measure(
    rank: int, ranks: int, port: int, layouts: Mapping[str, Overrides], rounds: int, steps: int, results: Any
) -> None:
    """Measures as one rank; rank 0 sends the seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    benches = {name: _bench(overrides, rank, ranks) for name, overrides in layouts.items()}
    for bench in benches.values():
        for _ in range(WARMUP):
            bench.step()
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    for _ in range(rounds):
        for name, bench in benches.items():
            seconds[name].append(_seconds(bench, steps))
    dist.barrier()  # rank 0's result ends the other processes
    if rank == 0:
        results.put(seconds)
        results.close()
        results.join_thread()
    os._exit(0)


def _bench(overrides: Overrides, rank: int, ranks: int) -> StepBench:
    config = typed(compose([*overrides]))
    mesh: Mesh = join_mesh(validate(config, 1, ranks), rank, torch.device("cpu"))
    return StepBench(config, mesh, StopFlag())


def _seconds(bench: StepBench, steps: int) -> float:
    dist.barrier(group=bench.mesh.control)
    begin = time.perf_counter()
    for _ in range(steps):
        bench.step()
    dist.barrier(group=bench.mesh.control)
    return (time.perf_counter() - begin) / steps
