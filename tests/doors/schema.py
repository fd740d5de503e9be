"""Compares what commands print with ``--json`` with the tables of docs/json.md, which are the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hpc_train.commands import COMMANDS

Table = dict[str, str]  # the types by key; the key and the type may end with a question mark
PAGE = Path(__file__).parents[2] / "docs" / "json.md"
PLAIN = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
_ROW = re.compile(r"\| `(\S+)` \| `(\S+)` \| .*\|")


@cache
def tables() -> dict[str, list[Table]]:
    """Returns the tables below each heading of the page; commands with one heading share them. That of mistakes is
    below ``""``.
    """
    found: dict[str, list[Table]] = {}
    names = [""]
    for line in PAGE.read_text().splitlines():
        row = _ROW.fullmatch(line)
        if line.startswith("##"):
            names = line.lstrip("# ").split(", ")
        elif line.startswith("| Key "):
            for name in names:
                found.setdefault(name, []).append({})
        elif row is not None:
            for name in names:
                found[name][-1][row[1]] = row[2]
    return found


def check_output(arguments: Sequence[str], text: str) -> None:
    """Raises AssertionError if what a command printed with ``--json`` is not as the page says."""
    if "--submit" in arguments:  # the output of the job, which is text and JSON
        return
    name = command_of(arguments)
    for document in documents(text):
        for row in document if isinstance(document, list) else [document]:
            problems = [mismatch(row, table) for table in (*tables().get(name, ()), *tables()[""])]
            assert "" in problems, (name, row, problems)


def command_of(arguments: Sequence[str]) -> str:
    """Returns the command that ``arguments`` call, as a heading of the page names it."""
    if arguments and arguments[0] in COMMANDS:
        has_actions = bool(COMMANDS[arguments[0]].actions)
        return " ".join(arguments[: 1 + has_actions])
    return "train" if {"--help", "-h", "--version"}.isdisjoint(arguments) else "help"


def documents(text: str) -> Iterator[Any]:
    """Yields the objects and arrays in ``text``, which contains nothing else. NaN is no JSON."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    text = text.strip()
    while text:
        document, end = decoder.raw_decode(text)
        yield document
        text = text[end:].strip()


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def mismatch(row: Any, table: Table) -> str:
    """Returns how ``row`` differs from ``table``; empty if it does not."""
    if not isinstance(row, dict):
        return f"{row!r:.80} is not an object"
    types = {key.removesuffix("?"): kind for key, kind in table.items()}
    absent = {key for key in table if not key.endswith("?")} - {*row}
    unknown = {*row} - {*types}
    wrong = {key: row[key] for key in {*types} & {*row} if not has_type(row[key], types[key])}
    if absent or unknown or wrong:
        return f"absent: {sorted(absent)}; not in the table: {sorted(unknown)}; of another type: {wrong}"
    return ""


def has_type(value: Any, kind: str) -> bool:
    if kind == "any" or (value is None and kind.endswith("?")):
        return True
    kind = kind.removesuffix("?")
    if kind in PLAIN:
        return type(value) in PLAIN[kind]
    if kind.startswith("["):
        return isinstance(value, list) and all(has_type(item, kind[1:-1]) for item in value)
    if kind.startswith("{"):
        return isinstance(value, dict) and all(has_type(item, kind[1:-1]) for item in value.values())
    return not mismatch(value, tables()[kind][0])
