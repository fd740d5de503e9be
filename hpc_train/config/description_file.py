"""Loads a description or a row of a user's own package, named as ``module:attribute``, without importing torch.

The package's ``__init__.py`` may import torch, so only the named file is executed. Files with torch code, such as
builders, are parsed and not executed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from hpc_train.config.source_check import module_spec
from hpc_train.errors import UserError

_FORBIDDEN = "torch"


def location(path: str) -> str:
    """Returns the file of ``module:attribute`` for messages, or ``path`` itself if there is no such file."""
    spec = module_spec(path.partition(":")[0])
    return spec.origin if spec is not None and spec.origin else path


def import_without_torch(path: str, key: str) -> Any:
    """Returns the object at ``module:attribute``.

    Args:
        key: the config key that names it, for messages.

    Raises:
        UserError: the file or the attribute does not exist, or the file cannot be executed or imports torch.
    """
    name, separator, attribute = path.partition(":")
    spec = module_spec(name) if separator and attribute else None
    if spec is None or spec.loader is None:
        raise UserError(
            f"the module of {path} cannot be found" if separator else f"{path!r} is not an import path",
            where=key,
            fix=f"{key}=package.module:NAME, where package is in the current directory or on PYTHONPATH",
        )
    module = sys.modules.get(name) or _execute(spec, path)
    if not hasattr(module, attribute):
        raise UserError(
            f"{spec.origin} defines no {attribute}", where=key, fix=f"{key}={name}:NAME, where NAME is defined there"
        )
    return getattr(module, attribute)


def _execute(spec: ModuleSpec, path: str) -> ModuleType:
    """Executes one file as a module. Its parent packages are executed only if the file imports them."""
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their annotations in sys.modules
    try:
        if _imports_torch(spec):
            raise _TorchImported(_FORBIDDEN)
        with _without_torch():
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise _explained(error, path, str(spec.origin)) from error
    return module


def _explained(error: Exception, path: str, file: str) -> UserError:
    """Returns the message for an error that the execution of ``file`` raised."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, _TorchImported):
        fix = "move the torch code to another file and name it as module:attribute; submission cannot import torch"
        return UserError(f"{path} imports torch", where=file, fix=fix)
    missing = re.findall(r"'(\w+)'", str(error)) if isinstance(error, TypeError) and "missing" in str(error) else []
    if missing:
        fix = ", ".join(f"{name}=..." for name in missing)
        return UserError(f"{path} does not state {', '.join(missing)}", where=file, fix=f"add {fix}")
    if isinstance(error, ValueError):  # contradictory facts
        return UserError(f"{path}: {error}", where=file, fix="correct the values in this file")
    return UserError(f"{path} cannot be loaded: {type(error).__name__}: {error}", where=file, fix="correct the file")


def _imports_torch(spec: ModuleSpec) -> bool:
    """Returns whether the file itself imports torch at its top level, also in a process that already has torch."""
    if not spec.origin or not spec.origin.endswith(".py"):
        return False
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    names = [alias.name for each in body if isinstance(each, ast.Import) for alias in each.names]
    names += [each.module or "" for each in body if isinstance(each, ast.ImportFrom) and each.level == 0]
    return any(name.partition(".")[0] == _FORBIDDEN for name in names)


class _TorchImported(ImportError):
    """Signals that a description imports torch."""


class _Refusing:
    """A finder that raises an error for torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == _FORBIDDEN:
            raise _TorchImported(name)


@contextmanager
def _without_torch() -> Iterator[None]:
    """Makes imports of torch fail inside the block, unless this process has imported torch before."""
    if _FORBIDDEN in sys.modules:
        yield
        return
    finder = _Refusing()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]


IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_import_path(name: str) -> bool:
    """Returns whether ``name`` is the import path of a row, ``module:attribute``, not the name of a built-in row."""
    return ":" in name


def load_row(path: str, key: str, kind: type) -> Any:
    """Returns the row that ``path`` names.

    Args:
        key: the config key that holds ``path``.
        kind: the class of the row.

    Raises:
        UserError: the file or row does not exist, or a fact of the row is missing, unknown or contradictory.
    """
    row = import_without_torch(path, key)
    if isinstance(row, kind):
        return row
    raise UserError(
        f"{path} is of type {type(row).__name__}, but must be a {kind.__name__}",
        where=location(path),
        fix=f"{path.partition(':')[2]} = {kind.__name__}(...) from hpc_train.layout.techniques",
    )
