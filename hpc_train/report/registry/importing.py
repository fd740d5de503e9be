"""Imports a version of a model from a registry as a run directory, for ``run.fork``, ``evaluate`` and ``generate``."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.listing import verified_manifest
from hpc_train.checkpoint.manifest import COMMITTED
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.report.registry.lineage import CONFIG_DIGEST, MANIFEST
from hpc_train.report.registry.promotion import registry_of
from hpc_train.report.registry.registry import CHECKPOINT, CONFIG, LINEAGE, REGISTRIES
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json
from hpc_train.run.imported import PUBLISHED, import_directory


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
