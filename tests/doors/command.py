"""Runs ``python -m hpc_train`` as a user does, with a case that is small enough for a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hpc_train.config.run_path import SCRATCH
from tests import warm_parents
from tests.doors.schema import check_output
from tests.warm_parents import commands

TEMPORARY = "TESTS_TMPDIR"  # names the directory for temporary files of this test session
REPOSITORY = Path(__file__).parents[2]
TINY = [
    "model.dim=16",
    "model.ffn_dim=32",
    "model.n_heads=2",
    "model.n_kv_heads=2",
    "data=synthetic",
    "data.sequence_length=16",
    "data.validation_samples=8",
    "batch.global_size=8",
    "train.steps=6",
    "train.eval_every=0",
    "telemetry.log_every=1",
    "telemetry.wandb.mode=disabled",
    "cluster.preflight_action.slow_device=warn",  # a speed measured beside other tests is noise
    "optim.warmup_steps=0",
]
TINY_GPT = ["model.dim=16", "model.ffn_dim=32", "data.sequence_length=64"]  # overrides for the default task


def lines_of_pages(language: str) -> list[tuple[str, str]]:
    """Returns the page and the text of each line in the ``language`` blocks of README.md and docs/, in order."""
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    found = []
    for page in pages:
        blocks = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
        found += [(page.relative_to(REPOSITORY).as_posix(), line) for line in lines if line.strip()]
    return found


def environment(**extra: str) -> dict[str, str]:
    """Returns the environment of a fresh shell, without Slurm variables, a W&B account or a GPU.

    Local runs wait for free cores in a directory below TMPDIR: with one for this session, they do not wait for others.
    """
    keep = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB_", "SLURM_", "HPC_TRAIN_")) and name not in SCRATCH
    }
    own = {
        "PYTHONPATH": str(REPOSITORY),
        "COLUMNS": "160",
        "CUDA_VISIBLE_DEVICES": "",
        "HPC_TRAIN_STRICT_EVENTS": "1",  # an event that is not as the table of events says raises an error
    }
    if TEMPORARY in os.environ:
        own["TMPDIR"] = os.environ[TEMPORARY]
    return warm_parents.with_server(keep | own | extra)


def hpc_train(
    *arguments: str, cwd: Path, timeout: float = 300, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs one command and waits for it."""
    env = env or environment()
    done = commands.run(arguments, cwd, env, timeout) or subprocess.run(
        [sys.executable, "-m", "hpc_train", *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if "--json" in arguments:
        check_output(arguments, done.stdout)
    return done


def start(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts a command and does not wait for it; the command leads its own process group, as in a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "hpc_train", *arguments],
        cwd=cwd,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
