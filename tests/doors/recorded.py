"""Trains one small run for all tests of a session that only read a run: the first that asks for it trains it."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from hpc_train.run.directory import RunDirectory
from tests.doors.command import TEMPORARY, TINY, hpc_train

BASE = [*TINY, "cluster=local", "cluster.cpu_workers=2", "precision=fp64", "train.eval_every=2", "optim.lr=0.1"]


def recorded_run(path: Path) -> RunDirectory:
    """Copies a run of two attempts under dp to ``path``: of four steps, and then to step 6, with a checkpoint after
    every second step."""
    folder = Path(os.environ[TEMPORARY], "recorded")
    folder.mkdir(exist_ok=True)
    done = folder / "done"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _train(folder)
            done.touch()
    shutil.copytree(folder / "outputs" / "base", path, symlinks=True)
    return RunDirectory(path)


def _train(folder: Path) -> None:
    kept = ["checkpoint.every=2", "checkpoint.keep=9", "run.name=base"]
    for steps in (4, 6):
        done = hpc_train("+strategy=dp", *BASE, *kept, f"train.steps={steps}", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
