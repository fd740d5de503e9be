"""The last save of a run, or of an attempt that was told to stop, waits for room on the disk.

A save that fails in the middle of a run is followed by others. After the last one the steps since the checkpoint before
would be lost, so it is tried again for a bounded time. All ranks fail and try again together: rank 0 decides.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpc_train.checkpoint.stop_time import LEAVING_S
from hpc_train.checkpoint.writer import SaveFailed
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.heartbeat import Heartbeat, Phase
from hpc_train.run.stop import StopFlag
from hpc_train.train.control import Control
from hpc_train.train.report import Report

PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}  # somebody makes room, or the server comes back
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
SIGN_OF_LIFE_S = 1.0


@dataclass
class LastSave:
    """Every method is collective.

    Attributes:
        wait_s: for which the save is tried again, without a stop request.
        stop_grace_s: from a stop request until the agent kills the workers.
    """

    mesh: Mesh
    heartbeat: Heartbeat
    stop: StopFlag
    report: Report
    wait_s: float
    stop_grace_s: float

    def run(self, save: Callable[[bool], None], step: int) -> None:
        """Calls ``save`` until it succeeds or the time is over.

        Args:
            save: is told whether it is called again.

        Raises:
            SaveFailed: it failed for good.
        """
        began, pause, told = time.monotonic(), FIRST_PAUSE_S, 0.0
        again = False
        while True:
            try:
                save(again)
                return
            except SaveFailed as error:
                deadline, now = self._deadline(began), time.monotonic()
                if not self._agreed(not error.codes.isdisjoint(PASSING) and now + pause < deadline):
                    raise
                if deadline != told:  # a stop request has changed it
                    told = deadline
                    self.report.save_waits(step, str(error), deadline - now)
            self._pause(pause, step)
            again, pause = True, min(2 * pause, LONGEST_PAUSE_S)

    def _deadline(self, began: float) -> float:
        deadline = began + self.wait_s
        if not self.stop.requested:
            return deadline
        leaving = min(LEAVING_S, self.stop_grace_s / 4)
        return min(deadline, self.stop.since + self.stop_grace_s - leaving)

    def _agreed(self, goes_on: bool) -> bool:
        """Returns the decision of rank 0 on every rank."""
        control = Control(self.mesh)
        control.post(False, 0, save=goes_on and self.mesh.rank == 0)
        return control.read().save

    def _pause(self, seconds: float, step: int) -> None:
        """A stop request cuts it short, once."""
        until, stopping = time.monotonic() + seconds, self.stop.requested
        while (left := until - time.monotonic()) > 0 and self.stop.requested == stopping:
            time.sleep(min(left, SIGN_OF_LIFE_S))
            self.heartbeat.enter(Phase.CHECKPOINT, step)
