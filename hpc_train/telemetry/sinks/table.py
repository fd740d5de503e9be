"""Lists the trackers. A new one is a backend and a line in ``BACKENDS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_train.config.schema import Config
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.sinks.backend import Backend
from hpc_train.telemetry.sinks.identity import Identity
from hpc_train.telemetry.sinks.mlflow import Mlflow
from hpc_train.telemetry.sinks.tensorboard import TensorBoard
from hpc_train.telemetry.sinks.wandb import Wandb


@dataclass(frozen=True)
class Session:
    """Describes to the backends which run is sent.

    Attributes:
        tell: called with each message for the user.
        first_attempt: of the job that trains; None for ``sync``.
        checkpoint: returns the directory of a checkpoint to upload at the end, if there is one.
        output: where files about the run are written; None is the run directory.
    """

    config: Config
    run: RunDirectory
    tell: Callable[[str], object] = print
    first_attempt: int | None = None
    checkpoint: Callable[[], Path | None] = lambda: None
    output: Path | None = None

    @property
    def live(self) -> bool:
        return self.first_attempt is not None

    @property
    def identity(self) -> Identity:
        return Identity.of(self.config, self.run, self.output)


def _wandb(session: Session) -> Backend:
    settings = session.config.telemetry.wandb
    return Wandb(settings, session.identity, session.tell, session.first_attempt, session.checkpoint)


def _mlflow(session: Session) -> Backend:
    return Mlflow(session.config.telemetry.mlflow, session.identity, session.tell, session.live)


# whether or not the config asks for them
BACKENDS: dict[str, Callable[[Session], Backend]] = {
    Wandb.name: _wandb,
    Mlflow.name: _mlflow,
    TensorBoard.name: lambda session: TensorBoard(RunDirectory(session.identity.directory), session.live),
}
