"""Starts agents and workers from a snapshot of the user's code, which ``hpc_train.run.snapshot`` takes.

They import from the copy that ``run.json`` names: its directories come first on ``sys.path`` and PYTHONSAFEPATH keeps
the current directory off it. Modules that were still imported from the work tree are detected.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.record import RECORD


@dataclass(frozen=True)
class FrozenCode:
    """Describes a snapshot and its origin, as recorded in ``run.json``.

    Attributes:
        work_tree: the root of the user's git work tree.
        snapshot: the copy of the work tree.
        paths: directories of the copy that come first on ``sys.path``; each replaces a work-tree directory on it.
        commit: None in a repository without commits.
        diff: a file with the diff of tracked files to the commit; None without changes.
        content: the digest of the copied files; None for a copy of an earlier version.
    """

    work_tree: str
    snapshot: str
    paths: tuple[str, ...]
    commit: str | None
    diff: str | None
    content: str | None = None

    @property
    def directory(self) -> Path:
        """Returns the directory of the work tree in which the run was frozen."""
        return Path(self.work_tree, *(Path(path).relative_to(self.snapshot) for path in self.paths[:1]))

    @property
    def origin(self) -> tuple[str, Path, Path]:
        """Returns the work tree, the directory in it, and the directory of the copies."""
        return self.work_tree, self.directory, Path(self.snapshot).parent

    def copied_path(self, path: str | Path) -> Path | None:
        """Returns the copy of a file or directory of the work tree; None if the snapshot does not hold it."""
        try:
            inside = Path(os.path.realpath(path)).relative_to(self.work_tree)
        except ValueError:
            return None
        copied = Path(self.snapshot) / inside
        return copied if copied.exists() else None

    def search_path(self, entries: Iterable[str]) -> list[str]:
        """Returns a search path with the snapshot first and work-tree directories replaced by their copies."""
        others = [str(self.copied_path(entry) or entry) for entry in entries if entry]
        return list(dict.fromkeys([*self.paths, *others]))

    def environment(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the variables that make a Python process start from the snapshot."""
        before = environment.get("PYTHONPATH", "").split(os.pathsep)
        return {"PYTHONPATH": os.pathsep.join(self.search_path(before)), "PYTHONSAFEPATH": "1"}

    def from_work_tree(self, files: Iterable[str]) -> list[str]:
        """Returns the ``files`` that are in the work tree although the snapshot holds a copy of them."""
        return [file for file in files if self.copied_path(file) is not None]


def frozen_code(run: RunDirectory) -> FrozenCode | None:
    """Returns the frozen code of ``run``; None if none was copied."""
    value: dict[str, Any] | None = run.record().get("snapshot")
    if not value:
        return None
    try:
        code = FrozenCode(**value | {"paths": tuple(map(str, value["paths"]))})
    except (KeyError, TypeError) as error:
        raise UserError(
            "the record of the run describes its frozen code in an unknown form",
            where=str(run.path / RECORD),
            fix="restore the file, or start a new run with another run.name",
        ) from error
    before = Path(code.snapshot)
    if not before.exists() and before.parent.name == run.code.name:  # it may have moved with the run or its sweep
        for folder in (run.code, run.path.parent / run.code.name):
            now = folder / before.name
            if now.is_dir():
                paths = (str(now / Path(path).relative_to(before)) for path in code.paths)
                return replace(code, snapshot=str(now), paths=tuple(paths))
    return code


def git(directory: Path | str, *arguments: str, timeout_s: float = 120.0, index: Path | None = None) -> str | None:
    """Returns git's output; None if git fails, is absent or too slow, or finds no repository.

    Args:
        index: the file that git uses as its index, if it is not that of the repository.
    """
    command = ["git", "-C", str(directory), *arguments]
    variables = None if index is None else os.environ | {"GIT_INDEX_FILE": str(index)}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


def use_frozen_code(code: FrozenCode | None) -> None:
    """Makes all further imports, in this process and in its children, come from the snapshot."""
    if code is not None:
        os.environ.update(code.environment())
        sys.path[:] = code.search_path(sys.path)


def reexec_from_snapshot(run: RunDirectory) -> None:
    """Replaces this process by one with the same command line that imports hpc_train from the run's snapshot.

    Does nothing if it already does, or if hpc_train is not part of the snapshot.

    Raises:
        RuntimeError: a process that was started to import from the snapshot imports from elsewhere.
    """
    code = frozen_code(run)
    if code is None or not code.from_work_tree([__file__]):
        return
    variables = code.environment()
    if all(os.environ.get(name) == value for name, value in variables.items()):
        raise RuntimeError(f"hpc_train was imported from {__file__}, not from the snapshot {code.snapshot}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})


def check_imports(run: RunDirectory) -> None:
    """Raises RuntimeError if a module of this process came from the user's work tree instead of the snapshot."""
    code = frozen_code(run)
    if code is None:
        return
    # compare text first: resolving the links of thousands of files is slow on a network file system
    files = [str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    live = code.from_work_tree([__file__, *(file for file in files if file.startswith(code.work_tree + os.sep))])
    if live:
        raise RuntimeError(
            f"modules were imported from the work tree, which may have changed, not from the snapshot {code.snapshot}: "
            + ", ".join(sorted(set(live))[:8])
        )
