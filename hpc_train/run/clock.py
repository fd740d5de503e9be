"""The clock of a job: that of its first agent, which does not jump when somebody sets the time of a node.

Events and metrics of a job are in seconds since 1970 as its first agent saw them when it started, plus the seconds that
have passed since then. The time ledger of a run is computed from these times, so that a wrong or corrected clock is not
taken for work. The processes of a node share the count of seconds since its boot; the agents of other nodes take over
the clock when they get the first order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HPC_TRAIN_CLOCK"  # in the environment of workers: the boot of their node, and the offset


@dataclass(frozen=True)
class Clock:
    """Tells the time in seconds since 1970. Without an ``offset`` it is the wall clock.

    Attributes:
        offset: the time minus the seconds since the boot of this node.
    """

    offset: float | None = None

    @classmethod
    def at(cls, now: float) -> Clock:
        """Returns a clock that shows ``now`` at this moment."""
        return cls(now - _since_boot())

    @classmethod
    def inherited(cls, environment: Mapping[str, str] = os.environ) -> Clock:
        """Returns the clock of the job whose agent has started this process; elsewhere the wall clock."""
        boot, _, offset = environment.get(VARIABLE, "").partition(" ")
        return cls(float(offset)) if offset and boot == _boot() else cls()

    def now(self) -> float:
        return time.time() if self.offset is None else self.offset + _since_boot()

    def of_wall(self, then: float) -> float:
        """Returns what this clock showed at ``then`` of the wall clock, which has not been set since."""
        return then if self.offset is None else then + self.now() - time.time()

    def environment(self) -> dict[str, str]:
        """Returns the variable from which ``inherited`` returns this clock."""
        return {} if self.offset is None else {VARIABLE: f"{_boot()} {self.offset!r}"}


def age_of_this_process() -> float:
    """Returns the seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since boot
    return _since_boot() - ticks / os.sysconf("SC_CLK_TCK")


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
