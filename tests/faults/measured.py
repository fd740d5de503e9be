"""Times that the tests on Slurm measure, over all trials of a long form, and the table of them.

They lie beside the notes of what has passed (``tests.checkpoint.progress``): a form that was cut short goes on.
"""

from __future__ import annotations

import os
import random
import statistics
from dataclasses import dataclass

from hpc_train.run.files import append_line, read_lines
from tests.checkpoint.progress import LONG, Progress

SEED = os.environ.get("HPC_TRAIN_SEED", "0")


def trials(usual: int) -> int:
    """How often a test is done: ``usual`` times in the long form, unless ``HPC_TRAIN_TRIALS`` says otherwise."""
    return int(os.environ.get("HPC_TRAIN_TRIALS", usual)) if LONG else 1


def strike(case: str) -> int:
    """The step at which the fault of ``case`` strikes: drawn from the seed, the same in each short form."""
    return random.Random(f"{SEED}:{case}").randrange(6, 12) if LONG else 7


@dataclass(frozen=True)
class Times:
    """Seconds by what took them; nowhere in the short form."""

    progress: Progress

    def note(self, what: str, seconds: float) -> None:
        if self.progress.file is not None:
            append_line(self.progress.file.with_suffix(".times"), {"what": what, "seconds": seconds})

    def table(self) -> str:
        """A line for each, empty without any."""
        found: dict[str, list[float]] = {}
        if self.progress.file is not None:
            for line in read_lines(self.progress.file.with_suffix(".times")):
                found.setdefault(line["what"], []).append(line["seconds"])
        rows = [f"{what:64}{len(s):8}{statistics.median(s):10.1f}{max(s):8.1f}" for what, s in sorted(found.items())]
        return "\n".join([f"{'seconds':64}{'trials':>8}{'median':>10}{'most':>8}", *rows]) if rows else ""
