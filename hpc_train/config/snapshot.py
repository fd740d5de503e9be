"""Frozen code: a copy of the user's git work tree, taken when a run is frozen, from which its agents and workers start.

What is copied is what git tracks and what it does not ignore. A copy is named by its content, so the runs of a sweep
share one and an unchanged tree is copied once. Outside of a work tree nothing is copied, and modules are found as
Python finds them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import Config
from hpc_train.run.frozen_code import FrozenCode

LIMIT_BYTES = 50 * 2**20
LISTED = 8  # files and folders named in a refusal
NAME_LENGTH = 16  # of 64 hexadecimal digits


def take(configs: Sequence[Config], into: Path, directory: Path | None = None) -> FrozenCode | None:
    """Copies the work tree of ``directory`` (the current one unless told) to ``into/<hash>``, for all of ``configs``.

    Returns:
        None where ``directory`` is in no work tree, git is absent, or ``run.snapshot`` is off.

    Raises:
        ConfigError: more than 50 MB would be copied, or a ``_target_`` would be left behind. Nothing was written.
    """
    config = configs[0]  # run.* are one value for all jobs of a sweep
    here = Path(os.path.realpath(directory or Path.cwd()))
    root = _work_tree(here) if config.run.snapshot else None
    if root is None:
        return None
    runs = (Path(os.path.realpath(config.run.root)), Path(os.path.realpath(into)))
    names = sorted(name for name in _listed(root) if not any((root / name).is_relative_to(path) for path in runs))
    _check_size(root, names)
    owners = [owner for each in configs for owner in (each.model, each.data) if owner.kind == "custom"]
    for target in {owner._target_ for owner in owners}:
        _check_target(target, root, names)
    contents = {name: _read(root / name) for name in names}
    digest = _digest(root, contents)
    snapshot = into / digest
    if not snapshot.exists():
        _write(root, contents, snapshot)
    commit = _git(root, "rev-parse", "--verify", "HEAD").strip() or None
    diff = _write_diff(root, commit, into / f"{digest}.patch")
    code = FrozenCode(str(root), str(snapshot), (), commit, diff)
    copies = [code.counterpart(path) for path in _import_paths(here, root)]
    return replace(code, paths=tuple(dict.fromkeys(str(copy) for copy in copies if copy is not None)))


def _work_tree(directory: Path) -> Path | None:
    found = _git(directory, "rev-parse", "--show-toplevel").strip()
    return Path(os.path.realpath(found)) if found else None


def _listed(root: Path) -> Iterator[str]:
    """Files of the work tree that are tracked or not ignored, those of submodules included, relative to ``root``."""
    for name in _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        path = root / name
        if not name or not os.path.lexists(path):
            continue  # tracked and deleted
        if path.is_dir() and not path.is_symlink():
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _listed(path) if (path / ".git").exists())
        else:
            yield name


def _check_size(root: Path, names: Iterable[str]) -> None:
    sizes = {name: (root / name).lstat().st_size for name in names}
    total = sum(sizes.values())
    if total <= LIMIT_BYTES:
        return
    groups: dict[str, int] = {}
    for name, size in sizes.items():
        head = name if size > LIMIT_BYTES // 10 else "/".join(name.split("/")[:-1]) + "/"
        groups[head] = groups.get(head, 0) + size
    largest = sorted(groups.items(), key=lambda item: -item[1])[:LISTED]
    listed = ", ".join(f"{name} ({size / 2**20:.1f} MB)" for name, size in largest)
    raise ConfigError(
        f"the snapshot of {root} would have {total / 2**20:.0f} MB, and at most {LIMIT_BYTES // 2**20} are copied; "
        f"the largest: {listed}",
        where="the git work tree of the current directory",
        mend="name what is not code in .gitignore, or run.snapshot=false to train from the work tree as it will be",
    )


def _read(path: Path) -> bytes:
    return os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()


def _digest(root: Path, contents: dict[str, bytes]) -> str:
    whole = hashlib.sha256()
    for name, content in contents.items():
        kind = "link" if (root / name).is_symlink() else "program" if os.access(root / name, os.X_OK) else "file"
        whole.update(f"{kind} {hashlib.sha256(content).hexdigest()} {name}\0".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()[:NAME_LENGTH]


def _write(root: Path, contents: dict[str, bytes], snapshot: Path) -> None:
    """There at once or not at all: jobs of another submission may be looking."""
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".", dir=snapshot.parent))
    partial.chmod(snapshot.parent.stat().st_mode)  # mkdtemp's is the user's alone
    for name, content in contents.items():
        source, target = root / name, partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.fsdecode(content))
            continue
        target.write_bytes(content)
        if os.access(source, os.X_OK):
            target.chmod(target.stat().st_mode | 0o100)
    try:
        partial.rename(snapshot)
    except OSError:  # another submission was faster with the same content
        shutil.rmtree(partial)
        if not snapshot.is_dir():
            raise


def _write_diff(root: Path, commit: str | None, path: Path) -> str | None:
    text = _git(root, "diff", "--binary", "HEAD") if commit else ""
    if not text:
        return None
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(path)


def _import_paths(here: Path, root: Path) -> list[Path]:
    """Directories from which this process imports, as far as they lie in the work tree; the current one first."""
    found = [here, *(Path(os.path.realpath(entry or here)) for entry in sys.path), root]
    return [path for path in found if path.is_relative_to(root) and path.is_dir()]


def _check_target(target: str, root: Path, names: Collection[str]) -> None:
    """Raises ConfigError where the user's module is found in the work tree now and will not be in the snapshot."""
    try:
        spec = importlib.util.find_spec(target.partition(".")[0])
    except (ImportError, ValueError):
        return
    origin = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if not origin or not Path(origin).is_relative_to(root) or "site-packages" in Path(origin).parts:
        return
    inside = str(Path(origin).relative_to(root))
    if not any(name == inside or name.startswith(f"{inside}/") for name in names):
        raise ConfigError(
            f"{origin} is ignored by git, so it would not be in the snapshot of the code that workers start from",
            where="_target_",
            mend="take it out of .gitignore, or run.snapshot=false to train from the work tree as it will be",
        )


def _git(directory: Path, *arguments: str) -> str:
    """What git prints; empty where it fails, is absent, or knows no repository here."""
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else ""
