"""Looks into what a module holds besides parameters, buffers and modules: containers, and objects of users' classes."""

from __future__ import annotations

import re
import sys
from collections import UserDict, UserList, deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module, such as its parameters
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, deque)
_SCALARS = (bool, int, float, str, bytes, type(None))
_LIBRARIES = frozenset(("hpc_train", "torch", *sys.stdlib_module_names))


def held_by(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yields the attributes of ``modules``, and what is in their containers and objects, each once.

    Numbers and texts are left out. Modules are yielded and not entered.
    """
    seen: dict[int, Any] = {}
    left = [value for module in modules for name, value in vars(module).items() if name not in OF_TORCH]
    while left:
        value = left.pop()
        if not isinstance(value, _SCALARS) and id(value) not in seen:
            seen[id(value)] = value
            yield value
            left += elements(value)


def elements(value: Any) -> list[Any]:
    """Returns the elements of a container, or the dict of an object's attributes; nothing for any other value."""
    if isinstance(value, dict):
        return [*dict.values(value)]
    for kind in _SEQUENCES:
        if isinstance(value, kind):
            return [*kind.__iter__(value)]
    if is_object(value):
        return [vars(value)]
    return []


def is_object(value: Any) -> bool:
    """Returns whether ``value`` has attributes, and its class is in no installed package.

    Objects of packages are not entered: they may stand for files, threads and memory of devices.
    """
    if isinstance(value, SimpleNamespace | UserDict | UserList):
        return True
    if isinstance(value, type | nn.Module | Tensor) or not hasattr(value, "__dict__"):
        return False
    module = type(value).__module__
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] not in _LIBRARIES and not re.search(r"/(site|dist)-packages/", file)
