"""Tries a user's model, optimizer and schedule in another process, where torch is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

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
        return  # the workers check the model if the login node has no torch
    given = json.dumps({"model": asdict(config.model), "data": asdict(config.data)}, default=str)
    problem = _answer("hpc_train.models.contract", given, "the model cannot be built")
    if problem:
        raise UserError(problem, where=location(config.model.kind), fix="make the description and the model agree")


def check_tried_optimizer(config: Config) -> None:
    """Tries the user's optimizer and schedule on small parameters in another process.

    A worker builds them itself, and what is installed in a container is not known here.

    Raises:
        UserError: they cannot be imported or called, or their state cannot be saved.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    is_worker = distributed is not None and distributed.is_initialized()
    if is_worker or config.cluster.container.image is not None or importlib.util.find_spec("torch") is None:
        return
    # without lr, so that the jobs of a sweep over it share a trial
    tried = ("name", "_target_", "args", "elementwise", "groups", "schedule")
    optim = {key: value for key, value in asdict(config.optim).items() if key in tried}
    given = {"model": asdict(config.model), "optim": optim, "steps": config.train.steps or 1}
    failed = "the optimizer cannot be tried"
    answer = _answer("hpc_train.train.optimizers.probe", json.dumps(given, default=str), failed)
    try:
        mistake = json.loads(answer.splitlines()[-1])  # after what the user's code prints
    except (ValueError, IndexError):
        mistake = {"what": answer or failed, "where": "optim", "fix": "correct the code that optim names"}
    if mistake:
        raise UserError(mistake["what"], where=mistake["where"], fix=mistake["fix"])


@lru_cache(maxsize=64)
def _answer(module: str, configs: str, failed: str) -> str:
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=configs,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{failed}: it took longer than {LIMIT_S:g} s"
    if done.returncode == 0:
        return done.stdout.strip()
    return f"{failed}:\n{done.stderr.strip()[-2000:]}"
