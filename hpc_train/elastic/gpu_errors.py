"""Reads what the GPUs of a node report after a worker error, and checks that their memory is free and that they are
idle.

An error message of CUDA or HIP rarely shows whether the program or the GPU is at fault. The driver knows more: NVML
counts memory errors, remapped rows and lost GPUs, and the kernel log, where it may be read, has Xid errors (AMD: the
counters and the log of amdgpu). The agent reads both after the workers have ended, so that no additional process uses a
GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

from hpc_train.elastic.decision import WorkerFailure
from hpc_train.machine.health.finding import ERROR, OK
from hpc_train.machine.health.gpu_health import MEMORY_LEFT, SUBJECT, GpuState, judge_processes
from hpc_train.machine.health.health_check import NodeHealth, check_gpus, read_states
from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.network.rank_binding import devices
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Failure, concerns_gpu
from hpc_train.run.requests import StopRequests
from hpc_train.units import format_bytes

ALWAYS = (Failure.DEVICE, Failure.KERNEL, Failure.HANG)  # other classes only after an error of CUDA or HIP
MEMORY_S = 30.0  # seconds; the kernel ends a process that has its memory on a GPU within a few
POLL_S, TICKS = 1.0, 4  # between two readings


@dataclass
class GpuErrors:
    """Examines the errors of the GPUs that the ranks of one node use.

    Args:
        facts: of the node.
        ranks: the number of its ranks.
        check: reads the health of the GPUs of the node with the given name.
        states: reads the GPUs only.
    """

    facts: NodeFacts
    ranks: int
    check: Callable[[str], NodeHealth] = check_gpus
    states: Callable[[], tuple[GpuState, ...]] = read_states
    _memory_was_short: bool = field(default=False, init=False)

    def examine(self, failure: WorkerFailure, local_rank: int, attempt_s: float) -> WorkerFailure:
        """Returns ``failure`` with what the GPUs report; a defect that they report makes it a device error.

        Args:
            attempt_s: the duration of the attempt in seconds; older errors in the kernel log are ignored.
        """
        gpu_related = failure.failure in ALWAYS or concerns_gpu(failure.message)
        if not gpu_related or not self.facts.visible:
            return failure
        health = self.check(self.facts.node or "?")
        addresses = self.addresses()
        used = {device.gpu.pci for device in devices(self.facts)[: self.ranks] if device.gpu is not None}
        foreign = [gpu for gpu in health.gpus if used and gpu.pci not in used]  # none if those of the ranks are unknown
        names = tuple(f"{gpu.name}:" for gpu in foreign)
        findings = [finding for finding in health.findings if not finding.text.startswith(names)]
        failure = replace(failure, gpus=tuple(f"{finding.subject}: {finding.text}" for finding in findings))
        if failure.failure is Failure.OUT_OF_MEMORY:
            self._memory_was_short = True
            address = addresses[local_rank] if local_rank < len(addresses) else None
            gpus = [gpu for gpu in health.gpus if gpu.pci is not None and gpu.pci == address][:1]
            # the ranks' own processes are gone
            held = [finding.text for finding in judge_processes(gpus, frozenset()) if finding.level != OK]
            return replace(failure, message="; ".join([failure.message, *held]))
        # what the driver reports now, and what was logged since the attempt began
        faults = [finding.text for finding in findings if finding.level == ERROR and finding.subject == SUBJECT]
        for defect in health.defects:
            is_foreign = any(gpu.pci.startswith(defect.pci or "") for gpu in foreign if gpu.pci)
            if defect.age is not None and defect.age <= attempt_s and not is_foreign:
                faults.append(defect.text)
        if not faults or failure.failure is Failure.DEVICE:
            return failure
        message = f"{failure.message} ({failure.failure}), and a GPU of the node is defective: {faults[0]}"
        return replace(failure, failure=Failure.DEVICE, message=message, waits=False, states=())

    def wait_for_memory(self, events: EventLog, on_tick: Callable[[], None], stop: StopRequests) -> None:
        """Waits after an attempt that ran out of GPU memory until the memory is free, at most ``MEMORY_S`` seconds."""
        if not self._memory_was_short:
            return
        self._memory_was_short = False
        began = time.monotonic()
        while (held := list(self._held())) and not stop.requested and time.monotonic() - began < MEMORY_S:
            for _ in range(TICKS):
                on_tick()
                time.sleep(POLL_S / TICKS)
        seconds = time.monotonic() - began
        state = "; ".join(held) if held else "it is free"
        message = f"waited {seconds:.1f} s for the memory of the GPUs: {state}"
        events.write("gpu_memory_awaited", seconds=round(seconds, 1), free=not held, message=message)
        print(message, flush=True)

    def addresses(self) -> tuple[str | None, ...]:
        """Returns the PCI addresses of the GPUs in the order of local rank; None for a slice or if it is unknown."""
        used = devices(self.facts)[: self.ranks]
        return tuple(None if device.is_slice or device.gpu is None else device.gpu.pci for device in used)

    def _held(self) -> Iterator[str]:
        """Yields how much memory of the ranks' GPUs, or of their slices of GPUs, is in use, if it is much."""
        addresses = self.addresses()
        slices = {device.name for device in devices(self.facts)[: self.ranks] if device.is_slice}
        for gpu in self.states():
            used = {gpu.name: gpu.memory_used} if gpu.pci in addresses else {}
            used |= {name: size for name, size in zip(gpu.slices, gpu.slices_used, strict=True) if name in slices}
            for name, size in used.items():
                if size is not None and size > MEMORY_LEFT:
                    yield f"{format_bytes(size)} of {name} are in use"


LOOK_S = 60.0


class IdleGpus:
    """Watches the GPUs of one node from its agent.

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
