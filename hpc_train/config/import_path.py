"""Imports a class or function of the user by its dotted path. Only workers do this."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hpc_train.config.source_check import not_imported


def locate(path: str, where: str) -> Callable[..., Any]:
    """Imports the class or function ``package.module.Name`` or ``package.module:Name``.

    The path may end in an attribute of a class (``package.Class.create``).

    Args:
        where: the config key that holds ``path``, for messages.

    Raises:
        UserError: it cannot be imported or called.
    """
    parts = path.replace(":", ".").split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name + ".").startswith(error.name + "."):
                continue  # a shorter path may be the module, and the rest a class and its attribute
            raise not_imported(path, error, where) from error
        except Exception as error:
            raise not_imported(path, error, where) from error
        for name in parts[cut:]:
            if not hasattr(found, name):
                raise not_imported(path, f"{module_name} has no {'.'.join(parts[cut:])}", where)
            found = getattr(found, name)
        if callable(found):
            return found
        raise not_imported(path, f"it is a {type(found).__name__}, which cannot be called", where)
    raise not_imported(path, f"there is no module {'.'.join(parts[:-1]) or path}", where)
