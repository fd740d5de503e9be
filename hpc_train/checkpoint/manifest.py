"""Reads, writes and verifies ``manifest.json``, which lists the files of a checkpoint; without torch.

The manifest holds the size and xxh3-128 digest of every file, and a digest of itself. It is written last. A checkpoint
exists after the rename that follows, or with the file ``COMMITTED``, which holds the manifest's digest (see ``store``).
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from hpc_train.errors import UserError
from hpc_train.run import rows
from hpc_train.version import __version__

FORMAT = 2
NAME = "manifest.json"
COMMITTED = "COMMITTED"
METADATA = ".metadata"
MAX_BYTES = 256 << 20  # largest manifest; 100,000 ranks need 15 MB
_MARKER_SIZES = range(64 + 1)
_CHUNK = 4 << 20
_TRANSIENT = (errno.ENOENT, errno.ESTALE)
_UNREACHABLE = (
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EKEYEXPIRED,
)
_NO_DAMAGE = (errno.EACCES, errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENFILE, *_UNREACHABLE)
T = TypeVar("T")


class BadCheckpoint(Exception):
    """Reports that a checkpoint does not match its manifest or has none. The message names the file."""


class _TooShort(BadCheckpoint):
    """Reports a truncated file; on a network file system the rest may become visible later."""


@dataclass(frozen=True)
class FileEntry:
    """Holds the size of a file in bytes and the xxh3-128 digest of its content in hex."""

    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Holds the content of ``manifest.json``."""

    step: int
    files: Mapping[str, FileEntry]  # name -> entry; all files are directly in the checkpoint's directory
    extra: Mapping[str, Any] = field(default_factory=dict)  # training state other than tensors
    layout: Mapping[str, Any] = field(default_factory=dict)
    config_hash: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    time: float = 0.0  # seconds since 1970
    metrics: Mapping[str, float] = field(default_factory=dict)  # results of an evaluation at this step
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Returns the total bytes of all files except the manifest."""
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        """Returns the canonical encoding of this manifest."""
        content = asdict(self)
        return _encode_json(content | {"digest": _digest(content)})


def decode(data: bytes, where: str = NAME) -> Manifest:
    """Decodes a manifest.

    Args:
        where: its file, for messages.

    Raises:
        BadCheckpoint: ``data`` is not an unchanged result of ``encode``, or a file name is not a plain name.
        UserError: the manifest is intact, but another version of hpc_train wrote it in another format.
    """
    try:
        content = json.loads(data)
        digest = content.pop("digest")
        version = content["format"]
        intact = digest == _digest(content)
        if version != FORMAT and intact:
            age = "a newer" if isinstance(version, int) and version > FORMAT else "an older"
            raise UserError(
                f"the checkpoint has format {version}, but hpc_train {__version__} reads format {FORMAT}",
                where=where,
                fix=f"{age} hpc_train, which reads format {version}, or another checkpoint",
            )
        if version != FORMAT or not intact or _encode_json(content | {"digest": digest}) != data:
            raise BadCheckpoint(f"{NAME}: the digest does not match")
        files = {_plain(name): FileEntry(_count(entry["size"]), str(entry["digest"]))
                 for name, entry in content.pop("files").items()}  # fmt: skip
        fields_of_version = {entry_field.name for entry_field in fields(Manifest)}  # earlier versions wrote more
        manifest = Manifest(
            files=files, **{name: value for name, value in content.items() if name in fields_of_version}
        )
        _count(manifest.step)
        # fields that commands read without loading the checkpoint
        if not all(isinstance(value, dict) for value in (manifest.extra, manifest.layout, manifest.versions)):
            raise TypeError("not an object")
        if not rows.seconds(manifest.time) or not rows.count(manifest.attempt):
            raise TypeError("not a number")
        metrics = manifest.metrics.values()
        if not all(value is None or isinstance(value, float) or rows.number(value) for value in metrics):  # NaN is one
            raise TypeError("not a metric")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{NAME}: not a manifest ({type(error).__name__})") from None
    if METADATA not in files:
        raise BadCheckpoint(f"{NAME}: {METADATA} is missing")
    return manifest


def read_manifest(checkpoint: Path, visibility_timeout_s: float = 0.0) -> Manifest:
    """Reads the manifest of the checkpoint in directory ``checkpoint``.

    Args:
        visibility_timeout_s: seconds to retry while a file is missing or truncated; see ``wait_until_visible``.

    Raises:
        BadCheckpoint: the manifest is missing or damaged, or its step differs from the directory's name.
    """
    read = partial(_read, checkpoint, NAME, range(1, MAX_BYTES + 1))
    data = wait_until_visible(read, visibility_timeout_s, f"{checkpoint / NAME}")
    manifest = decode(data, str(checkpoint / NAME))
    name = checkpoint.name.partition(".")[0]
    if name.startswith("step-") and name != f"step-{manifest.step:08d}":
        raise BadCheckpoint(f"{NAME}: it belongs to step {manifest.step}, but the directory is {checkpoint.name}")
    if name.startswith("step-") and name != checkpoint.name:
        read = partial(_read, checkpoint, COMMITTED, _MARKER_SIZES)
        if wait_until_visible(read, visibility_timeout_s, f"{checkpoint / COMMITTED}") != marker(data):
            raise BadCheckpoint(f"{COMMITTED}: it does not match {NAME}")
    return manifest


def marker(manifest: bytes) -> bytes:
    """Returns the content of ``COMMITTED`` for an encoded manifest."""
    return f"{xxhash.xxh3_128(manifest).hexdigest()}\n".encode()


def has_marker(checkpoint: Path) -> bool:
    """Returns whether a complete ``COMMITTED`` exists, for any manifest.

    Also returns True if the file cannot be read at the moment; otherwise a failing file server would make a committed
    checkpoint look uncommitted.
    """
    try:
        data = _read(checkpoint, COMMITTED, _MARKER_SIZES)
    except (FileNotFoundError, NotADirectoryError, BadCheckpoint):
        return False
    except OSError:
        return True
    return len(data) == len(marker(b"")) and data.endswith(b"\n")


def _read(checkpoint: Path, name: str, sizes: range) -> bytes:
    with _open(checkpoint, name, sizes) as file:
        data: bytes = file.readall()  # read(MAX_BYTES) would allocate MAX_BYTES first
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

    Files that are not in the manifest do not count as damage, since no reader opens them (see ``foreign_files``).

    Args:
        names: the files to compare; None compares all.
        full: whether to compare the content as well as the sizes.
        on_bytes: called with the number of bytes read since the last call.

    Raises:
        BadCheckpoint: a file differs; the message describes the first difference.
        OSError: this process cannot read a file, so the state of the file is unknown.
    """
    for name in manifest.files if names is None else names:
        check = partial(_check_file, checkpoint, name, manifest.files[name], full, on_bytes)
        wait_until_visible(check, visibility_timeout_s, f"{checkpoint / name}")


def verify_listing(checkpoint: Path, manifest: Manifest) -> None:
    """Checks in one listing, without opening a file, that the checkpoint has all its files.

    Raises:
        BadCheckpoint: a file is missing.
        OSError: this process cannot list the directory.
    """
    missing = sorted({*manifest.files, NAME} - {path.name for path in checkpoint.iterdir()})
    if missing:
        raise BadCheckpoint(f"{missing[0]}: the file is missing")


def wait_until_visible(action: Callable[[], T], timeout_s: float, what: str) -> T:
    """Retries ``action`` for ``timeout_s`` seconds while a file is missing, stale or truncated, or its server is down.

    Another node's client of a network file system may show an old directory or size until its attribute cache expires,
    after 60 s by default.

    Raises:
        BadCheckpoint: the file is still missing or truncated, or the device reports an I/O error.
        OSError: permission is denied, memory or file descriptors are exhausted, or the server is still down.
    """
    deadline = time.monotonic() + timeout_s
    pause = 0.05
    while True:
        try:
            return action()
        except _TooShort:
            if time.monotonic() >= deadline:
                raise
        except OSError as error:
            if error.errno not in (*_TRANSIENT, *_UNREACHABLE) or time.monotonic() >= deadline:
                if error.errno in _NO_DAMAGE:
                    raise
                raise BadCheckpoint(f"{what}: {error.strerror or error}") from error
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, 5.0)


def foreign_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Returns the names of files in the directory of the checkpoint that do not belong to it."""
    # NFS renames a file that is removed while it is open to .nfsNUMBER
    names = {path.name for path in checkpoint.iterdir() if not path.name.startswith(".nfs")}
    return sorted(names - {*manifest.files, NAME, COMMITTED})


def _check_file(
    checkpoint: Path, name: str, entry: FileEntry, full: bool, on_bytes: Callable[[int], None] | None
) -> None:
    with _open(checkpoint, name, range(entry.size, entry.size + 1)) as file:
        if full and _hash(file, on_bytes) != entry.digest:
            raise BadCheckpoint(f"{name}: the content does not match its checksum")


def _open(checkpoint: Path, name: str, sizes: range) -> Any:
    """Opens a regular file with a size in ``sizes``, without following links or blocking on pipes and devices."""
    try:
        descriptor = os.open(checkpoint / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BadCheckpoint(f"{name}: not a regular file but a link or device") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size not in sizes:
        os.close(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadCheckpoint(f"{name}: not a regular file")
        kind = _TooShort if status.st_size < sizes.start else BadCheckpoint
        raise kind(f"{name}: it has {status.st_size} bytes, expected {sizes.start}")
    return os.fdopen(descriptor, "rb", buffering=0)


def _hash(file: Any, on_bytes: Callable[[int], None] | None) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
        if on_bytes is not None:
            on_bytes(count)
    return digest.hexdigest()


def _plain(name: str) -> str:
    if name in ("", ".", "..", NAME, COMMITTED) or "/" in name or "\0" in name or len(name.encode()) > 255:
        raise BadCheckpoint(f"{NAME}: {name!r} is not a valid file name of a checkpoint")
    return name


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise BadCheckpoint(f"{NAME}: {str(value)[:40]!r} is not a valid size or step")
    return value


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(_encode_json(content)).hexdigest()


def _encode_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
