"""Runs a job on this machine as submitit's controller does, and loses no SIGTERM while the job starts.

The submitter starts this process with SIGTERM blocked. The agent inherits that and unblocks the signal when it can
stop; until then the signal is pending. By default, Python dies of a SIGTERM that arrives while it starts.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from submitit.local.local import Controller


class PatientController(Controller):
    """Forwards SIGTERM as soon as its task exists."""

    def start_tasks(self) -> None:
        super().start_tasks()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    PatientController(folder).run()
    log = folder / "controller.log"
    if log.stat().st_size == 0:
        log.unlink()
