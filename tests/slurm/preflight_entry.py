"""A worker whose node differs from the others in what a preflight looks at; the product knows nothing of it.

It says another hash of the config and another torch on n3, and its clock is five seconds ahead there. Each rank says
that it has a GPU, and that of n1 is slow.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from hpc_train.elastic.agent import AgentOptions, run_agent
from hpc_train.machine.allocation import current_allocation
from hpc_train.preflight import measure as measuring
from hpc_train.preflight import run
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.requests import StopFlag
from hpc_train.train import worker

AHEAD_S = 5.0


def train(spec: WorkerSpec, stop: StopFlag) -> Exit:
    node, plain, own = current_allocation().node_name, run.versions, run.rank_facts
    run.rank_facts = lambda *facts: replace(own(*facts), gpu=f"GPU-of-{node}")
    measuring.measured_gemm_flops = lambda *wanted: 5e14 if node == "n1" else 7e14
    if node == "n3":
        run.config_hash = lambda run: "another"
        run.versions = lambda cuda: plain(cuda) | {"torch": "1.0"}
        run.clock = lambda: time.time() + AHEAD_S
    return worker.train(spec, stop)


if __name__ == "__main__":
    sys.exit(run_agent(RunDirectory(Path(sys.argv[1])), AgentOptions("tests.slurm.preflight_entry:train")))
