"""Lists config keys of earlier versions, what replaces them, and the values that a frozen run may have had for them.

A renamed key is read under its new name, with a notice. A config that sets a removed key is refused with the
replacement. A run that an earlier version froze is read without the removed key, unless its value changed what the run
computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_train.errors import UserError
from hpc_train.opening import tell_once

# the name in earlier versions -> the current name, in the same group
RENAMED = {
    f"cluster.{name}": f"cluster.extra.{name.replace('_', '-')}"
    for name in (
        "begin", "dependency", "job_name", "licenses", "mail_type", "mail_user", "nice", "reservation", "switches",
        "wckey",
    )
}  # fmt: skip


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
        value: the value with which a run without such a record is read.
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
        "prints the one that pays off",
        ("compression", "technique"),
        "none",
    ),
}

REMOVED: dict[str, Removed] = {
    "cluster.fabric.source": Removed("remove it, or make it a comment of the profile"),
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


def apply_new_names(values: dict[str, Any], package: str = "") -> Iterator[str]:
    """Replaces the renamed keys in ``values``, the nested values of a config or a file, with their current names.

    Args:
        package: the group to which all keys of the file belong; empty if they are below the names of their groups.

    Yields:
        Each name of an earlier version that was found, in full.
    """
    table = values if package == "cluster" else values.get("cluster")
    if package not in ("", "cluster") or not isinstance(table, dict):
        return
    for earlier, present in RENAMED.items():
        name = earlier.removeprefix("cluster.")
        if name not in table:
            continue
        if not isinstance(table.get("extra"), dict):
            table["extra"] = {}
        table["extra"].setdefault(present.removeprefix("cluster.extra."), table.pop(name))
        yield earlier


def tell_new_name(earlier: str, where: str) -> None:
    """Prints the notice that ``where`` sets a key by its name in an earlier version."""
    present = RENAMED[earlier]
    tell_once(f"note: {where}: {earlier} was renamed to {present}; the old name will not work in version 2.0")


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
    """Returns the values of a frozen config with the current names of its keys, without removed keys and values.
    ``record`` is ``run.json`` of the run. Raises UserError if the value of a removed key changed what the run
    computes."""
    result = {group: dict(values) if isinstance(values, Mapping) else values for group, values in config.items()}
    for group, _, name in (key.partition(".") for key in RENAMED):
        if isinstance(result.get(group), dict) and result[group].get(name) is None:
            result[group].pop(name, None)  # a null had no effect
    list(apply_new_names(result))
    for key, removed in REMOVED.items():
        *groups, name = key.split(".")
        values: Any = result
        for group in groups:
            values = values.get(group) if isinstance(values, dict) else None
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
