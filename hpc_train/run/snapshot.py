"""Freezes code: copies the user's git work tree when a run is frozen; agents and workers start from the copy.

The copy holds all files that git tracks or does not ignore, except files that hold secrets and the tests and docs of
hpc_train itself, with the modes of the work tree. Copies are named by their content and lie in
``<run.root>/.code/<uid>``, which only the user can enter; the runs of a root share them. With
``run.snapshot=copy`` or ``run.group``, which lets the group in, the directory of the run or sweep holds the copy.
Outside a work tree nothing is copied. A copy is used only if the user owns it and its content is the expected one; a
copy that no run below the root names is removed, at most once a day, when a new one is written.

Up-to-date bytecode of the work tree is copied as well, except for tests. Without bytecode, the first job would compile
every module before its workers start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import secrets
import shutil
import stat
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hpc_train.config.extensions import is_import_path
from hpc_train.config.roles import commands_of
from hpc_train.config.schema import Config
from hpc_train.config.secrets import is_secret_file
from hpc_train.errors import UserError
from hpc_train.layout.optimizers import own_code
from hpc_train.run.code import FrozenCode, frozen_code, git
from hpc_train.run.directory import RunDirectory
from hpc_train.run.file_lock import exclusive
from hpc_train.run.files import concurrently
from hpc_train.run.owner import is_own, make_private
from hpc_train.run.record import RECORD
from hpc_train.units import format_bytes

LIMIT_BYTES = 50 * 2**20
LISTED = 8  # files and folders named in a refusal
NAME_LENGTH = 16  # hexadecimal digits of the SHA-256
OWN_COPY = "copy"  # the value of run.snapshot
OF_DEVELOPERS = ("tests", "docs", "notebooks", "benchmarks", "gpu_checks")  # directories of the work tree of hpc_train


def snapshot_code(configs: Sequence[Config], own: Path, directory: Path | None = None) -> FrozenCode | None:
    """Copies the work tree of ``directory`` (default: the current one), for all of ``configs``.

    Prints to standard error which files are left out because their names indicate secrets.

    Args:
        own: the directory for the copy if the runs of the run root do not share it.

    Returns:
        None if ``directory`` is in no work tree, git is absent, or ``run.snapshot`` is off.

    Raises:
        UserError: the copy would exceed 50 MiB, or a ``_target_`` would not be in it. Nothing was written.
    """
    config = configs[0]  # run.* is the same for all jobs of a sweep
    here = Path(os.path.realpath(directory or Path.cwd()))
    root = work_tree(here) if config.run.snapshot else None
    if root is None:
        return None
    listed = _listed_code(root, config, own)
    names = {name: size for name, size in listed.items() if not is_secret_file(name)}
    targets = _user_targets(configs)
    words = [word for config in configs for command in commands_of(config).values() for word in command]
    if {re.split(r"[.:/]", word)[0] for word in (*targets, *words)}.isdisjoint(OF_DEVELOPERS):
        names = _without_tests_of_hpc_train(root, names)
    _check_size(root, names)
    for target in targets:
        _check_target(target, root, names)
    for word in words:  # Python files that run.command names
        path = Path(os.path.realpath(here / word))
        inside = word.endswith(".py") and path.is_file() and path.is_relative_to(root)
        if inside and str(path.relative_to(root)) not in names:
            raise _ignored(str(path), "run.command")

    entries = _entries(root, names)
    digest = _digest(entries)
    content = content_digest(
        (name, entry.mode, entry.content) for name, entry in entries.items() if not stat.S_ISDIR(entry.mode)
    )
    shared = None
    if config.run.snapshot != OWN_COPY and config.run.group is None:
        shared = shared_copies(Path(config.run.root).expanduser().absolute())
    if shared is None:  # only its owner can enter it, until freeze gives it to run.group
        own.parent.mkdir(parents=True, exist_ok=True)
        own.mkdir(mode=0o700, exist_ok=True)
        if config.run.group is None and own.stat().st_uid == os.geteuid():
            own.chmod(0o700)  # an earlier version may have created it with other permissions
    folder = shared or own
    snapshot = folder / digest
    if not use_copy(snapshot, content):
        _write(entries, snapshot)
        if shared is not None:
            remove_unnamed(shared)

    commit = (git(root, "rev-parse", "--verify", "HEAD") or "").strip()
    changed: list[str] = []  # includes files that were removed from the work tree or from git's index
    new: list[str] = []  # files that git does not track
    if commit:
        names_of_changed = git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD") or ""
        changed += filter(None, names_of_changed.split("\0"))
        others = (git(root, "ls-files", "-z", "--others", "--exclude-standard") or "").split("\0")
        new = [name for name in others if name in names]
    diff = _write_diff(root, changed, new, folder / f"{digest}-{commit[:12]}.patch")
    if hidden := sorted({*filter(is_secret_file, listed), *filter(is_secret_file, changed)}):
        print(_secrets_note(hidden), file=sys.stderr)
    code = FrozenCode(str(root), str(snapshot), (), commit or None, diff, content)
    # the directories in the work tree from which this process imports, the current one first
    search_path = [here, *(Path(os.path.realpath(entry or here)) for entry in sys.path), root]
    directories = [path for path in search_path if path.is_relative_to(root) and path.is_dir()]
    copies = [copy for path in directories if (copy := code.copied_path(path)) is not None]
    return replace(code, paths=tuple(dict.fromkeys(map(str, copies))))


def _listed_code(root: Path, config: Config, into: Path) -> dict[str, int]:
    """Returns the files of a work tree with their sizes, sorted, without bytecode, runs and the copies in ``into``."""
    runs = tuple(f"{os.path.realpath(path)}/" for path in (config.run.root, into))
    files = ((name, size) for name, size in _listed(str(root)) if not f"{root}/{name}/".startswith(runs))
    return dict(sorted((name, size) for name, size in files if f"/{CACHE}/" not in f"/{name}"))


def _without_tests_of_hpc_train(root: Path, names: dict[str, int]) -> dict[str, int]:
    """Returns ``names``; in the work tree of hpc_train without its tests and docs, which jobs do not need."""
    if root != Path(__file__).resolve().parents[2]:
        return names
    return {name: size for name, size in names.items() if name.partition("/")[0] not in OF_DEVELOPERS}


def work_tree(directory: Path) -> Path | None:
    """Returns the root of the git work tree of ``directory``; None outside of one, or without git."""
    root = (git(directory, "rev-parse", "--show-toplevel") or "").strip()
    return Path(os.path.realpath(root)) if root else None


def _listed(root: str) -> Iterator[tuple[str, int]]:
    """Yields the files that are tracked or not ignored, including those of submodules, relative to ``root``, with their
    sizes in bytes.
    """

    @cache
    def is_below_link(directory: str) -> bool:
        return os.path.realpath(directory) != directory

    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
    for name in listed.split("\0"):
        path = f"{root}/{name}".rstrip("/")
        try:
            status = os.lstat(path)
        except OSError:
            continue  # tracked but deleted
        if not name or is_below_link(path.rpartition("/")[0]):
            continue  # its directory was replaced by a link, which is listed itself
        if not stat.S_ISDIR(status.st_mode):
            yield name, status.st_size
        elif os.path.lexists(f"{path}/.git"):
            yield from ((f"{name.rstrip('/')}/{inner}", size) for inner, size in _listed(path))


def _check_size(root: Path, sizes: Mapping[str, int]) -> None:
    total = sum(sizes.values())
    if total <= LIMIT_BYTES:
        return
    groups: Counter[str] = Counter()  # sizes of large files, and of directories of small files
    for name, size in sizes.items():
        groups[name if size > LIMIT_BYTES // 10 else f"{name.rpartition('/')[0]}/"] += size
    listed = ", ".join(f"{name} ({format_bytes(size)})" for name, size in groups.most_common(LISTED))
    raise UserError(
        f"the snapshot of {root} would have {format_bytes(total)}, and the limit is {format_bytes(LIMIT_BYTES)}; "
        f"the largest entries are {listed}",
        where="the git work tree of the current directory",
        fix="add files that are not code to .gitignore, or set run.snapshot=false to train from the live work tree",
    )


@dataclass(frozen=True)
class Entry:
    """Describes a file, link or directory of the work tree.

    Attributes:
        mode: its type and permissions.
        content: the content of a file, or the target of a link.
        modified_ns: the modification time of a file.
        bytecode: the bytecode of a Python file in the cache of this interpreter; None if it is missing or out of date.
    """

    mode: int
    content: bytes = b""
    modified_ns: int = 0
    bytecode: bytes | None = None


def _entries(root: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Reads the files and the directories that contain them, outer directories first."""
    directories = {"."}
    for name in names:
        parent = name.rpartition("/")[0]
        while parent and parent not in directories:
            directories.add(parent)
            parent = parent.rpartition("/")[0]
    entries = {name: Entry(os.lstat(f"{root}/{name}").st_mode) for name in sorted(directories)}
    for name in names:
        path = f"{root}/{name}"
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            entries[name] = Entry(mode, os.fsencode(Path(path).readlink()))
            continue
        with os.fdopen(os.open(path, os.O_RDONLY), "rb") as file:
            content = file.read()
            status = os.fstat(file.fileno())
        bytecode = None
        *folders, last = name.split("/")
        if last.endswith(".py") and not last.startswith("test_") and "tests" not in folders:  # jobs may import it
            bytecode = _bytecode(path, status)
        entries[name] = Entry(mode, content, status.st_mtime_ns, bytecode)
    return entries


def _bytecode(path: str, source: os.stat_result) -> bytes | None:
    """Returns the bytecode of a Python file if it matches the time and size of the source, as Python requires."""
    try:
        cached = Path(importlib.util.cache_from_source(path)).read_bytes()
    except (OSError, NotImplementedError):  # an interpreter may write no bytecode
        return None
    flags = 0  # the bytecode is validated by time and not by hash
    numbers = struct.pack("<3I", flags, int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
    return cached if cached.startswith(importlib.util.MAGIC_NUMBER + numbers) else None


def _digest(entries: Mapping[str, Entry]) -> str:
    digest = hashlib.sha256()
    for name, entry in entries.items():
        content = hashlib.sha256(entry.content).hexdigest()
        digest.update(f"{entry.mode:o} {content} {name}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:NAME_LENGTH]


def _write(entries: Mapping[str, Entry], snapshot: Path) -> None:
    """Writes the snapshot atomically, because jobs of another submission may be reading."""
    partial = Path(tempfile.mkdtemp(prefix=".", dir=snapshot.parent))  # not readable by others yet
    try:
        for name, entry in entries.items():
            if stat.S_ISDIR(entry.mode):
                (partial / name).mkdir(mode=entry.mode & 0o777 | 0o700, exist_ok=True)
        files = [(f"{partial}/{name}", entry) for name, entry in entries.items() if not stat.S_ISDIR(entry.mode)]
        for _ in concurrently(_write_file, files):
            pass
        mode = entries["."].mode if "." in entries else 0o777
        partial.chmod(snapshot.parent.stat().st_mode & (mode | 0o7700))
        partial.rename(snapshot)
    except OSError:
        shutil.rmtree(partial)
        if not snapshot.is_dir():  # otherwise another submission wrote the same content first
            raise


def _write_file(file: tuple[str, Entry]) -> None:
    """Writes a file or link with the permissions of its entry, reduced by the umask."""
    path, entry = file
    if stat.S_ISLNK(entry.mode):
        Path(path).symlink_to(os.fsdecode(entry.content))
        return
    permissions = entry.mode & 0o777
    _write_new(path, permissions, entry.content)
    if entry.bytecode is not None:
        os.utime(path, ns=(entry.modified_ns, entry.modified_ns))
        cache = f"{os.path.dirname(path)}/{CACHE}"  # noqa: PTH120 - pathlib takes long for thousands of files
        cached = f"{cache}/{os.path.basename(importlib.util.cache_from_source(path))}"  # noqa: PTH119
        try:
            _write_new(cached, permissions, entry.bytecode)
        except FileNotFoundError:  # the first one of this directory
            Path(cache).mkdir(exist_ok=True)
            _write_new(cached, permissions, entry.bytecode)


def _write_new(path: str, permissions: int, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions), "wb") as file:
        file.write(content)


def _write_diff(root: Path, changed: Sequence[str], new: Sequence[str], path: Path) -> str | None:
    """Writes the diff to the commit: of ``changed``, all tracked files that differ, without those with secrets, and of
    the untracked files ``new``.
    """
    if not changed and not new:
        return None
    without = [f":(top,exclude,literal){name}" for name in changed if is_secret_file(name)]
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"  # a copy of git's index, to which the new files are added
        with suppress(OSError):
            shutil.copyfile(root / (git(root, "rev-parse", "--git-path", "index") or "").rstrip("\n"), index)
        if new:
            git(root, "add", "--intent-to-add", "--", *(f":(top,literal){name}" for name in new), index=index)
        text = git(root, "diff", "--binary", "--no-renames", "HEAD", "--", ".", *without, index=index)
    if not text:
        return None
    path.touch(mode=0o600)  # the diff may contain lines of files that only their owner may read
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(path)


def _secrets_note(secrets: Sequence[str]) -> str:
    names = ", ".join(secrets[:LISTED])
    if len(secrets) > LISTED:
        names += f" and {len(secrets) - LISTED} more"
    return (
        f"note: files whose names indicate secrets are left out of the code snapshot: {names}. Workers inherit the "
        "environment of the submission; run.snapshot=false starts them from the work tree itself"
    )


def code_note(code: FrozenCode | None, configs: Sequence[Config]) -> str | None:
    """Returns a line for the user about the code of ``configs``: its commit, or a note that modules in the current
    directory are not in a snapshot; None without such modules.
    """
    if code is None:
        return _unfrozen_note(configs)
    root = Path(code.work_tree)
    runs = Path(os.path.realpath(configs[0].run.root))
    without = [f":(top,exclude,literal){runs.relative_to(root)}"] if runs.is_relative_to(root) else []
    changed = len((git(root, "--no-optional-locks", "status", "--porcelain", "--", ".", *without) or "").splitlines())
    if code.commit is None:
        return f"code: {root} has no commit yet; the run keeps a copy"
    line = f"code: commit {code.commit[:12]} of {root}"
    if changed:
        line += f" with {changed} uncommitted change{'s' * (changed > 1)}; the run keeps a copy"
    return line


def _unfrozen_note(configs: Sequence[Config]) -> str | None:
    here = Path(os.path.realpath(Path.cwd()))
    modules = sorted({re.split(r"[.:]", target)[0] for target in _user_targets(configs)})
    local = [name for name in modules if (here / f"{name}.py").is_file() or (here / name).is_dir()]
    if not local or not configs[0].run.snapshot or work_tree(here) is not None:
        return None
    return (
        f"note: {here} is not in a git work tree, so its code is not frozen: jobs import {', '.join(local)} from there "
        "when they start (after git init, they start from a copy)"
    )


def _user_targets(configs: Sequence[Config]) -> set[str]:
    """Returns all import paths of a user's code in ``configs``."""
    targets: set[str | None] = set()
    for config in configs:
        targets.add(config.run.entry)
        targets.update(name for name in (config.strategy.schedule, config.strategy.data_parallel) if ":" in name)
        targets.update(own_code(config.optim))
        targets.update(item._target_ for item in (*config.metrics.values(), *config.hooks.values()))
        for group in (config.model, config.data):
            if is_import_path(group.kind):
                targets.add(group.kind.partition(":")[0])
            targets.update(getattr(group, name, None) for name in ("_target_", "collate"))
            targets.update(source.get("_target_") for source in getattr(group, "sources", {}).values())
    return {target for target in targets if target is not None}


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


def _ignored(path: str, where: str) -> UserError:
    return UserError(
        f"{path} is ignored by git, so it would be missing from the code snapshot that workers start from",
        where=where,
        fix="remove it from .gitignore, or set run.snapshot=false to train from the live work tree",
    )


def has_changed(code: FrozenCode, config: Config) -> bool:
    """Returns whether the work tree differs from the frozen code, whose run has ``config``."""
    root = Path(code.work_tree)
    snapshot = Path(code.snapshot)
    listed = _listed_code(root, config, snapshot.parent)
    names = {name: size for name, size in listed.items() if not is_secret_file(name)}
    if not any((snapshot / name).exists() for name in OF_DEVELOPERS):
        names = _without_tests_of_hpc_train(root, names)
    try:
        _check_size(root, names)
    except UserError:  # the frozen code did not exceed the limit
        return True
    return _digest(_entries(root, names)) != snapshot.name


SHARED = ".code"
CACHE = "__pycache__"  # the folder of bytecode, which is not part of the content
UNUSED_S = 24 * 3600.0  # a submission uses a copy before the records of its runs name it
_NAME = re.compile(r"[0-9a-f]{16}")


def shared_copies(root: Path) -> Path | None:
    """Creates the directory of the caller's copies below a run root and returns it.

    Returns:
        None, after a note on standard error, if another user could replace it, or it cannot be created.
    """
    above = root / SHARED
    try:
        root.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            above.mkdir(mode=0o700)
            above.chmod(stat.S_ISVTX | root.stat().st_mode & 0o777)  # each user of the root adds a directory
        status = above.lstat()
        trusted = stat.S_ISDIR(status.st_mode) and (is_own(above) or status.st_uid in (0, root.stat().st_uid))
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        copies = above / str(os.geteuid())
        if trusted and not is_open and make_private(copies):
            return copies
    except OSError:
        pass
    print(
        f"note: {above} cannot be used, or belongs to another user who could replace its content; the code is copied "
        "into the run directory",
        file=sys.stderr,
    )
    return None


def content_digest(files: Iterable[tuple[str, int, bytes]]) -> str:
    """Returns the SHA-256 of files and links, which does not depend on the umask.

    Args:
        files: names in the copy, modes and contents; the content of a link is its target.
    """
    digest = hashlib.sha256()
    for name, mode, content in sorted(files):
        kind = "program" if mode & stat.S_IXUSR else "file"
        if stat.S_ISLNK(mode):
            kind = "link"
        line = f"{kind} {hashlib.sha256(content).hexdigest()} {name}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def digest_of_copy(copy: Path) -> str:
    """Returns the ``content_digest`` of the files in a copy.

    Raises:
        OSError: a file cannot be read.
    """
    paths = [
        os.path.join(folder, name)  # noqa: PTH118 - pathlib takes long for thousands of files
        for folder, below, names in os.walk(copy, onerror=_raise)
        if CACHE not in Path(folder).relative_to(copy).parts
        for name in (*names, *(link for link in below if os.path.islink(f"{folder}/{link}")))  # noqa: PTH114
    ]

    def read(path: str) -> tuple[str, int, bytes]:
        mode = os.lstat(path).st_mode
        content = b""
        if stat.S_ISLNK(mode):
            content = os.fsencode(os.readlink(path))  # noqa: PTH115
        elif stat.S_ISREG(mode):
            content = Path(path).read_bytes()
        return os.path.relpath(path, copy), mode, content

    return content_digest(concurrently(read, paths))


def _raise(error: OSError) -> None:
    raise error


def use_copy(copy: Path, content: str) -> bool:
    """Returns whether a copy exists and may be used, and prevents its removal for a day.

    A copy that another user owns, or that has other content, is set aside.
    """
    if not os.path.lexists(copy):
        return False
    with exclusive(copy.parent / ".locks" / "copies"):
        with suppress(OSError):
            if stat.S_ISDIR(copy.lstat().st_mode) and is_own(copy) and digest_of_copy(copy) == content:
                os.utime(copy)
                return True
        if os.path.lexists(copy):
            aside = copy.with_name(f".damaged-{copy.name}-{secrets.token_hex(2)}")
            copy.rename(aside)
            print(f"note: the copied code in {copy} was changed; it is now {aside.name}", file=sys.stderr)
    return False


def remove_unnamed(copies: Path) -> None:
    """Removes shared copies that were not used for a day and that no record of a run below the run root names.

    The call is safe during other submissions and live runs. Nothing is removed if a record cannot be read.

    Args:
        copies: the directory of the caller's copies.
    """
    stamp = copies / ".removal"
    with suppress(OSError):
        before = stamp.stat().st_mtime if stamp.exists() else 0.0
        stamp.touch()
        now = stamp.stat().st_mtime  # the time of the file server's clock
        if now - before < UNUSED_S:
            return
        unused = [path for path in copies.iterdir() if path.is_dir() and _is_unused(path, now)]
        for path in unused:
            if path.name.startswith((".damaged-", ".removed-")):
                shutil.rmtree(path, ignore_errors=True)
        old = [path for path in unused if _NAME.fullmatch(path.name)]
        named = _named(copies.parents[1]) if old else None
        if named is not None:
            for path in old:
                if path.name not in named:
                    _remove(path, now)


def _is_unused(copy: Path, now: float) -> bool:
    return now - copy.lstat().st_mtime > UNUSED_S


def _remove(copy: Path, now: float) -> None:
    with exclusive(copy.parent / ".locks" / "copies"):
        if not _is_unused(copy, now):  # a submission has used it meanwhile
            return
        removed = copy.with_name(f".removed-{copy.name}-{secrets.token_hex(2)}")
        copy.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
    for patch in copy.parent.glob(f"{copy.name}*.patch"):
        patch.unlink(missing_ok=True)


def _named(root: Path) -> set[str] | None:
    """Returns the names of the copies in the records of all runs below ``root``; None if one cannot be read."""
    names = set()
    for path in _run_directories(root, set()):
        try:
            snapshot = RunDirectory(path).record().get("snapshot")
        except (UserError, OSError):
            if is_own(path):
                return None
            continue  # a run of another user that this user cannot have started
        if isinstance(snapshot, dict):
            names.add(Path(str(snapshot.get("snapshot"))).name)
    return names


def _run_directories(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Yields the directories with a record below ``folder``, also behind links."""
    status = folder.stat()
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    if os.path.exists(folder / RECORD):  # noqa: PTH110 - Path.exists raises where the folder cannot be entered
        yield folder
        return
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".") and entry.is_dir()]
    except PermissionError:
        return
    for entry in entries:
        yield from _run_directories(Path(entry.path), seen)


def check_copy(run: RunDirectory) -> None:
    """Raises UserError if the frozen code of ``run`` has changed since the run was frozen.

    Copies of earlier versions have no recorded content.
    """
    code = frozen_code(run)
    if code is None or code.content is None:
        return
    fix = f"restore it, or run the current code of {code.work_tree}: python -m hpc_train resume --code now {run.path}"
    try:
        digest = digest_of_copy(Path(code.snapshot))
    except OSError as error:
        what = f"the copied code of the run cannot be read: {error.filename}: {error.strerror}"
        if isinstance(error, PermissionError):
            fix = "ask its owner to start it with run.snapshot=copy and run.group=GROUP, so that the group can read it"
        raise UserError(what, where=str(run.path), fix=fix) from error
    if digest != code.content:
        what = f"the copied code in {code.snapshot} has changed since the run was frozen"
        raise UserError(what, where=str(run.path), fix=fix)
