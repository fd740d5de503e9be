"""The process that holds something in a shared directory, and whether it is still alive, seen from any machine.

On its own machine the process table tells. From another one, Slurm tells where it knows the job to be over; else a
holder that has been silent for ``STALE_S`` counts as dead. It may only be asleep, so whatever it changes is fenced.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_train.run import slurm_jobs
from hpc_train.run.processes import boot_id, started

BEAT_S = 15.0
STALE_S = 180.0  # well past the attribute caches of network file systems (60 s) and some lost beats
_MAY_RUN = ("RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT")
_ASLEEP = ("SUSPENDED", "STOPPED")


@dataclass(frozen=True)
class Holder:
    """A process, where it runs and for which job.

    Attributes:
        machine: boot id and process namespace: equal where process ids mean the same.
        started: see ``processes.started``.
        restart: how often Slurm had requeued the job, which keeps its id.
    """

    host: str
    machine: str
    pid: int
    started: str | None
    job_id: str | None = None
    restart: int = 0
    cluster: str | None = None

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Holder:
        return cls(
            host=socket.gethostname(),
            machine=f"{boot_id()}:{Path('/proc/self/ns/pid').readlink()}",
            pid=os.getpid(),
            started=started(os.getpid()),
            job_id=environment.get("SLURM_JOB_ID"),
            restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
            cluster=environment.get("SLURM_CLUSTER_NAME"),
        )

    def __str__(self) -> str:
        job = "" if self.job_id is None else f", Slurm job {self.job_id}"
        return f"process {self.pid} on {self.host}{job}"

    def may_live(self, seen_by: Holder, silent_s: Callable[[], float], ask_slurm: bool = True) -> bool:
        """Whether it may be alive, as far as the process ``seen_by`` can tell.

        Args:
            silent_s: seconds since its last sign of life.
            ask_slurm: may call ``squeue`` once, where nothing else tells.
        """
        if self.machine == seen_by.machine:
            return self.started == started(self.pid)
        known = self._known_to_slurm(seen_by) if ask_slurm and self.job_id is not None else None
        return silent_s() < STALE_S if known is None else known

    def _known_to_slurm(self, seen_by: Holder) -> bool | None:
        """Whether its start of the job goes on; None where that is not known."""
        if None not in (self.cluster, seen_by.cluster) and self.cluster != seen_by.cluster:
            return None
        if self.job_id == seen_by.job_id:
            return False if seen_by.restart > self.restart else None
        assert self.job_id is not None
        state = slurm_jobs.job_state(self.job_id)
        if state is None or state in _MAY_RUN:
            return None
        return state in _ASLEEP
