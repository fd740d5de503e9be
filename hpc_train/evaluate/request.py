"""Defines what ``evaluate`` asks its workers to do; without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hpc_train.bench.request import REQUEST
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json, write_json


@dataclass(frozen=True)
class EvaluationRequest:
    """Requests an evaluation of the checkpoint of ``step`` in the directory ``checkpoint``.

    Attributes:
        weights: the name of a hook whose weights to use, such as ema; None uses those of the model.
    """

    checkpoint: str
    step: int
    weights: str | None

    def write(self, run: RunDirectory) -> None:
        write_json(run.path / REQUEST, asdict(self))

    @classmethod
    def read(cls, run: RunDirectory) -> EvaluationRequest:
        return cls(**read_json(run.path / REQUEST))
