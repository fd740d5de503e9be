"""Where the time of training steps goes, looked at in every step: waiting for collectives, and the pipeline's bubble.

``shares.py`` asks the profiler, which slows what it looks at. Here two clock readings (on a GPU two events) stand
around each place where computing waits for communication, and around the work of each pipeline stage:

- ``Work.wait``: collectives of our own, FSDP's on the CPU;
- ``wait_tensor``: the functional collectives of tensor parallelism;
- the compute stream's ``wait_event``: FSDP's collectives on a GPU, which have streams of their own;
- the end of a backward under DDP, which waits inside C++: between the last gradient and the return.

What a stage waits for between its chunks is the bubble, whatever it waits for; so is its wait for the other stages
before the gradient norm, which all ranks sum. A collective that runs on the compute
stream itself (called without ``async_op`` on a GPU) counts as computing; so do those inside compiled regions.

Stretches of time added up: by the host's clock, or on a GPU's own time line without making the host wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed import _functional_collectives

STAGE_WORK = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of this rank.

    Attributes:
        communication_s: computing waited for a collective, or for the slowest of its ranks.
        bubble_s: a pipeline schedule was under way, and no stage of this rank computed.
    """

    communication_s: float
    bubble_s: float


class StepClock:
    """Counts inside ``step``, while ``watching``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._communication, self._pass, self._work = (make_stopwatch(device) for _ in range(3))
        self._waiting = self._communication  # where a wait counts now
        self._counts = False
        self._thread = threading.current_thread()
        self._stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

    @property
    def stretches(self) -> int:
        """How many were timed since the start: what the measurement costs."""
        return sum(watch.stretches for watch in (self._communication, self._pass, self._work))

    @contextmanager
    def watching(self, replicated: Iterable[nn.Module] = (), pipeline: bool = False) -> Iterator[None]:
        """Puts the clock where torch waits, for the time of the ``with`` block.

        Args:
            replicated: modules that DDP keeps in step.
            pipeline: whether there are stages to be looked at.
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
                self._watch_pipeline(stack)
            yield

    def _watch_pipeline(self, stack: ExitStack) -> None:
        from torch.distributed.pipelining.stage import _PipelineStageBase  # takes a second to import

        from hpc_train.parallel.pipeline_engine import PipelineEngine
        from hpc_train.parallel.schedules import Schedule

        for name in STAGE_WORK:
            stack.enter_context(_replaced(_PipelineStageBase, name, self._works))
        stack.enter_context(_replaced(Schedule, "step", self._passes))
        stack.enter_context(_replaced(PipelineEngine, "clip_grad_norm_", self._drains))

    def seconds_per_stretch(self, times: int = 1000) -> float:
        """What timing one stretch costs, in isolation. Not while ``watching`` counts."""
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
        """Around each step."""
        self._counts = True
        yield
        self._counts = False
        for watch in (self._communication, self._pass, self._work):
            watch.collect()

    def read(self) -> StepTimes:
        """Since the last ``read``. Waits for the device."""
        communication, passed, work = (watch.take() for watch in (self._communication, self._pass, self._work))
        return StepTimes(communication, max(0.0, passed - work))

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
        """Whether it is computing that waits: not a checkpoint in another thread, not a stream for communication."""
        thread = threading.current_thread()
        # autograd computes for a GPU in threads that Python has not started
        if thread is not self._thread and not isinstance(thread, threading._DummyThread):
            return False
        if self._device.type != "cuda":
            return True
        waits_itself = bool(args) and isinstance(args[0], torch.cuda.Stream)
        stream = args[0] if waits_itself else torch.cuda.current_stream(self._device)
        return bool(stream.cuda_stream == self._stream)

    def _works(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self._counts = self._counts, True
            begun = self._work.begin()
            try:
                return work(*args, **kwargs)
            finally:
                self._work.end(begun)
                self._counts = before

        return timed

    def _passes(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self._counts = self._counts, False
            begun = self._pass.begin()
            try:
                return step(*args, **kwargs)
            finally:
                self._pass.end(begun)
                self._counts = before

        return timed

    def _drains(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._waiting = self._pass
            try:
                return clip(*args, **kwargs)
            finally:
                self._waiting = self._communication

        return timed

    def _before_backward_ends(self, _: torch.Tensor) -> None:
        """Autograd runs what was queued for the end of a backward in order: this before what DDP queues afterwards,
        with its last bucket; and what is queued from here after that."""
        if not self._counts:
            return

        def begin() -> None:
            begun = self._communication.begin()
            self._counts = False  # a hook's own waits would count twice

            def end() -> None:
                self._communication.end(begun)
                self._counts = True

            _at_the_end_of_backward(end)

        _at_the_end_of_backward(begin)


def _at_the_end_of_backward(call: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


class Stopwatch(Protocol):
    """Adds up the stretches between ``begin`` and ``end``.

    Attributes:
        stretches: how many there were since the start.
    """

    stretches: int

    def begin(self) -> Any:
        """What ``end`` wants."""

    def end(self, begun: Any) -> None: ...

    def collect(self) -> None:
        """Now and then: adds up what is known by now. Does not wait."""

    def take(self) -> float:
        """Seconds since the last ``take``. Waits for the device where a stretch has not ended there."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()


class HostStopwatch:
    """A ``Stopwatch`` for the CPU, where what is waited for stops the host."""

    def __init__(self) -> None:
        self.stretches = 0
        self._seconds = 0.0

    def begin(self) -> float:
        return time.perf_counter()

    def end(self, begun: float) -> None:
        self._seconds += time.perf_counter() - begun
        self.stretches += 1

    def collect(self) -> None:
        pass

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class DeviceStopwatch:
    """A ``Stopwatch`` by events in the current stream. They are used again once they have passed."""

    def __init__(self) -> None:
        self.stretches = 0
        self._seconds = 0.0
        self._free: list[torch.cuda.Event] = []
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, begun: torch.cuda.Event) -> None:
        self._open.append((begun, self.begin()))
        self.stretches += 1

    def collect(self) -> None:
        while self._open and self._open[0][1].query():
            first, last = self._open.popleft()
            self._seconds += first.elapsed_time(last) * 1e-3
            self._free += (first, last)

    def take(self) -> float:
        if self._open:
            self._open[-1][1].synchronize()
        self.collect()
        seconds, self._seconds = self._seconds, 0.0
        return seconds
