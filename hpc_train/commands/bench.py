"""``python -m hpc_train bench WHAT``: measures on workers as a run has them. Each module of BENCHMARKS is one."""

from __future__ import annotations

import argparse
import importlib

BENCHMARKS = {
    "step": "training steps, also against a bare PyTorch loop",
    "batch": "micro-batch sizes until memory or time is used up, and the gradient noise scale",
    "scaling": "strong and weak scaling over nodes or workers, for a proposal",
    "checkpoint": "saves and loads, against plain DCP",
    "collectives": "what the ranks send each other, by operation and size",
}


def main(arguments: list[str]) -> int:
    """Measures and prints; returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train bench",
        description="Measures on workers as a run has them. The overrides are those of a training.",
        epilog="\n".join(f"bench {name:<12} {what}" for name, what in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=BENCHMARKS, help="what to measure; bench WHAT --help says more")
    what: str = parser.parse_args(arguments[:1]).what
    exit_code: int = importlib.import_module(f"hpc_train.bench.{what}").main(arguments[1:])
    return exit_code
