"""Handles small files on shared file systems: atomic JSON writes, appended lines, and permissions for ``run.group``.

With ``run.group`` all members of a Unix group may read, resume and remove a run. Directories pass the group on (setgid)
and the processes of the run write for the group whatever the umask; without it the user's umask applies. Under a umask
that lets everybody write, such as 000, files are written as under 022.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, cast

from hpc_train.errors import UserError
from hpc_train.opening import DamagedFile, open_file, open_to_append, read_file, read_tail, tell_once

__all__ = ["DamagedFile"]

TAIL_BYTES = 8192  # longer than a line of metrics
BLOCK_BYTES = 256 << 10  # the size of the lines that are decoded together
LINE_BYTES = 16 << 20  # longest line
# shorter than the timeout of the rendezvous server's clients (elastic/rendezvous/client.py)
PATIENCE_S = 8.0
RETRY_S = 0.2

Result = TypeVar("Result")
Item = TypeVar("Item")
Row = dict[str, Any]


def patiently(operation: Callable[[], Result], seconds: float = PATIENCE_S) -> Result:
    """Retries ``operation``, which must be idempotent, until it succeeds; raises its OSError after ``seconds``.

    An error does not show whether a shared file system will recover: it may be ESTALE, EIO, ENOSPC, EDQUOT, or ENOENT
    if a mount is missing.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return operation()
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(RETRY_S)


def is_present(path: Path) -> bool:
    """Returns whether ``path`` exists; raises OSError if that cannot be determined.

    ``Path.exists`` and ``Path.is_dir`` of newer Python versions return False for any error, so that a stale handle of
    a network file system would look like an empty run.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class BackgroundCall(Generic[Result]):
    """Calls ``operation`` in a thread, at most once at a time: a hung file system blocks a call for as long as it
    hangs, and such a call cannot be interrupted.
    """

    def __init__(self, operation: Callable[[], Result]) -> None:
        self._operation = operation
        self._results: queue.SimpleQueue[tuple[Result | None, Exception | None]] = queue.SimpleQueue()
        self._running = False

    def result(self, seconds: float) -> Result:
        """Starts a call, unless an earlier one still runs, and returns its result or raises its exception.

        Raises:
            TimeoutError: the call has not returned after ``seconds``. It is an OSError.
        """
        if not self._running:
            self._running = True
            threading.Thread(target=self._run, name="background-call", daemon=True).start()
        try:
            result, error = self._results.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(errno.ETIMEDOUT, f"the file system did not respond within {seconds:g} s") from None
        self._running = False
        if error is not None:
            raise error
        return cast(Result, result)

    def poll(self, seconds: float) -> Result:
        """Returns ``result(seconds)``, but does not wait again for a call that has not returned in time."""
        return self.result(0.0 if self._running else seconds)

    def _run(self) -> None:
        try:
            self._results.put((self._operation(), None))
        except Exception as error:
            self._results.put((None, error))


def in_time(operation: Callable[[], Result], seconds: float = PATIENCE_S) -> Result:
    """Returns the result of ``operation``, which must be idempotent, repeated after errors for half of ``seconds``.

    It runs in another thread, so this returns even if the file system hangs.

    Raises:
        OSError: it has failed for too long, or has not returned after ``seconds`` (``TimeoutError``).
    """
    return BackgroundCall(lambda: patiently(operation, seconds / 2)).result(seconds)


def read_or(operation: Callable[[], Result], default: Result) -> Result:
    """Returns the result of ``operation``; ``default`` if the file system fails for too long or does not respond, or
    if the file is damaged.
    """
    try:
        return in_time(operation)
    except (OSError, DamagedFile):
        return default


WRITERS = 8  # threads, which mostly wait for the disk or the file server


def concurrently(operation: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields the results of ``operation``, which writes files, for all ``items`` in order; several run at a time.

    After an exception, those that have not begun are not called.
    """
    pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="write")
    try:
        yield from pool.map(operation, items)
    finally:
        pool.shutdown(cancel_futures=True)


def write_text(path: Path, text: str, mode: int = 0o666, *, flush: bool = True) -> None:
    """Replaces the content of ``path`` by ``text`` atomically; a reader sees the old file or the new one.

    Args:
        mode: the permissions of the file, which the umask reduces.
        flush: whether the text is written to disk before it replaces the content. Otherwise a crash of the machine may
            lose the content.
    """
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # left by a process that was killed; it may have other permissions
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def read_json(path: Path, below: Path | None = None) -> Any:
    """Reads a JSON file.

    Args:
        below: the run directory that contains it; None for a file of the user, to which a link may lead.

    Raises:
        DamagedFile: the content is not JSON, or ``open_file`` refuses the file.
    """
    try:
        return json.loads(path.read_bytes() if below is None else read_file(path, below))
    except DamagedFile:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedFile(
            f"{path} is damaged: {error}", where=str(path), fix="restore the file from a backup"
        ) from error


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends one JSON object as a line, after a line that was truncated. Only one process may write to a file."""
    append_text(path, line_end(path) + json_line(value))


def json_line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def append_text(path: Path, text: str) -> None:
    data = text.encode()
    with open_to_append(path, path.parent) as file:
        while data:
            data = data[file.write(data) :]


def line_end(path: Path) -> str:
    """Returns the newline that is missing if the last line of ``path`` was truncated, e.g. by a full disk; ""
    otherwise.
    """
    with suppress(OSError, DamagedFile), open_file(path, path.parent) as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            return "\n"
    return ""


class NewLines:
    """Reads the JSON objects that were appended to a file since the last ``read``.

    Damaged lines and a last line that is still being written are skipped. A file that is not regular is skipped with a
    note, as are lines and fields that ``check`` rejects.

    Args:
        below: the run directory, below which no link of another user is followed; by default the directory of the file.
        check: returns the object, in any class, without its wrong fields; None to skip it.
    """

    def __init__(
        self, path: Path, below: Path | None = None, check: Callable[[Row], Row | None] = lambda row: row
    ) -> None:
        self._path = path
        self._below = below or path.parent
        self._check = check
        self._position = 0

    def read(self) -> Iterator[Any]:
        try:
            file = open_file(self._path, self._below)
        except FileNotFoundError:
            return
        except DamagedFile as error:
            tell_once(f"note: {error.what}; it is not read")
            return
        with file:
            file.seek(self._position)
            for data in _blocks(file):
                self._position += len(data)
                for row in filter(None, _objects(data.decode(errors="replace").split("\n")[:-1])):
                    checked = self._check(row)
                    if checked is not row and checked != row:  # equal if it is only of another class
                        tell_once(f"note: {self._path} has lines with values of a wrong type, which are left out")
                    if checked is not None:
                        yield checked


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yields whole lines of ``file``, many together, up to a line that is too long or still being written."""
    rest = b""
    while len(rest) <= LINE_BYTES and (data := file.read(BLOCK_BYTES)):
        lines, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            yield lines + newline


def last_line(path: Path, below: Path | None = None) -> Row:
    """Returns the last complete JSON object of a file without reading the earlier lines; {} if there is none."""
    try:
        lines = read_tail(path, below or path.parent, TAIL_BYTES).rpartition("\n")[0]
    except FileNotFoundError:
        return {}
    except DamagedFile as error:
        tell_once(f"note: {error.what}; it is not read")
        return {}
    return _object(lines.rpartition("\n")[2])


def _objects(lines: list[str]) -> list[dict[str, Any]]:
    """Returns the JSON objects of ``lines``; a damaged line yields an empty object.

    Intact lines are decoded together, as elements of one array, which takes two thirds of the time.
    """
    with suppress(ValueError, RecursionError):
        values = json.loads(f"[{','.join(lines)}]")
        if len(values) == len(lines) and all(type(value) is dict for value in values):
            return cast(list[dict[str, Any]], values)
    return [_object(line) for line in lines]


def _object(line: str | bytes) -> dict[str, Any]:
    """Returns the JSON object of a line; empty if it is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


GROUP_BITS = 0o070


def group_id(name: str) -> int:
    """Returns the id of the Unix group ``name``.

    Raises:
        UserError: the group does not exist, or this user is not a member.
    """
    what = f"{name} is a group that you do not belong to"
    groups = {os.getgid(), os.getegid(), *os.getgroups()}
    try:
        group = grp.getgrnam(name).gr_gid
        if group in groups or os.geteuid() == 0:
            return group
    except KeyError:
        what = f"{name} is not a group on this machine"
    names = []
    for group in groups:
        try:
            names.append(grp.getgrgid(group).gr_name)
        except KeyError:
            names.append(str(group))
    fix = f"set run.group to one of your groups: {', '.join(sorted(names))}"
    raise UserError(what, where="run.group", fix=fix)


def write_for_group() -> None:
    """Sets the umask so that the group, and nobody else, can write what this process and its children write."""
    before = os.umask(0o077)
    os.umask(before & ~GROUP_BITS | stat.S_IWOTH)


def keep_others_from_writing() -> None:
    """Sets the umask so that nobody else can write the files of this process and its children, if all users could."""
    mask = os.umask(0o077)
    if not mask & stat.S_IWOTH:
        mask |= stat.S_IWGRP | stat.S_IWOTH
    os.umask(mask)


def share(directory: Path, name: str) -> None:
    """Gives ``directory`` and its contents to the group; entries that already belong to the group are not changed."""
    for path in directory.rglob("*"):
        share_one(path, name)
    share_one(directory, name)


def make_directory(path: Path, option: str) -> None:
    """Creates the directory ``path``, which ``option`` of the command line names, unless it exists.

    Raises:
        UserError: it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the directory {path} cannot be created ({error.strerror})"
        raise UserError(what, where=option, fix=f"{option} with a path in a directory that you may write") from error


def refuse_existing(path: Path, option: str) -> None:
    """Raises UserError if ``path``, which ``option`` of the command line names, is anything but an empty directory."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} already exists", where=option, fix=f"{option} with a path that does not exist")


def share_one(path: Path, name: str) -> None:
    """Gives one directory or file to the group, without its contents."""
    group = group_id(name)
    status = path.lstat()
    bits = (status.st_mode & 0o700) >> 3  # what the owner may do
    if stat.S_ISDIR(status.st_mode):
        bits |= stat.S_ISGID
    done = status.st_gid == group and status.st_mode & bits == bits
    if done or stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
        return
    os.chown(path, -1, group)
    path.chmod(stat.S_IMODE(status.st_mode) | bits)
