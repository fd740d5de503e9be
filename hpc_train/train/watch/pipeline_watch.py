"""Times the stages of a pipeline in its first steps: the balance of the stages, and the picture of one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.data.dataset import StepBatch
from hpc_train.parallel.engine import Engine, StepResult, WrappedEngine
from hpc_train.parallel.mesh import Mesh, synchronize
from hpc_train.parallel.pipeline.balance import SplitPlan
from hpc_train.preflight.measure import to_first
from hpc_train.run.event_log import EventLog

STAGE_WORK = {  # method of a stage -> the kind of its work
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weight",
}


WARMUP_STEPS = 2
TIMED_STEPS = 3
MOST_CHUNKS = 5000  # over all ranks in a picture, about 150 kB; more could not be distinguished in the picture


@dataclass(frozen=True)
class _RankTimes:
    """Holds the measurements of one rank: seconds by stage, the elapsed seconds, and the chunks of the last step.

    ``chunks`` are (kind, stage, begin, end), with times in seconds from the beginning of the step.
    """

    stage_s: dict[int, float]
    elapsed: float
    step_s: float
    chunks: list[tuple[str, int, float, float]]


class PipelineWatch(WrappedEngine):
    """Wraps ``engine``, times the stages for a few steps, and reports their balance and a picture of one step.

    Args:
        plan: the predicted balance; None if the config defines the split. The balance is then not reported.
    """

    def __init__(self, engine: Engine, mesh: Mesh, plan: SplitPlan | None, events: EventLog) -> None:
        super().__init__(engine)
        self._mesh = mesh
        self._plan = plan
        self._events = events
        self._steps = 0
        self._stage_s: dict[int, float] = {}
        self._elapsed = 0.0

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        self._steps += 1
        if not WARMUP_STEPS < self._steps <= WARMUP_STEPS + TIMED_STEPS:
            return self._engine.train_step(step, batch, loss_scale)
        last = self._steps == WARMUP_STEPS + TIMED_STEPS
        if last:
            dist.barrier(group=self._mesh.control)  # the clocks of all ranks begin together
        synchronize(self._mesh.device)
        with timed_stages(self._mesh.device) as chunks:
            begin = time.perf_counter()
            result = self._engine.train_step(step, batch, loss_scale)
            synchronize(self._mesh.device)
            seconds = time.perf_counter() - begin
        self._elapsed += seconds
        for chunk in chunks:
            self._stage_s[chunk.stage] = self._stage_s.get(chunk.stage, 0.0) + chunk.seconds()
        if last:
            self._report(seconds, chunks, len(batch.micro_batches))
        return result

    def _report(self, step_s: float, chunks: Sequence[Chunk], micro_batches: int) -> None:
        """Gathers the times of all ranks and reports them on rank 0. Collective."""
        layout = self._mesh.layout
        drawn = []
        # the picture shows one rank at each position in the pipeline
        if self._mesh.dp_cp_rank == self._mesh.tp_rank == 0 and len(chunks) * layout.pp <= MOST_CHUNKS:
            for chunk in chunks:
                begin = chunk.begin()
                drawn.append((chunk.kind, chunk.stage, round(begin, 6), round(begin + chunk.seconds(), 6)))
        times: list[_RankTimes] = to_first(_RankTimes(self._stage_s, self._elapsed, step_s, drawn), self._mesh)
        if self._mesh.rank != 0:
            return
        if self._plan is not None:
            seconds = [(rank.stage_s, rank.elapsed) for rank in times]
            balance = measured_balance(seconds, layout.stages, TIMED_STEPS * micro_batches)
            stages = "|".join(f"{1e3 * stage_s:.3g}" for stage_s in balance["stage_s"])
            predicted = self._plan.predicted
            print(
                f"pipeline measured: {stages} ms per micro-batch and stage; the slowest stage takes "
                f"{balance['imbalance']:.2f} x the mean ({predicted.imbalance:.2f} predicted), bubble "
                f"{balance['bubble_share']:.1%} ({predicted.bubble_share:.1%} predicted without communication)"
            )
            self._events.write("pipeline_balance", **balance, predicted=self._plan.as_json()["predicted"])
        ranks = [{"rank": number, "chunks": rank.chunks} for number, rank in enumerate(times) if rank.chunks]
        if ranks:
            picture: dict[str, Any] = {"schedule": layout.schedule, "micro_batches": micro_batches}
            self._events.write("pipeline_step", **picture, seconds=max(rank.step_s for rank in times), ranks=ranks)


def measured_balance(of_ranks: list[tuple[dict[int, float], float]], stages: int, passes: int) -> dict[str, Any]:
    """Returns the mean seconds of each stage per pass, their imbalance, and the bubble share.

    Args:
        of_ranks: for each rank, stage -> seconds, and the elapsed seconds.
        passes: the number of micro-batches in the elapsed time.
    """
    stage_s = []
    for stage in range(stages):
        times = [seconds[stage] for seconds, _ in of_ranks if stage in seconds]
        stage_s.append(sum(times) / len(times) / passes)
    bubbles = [max(0.0, 1 - sum(seconds.values()) / elapsed) for seconds, elapsed in of_ranks]
    return {
        "stage_s": stage_s,
        "imbalance": max(stage_s) * stages / sum(stage_s),
        "bubble_share": sum(bubbles) / len(bubbles),
    }


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
        kind: ``forward``, ``backward``, or ``weight`` if the gradients of weights are computed separately.
        begin: returns the seconds from the beginning of ``timed_stages`` to the beginning of the chunk. Must be called
            after the device has finished.
        seconds: returns the duration of the chunk in seconds. Must be called after the device has finished.
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

    def recorded() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    if device.type == "cuda":
        first_event = recorded()

        def now() -> Callable[[], float]:
            event = recorded()
            return lambda: first_event.elapsed_time(event) * 1e-3
    else:
        origin = clock()

        def now() -> Callable[[], float]:
            seconds = clock() - origin
            return lambda: seconds

    def timed(work: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(stage: _PipelineStageBase, *args: Any, **kwargs: Any) -> Any:
            begin = now()
            result = work(stage, *args, **kwargs)
            end = now()
            chunks.append(Chunk(stage.stage_index, kind, begin, lambda: end() - begin()))
            return result

        return call

    chunks: list[Chunk] = []
    originals = {name: getattr(_PipelineStageBase, name) for name in STAGE_WORK}
    try:
        for name, original in originals.items():
            setattr(_PipelineStageBase, name, timed(original, STAGE_WORK[name]))
        yield chunks
    finally:
        for name, original in originals.items():
            setattr(_PipelineStageBase, name, original)
