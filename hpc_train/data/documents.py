"""Reads documents from text and JSONL files, plain or gzipped, and encodes them as token ids.

Documents are read in pieces that fit into memory. Token ids are bytes, or those of a ``tokenizer.json`` of the
``tokenizers`` library.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import UserError

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
        UserError: an argument stands for no file.
    """
    found: dict[Path, InputFile] = {}
    for argument in arguments:
        paths = list(_expand(argument))
        if not paths:
            raise UserError(
                f"no input at {argument!r}",
                where="INPUT",
                fix=f"a file, a quoted glob, or a directory with files ending in {', '.join(TEXT + JSONL)} (or .gz)",
            )
        for path, name in paths:
            try:
                status = path.stat()
                path.open("rb").close()
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror}", where="INPUT", fix="chmod") from error
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
        UserError: a line is no JSON object with a string in ``field``, or the bytes are not in ``encoding``.
    """
    with Path(file.path).open("rb") as raw:
        stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if file.path.endswith(".gz") else raw  # type: ignore[assignment]
        try:
            pieces = _json_lines(stream, raw, file, field, encoding)
            yield from pieces if file.is_jsonl else _text(stream, raw, file, encoding)
        except (EOFError, gzip.BadGzipFile) as error:
            raise UserError(
                f"{file.path} is not a complete gzip file: {error}", where="INPUT", fix="copy it again"
            ) from error


def _json_lines(stream: IO[bytes], raw: IO[bytes], file: InputFile, field: str, encoding: str) -> Iterator[Piece]:
    for number, line in enumerate(stream):
        if not line.strip():
            continue
        try:
            value = json.loads(_decode(line, file, encoding))
        except ValueError as error:
            raise UserError(
                f"{file.path}:{number + 1} is not valid JSON: {error}", where="INPUT", fix="fix the line"
            ) from error
        text = value.get(field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            keys = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise UserError(
                f"{file.path}:{number + 1} has no text in {field!r}; there is {keys}",
                where="--jsonl-field",
                fix="--jsonl-field=NAME of the field that contains the text",
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
        raise UserError(
            f"{file.path} is not {encoding}: {error.reason}",
            where="--encoding",
            fix="--encoding=ENCODING of the file",
        ) from error


BYTES = "bytes"
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Encoder(ABC):
    """Attributes: ids are below ``vocab_size``; ``separator`` goes behind each document where there is one."""

    vocab_size: int
    separator: int | None

    @abstractmethod
    def encode(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """The token ids of each text."""


class ByteEncoder(Encoder):
    """Token ids are the values of the bytes in UTF-8. There is no id left for a separator."""

    vocab_size = 256
    separator = None

    def encode(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]


class FileEncoder(Encoder):
    """A tokenizer from its file. The separator is ``eos``, or the first of the usual end tokens that it knows."""

    def __init__(self, path: str, eos: str | None) -> None:
        self._tokenizer = _load(path)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if eos is not None and eos not in vocabulary:
            raise UserError(f"{path} has no token {eos!r}", where="--eos", fix="a token of the tokenizer")
        known = [token for token in ((eos,) if eos is not None else SEPARATORS) if token in vocabulary]
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = vocabulary[known[0]] if known else None

    def encode(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def open_encoder(tokenizer: str, eos: str | None) -> Encoder:
    """``bytes``, or the path of a ``tokenizer.json``.

    Raises:
        UserError: there is no such file, it is no tokenizer, or the library is not installed.
    """
    if tokenizer != BYTES:
        return FileEncoder(tokenizer, eos)
    if eos is not None:
        raise UserError("bytes have no end token", where="--eos", fix="leave it out, or --tokenizer tokenizer.json")
    return ByteEncoder()


def fingerprint(tokenizer: str) -> str:
    """Changes when the tokenizer does."""
    if tokenizer == BYTES:
        return BYTES
    return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()


def _load(path: str) -> Any:
    if not Path(path).is_file():
        raise UserError(f"there is no tokenizer file {path}", where="--tokenizer", fix="tokenizer.json, or bytes")
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UserError(
            "a tokenizer file needs the tokenizers library, which is not installed",
            where="--tokenizer",
            fix="pip install 'hpc_train[tokenizers]', or --tokenizer bytes",
        ) from error
    try:
        return library.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{path} is not a tokenizer file: {error}",
            where="--tokenizer",
            fix="tokenizer.json of the tokenizers library",
        ) from error
