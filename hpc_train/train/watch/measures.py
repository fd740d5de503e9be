"""Measures every training step on every rank: throughput, the time of each part, and the balance of a pipeline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import astuple, dataclass, field

import torch
from torch import nn

from hpc_train.config.schema import Config
from hpc_train.data.dataset import Dataset
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.layout.recomputation import recomputation_of
from hpc_train.machine.allocation import current_allocation
from hpc_train.machine.kernel_counters import Traffic, read_traffic
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.collectives import gather_plain
from hpc_train.parallel.local_replicas import across_replicas
from hpc_train.parallel.mesh import Mesh, all_gather_tensor
from hpc_train.run.event_log import EventLog
from hpc_train.train.watch.step_clock import StepClock
from hpc_train.train.watch.stragglers import RankTimes, SlowRankWatch, over_ranks
from hpc_train.train.watch.utilization import (
    FlopCount,
    GpuUtilization,
    Peak,
    count_mean_flops,
    device_peak,
    peak_device_memory,
    peak_host_memory,
)


class Measures:
    """Measures the steps of this rank and combines them with the measurements of the other ranks at log steps.

    Args:
        first_of_node: whether this rank reads the counters of the NICs of its node.

    Attributes:
        rows: the measurements of all ranks at the last log step, the same on every rank.
    """

    def __init__(self, config: Config, mesh: Mesh, first_of_node: bool) -> None:
        self._mesh = mesh
        self._ddp = mesh.layout.dp_cp > 1 and mesh.layout.kind.waits_in_backward
        # collectives of tensor and context parallelism inside compiled layers cannot be observed
        inside = mesh.layout.cp * mesh.layout.tp > 1 and config.train.compile
        self._observes_communication = mesh.layout.world_size > 1 and not inside
        self.clock = StepClock(mesh.device)
        self._gpu = GpuUtilization(mesh.device)
        self._first_of_node = first_of_node
        self._traffic = self._read_traffic()
        self.rows: list[RankTimes] = []
        self._watch: tuple[SlowRankWatch, EventLog] | None = None

    @contextmanager
    def watching(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        """Measures during this context, which encloses all steps.

        Args:
            parts: the modules of the engine.
        """
        with self.clock.watching(parts if self._ddp else (), pipeline=self._mesh.layout.pp > 1):
            yield

    def go_on(self, mesh: Mesh) -> Measures:
        """Returns the measures of the replicas that are left, which ``mesh`` has."""
        left = copy(self)
        left._mesh = mesh
        left._watch = None  # it knows the nodes of all ranks
        return left

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures one step during this context."""
        with self.clock.step():
            yield
        self._gpu.look()

    def over_ranks(self, interval: Interval) -> dict[str, float]:
        """Returns metric name -> value over all ranks since the last call, up to ``StepClock.cut`` if that was called
        since. Collective."""
        times = self.clock.read()
        before = self._traffic
        self._traffic = self._read_traffic()
        passed = self._traffic.since(before)
        measured = RankTimes(
            seconds=interval.seconds,
            steps=interval.steps,
            data_s=interval.waited_s,
            memory_bytes=peak_device_memory(self._mesh.device) or peak_host_memory(),
            communication_s=times.communication_s if self._observes_communication else None,
            bubble_s=times.bubble_s if self._mesh.layout.pp > 1 else None,
            gpu_util=self._gpu.take(),
            rdma_sent=passed.rdma_sent,
            rdma_received=passed.rdma_received,
            net_sent=passed.net_sent,
            net_received=passed.net_received,
            steps_s=times.steps_s,
        )
        self.rows = rows = _gathered(measured, self._mesh)
        if self._watch is not None:
            watch, events = self._watch
            straggler = watch.look(rows)
            if straggler is not None:
                events.write("straggler", **straggler.details())
        return over_ranks(rows, self._mesh.layout)

    def watch_nodes(self, events: EventLog) -> None:
        """Starts to write stragglers, for which ranks on other nodes wait, to ``events`` on rank 0. Collective."""
        nodes: list[str] = gather_plain(current_allocation().node_name, self._mesh.control)
        if self._mesh.rank == 0:
            self._watch = SlowRankWatch(self._mesh.layout, nodes), events

    def cost(self, steps: int, step: Callable[[], object], log_every: int, rounds: int = 20) -> dict[str, float]:
        """Measures the overhead of the measurements in seconds per step, in each step and at log steps. Collective.

        Args:
            steps: the number of calls of ``step`` over which the timed intervals per step are counted.
        """
        before = self.clock.stretches
        with self.watching([]):
            for _ in range(steps):
                with self.clock.step():
                    step()
        intervals = (
            self.clock.stretches - before
        ) / steps + self._ddp  # the interval of DDP is only timed with its modules
        begin = time.perf_counter()
        for _ in range(rounds):
            self.over_ranks(Interval(1.0, 1, 0.0))
        at_log_steps = (time.perf_counter() - begin) / rounds
        seconds = intervals * self.clock.seconds_per_stretch() + at_log_steps / log_every
        return {"seconds_per_step": seconds, "timed_intervals_per_step": intervals, "seconds_at_log_step": at_log_steps}

    def _read_traffic(self) -> Traffic:
        return read_traffic() if self._first_of_node else Traffic()


@dataclass(frozen=True)
class Interval:
    """Describes the time between two lines of metrics: its seconds, steps, and seconds spent waiting for data."""

    seconds: float
    steps: int
    waited_s: float


@dataclass
class Meter:
    """Computes throughput with the clock of the host, without pauses for saves and evaluations.

    Attributes:
        flops: FLOPs of one sample; None if unknown.
        peak: of all devices together; None if unknown.
        interval: the interval of the last ``read``.
        waited_s: total seconds spent waiting for data.
    """

    flops: FlopCount | None = None
    peak: Peak | None = None
    interval: Interval = Interval(0.0, 0, 0.0)
    _began: float = field(default_factory=time.perf_counter)
    _paused: float = 0.0
    _saved: float = 0.0
    _verified: float = 0.0
    _waited: float = 0.0
    _steps: int = 0
    _samples: int = 0
    _tokens: int = 0
    waited_s: float = 0.0
    _all_seconds: float = 0.0
    _all_tokens: int = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time in this context as time spent waiting for data."""
        began = time.perf_counter()
        yield
        waited = time.perf_counter() - began
        self._waited += waited
        self.waited_s += waited

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Excludes the time in this context, e.g. an evaluation or a save, from the training time."""
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Counts the time in this context as a save that blocks training."""
        began = time.perf_counter()
        with self.pausing():
            yield
        self._saved += time.perf_counter() - began

    def verified(self, seconds: float) -> None:
        """Counts the time in which a step was verified; it is part of the training time."""
        self._verified += seconds

    def count(self, samples: int, tokens: int) -> None:
        """Counts one step."""
        self._steps += 1
        self._samples += samples
        self._tokens += tokens

    def read(self) -> dict[str, float]:
        """Returns metric name -> value since the last ``read`` and starts a new interval."""
        now = time.perf_counter()
        seconds = max(now - self._began - self._paused, 1e-9)
        rates = {
            "step_s": seconds / max(1, self._steps),
            "tokens_per_s": self._tokens / seconds,
            "samples_per_s": self._samples / seconds,
            "data_wait_share": min(1.0, self._waited / seconds),
            "save_s": self._saved,
        }
        if self._verified:
            rates["verify_s"] = self._verified
        if self.flops is not None and self.peak is not None:
            shares = self.flops.utilization(rates["samples_per_s"], self.peak)
            rates |= {name: shares[name] for name in ("mfu", "mfu_of_precision", "hfu") if name in shares}
        self.interval = Interval(seconds, self._steps, min(seconds, self._waited))
        self._all_seconds += seconds
        self._all_tokens += self._tokens
        self._began = now
        self._paused = self._saved = self._verified = self._waited = 0.0
        self._steps = self._samples = self._tokens = 0
        return rates

    @property
    def mean_tokens_per_s(self) -> float:
        """Returns the mean rate over all intervals that were read."""
        return self._all_tokens / max(self._all_seconds, 1e-9)


def make_meter(config: Config, mesh: Mesh, dataset: Dataset) -> Meter:
    """Returns the meter of a run. It computes the MFU if the model and the devices are known."""
    if mesh.device.type != "cuda":
        return Meter()
    precision = config.precision
    per_device = device_peak(mesh.device, precision.name, precision.tf32)
    if per_device is None or config.model.kind == "custom":
        return Meter()
    model = build_model(config.model, config.train.seed)  # on the meta device, which needs no memory or time
    if not isinstance(model, Model):
        return Meter()
    recomputation = recomputation_of(config, mesh.layout)
    count = count_mean_flops(model, dataset, dataset.inputs_shape(), recomputation, loss_form(config, mesh.layout))
    return Meter(count, per_device.times(mesh.layout.world_size)) if count.model else Meter()


def _gathered(times: RankTimes, mesh: Mesh) -> list[RankTimes]:
    """Returns the values of all ranks in order, with one small all-gather on the CPU. Collective."""
    values = [math.nan if value is None else float(value) for value in astuple(times)]
    gathered = torch.empty(mesh.layout.world_size * len(values), dtype=torch.float64)
    with across_replicas(mesh):
        all_gather_tensor(gathered, torch.tensor(values, dtype=torch.float64), group=mesh.control)
    rows = []
    for row in gathered.view(-1, len(values)).tolist():
        seconds, steps, data_s, memory, *others = row
        optional = [None if math.isnan(value) else value for value in others]
        rows.append(RankTimes(seconds, int(steps), data_s, int(memory), *optional))
    return rows
