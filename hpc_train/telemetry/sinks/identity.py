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
        directory: the run directory.
        config: the config without secrets, and the code version.
    """

    run_id: str
    name: str
    group: str | None
    directory: Path
    config: dict[str, Any]

    @classmethod
    def of(cls, config: Config, run: RunDirectory) -> Identity:
        record = run.record()
        sweep = run.path.parent if _is_sweep(run.path.parent) else None
        about = {"code": record.get("code"), "versions": record.get("versions"), "run_directory": str(run.path)}
        return cls(
            run_id=record.get("run_id") or run.path.name,
            name=run.path.name if sweep is None else f"{sweep.name}/{run.path.name}",
            group=None if sweep is None else sweep.name,
            directory=run.path,
            config=without_secrets(config) | about,
        )


def _is_sweep(folder: Path) -> bool:
    return (folder / "multirun.yaml").exists()
