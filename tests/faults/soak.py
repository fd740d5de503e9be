"""The soak: 1,000 faults of all kinds, drawn from seeds, ten in each training.

    python -m tests.faults.soak OUT [RUNS]

Each training that ends appends one line to OUT/soak.jsonl; a soak that is started again goes on with the seeds that are
missing there. A training fails if its weights differ from those of the undisturbed training, if it repeats a step that
a checkpoint contained, if a fault is not reported with its class and rank, or if a process, a port or shared memory is
left. A failure is recorded, and the soak goes on.
"""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.run.files import NewLines, append_line
from tests.faults.plan import CRASHES, ENDS, HANGS, PASSING, draw
from tests.faults.surroundings import Surroundings, surroundings
from tests.faults.trial import assert_survives

RUNS, FAULTS = 100, 10
FIRST_STEP, SPACING = 7, 4


@dataclass(frozen=True)
class SoakRun:
    """Records one training of the soak.

    Attributes:
        kinds: the kinds of its faults, in order.
        recoveries: seconds from each fault that ended an attempt to the end of the first step after it.
        seconds: the duration of the undisturbed training and of this one.
        failure: what was wrong, or None.
    """

    seed: int
    kinds: tuple[str, ...]
    recoveries: tuple[float, ...]
    seconds: float
    failure: str | None


@dataclass(frozen=True)
class Record:
    """Keeps the trainings of a soak, one per line of ``file``."""

    file: Path

    def runs(self) -> list[SoakRun]:
        return [_parse(line) for line in NewLines(self.file).read()] if self.file.exists() else []

    def add(self, run: SoakRun) -> None:
        append_line(self.file, asdict(run))

    def table(self) -> str:
        """Returns the soak as a Markdown table with a row for each kind, and the bound as a sentence."""
        runs = self.runs()
        passed, failed = _count(runs, failed=False), _count(runs, failed=True)
        rows = [f"| `{kind}` | {passed[kind]} | {failed[kind]} |" for kind in sorted(passed | failed)]
        total, bad = passed.total() + failed.total(), sum(run.failure is not None for run in runs)
        bound = upper_bound(bad, total) if total else 1.0
        seconds = sorted(second for run in runs for second in run.recoveries)
        times = f"{statistics.median(seconds):.2f} s (median)" if seconds else "not measured"
        return "\n".join([
            "| kind | faults in trainings that passed | in trainings that failed |",
            "|---|---|---|",
            *rows,
            "",
            f"{total} faults in {len(runs)} trainings and {sum(run.seconds for run in runs) / 3600:.1f} hours; "
            f"{bad} trainings failed: at 95 % confidence, fewer than {bound:.2%} of faults end in a failure. "
            f"First step after a fault: {times}.",
        ])  # fmt: skip


def _parse(line: dict[str, object]) -> SoakRun:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
    return SoakRun(**values)  # type: ignore[arg-type]


def _count(runs: list[SoakRun], failed: bool) -> Counter[str]:
    return Counter(kind for run in runs if (run.failure is not None) == failed for kind in run.kinds)


def upper_bound(failures: int, trials: int, confidence: float = 0.95) -> float:
    """Returns the upper bound of the probability of a failure after ``failures`` in ``trials`` (Clopper and Pearson,
    1934): the probability at which so few failures have the probability ``1 - confidence``.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        at_most = sum(math.comb(trials, k) * middle**k * (1 - middle) ** (trials - k) for k in range(failures + 1))
        low, high = (middle, high) if at_most > 1 - confidence else (low, middle)
    return high


def soak(folder: Path, record: Record, around: Surroundings, runs: int = RUNS) -> None:
    """Runs the trainings that ``record`` does not contain yet, each in a directory of its own in ``folder``."""
    for run in _trainings(folder, set(range(runs)) - {run.seed for run in record.runs()}, around):
        record.add(run)
        print(f"seed {run.seed}: {run.failure or 'passed'} ({run.seconds:.0f} s)", flush=True)


def _trainings(folder: Path, seeds: set[int], around: Surroundings) -> Iterator[SoakRun]:
    kinds = [*CRASHES, *HANGS, *ENDS, *PASSING, *around.kinds]
    for seed in sorted(seeds):
        plan, path, began = draw(seed, FAULTS, kinds, FIRST_STEP, SPACING), folder / f"run-{seed}", time.monotonic()
        failure, recoveries = None, list[float]()
        try:
            recoveries = assert_survives(path, plan, around).recoveries()
        except Exception as error:  # AssertionError or a timeout: the soak goes on
            failure = f"{type(error).__name__}: {error}"[:4000]
        names = tuple(fault.kind for fault in plan)
        yield SoakRun(seed, names, tuple(recoveries), time.monotonic() - began, failure)
        if failure is None:
            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(path.with_name(f"{path.name}-undisturbed"), ignore_errors=True)


def main(out: str, runs: str = str(RUNS)) -> int:
    Path(out).mkdir(parents=True, exist_ok=True)
    record = Record(Path(out, "soak.jsonl"))
    with surroundings() as around:
        soak(Path(tempfile.mkdtemp(dir=out)), record, around, int(runs))
    print(record.table())
    return int(any(run.failure is not None for run in record.runs()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
