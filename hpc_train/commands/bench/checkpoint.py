"""``python -m hpc_train bench checkpoint``: saves and loads of a run's state, in ``run.root``, against plain DCP."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hpc_train.cluster.allocation import workers_per_node
from hpc_train.commands.bench.measuring import config_of, measured
from hpc_train.config.errors import ConfigError
from hpc_train.config.validate import validate
from hpc_train.measure.checkpoint_report import checkpoint_report
from hpc_train.measure.request import CheckpointRequest

ENTRY = "hpc_train.train.checkpoint_benchmark:measure"


def main(arguments: list[str]) -> int:
    """Measures on this node and prints; returns an exit code."""
    options, rest = _parser().parse_known_args(arguments)
    if options.pairs < 1:
        raise ConfigError("nothing to measure", where="--pairs", mend="1 or more")
    if options.against:
        raise ConfigError("checkpoints always go against plain DCP", where="--against", mend="no --against")
    config = config_of(rest)
    validate(config, 1, workers_per_node(config.cluster)[1])
    code, result = measured(config, CheckpointRequest(options.pairs), ENTRY, Path(config.run.root))
    if result is not None:
        print(json.dumps(result) if options.json else checkpoint_report(result))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train bench checkpoint",
        usage="python -m hpc_train bench checkpoint [overrides] [--pairs N] [--json]",
        description="Times saves and loads of the state in run.root, in turn with stock torch.distributed.checkpoint."
        " The overrides are those of a training.",
        epilog="example:\n  python -m hpc_train bench checkpoint +strategy=zero3 model=gpt_124m run.root=/scratch/me",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--against", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="saves of each kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
