"""What makes a run the same run: the keys that may not change when a name is used again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import Config


def identity(config: Config) -> dict[str, Any]:
    """The identity keys, flat: model, data, global batch, optimizer, seed, reproducibility. Others may change."""
    nested = {
        "model": asdict(config.model),
        "data": asdict(config.data),
        "optim": {key: value for key, value in asdict(config.optim).items() if key != "moments"},  # a format
        "batch": {
            "global_size": config.batch.global_size,
            "logical_micro_batches": config.batch.logical_micro_batches,
        },
        "train": {"seed": config.train.seed, "reproducible": config.train.reproducible},
    }
    return dict(_flat(nested))


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """``key: old -> new`` for each key that differs."""
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in keys
        if before.get(key, "absent") != after.get(key, "absent")
    ]


def check_identity(old: Config, new: Config) -> None:
    """Raises ConfigError where an identity key of ``new`` differs from the run's frozen config ``old``."""
    different = changes(identity(old), identity(new))
    if different:
        raise ConfigError(
            f"the run {new.run.name} was started with another configuration: " + "; ".join(different),
            where=", ".join(change.split(":")[0] for change in different),
            mend="the old values to go on with this run; run.fork=NEWNAME to start a new run from its newest "
            "checkpoint; or another run.name to begin at step 0",
        )


def flat(config: Config) -> dict[str, Any]:
    """All keys of a config, dotted."""
    return dict(_flat(asdict(config)))


def _flat(nested: dict[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{head}{key}.")
        else:
            yield f"{head}{key}", value
