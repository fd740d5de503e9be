"""What a job must not hand down to the jobs that are submitted from inside it."""

from __future__ import annotations

import os
from collections.abc import Mapping

KEPT = ("SLURM_CONF",)  # says which cluster this is, not which job


def without_inherited(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The head of a command that runs without the surrounding job's variables; empty outside of a job.

    Inside of one, ``SLURM_CPUS_PER_TASK`` and its like would reach the new job's steps and contradict what it asked
    for.
    """
    if "SLURM_JOB_ID" not in environment:
        return []
    names = sorted(name for name in environment if name.startswith(("SLURM_", "SBATCH_", "SRUN_")) and name not in KEPT)
    return ["env", *(part for name in names for part in ("-u", name))]
