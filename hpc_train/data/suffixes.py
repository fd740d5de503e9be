"""Tells by their suffixes which files contain text; files in other formats are refused by name."""

from __future__ import annotations

from pathlib import Path

from hpc_train.errors import UserError

TEXT, JSONL, JSON, GZIP = (".txt", ".md", ".text"), (".jsonl", ".ndjson"), ".json", ".gz"
_FIXES = {
    **dict.fromkeys((GZIP, ".zst", ".xz", ".bz2", ".lz4"), "decompress it"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z"), "unpack it"),
    **dict.fromkeys((".parquet", ".arrow", ".feather"), "write its rows as JSON Lines, e.g. with Dataset.to_json"),
}


def suffix_of(path: Path, reads_gzip: bool = False) -> str:
    """Returns the suffix in lower case; with ``reads_gzip`` that before ``.gz``."""
    name = path.name.lower()
    return Path(name.removesuffix(GZIP) if reads_gzip else name).suffix


def is_text(path: Path, reads_gzip: bool = False) -> bool:
    """Returns whether the suffix does not name a compressed file, an archive or a binary table."""
    return suffix_of(path, reads_gzip) not in _FIXES


def check_is_text(path: Path, where: str, otherwise: str, reads_gzip: bool = False) -> None:
    """Raises UserError if not ``is_text``; ``otherwise`` is the fix for those who do not want this file."""
    if not is_text(path, reads_gzip):
        suffix = suffix_of(path, reads_gzip)
        raise UserError(
            f"{path} is not text: {suffix} files are not read", where=where, fix=f"{_FIXES[suffix]}, or {otherwise}"
        )
