"""How jobs stand in the eyes of what took them; of Slurm, asked rarely and once for all jobs together.

Only ``squeue`` is asked: it answers on sites without accounting too, and still knows a job minutes after its end.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

ASK_EVERY_S = 30.0
ASK_MANY_EVERY_S = 60.0  # with more than MANY jobs
MANY = 100
PATIENCE_S = 120.0  # with a controller under load
ENDED = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)
FORMAT = "%i|%T|%S|%k|%r"  # id, state, (expected) start, comment, reason


@dataclass(frozen=True)
class Standing:
    """One job: its ``state`` in the scheduler's words, and why and until when it waits."""

    state: str = ""
    reason: str = ""
    starts: str = ""  # 2026-01-31T12:00:00, empty where nobody knows
    comment: str = ""

    @property
    def present(self) -> bool:
        """Whether it waits or runs."""
        return self.state not in ENDED

    @property
    def words(self) -> str:
        """For people: "pending (Priority), starts about 01-31 12:00"."""
        text = self.state.lower() or "waiting"
        if self.state != "PENDING":
            return text
        if self.reason not in ("", "None"):
            text += f" ({self.reason})"
        if self.starts:
            text += f", starts about {self.starts[5:16].replace('T', ' ')}"
        return text


PRESENT = Standing()


class SlurmStandings:
    """Standings of Slurm jobs, at most every 30 s asked for anew (every 60 s for many jobs)."""

    def __init__(self) -> None:
        self._known: dict[str, Standing] = {}
        self._asked_at = float("-inf")

    def of(self, ids: Collection[str]) -> dict[str, Standing]:
        """Those of ``ids`` that Slurm knows; where it has not been asked yet or does not answer, they are present."""
        pause = ASK_MANY_EVERY_S if len(ids) > MANY else ASK_EVERY_S
        new = {job_id: PRESENT for job_id in ids if job_id not in self._known}
        if ids and time.monotonic() - self._asked_at >= pause:
            self._asked_at = time.monotonic()
            jobs = sorted({job_id.partition("_")[0] for job_id in ids})
            found = ask([f"--jobs={','.join(jobs)}"])
            if found is not None:
                self._known, new = found, {}
        return {job_id: standing for job_id, standing in (self._known | new).items() if job_id in ids}


def ask(selection: Sequence[str]) -> dict[str, Standing] | None:
    """The jobs that squeue's options ``selection`` name, by id (``12`` or ``12_3``); None where nobody answers."""
    command = ["squeue", "--noheader", "--array", "--states=all", f"--format={FORMAT}", *selection]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    return dict(_parse(line) for line in done.stdout.splitlines() if line.count("|") >= 4)


def _parse(line: str) -> tuple[str, Standing]:
    job_id, state, starts, rest = line.split("|", 3)
    comment, _, reason = rest.rpartition("|")
    return job_id, Standing(state, reason, "" if starts == "N/A" else starts, "" if comment == "(null)" else comment)
