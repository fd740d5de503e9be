"""Our training step against Lightning Fabric, Accelerate, transformers' Trainer, torchtitan and a bare PyTorch loop.

    make bench-peers
    python -m benchmarks.peers [--cases single,dp2,…] [--precisions fp32,bf16] [--turns 20] [--steps 5]

The same initial weights, samples, global batch, optimizer, precision and number of threads. All contenders of a case
live in the same processes and take turns, so what slows the machine slows all of them. The table has for each contender

- the median of its tokens/s,
- the median ratio of our speed to its speed over the turns, with the bootstrap 95 % interval; above 1 we are faster,
- the milliseconds of processors that a step takes on all ranks, which other programs on the machine change least,
- the ratio of the speeds per second of processors,
- the functions of Python and of C that the first rank calls in a step, which nothing on the machine changes: the work
  of the host, before which a GPU may wait,
- the peak memory: by how much the resident set of its largest rank grew, measured in processes of its own,
- the number of its parameters, the loss of its first step, and by how much the losses of its first five steps differ
  from ours at most,

or why there is nothing. Trainer and torchtitan run whole: their own loops, data loading and, for torchtitan and
"Trainer, its Llama", their own model of the same architecture.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from benchmarks.peers.case import CASES, config_of, target_count
from benchmarks.peers.processes import BUILDERS, OURS, Found, Results, Work, run_case
from hpc_train.bench.request import paired_ratio

PACKAGES = ("torch", "lightning", "accelerate", "transformers", "torchtitan")
COLUMNS = (
    "case", "contender", "tokens/s", "ours / theirs", "CPU ms", "per CPU second", "calls", "peak MiB", "parameters",
    "first loss", "difference",
)  # fmt: skip
MEMORY_STEPS = 3


def rows(work: Work, found: Results, peaks: Results) -> list[str]:
    """Returns the lines of the table for one case, given what was found of speed and memory."""
    lines = []
    for name in work.names:
        one = found[name]
        cells = (
            [one, *[""] * (len(COLUMNS) - 3)] if isinstance(one, str) else _cells(work, one, found[OURS], peaks[name])
        )
        lines.append(f"| {work.case} {work.precision} | {name} | " + " | ".join(cells) + " |")
    return lines


def _cells(work: Work, one: Found, ours: Found | str, peak: Found | str) -> list[str]:
    assert isinstance(ours, Found), ours
    config, _ = config_of(CASES[work.case], work.precision, work.overrides)
    memory = peak.peak if isinstance(peak, Found) else None
    differences = [abs(a - b) for a, b in zip(one.losses, ours.losses, strict=False)]
    return [
        f"{target_count(config) / median(one.seconds):,.0f}",
        "1" if one is ours else _ratio(one.seconds, ours.seconds),
        f"{1000 * median(one.cpu_seconds):,.0f}",
        "1" if one is ours else _ratio(one.cpu_seconds, ours.cpu_seconds),
        "" if one.calls is None else f"{one.calls:,}",
        "" if memory is None else f"{memory / 2**20:.0f}",
        f"{one.parameters:,}",
        f"{one.losses[0]:.4f}" if one.losses else "",
        "" if one is ours or not differences else f"{max(differences):.0e}",
    ]


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Returns our speed over theirs, given the seconds."""
    ratio = paired_ratio(theirs, ours)
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def measure(work: Work) -> tuple[Results, Results]:
    """Returns the speed of all contenders, and the memory of each."""
    found = run_case(work)
    peaks: Results = {}
    for name, one in found.items():
        if isinstance(one, Found):
            peaks |= run_case(replace(work, names=(name,), steps=MEMORY_STEPS, turns=None))
    return found, peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="single,dp2", help=f"of {', '.join(CASES)}; default single,dp2")
    parser.add_argument("--precisions", default="fp32,bf16", help="default fp32,bf16")
    parser.add_argument("--contenders", default=";".join(BUILDERS), help="separated by semicolons; default all")
    parser.add_argument("--turns", type=int, default=20, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("overrides", nargs="*", help="of the config of all cases, e.g. model.n_layers=8")
    options = parser.parse_args()
    print(", ".join(f"{package} {_version(package)}" for package in PACKAGES))
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    names = (OURS, *(name for name in options.contenders.split(";") if name != OURS))
    for precision in options.precisions.split(","):
        for case in options.cases.split(","):
            work = Work(case, precision, names, options.steps, options.turns, tuple(options.overrides))
            print("\n".join(rows(work, *measure(work))), flush=True)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
