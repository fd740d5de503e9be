"""Implements ``telemetry.profile``: traces, memory snapshots and a time breakdown of some steps on some ranks.

Profiling slows down the steps, mainly on the host. The breakdown shows which part of the trace is worth a look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from hpc_train.config.values import Profiled
from hpc_train.parallel.mesh import Mesh, synchronize
from hpc_train.run.directory import RunDirectory, rank_writer
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import write_json

Interval = tuple[float, float]

MEMORY_EVENTS = 100_000  # allocator events kept for a snapshot


class Profiler:
    """Profiles the configured steps; all ranks call ``begin`` and ``end`` around each step."""

    def __init__(self, request: Profiled | None, run: RunDirectory, mesh: Mesh, events: EventLog) -> None:
        self._request = request
        self._run = run
        self._mesh = mesh
        self._events = events
        self._has_begun = False
        self._profiler: profile | None = None  # None on ranks that are not profiled
        self._began = 0.0
        self._waited_s = 0.0

    def begin(self, step: int, waited_s: float) -> None:
        """Starts the profiler if ``step``, counted from 1, is the first profiled one.

        Args:
            waited_s: total seconds spent waiting for data.
        """
        if self._request is None or step != self._request.first or self._has_begun:
            return
        self._has_begun = True
        if self._request.has(self._mesh.rank):
            if self._mesh.device.type == "cuda":
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
                torch.cuda.synchronize(self._mesh.device)
            self._profiler = profile(activities=activities(self._mesh.device), profile_memory=True)
            self._profiler.start()
        self._began = time.perf_counter()
        self._waited_s = waited_s

    def end(self, step: int, waited_s: float, last: bool = False) -> None:
        """Stops the profiler after the last profiled step, or at the ``last`` step of the attempt. Collective."""
        if self._request is None or not self._has_begun or not (last or step == self._request.last):
            return
        self._has_begun = False
        breakdown = None
        if self._profiler is not None:
            name = replace(self._request, last=step).name
            breakdown = self._stop(self._profiler, name, waited_s - self._waited_s)
            self._profiler = None
        gathered: list[TimeBreakdown | None] = [None] * self._mesh.layout.world_size
        dist.all_gather_object(gathered, breakdown, group=self._mesh.control)
        if self._mesh.rank == 0:
            self._report(
                {rank: each for rank, each in enumerate(gathered) if each is not None}, self._request.first, step
            )

    def _stop(self, profiler: profile, name: str, data_s: float) -> TimeBreakdown:
        on_gpu = self._mesh.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._mesh.device)
        elapsed = time.perf_counter() - self._began
        profiler.stop()
        path = self._run.profile / f"{name}-{rank_writer(self._mesh.rank)}"
        with self._failures_reported():
            self._run.profile.mkdir(exist_ok=True)
            profiler.export_chrome_trace(f"{path}.json.gz")
            if on_gpu:
                torch.cuda.memory._dump_snapshot(f"{path}-memory.pickle")
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
        return time_breakdown(profiler.events() or [], elapsed, data_s, self._mesh.device, self._mesh.layout.pp > 1)

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        """Reports a file that cannot be written, e.g. on a full disk; the run continues without it."""
        try:
            yield
        except OSError as error:
            print(f"cannot write the profile to {self._run.profile}: {error}")

    def _report(self, breakdowns: dict[int, TimeBreakdown], first: int, last: int) -> None:
        table = summary(breakdowns, max(1, last - first + 1))
        report = f"profile of steps {first} to {last} in {self._run.profile}\n{table}"
        print(report)
        shares = {str(rank): breakdown.shares() for rank, breakdown in breakdowns.items()}
        with self._failures_reported():
            self._run.profile.mkdir(exist_ok=True)
            (self._run.profile / "summary.txt").write_text(f"{report}\n", encoding="utf-8")
            write_json(self._run.profile / "summary.json", {"first": first, "last": last, "ranks": shares})
        self._events.write("profiled", step=last, first=first, ranks=shares)


MICRO = 1e-6  # torch.profiler counts microseconds


@dataclass(frozen=True)
class TimeBreakdown:
    """Splits the seconds of one rank into parts that add up to ``elapsed_s``.

    Attributes:
        compute_s: time with a computation: kernels on a GPU, torch's operators on the CPU.
        communication_s: time with a collective and without a computation.
        bubble_s: time in which only point-to-point messages between pipeline stages were in flight.
        data_s: time spent waiting for the next batch.
        host_s: the rest, i.e. Python and kernel launches.
    """

    elapsed_s: float
    compute_s: float
    communication_s: float
    bubble_s: float
    data_s: float

    @property
    def host_s(self) -> float:
        return self.elapsed_s - self.compute_s - self.communication_s - self.bubble_s - self.data_s

    def shares(self) -> dict[str, float]:
        """Returns each part as a fraction of the elapsed time."""
        seconds = {
            "compute": self.compute_s,
            "communication": self.communication_s,
            "bubble": self.bubble_s,
            "data": self.data_s,
            "host": self.host_s,
        }
        return {name: value / self.elapsed_s for name, value in seconds.items()}


def time_breakdown(
    events: Iterable[Any], elapsed_s: float, data_s: float, device: torch.device, stages: bool
) -> TimeBreakdown:
    """Computes the breakdown from events of torch.profiler and the seconds that the host waited for data."""
    intervals = gpu_intervals(events, stages) if device.type == "cuda" else cpu_intervals(events)
    compute = uncovered(intervals.computation, []) * MICRO
    communication = uncovered(intervals.communication, intervals.computation) * MICRO
    bubble = uncovered(intervals.messages, [*intervals.computation, *intervals.communication]) * MICRO
    parts = []
    left = elapsed_s
    for seconds in (compute, communication, bubble, data_s):  # a wait for data may overlap a message
        parts.append(min(seconds, left))
        left -= parts[-1]
    return TimeBreakdown(elapsed_s, *parts)


def summary(of_ranks: Mapping[int, TimeBreakdown], steps: int) -> str:
    """Returns a table with the milliseconds per step and the shares of each profiled rank."""
    names = ("compute", "communication", "bubble", "data", "host")
    lines = ["rank   ms/step" + "".join(f"{name:>15}" for name in names)]
    for rank, breakdown in sorted(of_ranks.items()):
        shares = breakdown.shares()
        cells = "".join(f"{shares[name]:>15.1%}" for name in names)
        lines.append(f"{rank:>4} {1e3 * breakdown.elapsed_s / steps:>9.1f}{cells}")
    return "\n".join(lines)


def communication_share(step: Callable[[], None], device: torch.device, stages: bool, steps: int = 3) -> float:
    """Returns the share of ``steps`` steps in which a collective ran on this rank without overlapping computation.

    It uses torch.profiler: on a GPU it compares NCCL kernels with all other kernels, on the CPU gloo's operations with
    aten operators and compiled regions. Waiting for a slower rank inside a collective counts. Point-to-point messages
    between pipeline stages do not count, since waiting for them is the bubble.

    Args:
        stages: whether there are pipeline stages, see ``gpu_intervals``.
    """
    with profile(activities=activities(device)) as profiler:
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        elapsed = time.perf_counter() - begin
    events = profiler.events() or []
    intervals = gpu_intervals(events, stages) if device.type == "cuda" else cpu_intervals(events)
    return uncovered(intervals.communication, intervals.computation) * MICRO / elapsed


def activities(device: torch.device) -> list[ProfilerActivity]:
    """Returns the activities that torch.profiler records on ``device``."""
    if device.type == "cuda":
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    return [ProfilerActivity.CPU]


@dataclass(frozen=True)
class Intervals:
    """Holds (begin, end) in microseconds of computations, collectives, messages between pipeline stages, and copies
    between a GPU and its host.
    """

    computation: list[Interval] = field(default_factory=list)
    communication: list[Interval] = field(default_factory=list)
    messages: list[Interval] = field(default_factory=list)
    transfers: list[Interval] = field(default_factory=list)


def cpu_intervals(events: Iterable[Any]) -> Intervals:
    """Classifies CPU events by the names of gloo's operations, aten operators and compiled regions."""
    intervals = Intervals()
    for event in events:
        interval = (event.time_range.start, event.time_range.end)
        if event.name.startswith(("gloo:send", "gloo:recv")):
            intervals.messages.append(interval)
        elif event.name.startswith("gloo:"):
            intervals.communication.append(interval)
        elif event.name.startswith(("aten::", "Torch-Compiled", "CompiledFx")):
            intervals.computation.append(interval)
    return intervals


HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # prefixes of the names of these events


def gpu_intervals(events: Iterable[Any], stages: bool) -> Intervals:
    """Classifies GPU events by the names of kernels.

    NCCL uses the same kernel for messages between stages and for the all-to-all of context parallelism. With ``stages``
    its time counts as messages, otherwise as communication.
    """
    intervals = Intervals()
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        interval = (event.time_range.start, event.time_range.end)
        if event.name.startswith(HOST_COPIES):
            intervals.transfers.append(interval)
        elif "nccl" not in event.name:
            intervals.computation.append(interval)
        elif stages and "SendRecv" in event.name:
            intervals.messages.append(interval)
        else:
            intervals.communication.append(interval)
    return intervals


def uncovered(intervals: Iterable[Interval], covers: Iterable[Interval]) -> float:
    """Returns the length of the union of ``intervals`` minus the union of ``covers``."""
    covers = [*covers]
    return _union_length([*intervals, *covers]) - _union_length(covers)


def _union_length(intervals: Iterable[Interval]) -> float:
    total = 0.0
    reached = float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
