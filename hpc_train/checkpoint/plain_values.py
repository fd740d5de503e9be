"""Writes nested plain values with tensors as JSON, which loads without running code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hpc_train.errors import UserError


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the dotted path of each tensor in nested dicts, lists and tuples."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        items = ()
    for key, item in items:
        inner = f"{path}.{key}".lstrip(".")
        if isinstance(item, Tensor):
            yield inner, item
        else:
            yield from tensors_in(item, inner)


# JSON has no dictionaries with other keys than text and no tuples; these are objects with one of these keys.
DICT, TUPLE, TENSOR = "__dict__", "__tuple__", "__tensor__"


def encoded(value: Any, owner: str, where: str, path: str = "") -> Any:
    """Returns JSON for ``value``, in which a tensor is only the path under which the checkpoint holds it.

    Args:
        owner, where: what has the value, and where it comes from, for messages.

    Raises:
        UserError: a part of the value is not of a plain type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if path:
            return {TENSOR: path}
    elif isinstance(value, Mapping):
        return {DICT: [[key, encoded(item, owner, where, f"{path}.{key}".lstrip("."))] for key, item in value.items()]}
    elif isinstance(value, list | tuple):
        items = [encoded(item, owner, where, f"{path}.{number}".lstrip(".")) for number, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {TUPLE: items}
    raise UserError(
        f"the state of {owner} has a {type(value).__name__}{f' at {path}' if path else ''}, which no checkpoint holds",
        where=where,
        fix="numbers, text, tensors, and lists, tuples and dicts of them",
    )


def decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value of the JSON that ``encoded`` returned, with ``tensors`` by their paths."""
    if isinstance(value, list):
        return [decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if TUPLE in value:
        return tuple(decoded(item, tensors) for item in value[TUPLE])
    return {key: decoded(item, tensors) for key, item in value[DICT]}
