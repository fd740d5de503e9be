"""Reads and writes the record of a run, ``run.json``, which has a checksum, and a copy from which it is restored.

``run.json`` identifies the run (its id, the run it was forked from, the SHA-256 of its config), so a record that is
wrong, or silently empty, would continue another run or begin at step 0. A record is therefore used only if its checksum
matches. ``run.copy.json`` is written before an intact ``run.json`` is replaced, and has the same content. The first
start of the workers removes it: from then on the record is rebuilt from the event log, in which each start of the
workers writes it down. Records of earlier versions have neither checksum nor copy. Only ``run.json`` is flushed to the
disk: a crash of the machine may lose what was last written to the copy.
"""

from __future__ import annotations

import hashlib
import json
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.opening import DamagedFile, read_file, tell_once
from hpc_train.run.events import event_row
from hpc_train.run.files import NewLines, is_present, patiently, write_text
from hpc_train.run.rows import record_of_run
from hpc_train.version import __version__

FORMAT = 1  # the format of the run directory; directories without a number have this format
RECORD = "run.json"
COPY = "run.copy.json"
_DIGEST = "digest"


class _Unusable(Exception):
    """Reports that a file with a record is missing or damaged; the message states which of the two."""


def read_record(folder: Path) -> dict[str, Any]:
    """Returns the record of the run in ``folder``; empty if there is none.

    If ``run.json`` is missing or damaged, this returns its copy, or else the record in the event of the newest start of
    the workers, and prints a note on standard error.

    Raises:
        UserError: the record is damaged and has no copy, or another version of hpc_train wrote it in another
            format.
    """
    try:
        return _read(folder / RECORD)
    except _Unusable as error:
        problem = f"{RECORD} is {error}"
    try:
        record = _read(folder / COPY)
        tell_once(f"note: {folder}: {problem}; its copy {COPY} is used; the next start restores it")
        return record
    except _Unusable as error:
        problem += f", and its copy {COPY} is {error}"
    if (started := _from_events(folder)) is not None:
        used = "the record in the event of the newest start is used; the next start restores it"
        tell_once(f"note: {folder}: {problem}; {used}")
        return started
    if is_present(folder / RECORD) or is_present(folder / COPY):
        raise UserError(
            f"the record of the run in {folder} cannot be used: {problem}",
            where=str(folder / RECORD),
            fix=f"restore {RECORD} or {COPY} from a backup, or start a new run with another run.name (run.fork=NEW "
            "continues from the newest checkpoint of this one)",
        )
    return {}


def with_digest(record: dict[str, Any]) -> dict[str, Any]:
    """Returns ``record`` with its checksum, as files and the event log keep it."""
    plain = json.loads(json.dumps(record))  # as it will be read
    return plain | {_DIGEST: _digest(plain)}


def _from_events(folder: Path) -> dict[str, Any] | None:
    """Returns the record of the newest start of the workers whose checksum matches; None if there is none."""
    events = (
        event
        for path in (folder / "events").glob("agent-*.jsonl")
        for event in NewLines(path, folder, event_row).read()
        if event.name == "started" and event.record is not None
    )
    for event in sorted(events, key=attrgetter("time"), reverse=True):
        record = dict(event.record)
        if record.pop(_DIGEST, None) == _digest(record):
            _check_format(record, folder)
            return record_of_run(record)
    return None


def write_record(folder: Path, content: dict[str, Any]) -> None:
    """Replaces the record; the caller holds the lock of the record. A damaged one is renamed, not removed."""
    text = json.dumps(with_digest(content), indent=2) + "\n"
    has_started = is_present(folder / RECORD) and not is_present(folder / COPY)
    order = [RECORD] if has_started else [COPY, RECORD]
    try:
        _read(folder / RECORD)
    except _Unusable:
        order.reverse()  # the copy may be the only intact one
        if is_present(folder / RECORD):
            (folder / RECORD).rename(folder / f"{RECORD}.damaged")
    for name in order:
        write_text(folder / name, text, flush=name == RECORD)


def drop_copy(folder: Path) -> None:
    """Removes the copy of the record once the event log has the record of a start of the workers."""
    if is_present(folder / COPY) and _from_events(folder) is not None:
        (folder / COPY).unlink()


def _read(path: Path) -> dict[str, Any]:
    data = b""
    try:
        try:
            data = read_file(path, path.parent)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            data = patiently(lambda: read_file(path, path.parent))
        content = json.loads(data)
    except DamagedFile as error:
        raise _Unusable(error.what.removeprefix(f"{path} is ")) from None
    except FileNotFoundError:
        raise _Unusable("missing") from None
    except PermissionError:
        raise
    except OSError as error:
        raise _Unusable(f"not readable ({error.strerror})") from error
    except (ValueError, RecursionError):
        raise _Unusable("empty" if not data.strip() else "damaged (not JSON)") from None
    if not isinstance(content, dict):
        raise _Unusable("damaged (not a record)")
    digest = content.pop(_DIGEST, None)
    if digest is not None and digest != _digest(content):
        raise _Unusable("damaged (its checksum does not match)")
    _check_format(content, path)
    right = record_of_run(content)
    if right is not content:
        tell_once(f"note: {path} has values of a wrong type, which are left out")
    return right


def _check_format(content: dict[str, Any], path: Path) -> None:
    number = content.get("format", FORMAT)
    if number == FORMAT:
        return
    version = "a newer" if isinstance(number, int) and number > FORMAT else "an older"
    raise UserError(
        f"the run directory has format {number}, but hpc_train {__version__} reads format {FORMAT}",
        where=str(path),
        fix=f"{version} hpc_train, which reads format {number}, or a new run.name",
    )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
