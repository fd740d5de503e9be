"""One process per node is the rule: it starts a worker per GPU itself. Who starts one per GPU is told so, once."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_train.config.errors import ConfigError
from hpc_train.run.exits import Exit

SILENCE_S = 1.0  # the first task is to have spoken before srun ends it for the failure of another


@dataclass(frozen=True)
class Misplaced:
    """What is wrong, and whether this process is the one to say so."""

    error: ConfigError
    first: bool


def misplaced(environment: Mapping[str, str] = os.environ) -> Misplaced | None:
    """Whether this process is one of several of its node, started by srun or by torchrun."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if tasks > nodes:
        error = ConfigError(
            f"this step has {tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}, and hpc_train starts the workers "
            "of a node itself",
            where="srun, --ntasks",
            mend=f"one task per node: srun --ntasks={nodes} --ntasks-per-node=1",
        )
        return Misplaced(error, environment.get("SLURM_PROCID", "0") == "0")
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= set(environment):
        error = ConfigError(
            "torchrun or the like has started this process as one rank, and hpc_train starts its ranks itself",
            where="RANK, LOCAL_RANK and WORLD_SIZE in the environment",
            mend="python -m hpc_train … without torchrun; on several nodes through sbatch or -m. Where these variables "
            "are left from something else: unset RANK LOCAL_RANK WORLD_SIZE TORCHELASTIC_RUN_ID",
        )
        return Misplaced(error, environment.get("RANK", "0") == "0")
    return None


def refuse_misplaced(environment: Mapping[str, str] = os.environ) -> None:
    """Ends this process where it is one of several of its node; one of them says why.

    Raises:
        ConfigError: in the first of them.
        SystemExit: in the others.
    """
    found = misplaced(environment)
    if found is not None:
        _refuse(found)


def refuse_several_nodes(environment: Mapping[str, str] = os.environ) -> None:
    """The same where a step of several nodes was given a config: it is composed once, and not by each of them.

    Raises:
        ConfigError: in the first of them.
        SystemExit: in the others.
    """
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if nodes > 1:
        error = ConfigError(
            f"each of the {nodes} nodes of this step would compose a run of its own",
            where="srun",
            mend='RUN=$(python -m hpc_train freeze OVERRIDES) and then srun python -m hpc_train agent "$RUN"',
        )
        _refuse(Misplaced(error, environment.get("SLURM_PROCID", "0") == "0"))


def _refuse(found: Misplaced) -> None:
    if found.first:
        raise found.error
    time.sleep(SILENCE_S)
    raise SystemExit(Exit.REFUSED)
