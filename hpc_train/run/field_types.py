"""Checks the fields of a dataclass against their annotations.

A peer's message becomes a value that is used later, when nobody knows who sent it. A wrong type must be found while its
sender is known.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

Check = Callable[[Any], bool]


def check_fields(value: Any) -> None:
    """Checks all fields of the dataclass ``value``, and of those in it. Numbers must be finite.

    Raises:
        TypeError: a field has another type than its annotation.
    """
    for name, check in _checks_of(value.__class__):
        field = getattr(value, name)
        if not check(field):
            for inner in field if isinstance(field, tuple) else (field,):
                if is_dataclass(inner):
                    check_fields(inner)  # names the field of it that is wrong
            raise TypeError(f"{type(value).__name__}.{name} is {field!r:.100}")


@cache
def _checks_of(type_: Any) -> tuple[tuple[str, Check], ...]:
    hints = typing.get_type_hints(type_)
    return tuple((field.name, _check_of(hints[field.name])) for field in fields(type_))


def _check_of(hint: Any) -> Check:
    """Returns the check for an annotation made of the types that JSON messages and frozen dataclasses contain."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [_check_of(argument) for argument in arguments]
        return lambda value: any(check(value) for check in options)
    if origin is not None:
        return _check_of_tuple(arguments) if origin is tuple else _check_of_mapping(*arguments)
    if is_dataclass(hint):
        return lambda value: type(value) is hint and _are_checked(value)
    return _SPECIAL.get(hint, lambda value: type(value) is hint)  # by the type itself, so that True is not a number


_PLAIN = (int, str, bool)
_SPECIAL: dict[Any, Check] = {
    Any: lambda value: True,
    float: lambda value: type(value) in (int, float) and math.isfinite(value),
}


def _check_of_mapping(key: Any, content: Any) -> Check:
    of_key, of_content = _check_of(key), _check_of(content)
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
