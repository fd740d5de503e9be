"""A pipeline schedule of your own: torch's looped breadth-first schedule (Lamy-Poirier 2022, arXiv:2211.05953).

    python -m hpc_train +strategy=pp strategy.schedule=examples.own_schedule:LOOPED_BFS strategy.stages_per_rank=2

The file imports no torch: the schedule's class is named by its import path.
"""

from __future__ import annotations

from hpc_train.layout.orders import FORWARD, FULL_BACKWARD, Action, PipelineShape
from hpc_train.layout.techniques import PipelineSchedule


def _in_flight(shape: PipelineShape, rank: int) -> tuple[int, ...]:
    """All micro-batches pass a stage before the first backward, so each stage keeps the activations of all."""
    return (shape.micro_batches,) * shape.stages_per_rank


def _bubble(shape: PipelineShape) -> float:
    return (shape.ranks - 1) / (shape.stages_per_rank * shape.micro_batches + shape.ranks - 1)


def _order(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Returns all forwards, stage by stage, then all backwards, from the last stage and the last micro-batch."""
    stages = range(rank, shape.ranks * shape.stages_per_rank, shape.ranks)
    batches = range(shape.micro_batches)
    forwards = [Action(FORWARD, stage, batch) for stage in stages for batch in batches]
    backwards = [Action(FULL_BACKWARD, stage, batch) for stage in reversed(stages) for batch in reversed(batches)]
    return (*forwards, *backwards)


LOOPED_BFS = PipelineSchedule(
    name="looped_bfs",
    torch_class="torch.distributed.pipelining.schedules:ScheduleLoopedBFS",
    stages_per_rank=(2, 64),
    placement="looped",
    micro_batches="any",
    data_parallel=("allreduce",),
    data_parallel_reason="it was not compared with one process",
    in_flight=_in_flight,
    bubble=_bubble,
    splits_backward=False,
    compiles=True,
    ops_checkpointing=True,
    auto=None,
    order=_order,
)
