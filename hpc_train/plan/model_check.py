"""Compares the description of a user's model family with the model itself, in a process of its own.

Only the model can show whether the stated numbers are right, and building it needs torch, which the process that
submits does not import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from hpc_train.config.extensions import location
from hpc_train.config.schema import Config
from hpc_train.errors import UserError

LIMIT_S = 180.0  # imports of torch from a busy network file system take up to a minute


def check_built_model(config: Config) -> None:
    """Builds the model on the meta device in another process and compares it with its description.

    Raises:
        UserError: they disagree, or the model cannot be built.
    """
    if importlib.util.find_spec("torch") is None:
        return  # a login node without torch; the workers find out
    problem = _problem(json.dumps({"model": asdict(config.model), "data": asdict(config.data)}, default=str))
    if problem:
        raise UserError(problem, where=location(config.model.kind), fix="make the description and the model agree")


@lru_cache(maxsize=64)
def _problem(configs: str) -> str:
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hpc_train.models.contract"],
            input=configs,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"building the model took longer than {LIMIT_S:g} s"
    if done.returncode == 0:
        return done.stdout.strip()
    return f"the model cannot be built:\n{done.stderr.strip()[-2000:]}"
