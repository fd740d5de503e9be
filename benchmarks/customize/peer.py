"""One rank of a task of another framework, with the variables of torchrun."""

from __future__ import annotations

import importlib
import os
import traceback
from collections import defaultdict
from typing import Any

import torch

from benchmarks.customize.shared import WORLD


def run_rank(framework: str, task: str, rank: int, port: int, results: Any) -> None:
    """Puts into ``results`` what rank 0 has logged, name -> values; if a rank fails, its traceback."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "GROUP_RANK": 0}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "customize", "OMP_NUM_THREADS": 1}
    os.environ |= {name: str(value) for name, value in own.items()}
    torch.set_num_threads(1)
    logged: dict[str, list[float]] = defaultdict(list)

    def log(**values: float) -> None:
        for name, value in values.items():
            logged[name].append(value)

    try:
        module = importlib.import_module(f"benchmarks.customize.with_{framework}.{task}")
        module.main(_lightning_logger(log) if framework == "lightning" else log)
        if rank == 0:
            results.put(dict(logged))
    except Exception:
        results.put(traceback.format_exc())


def _lightning_logger(log: Any) -> Any:
    from lightning.pytorch.loggers import Logger

    class Recorder(Logger):
        """Keeps the values of each step in memory."""

        name, version = "recorder", "0"

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            """Does nothing."""

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            log(**{name: value for name, value in metrics.items() if name != "epoch"})

    return Recorder()
