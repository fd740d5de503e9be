"""Documents out of text and JSONL files, plain or gzipped, in pieces that fit into memory."""

from __future__ import annotations

import glob
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpc_train.config.errors import ConfigError

TEXT, JSONL = (".txt", ".md", ".text"), (".jsonl", ".ndjson")
_PIECE = 1 << 20  # characters of a text file encoded at once; the cut is at the end of a line


@dataclass(frozen=True)
class InputFile:
    """One file to read. A change of any field makes it another input."""

    path: str
    name: str  # relative to the argument that named it; documents go to train or validation by it
    size: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        return Path(self.name.removesuffix(".gz")).suffix in JSONL


@dataclass(frozen=True)
class Piece:
    """Part of a document, whole lines; ``last`` ends the document. ``consumed``: bytes of the file read so far."""

    document: int
    text: str
    last: bool
    consumed: int


def find_inputs(arguments: list[str]) -> list[InputFile]:
    """The files that files, directories (searched for text and JSONL) and globs stand for, each once.

    Raises:
        ConfigError: an argument stands for no file.
    """
    found: dict[Path, InputFile] = {}
    for argument in arguments:
        paths = list(_expand(argument))
        if not paths:
            raise ConfigError(
                f"no input at {argument!r}",
                where="INPUT",
                mend=f"a file, a quoted glob, or a directory with files ending in {', '.join(TEXT + JSONL)} (or .gz)",
            )
        for path, name in paths:
            try:
                status = path.stat()
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror}", where="INPUT", mend="chmod") from error
            found.setdefault(path.resolve(), InputFile(str(path.resolve()), name, status.st_size, status.st_mtime_ns))
    return list(found.values())


def _expand(argument: str) -> Iterator[tuple[Path, str]]:
    path = Path(argument)
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and Path(file.name.removesuffix(".gz")).suffix in TEXT + JSONL:
                yield file, file.relative_to(path).as_posix()
    elif path.exists():
        yield path, path.name
    else:
        for name in sorted(glob.glob(argument, recursive=True)):  # noqa: PTH207 (absolute patterns)
            if Path(name).is_file():
                yield Path(name), Path(name).name


def read_documents(file: InputFile, field: str, encoding: str) -> Iterator[Piece]:
    """The documents of a file: each line of JSONL is one, any other file is one as a whole.

    Raises:
        ConfigError: a line is no JSON object with a string in ``field``, or the bytes are not in ``encoding``.
    """
    with Path(file.path).open("rb") as raw:
        stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if file.path.endswith(".gz") else raw  # type: ignore[assignment]
        try:
            pieces = _json_lines(stream, raw, file, field, encoding)
            yield from pieces if file.is_jsonl else _text(stream, raw, file, encoding)
        except (EOFError, gzip.BadGzipFile) as error:
            raise ConfigError(
                f"{file.path} is no whole gzip file: {error}", where="INPUT", mend="copy it again"
            ) from error


def _json_lines(stream: IO[bytes], raw: IO[bytes], file: InputFile, field: str, encoding: str) -> Iterator[Piece]:
    for number, line in enumerate(stream):
        if not line.strip():
            continue
        try:
            value = json.loads(_decode(line, file, encoding))
        except ValueError as error:
            raise ConfigError(
                f"{file.path}:{number + 1} is no JSON: {error}", where="INPUT", mend="mend the line"
            ) from error
        text = value.get(field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            keys = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ConfigError(
                f"{file.path}:{number + 1} has no text in {field!r}; there is {keys}",
                where="--jsonl-field",
                mend="the field that holds the text",
            )
        yield Piece(number, text, True, raw.tell())


def _text(stream: IO[bytes], raw: IO[bytes], file: InputFile, encoding: str) -> Iterator[Piece]:
    held: list[bytes] = []
    size = 0
    for line in stream:
        if size >= _PIECE:
            yield Piece(0, _decode(b"".join(held), file, encoding), False, raw.tell())
            held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield Piece(0, _decode(b"".join(held), file, encoding), True, raw.tell())


def _decode(content: bytes, file: InputFile, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file.path} is not {encoding}: {error.reason}", where="--encoding", mend="the encoding of the file"
        ) from error
