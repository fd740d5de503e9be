"""Lets an interrupted long form resume: a file records the cases that passed, and the next run skips them.

The record is valid only for the code that produced it: after a change to the package or to these tests, all cases run
again. It is stored in ``$HPC_TRAIN_LONG_STATE``, or else in ``.pytest_cache``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

LONG = bool(os.environ.get("HPC_TRAIN_LONG"))
IN_LONG_FORM = pytest.mark.skipif(not LONG, reason="HPC_TRAIN_LONG=1")
_TOP = Path(__file__).parents[2]


@dataclass(frozen=True)
class Progress:
    """Records which cases of one test have passed; without a file it records none."""

    file: Path | None

    @classmethod
    def of(cls, test: str) -> Progress:
        """Returns the record of ``test`` in the long form; in the short form it has no file, and all cases run."""
        if not LONG:
            return cls(None)
        folder = Path(os.environ.get("HPC_TRAIN_LONG_STATE") or _TOP / ".pytest_cache/long") / _code()
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder / test)

    def open(self, cases: Iterable[object]) -> list[str]:
        """Returns those of ``cases`` that have not passed yet, as strings."""
        done = set() if self.file is None or not self.file.exists() else set(self.file.read_text().splitlines())
        return [str(case) for case in cases if str(case) not in done]

    def passed(self, case: object) -> None:
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(f"{case}\n")


def _code() -> str:
    digest = hashlib.sha256()
    for folder in ("hpc_train", "tests/checkpoint", "tests/faults", "tests/parallel"):
        for path in sorted((_TOP / folder).rglob("*.py")):
            digest.update(path.relative_to(_TOP).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]
