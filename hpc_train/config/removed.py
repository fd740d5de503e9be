"""Config keys of earlier versions: what replaces them, and which of their values a frozen run may have had.

A config that still sets such a key is refused with the replacement. A run that an earlier version froze is read without
the key, unless its value changed what the run computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_train.errors import UserError


@dataclass(frozen=True)
class Removed:
    """Describes one removed key, or a removed table of keys.

    Attributes:
        fix: what replaces it.
        same: the values with which a frozen run computes the same without the key; None for all values.
    """

    fix: str
    same: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class RemovedValue:
    """Describes one removed value of a key.

    Attributes:
        fix: what replaces it.
        recorded: the keys of ``run.json`` with which a frozen run records what it used instead.
        value: with which a run is read that has no such record.
    """

    fix: str
    recorded: tuple[str, ...]
    value: Any


REMOVED_VALUES: dict[tuple[str, str], RemovedValue] = {
    ("strategy.bucket_cap_mb", "auto"): RemovedValue(
        "strategy.bucket_cap_mb=MB; `python -m hpc_train bench step` measures sizes and prints the fastest",
        ("bucket_cap", "cap_mb"),
        25.0,
    ),
    ("optim.moments", "8bit"): RemovedValue(
        "optim.moments=bf16, or torchao's optimizer: optim=custom optim._target_=torchao.optim.AdamW8bit", (), "bf16"
    ),
    ("strategy.compression", "auto"): RemovedValue(
        "strategy.compression=none, fp16, bf16, powersgd or topk; `python -m hpc_train bench step` measures them and "
        "prints the one that pays",
        ("compression", "technique"),
        "none",
    ),
}

# keys of cluster -> the option of sbatch that they set, which a frozen run keeps in cluster.extra
SBATCH_OPTIONS = {"mail_user": "mail-user", "mail_type": "mail-type", "nice": "nice", "licenses": "licenses"}
REMOVED: dict[str, Removed] = {
    **{f"cluster.{key}": Removed(f"+cluster.extra.{option}=VALUE") for key, option in SBATCH_OPTIONS.items()},
    "strategy.compression_momentum": Removed("remove it, and keep optim.momentum", same=(0, 0.0)),
    "strategy.compression_warmup_steps": Removed(
        "strategy.compression=none for the first steps; the same run.name then continues with compression", same=(0,)
    ),
    "strategy.static_graph": Removed(
        "remove it; strategy.data_parallel=allreduce trains models that do not use all parameters in each step",
        same=(False,),
    ),
    "checkpoint.visibility_timeout_s": Removed(
        "remove it; a load waits 75 s for a file of a checkpoint on a network file system"
    ),
    "precision.loss_scale_init": Removed(
        "remove it; the loss scale of fp16 begins at 65536 and doubles after 2000 finite steps"
    ),
    "precision.loss_scale_growth_interval": Removed(
        "remove it; the loss scale of fp16 begins at 65536 and doubles after 2000 finite steps"
    ),
    "checkpoint.archive": Removed(
        "copy checkpoints/step-* of the run to another file system, such as with rsync; after a purge copy them back"
    ),
    "train.gc_every": Removed("remove it; Python's garbage collections run every 100 steps on all ranks"),
    "telemetry.csv": Removed("remove it; docs/howto/tracking.md makes a table of RUN/metrics/*.jsonl with pandas"),
    "telemetry.messages": Removed(
        "run.on_event=COMMAND, which gets each event; examples/webhook.sh posts those that matter to a webhook"
    ),
}


def replacement_of(key: str) -> str | None:
    """Returns what replaces a removed ``key``, or the removed table that contains it; None for other keys."""
    names = key.split(".")
    heads = (".".join(names[: length + 1]) for length in range(len(names)))
    return next((REMOVED[head].fix for head in heads if head in REMOVED), None)


def removed_value(key: str, value: str) -> UserError | None:
    """Returns the error for a value that ``key`` had in earlier versions; None for other values."""
    removed = REMOVED_VALUES.get((key, value))
    if removed is None:
        return None
    return UserError(f"{key}={value} no longer exists", where=key, fix=removed.fix)


def without_removed(config: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a frozen config without the removed keys and values.

    Args:
        record: ``run.json`` of the run.

    Raises:
        UserError: the value of a removed key changed what the run computes.
    """
    result = {group: dict(values) if isinstance(values, Mapping) else values for group, values in config.items()}
    cluster = result.get("cluster")
    if isinstance(cluster, dict):
        options = {option: cluster[key] for key, option in SBATCH_OPTIONS.items() if cluster.get(key) is not None}
        if options:
            cluster["extra"] = {**options, **cluster.get("extra", {})}
    for key, removed in REMOVED.items():
        group, name = key.split(".")
        values = result.get(group)
        if not isinstance(values, dict) or name not in values:
            continue
        value = values.pop(name)
        if removed.same is not None and value not in removed.same:
            raise UserError(
                f"the run was frozen with {key}={value}, which this version of hpc_train does not have",
                where=key,
                fix="use the version that froze it, or start a new run with another run.name",
            )
    for (key, value), replaced in REMOVED_VALUES.items():
        group, name = key.split(".")
        values = result.get(group)
        if isinstance(values, dict) and values.get(name) == value:
            recorded: Any = record if replaced.recorded else None
            for part in replaced.recorded:
                recorded = recorded.get(part) if isinstance(recorded, Mapping) else None
            values[name] = replaced.value if recorded is None else recorded
    return result
