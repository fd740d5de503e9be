"""``manifest.json``: what a checkpoint consists of, so that it can be told from a damaged one. No torch.

It names every file with its size and xxh3-128 digest, and itself with a digest of its own. It is written last; whether
a checkpoint exists is decided by the rename after that, or by the file ``COMMITTED`` with the manifest's digest (see
``store``). Reading and verifying write nothing.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from hpc_train import __version__
from hpc_train.errors import UserError

FORMAT = 2
NAME = "manifest.json"
COMMITTED = "COMMITTED"
METADATA = ".metadata"
MAX_BYTES = 256 << 20  # of a manifest; 100,000 ranks need 15 MB
MARKER_BYTES = 64
_CHUNK = 4 << 20
_TRANSIENT = (errno.ENOENT, errno.ESTALE)
_AWAY = (errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EKEYEXPIRED)
_NOT_THE_FILES_FAULT = (errno.EACCES, errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENFILE, *_AWAY)
T = TypeVar("T")


class BadCheckpoint(Exception):
    """A checkpoint is not what its manifest says, or has none. The message names the file."""


class _TooShort(BadCheckpoint):
    """A file has not all its bytes; on a network file system perhaps not yet."""


@dataclass(frozen=True)
class FileEntry:
    """One file: its size in bytes and the xxh3-128 of its content, in hex."""

    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What stands in ``manifest.json``."""

    step: int
    files: Mapping[str, FileEntry]  # by name; all lie directly in the checkpoint's directory
    extra: Mapping[str, Any] = field(default_factory=dict)  # training state that is not a tensor
    layout: Mapping[str, Any] = field(default_factory=dict)
    config_hash: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    parent_step: int | None = None  # the checkpoint that the attempt began with
    attempt: int = 0
    time: float = 0.0  # seconds since 1970
    metrics: Mapping[str, float] = field(default_factory=dict)  # of an evaluation at this very step
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        """The one text of this manifest."""
        content = asdict(self)
        return _text(content | {"digest": _digest(content)})


def decode(data: bytes, where: str = NAME) -> Manifest:
    """The manifest in ``data``.

    Args:
        where: its file, for messages.

    Raises:
        BadCheckpoint: any byte differs from what ``encode`` returned, or a name points outside the checkpoint.
        UserError: the manifest is intact, but another version of hpc_train wrote it in another format.
    """
    try:
        content = json.loads(data)
        digest = content.pop("digest")
        if content["format"] != FORMAT and digest == _digest(content):
            raise _other_format(content["format"], where)
        if content["format"] != FORMAT or digest != _digest(content) or _text(content | {"digest": digest}) != data:
            raise BadCheckpoint(f"{NAME}: its digest is wrong")
        files = {_plain(name): FileEntry(_count(entry["size"]), str(entry["digest"]))
                 for name, entry in content.pop("files").items()}  # fmt: skip
        manifest = Manifest(files=files, **content)
        _count(manifest.step)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{NAME}: not a manifest ({type(error).__name__})") from None
    if METADATA not in files:
        raise BadCheckpoint(f"{NAME}: {METADATA} is not in it")
    return manifest


def _other_format(version: Any, where: str) -> UserError:
    newer = isinstance(version, int) and version > FORMAT
    return UserError(
        f"the checkpoint has format {version}, but hpc_train {__version__} reads format {FORMAT}",
        where=where,
        fix=f"{'a newer' if newer else 'an older'} hpc_train, which reads format {version}, or another checkpoint",
    )


def read_manifest(checkpoint: Path, visibility_timeout_s: float = 0.0) -> Manifest:
    """The manifest of the checkpoint in directory ``checkpoint``.

    Args:
        visibility_timeout_s: how long a missing or short file is read again, in seconds; see ``wait_until_visible``.

    Raises:
        BadCheckpoint: there is none, or it is damaged, or of another step than the directory's name says.
    """

    def read() -> bytes:
        with _open(checkpoint, NAME, range(1, MAX_BYTES + 1)) as file:
            content: bytes = file.readall()  # read(MAX_BYTES) would take that much memory first
            return content

    data = wait_until_visible(read, visibility_timeout_s, f"{checkpoint / NAME}")
    manifest, name = decode(data, str(checkpoint / NAME)), checkpoint.name.partition(".")[0]
    if name.startswith("step-") and name != f"step-{manifest.step:08d}":
        raise BadCheckpoint(f"{NAME}: of step {manifest.step}, in {checkpoint.name}")
    if name.startswith("step-") and name != checkpoint.name:
        found = wait_until_visible(lambda: _read_marker(checkpoint), visibility_timeout_s, f"{checkpoint / COMMITTED}")
        if found != marker(data):
            raise BadCheckpoint(f"{COMMITTED}: not of this {NAME}")
    return manifest


def marker(manifest: bytes) -> bytes:
    """The content of ``COMMITTED`` beside the file ``manifest``."""
    return f"{xxhash.xxh3_128(manifest).hexdigest()}\n".encode()


def has_marker(checkpoint: Path) -> bool:
    """Whether a whole ``COMMITTED`` is there, of whatever manifest; also where that cannot be read now.

    Else a file server's bad moment would make a checkpoint look as if it had never been committed.
    """
    try:
        data = _read_marker(checkpoint)
    except (FileNotFoundError, NotADirectoryError, BadCheckpoint):
        return False
    except OSError:
        return True
    return len(data) == len(marker(b"")) and data.endswith(b"\n")


def _read_marker(checkpoint: Path) -> bytes:
    with _open(checkpoint, COMMITTED, range(MARKER_BYTES + 1)) as file:
        data: bytes = file.readall()
        return data


def verify(
    checkpoint: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    *,
    full: bool = True,
    visibility_timeout_s: float = 0.0,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Compares files with the manifest.

    Args:
        names: which files; all without it, and then no other file may lie beside them.
        full: the content as well, not the sizes only.
        on_bytes: told after each piece how many bytes were read.

    Raises:
        BadCheckpoint: the first difference.
        OSError: this process may not read a file, which says nothing about the file.
    """
    if names is None:
        wait_until_visible(lambda: _check_listing(checkpoint, manifest), visibility_timeout_s, str(checkpoint))
    for name in manifest.files if names is None else names:
        entry = manifest.files[name]

        def check(name: str = name, entry: FileEntry = entry) -> None:
            _check_file(checkpoint, name, entry, full, on_bytes)

        wait_until_visible(check, visibility_timeout_s, f"{checkpoint / name}")


def wait_until_visible(action: Callable[[], T], timeout_s: float, what: str) -> T:
    """Repeats ``action`` for ``timeout_s`` seconds while a file is missing, stale or short, or its server is away.

    Another node's client of a network file system may show an old directory or size until its attribute cache expires,
    after 60 s by default.

    Raises:
        BadCheckpoint: it still is, or the device does not give the bytes.
        OSError: this process may not read, has no memory or descriptors left, or the server is still away.
    """
    deadline, pause = time.monotonic() + timeout_s, 0.05
    while True:
        try:
            return action()
        except _TooShort:
            if time.monotonic() >= deadline:
                raise
        except OSError as error:
            if error.errno not in (*_TRANSIENT, *_AWAY) or time.monotonic() >= deadline:
                if error.errno in _NOT_THE_FILES_FAULT:
                    raise
                raise BadCheckpoint(f"{what}: {error.strerror or error}") from error
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, 5.0)


def _check_listing(checkpoint: Path, manifest: Manifest) -> None:
    found = {path.name for path in checkpoint.iterdir() if not path.name.startswith(".nfs")}  # removed, still open
    foreign = sorted(found - {*manifest.files, NAME, COMMITTED})
    if foreign:
        raise BadCheckpoint(f"{foreign[0]}: not in the manifest")


def _check_file(
    checkpoint: Path, name: str, entry: FileEntry, full: bool, on_bytes: Callable[[int], None] | None
) -> None:
    with _open(checkpoint, name, range(entry.size, entry.size + 1)) as file:
        if full and _hash(file, on_bytes) != entry.digest:
            raise BadCheckpoint(f"{name}: its content is not what was written")


def _open(checkpoint: Path, name: str, sizes: range) -> Any:
    """Opens a regular file of a size in ``sizes``; a link is not followed, a pipe or device not waited for."""
    try:
        descriptor = os.open(checkpoint / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BadCheckpoint(f"{name}: not a regular file, but a link or device") from None
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size not in sizes:
        os.close(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise BadCheckpoint(f"{name}: not a regular file")
        kind = _TooShort if found.st_size < sizes.start else BadCheckpoint
        raise kind(f"{name}: {found.st_size} bytes, not {sizes.start}")
    return os.fdopen(descriptor, "rb", buffering=0)


def _hash(file: Any, on_bytes: Callable[[int], None] | None) -> str:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
        if on_bytes is not None:
            on_bytes(count)
    return digest.hexdigest()


def _plain(name: str) -> str:
    if name in ("", ".", "..", NAME, COMMITTED) or "/" in name or "\0" in name or len(name.encode()) > 255:
        raise BadCheckpoint(f"{NAME}: {name!r} is not a file of a checkpoint")
    return name


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise BadCheckpoint(f"{NAME}: {str(value)[:40]!r} is not a size or a step")
    return value


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(_text(content)).hexdigest()


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
