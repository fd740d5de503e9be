"""``python -m hpc_train requeue RUN_DIR STATUS``: what a batch script ends with, where it is not one of ours.

Asks Slurm to run the job again if its agents were stopped by the time limit or a preemption, and exits with the code of
the run. ``STATUS`` is the exit code of ``srun``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from hpc_train.config.errors import ConfigError
from hpc_train.launch.requeue import script_lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train requeue", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="the run directory of the agents")
    parser.add_argument("status", type=int, help="the exit code of the srun that started them")
    options = parser.parse_args(arguments)
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("this is not a Slurm job", where="SLURM_JOB_ID", mend="call it at the end of a batch script")
    settings = {"RUN": str(options.run_dir.absolute()), "status": str(options.status), "cancelled": ""}
    return subprocess.run(["bash", "-c", "\n".join(script_lines())], env=os.environ | settings, check=False).returncode
