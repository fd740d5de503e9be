"""Freezes runs of custom code, and starts their agents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hpc_train.config.compose import typed
from hpc_train.layout.validate import validate
from hpc_train.run.code import FrozenCode
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from tests import warm_parents
from tests.config.composing import compose

LOCAL = [
    "+strategy=dp",
    "cluster=local",
    "cluster.gpus_per_node=0",
    "cluster.cpu_workers=2",
    "train.threads=1",
    "telemetry.log_every=1",
    "telemetry.wandb.mode=disabled",
]


def frozen(path: Path, *overrides: str, code: FrozenCode | None = None) -> RunDirectory:
    """Checks and freezes a run, as the command line does; another freeze of it changes free keys."""
    config = typed(compose([*LOCAL, f"run.root={path.parent}", f"run.name={path.name}", *overrides]))
    validate(config, 1, 2)
    run = RunDirectory(path)
    freeze(config, run, code=code)
    return run


def run_agent(run: RunDirectory, **environment: str) -> tuple[int, str]:
    """Runs an agent to its end; returns its exit code and what it wrote to standard error."""
    script = (
        "import sys; from pathlib import Path\n"
        "from hpc_train.elastic.agent import run_agent\n"
        "from hpc_train.run.directory import RunDirectory\n"
        f"code = run_agent(RunDirectory(Path({str(run.path)!r})))\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=warm_parents.with_server(os.environ) | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        start_new_session=True,
    )
    return done.returncode, done.stderr


def failures(run: RunDirectory) -> list[tuple[str, int]]:
    """Returns the class and the rank of each failure in the event log, in order."""
    return [(each["class"], each["rank"]) for each in run.read_events() if each["event"] == "worker_failed"]
