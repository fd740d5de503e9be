"""Promotes checkpoints to a model registry after every byte was verified, and imports them from there."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.listing import BEST, NEWEST, Bar, choose_by_name, verified_manifest
from hpc_train.checkpoint.manifest import COMMITTED
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.config.evaluation import BestMetric
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.report.registry import (
    CHECKPOINT,
    CONFIG,
    CONFIG_DIGEST,
    LINEAGE,
    MANIFEST,
    REGISTRIES,
    MlflowRegistry,
    Model,
    Registry,
    WandbRegistry,
    lineage,
    shared_config,
)
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json
from hpc_train.run.imported import PUBLISHED, import_directory

LAST = "last"


def registry_of(name: str, config: Config) -> Registry:
    """Returns the registry with the account and project of ``config``.

    Raises:
        UserError: its client is not installed, or its address is missing.
    """
    if name == "wandb":
        return WandbRegistry(config.telemetry.wandb)
    return MlflowRegistry(config.telemetry.mlflow)


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
    checkpoint = choose_by_name(run, choice, metric)
    with bar("verifying", sum(file.stat().st_size for file in checkpoint.path.iterdir())) as advance:
        manifest = verified_manifest(checkpoint, advance)
    aliases = list(dict.fromkeys(also))
    for alias, its_choice in ((BEST, BEST), (LAST, NEWEST)):
        with suppress(UserError):  # no checkpoint was evaluated
            if alias not in aliases and choose_by_name(run, its_choice, metric) == checkpoint:
                aliases.append(alias)
    about = lineage(run, config, manifest)
    with TemporaryDirectory() as folder:
        notes = Path(folder)
        (notes / CONFIG).write_text(shared_config(config), encoding="utf-8")
        (notes / LINEAGE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        try:
            promoted = registry.promote(Model(run, config, name, checkpoint.path, notes, about, aliases))
        except UserError:
            raise
        except Exception as error:  # errors of clients have no common base
            raise UserError(
                f"{to} did not accept the checkpoint of step {checkpoint.step}: {type(error).__name__}: {error}",
                where=f"checkpoint promote --to {to}",
                fix="repeat the command when the service responds; a running job may also have removed the checkpoint",
            ) from error
    return {"step": checkpoint.step, "name": name, "aliases": aliases} | asdict(promoted)


def is_reference(source: str) -> bool:
    """Returns whether ``source`` names a version in a registry, such as ``mlflow:NAME@ALIAS``, and not a directory."""
    return source.partition(":")[0] in REGISTRIES and ":" in source and not Path(source).exists()


def import_reference(source: str, name: str, root: Path, config: Config) -> dict[str, Any]:
    """Downloads a version, verifies every byte of it, and makes the run ``root``/``name`` of it.

    Args:
        config: gives the address of the registry.

    Returns:
        A dict of ``path``, ``step``, and ``lineage``.

    Raises:
        UserError: there is no such version, it is damaged, or the name is taken.
    """
    directory = import_directory(root, name)
    kind, _, reference = source.partition(":")
    registry = registry_of(kind, config)
    try:
        return _import(directory, lambda to: registry.fetch(reference, to), source)
    except BaseException as error:
        disk.remove(directory.path)  # it was empty before
        if isinstance(error, Exception) and not isinstance(error, UserError):
            raise UserError(
                f"cannot import {source}: {type(error).__name__}: {error}",
                where="checkpoint import",
                fix="check the name and the alias, and that the service responds",
            ) from error
        raise


def _import(directory: RunDirectory, fetch: Callable[[Path], None], source: str) -> dict[str, Any]:
    download = directory.path / ".download"
    download.mkdir(parents=True)
    fetch(download)
    for name in (CHECKPOINT, CONFIG, LINEAGE):
        if not (download / name).exists():
            fix = "import a version that `checkpoint promote` has created"
            raise UserError(f"{source} has no {name}", where="checkpoint import", fix=fix)
    about = read_json(download / LINEAGE)
    manifest = verified_manifest(Checkpoint(about["step"], download / CHECKPOINT))
    config_digest = hashlib.sha256((download / CONFIG).read_bytes()).hexdigest()
    if config_digest != about[CONFIG_DIGEST] or hashlib.sha256(manifest.encode()).hexdigest() != about[MANIFEST]:
        fix = "promote the checkpoint again; somebody has changed the files in the registry"
        raise UserError(f"{source} differs from its lineage", where="checkpoint import", fix=fix)
    directory.create()
    (download / CONFIG).rename(directory.config)
    (download / CHECKPOINT / COMMITTED).unlink(missing_ok=True)  # the rename commits it
    (download / CHECKPOINT).rename(directory.checkpoints / f"step-{manifest.step:08d}")
    directory.update_record(
        run_id=secrets.token_hex(4),
        created=time.time(),
        config_hash=config_digest,
        imported_from=source,
        lineage=about,
        published=about.get(PUBLISHED),
    )
    disk.remove(download)
    return {"path": str(directory.path), "step": manifest.step, "lineage": about}
