"""Finds and reads the records and the tokenizer of ``data=sft``, without importing transformers.

Records are the lines of JSONL files, or the rows of a directory of ``datasets``. The input is divided into parts, which
processes tokenize independently. A part of a file is a range of bytes and has the lines that begin in it, so no process
reads a file only to find its lines.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hpc_train.config.import_path import install_extra
from hpc_train.data.files import JSONL, check_is_text
from hpc_train.errors import UserError

PART_BYTES, PART_ROWS = 32 << 20, 1 << 14
FORMS = ("messages", "prompt and completion", "text")
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"  # files of the datasets library


@dataclass(frozen=True)
class Part:
    """Describes the lines of ``path`` that begin at the bytes [``first``, ``last``), or these rows of a table.

    A change of any field makes it another input.
    """

    path: str
    first: int
    last: int
    is_table: bool
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Record:
    """Holds the columns of a record and its place: the byte at which its line begins, or its row."""

    values: Mapping[str, Any]
    part: Part
    place: int

    @property
    def name(self) -> str:
        """Returns file and line, or directory and row, for messages."""
        return name_of(self.part, self.place)


def name_of(part: Part, place: int) -> str:
    """Returns the name of the record at ``place``; counts the lines before it."""
    if part.is_table:
        return f"row {place} of {part.path}"
    with Path(part.path).open("rb") as file:
        lines = sum(file.read(min(1 << 24, place - at)).count(b"\n") for at in range(0, place, 1 << 24))
    return f"{part.path}:{lines + 1}"


def find_files(path: str, where: str) -> list[Path]:
    """Returns the JSONL files that ``path`` (a file or a directory) names, or the directory of a table; raises
    UserError if there is none, or one is compressed or known not to be text."""
    root = Path(path).expanduser()
    fix = "a JSONL file, a directory of them, or a directory that Dataset.save_to_disk of datasets wrote"
    if root.is_file():
        check_is_text(root, where, f"{where}={fix}")
    if root.is_file() or (root / _STATE).is_file():
        return [root]
    if not root.exists():
        raise UserError(f"{root} does not exist", where=where, fix=f"{where}={fix}")
    if (root / _SPLITS).is_file():
        splits = json.loads((root / _SPLITS).read_text(encoding="utf-8")).get("splits", [])
        raise UserError(
            f"{root} has the splits {', '.join(splits)}",
            where=where,
            fix=f"{where}={root}/{splits[0] if splits else 'train'}; data.validation_path names another split",
        )
    files = sorted(file for file in root.rglob("*") if {*JSONL} & {*file.suffixes[-2:]} and file.is_file())
    for file in files:
        check_is_text(file, where, f"{where}={fix}")
    files = [file for file in files if file.suffix in JSONL]
    if not files:
        raise UserError(f"{root} contains no {' or '.join(JSONL)} file", where=where, fix=f"{where}={fix}")
    return files


def find_parts(path: str, where: str) -> list[Part]:
    """Divides the input ``path`` into parts; raises UserError if there is no input, or it cannot be read."""
    return [part for file in find_files(path, where) for part in _parts_of(file)]


def _parts_of(file: Path) -> Iterator[Part]:
    is_table = file.is_dir()
    status = (file / _STATE if is_table else file).stat()
    total, step = (len(_table(str(file))), PART_ROWS) if is_table else (status.st_size, PART_BYTES)
    for first in range(0, total, step):
        last = min(first + step, total)
        yield Part(str(file.absolute()), first, last, is_table, status.st_size, status.st_mtime_ns)


def read_records(part: Part) -> Iterator[Record]:
    """Yields the records of a part, without empty lines; raises UserError if a line is not a JSON object."""
    if part.is_table:
        table = _table(part.path)
        yield from (Record(table[row], part, row) for row in range(part.first, part.last))
        return
    with Path(part.path).open("rb") as file:
        if part.first:  # a line that begins earlier belongs to the part before
            file.seek(part.first - 1)
            file.readline()
        while (place := file.tell()) < part.last:
            line = file.readline()
            if line.strip():
                try:
                    values = json.loads(line)
                    problem = "" if isinstance(values, dict) else f"it is a {type(values).__name__}"
                except ValueError as error:
                    problem = str(error)
                if problem:
                    raise UserError(
                        f"{name_of(part, place)} is not a JSON object: {problem}",
                        where="data.path",
                        fix="write one JSON object per line (a .json file that is one list is not JSONL)",
                    )
                yield Record(dict(values), part, place)


@cache
def _table(path: str) -> Any:
    try:
        return importlib.import_module("datasets").load_from_disk(path)
    except ImportError as error:
        raise _missing_library(path) from error


def _missing_library(path: str) -> UserError:
    return UserError(
        f"{path} is a directory of the datasets library, which is not installed",
        where="data.path",
        fix=f"{install_extra('datasets')}, or write JSONL with Dataset.to_json",
    )


def first_columns(path: str, where: str) -> list[str]:
    """Returns the columns of the first record, without importing ``datasets``; raises UserError if there is no input or
    no record, the first line is not a JSON object, or ``datasets`` is missing."""
    for file in find_files(path, where):
        if file.is_dir():
            if importlib.util.find_spec("datasets") is None:
                raise _missing_library(str(file))
            return list(json.loads((file / _INFO).read_text(encoding="utf-8")).get("features") or {})
        try:
            size = file.stat().st_size
            record = next(read_records(Part(str(file), 0, size, False, size, 0)), None)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}", where=where, fix="its permissions") from error
        if record is not None:
            return list(record.values)
    raise UserError(f"{path} contains no records", where=where, fix=f"{where}=a file with one JSON object per line")


def form_of(columns: list[str], name: str) -> str:
    """Returns which of ``FORMS`` a record with these columns has; raises UserError if none of them."""
    for form in FORMS:
        if set(form.split(" and ")) <= set(columns):
            return form
    raise UserError(
        f"{name} has the columns {', '.join(columns) or 'none'}, none of which can be trained on",
        where="data.path",
        fix="rename the columns to messages, to prompt and completion, or to text",
    )


TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_READ = (".json", ".jinja", ".txt", ".model")


def tokenizer_file(path: str) -> Path:
    """Returns the ``tokenizer.json`` that ``path`` (this file or its directory) names; raises UserError if there is
    none."""
    given = Path(path).expanduser()
    file = given / TOKENIZER if given.is_dir() else given
    if file.is_file():
        return file
    raise UserError(
        f"{file} does not exist",
        where="data.tokenizer",
        fix=f"data.tokenizer=a directory with {TOKENIZER}, which save_pretrained of a fast tokenizer writes",
    )


def vocabulary(path: str) -> int:
    """Returns the number of token ids: the largest id plus one; raises UserError if the file is missing or is not a
    tokenizer."""
    file = tokenizer_file(path)
    return _vocabulary(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _vocabulary(file: Path, mtime_ns: int) -> int:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = values["model"]["vocab"]
        ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
        return max(*ids, *(token["id"] for token in values.get("added_tokens", [])), 0) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is not a tokenizer: {error!r}", where="data.tokenizer", fix="data.tokenizer=a tokenizer.json"
        ) from error


def check_installed() -> None:
    """Raises UserError if transformers is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise UserError(
            "data=sft needs transformers, which is not installed here", where="data", fix=install_extra("hf")
        )


def template_text(path: str) -> str:
    """Returns the content of ``data.chat_template``; raises UserError if it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", where="data.chat_template", fix="a Jinja file, or null"
        ) from error


def check_template(tokenizer: str, template: str | None) -> None:
    """Raises UserError if there is neither the file ``template`` nor a chat template of the tokenizer."""
    if template is not None:
        template_text(template)
        return
    folder = tokenizer_file(tokenizer).parent
    if any((folder / name).is_file() for name in _TEMPLATES) or _settings(folder).get("chat_template"):
        return
    raise UserError(
        f"the tokenizer of {folder} has no chat template, which the column messages needs",
        where="data.chat_template",
        fix="data.chat_template=FILE.jinja, or the tokenizer of a model for chats",
    )


def check_end(tokenizer: str) -> None:
    """Raises UserError if no file can name the token that ends a text."""
    if not (tokenizer_file(tokenizer).parent / SETTINGS).is_file():
        raise no_end(tokenizer)


def no_end(tokenizer: str) -> UserError:
    """Returns the error about a tokenizer without a token that ends a text, which no model would learn to write."""
    return UserError(
        f"{tokenizer} names no token that ends a text (eos_token), which the columns text, prompt and completion need",
        where="data.tokenizer",
        fix=f"data.tokenizer=a directory with {SETTINGS} and eos_token in it, as save_pretrained writes",
    )


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / SETTINGS
    try:
        if file.is_file():
            return dict(json.loads(file.read_text(encoding="utf-8")))
        return {}
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}", where="data.tokenizer", fix="copy the file again") from error


def fingerprint(tokenizer: str, template: str | None) -> str:
    """Returns a hash of everything, apart from the text, on which the token ids depend."""
    file = tokenizer_file(tokenizer)
    files = sorted(file.parent.iterdir()) if (file.parent / SETTINGS).is_file() else [file]
    digest = hashlib.blake2b((template or "").encode(), digest_size=16)
    for path in files:
        if path.suffix in _READ and path.is_file() and not path.name.endswith(".index.json"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
