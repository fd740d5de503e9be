"""Reads the event ``pipeline_step``: when each rank ran forward and backward in one of the first steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from hpc_train.run.events import Event

FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "gradients of weights", "": "waiting"}


@dataclass(frozen=True)
class Chunk:
    """Holds one forward or backward pass of a micro-batch on a stage, in seconds from the start of the step."""

    kind: str
    stage: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


Rows = dict[int, list[Chunk]]  # rank -> its chunks in their order


@dataclass(frozen=True)
class StageTimes:
    """Holds the mean seconds per micro-batch of a stage by kind, and the share of the step that its rank waited."""

    stage: int
    rank: int
    means: Mapping[str, float]
    waited: float


def rows_of(event: Event) -> Rows:
    return {rank["rank"]: [Chunk(*chunk) for chunk in rank["chunks"]] for rank in event.ranks}


def stage_times(rows: Rows, total: float) -> Iterator[StageTimes]:
    """Yields the times of each stage by rank. ``total`` is the duration of the step in seconds."""
    for rank in sorted(rows):
        waited = 1 - sum(chunk.seconds for chunk in rows[rank]) / total
        for stage in sorted({chunk.stage for chunk in rows[rank]}):
            chunks = [chunk for chunk in rows[rank] if chunk.stage == stage]
            kinds = dict.fromkeys(chunk.kind for chunk in chunks)
            means = {kind: fmean(chunk.seconds for chunk in chunks if chunk.kind == kind) for kind in kinds}
            yield StageTimes(stage, rank, means, waited)
