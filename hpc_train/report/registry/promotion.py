"""Promotes a checkpoint of a run after every byte of it was verified."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpc_train.checkpoint.listing import BEST, NEWEST, Bar, choose_by_name, verified_manifest
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.config.evaluation import BestMetric
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.report.registry.lineage import lineage, shared_config
from hpc_train.report.registry.mlflow import MlflowRegistry
from hpc_train.report.registry.registry import CONFIG, LINEAGE, Model, Promoted, Registry
from hpc_train.report.registry.wandb import WandbRegistry
from hpc_train.run.directory import RunDirectory

LAST = "last"


def registry_of(name: str, config: Config) -> Registry:
    """Returns the registry with the account and project of ``config``.

    Raises:
        UserError: its client is not installed, or its address is missing.
    """
    return WandbRegistry(config.telemetry.wandb) if name == "wandb" else MlflowRegistry(config.telemetry.mlflow)


def promote(
    run: RunDirectory,
    config: Config,
    to: str,
    choice: str,
    metric: BestMetric,
    name: str,
    also: Sequence[str],
    bar: Bar,
) -> dict[str, Any]:
    """Verifies a checkpoint and uploads it as a version of the model ``name``.

    It gets the alias last if it is the newest one of the run, best if it is the best one, and those in ``also``.

    Args:
        to: wandb or mlflow.
        choice: newest, best, or a step.
        metric: that of the best checkpoint.

    Returns:
        A dict of ``step``, ``name``, ``version``, ``aliases``, ``reference`` (for ``checkpoint import``) and ``url``.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or the registry does not accept it.
    """
    registry = registry_of(to, config)
    found = choose_by_name(run, choice, metric)
    with bar("verifying", sum(file.stat().st_size for file in found.path.iterdir())) as advance:
        manifest = verified_manifest(found, advance)
    aliases = list(dict.fromkeys([*also, *_earned(run, found, metric)]))
    about = lineage(run, config, manifest)
    with TemporaryDirectory() as folder:
        notes = Path(folder)
        (notes / CONFIG).write_text(shared_config(config), encoding="utf-8")
        (notes / LINEAGE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        promoted = _upload(registry, Model(run, config, name, found.path, notes, about, aliases), found)
    shown = {"version": promoted.version, "reference": promoted.reference, "url": promoted.url}
    return {"step": found.step, "name": name, "aliases": aliases} | shown


def _upload(registry: Registry, model: Model, found: Checkpoint) -> Promoted:
    try:
        return registry.promote(model)
    except UserError:
        raise
    except Exception as error:  # errors of clients have no common base
        raise UserError(
            f"{registry.name} did not accept the checkpoint of step {found.step}: {type(error).__name__}: {error}",
            where=f"checkpoint promote --to {registry.name}",
            fix="repeat the command when the service responds; a running job may also have removed the checkpoint",
        ) from error


def _earned(run: RunDirectory, found: Checkpoint, metric: BestMetric) -> list[str]:
    """Returns the aliases that a checkpoint has by itself."""
    aliases = []
    for alias, choice in ((BEST, BEST), (LAST, NEWEST)):
        try:
            if choose_by_name(run, choice, metric) == found:
                aliases.append(alias)
        except UserError:  # no checkpoint was evaluated
            continue
    return aliases
