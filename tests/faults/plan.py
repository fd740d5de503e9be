"""Defines which fault occurs when, as a plan in an environment variable that only ``tests.faults.entry`` reads."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "HPC_TRAIN_TEST_FAULTS"
MARK = "HPC_TRAIN_TEST_TRIAL"  # holds the run directory in every process of a trial
RECOVERY = -1  # replaces the step of a fault that occurs while the next attempt starts


@dataclass(frozen=True)
class Kind:
    """Describes the effect of a fault.

    Attributes:
        failure: the class that the event log must name, or None if nothing fails.
        end: the exit code of the agent, which is then started again, or None if the run continues by itself.
        names_rank: whether the event log must name the rank of the fault.
        bad_batches: the number of bad batches in the data, starting at the step; the run must skip them.
    """

    failure: str | None = None
    end: int | None = None
    names_rank: bool = True
    bad_batches: int = 0


CRASHES = {
    **dict.fromkeys(("kill", "segfault", "abort", "bus", "loader"), Kind("killed")),
    "exit": Kind("exited"),
    "store": Kind("communication", names_rank=False),
    "warm_parent": Kind("killed", names_rank=False),  # it kills all ranks of the node at once
}
HANGS = dict.fromkeys(("stop", "gil", "storage", "collective", "storage_in_save"), Kind("hang"))
ENDS = {
    "memory": Kind("out_of_memory", end=1),
    "agent": Kind(end=-9),
    "request": Kind(end=75),  # a user asks the run to stop
    "grace": Kind("killed", end=1, names_rank=False),  # the save after a stop request exceeds the grace period
}
PASSING = {"disk": Kind(), "nan": Kind(bad_batches=1), "spike": Kind(bad_batches=3)}
# These faults need surroundings that only root can create (tests/faults/surroundings.py).
IN_SURROUNDINGS = {
    "memory_limit": Kind("out_of_memory", end=1),
    "shared_memory": Kind("disk_full", end=1, names_rank=False),  # all ranks share /dev/shm
    "read_only": Kind("killed"),  # while events, metrics, logs and attempts cannot be written
}
# These faults are never drawn: GPU errors with the messages of torch.
GPU_ERRORS = {"device": Kind("device_error"), "kernel": Kind("kernel_error")}
# These faults are never drawn: a rank that is slow in every step, a rank that pauses in one step until two nodes have
# reported it, a node whose processes are all suspended until the test resumes them, and a bit of a weight that flips.
SPECIAL = {"slow": Kind(), "pause": Kind(), "asleep": Kind(), "weight": Kind("corruption", names_rank=False)}
OF_LOADERS = ("loader", "shared_memory")
KINDS = CRASHES | HANGS | ENDS | PASSING | IN_SURROUNDINGS | GPU_ERRORS | SPECIAL


@dataclass(frozen=True)
class Fault:
    """Describes a fault: ``kind`` affects ``rank`` when it first reaches training step ``step``, or in a recovery."""

    kind: str
    rank: int
    step: int

    @property
    def leads_to(self) -> Kind:
        return KINDS[self.kind]


def variables(plan: Sequence[Fault]) -> dict[str, str]:
    return {VARIABLE: json.dumps([asdict(fault) for fault in plan])}


def read_plan() -> list[Fault]:
    return [Fault(**fault) for fault in json.loads(os.environ.get(VARIABLE, "[]"))]


def happened(run_dir: str | Path, number: int) -> Path:
    """Returns the file that shows that fault ``number`` was injected; it contains the time."""
    return Path(run_dir) / f"fault-{number:03d}"


def bad_windows(plan: Sequence[Fault]) -> list[tuple[int, int]]:
    """Returns the bad batches of each fault as positions [first, last) in the data, which count skipped batches too."""
    found: list[tuple[int, int]] = []
    for fault in plan:
        first = fault.step + sum(last - first for first, last in found)
        if fault.leads_to.bad_batches:
            found.append((first, first + fault.leads_to.bad_batches))
    return found


def draw(seed: int, count: int, kinds: Sequence[str], first_step: int, spacing: int) -> list[Fault]:
    """Draws ``count`` faults, one every ``spacing`` steps, with similar numbers of each kind.

    After a fifth of the faults that end an attempt, another fault is injected during the recovery. A fault of the
    loader processes gets three times the steps, since the ranks first use up the micro-batches that were read ahead.
    """
    choose = random.Random(seed)
    plan: list[Fault] = []
    step = first_step
    for kind in choose.sample([*kinds] * -(-count // len(kinds)), count):
        plan.append(Fault(kind, choose.randrange(2), step))
        step += 3 * spacing if kind in OF_LOADERS else spacing
        if choose.random() < 0.2 and kind not in PASSING:
            plan.append(Fault("kill", choose.randrange(2), RECOVERY))
    return plan
