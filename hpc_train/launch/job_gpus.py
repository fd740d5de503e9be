"""The GPUs of the Slurm job that this process or script is part of, and how its steps get them.

A step inherits the GPUs that its job asks for, but none of those that ``--exclusive`` alone brings: the job has them,
and a plain ``srun`` in it has none. There, a step gets GPUs by ``--gpus-per-node``, or ``SLURM_GPUS_PER_NODE``, which
srun reads.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from hpc_train.cluster.site import gpus_of

PATIENCE_S = 20.0  # a controller under load

# Bash, because a batch script stands outside of containers and may have no Python. Of the tasks of an array,
# `scontrol show job` prints only the one that is named by both of its numbers.
EXPORT = r"""
# A step inherits the GPUs that its job asks for, but none of those that --exclusive alone brings. For these, srun is
# told to take as many on each node as every node of the job has.
if [ -z "${SLURM_GPUS:-}${SLURM_GPUS_PER_NODE:-}${SLURM_GPUS_PER_TASK:-}" ]; then
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
  job=$(scontrol show job --details "$job" 2> /dev/null) || true
  if ! grep -q 'TresPer[A-Za-z]*=[^ ]*gpu' <<< "$job"; then
    gpus=$(sed -n 's/(IDX:[^)]*)//g; s/^ *Nodes=.* GRES=//p' <<< "$job" | awk -F, '
      { n = 0; for (i = 1; i <= NF; i++) if ($i ~ /^gpu:/) { parts = split($i, part, ":"); n += part[parts] } }
      NR == 1 || n < fewest { fewest = n }
      END { if (NR) print fewest }')
    # where scontrol does not tell: as many as the batch host has
    gpus=${gpus:-${SLURM_GPUS_ON_NODE:-$(awk -F, '{ print NF }' <<< "${SLURM_JOB_GPUS:-}")}}
    if [ "$gpus" -gt 0 ]; then export SLURM_GPUS_PER_NODE=$gpus; fi
  fi
fi
""".strip()


@dataclass(frozen=True)
class JobGpus:
    """The GPUs that a step of the job gets on each node.

    Attributes:
        per_node: the same on all nodes: as many as the node with the fewest has, or as the job asks for. 0 where the
            job has none, or Slurm does not say.
        inherited: the job asks for them, and so its steps have them without asking.
    """

    per_node: int
    inherited: bool

    def srun_options(self, wanted: int) -> list[str]:
        """What makes a step have ``wanted`` GPUs on each node, of those of the job."""
        return [] if self.inherited or not self.per_node or not wanted else [f"--gpus-per-node={wanted}"]


def export_lines() -> list[str]:
    """Bash lines after which every ``srun`` of a batch script has the GPUs of its job."""
    return EXPORT.splitlines()


def gpus_of_this_job(environment: Mapping[str, str] = os.environ) -> JobGpus:
    """Of the job in ``environment``. The shell of ``salloc`` may run where the job has no node: Slurm is asked."""
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"):  # one task per node
        if name in environment:
            return JobGpus(_count(environment[name]), True)
    shown = _show_job(_job_id(environment), environment.get("PATH"))
    asked = re.findall(r"\bTresPer[A-Za-z]*=(\S*gpu\S*)", shown)
    per_node = re.search(r"\bTresPer(?:Node|Task)=(\S*gpu\S*)", shown)
    inherited = bool(asked) or "SLURM_GPUS" in environment
    if per_node is not None:
        return JobGpus(_count(per_node[1]), inherited)
    nodes = [sum(gpus_of(gres).values()) for gres in re.findall(r"^ *Nodes=.* GRES=(\S*)", shown, flags=re.MULTILINE)]
    return JobGpus(min(nodes) if nodes else _on_batch_host(environment), inherited)


def _on_batch_host(environment: Mapping[str, str]) -> int:
    count = environment.get("SLURM_GPUS_ON_NODE")
    return int(count) if count else len([name for name in environment.get("SLURM_JOB_GPUS", "").split(",") if name])


def _job_id(environment: Mapping[str, str]) -> str:
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


@cache
def _show_job(job_id: str, path: str | None) -> str:
    """What the controller says of a job, asked once per process and ``path``, where scontrol is; "" without one."""
    command = ["scontrol", "show", "job", "--details", job_id]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _count(asked: str) -> int:
    """GPUs in ``4``, ``a100:4``, ``gres:gpu:a100:4``, ``gres/gpu:4,gres/nvme:1``, ``cpu=1,gres/gpu=4``."""
    parts = asked.split(",")
    counts = [re.split("[:=]", part)[-1] for part in parts if "gpu" in part or "gpu" not in asked]
    return sum(int(count) if count.isdigit() else 1 for count in counts)
