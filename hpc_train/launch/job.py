"""A job: what the submitter knows of it, and the tiny callable that travels to where it runs."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpc_train.config.layout import Layout
from hpc_train.config.schema import Config
from hpc_train.elastic.agent import run_agent
from hpc_train.elastic.stop_requests import StopRequests
from hpc_train.launch.slots import Share, reserve
from hpc_train.run.directory import RunDirectory
from hpc_train.run.frozen_code import start_again_from


@dataclass(frozen=True)
class Job:
    """A validated job. ``overrides`` are those of its command line; ``gpus`` and ``workers`` are per node."""

    number: int
    overrides: tuple[str, ...]
    config: Config
    layout: Layout
    gpus: int
    workers: int
    run: RunDirectory

    @property
    def submitit_folder(self) -> Path:
        """Where submitit keeps its pickle and the output of the agent."""
        return self.run.logs / "submitit"


@dataclass(frozen=True)
class RunAgent:
    """Runs the agent of a frozen run and exits with its code; all that a pickle holds is a path and a share."""

    path: str
    share: Share | None = None

    def __call__(self) -> None:
        run = RunDirectory(Path(self.path))
        start_again_from(run)
        reserved = None if self.share is None else partial(_reserve, self.share)
        # an exit, not a result: what failed must not look like a success to the scheduler
        sys.exit(run_agent(run, reserve=reserved))


def _reserve(share: Share, stop: StopRequests) -> AbstractContextManager[None]:
    return reserve(share, lambda: stop.requested)
