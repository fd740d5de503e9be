"""Defines the table of the states of jobs by Slurm's names: which are alive, which hold nodes, which have ended well.

See https://slurm.schedmd.com/job_state_codes.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Describes what Slurm does with a job while it is in a state."""

    PENDING = "pending"  # waits for nodes and has no processes
    STARTING = "starting"  # has nodes, which are being prepared
    RUNNING = "running"
    STOPPED = "stopped"  # has processes, which do not execute
    ENDING = "ending"  # its processes are being ended, or its data are being copied out
    ENDED = "ended"


@dataclass(frozen=True)
class JobState:
    """Describes one state.

    Attributes:
        held: the job starts only after ``scontrol release``.
        ended_well: the job's script has ended with exit code 0.
        by_itself: the job's script has run to its end, so everything that it writes at its end has been written.
    """

    name: str
    phase: Phase
    held: bool = False
    ended_well: bool = False
    by_itself: bool = False

    @property
    def is_alive(self) -> bool:
        """Returns whether the job is in the queue: it waits, runs, or is about to end."""
        return self.phase is not Phase.ENDED

    @property
    def holds_nodes(self) -> bool:
        """Returns whether nodes are allocated to the job."""
        return self.phase not in (Phase.PENDING, Phase.ENDED)

    @property
    def may_execute(self) -> bool:
        """Returns whether processes of the job may be executing at this moment."""
        return self.holds_nodes and self.phase is not Phase.STOPPED


FORGOTTEN = "ENDED"  # not a state of Slurm: the controller responds and no longer knows the job

STATES = {
    state.name: state
    for state in (
        JobState("PENDING", Phase.PENDING),
        JobState("REQUEUED", Phase.PENDING),
        JobState("REQUEUE_FED", Phase.PENDING),
        JobState("REQUEUE_HOLD", Phase.PENDING, held=True),
        JobState("SPECIAL_EXIT", Phase.PENDING, held=True),
        JobState("RESV_DEL_HOLD", Phase.PENDING, held=True),
        JobState("LAUNCH_FAILED", Phase.PENDING, held=True),
        JobState("RECONFIG_FAIL", Phase.PENDING, held=True),
        JobState("EXPEDITING", Phase.PENDING),
        JobState("REVOKED", Phase.PENDING),  # another cluster of the federation runs the job
        JobState("CONFIGURING", Phase.STARTING),
        JobState("POWER_UP_NODE", Phase.STARTING),
        JobState("RUNNING", Phase.RUNNING),
        JobState("RESIZING", Phase.RUNNING),
        JobState("SIGNALING", Phase.RUNNING),
        JobState("UPDATE_DB", Phase.RUNNING),
        JobState("SUSPENDED", Phase.STOPPED),
        JobState("STOPPED", Phase.STOPPED),
        JobState("COMPLETING", Phase.ENDING),
        JobState("STAGE_OUT", Phase.ENDING),
        JobState("COMPLETED", Phase.ENDED, ended_well=True, by_itself=True),
        JobState("FAILED", Phase.ENDED, by_itself=True),
        JobState("BOOT_FAIL", Phase.ENDED),
        JobState("CANCELLED", Phase.ENDED),
        JobState("DEADLINE", Phase.ENDED),
        JobState("NODE_FAIL", Phase.ENDED),
        JobState("OUT_OF_MEMORY", Phase.ENDED),
        JobState("PREEMPTED", Phase.ENDED),
        JobState("TIMEOUT", Phase.ENDED),
        JobState(FORGOTTEN, Phase.ENDED, by_itself=True),
    )
}


def state_of(name: str) -> JobState:
    """Returns the state that Slurm prints as ``name``, also as ``CANCELLED by 1000``.

    An unknown state of a newer Slurm counts as running, since no other agent may continue a job that may be alive.
    """
    first = name.partition(" ")[0]
    return STATES.get(first) or JobState(first, Phase.RUNNING)
