"""Defines what ``generate`` asks its workers to do; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.bench.request import REQUEST, WorkerRequest
from hpc_train.run.directory import RunDirectory
from hpc_train.train.decoding.sampling import Sampling


@dataclass(frozen=True)
class GenerationRequest(WorkerRequest):
    """Requests up to ``max_tokens`` new tokens for each prompt, by the checkpoint of ``step``.

    Attributes:
        checkpoint: the directory of the checkpoint.
        weights: the name of a hook whose weights to use, such as ema; None uses those of the model.
        prompts: token ids.
        ends: the tokens after which a text is complete.
    """

    checkpoint: str
    step: int
    weights: str | None
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    sampling: Sampling
    ends: tuple[int, ...]

    @classmethod
    def read(cls, run: RunDirectory) -> GenerationRequest:
        values = run.json(run.path / REQUEST)
        prompts = tuple(map(tuple, values["prompts"]))
        return cls(
            **values | {"prompts": prompts, "sampling": Sampling(**values["sampling"]), "ends": tuple(values["ends"])}
        )
