"""``python -m hpc_train evaluate RUN`` computes the metrics of a checkpoint, on any data and under any layout."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hpc_train.commands.checkpoints.use_checkpoint import UsedCheckpoint, add_options
from hpc_train.machine.allocation import current_allocation
from hpc_train.tasks.evaluate import EvaluationRequest, evaluation_config

ENTRY = "hpc_train.tasks.evaluate:evaluate_checkpoint"
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
    used = UsedCheckpoint.select(options, "evaluate")
    config = evaluation_config(used.config, rest)
    if options.submit:
        return used.submit("evaluate", arguments)
    request = EvaluationRequest(str(used.found.path), used.found.step, options.weights)
    if current_allocation().node_rank == 0:
        print(f"evaluating the checkpoint of step {used.found.step}", file=sys.stderr, flush=True)
    exit_code, result = used.run_workers(config, request, ENTRY)
    if result is not None:
        print(json.dumps(result) if options.json else _report(result))
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train evaluate",
        usage="python -m hpc_train evaluate RUN [overrides] [--checkpoint newest|best|STEP] [--weights HOOK] [--json]",
        description="Evaluates a checkpoint. Overrides change the data, the strategy, the batch and the precision of"
        " the run; the model is that of the run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
    return parser


def _report(result: dict[str, Any]) -> str:
    rows = {"checkpoint": f"step {result['step']} in {result['checkpoint']}", **_metrics(result["metrics"])}
    sizes = ", ".join(f"{count:,} samples ({name})" for name, count in result["samples"].items())
    rows["data"] = f"{result['data']}: {sizes}"
    rows["layout"] = f"{result['layout']} on {result['device']}, {result['precision']}"
    rows["time"] = f"{result['seconds']:.1f} s"
    return "\n".join(f"{name + ':':<14} {value}" for name, value in rows.items())


def _metrics(metrics: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.6g}" for name, value in metrics.items()}
