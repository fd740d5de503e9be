"""Describes where a checkpoint comes from: run, code, data, config, and the digests of its files."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from hpc_train.checkpoint.manifest import Manifest
from hpc_train.config.schema import Config
from hpc_train.config.secrets import without_secrets
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import text_of
from hpc_train.run.imported import PUBLISHED, published

MANIFEST, CONFIG_DIGEST = "manifest_sha256", "config_sha256"


def shared_config(config: Config) -> str:
    """Returns the config as text for a registry: without the environment and setup of the jobs, which may be secret."""
    return text_of(replace(config, cluster=replace(config.cluster, env={}, setup=[], teardown=[])))


def lineage(run: RunDirectory, config: Config, manifest: Manifest) -> dict[str, Any]:
    """Returns what a registry keeps beside the files of a checkpoint.

    The keys are step, run_id, run (the directory), parent_run (that it was forked from), config_sha256 (of
    ``shared_config``), code (the version of the code), versions (of packages), data (its config), metrics (of the
    evaluation at this step), published (see ``published``), manifest_sha256, and digests (xxh3-128 of each file).
    """
    record = run.record()
    return {
        "step": manifest.step,
        "run_id": record.get("run_id") or run.path.name,
        "run": str(run.path),
        "parent_run": record.get("forked_from"),
        CONFIG_DIGEST: hashlib.sha256(shared_config(config).encode()).hexdigest(),
        "code": record.get("code"),
        "versions": record.get("versions"),
        "data": without_secrets(config)["data"],
        "metrics": dict(manifest.metrics),
        PUBLISHED: published(run),
        MANIFEST: hashlib.sha256(manifest.encode()).hexdigest(),
        "digests": {name: entry.digest for name, entry in manifest.files.items()},
    }
