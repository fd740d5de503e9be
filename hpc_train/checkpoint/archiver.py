"""Rank 0's side of ``checkpoint.archive``: starts the process that copies, and lets it run. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hpc_train.run.directory import RunDirectory

_POLL_S = 0.2
_END_S = 5.0


@dataclass
class Archiver:
    """At most one process at a time. Its failures are told by itself; none is raised here.

    Attributes:
        active: there is an archive, and this rank looks after it.
    """

    run: RunDirectory
    attempt: int
    active: bool
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _due: bool = field(default=False, init=False)

    def wake(self) -> None:
        """There may be something new to copy. May be called in any thread."""
        self._due = self.active

    def poll(self) -> None:
        """Starts the process where one is due and none is at work. Does not wait."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if not self._due or self._process is not None:
            return
        self._due = False
        command = [sys.executable, "-m", "hpc_train.checkpoint.archive"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            self._process = subprocess.Popen(
                [*command, str(self.run.path), str(self.attempt), str(os.getpid())], env=environment
            )
        except OSError as error:
            print(f"checkpoint.archive: {error}", flush=True)

    def finish(self, give_up: Callable[[], bool]) -> None:
        """At the end of a run: until everything is copied, or ``give_up`` says so; then the next attempt goes on."""
        self.poll()
        while self._process is not None and not give_up():
            time.sleep(_POLL_S)
            self.poll()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
