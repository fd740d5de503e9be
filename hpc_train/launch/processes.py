"""What places have in common whose jobs are processes of this machine: nothing is queued, and nothing is paid for."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hpc_train.launch.job import Job
from hpc_train.launch.standing import PRESENT, Standing


class ProcessSubmitter:
    """Jobs known by their process ids, which pass ``stop_signal`` on to the agents."""

    stop_signal: signal.Signals

    def is_running(self, job_id: str) -> bool:
        """Whether the process of a job that was submitted here is alive."""
        raise NotImplementedError

    def confirm(self, jobs: Sequence[Job], console: Console) -> None:
        """Nothing to ask: the machine costs the same without the jobs."""

    def plan(self, jobs: Sequence[Job], sweep: Path) -> list[tuple[str, str]]:
        return []

    def identity(self, job_id: str) -> dict[str, Any]:
        return {"pid": int(job_id)}

    def standings(self, ids: Collection[str]) -> dict[str, Standing]:
        return {job_id: PRESENT for job_id in ids if self.is_running(job_id)}

    def stop(self, ids: Collection[str]) -> None:
        for job_id in self.standings(ids):
            os.kill(int(job_id), self.stop_signal)

    def cancel(self, ids: Collection[str]) -> None:
        self.stop(ids)

    def stop_command(self, ids: Collection[str]) -> str:
        name = self.stop_signal.name.removeprefix("SIG")
        return f"kill -{name} " + " ".join(sorted(self.standings(ids), key=int))
