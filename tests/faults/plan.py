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

# Each kind with the class that the event log is to name. After these the run goes on by itself.
CRASHES = {"kill": "killed", "segfault": "killed", "abort": "killed", "bus": "killed", "exit": "exited",
           "store": "communication", "loader": "killed", "warm_parent": "killed"}  # fmt: skip
HANGS = {"stop": "hang", "gil": "hang", "storage": "hang", "collective": "hang"}
CLASSES = CRASHES | HANGS
NO_RANK = ("warm_parent",)  # strikes all ranks of the node at once


@dataclass(frozen=True)
class Fault:
    """``kind`` strikes ``rank`` in training step ``step`` (the first time that it comes there), or in a recovery."""

    kind: str
    rank: int
    step: int

    @property
    def failure(self) -> str:
        return CLASSES[self.kind]


def variables(plan: Sequence[Fault]) -> dict[str, str]:
    return {VARIABLE: json.dumps([asdict(fault) for fault in plan])}


def read_plan() -> list[Fault]:
    return [Fault(**fault) for fault in json.loads(os.environ.get(VARIABLE, "[]"))]


def happened(run_dir: str | Path, number: int) -> Path:
    """The file that says that fault ``number`` has struck; its content is the time."""
    return Path(run_dir) / f"fault-{number:03d}"


def draw(seed: int, count: int, kinds: Sequence[str], first_step: int, spacing: int) -> list[Fault]:
    """``count`` faults, one every ``spacing`` steps; a fifth of the crashes strikes again during the recovery."""
    choose = random.Random(seed)
    plan: list[Fault] = []
    while len(plan) < count:
        step = first_step + spacing * len(plan)
        plan.append(Fault(choose.choice(kinds), choose.randrange(2), step))
        if len(plan) < count and choose.random() < 0.2:
            plan.append(Fault("kill", choose.randrange(2), RECOVERY))
    return plan
