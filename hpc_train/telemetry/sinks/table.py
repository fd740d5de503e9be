"""Opens the sinks that a config asks for. A new tracker is a backend and a line in ``BACKENDS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_train.config.schema import Config
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.sinks.background import BackgroundSink
from hpc_train.telemetry.sinks.csv import Csv
from hpc_train.telemetry.sinks.identity import Identity
from hpc_train.telemetry.sinks.mlflow import Mlflow
from hpc_train.telemetry.sinks.sink import Backend
from hpc_train.telemetry.sinks.tensorboard import TensorBoard
from hpc_train.telemetry.sinks.wandb import Wandb


@dataclass(frozen=True)
class Session:
    """Describes an attempt to the backends.

    Attributes:
        first_step: completed steps when the attempt begins.
        tell: called with each message for the user.
        newest_checkpoint: returns the directory of the newest checkpoint, if there is one.
    """

    config: Config
    run: RunDirectory
    first_step: int
    tell: Callable[[str], object]
    newest_checkpoint: Callable[[], Path | None]


def _tensorboard(session: Session) -> Backend | None:
    return TensorBoard(session.run, session.first_step) if session.config.telemetry.tensorboard else None


def _wandb(session: Session) -> Backend | None:
    settings = session.config.telemetry.wandb
    if settings.mode == "disabled":
        return None
    checkpoint = session.newest_checkpoint if settings.log_checkpoint else None
    return Wandb(settings, Identity.of(session.config, session.run), session.first_step, session.tell, checkpoint)


def _mlflow(session: Session) -> Backend | None:
    settings = session.config.telemetry.mlflow
    if settings.uri is None:
        return None
    return Mlflow(settings, Identity.of(session.config, session.run), session.first_step, session.tell)


def _csv(session: Session) -> Backend | None:
    return Csv(session.run, session.first_step) if session.config.telemetry.csv else None


# each returns its backend, or None if the config does not ask for it
BACKENDS: tuple[Callable[[Session], Backend | None], ...] = (_tensorboard, _wandb, _mlflow, _csv)


def open_sinks(session: Session) -> list[BackgroundSink]:
    """Opens the sinks of an attempt.

    Raises:
        UserError: the package of one is not installed.
    """
    found = [create(session) for create in BACKENDS]
    return [BackgroundSink(backend, session.run, session.tell) for backend in found if backend is not None]


Tell = Callable[[str], object]


def _wandb_replay(config: Config, run: RunDirectory, tell: Tell) -> Backend:
    return Wandb(config.telemetry.wandb, Identity.of(config, run), tell=tell, patience_s=0.0, replays=True)


def _mlflow_replay(config: Config, run: RunDirectory, tell: Tell) -> Backend:
    return Mlflow(config.telemetry.mlflow, Identity.of(config, run), tell=tell, patience_s=0.0, replays=True)


def _tensorboard_replay(config: Config, run: RunDirectory, tell: Tell) -> Backend:
    return TensorBoard(run, patience_s=0.0)


def _csv_replay(config: Config, run: RunDirectory, tell: Tell) -> Backend:
    return Csv(run)


# the trackers of ``sync``, whether or not the config asks for them
REPLAYS: dict[str, Callable[[Config, RunDirectory, Tell], Backend]] = {
    Wandb.name: _wandb_replay,
    Mlflow.name: _mlflow_replay,
    TensorBoard.name: _tensorboard_replay,
    Csv.name: _csv_replay,
}
