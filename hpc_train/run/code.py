"""Freezes code: copies the user's git work tree when a run is frozen, and starts agents and workers from the copy.

The copy holds all files that git tracks or does not ignore, except files that hold secrets, with the modes of the work
tree, in a directory that only its owner can enter (``run.group`` lets the group in). Copies are named by their content,
so the runs of a sweep share one and an unchanged tree is copied once. Outside a work tree nothing is copied.

Agents and workers import from the copy that ``run.json`` names: its directories come first on ``sys.path`` and
PYTHONSAFEPATH keeps the current directory off it. Modules that were still imported from the work tree are detected.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from hpc_train.config.extensions import is_extension
from hpc_train.config.schema import Config
from hpc_train.config.secrets import is_secret_file
from hpc_train.config.values import command_words
from hpc_train.errors import UserError
from hpc_train.plan.optimizers import own_code
from hpc_train.run.directory import RunDirectory
from hpc_train.units import format_bytes

LIMIT_BYTES = 50 * 2**20
LISTED = 8  # files and folders named in a refusal
NAME_LENGTH = 16  # hexadecimal digits of the SHA-256


def snapshot_code(configs: Sequence[Config], into: Path, directory: Path | None = None) -> FrozenCode | None:
    """Copies the work tree of ``directory`` (default: the current one) to ``into/<hash>``, for all of ``configs``.

    Prints to standard error which files are left out because their names indicate secrets.

    Returns:
        None if ``directory`` is in no work tree, git is absent, or ``run.snapshot`` is off.

    Raises:
        UserError: the copy would exceed 50 MiB, or a ``_target_`` would not be in it. Nothing was written.
    """
    config = configs[0]  # run.* is the same for all jobs of a sweep
    here = Path(os.path.realpath(directory or Path.cwd()))
    root = _work_tree(here) if config.run.snapshot else None
    if root is None:
        return None
    listed = _listed_code(root, config, into)
    names = [name for name in listed if not is_secret_file(name)]
    _check_size(root, names)
    for target in _own_targets(configs):
        _check_target(target, root, names)
    for each in configs:
        _check_files(command_words(each), here, root, names)
    contents = {name: _file_content(root / name) for name in names}
    modes = _modes(root, names)
    digest = _digest(contents, modes)
    _make_private(into, config.run.group)
    snapshot = into / digest
    if not snapshot.exists():
        _write(contents, modes, snapshot)
    commit = _git(root, "rev-parse", "--verify", "HEAD").strip() or None
    changed = _changed(root) if commit else []
    diff = _write_diff(root, changed, into / f"{digest}.patch")
    if secrets := sorted(filter(is_secret_file, {*listed, *changed})):
        print(_secrets_note(secrets), file=sys.stderr)
    code = FrozenCode(str(root), str(snapshot), (), commit, diff)
    copies = [code.copied_path(path) for path in _import_paths(here, root)]
    return replace(code, paths=tuple(dict.fromkeys(str(copy) for copy in copies if copy is not None)))


def _listed_code(root: Path, config: Config, into: Path) -> list[str]:
    """Returns the files of a work tree, sorted, without those of runs and of the snapshots in ``into``."""
    runs = (Path(os.path.realpath(config.run.root)), Path(os.path.realpath(into)))
    return sorted(name for name in _listed(root) if not any((root / name).is_relative_to(path) for path in runs))


def _make_private(directory: Path, group: str | None) -> None:
    """Creates the directory of the copies, which only its owner can enter; ``freeze`` gives it to ``run.group``."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    if group is None and directory.stat().st_uid == os.geteuid():
        directory.chmod(0o700)  # that of an earlier version


def _work_tree(directory: Path) -> Path | None:
    found = _git(directory, "rev-parse", "--show-toplevel").strip()
    return Path(os.path.realpath(found)) if found else None


def _listed(root: Path) -> Iterator[str]:
    """Yields the files that are tracked or not ignored, including those of submodules, relative to ``root``."""

    @cache
    def is_below_link(directory: Path) -> bool:
        return os.path.realpath(directory) != str(directory)

    for name in _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        path = root / name
        if not name or not os.path.lexists(path) or is_below_link(path.parent):
            continue  # tracked but deleted, or its directory was replaced by a link, which is listed itself
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
    listed = ", ".join(f"{name} ({format_bytes(size)})" for name, size in largest)
    raise UserError(
        f"the snapshot of {root} would have {format_bytes(total)}, and the limit is {format_bytes(LIMIT_BYTES)}; "
        f"the largest entries are {listed}",
        where="the git work tree of the current directory",
        fix="add files that are not code to .gitignore, or set run.snapshot=false to train from the live work tree",
    )


def _file_content(path: Path) -> bytes:
    return os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()


def _modes(root: Path, names: Iterable[str]) -> dict[str, int]:
    """Returns type and permissions of the files and of the directories that contain them, outer directories first."""
    directories = {str(parent) for name in names for parent in PurePath(name).parents}
    return {name: (root / name).lstat().st_mode for name in [*sorted(directories), *names]}


def _digest(contents: dict[str, bytes], modes: dict[str, int]) -> str:
    whole = hashlib.sha256()
    for name, mode in modes.items():
        content = hashlib.sha256(contents.get(name, b"")).hexdigest()
        whole.update(f"{mode:o} {content} {name}\0".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()[:NAME_LENGTH]


def _write(contents: dict[str, bytes], modes: dict[str, int], snapshot: Path) -> None:
    """Writes the snapshot atomically, because jobs of another submission may be reading."""
    partial = Path(tempfile.mkdtemp(prefix=".", dir=snapshot.parent))  # not readable by others yet
    try:
        for name, mode in modes.items():
            _write_one(partial / name, mode, contents.get(name, b""))
        partial.chmod(snapshot.parent.stat().st_mode & (modes.get(".", 0o777) | 0o7700))
        partial.rename(snapshot)
    except OSError:
        shutil.rmtree(partial)
        if not snapshot.is_dir():  # otherwise another submission wrote the same content first
            raise


def _write_one(target: Path, mode: int, content: bytes) -> None:
    """Writes one entry with the permissions of ``mode``, reduced by the umask."""
    if stat.S_ISLNK(mode):
        target.symlink_to(os.fsdecode(content))
    elif stat.S_ISDIR(mode):
        target.mkdir(mode=mode & 0o777 | 0o700, exist_ok=True)
    else:
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o777), "wb") as file:
            file.write(content)


def _changed(root: Path) -> list[str]:
    """Returns the files that differ from the commit, including those removed from the work tree or from git's index."""
    return list(filter(None, _git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD").split("\0")))


def _write_diff(root: Path, changed: Sequence[str], path: Path) -> str | None:
    """Writes the diff to the commit; ``changed`` names all files that differ, and those with secrets are left out."""
    without = [f":(top,exclude,literal){name}" for name in changed if is_secret_file(name)]
    text = _git(root, "diff", "--binary", "--no-renames", "HEAD", "--", ".", *without) if changed else ""
    if not text:
        return None
    path.touch(mode=0o600)  # it may contain lines of files that only their owner may read
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(path)


def _secrets_note(secrets: Sequence[str]) -> str:
    more = f" and {len(secrets) - LISTED} more" if len(secrets) > LISTED else ""
    return (
        "note: files whose names indicate secrets are left out of the code snapshot: "
        f"{', '.join(secrets[:LISTED])}{more}. Workers inherit the environment of the submission; "
        "run.snapshot=false starts them from the work tree itself"
    )


def _import_paths(here: Path, root: Path) -> list[Path]:
    """Returns the directories inside the work tree from which this process imports, the current directory first."""
    found = [here, *(Path(os.path.realpath(entry or here)) for entry in sys.path), root]
    return [path for path in found if path.is_relative_to(root) and path.is_dir()]


def unfrozen_note(configs: Sequence[Config]) -> str | None:
    """Returns a line for the user whose modules in the current directory no snapshot keeps; None without such."""
    here = Path(os.path.realpath(Path.cwd()))
    own = sorted({re.split(r"[.:]", target)[0] for target in _own_targets(configs)})
    local = [name for name in own if (here / f"{name}.py").is_file() or (here / name).is_dir()]
    if not local or not configs[0].run.snapshot or _work_tree(here) is not None:
        return None
    return (
        f"note: {here} is not in a git work tree, so its code is not frozen: jobs import {', '.join(local)} from there "
        "when they start (after git init, they start from a copy)"
    )


def _own_targets(configs: Sequence[Config]) -> set[str]:
    """Returns all import paths of a user's code in ``configs``."""
    owners = [owner for each in configs for owner in (each.model, each.data)]
    rows = [name for each in configs for name in (each.strategy.schedule, each.strategy.data_parallel) if ":" in name]
    own = [path for each in configs for path in own_code(each.optim)]
    own += [each._target_ for config in configs for each in (*config.metrics.values(), *config.hooks.values())]
    own += [each.run.entry for each in configs if each.run.entry is not None]
    own += [owner.kind.partition(":")[0] for owner in owners if is_extension(owner.kind)]
    return {*rows, *own, *(name for owner in owners for name in _own_names(owner))}


def _own_names(owner: Any) -> list[str]:
    """Returns the import paths of a user's classes and functions in the config of a model or of data."""
    sources = getattr(owner, "sources", {}).values()
    found = [getattr(owner, name, None) for name in ("_target_", "collate")]
    return [name for name in (*found, *(source.get("_target_") for source in sources)) if name is not None]


def _check_target(target: str, root: Path, names: Collection[str]) -> None:
    """Raises UserError if the user's module is in the work tree but would be missing from the snapshot."""
    try:
        spec = importlib.util.find_spec(re.split(r"[.:]", target)[0])
    except (ImportError, ValueError):
        return
    origin = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if not origin or not Path(origin).is_relative_to(root) or "site-packages" in Path(origin).parts:
        return
    inside = str(Path(origin).relative_to(root))
    if not any(name == inside or name.startswith(f"{inside}/") for name in names):
        raise _ignored(origin, "_target_")


def _check_files(words: Iterable[str], here: Path, root: Path, names: Collection[str]) -> None:
    """Raises UserError if a Python file that ``run.command`` names would be missing from the snapshot."""
    for word in words:
        path = Path(os.path.realpath(here / word))
        inside = word.endswith(".py") and path.is_file() and path.is_relative_to(root)
        if inside and str(path.relative_to(root)) not in names:
            raise _ignored(str(path), "run.command")


def _ignored(path: str, where: str) -> UserError:
    return UserError(
        f"{path} is ignored by git, so it would be missing from the code snapshot that workers start from",
        where=where,
        fix="remove it from .gitignore, or set run.snapshot=false to train from the live work tree",
    )


def _git(directory: Path, *arguments: str) -> str:
    """Returns git's output; "" if git fails, is absent, or finds no repository."""
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else ""


@dataclass(frozen=True)
class FrozenCode:
    """A snapshot and its origin, as recorded in ``run.json``.

    Attributes:
        work_tree: the root of the user's git work tree.
        snapshot: the copy of the work tree.
        paths: directories of the copy that come first on ``sys.path``, the copies of those that were on it.
        commit: None in a repository without commits.
        diff: a file with the diff of tracked files to the commit; None without changes.
    """

    work_tree: str
    snapshot: str
    paths: tuple[str, ...]
    commit: str | None
    diff: str | None

    @property
    def directory(self) -> Path:
        """The directory of the work tree in which the run was frozen."""
        return Path(self.work_tree, *(Path(path).relative_to(self.snapshot) for path in self.paths[:1]))

    @property
    def origin(self) -> tuple[str, Path, Path]:
        """The work tree, the directory in it, and the directory of the copies."""
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
        """Returns those of ``files`` that are in the work tree although the snapshot holds a copy."""
        return [file for file in files if self.copied_path(file) is not None]


def frozen_code(run: RunDirectory) -> FrozenCode | None:
    """Returns the frozen code of ``run``; None if none was copied."""
    value: dict[str, Any] | None = run.record().get("snapshot")
    return FrozenCode(**value | {"paths": tuple(value["paths"])}) if value else None


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


def has_changed(code: FrozenCode, config: Config) -> bool:
    """Returns whether the work tree differs from the frozen code, whose run has ``config``."""
    root, snapshot = Path(code.work_tree), Path(code.snapshot)
    names = [name for name in _listed_code(root, config, snapshot.parent) if not is_secret_file(name)]
    try:
        _check_size(root, names)
    except UserError:  # the frozen code did not exceed the limit
        return True
    return _digest({name: _file_content(root / name) for name in names}, _modes(root, names)) != snapshot.name
