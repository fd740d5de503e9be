"""Builds a directory of token files from documents; an interrupted build continues where it stopped.

Inputs of about 32 MiB in total become a shard, which is committed by a rename. Then the shards are joined in the order
of the inputs, and writing ``meta.json`` commits the directory. Uncommitted files are ignored. A process that was
suspended until another took over writes only files that carry its own number.
"""

from __future__ import annotations

import codecs
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from hpc_train.data.conversion import Builder, Progress, Report, run_jobs, sole_builder
from hpc_train.data.dataset import SPLITS, hash_of, position
from hpc_train.data.documents import Encoder, InputFile, Piece, fingerprint, open_encoder, read_documents
from hpc_train.data.tokens import DTYPES, LENGTHS, META, TokensMeta, documents_file, read_meta
from hpc_train.errors import UserError
from hpc_train.run.files import read_json, write_json

_SHARDS = ".shards"
_FORMAT = 4  # version of the shards, which changes with their format or content; shards of other versions are not used
_BATCH = 1 << 20  # characters encoded in one call
SHARD_BYTES = 32 << 20  # bytes of input per shard; a larger input is a shard by itself


@dataclass(frozen=True)
class Settings:
    """Holds the settings of the tokenization; a change of any of them produces different files."""

    tokenizer: str = "bytes"  # or the path of a tokenizer.json
    eos: str | None = None
    bos: bool = True  # whether documents begin with the start tokens of the tokenizer
    jsonl_field: str = "text"
    encoding: str = "utf-8"
    validation_share: float = 0.01  # share of the documents


@dataclass(frozen=True)
class _Shard:
    """Describes the shard of consecutive inputs, for which a process loads the tokenizer once."""

    sources: list[InputFile]
    directory: str  # the path of the committed shard
    builder: int  # the number of the process that builds

    @property
    def unfinished(self) -> Path:
        path = Path(self.directory)
        return path.with_name(f"unfinished-{self.builder}-{path.name}")

    @property
    def size(self) -> int:
        return sum(source.size for source in self.sources)


def prepare(
    inputs: list[InputFile], settings: Settings, out: Path, workers: int, on_progress: Callable[[Progress], None]
) -> TokensMeta:
    """Writes ``train.bin``, ``validation.bin`` and ``meta.json`` to ``out``.

    A document belongs to validation if the hash of its name (file and number) is below the share. If that leaves a
    split empty, the last tokens become the validation split. ``on_progress`` is called about once per second and at the
    end. Raises UserError if an input or the tokenizer is invalid, ``out`` contains other tokens, or another process
    writes there.
    """
    if not 0 < settings.validation_share < 1:
        raise UserError(
            f"--validation-share is {settings.validation_share}, but must be between 0 and 1",
            where="--validation-share",
            fix="--validation-share=0.01",
        )
    try:
        codecs.lookup(settings.encoding)
    except LookupError as error:
        fix = "--encoding utf-8, latin-1 or another codec of Python"
        raise UserError(str(error), where="--encoding", fix=fix) from error
    encoder = open_encoder(settings.tokenizer, settings.eos, settings.bos)
    identity = asdict(settings) | {"tokenizer": fingerprint(settings.tokenizer)}
    del identity["bos"]  # directories of earlier versions, which wrote no start tokens, keep their identity
    if encoder.start:
        identity |= {"start": encoder.start}
    keys = [_key(source, identity) for source in inputs]
    key = hash_of("".join(keys).encode())
    with sole_builder(out) as builder:
        existing = _finished(out, key)
        if existing is None:
            shards = list(_shards(inputs, keys, builder))
            for path in (out / _SHARDS).glob("unfinished-*"):
                shutil.rmtree(path)
            _write_shards(shards, settings, workers, builder, on_progress)
            existing = _join(shards, builder, settings, encoder, key)
        shutil.rmtree(out / _SHARDS, ignore_errors=True)
    on_progress(Progress(sum(source.size for source in inputs), len(inputs)))
    return existing


def _key(source: InputFile, settings: dict[str, Any]) -> str:
    return hash_of(json.dumps([asdict(source), settings], sort_keys=True).encode())


def _finished(out: Path, key: str) -> TokensMeta | None:
    """Returns the metadata of ``out``, or None if it is not complete; raises if it was built from other inputs."""
    if not (out / META).exists():
        return None
    meta = read_meta(out)
    if meta.source.get("key") != key:
        raise UserError(
            f"{out} contains tokens of other inputs or settings",
            where="--out",
            fix="use another directory, or remove it",
        )
    return meta


def _shards(inputs: list[InputFile], keys: list[str], builder: Builder) -> Iterator[_Shard]:
    first = 0
    size = 0
    for number, source in enumerate(inputs, 1):
        size += source.size
        if size >= SHARD_BYTES or number == len(inputs):
            key = hash_of("".join(keys[first:number]).encode())
            yield _Shard(inputs[first:number], str(builder.out / _SHARDS / f"{key}-{_FORMAT}"), builder.number)
            first = number
            size = 0


def _write_shards(
    shards: list[_Shard], settings: Settings, workers: int, builder: Builder, on_progress: Callable[[Progress], None]
) -> None:
    missing = [shard for shard in shards if not Path(shard.directory).is_dir()]
    bytes_before = sum(shard.size for shard in shards) - sum(shard.size for shard in missing)
    inputs_before = sum(len(shard.sources) for shard in shards) - sum(len(shard.sources) for shard in missing)

    def show(done: Progress) -> None:
        builder.check()
        on_progress(Progress(bytes_before + done.bytes, inputs_before + done.items))

    (builder.out / _SHARDS).mkdir(exist_ok=True)
    run_jobs(partial(_write_shard, settings=settings), missing, workers, show)


def _write_shard(shard: _Shard, report: Report, settings: Settings) -> None:
    encoder = open_encoder(settings.tokenizer, settings.eos, settings.bos)
    shard.unfinished.mkdir()
    lengths: dict[str, array[int]] = {split: array("I") for split in SPLITS}  # of the documents
    document = 0  # tokens of the document that is not complete yet
    read = 0
    with (
        (shard.unfinished / "train.bin").open("wb") as train,
        (shard.unfinished / "validation.bin").open("wb") as validation,
    ):
        files = {"train": train, "validation": validation}
        for number, source in enumerate(shard.sources):
            for batch in _batches(read_documents(source, settings.jsonl_field, settings.encoding)):
                for piece, ids in zip(batch, encoder.encode(batch), strict=True):
                    start = () if piece.before else encoder.start
                    ends = [encoder.separator] if piece.last and encoder.separator is not None else []
                    tokens = np.concatenate([np.array(part, dtype=np.uint32) for part in (start, ids, ends)])
                    split = SPLITS[position(f"{source.name}:{piece.document}") < settings.validation_share]
                    files[split].write(tokens.astype(DTYPES[_dtype(encoder)]).tobytes())
                    document += len(tokens)
                    if piece.last:
                        lengths[split].append(document)
                        document = 0
                report(read + batch[-1].consumed, number)
            read += source.size
            report(read, number + 1)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    for split, of_split in lengths.items():
        np.array(of_split, dtype=LENGTHS).tofile(documents_file(shard.unfinished, split))
    write_json(shard.unfinished / "shard.json", {"counts": {split: sum(lengths[split]) for split in SPLITS}})
    shard.unfinished.rename(shard.directory)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _dtype(encoder: Encoder) -> str:
    if encoder.vocab_size <= 1 << 16:
        return "uint16"
    return "uint32"


def _join(shards: list[_Shard], builder: Builder, settings: Settings, encoder: Encoder, key: str) -> TokensMeta:
    """Joins the shards and commits them by writing ``meta.json``."""
    out = builder.out
    joined = builder.out / _SHARDS / f"unfinished-{builder.number}-joined"
    shard_counts = [read_json(Path(shard.directory) / "shard.json")["counts"] for shard in shards]
    counts = {split: sum(count[split] for count in shard_counts) for split in SPLITS}
    total = sum(counts.values())
    if total < 2:
        raise UserError(
            f"the inputs contain {total} tokens, but at least 2 are needed", where="INPUT", fix="name inputs with text"
        )
    by_document = min(counts.values()) > 0
    if not by_document:
        validation = min(max(1, round(total * settings.validation_share)), total - 1)
        counts = {"train": total - validation, "validation": validation}
    joined.mkdir()
    stream = _Stream([Path(shard.directory) / f"{split}.bin" for split in SPLITS for shard in shards])
    for split in SPLITS:
        with (joined / f"{split}.bin").open("wb") as file:
            stream.copy(file, counts[split] * DTYPES[_dtype(encoder)].itemsize)
            os.fsync(file.fileno())
    _join_documents(shards, joined, counts["train"])
    builder.check()
    for path in list(joined.iterdir()):
        path.replace(out / path.name)
    source = {
        "key": key,
        "inputs": [source.path for shard in shards for source in shard.sources],
        "settings": asdict(settings),
        "start": encoder.start,
        "validation": "documents" if by_document else "the end of the tokens",
    }
    meta = TokensMeta(_dtype(encoder), encoder.vocab_size, counts, encoder.separator, source)
    write_json(out / META, asdict(meta))
    return meta


def _join_documents(shards: list[_Shard], out: Path, train: int) -> None:
    """Writes the lengths of the documents in the order of the tokens, split after the first ``train`` tokens."""
    parts = [np.fromfile(documents_file(Path(s.directory), split), LENGTHS) for split in SPLITS for s in shards]
    lengths = np.concatenate(parts)
    ends = np.cumsum(lengths, dtype=np.int64)
    last = int(np.searchsorted(ends, train))  # the document that contains the boundary
    rest = int(ends[last]) - train  # its tokens after the boundary
    sides = {"train": lengths[: last + 1].copy(), "validation": lengths[last:].copy()}
    sides["train"][-1] -= rest
    sides["validation"][0] = rest
    for split, side in sides.items():
        side[side > 0].tofile(documents_file(out, split))


class _Stream:
    """Concatenates files and copies them in parts of a given size."""

    def __init__(self, paths: list[Path]) -> None:
        self._content = self._chunks(paths)
        self._left = b""

    def copy(self, to: IO[bytes], size: int) -> None:
        while size:
            chunk = self._left or next(self._content)
            to.write(chunk[:size])
            self._left = chunk[size:]
            size -= min(size, len(chunk))
        to.flush()

    def _chunks(self, paths: list[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while chunk := file.read(1 << 24):
                    yield chunk
