"""Which fault comes when. A plan travels in an environment variable that only ``tests.faults.entry`` reads."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "HPC_TRAIN_TEST_FAULTS"
RECOVERY = -1  # instead of a step: while the next attempt starts


@dataclass(frozen=True)
class Kind:
    """What a fault leads to.

    Attributes:
        failure: the class that the event log is to name; None where nothing fails.
        end: the exit code of the agent, which is then started again; None where the run goes on by itself.
        names_rank: whether the event log is to name the rank that was struck.
        bad_batches: so many batches of the data are bad from the step on; the run is to pass over them.
    """

    failure: str | None = None
    end: int | None = None
    names_rank: bool = True
    bad_batches: int = 0


CRASHES = {
    **dict.fromkeys(("kill", "segfault", "abort", "bus", "loader"), Kind("killed")),
    "exit": Kind("exited"),
    "store": Kind("communication", names_rank=False),
    "warm_parent": Kind("killed", names_rank=False),  # strikes all ranks of the node at once
}
HANGS = dict.fromkeys(("stop", "gil", "storage", "collective", "storage_in_save"), Kind("hang"))
ENDS = {
    "memory": Kind("out_of_memory", end=1),
    "agent": Kind(end=-9),
    "request": Kind(end=75),  # somebody asks the run to stop
    "grace": Kind("killed", end=1, names_rank=False),  # and the save takes longer than it may
}
PASSING = {"disk": Kind(), "nan": Kind(bad_batches=1), "spike": Kind(bad_batches=3)}
# These need a surrounding that only root can make (tests/faults/surroundings.py).
IN_SURROUNDINGS = {
    "memory_limit": Kind("out_of_memory", end=1),
    "shared_memory": Kind("disk_full", end=1, names_rank=False),  # all ranks share it
}
# Not drawn: errors of GPUs, in the words of torch.
GPU_ERRORS = {"device": Kind("device_error"), "kernel": Kind("kernel_error")}
# Not drawn: a rank that is slow in every step, one that stands still in one of them until two nodes have told it, and
# the whole node asleep until somebody wakes it.
SPECIAL = {"slow": Kind(), "pause": Kind(), "asleep": Kind()}
KINDS = CRASHES | HANGS | ENDS | PASSING | IN_SURROUNDINGS | GPU_ERRORS | SPECIAL


@dataclass(frozen=True)
class Fault:
    """``kind`` strikes ``rank`` in training step ``step`` (the first time that it comes there), or in a recovery."""

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
    """The file that says that fault ``number`` has struck; its content is the time."""
    return Path(run_dir) / f"fault-{number:03d}"


def bad_windows(plan: Sequence[Fault]) -> list[tuple[int, int]]:
    """The bad batches of each fault as [first, last) positions in the data; those before it are passed over by then."""
    found: list[tuple[int, int]] = []
    for fault in plan:
        first = fault.step + sum(last - first for first, last in found)
        if fault.leads_to.bad_batches:
            found.append((first, first + fault.leads_to.bad_batches))
    return found


def draw(seed: int, count: int, kinds: Sequence[str], first_step: int, spacing: int) -> list[Fault]:
    """``count`` faults, one every ``spacing`` steps, no kind much more often than another; after a fifth of those that
    end an attempt another one strikes during the recovery."""
    choose = random.Random(seed)
    plan: list[Fault] = []
    for place, kind in enumerate(choose.sample([*kinds] * -(-count // len(kinds)), count)):
        plan.append(Fault(kind, choose.randrange(2), first_step + spacing * place))
        if choose.random() < 0.2 and kind not in PASSING:
            plan.append(Fault("kill", choose.randrange(2), RECOVERY))
    return plan
