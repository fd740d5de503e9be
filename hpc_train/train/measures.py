"""What is measured of every step while training goes on, on every rank, and told with each line of metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from hpc_train.cluster.allocation import current_allocation
from hpc_train.cluster.nic_counters import Traffic, read_traffic
from hpc_train.config.schema import Config
from hpc_train.measure.gpu_utilisation import GpuUtilisation
from hpc_train.measure.late_rank import LateRankWatch
from hpc_train.measure.ranks import RankTimes, gather, over_ranks
from hpc_train.measure.step_clock import StepClock
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.events import EventLog
from hpc_train.train.meter import Interval, peak_memory_bytes


class Measures:
    """Of this rank; together with those of the others at log steps.

    Args:
        first_of_node: whether this rank reads the counters of its node's network cards.
    """

    def __init__(self, config: Config, mesh: Mesh, first_of_node: bool) -> None:
        self._mesh = mesh
        self._ddp = mesh.layout.dp > 1 and mesh.layout.data_parallel == "ddp"
        # the functional collectives of tensor parallelism inside compiled layers are not seen
        self._sees_communication = mesh.layout.world_size > 1 and not (mesh.layout.tp > 1 and config.train.compile)
        self.clock = StepClock(mesh.device)
        self._gpu = GpuUtilisation(mesh.device)
        self._first_of_node = first_of_node
        self._traffic = self._read_traffic()
        self._late_rank: LateRankWatch | None = None
        self._events: EventLog | None = None

    @contextmanager
    def watching(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        """Around all steps. ``parts``: of the engine."""
        with self.clock.watching(parts if self._ddp else (), pipeline=self._mesh.layout.pp > 1):
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step."""
        with self.clock.step():
            yield
        self._gpu.look()

    def over_ranks(self, interval: Interval) -> dict[str, float]:
        """What all ranks measured since the last call, under the keys of the metrics. Collective."""
        rows = gather(self._own(interval), self._mesh)
        late = None if self._late_rank is None else self._late_rank.look(rows)
        if late is not None and self._events is not None:
            self._events.write("straggler", **late.details())
        return over_ranks(rows, self._mesh.layout)

    def watch_nodes(self, events: EventLog) -> None:
        """From now on a rank that those on other nodes wait for is named in ``events`` of rank 0. Collective."""
        nodes: list[str] = [""] * self._mesh.layout.world_size
        dist.all_gather_object(nodes, current_allocation().node_name, group=self._mesh.control)
        if self._mesh.rank == 0:
            self._late_rank, self._events = LateRankWatch(self._mesh.layout, nodes), events

    def cost(self, steps: int, step: Callable[[], None], log_every: int, rounds: int = 20) -> dict[str, float]:
        """What measuring takes, in isolation: seconds per step, between and at log steps. Collective.

        Args:
            steps: so many calls of ``step`` tell how often something is timed in a step.
        """
        before = self.clock.stretches
        with self.watching([]):
            for _ in range(steps):
                with self.clock.step():
                    step()
        stretches = (self.clock.stretches - before) / steps + self._ddp  # DDP's is not counted without its modules
        begin = time.perf_counter()
        for _ in range(rounds):
            self.over_ranks(Interval(1.0, 1, 0.0))
        at_log_steps = (time.perf_counter() - begin) / rounds
        seconds = stretches * self.clock.seconds_per_stretch() + at_log_steps / log_every
        return {"seconds_per_step": seconds, "stretches_per_step": stretches, "seconds_at_log_step": at_log_steps}

    def _own(self, interval: Interval) -> RankTimes:
        times, traffic, layout = self.clock.read(), self._read_traffic(), self._mesh.layout
        passed, self._traffic = traffic.since(self._traffic), traffic
        return RankTimes(
            seconds=interval.seconds,
            steps=interval.steps,
            data_s=interval.waited_s,
            memory_bytes=peak_memory_bytes(self._mesh.device),
            communication_s=times.communication_s if self._sees_communication else None,
            bubble_s=times.bubble_s if layout.pp > 1 else None,
            gpu_util=self._gpu.take(),
            rdma_sent=passed.rdma_sent,
            rdma_received=passed.rdma_received,
            net_sent=passed.net_sent,
            net_received=passed.net_received,
        )

    def _read_traffic(self) -> Traffic:
        return read_traffic() if self._first_of_node else Traffic()
