"""A wish to see the stacks of a live run: a file in the run directory that its agents look at every few seconds.

logs/stacks/request            the number of the last wish
logs/stacks/NNN-<node>.txt     the answer of a node
"""

from __future__ import annotations

from pathlib import Path

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_text


def request(run: RunDirectory) -> int:
    """Asks the agents of ``run``; returns the number of the wish."""
    _folder(run).mkdir(parents=True, exist_ok=True)
    number = requested(run) + 1
    write_text(_folder(run) / "request", f"{number}\n")
    return number


def requested(run: RunDirectory) -> int:
    """The number of the last wish, 0 before the first."""
    try:
        return int((_folder(run) / "request").read_text())
    except (OSError, ValueError):
        return 0


def answer(run: RunDirectory, number: int, node: str, text: str) -> None:
    _folder(run).mkdir(parents=True, exist_ok=True)
    write_text(_folder(run) / f"{number:03d}-{node}.txt", text)


def answers(run: RunDirectory, number: int) -> list[Path]:
    return sorted(_folder(run).glob(f"{number:03d}-*.txt"))


def _folder(run: RunDirectory) -> Path:
    return run.logs / "stacks"
