"""Gives the identity of a run to trackers: one run of a tracker over all attempts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.config.secrets import without_secrets
from hpc_train.run.directory import RunDirectory


@dataclass(frozen=True)
class Identity:
    """Identifies a run on a tracker.

    Attributes:
        run_id: the same for all attempts.
        group: the name of the sweep.
        directory: where files about the run are written, which is the run directory unless another user owns it.
        config: the config without secrets, and the code version.
    """

    run_id: str
    name: str
    group: str | None
    directory: Path
    config: dict[str, Any]

    @classmethod
    def of(cls, config: Config, run: RunDirectory, directory: Path | None = None) -> Identity:
        record = run.record()
        sweep = _sweep_of(run)
        about = {"code": record.get("code"), "versions": record.get("versions"), "run_directory": str(run.path)}
        return cls(
            run_id=record.get("run_id") or run.path.name,
            name=name_of(run),
            group=None if sweep is None else sweep.name,
            directory=directory or run.path,
            config=without_secrets(config) | about,
        )


def name_of(run: RunDirectory) -> str:
    """Returns the name of a run, with that of its sweep."""
    sweep = _sweep_of(run)
    return run.path.name if sweep is None else f"{sweep.name}/{run.path.name}"


def _sweep_of(run: RunDirectory) -> Path | None:
    parent = run.path.parent
    return parent if (parent / "multirun.yaml").exists() else None
