"""Stands in for the agent on nodes whose GPUs have no driver: prints how many GPUs and ranks the agent would use.

What the driver would list is in a directory per node, which ``GPU_PROBE`` names; the device files are those of the
devcluster, so that the control group of the job decides which GPUs the process may open.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpc_train.machine.allocation import current_allocation
from hpc_train.machine.gpus import Machine, UnusableGpus, gpus_to_use

NODES = {"n5": 4, "n6": 4, "n7": 2}  # GPUs, as declared by the devcluster


def list_gpus(folder: Path) -> None:
    """Writes what the driver of each node would list."""
    for node, count in NODES.items():
        for number in range(count):
            gpu = folder / node / f"0000:0{number}:00.0"
            gpu.mkdir(parents=True)
            (gpu / "information").write_text(f"Device Minor: \t {number}\n")


def main() -> int:
    allocation = current_allocation()
    driver = Path(os.environ["GPU_PROBE"]) / allocation.node_name
    devices = Path(os.environ["SLURM_CONF"]).parents[1] / "dev"
    nothing = driver / "nothing"
    machine = Machine(driver, devices if driver.exists() else nothing, nothing)
    try:
        gpus = gpus_to_use("auto", machine=machine)
    except UnusableGpus as error:
        os.write(1, f"agent on {allocation.node_name}: {error}\n".encode())  # whole lines, also beside other tasks
        return 2
    os.write(1, f"agent on {allocation.node_name}: {gpus} GPUs\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
