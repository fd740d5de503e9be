"""Rows of a user's own package (``strategy.schedule=my_package.schedules:ROW``), loaded without torch.

A row is a ``PipelineSchedule`` or ``DataParallelKind`` in a file that imports neither torch nor its own package. The
file runs by itself: the ``__init__.py`` of the packages around it, which may import torch, does not.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from hpc_train.config.description_file import import_without_torch, location
from hpc_train.errors import UserError

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_import_path(name: str) -> bool:
    """Whether ``name`` is the import path of a row, ``module:attribute``, and not the name of a built-in one."""
    return ":" in name


def load_row(path: str, key: str, kind: type) -> Any:
    """Returns the row that ``path`` names.

    Args:
        key: the config key that holds ``path``.
        kind: the class of the row.

    Raises:
        UserError: there is no such file or row, or a fact of the row is missing, unknown or contradicts another.
    """
    row = import_without_torch(path, key)
    if isinstance(row, kind):
        return row
    raise UserError(
        f"{path} is not a {kind.__name__}, but of type {type(row).__name__}",
        where=location(path),
        fix=f"{path.partition(':')[2]} = {kind.__name__}(...) from hpc_train.plan.techniques",
    )


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
