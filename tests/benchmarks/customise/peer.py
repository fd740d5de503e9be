"""One rank of a task of another framework; it prints what rank 0 has logged as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from typing import Any

import torch

LOGGED = "logged: "


def main(framework: str, task: str) -> None:
    torch.set_num_threads(1)
    logged: dict[str, list[float]] = defaultdict(list)

    def log(**values: float) -> None:
        for name, value in values.items():
            logged[name].append(value)

    module = importlib.import_module(f"tests.benchmarks.customise.with_{framework}.{task}")
    module.main(_lightning_logger(log) if framework == "lightning" else log)
    print(LOGGED + json.dumps(logged))


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


if __name__ == "__main__":
    main(*sys.argv[1:])
