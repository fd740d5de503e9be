"""A checked job, which can be frozen and submitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpc_train.config.schema import Config
from hpc_train.layout.layout import JobShape, Layout
from hpc_train.run.directory import RunDirectory
from hpc_train.run.owner import TRUST


class Choice(Protocol):
    """The layout that ``strategy=auto`` has chosen for a job.

    Attributes:
        text: of ``plan.json``.
        lines: the choice in one line, and a line for each other number of nodes.
    """

    @property
    def text(self) -> str: ...

    @property
    def lines(self) -> list[str]: ...

    def apply(self, config: Config) -> Config:
        """Returns ``config`` with the layout."""


@dataclass(frozen=True)
class Job:
    """A validated job.

    Attributes:
        number: its place in a sweep, from 0.
        overrides: those of its command line.
        trust_owner: its agents continue the run although it belongs to another user.
        choice: of ``strategy=auto``.
    """

    number: int
    overrides: tuple[str, ...]
    config: Config
    layout: Layout
    shape: JobShape
    run: RunDirectory
    trust_owner: bool = False
    choice: Choice | None = None

    @property
    def gpus(self) -> int:
        """The GPUs per node."""
        return self.shape.gpus

    @property
    def workers(self) -> int:
        """The workers per node."""
        return self.shape.workers

    @property
    def agent_options(self) -> tuple[str, ...]:
        """The options of ``python -m hpc_train agent``."""
        return (TRUST,) if self.trust_owner else ()

    @property
    def strategy(self) -> str:
        return self.config.strategy.name

    @property
    def asked_nodes(self) -> int | str:
        return self.config.cluster.nodes

    @property
    def plan(self) -> str | None:
        """Returns the text of ``plan.json``."""
        return None if self.choice is None else self.choice.text

    @property
    def submitit_folder(self) -> Path:
        """Returns the directory of submitit's pickle and of the output of the agent."""
        return self.run.logs / "submitit"
