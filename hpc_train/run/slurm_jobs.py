"""What Slurm says of one job, in one call."""

from __future__ import annotations

import subprocess

ENDED = "ENDED"  # Slurm answers and has forgotten it


def job_state(job_id: str) -> str | None:
    """The state by Slurm's name, ``ENDED``, or None where Slurm does not answer."""
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode != 0:
        return ENDED if "Invalid job id" in asked.stderr else None
    return asked.stdout.split()[0] if asked.stdout.split() else ENDED
