"""Defines what ``evaluate`` asks its workers to do; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.bench.request import WorkerRequest


@dataclass(frozen=True)
class EvaluationRequest(WorkerRequest):
    """Requests an evaluation of the checkpoint of ``step`` in the directory ``checkpoint``.

    Attributes:
        weights: the name of a hook whose weights to use, such as ema; None uses those of the model.
    """

    checkpoint: str
    step: int
    weights: str | None
