"""Records the times that the tests on Slurm measure, over all trials of a long form, and formats them as a table.

The times are stored beside the record of passed cases (``tests.checkpoint.progress``), so a form can be resumed.
"""

from __future__ import annotations

import os
import random
import statistics
from dataclasses import dataclass

from hpc_train.run.files import NewLines, append_line
from tests.checkpoint.progress import LONG, Progress

SEED = os.environ.get("HPC_TRAIN_SEED", "0")


def trials(usual: int) -> int:
    """Returns the number of trials: in the long form ``HPC_TRAIN_TRIALS`` or else ``usual``, in the short form 1."""
    return int(os.environ.get("HPC_TRAIN_TRIALS", usual)) if LONG else 1


def fault_step(case: str) -> int:
    """Returns the step at which the fault of ``case`` is injected; the long form draws it from the seed."""
    return random.Random(f"{SEED}:{case}").randrange(6, 12) if LONG else 7


@dataclass(frozen=True)
class Times:
    """Records durations by what was measured; the short form records nothing."""

    progress: Progress

    def note(self, what: str, seconds: float) -> None:
        if self.progress.file is not None:
            append_line(self.progress.file.with_suffix(".times"), {"what": what, "seconds": seconds})

    def table(self) -> str:
        """Returns one row for each kind of duration, or an empty string if there are none."""
        found: dict[str, list[float]] = {}
        if self.progress.file is not None:
            for line in NewLines(self.progress.file.with_suffix(".times")).read():
                found.setdefault(line["what"], []).append(line["seconds"])
        rows = [f"{what:64}{len(s):8}{statistics.median(s):10.1f}{max(s):8.1f}" for what, s in sorted(found.items())]
        return "\n".join([f"{'seconds':64}{'trials':>8}{'median':>10}{'most':>8}", *rows]) if rows else ""
