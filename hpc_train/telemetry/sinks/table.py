"""Opens the sinks that a config asks for. A new tracker is a backend and a line in ``BACKENDS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_train.config.schema import Config
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.sinks.background import BackgroundSink
from hpc_train.telemetry.sinks.identity import Identity
from hpc_train.telemetry.sinks.sink import Backend
from hpc_train.telemetry.sinks.tensorboard import TensorBoard
from hpc_train.telemetry.sinks.wandb import WandbBackend


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
    return WandbBackend(settings, Identity.of(session.config, session.run), session.tell, checkpoint)


# each returns its backend, or None if the config does not ask for it
BACKENDS: tuple[Callable[[Session], Backend | None], ...] = (_tensorboard, _wandb)


def open_sinks(session: Session) -> list[BackgroundSink]:
    """Opens the sinks of an attempt.

    Raises:
        UserError: the package of one is not installed.
    """
    found = [create(session) for create in BACKENDS]
    return [BackgroundSink(backend, session.run, session.tell) for backend in found if backend is not None]
