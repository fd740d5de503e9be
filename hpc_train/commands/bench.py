"""``python -m hpc_train bench NAME`` runs the benchmark ``hpc_train/bench/NAME.py`` on the workers of a run."""

from __future__ import annotations

import argparse

from hpc_train.commands import BENCHMARKS
from hpc_train.config.options import OptionParser
from hpc_train.registration import registered


def main(arguments: list[str]) -> int:
    parser = OptionParser(
        prog="python -m hpc_train bench",
        description="Runs a benchmark on the workers of a run. It takes the same overrides as training.",
        epilog="\n".join(f"bench {name:<12} {what}" for name, what in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=BENCHMARKS, help="the benchmark; `bench NAME --help` prints its options")
    what: str = parser.parse_args(arguments[:1]).what
    exit_code: int = registered(f"hpc_train.bench.{what}:main")(arguments[1:])
    return exit_code
