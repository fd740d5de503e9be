"""``python -m hpc_train evaluate RUN`` computes the metrics of a checkpoint, on any data and under any layout."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from hpc_train.bench.measuring import run_benchmark
from hpc_train.checkpoint.listing import NEWEST, choose_by_name, find_run
from hpc_train.cluster.allocation import current_allocation, workers_per_node
from hpc_train.config.evaluation import BestMetric, best_metric
from hpc_train.config.run_path import default_root
from hpc_train.config.schema import Config
from hpc_train.evaluate.config import evaluation_config
from hpc_train.evaluate.request import EvaluationRequest
from hpc_train.launch.command_job import follow, submit, without_submission
from hpc_train.launch.launcher import register_launcher
from hpc_train.plan.validate import validate
from hpc_train.run.code import frozen_code
from hpc_train.run.freeze import load

LOWEST_LOSS = BestMetric("val_loss", highest=False)
ENTRY = "hpc_train.evaluate.worker:evaluate_checkpoint"
_EPILOG = """\
examples:
  python -m hpc_train evaluate mine
  python -m hpc_train evaluate mine --checkpoint best +strategy=dp
  python -m hpc_train evaluate mine data=tokens data.path=/data/other --json
  python -m hpc_train evaluate mine --submit --sbatch='--gpus-per-node=4 --time=0:30:00'
  srun --nodes=2 --ntasks-per-node=1 python -m hpc_train evaluate mine
"""


def main(arguments: list[str]) -> int:
    """Evaluates on this machine or the nodes of the Slurm step, prints the result and returns the exit code."""
    options, rest = _parser().parse_known_args(arguments)
    register_launcher()
    run = find_run(options.run, Path(default_root()), "verify")
    of_run = load(run)
    config = evaluation_config(of_run, rest)
    kept = of_run.checkpoint
    best = best_metric(kept.keep_best, kept.best_mode) or LOWEST_LOSS
    found = choose_by_name(run, options.checkpoint, best)
    if options.submit:
        words = ["evaluate", *without_submission(arguments)]
        return follow(submit(words, of_run, run.logs / "slurm", [*_gpus(of_run), *shlex.split(options.sbatch)]))
    nodes = current_allocation().nodes
    validate(config, nodes, workers_per_node(config.cluster)[1])
    request = EvaluationRequest(str(found.path), found.step)
    code = frozen_code(run) if options.code == "run" else None
    exit_code, result = run_benchmark(config, request, ENTRY, Path(config.run.root) if nodes > 1 else None, code=code)
    if result is not None:
        result = {"run": str(run.path), "step": found.step, "checkpoint": str(found.path), **result}
        print(json.dumps(result) if options.json else _report(result))
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train evaluate",
        usage="python -m hpc_train evaluate RUN [overrides] [--checkpoint newest|best|STEP] [--json]",
        description="Evaluates a checkpoint. Overrides change the data, the strategy, the batch and the precision of"
        " the run; the model is that of the run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or its name")
    parser.add_argument(
        "--checkpoint",
        default=NEWEST,
        metavar="newest|best|STEP",
        help="best has the best checkpoint.keep_best, or val_loss without it (default: %(default)s)",
    )
    parser.add_argument(
        "--code",
        choices=["run", "now"],
        default="run",
        help="import own modules from the frozen code of the run, or from the current directory (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--submit", action="store_true", help="run as a Slurm job on one node, with the run's cluster config"
    )
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help="additional sbatch options for that job")
    return parser


def _gpus(config: Config) -> list[str]:
    """Returns the sbatch options for the GPUs of a node; a job without GPUs evaluates on the CPU."""
    gpus = config.cluster.gpus_per_node
    return [f"--gpus-per-node={gpus}"] if isinstance(gpus, int) and gpus > 0 else []


def _report(result: dict[str, Any]) -> str:
    rows = {"checkpoint": f"step {result['step']} in {result['checkpoint']}", **_metrics(result["metrics"])}
    sizes = ", ".join(f"{count:,} samples of {name}" for name, count in result["samples"].items())
    rows["data"] = f"{result['data']}: {sizes}"
    rows["layout"] = f"{result['layout']} on {result['device']}, {result['precision']}"
    rows["time"] = f"{result['seconds']:.1f} s"
    return "\n".join(f"{name + ':':<14} {value}" for name, value in rows.items())


def _metrics(metrics: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.6g}" for name, value in metrics.items()}
