"""Imports a class or function of the user by its dotted path, or checks it in its source without importing anything.

Workers import; the login node, which may have no torch, reads the file. Names that a file takes from another module
cannot be checked in this way.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hpc_train.config.description_file import definition_in, module_spec, signature_of
from hpc_train.errors import UserError, nearest


def locate(path: str, where: str) -> Callable[..., Any]:
    """Imports a class or function by its dotted path, which may end in a class attribute (``package.Class.create``).

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
            raise _not_imported(path, error, where) from error
        except Exception as error:
            raise _not_imported(path, error, where) from error
        for name in parts[cut:]:
            if not hasattr(found, name):
                raise _not_imported(path, f"{module_name} has no {'.'.join(parts[cut:])}", where)
            found = getattr(found, name)
        if callable(found):
            return found
        raise _not_imported(path, f"it is a {type(found).__name__}, which cannot be called", where)
    raise _not_imported(path, f"there is no module {'.'.join(parts[:-1]) or path}", where)


def _not_imported(path: str, reason: object, where: str) -> UserError:
    detail = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
    return UserError(
        f"{path!r} cannot be imported: {detail}",
        where=where,
        fix="package.module.Name, importable where the workers run (installed, or in the directory of the call)",
    )


def check_source(path: str, arguments: Collection[str], where: str, of_arguments: str) -> None:
    """Checks in the source that ``path`` exists and accepts ``arguments`` after its first, if the file shows that.

    Args:
        where: the config key that holds ``path``.
        of_arguments: the config key that holds ``arguments``.

    Raises:
        UserError: there is no such module, the file does not define the name, or it has no such parameter.
    """
    parts = path.replace(":", ".").split(".")
    cut = next((cut for cut in range(len(parts) - 1, 0, -1) if module_spec(".".join(parts[:cut]))), None)
    if cut is None and parts[0] == "torch" and module_spec("torch") is None:
        return  # workers have torch
    if cut is None:
        raise _not_imported(path, f"there is no module {'.'.join(parts[:-1]) or path}", where)
    spec = module_spec(".".join(parts[:cut]))
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return
    text = Path(spec.origin).read_text(encoding="utf-8")
    found = definition_in(ast.parse(text), parts[cut])
    if not re.search(rf"\b{parts[cut]}\b|\bimport \*|__getattr__", text):
        raise _not_imported(path, f"{spec.origin} defines no {parts[cut]}", where)
    signature = None if found is None or len(parts) > cut + 1 else signature_of(found)
    if signature is None or signature[0].kwarg is not None:
        return
    names = [each.arg for each in (*signature[0].args[signature[1] + 1 :], *signature[0].kwonlyargs)]
    refuse_unknown(path, arguments, names, of_arguments)


def refuse_unknown(path: str, arguments: Collection[str], names: list[str], where: str) -> None:
    """Raises ``UserError`` if one of the ``arguments`` in the config key ``where`` is not among the ``names``."""
    for argument in arguments:
        if argument not in names:
            fix = nearest(argument, names) if names else f"remove {where}.{argument}"
            raise UserError(f"{path} has no parameter {argument}", where=f"{where}.{argument}", fix=fix)
