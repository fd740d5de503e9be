"""Where Python searches for modules, and what goes wrong there.

``python -m hpc_train`` searches the working directory first, as Python does. The console script ``hpc-train`` searches
it last, so that it finds the modules of the user there and no file there replaces an installed one. A file of the user
that has the name of a package, such as ``yaml.py``, breaks almost any import, so this module uses only modules that
Python has imported at its start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from types import ModuleType

PLUGINS = "hydra_plugins"  # Hydra imports every module in this package


def append_working_directory(path: str) -> None:
    """Adds the working directory ``path`` to the end of the search path, without the plugins of Hydra in it."""
    try:
        plugins = __import__(PLUGINS)
    except ImportError:
        plugins = ModuleType(PLUGINS)
        plugins.__path__ = []
        sys.modules[PLUGINS] = plugins
    plugins.__path__ = list(plugins.__path__)  # the path of a namespace package would grow with the search path
    sys.path.append(path)


def safe_path() -> Mapping[str, str]:
    """Returns the variables with which a new Python process does not search the working directory first.

    Returns an empty dict if this process itself searches the working directory first.
    """
    first = os.path.abspath(sys.path[0]) if sys.path else ""  # noqa: PTH100 - "" is the working directory
    return {} if first == os.getcwd() else {"PYTHONSAFEPATH": "1"}  # noqa: PTH109


PACKAGE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
LIBRARIES = ("site-packages", "dist-packages")


def shadowing_file(error: BaseException) -> str | None:
    """Returns what is wrong and the fix if ``error`` comes from a file that shadows a package; None otherwise."""
    broken = getattr(error, "filename", None)  # a SyntaxError names its file
    files = [broken] if isinstance(broken, str) else []
    raised_in: list[str] = []
    frame = error.__traceback__
    while frame is not None:
        raised_in.insert(0, frame.tb_frame.f_code.co_filename)  # the innermost first
        frame = frame.tb_next
    files += raised_in
    for quoted in str(error).split("'")[1::2]:  # module 'yaml' has no attribute 'Loader'
        file = getattr(sys.modules.get(quoted.partition(".")[0]), "__file__", None)
        if file is not None:
            files.append(file)
    for file in files:
        module = _top_level(file)
        name = os.path.basename(module or "").removesuffix(".py")  # noqa: PTH119
        if module is not None and _is_also_installed(name):
            what = f"{module} shadows the package {name}, which other modules import"
            return f"{what}: {type(error).__name__}: {error}\n  fix:    rename {module}"
    return None


def _top_level(file: str) -> str | None:
    """Returns the path of the user's top-level module or package that contains ``file``; None for installed ones."""
    file = os.path.abspath(file)  # noqa: PTH100
    if file.startswith(PACKAGE + os.sep) or not os.path.isfile(file):  # noqa: PTH113
        return None
    folders = {os.path.abspath(entry).rstrip(os.sep) + os.sep: entry for entry in sys.path}  # noqa: PTH100
    folder = max((folder for folder in folders if file.startswith(folder)), key=len, default=None)
    if folder is None or _is_library(folders[folder]):
        return None
    return folder + file[len(folder) :].partition(os.sep)[0]


def _is_library(entry: str) -> bool:
    """Returns whether an entry of ``sys.path`` belongs to the standard library or to installed packages."""
    prefixes = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    return entry.startswith(prefixes) or entry.rstrip(os.sep).endswith(LIBRARIES)


def _is_also_installed(name: str) -> bool:
    if name in sys.stdlib_module_names:
        return True
    spec = PathFinder.find_spec(name, [entry for entry in sys.path if _is_library(entry)])
    return spec is not None and spec.origin is not None
