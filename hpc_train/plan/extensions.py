"""Rows of a user's own package (``strategy.schedule=my_package.schedules:ROW``), loaded without torch.

A row is a ``PipelineSchedule`` or ``DataParallelKind`` in a file that imports neither torch nor its own package. The
file runs by itself: the ``__init__.py`` of the packages around it, which may import torch, does not.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_import_path(name: str) -> bool:
    """Whether ``name`` is the import path of a row, ``module:attribute``, and not the name of a built-in one."""
    return ":" in name


def load_row(path: str, key: str, kind: type) -> Any:
    """Runs the file that ``path`` names and returns its row.

    Args:
        key: the config key that holds ``path``.
        kind: the class of the row.

    Raises:
        UserError: there is no such file or row, or a fact of the row is missing, unknown or contradicts another.
    """
    where = f"{key}={path}"
    module, _, attribute = path.partition(":")
    if not IMPORT_PATH.fullmatch(path):
        raise UserError(f"{path} is not an import path", where=key, fix=f"{key}=package.module:ATTRIBUTE")
    file = _find_source(module)
    if file is None:
        raise UserError(
            f"there is no module {module}",
            where=where,
            fix="a module on PYTHONPATH or of an installed package; python -m hpc_train also searches this directory",
        )
    row = getattr(_run(module, file, where, kind), attribute, None)
    if isinstance(row, kind):
        return row
    raise UserError(
        f"{file} defines no {kind.__name__} with the name {attribute}",
        where=where,
        fix=f"{attribute} = {kind.__name__}(...) in that file, from hpc_train.plan.techniques",
    )


def _find_source(module: str) -> Path | None:
    """The file of ``module``; no package around it is imported, unlike by ``importlib.util.find_spec``."""
    first, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    name = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return None if spec is None or not spec.has_location or spec.origin is None else Path(spec.origin)


def _run(module: str, file: Path, where: str, kind: type) -> Any:
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    loaded, had_torch = importlib.util.module_from_spec(spec), "torch" in sys.modules
    explained = f"the docstring of hpc_train.plan.techniques.{kind.__name__} explains each fact"
    try:
        spec.loader.exec_module(loaded)
    except UserError:
        raise
    except TypeError as error:
        missing = re.findall(r"'(\w+)'", str(error)) if "missing" in str(error) else []
        if not missing:
            raise UserError(f"{file} cannot be loaded: {error}", where=where, fix=explained) from error
        raise UserError(
            f"a row in {file} does not say {' and '.join(missing)}",
            where=where,
            fix=f"{', '.join(f'{name}=...' for name in missing)} in the row; {explained}",
        ) from error
    except ValueError as error:  # of a row whose facts contradict each other
        raise UserError(f"{error} (in {file})", where=where, fix=explained) from error
    except Exception as error:
        raise UserError(
            f"{file} cannot be loaded: {type(error).__name__}: {error}",
            where=where,
            fix="a file that can be run by itself: it imports hpc_train.plan.techniques and no torch",
        ) from error
    if "torch" in sys.modules and not had_torch:
        raise UserError(
            f"{file} imports torch, which a submission must not wait for",
            where=where,
            fix="name torch's part in the row as 'module:attribute', and define it in another file",
        )
    return loaded


def import_attribute(path: str, where: str) -> Any:
    """Imports what a row names as ``module:attribute``; on a worker, where torch may be imported.

    Raises:
        UserError: the module cannot be imported or has no such attribute.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be imported: {error}", where=where, fix="the module and attribute that the row means"
        ) from error
