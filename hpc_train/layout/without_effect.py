"""Finds the keys that a user sets although nothing reads them in this job, such as ``optim.betas`` with SGD.

The schema states when a key is read (``config.schema.key``). Such a key gets a notice and is not a mistake,
because the jobs of a sweep over optimizers or strategies share their other keys. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.config.schema.key import FACTS, KeyInfo, info
from hpc_train.config.values import runs_own_code
from hpc_train.layout.layout import Layout
from hpc_train.layout.recomputation import OFFLOAD, kept_if_less
from hpc_train.layout.shape import JobShape, Place
from hpc_train.units import format_bytes

# groups whose keys custom code reads as it likes; ``layout.own_code`` says what applies
READ_BY_OWN_CODE = ("strategy", "model", "data", "optim", "precision", "train", "batch", "checkpoint")
SHOWN_JOBS = 5


@dataclass(frozen=True)
class WithoutEffect:
    """A key that a job does not read.

    Attributes:
        key: its dotted name.
        shown: the override, or the key with its file.
        reason: continues "has no effect".
        fix: what gives it an effect.
    """

    key: str
    shown: str
    reason: str
    fix: str


def without_effect(config: Config, layout: Layout, shape: JobShape, own: Mapping[str, str]) -> list[WithoutEffect]:
    """Returns the keys among ``own`` that this job does not read.

    Args:
        own: the keys that the user sets, by dotted name, as messages show them.
    """
    facts = facts_of(config, layout, shape)

    def value_of(subject: str) -> Any:
        return facts[subject] if subject in FACTS else _value(config, subject)

    found = []
    for name, shown in own.items():
        known = None if _belongs_to_own_code(config, name) else _find(config, name)
        failed = next((each for each in known.reads if not each.holds(value_of)), None) if known is not None else None
        if failed is not None:
            found.append(WithoutEffect(name, shown, failed.fails(value_of), failed.fix))
    kept = kept_if_less(config, layout) if OFFLOAD in own else None
    if kept is not None:
        reason = f"on layers that keep {format_bytes(kept)} for a micro-batch"
        found.append(WithoutEffect(OFFLOAD, own[OFFLOAD], reason, f"set {OFFLOAD} to less than the size of a tensor"))
    return found


def _belongs_to_own_code(config: Config, name: str) -> bool:
    return runs_own_code(config) and name.partition(".")[0] in READ_BY_OWN_CODE


def facts_of(config: Config, layout: Layout, shape: JobShape) -> dict[str, bool]:
    """Returns the value of each of ``FACTS`` for a job."""
    path = getattr(config.data, "path", None)
    hub = getattr(config.model, "name_or_path", None)
    several = layout.dp_cp > 1
    launched = shape.place is not Place.FOREGROUND
    return {
        "launched": launched,
        "submitted": shape.place is Place.SLURM,
        "step": launched and shape.in_job,
        "in_job": shape.in_job,
        "gpus": shape.gpus > 0,
        "cpus": shape.gpus == 0,
        "nodes": shape.nodes + config.elastic.spares > 1,
        "replicas": several,
        "buckets": several and not layout.kind.shards and not layout.logical_micro_batches,
        "shards": layout.shards_state,
        "pipeline": layout.pp > 1,
        "directory": path is None or Path(str(path)).is_dir(),
        "hub": hub is None or not Path(str(hub)).is_dir(),
    }


def _value(config: Config, key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name, None)
    return node


def _find(config: Config, key: str) -> KeyInfo | None:
    """Returns what the schema says about ``key``, or about the table that has it."""
    node: Any = config
    for name in key.split("."):
        each = next((each for each in fields(node) if each.name == name), None) if is_dataclass(node) else None
        if each is None:
            return None
        known = info(each)
        node = getattr(node, name)
        if known is not None and not is_dataclass(node):
            return known
    return None


def notices(jobs: Mapping[int, Sequence[WithoutEffect]]) -> list[str]:
    """Returns one line for the keys that have no effect for the same reason, from the keys of jobs by their number."""
    alike: dict[tuple[str, str, tuple[int, ...]], dict[str, set[str]]] = {}
    for (key, reason, fix), (numbers, shown) in _by_key(jobs).items():
        alike.setdefault((reason, fix, tuple(numbers)), {})[key] = shown
    return [_line(reason, fix, where, keys, len(jobs)) for (reason, fix, where), keys in alike.items()]


def _by_key(jobs: Mapping[int, Sequence[WithoutEffect]]) -> dict[tuple[str, str, str], tuple[list[int], set[str]]]:
    found: dict[tuple[str, str, str], tuple[list[int], set[str]]] = {}
    for number, unread in jobs.items():
        for each in unread:
            numbers, shown = found.setdefault((each.key, each.reason, each.fix), ([], set()))
            numbers.append(number)
            shown.add(each.shown)
    return found


def _line(reason: str, fix: str, where: Iterable[int], keys: Mapping[str, set[str]], jobs: int) -> str:
    names = [next(iter(shown)) if len(shown) == 1 else key for key, shown in keys.items()]
    *first, last = names
    listed = f"{', '.join(first)} and {last} have" if first else f"{last} has"
    numbers = [*where]
    some = f" in {_jobs(numbers)}" if len(numbers) < jobs else ""
    return f"note: {listed} no effect {reason}{some}; remove {'them' if first else 'it'}, or {fix}"


def _jobs(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:SHOWN_JOBS]))
    more = f" and {len(numbers) - SHOWN_JOBS} more" if len(numbers) > SHOWN_JOBS else ""
    return f"{'jobs' if len(numbers) > 1 else 'job'} {named}{more}"
