"""Tells when the GPUs of a node have been idle for long, before a watchdog of the site ends the job for it.

Such watchdogs look at the utilization for half an hour to some hours. GPUs are idle while an attempt waits for data,
for other nodes or for a file system. A thread reads the clock event "GPU idle" of the driver once a minute, and not the
utilization, which is an average over less than a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from hpc_train.machine.health.gpu_health import GpuState
from hpc_train.machine.health.health_check import read_states

LOOK_S = 60.0


class IdleGpus:
    """Looks at the GPUs of one node from its agent.

    Args:
        addresses: the PCI addresses of the GPUs that the ranks use.
        limit_s: seconds after which GPUs that were idle at every look are reported, once until one of them works again.
        report: called with the minutes and the names of the GPUs.
    """

    def __init__(
        self,
        addresses: Collection[str],
        limit_s: float,
        report: Callable[[float, list[str]], object],
        states: Callable[[], tuple[GpuState, ...]] = read_states,
    ) -> None:
        self._addresses = addresses
        self._limit_s = limit_s
        self._report = report
        self._states = states
        self._since: dict[str, float] = {}  # by name of the GPU: the first look at which it was idle
        self._told: set[str] = set()
        self._end = threading.Event()

    def start(self) -> None:
        if self._addresses and self._limit_s > 0:
            threading.Thread(target=self._work, name="idle-gpus", daemon=True).start()

    def close(self) -> None:
        """Ends the thread, without waiting for a driver that does not respond."""
        self._end.set()

    def look(self, now: float) -> None:
        """Reads the GPUs once; ``now`` is of ``time.monotonic()``."""
        idle = [gpu.name for gpu in self._states() if gpu.pci in self._addresses and gpu.idle]
        self._since = {name: self._since.get(name, now) for name in idle}
        self._told &= self._since.keys()
        long = [name for name, since in self._since.items() if now - since >= self._limit_s]
        if not self._told.issuperset(long):
            self._told.update(long)
            self._report(round((now - min(self._since[name] for name in long)) / 60, 1), long)

    def _work(self) -> None:
        while not self._end.wait(LOOK_S):
            self.look(time.monotonic())
