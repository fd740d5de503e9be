"""Selects a checkpoint of a run for ``evaluate`` and ``generate``, and loads it in workers or as a job."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.bench.measuring import check_here, run_benchmark
from hpc_train.bench.request import WorkerRequest
from hpc_train.checkpoint.listing import NEWEST, choose_by_name, find_run
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.config.evaluation import LOWEST_LOSS, best_metric
from hpc_train.config.run_path import default_root
from hpc_train.config.schema import Config
from hpc_train.launch.command_job import follow, submit, without_submission
from hpc_train.launch.request import register_launcher
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.run.owner import TRUST, output_directory
from hpc_train.run.snapshot import check_copy


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the run, and the options that all such commands have."""
    parser.add_argument("run", metavar="RUN", help="a run directory, or its name")
    parser.add_argument(
        "--checkpoint",
        default=NEWEST,
        metavar="newest|best|STEP",
        help="best has the best checkpoint.keep_best, or val_loss without it (default: %(default)s)",
    )
    parser.add_argument(
        "--weights", metavar="HOOK", help="use the weights that this hook keeps, such as ema, instead of the model's"
    )
    parser.add_argument(
        "--code",
        choices=["run", "now"],
        default="run",
        help="import own modules from the frozen code of the run, or from the current directory (default: %(default)s)",
    )
    parser.add_argument(TRUST, action="store_true", help="use a run that belongs to another user")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--submit", action="store_true", help="run as a Slurm job on one node, with the run's cluster config"
    )
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help="additional sbatch options for that job")


@dataclass(frozen=True)
class UsedCheckpoint:
    """Holds the run and the checkpoint that a command line selects.

    Attributes:
        config: that of the run.
    """

    run: RunDirectory
    config: Config
    found: Checkpoint
    options: argparse.Namespace

    @classmethod
    def select(cls, options: argparse.Namespace, command: str) -> UsedCheckpoint:
        """Raises UserError if there is no such run or checkpoint. ``command`` is the command that is called."""
        register_launcher()
        run = find_run(options.run, Path(default_root()), command, options.trust_owner)
        config = load(run)
        metric = best_metric(config.checkpoint.keep_best, config.checkpoint.best_mode) or LOWEST_LOSS
        return cls(run, config, choose_by_name(run, options.checkpoint, metric), options)

    def submit(self, command: str, arguments: list[str]) -> int:
        """Runs ``command`` with ``arguments`` as a job, shows its output and returns its exit code."""
        words = [command, *without_submission(arguments)]
        extra = [*_gpus(self.config), *shlex.split(self.options.sbatch)]
        return follow(submit(words, self.config, output_directory(self.run.path) / "logs" / "slurm", extra))

    def run_workers(self, config: Config, request: WorkerRequest, entry: str) -> tuple[int, dict[str, Any] | None]:
        """Runs workers with the entry function ``entry``; returns the exit code, and the result with the checkpoint.

        Raises:
            UserError: ``config`` is invalid.
        """
        check_here(config)
        code = None
        if self.options.code == "run":
            check_copy(self.run)
            code = frozen_code(self.run)
        exit_code, result = run_benchmark(config, request, entry, code=code, trust_owner=self.options.trust_owner)
        if result is None:
            return exit_code, None
        return exit_code, {
            "run": str(self.run.path),
            "step": self.found.step,
            "checkpoint": str(self.found.path),
            **result,
        }


def _gpus(config: Config) -> list[str]:
    """Returns the sbatch options for the GPUs of a node; a job without GPUs uses the CPU."""
    gpus = config.cluster.gpus_per_node
    return [f"--gpus-per-node={gpus}"] if isinstance(gpus, int) and gpus > 0 else []
