"""Defines a model registry, and what it stores of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory

# the layout of a stored model
CHECKPOINT, CONFIG, LINEAGE = "checkpoint", "config.yaml", "lineage.json"
REGISTRIES = ("wandb", "mlflow")


@dataclass(frozen=True)
class Model:
    """Describes a verified checkpoint to a registry.

    Attributes:
        name: the name of the model in the registry.
        folder: the directory of the checkpoint.
        notes: a directory with the config and the lineage.
        about: see ``lineage``.
    """

    run: RunDirectory
    config: Config
    name: str
    folder: Path
    notes: Path
    about: Mapping[str, Any]
    aliases: Sequence[str]


@dataclass(frozen=True)
class Promoted:
    """Holds a model version, with its reference for ``checkpoint import`` and its page."""

    version: str
    reference: str
    url: str | None


class Registry(Protocol):
    """Stores versions of models, each with aliases."""

    name: ClassVar[str]

    def promote(self, model: Model) -> Promoted:
        """Uploads a checkpoint as a new version, unless one has the same files, and sets the aliases of the version."""

    def fetch(self, reference: str, to: Path) -> None:
        """Downloads a version into the directory ``to``.

        Args:
            reference: without the name of the registry, e.g. NAME@ALIAS.
        """


def bad_reference(reference: str, form: str) -> UserError:
    return UserError(f"{reference!r} is not a version of a model", where="checkpoint import", fix=f"write {form}")
