"""Compares configs key by key, and refuses changes of the keys that define what makes a run the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.config.secrets import shown
from hpc_train.errors import UserError

# keys of optim that decide how an update is computed and stored, and not what
_HOW_OPTIMIZED = ("moments", "elementwise", "state_per_parameter", "in_backward")


def identity(config: Config) -> dict[str, Any]:
    """Returns the identity keys, flat: model, data, global batch, optimizer, seed, reproducibility, z-loss, and the
    user's function; of a command only that there is one, as its arguments may say how far to train.
    """
    nested = {
        "model": asdict(config.model),
        "data": asdict(config.data),
        "optim": {key: value for key, value in asdict(config.optim).items() if key not in _HOW_OPTIMIZED},
        "batch": {"global_size": config.batch.global_size, "logical_micro_batches": config.batch.logical_micro_batches},
        "train": {key: getattr(config.train, key) for key in ("seed", "reproducible", "z_loss")},
        "run": {"entry": config.run.entry, "command": None if config.run.command is None else "set"},
    }
    return dict(flatten(nested))


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns ``key: old -> new`` for each key that differs, without the values of ``cluster.env``."""
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key}: {shown(key, before.get(key, 'absent'))} -> {shown(key, after.get(key, 'absent'))}"
        for key in keys
        if before.get(key, "absent") != after.get(key, "absent")
    ]


def check_identity(old: Config, new: Config) -> None:
    """Raises UserError if an identity key of ``new`` differs from the run's frozen config ``old``."""
    different = changes(identity(old), identity(new))
    if different:
        raise UserError(
            f"the run {new.run.name} was started with a different configuration: " + "; ".join(different),
            where=", ".join(change.split(":")[0] for change in different),
            fix="use the old values to continue this run, run.fork=NEWNAME to start a new run from its newest "
            "checkpoint, or another run.name to begin at step 0",
        )


def flat(config: Config) -> dict[str, Any]:
    """Returns all keys of a config as dotted names."""
    return dict(flatten(asdict(config)))


def flatten(nested: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings with their dotted names; an empty mapping is a value."""
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{head}{key}.")
        else:
            yield f"{head}{key}", value
