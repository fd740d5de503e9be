"""Tokenizes the parts of the input of ``data=sft`` once and keeps the tokens in files that all processes map.

All processes that need the tokens share the work: each takes a part that no other process has locked, until all parts
are there. One listing of the directory shows which parts are finished and which have a lock file; each process tries
the others in an order of its own, and waits when there is none. A part is committed by renaming its directory, so an
interrupted start continues with the other parts. The lock file of a process that has died is found unlocked after some
seconds; on file systems without locks its age decides, and a part that takes long is computed twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.data.sft.answers import ANSWER, Encoder, Tokens
from hpc_train.data.sft.records import Part, read_records
from hpc_train.errors import UserError
from hpc_train.users import user_cache

TOKENS, RECORDS = "tokens.bin", "records.npy"
RECORD = np.dtype([("length", "<u4"), ("first", "<u4"), ("hash", "<f8"), ("largest", "<u4")])
NO_ANSWER = 0xFFFFFFFF
_FORMAT = 2
_WAITS_S = 0.1, 5.0  # the first and the longest
_WITHOUT_LOCKS_S = 120.0  # an older lock file is that of a process that has died, on file systems without locks
_TRIED = 4  # lock files of other processes after each of the longest waits


@dataclass(frozen=True)
class Stored:
    """The files of one part.

    Attributes:
        part: the input.
        directory: has ``tokens.bin``, the tokens of all records as little-endian uint32, and ``records.npy``: for each
            record the number of its tokens, the index of the first one that is learnt (or ``NO_ANSWER``), a hash of its
            tokens in [0, 1), and its largest token id.
    """

    part: Part
    directory: Path

    @property
    def exists(self) -> bool:
        return (self.directory / RECORDS).is_file()

    @property
    def lock(self) -> Path:
        return self.directory.with_suffix(".lock")

    def records(self) -> Any:
        return np.load(self.directory / RECORDS)

    def tokens(self) -> Tokens:
        return np.memmap(self.directory / TOKENS, dtype="<u4", mode="r")


def cache_directory(given: str | None) -> Path:
    """Returns ``data.cache``, or by default ``hpc_train/sft`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if given is not None:
        return Path(given).expanduser()
    return user_cache() / "sft"


def tokenized(
    parts: Sequence[Part], directory: Path, settings: str, open_encoder: Callable[[], Encoder]
) -> list[Stored]:
    """Returns the tokens of ``parts`` in ``directory``; writes those that are missing, together with other processes.

    Args:
        settings: identifies the tokenizer and the chat template.

    Raises:
        UserError: a record is invalid, or the directory cannot be written.
    """
    stored = [Stored(part, directory / _key(part, settings)) for part in parts]
    if all(part.exists for part in stored):
        return stored
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _complete(stored, directory, open_encoder())
    except OSError as error:
        raise UserError(
            f"the tokens of data.path cannot be computed and written to {directory}: {error}",
            where="data.cache, data.path",
            fix="data.cache=DIRECTORY with room for 4 bytes per token, or correct the permissions of the file",
        ) from error
    return stored


def _complete(stored: Sequence[Stored], directory: Path, encoder: Encoder) -> None:
    missing = list(stored)
    chance = random.Random()
    wait_s, longest_s = _WAITS_S
    while True:
        names = {path.name for path in directory.iterdir()}
        missing = [part for part in missing if part.directory.name not in names or not part.exists]
        if not missing:
            return
        chance.shuffle(missing)
        if any(_written(part, encoder) for part in missing if part.lock.name not in names):
            continue
        if wait_s == longest_s and any(_written(part, encoder) for part in missing[:_TRIED]):
            continue
        time.sleep(chance.uniform(wait_s / 5, wait_s))
        wait_s = min(2 * wait_s, longest_s)


def _written(stored: Stored, encoder: Encoder) -> bool:
    """Writes a part unless another process does or has; returns whether this process has written it."""
    with _claimed(stored.lock) as claimed:
        if not claimed or stored.exists:
            return False
        _write(stored, encoder)
        return True


def _key(part: Part, settings: str) -> str:
    content = json.dumps([asdict(part), settings, _FORMAT], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@contextmanager
def _claimed(lock: Path) -> Iterator[bool]:
    """Yields whether this process has the lock; that of a process that dies is released."""
    try:
        file = lock.open("x")
        new = True
    except FileExistsError:
        file = lock.open("a")
        new = False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            if not new and time.time() - os.fstat(file.fileno()).st_mtime < _WITHOUT_LOCKS_S:
                yield False
                return
        try:
            yield True
        finally:
            lock.unlink(missing_ok=True)


def _write(stored: Stored, encoder: Encoder) -> None:
    unfinished = stored.directory.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        with (unfinished / TOKENS).open("wb") as file:
            descriptions = []
            for record in read_records(stored.part):
                tokens = encoder.encode(record)
                file.write(tokens.astype("<u4").tobytes())
                descriptions.append(_described(tokens))
        np.save(unfinished / RECORDS, np.array(descriptions, dtype=RECORD))
        if not stored.exists:
            unfinished.rename(stored.directory)
    except OSError:
        if not stored.exists:  # another process without locks was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _described(tokens: Tokens) -> tuple[int, int, float, int]:
    learnt = np.flatnonzero(tokens[1:] >= ANSWER)  # the first token is never a target
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=6).digest()
    first = int(learnt[0]) + 1 if len(learnt) else NO_ANSWER
    largest = int((tokens & np.uint32(ANSWER - 1)).max()) if len(tokens) else 0
    return len(tokens), first, int.from_bytes(digest, "big") / 2**48, largest
