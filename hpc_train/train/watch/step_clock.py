"""Measures exposed communication and the pipeline bubble in every training step, at low cost.

Unlike torch's profiler, which slows down the steps, it only takes two clock readings (on a GPU, two events) around each
place where computation waits for communication, and around the work of each pipeline stage:

- ``Work.wait``: the collectives of hpc_train, and FSDP's collectives on the CPU;
- ``wait_tensor``: the functional collectives of tensor parallelism;
- the compute stream's ``wait_event``: FSDP's collectives on a GPU, which run on their own streams;
- the end of a backward pass under DDP, which waits inside C++ between the last gradient and the return.

All time that a stage waits between its chunks counts as bubble, and so does the wait for the other stages before the
gradient norm. A collective on the compute stream (without ``async_op`` on a GPU) or inside a compiled region counts as
computation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed import _functional_collectives

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
STAGE_WORK = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


@dataclass(frozen=True)
class StepTimes:
    """Holds the seconds that this rank spent waiting.

    Attributes:
        communication_s: time in which computation waited for a collective, including the wait for its slowest rank.
        bubble_s: time in which a pipeline schedule ran and no stage of this rank computed.
        steps_s: the time of the steps, with these waits.
    """

    communication_s: float
    bubble_s: float
    steps_s: float


class StepClock:
    """Measures the waits of this rank inside ``step``, within the context ``watching``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watches = [make_stopwatch(device) for _ in range(4)]
        self._communication, self._pass, self._work, self._steps = self._watches
        self._waiting = self._communication  # the stopwatch that currently counts waits
        self._counts = False
        self._is_cut = False
        self._thread = threading.current_thread()
        self._stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

    @property
    def stretches(self) -> int:
        """Returns the number of intervals timed since the start, which determines the cost of measuring."""
        return sum(watch.stretches for watch in self._watches if watch is not self._steps)

    @contextmanager
    def watching(self, replicated: Iterable[nn.Module] = (), pipeline: bool = False) -> Iterator[None]:
        """Times the waits of torch in this context.

        Args:
            replicated: modules whose gradients DDP reduces.
            pipeline: whether to time pipeline stages.
        """
        with ExitStack() as stack:
            for module in replicated:
                first = next((parameter for parameter in module.parameters() if parameter.requires_grad), None)
                if first is not None:
                    stack.callback(first.register_post_accumulate_grad_hook(self._before_backward_ends).remove)
            stack.enter_context(_replaced(dist.Work, "wait", self._waits))
            stack.enter_context(_replaced(_functional_collectives, "wait_tensor", self._waits))
            if self._device.type == "cuda":
                stack.enter_context(_replaced(torch.cuda.Stream, "wait_event", self._waits))
            if pipeline:
                from torch.distributed.pipelining.stage import _PipelineStageBase  # importing it takes a second

                from hpc_train.parallel.pipeline.engine import PipelineEngine
                from hpc_train.parallel.pipeline.schedules import Schedule

                for name in STAGE_WORK:
                    stack.enter_context(_replaced(_PipelineStageBase, name, self._timed(self._work, counts=True)))
                stack.enter_context(_replaced(Schedule, "step", self._timed(self._pass, counts=False)))
                stack.enter_context(_replaced(PipelineEngine, "clip_grad_norm_", self._drains))
            yield

    def seconds_per_stretch(self, times: int = 1000) -> float:
        """Measures the cost of timing one interval; must not be called inside ``step``."""
        timed = self._waits(lambda: None)
        with self.step():
            begin = time.perf_counter()
            for _ in range(times):
                timed()
            elapsed = time.perf_counter() - begin
        self.read()
        return elapsed / times

    @contextmanager
    def step(self) -> Iterator[None]:
        """Counts the waits in this context, which encloses one step."""
        begun = self._steps.begin()
        self._counts = True
        yield
        self._counts = False
        self._steps.end(begun)
        for watch in self._watches:
            watch.collect()

    def cut(self) -> None:
        """Ends the interval that the next ``read`` returns; later steps belong to the following interval."""
        for watch in self._watches:
            watch.cut()
        self._is_cut = True

    def read(self) -> StepTimes:
        """Returns the times since the last ``read``, up to ``cut`` if it was called since; waits for the device."""
        if not self._is_cut:
            self.cut()
        self._is_cut = False
        communication, passed, work, steps = (watch.take() for watch in self._watches)
        return StepTimes(communication, max(0.0, passed - work), steps)

    def _waits(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._counts or not self._computes(args):
                return wait(*args, **kwargs)
            begun = self._waiting.begin()
            try:
                return wait(*args, **kwargs)
            finally:
                self._waiting.end(begun)

        return timed

    def _computes(self, args: tuple[Any, ...]) -> bool:
        """Returns whether the computation waits, and not a checkpoint thread or a communication stream."""
        thread = threading.current_thread()
        # autograd runs backward passes for a GPU in threads that Python has not started
        if thread is not self._thread and not isinstance(thread, threading._DummyThread):
            return False
        if self._device.type != "cuda":
            return True
        waits_itself = bool(args) and isinstance(args[0], torch.cuda.Stream)
        stream = args[0] if waits_itself else torch.cuda.current_stream(self._device)
        return bool(stream.cuda_stream == self._stream)

    def _timed(self, watch: Stopwatch, counts: bool) -> Wrap:
        """Returns a wrapper that times a function with ``watch``. ``counts`` states whether waits inside the function
        count."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                before = self._counts
                self._counts = counts
                begun = watch.begin()
                try:
                    return function(*args, **kwargs)
                finally:
                    watch.end(begun)
                    self._counts = before

            return timed

        return wrap

    def _drains(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._waiting = self._pass
            try:
                return clip(*args, **kwargs)
            finally:
                self._waiting = self._communication

        return timed

    def _before_backward_ends(self, _: torch.Tensor) -> None:
        """Queues callbacks around DDP's final wait.

        Autograd runs the callbacks for the end of a backward pass in order: first ``begin``, then the callback that DDP
        queues with its last bucket, then ``end``.
        """
        if not self._counts:
            return

        def begin() -> None:
            begun = self._communication.begin()
            self._counts = False  # otherwise the waits of a communication hook would count twice

            def end() -> None:
                self._communication.end(begun)
                self._counts = True

            Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]

        Variable._execution_engine.queue_callback(begin)  # type: ignore[attr-defined]


@contextmanager
def _replaced(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


class HostStopwatch:
    """Sums the intervals between ``begin`` and ``end``, up to the last ``cut``, with the clock of the host.

    Attributes:
        stretches: number of intervals since the start.
    """

    def __init__(self) -> None:
        self.stretches = 0
        self._seconds = self._taken = 0.0

    def begin(self) -> Any:
        """Starts an interval and returns the argument for ``end``."""
        return time.perf_counter()

    def end(self, begun: Any) -> None:
        self._seconds += time.perf_counter() - begun
        self.stretches += 1

    def collect(self) -> None:
        """Adds the intervals that the device has finished, without blocking; called after each step."""

    def cut(self) -> None:
        """Ends the period whose seconds the next ``take`` returns; called once before each ``take``."""
        self._taken = self._seconds
        self._seconds = 0.0

    def take(self) -> float:
        """Returns the seconds between the last two cuts; waits for the device to finish these intervals."""
        return self._taken


@dataclass
class _Period:
    """Holds the intervals between two cuts: the seconds of collected intervals, and the events of the other
    intervals."""

    seconds: float = 0.0
    open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque)


class DeviceStopwatch:
    """Does the same as ``HostStopwatch`` with reusable events in the current CUDA stream, without blocking the host."""

    def __init__(self) -> None:
        self.stretches = 0
        self._current = _Period()
        self._closed = _Period()
        self._free: list[torch.cuda.Event] = []

    def begin(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, begun: torch.cuda.Event) -> None:
        self._current.open.append((begun, self.begin()))
        self.stretches += 1

    def collect(self) -> None:
        self._collect(self._closed)
        self._collect(self._current)

    def cut(self) -> None:
        self._closed = self._current
        self._current = _Period()

    def take(self) -> float:
        if self._closed.open:
            self._closed.open[-1][1].synchronize()
        self._collect(self._closed)
        return self._closed.seconds

    def _collect(self, period: _Period) -> None:
        while period.open and period.open[0][1].query():
            first, last = period.open.popleft()
            period.seconds += first.elapsed_time(last) * 1e-3
            self._free += (first, last)


Stopwatch = HostStopwatch | DeviceStopwatch


def make_stopwatch(device: torch.device) -> Stopwatch:
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()
