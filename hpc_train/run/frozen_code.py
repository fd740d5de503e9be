"""The code that a run was frozen with, and how processes of the run come to import it and nothing newer.

A run whose code was copied (``config/snapshot.py``) names the copy in ``run.json``. Its directories stand first on
``sys.path`` of agents and workers, and PYTHONSAFEPATH keeps the current directory off it; what was imported from the
work tree all the same is noticed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.run.directory import RunDirectory


@dataclass(frozen=True)
class FrozenCode:
    """A snapshot and where it comes from, as ``run.json`` holds it.

    Attributes:
        work_tree: the root of the user's git work tree.
        snapshot: the copy of it.
        paths: directories of the copy that stand first on ``sys.path``: the copies of those that stood there.
        commit: None in a repository without one.
        diff: a file with the difference of tracked files to the commit; None where there is none.
    """

    work_tree: str
    snapshot: str
    paths: tuple[str, ...]
    commit: str | None
    diff: str | None

    def counterpart(self, path: str | Path) -> Path | None:
        """Where the snapshot holds a file or directory of the work tree; None for what it does not hold."""
        try:
            inside = Path(os.path.realpath(path)).relative_to(self.work_tree)
        except ValueError:
            return None
        copied = Path(self.snapshot) / inside
        return copied if copied.exists() else None

    def search_path(self, entries: Iterable[str]) -> list[str]:
        """``entries`` of a search path with the snapshot first and its directories instead of the work tree's."""
        others = [str(self.counterpart(entry) or entry) for entry in entries if entry]
        return list(dict.fromkeys([*self.paths, *others]))

    def environment(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The variables with which a Python process starts from the snapshot."""
        before = environment.get("PYTHONPATH", "").split(os.pathsep)
        return {"PYTHONPATH": os.pathsep.join(self.search_path(before)), "PYTHONSAFEPATH": "1"}

    def live(self, files: Iterable[str]) -> list[str]:
        """Those of ``files`` that belong to the work tree although the snapshot holds them."""
        return [file for file in files if self.counterpart(file) is not None]


def frozen_code(run: RunDirectory) -> FrozenCode | None:
    """The code of ``run``; None where none was copied."""
    value: dict[str, Any] | None = run.record().get("snapshot")
    return FrozenCode(**value | {"paths": tuple(value["paths"])}) if value else None


def use(code: FrozenCode | None) -> None:
    """Lets what is imported from here on, in this process and in those that it starts, come from the snapshot."""
    if code is not None:
        os.environ.update(code.environment())
        sys.path[:] = code.search_path(sys.path)


def start_again_from(run: RunDirectory) -> None:
    """Replaces this process by one with the same command line that imports hpc_train from the run's snapshot.

    Does nothing where that is so already, or where hpc_train is no part of the snapshot.

    Raises:
        RuntimeError: a process that was started to import from the snapshot imports from elsewhere.
    """
    code = frozen_code(run)
    if code is None or not code.live([__file__]):
        return
    variables = code.environment()
    if all(os.environ.get(name) == value for name, value in variables.items()):
        raise RuntimeError(f"hpc_train was imported from {__file__}, not from the snapshot {code.snapshot}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})


def check_imports(run: RunDirectory) -> None:
    """Raises RuntimeError where a module of this process came from the user's work tree and not from the snapshot."""
    code = frozen_code(run)
    if code is None:
        return
    # by text first: to resolve the links of thousands of files would cost as many questions to a network file system
    files = [str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    live = code.live([__file__, *(file for file in files if file.startswith(code.work_tree + os.sep))])
    if live:
        raise RuntimeError(
            f"imported from the work tree, which may have changed, instead of the snapshot {code.snapshot}: "
            + ", ".join(sorted(set(live))[:8])
        )
