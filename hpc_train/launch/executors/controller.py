"""Runs a job on this machine like submitit's controller, but does not lose a SIGTERM while the job starts.

The submitter starts this process with SIGTERM blocked. The agent inherits the signal mask and unblocks the signal when
it is able to stop; until then the signal is pending. With the default mask, a SIGTERM kills a Python process that is
still starting.
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
