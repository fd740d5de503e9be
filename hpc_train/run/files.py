"""Small files that must be there whole or not at all: JSON by rename, and lines appended in one write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAIL_BYTES = 8192  # more than a line of metrics


def write_text(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in one step; a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends one JSON object as a line, in one write. One process per file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, separators=(",", ":")) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file; a last line that is still being written is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except ValueError:
                    continue


def last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON objects, without reading what comes before."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0]
    except FileNotFoundError:
        return {}
    try:
        return json.loads(whole.rpartition(b"\n")[2])
    except ValueError:
        return {}
