"""Reads documents from text and JSONL files, plain or gzipped, and from tables, and encodes them as token ids.

Documents are read in pieces that fit into memory. Token ids are byte values or come from a ``tokenizer.json`` of the
``tokenizers`` library.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.import_path import install_extra
from hpc_train.data.files import GZIP, JSON, JSONL, TABLES, TEXT, check_is_text, is_text, suffix_of
from hpc_train.errors import UserError

_DOCUMENTS = (*TEXT, *JSONL, JSON, *TABLES)
_ROWS = 1024  # rows of a table that are decoded at once
_SPLITS = "dataset_dict.json"  # of DatasetDict.save_to_disk, which writes a directory for each split
_SAVED = "state.json"  # of Dataset.save_to_disk: the names of its Arrow files
_PIECE = 1 << 20  # characters of a text file that are encoded at once; a piece ends with a line
_CONTEXT = 1024  # characters before and after a piece that are encoded with it


@dataclass(frozen=True)
class InputFile:
    """Describes one file to read; a change of any field makes it another input."""

    path: str
    name: str  # relative to the argument; its hash assigns documents to a split
    size: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        return suffix_of(Path(self.name), reads_gzip=True) in (*JSONL, JSON)

    @property
    def is_table(self) -> bool:
        return suffix_of(Path(self.name)) in TABLES

    @property
    def is_gzip(self) -> bool:
        return self.name.lower().endswith(GZIP)


@dataclass(frozen=True)
class Piece:
    """Holds some lines of a document.

    Attributes:
        last: whether the piece ends its document.
        consumed: bytes of the file that have been read so far.
        before: the end of the text before the piece; empty at the beginning of the document.
        after: the beginning of the text after it; empty if the piece is the last one.
    """

    document: int
    text: str
    last: bool
    consumed: int
    before: str = ""
    after: str = ""


def find_inputs(arguments: list[str]) -> list[InputFile]:
    """Returns the files that the arguments (files, directories with text, JSONL or tables, or globs) name, each once.

    Raises:
        UserError: an argument matches no file, one that cannot be read or is known not to be text, or a saved dataset
        with several splits.
    """
    files: dict[Path, InputFile] = {}
    for argument in arguments:
        paths = list(_expand(argument)) if argument.strip() else []
        if not paths:
            raise UserError(
                f"{argument!r} matches no input file",
                where="INPUT",
                fix=f"name a file, a quoted glob, or a directory with {', '.join(_DOCUMENTS)} files (or .gz)",
            )
        for path, name in paths:
            if suffix_of(path) not in TABLES:
                check_is_text(path, "INPUT", "name the text files with a quoted glob", reads_gzip=True)
            try:
                status = path.stat()
                path.open("rb").close()
            except OSError as error:
                raise UserError(
                    f"{path} cannot be read: {error.strerror}", where="INPUT", fix="correct its permissions"
                ) from error
            files.setdefault(path.resolve(), InputFile(str(path.resolve()), name, status.st_size, status.st_mtime_ns))
    return list(files.values())


def _expand(argument: str) -> Iterator[tuple[Path, str]]:
    path = Path(argument)
    if path.is_dir():
        for splits in path.rglob(_SPLITS):
            names = sorted(state.parent.name for state in splits.parent.glob(f"*/{_SAVED}"))
            raise UserError(
                f"{splits.parent} has the splits {', '.join(names)}",
                where="INPUT",
                fix=f"name those to train on, e.g. {splits.parent / names[0] if names else splits.parent}",
            )
        saved = {state.parent: _files_of_dataset(state) for state in path.rglob(_SAVED)}
        for file in sorted(path.rglob("*")):
            if file.name not in (saved.get(file.parent) or [file.name]):
                continue  # what the dataset says about itself, and files that were cached next to it
            is_document = suffix_of(file, reads_gzip=True) in _DOCUMENTS or not is_text(file, reads_gzip=True)
            if is_document and file.is_file():
                yield file, file.relative_to(path).as_posix()
    elif path.exists():
        yield path, path.name
    else:
        for name in sorted(glob.glob(argument, recursive=True)):  # noqa: PTH207 (absolute patterns)
            if Path(name).is_file():
                yield Path(name), Path(name).name


def _files_of_dataset(state: Path) -> list[str]:
    """Returns the names of the Arrow files of a saved dataset; [] if ``state`` is another file of that name."""
    try:
        return [file["filename"] for file in json.loads(state.read_bytes())["_data_files"]]
    except (KeyError, TypeError, ValueError):
        return []


def read_documents(file: InputFile, field: str, encoding: str) -> Iterator[Piece]:
    """Yields the documents of a file: each line of a JSONL file and each row of a table is one, and any other file is
    one document.

    Raises:
        UserError: a line is not a JSON object with a string in ``field``, a table has no column ``field`` of strings or
        is damaged, or the bytes are not in ``encoding``.
    """
    with Path(file.path).open("rb") as raw:
        if file.is_table:
            yield from _rows(raw, file, field)
            return
        stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if file.is_gzip else raw  # type: ignore[assignment]
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
            problem = "" if isinstance(value, dict) else f"it is a {type(value).__name__}"
        except ValueError as error:
            problem = str(error)
        if problem:
            raise UserError(
                f"{file.path}:{number + 1} is not a JSON object: {problem}",
                where="INPUT",
                fix="write one JSON object per line; jq -c '.[]' FILE converts a list",
            )
        text = value.get(field)
        if not isinstance(text, str):
            raise UserError(
                f"{file.path}:{number + 1} has no text in {field!r}; it has {sorted(value)}",
                where="--jsonl-field",
                fix="set --jsonl-field to the name of the field that contains the text",
            )
        yield Piece(number, text, True, raw.tell())


def _rows(raw: IO[bytes], file: InputFile, column: str) -> Iterator[Piece]:
    """Yields the rows of a Parquet or Arrow file. Only ``column`` is decoded, some rows at a time."""
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"{file.path} needs pyarrow, which is not installed", where="INPUT", fix=install_extra("parquet")
        ) from error
    number = 0
    try:
        for batch, consumed in _record_batches(raw, file, column):
            for text in batch.column(column).to_pylist():
                if not isinstance(text, str):
                    raise UserError(
                        f"row {number} of {file.path} has no text in {column!r}, but {text!r:.40}",
                        where="--jsonl-field",
                        fix="set --jsonl-field to the name of the column that contains the text, without empty rows",
                    )
                yield Piece(number, text, True, consumed)
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{file.path} is not a complete {suffix_of(Path(file.name))[1:]} file: {error}",
            where="INPUT",
            fix="copy it again",
        ) from error


def _record_batches(raw: IO[bytes], file: InputFile, column: str) -> Iterator[tuple[Any, int]]:
    """Yields record batches with ``column``, each with the bytes of the file that are done after it.

    ``Dataset.save_to_disk`` writes Arrow's streaming format, pyarrow's feather writer the file format, which begins
    with a magic number. Raises UserError if there is no such column.
    """
    from pyarrow import ipc, parquet

    def check(schema: Any) -> None:
        if column not in schema.names:
            raise UserError(
                f"{file.path} has no column {column!r}; it has {schema.names}",
                where="--jsonl-field",
                fix="set --jsonl-field to the name of the column that contains the text",
            )

    if suffix_of(Path(file.name)) == ".parquet":
        table = parquet.ParquetFile(raw)
        check(table.schema_arrow)
        rows = 0
        for batch in table.iter_batches(_ROWS, columns=[column]):
            rows += batch.num_rows
            yield batch, file.size * rows // table.metadata.num_rows
        return
    is_file = raw.read(6) == b"ARROW1"
    raw.seek(0)
    if is_file:
        reader = ipc.open_file(raw)
        batches: Iterator[Any] = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        reader = batches = ipc.open_stream(raw)
    check(reader.schema)
    for batch in batches:
        yield batch, raw.tell()


def _text(stream: IO[bytes], raw: IO[bytes], file: InputFile, encoding: str) -> Iterator[Piece]:
    held: list[bytes] = []
    size = 0
    before = ""
    for line in stream:
        if size >= _PIECE and line.strip():  # white space between two pieces belongs to the first one
            text = _decode(b"".join(held), file, encoding)
            yield Piece(0, text, False, raw.tell(), before, _decode(line, file, encoding)[:_CONTEXT])
            held = []
            size = 0
            before = text[-_CONTEXT:]
        held.append(line)
        size += len(line)
    if held:
        yield Piece(0, _decode(b"".join(held), file, encoding), True, raw.tell(), before)


def _decode(content: bytes, file: InputFile, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file.path} is not {encoding}: {error.reason}",
            where="--encoding",
            fix="set --encoding to the encoding of the file",
        ) from error


BYTES = "bytes"
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Encoder(ABC):
    """Encodes texts as token ids.

    Attributes:
        vocab_size: the ids are below it.
        start: the ids that begin each document.
        separator: the id that ends each document; None if there is none.
        separator_token: its text.
    """

    vocab_size: int
    start: tuple[int, ...]
    separator: int | None
    separator_token: str | None

    @abstractmethod
    def encode(self, pieces: list[Piece]) -> list[NDArray[np.uint32]]:
        """Returns the token ids of each piece; the pieces of a document together have the ids of its text."""


class ByteEncoder(Encoder):
    """Uses the values of UTF-8 bytes as token ids; no id is left for a separator."""

    vocab_size = 256
    start = ()
    separator = separator_token = None

    def encode(self, pieces: list[Piece]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(piece.text.encode(), dtype=np.uint8).astype(np.uint32) for piece in pieces]


class FileEncoder(Encoder):
    """Encodes with a tokenizer file; the separator is ``eos`` or the first known token of ``SEPARATORS``.

    The template of the tokenizer puts the tokens ``template_start`` before a text; with ``bos``, ``start`` holds their
    ids.
    """

    def __init__(self, path: str, eos: str | None, bos: bool) -> None:
        self._tokenizer = open_tokenizer(path)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if eos is not None and eos not in vocabulary:
            raise UserError(f"{path} has no token {eos!r}", where="--eos", fix="name a token of the tokenizer")
        separators = [token for token in ((eos,) if eos is not None else SEPARATORS) if token in vocabulary]
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator_token = separators[0] if separators else None
        self.separator = vocabulary[separators[0]] if separators else None
        start = start_of(self._tokenizer)
        self.template_start = tuple(self._tokenizer.id_to_token(token) for token in start)
        self.start = start if bos else ()

    def encode(self, pieces: list[Piece]) -> list[NDArray[np.uint32]]:
        """Returns the token ids of each piece.

        A piece is encoded with some text before and after it, and gets the tokens that begin in its own text. Therefore
        a tokenizer that adds a space to the beginning of a text adds none between two pieces.
        """
        texts = [piece.before + piece.text + piece.after for piece in pieces]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [_tokens_of(piece, encoding) for piece, encoding in zip(pieces, encodings, strict=True)]


def _tokens_of(piece: Piece, encoding: Any) -> NDArray[np.uint32]:
    ids = np.array(encoding.ids, dtype=np.uint32)
    if not (piece.before or piece.after):
        return ids
    begins = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 0] - len(piece.before)
    return ids[(begins >= 0) & (begins < len(piece.text))]


def start_of(tokenizer: Any) -> tuple[int, ...]:
    """Returns the token ids that the template of a ``tokenizers.Tokenizer`` puts before a text."""
    for text in itertools.chain(["a"], itertools.islice(tokenizer.get_vocab(), 100)):
        try:
            encoding = tokenizer.encode(text)
        except Exception:
            continue
        added = encoding.special_tokens_mask
        if 0 in added:
            return tuple(encoding.ids[: added.index(0)])
    return ()


def open_encoder(tokenizer: str, eos: str | None, bos: bool = True) -> Encoder:
    """Opens the encoder for ``bytes`` or for the path of a ``tokenizer.json``.

    With ``bos``, documents begin with the start tokens of the tokenizer. Raises UserError if the file is missing or not
    a tokenizer, or the library is not installed.
    """
    if tokenizer != BYTES:
        return FileEncoder(tokenizer, eos, bos)
    if eos is not None:
        raise UserError(
            "the tokenizer bytes has no end token", where="--eos", fix="omit --eos, or use --tokenizer tokenizer.json"
        )
    return ByteEncoder()


def fingerprint(tokenizer: str) -> str:
    if tokenizer == BYTES:
        return BYTES
    return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()


def open_tokenizer(path: str) -> Any:
    """Returns the ``tokenizers.Tokenizer`` of a ``tokenizer.json``, without the truncation and padding that training
    scripts leave in the file; raises UserError if it cannot be loaded."""
    if not Path(path).is_file():
        raise UserError(f"{path} is not a file", where="--tokenizer", fix="name a tokenizer.json, or use bytes")
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UserError(
            "a tokenizer file needs the tokenizers library, which is not installed",
            where="--tokenizer",
            fix=f"{install_extra('tokenizers')}, or use --tokenizer bytes",
        ) from error
    try:
        tokenizer = library.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{path} is not a tokenizer file: {error}",
            where="--tokenizer",
            fix="use a tokenizer.json of the tokenizers library",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
