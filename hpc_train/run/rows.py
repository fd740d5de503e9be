"""Checks the types of the data in a run directory: lines of metrics, events, the record and other small records.

Anybody may have written them. A line without a required field is left out, and any other field of a wrong type counts
as absent, so that the readers need no checks.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Generic, TypeVar

Row = dict[str, Any]
Check = Callable[[Any], bool]
T = TypeVar("T")

LATEST = 1e11  # the latest time in seconds since 1970, which still converts to a date
HIGHEST = 1e100  # the largest number; the product of two such numbers is finite
MOST = 1 << 53  # the largest count
MOST_JOBS = 1000  # the longest chain of jobs, since squeue is called with all their ids
_JOB_ID = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?")  # 12 or, of an array, 12_3


def number(value: Any) -> bool:
    return type(value) in (int, float) and -HIGHEST < value < HIGHEST


def at_least_0(value: Any) -> bool:
    return number(value) and value >= 0


def seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < LATEST


def count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def text(value: Any) -> bool:
    return type(value) is str


def job_id(value: Any) -> bool:
    return type(value) is str and _JOB_ID.fullmatch(value) is not None


def other_job_id(value: Any) -> bool:
    """Returns whether ``value`` may be the id of a job in a scheduler other than Slurm."""
    return type(value) is str and re.fullmatch(r"\w[\w.@/:\[\]-]{,250}", value) is not None


def flag(value: Any) -> bool:
    return type(value) is bool


def group(value: Any) -> bool:
    return type(value) is dict


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def dict_of(check: Check) -> Check:
    return lambda value: type(value) is dict and all(map(check, value.values()))


def record_of(**checks: Check) -> Check:
    """Returns the check of an object that has all of these fields."""
    return lambda value: (
        type(value) is dict and all(name in value and check(value[name]) for name, check in checks.items())
    )


def _plain(value: Any) -> bool:
    return value is None or type(value) in (str, bool) or number(value)


def typed(row: Row, checks: Mapping[str, Check], required: tuple[str, ...] = ()) -> Row | None:
    """Returns ``row`` without the fields that fail their check, or ``row`` itself if all pass.

    Returns None if a ``required`` field fails its check, is null or is absent.
    """
    wrong = {name for name in checks.keys() & row.keys() if not checks[name](row[name])}
    if any(name in wrong or row.get(name) is None for name in required):
        return None
    return {name: value for name, value in row.items() if name not in wrong} if wrong else row


NAMED = {"time": seconds, "step": count, "attempt": count, "world_size": count, "loss": or_none(number)}
IN_SECONDS = ("step_s", "save_s", "eval_s", "verify_s")
RATES = ("samples_per_s", "tokens_per_s", "samples", "tokens", "peak_memory_bytes")
METRICS: dict[str, Check] = {
    **NAMED,
    **dict.fromkeys(IN_SECONDS, or_none(seconds)),
    **dict.fromkeys(RATES, or_none(at_least_0)),
    **dict.fromkeys(
        ("mfu", "mfu_of_precision", "hfu", "gpu_util", "host_share", "data_wait_share", "comm_share"), or_none(number)
    ),
    **dict.fromkeys(("bubble_share", "val_loss", "val_accuracy", "loss_scale"), or_none(number)),
    "expert_load": list_of(list_of(number)),
}


def mfu_name(line: Mapping[str, Any]) -> str:
    """Returns what ``mfu`` of a line of metrics is. Before 0.9.0 it was relative to the peak in the run's precision."""
    if line.get("mfu_of_precision") is None:
        return "MFU of the peak in the run's precision"
    return "MFU"


class Field(Generic[T]):
    """Makes a field of a row an attribute, with a value for rows that lack the field."""

    def __init__(self, name: str, default: T) -> None:
        self._name = name
        self._default = default

    def __get__(self, row: dict[str, Any], of: type) -> T:
        value: T = row.get(self._name, self._default)
        return value


class Line(dict[str, Any]):
    """Holds a line of metrics: numbers, texts and null by name; the usual ones are also attributes."""

    time = Field("time", 0.0)
    attempt = Field("attempt", 0)
    step = Field("step", 0)
    loss = Field[float | None]("loss", None)
    step_s = Field[float | None]("step_s", None)
    eval_s = Field[float | None]("eval_s", None)
    save_s = Field[float | None]("save_s", None)
    verify_s = Field[float | None]("verify_s", None)
    peak_memory_bytes = Field[int | None]("peak_memory_bytes", None)
    val_loss = Field[float | None]("val_loss", None)
    tokens_per_s = Field[float | None]("tokens_per_s", None)
    samples_per_s = Field[float | None]("samples_per_s", None)
    world_size = Field[int | None]("world_size", None)


def metrics_row(row: Row) -> Line | None:
    """Returns a line of metrics: numbers, texts or null by name, of an attempt's ``step``; None for another line."""
    wrong = {key for key, value in row.items() if not METRICS.get(key, _plain)(value)}
    if "step" in wrong or "step" not in row:
        return None
    return Line({key: value for key, value in row.items() if key not in wrong} if wrong else row)


def failure_row(row: Row) -> Row | None:
    """Returns a line of ``attempts/node-failures.jsonl``; None for another line."""
    return typed(row, {"time": seconds, "node": text, "class": text, "times": count}, ("time", "node", "class"))


def text_row(row: Row) -> Row | None:
    """Returns a line of ``texts/``; None for another line."""
    return typed(row, {"step": count, "name": text, "text": text}, ("step", "name", "text"))


CLAIM: dict[str, Check] = {  # the fields of a submission, or of a process that works on the run
    **dict.fromkeys(("clusters", "output", "host", "executor", "pid_started", "scheduler"), or_none(text)),
    "job_id": or_none(job_id),
    "time": seconds,
    "pid": or_none(lambda value: count(value) and 0 < value < 1 << 31),
    "first_attempt": count,
    "chain": lambda value: list_of(job_id)(value) and len(value) <= MOST_JOBS,
}
OTHER_CLAIM = CLAIM | {"job_id": or_none(other_job_id)}
RESULT: dict[str, Check] = METRICS | {
    "steps": count,
    "seconds": seconds,
    "evaluated": text,
    "ended_early": or_none(text),
}
_MEMORY_RANK = record_of(
    peak=at_least_0, parameters=at_least_0, gradients=at_least_0, optimizer=at_least_0, activations=at_least_0
)
RECORD: dict[str, Check] = {
    **dict.fromkeys(("run_id", "config_hash", "next_config_hash", "forked_from", "own_code"), or_none(text)),
    **dict.fromkeys(("loss_warning", "archived_from", "stop_requested_by"), text),
    **dict.fromkeys(("created", "stop_requested"), seconds),
    **dict.fromkeys(("total_steps", "stream_ended"), or_none(count)),
    "overrides": or_none(list_of(text)),
    "versions": dict_of(text),
    "memory": record_of(ranks=list_of(_MEMORY_RANK)),
    "prediction": record_of(predicted=dict_of(or_none(number)), measured=dict_of(or_none(number)), machine=text),
    **dict.fromkeys(("claimed_by", "code", "utilization", "wandb", "result"), group),
    "snapshot": or_none(group),
    "submissions": list_of(group),
}
INSIDE: dict[str, dict[str, Check]] = {  # the fields of the objects in a record; wrong ones count as absent
    "claimed_by": CLAIM,
    "code": {"commit": or_none(text), "dirty": or_none(flag)},
    "wandb": dict.fromkeys(("url", "problem", "mode", "id"), or_none(text)),
    "result": RESULT,
}


def record_of_run(record: Row) -> Row:
    """Returns the content of ``run.json`` without the fields of a wrong type; ``record`` itself if all are right."""
    checked = typed(record, RECORD) or {}
    for name, checks in INSIDE.items():
        inner = checked.get(name)
        if inner and (right := typed(inner, checks)) is not inner:
            checked = checked | {name: right}
    submissions = checked.get("submissions") or []
    claims = [typed(each, OTHER_CLAIM if each.get("scheduler") else CLAIM) for each in submissions]
    if any(after is not before for after, before in zip(claims, submissions, strict=True)):
        checked = checked | {"submissions": claims}
    return checked


ATTEMPT: dict[str, Check] = {
    **dict.fromkeys(("attempt", "nodes", "gpus_per_node", "workers_per_node", "port", "pid"), count),
    **dict.fromkeys(("launch_id", "node", "address"), text),
    "job_id": or_none(text),
    **dict.fromkeys(("layout", "fabric"), group),
}

is_position = record_of(where=text, step=count, texts=count)  # tracking/NAME.json
is_profile = record_of(first=count, last=count, ranks=dict_of(dict_of(number)))  # profile/summary.json

_PRICE = {"currency": text} | dict.fromkeys(
    ("per_gpu_hour", "purchase", "years", "use", "upkeep", "spot", "preemptions_per_day"), or_none(number)
)
CONFIG: dict[
    str, dict[str, Check]
] = {  # section -> the fields that are read from a config without converting it to the schema
    "elastic": {"exclude_hours": seconds},
    "strategy": {"name": text},
    "model": {"kind": text},
    "checkpoint": {"keep_best": or_none(text), "best_mode": text},
    "cluster": {
        "nodes": _plain,
        "price": lambda value: value is None or (group(value) and typed(value, _PRICE) is value),
        "env": or_none(group),
        **dict.fromkeys(("setup", "teardown"), or_none(list_of(text))),
    },
}


def config_sections(config: Row) -> Row:
    """Returns a plain config without the sections and fields of ``CONFIG`` that have a wrong type."""
    sections = {name: value for name, value in config.items() if name not in CONFIG or group(value)}
    return {name: typed(value, CONFIG[name]) if name in CONFIG else value for name, value in sections.items()}


def check_fields(value: Any) -> None:
    """Checks all fields of the dataclass ``value`` and of the dataclasses in it. Numbers must be finite.

    Raises:
        TypeError: a field has another type than its annotation.
    """
    for name, check in _checks_of(value.__class__):
        field = getattr(value, name)
        if not check(field):
            for inner in field if isinstance(field, tuple) else (field,):
                if is_dataclass(inner):
                    check_fields(inner)  # raises with the name of the wrong field in it
            raise TypeError(f"{type(value).__name__}.{name} is {field!r:.100}")


@cache
def _checks_of(type_: Any) -> tuple[tuple[str, Check], ...]:
    hints = typing.get_type_hints(type_)
    return tuple((field.name, _check_of(hints[field.name])) for field in fields(type_))


def _check_of(hint: Any) -> Check:
    """Returns the check for an annotation made of the types that JSON messages and frozen dataclasses contain."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [_check_of(argument) for argument in arguments]
        return lambda value: any(check(value) for check in options)
    if origin is not None:
        return _check_of_tuple(arguments) if origin is tuple else _check_of_mapping(*arguments)
    if is_dataclass(hint):
        return lambda value: type(value) is hint and _are_checked(value)
    return _SPECIAL.get(hint, lambda value: type(value) is hint)  # the exact type, so that True is not a number


_PLAIN = (int, str, bool)
_SPECIAL: dict[Any, Check] = {
    Any: lambda value: True,
    float: lambda value: type(value) in (int, float) and math.isfinite(value),
}


def _check_of_mapping(key: Any, content: Any) -> Check:
    of_key = _check_of(key)
    of_content = _check_of(content)
    return lambda value: isinstance(value, Mapping) and all(map(of_key, value)) and all(map(of_content, value.values()))


def _check_of_tuple(arguments: tuple[Any, ...]) -> Check:
    if arguments[-1] is Ellipsis:
        if arguments[0] in _PLAIN:  # hundreds of numbers per node
            plain = {arguments[0]}
            return lambda value: type(value) is tuple and plain.issuperset(map(type, value))
        check = _check_of(arguments[0])
        return lambda value: type(value) is tuple and all(map(check, value))
    checks = [_check_of(argument) for argument in arguments]
    return lambda value: (
        type(value) is tuple
        and len(value) == len(checks)
        and all(check(item) for check, item in zip(checks, value, strict=True))
    )


def _are_checked(value: Any) -> bool:
    for name, check in _checks_of(value.__class__):  # noqa: SIM110 - faster than all()
        if not check(getattr(value, name)):
            return False
    return True
