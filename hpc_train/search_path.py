"""Where the console script ``hpc-train`` and the processes that it starts search for modules.

``python -m hpc_train`` searches the working directory first, as Python does. The console script searches it last, so
that it finds the modules of the user there and no file there replaces an installed one.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping

PLUGINS = "hydra_plugins"  # Hydra imports every module in this package


def append_working_directory(path: str) -> None:
    """Adds the working directory ``path`` to the end of the search path, without the plugins of Hydra in it."""
    try:
        plugins = __import__(PLUGINS)
    except ImportError:
        plugins = types.ModuleType(PLUGINS)
        plugins.__path__ = []
        sys.modules[PLUGINS] = plugins
    plugins.__path__ = list(plugins.__path__)  # that of a namespace package would grow with the search path
    sys.path.append(path)


def safe_path() -> Mapping[str, str]:
    """Returns the variables with which a new Python process does not search the working directory first.

    They are empty where this process does so itself.
    """
    first = os.path.abspath(sys.path[0]) if sys.path else ""  # noqa: PTH100 - "" is the working directory
    return {} if first == os.getcwd() else {"PYTHONSAFEPATH": "1"}  # noqa: PTH109
