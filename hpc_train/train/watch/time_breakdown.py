"""Measures exposed communication and the pipeline bubble in separate steps, since profiling slows them down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from hpc_train.parallel.mesh import synchronize

if TYPE_CHECKING:
    from torch.distributed.pipelining.stage import _PipelineStageBase

Interval = tuple[float, float]

STAGE_WORK = {  # method of a stage -> the kind of its work
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weight",
}


def communication_share(step: Callable[[], None], device: torch.device, stages: bool, steps: int = 3) -> float:
    """Returns the share of ``steps`` steps in which a collective ran on this rank without overlapping computation.

    It uses torch.profiler: on a GPU it compares NCCL kernels with all other kernels, on the CPU gloo's operations with
    aten operators and compiled regions. Waiting for a slower rank inside a collective counts. Point-to-point messages
    between pipeline stages do not count, since waiting for them is the bubble.

    Args:
        stages: whether there are pipeline stages, see ``gpu_intervals``.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities) as profiler:
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - begin
    events = profiler.events() or []
    found = gpu_intervals(events, stages) if on_gpu else cpu_intervals(events)
    return uncovered(found.communication, found.computation) * 1e-6 / elapsed


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
    found = Intervals()
    for event in events:
        interval = (event.time_range.start, event.time_range.end)
        if event.name.startswith(("gloo:send", "gloo:recv")):
            found.messages.append(interval)
        elif event.name.startswith("gloo:"):
            found.communication.append(interval)
        elif event.name.startswith(("aten::", "Torch-Compiled", "CompiledFx")):
            found.computation.append(interval)
    return found


HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # begin the names of these events


def gpu_intervals(events: Iterable[Any], stages: bool) -> Intervals:
    """Classifies GPU events by the names of kernels.

    NCCL has one kernel for messages and for the all-to-all of context parallelism. With ``stages`` its time counts as
    messages between them, otherwise as communication.
    """
    found = Intervals()
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        interval = (event.time_range.start, event.time_range.end)
        if event.name.startswith(HOST_COPIES):
            found.transfers.append(interval)
        elif "nccl" not in event.name:
            found.computation.append(interval)
        elif stages and "SendRecv" in event.name:
            found.messages.append(interval)
        else:
            found.communication.append(interval)
    return found


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


def bubble_share(step: Callable[[], None], device: torch.device, steps: int = 3) -> float:
    """Returns the share of ``steps`` passes of a pipeline schedule in which no stage of this rank computed.

    ``step`` runs forward and backward over all micro-batches. The forward and backward chunks of a stage are timed with
    the host's clock on the CPU and with events on the GPU; they do not include waiting for messages.
    """
    with timed_stages(device) as computing:
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        elapsed = time.perf_counter() - begin
    return max(0.0, 1.0 - sum(chunk.seconds() for chunk in computing) / elapsed)


@dataclass(frozen=True)
class Chunk:
    """Holds one chunk of work of a pipeline stage.

    Attributes:
        kind: ``forward``, ``backward``, or ``weight`` where the gradients of weights are computed separately.
        begin: the seconds from the beginning of ``timed_stages`` to that of the chunk, once the device has finished.
        seconds: its duration, once the device has finished.
    """

    stage: int
    kind: str
    begin: Callable[[], float]
    seconds: Callable[[], float]


@contextmanager
def timed_stages(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Iterator[list[Chunk]]:
    """Times all chunks of work of pipeline stages in this context.

    Yields:
        A list of the chunks, in their order.

    Args:
        clock: the host's clock; GPUs are timed with events.
    """
    from torch.distributed.pipelining.stage import _PipelineStageBase  # takes a second to import

    chunks: list[Chunk] = []
    watch = _GpuWatch() if device.type == "cuda" else _HostWatch(clock)
    originals = {name: getattr(_PipelineStageBase, name) for name in STAGE_WORK}
    try:
        for name, original in originals.items():
            setattr(_PipelineStageBase, name, _timed(original, STAGE_WORK[name], watch, chunks))
        yield chunks
    finally:
        for name, original in originals.items():
            setattr(_PipelineStageBase, name, original)


class _HostWatch:
    """Reads the host's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._origin = clock()

    def now(self) -> Callable[[], float]:
        seconds = self._clock() - self._origin
        return lambda: seconds


class _GpuWatch:
    """Records events on the GPU."""

    def __init__(self) -> None:
        self._origin = self._recorded()

    def now(self) -> Callable[[], float]:
        event = self._recorded()
        return lambda: self._origin.elapsed_time(event) * 1e-3

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _timed(
    work: Callable[..., Any], kind: str, watch: _HostWatch | _GpuWatch, chunks: list[Chunk]
) -> Callable[..., Any]:
    def timed(stage: _PipelineStageBase, *args: Any, **kwargs: Any) -> Any:
        begin = watch.now()
        result = work(stage, *args, **kwargs)
        end = watch.now()
        chunks.append(Chunk(stage.stage_index, kind, begin, lambda: end() - begin()))
        return result

    return timed
