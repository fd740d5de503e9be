"""When to save: every so many steps, every so many seconds, or as often as pays.

``auto`` takes Young's interval, sqrt(2 s (M + R)) (Young 1974; Daly 2006), with s the seconds that a save blocks
training, M the mean time between failures of this many GPUs and R the time to find a failure and start again. The
optimum is flat: a factor of two in any of them hardly matters.

The last save of a run, or of an attempt that was told to stop, waits for room on the disk.

A save that fails in the middle of a run is followed by others. After the last one the steps since the checkpoint before
would be lost, so it is tried again for a bounded time. All ranks fail and try again together: rank 0 decides.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hpc_train.checkpoint.space import LEAVING_S
from hpc_train.checkpoint.writer import SaveFailed
from hpc_train.config.values import SaveEvery
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.agent_worker import Heartbeat, Phase
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Failure
from hpc_train.run.requests import StopFlag
from hpc_train.train.control import Control
from hpc_train.train.report import Report

PRIOR_PER_GPU_HOUR = 2.7e-5  # failures; 2e-5 (Llama 3 405B, arXiv:2407.21783) to 3.4e-5 (RSC-1, arXiv:2410.21680)
RECOVERY_S = 120.0  # to find a failure and start again
FIRST_S = 300.0  # under auto, to the first save, which tells what one costs
_OF_THE_MACHINE = ("node_lost", "hang_detected", "worker_failed")


def failure_rate(run: RunDirectory) -> float:
    """Failures per GPU-hour: what this run has seen, at least the prior. Mistakes of the user do not count."""
    user = (Failure.USER_ERROR, Failure.REFUSED)
    failed = {
        event["attempt"]
        for event in run.read_events()
        if event["event"] in _OF_THE_MACHINE and event.get("class") not in user
    }
    spans: dict[int, list[tuple[float, int]]] = {}
    for line in run.read_metrics():
        spans.setdefault(line["attempt"], []).append((line["time"], line["world_size"]))
    hours = sum((max(span)[0] - min(span)[0]) * span[0][1] for span in spans.values()) / 3600
    return max(PRIOR_PER_GPU_HOUR, len(failed) / hours if hours > 0 else 0.0)


def best_interval(cost_s: float, durable_s: float, failures_per_gpu_hour: float, gpus: int) -> float:
    """Seconds between saves that lose least; never less than a save needs until it is durable."""
    between_failures = 3600 / (failures_per_gpu_hour * gpus)
    return max(durable_s, math.sqrt(2 * cost_s * (between_failures + RECOVERY_S)))


@dataclass
class SaveSchedule:
    """Steps are counted by every rank; the clock is that of the rank that ``keeps_time``, which tells the others."""

    every: SaveEvery
    gpus: int
    keeps_time: bool
    failures_per_gpu_hour: float = PRIOR_PER_GPU_HOUR
    clock: Callable[[], float] = time.monotonic
    _interval: float = field(init=False)
    _since: float = field(init=False)
    _asked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._interval = FIRST_S if self.every.auto else self.every.seconds
        self._since = self.clock()

    def falls_on(self, step: int) -> bool:
        """Whether the state after ``step`` steps is due by its number."""
        return self.every.steps > 0 and step % self.every.steps == 0

    def ask(self) -> bool:
        """Whether a save is due by the clock; once until ``saved``."""
        due = self.keeps_time and self._interval > 0 and self.clock() - self._since >= self._interval
        due, self._asked = due and not self._asked, self._asked or due
        return due

    def saved(self, cost_s: float, durable_s: float | None) -> None:
        """Begins the next interval. Under ``auto`` its length follows from the save before.

        Args:
            cost_s: seconds for which the save blocked training.
            durable_s: seconds until a save was committed; None where none was yet.
        """
        self._since, self._asked = self.clock(), False
        if not self.every.auto or durable_s is None:
            return
        before, self._interval = (
            self._interval,
            best_interval(cost_s, durable_s, self.failures_per_gpu_hour, self.gpus),
        )
        if self.keeps_time and not 0.8 < self._interval / before < 1.25:
            print(
                f"checkpoint.every=auto: a save costs {cost_s:.3g} s, {self.failures_per_gpu_hour:.2g} failures per "
                f"GPU-hour on {self.gpus}: the next in {self._interval / 60:.0f} minutes",
                flush=True,
            )


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
