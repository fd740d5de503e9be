"""Finds out that the previous step of this Slurm job was killed, and whether that was for its memory.

If all agents of a step are killed, none of them records it, and the batch script starts another step of the same job
(``launch/script.py``). slurmstepd, which kills a step that exceeds its memory, writes so into the output of the job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit, Failure

TAIL_BYTES = 1 << 16
# What slurmstepd writes: "Exceeded job memory limit", "exceeded memory limit (9 > 8), being killed",
# "Detected 1 oom_kill event in StepId=7.0", "Detected 1 oom-kill event(s) in step 7.0 cgroup"
MEMORY = re.compile(r"slurmstepd.*(exceeded (job |step )?memory limit|oom[-_]kill)", re.IGNORECASE)
SIZE = re.compile(r"([\d.]+)([KMGT]?)B?", re.IGNORECASE)


@dataclass(frozen=True)
class KilledStep:
    """Describes a step of this start of the job whose agents were killed.

    Attributes:
        attempt: the attempt that it ran.
        step: its id, ``7.0``.
        node: its first node.
        for_memory: the line that slurmstepd wrote because the step used too much memory; None otherwise.
    """

    attempt: int
    step: str
    node: str
    for_memory: str | None

    def details(self, mem: str | None) -> dict[str, Any]:
        """Returns the fields of the event. ``mem`` is ``cluster.mem``."""
        if self.for_memory is None:
            how = f"a signal killed all agents of step {self.step} (scancel --signal=KILL, or a fault of the node)"
            return {"class": Failure.KILLED, "rank": None, "node": self.node, "message": how}
        how = f"Slurm killed step {self.step} for exceeding its memory: {self.for_memory}; {more_memory(mem)}"
        return {"class": Failure.OUT_OF_MEMORY, "rank": None, "node": self.node, "message": how}


def find_killed_step(run: RunDirectory, launch_id: str, attempt: int) -> KilledStep | None:
    """Returns the step that ran ``attempt``, if it belongs to this start of the job and its agents were killed.

    Args:
        launch_id: that of this step: job, step and restart (``machine/allocation.py``).
    """
    path = run.attempts / f"{attempt:03d}.json"
    if attempt < 0 or launch_id.count(".") != 2 or not path.exists() or not path.stat().st_size:
        return None
    spec = run.attempt_record(attempt)
    earlier = str(spec.get("launch_id"))
    if earlier.count(".") != 2:
        return None
    job, step, restart = earlier.split(".")
    this_job, this_step, this_restart = launch_id.split(".")
    if (job, restart) != (this_job, this_restart) or step == this_step:
        return None
    if any("exit_code" in event for event in run.events_of("agent-*", attempt)):
        return None
    return KilledStep(attempt, f"{job}.{step}", str(spec.get("node")), _memory_line(run, f"{job}.{step}"))


def refuse_third_kill(run: RunDirectory, killed: KilledStep | None, mem: str | None) -> None:
    """Raises UserError if two steps in a row were killed for their memory: the next one would be as well."""
    if killed is None or killed.for_memory is None:
        return
    before = [event for event in run.events_of("agent-*", killed.attempt) if event.name == "agents_killed"]
    if any(event.failure == Failure.OUT_OF_MEMORY for event in before):
        raise UserError(
            f"Slurm killed two steps of the job for exceeding its memory: {killed.for_memory}",
            where="cluster.mem",
            fix=more_memory(mem),
        )


def end_event(killed: KilledStep, error: UserError) -> dict[str, Any]:
    """Returns the fields of the event ``failed`` after ``refuse_third_kill``."""
    who = {"class": Failure.OUT_OF_MEMORY, "rank": None, "node": killed.node}
    return {"exit_code": int(Exit.REFUSED), "message": str(error), **who}


def more_memory(mem: str | None) -> str:
    """Returns the advice for a job that requested ``mem`` (``64G``) and needs more."""
    match = SIZE.fullmatch(mem or "")
    if match is None or float(match[1]) == 0:
        default = "the default of the partition (scontrol show config | grep DefMemPer)"
        return f"set cluster.mem to more than {mem or default}, or reduce batch.loader_workers"
    more = f"{1.5 * float(match[1]):.0f}{match[2]}"
    return f"set cluster.mem={more} instead of {mem}, or reduce batch.loader_workers"


def _memory_line(run: RunDirectory, step: str) -> str | None:
    """Returns the last line about the memory of ``step`` in the output of the job; None if there is none.

    slurmstepd may add lines that do not name the step ("Exceeded job memory limit") to those that do.
    """
    output = (run.record().get("submissions") or [{}])[-1].get("output")
    if not output:
        return None
    lines = run.end_of_output(Path(output)).splitlines()
    matches = [line.strip() for line in lines if MEMORY.search(line)]
    named = [line for line in matches if "stepid=" in line.lower()]
    of_step = [line for line in named if re.search(rf"StepId={re.escape(step)}\b", line, re.IGNORECASE)]
    return next(reversed(of_step if named else matches), None)  # without ids, it may be any of the steps
