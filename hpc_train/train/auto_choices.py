"""Resolves ``strategy.bucket_cap_mb=auto`` and ``strategy.compression=auto`` and records the choices in ``run.json``.

An attempt in the same layout reuses the choice of an earlier attempt instead of measuring again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from hpc_train.config.schema import Config
from hpc_train.parallel.bucket_search import BucketChoice, Tell
from hpc_train.parallel.compression.auto import choose
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog


def with_known_buckets(config: Config, run: RunDirectory, mesh: Mesh) -> Config:
    """Replaces ``auto`` by the bucket size that an earlier attempt in this layout has chosen. Collective."""
    if config.strategy.bucket_cap_mb != "auto":
        return config
    record: list[Any] = [run.record().get("bucket_cap") if mesh.rank == 0 else None]
    dist.broadcast_object_list(record, src=0, group=mesh.control)
    known = record[0]
    if not known or known["layout"] != str(mesh.layout):
        return config
    return replace(config, strategy=replace(config.strategy, bucket_cap_mb=known["cap_mb"]))


def bucket_choice_recorder(run: RunDirectory, mesh: Mesh, events: EventLog) -> Tell:
    """Returns the callback with which rank 0 writes a bucket choice to the log, the events and ``run.json``."""

    def record(choice: BucketChoice) -> None:
        if mesh.rank != 0:
            return
        seconds = {f"{size:g}": value for size, value in choice.seconds.items()}
        found: dict[str, Any] = {"cap_mb": choice.cap_mb, "seconds": seconds}
        print(choice)
        run.update_record(bucket_cap={"layout": str(mesh.layout), **found})
        events.write("bucket_size_chosen", **found)

    return record


def with_chosen_compression(config: Config, run: RunDirectory, mesh: Mesh, events: EventLog | None = None) -> Config:
    """Replaces ``auto`` by the fastest technique; writes it to the log, ``events`` and ``run.json``. Collective.

    An attempt in the same layout reuses the earlier choice, so that its steps are the same as before.
    """
    if config.strategy.compression != "auto":
        return config
    technique = (
        "none"
        if mesh.layout.dp == 1
        else _recorded_technique(run, mesh) or _measure_technique(config, run, mesh, events)
    )
    return replace(config, strategy=replace(config.strategy, compression=technique))


def _recorded_technique(run: RunDirectory, mesh: Mesh) -> str | None:
    """Returns the technique that ``run.json`` records for this layout; rank 0 reads it for all ranks."""
    record: list[Any] = [run.record().get("compression") if mesh.rank == 0 else None]
    dist.broadcast_object_list(record, src=0, group=mesh.control)
    known = record[0]
    return known["technique"] if known and known["layout"] == str(mesh.layout) else None


def _measure_technique(config: Config, run: RunDirectory, mesh: Mesh, events: EventLog | None) -> str:
    choice = choose(config, mesh)
    if mesh.rank == 0:
        print(choice, flush=True)
        found = {"technique": choice.technique, "seconds": dict(choice.seconds)}
        run.update_record(compression={"layout": str(mesh.layout), **found})
        if events is not None:
            events.write("compression_chosen", step=0, **found)
    return choice.technique
