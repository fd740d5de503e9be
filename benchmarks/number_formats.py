"""The loss of the default task with each number format against fp32, and what another seed changes for comparison.

    python -m benchmarks.number_formats [--out FOLDER] [--steps N] [--runs "fp32;bf16"] [OVERRIDE ...]

Each run trains the same weights on the same samples in one process, but for those with another seed. Runs lie in FOLDER
by name, so that one that was interrupted goes on. Without a GPU fp8 is emulated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from hpc_train.run.directory import RunDirectory

RUNS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "fp32, seed 1": ("train.seed=1",),
    "fp32, seed 2": ("train.seed=2",),
    "bf16": ("precision=bf16",),
    "fp8 tensorwise": ("precision=fp8",),
    "fp8 rowwise": ("precision=fp8", "precision.fp8=rowwise"),
    "mxfp8": ("precision=fp8", "precision.fp8=mxfp8"),
    "bf16 weights": ("precision=bf16", "precision.weights=bf16"),
    "bf16, 4 micro-batches": ("precision=bf16", "batch.micro_batches=4"),
    "bf16 weights, 4 micro-batches": ("precision=bf16", "precision.weights=bf16", "batch.micro_batches=4"),
}
WINDOW = 25  # steps over which losses are averaged


def train(name: str, out: Path, steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    """One run; its lines of metrics."""
    folder = name.replace(", ", "-").replace(" ", "-")
    common = ["cluster=local", f"train.steps={steps}", "telemetry.wandb.mode=disabled", "telemetry.log_every=1"]
    place = [f"run.root={out}", f"run.name={folder}", "run.snapshot=false"]
    call = [sys.executable, "-m", "hpc_train", "+strategy=single", *common, *place, *RUNS[name], *overrides]
    subprocess.run(call, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return RunDirectory(out / folder).read_metrics()


def means(lines: list[dict[str, Any]]) -> list[float]:
    """Returns the mean loss of each window of steps."""
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    return [fmean(losses[first : first + WINDOW]) for first in range(0, len(losses), WINDOW)]


def row(name: str, lines: list[dict[str, Any]], reference: list[dict[str, Any]]) -> str:
    """Returns the last mean, the validation loss, their differences from fp32, and the largest on the way."""
    own, wanted = means(lines), means(reference)
    largest = max(abs(one - other) for one, other in zip(own, wanted, strict=True))
    validation = [next(line["val_loss"] for line in reversed(of) if "val_loss" in line) for of in (lines, reference)]
    return (
        f"{name:28} {own[-1]:8.4f} {own[-1] - wanted[-1]:+8.4f} {validation[0]:8.4f} "
        f"{validation[0] - validation[1]:+8.4f} {largest:8.4f}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("number_formats"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--runs", type=lambda text: text.split(";"), default=[*RUNS], help="names, with ; between them")
    given, overrides = parser.parse_known_args(argv)
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    reference = train("fp32", out, given.steps, overrides)
    print(f"{'':28} {'loss':>8} {'':8} {'val':>8} {'':8} {'largest':>8}")
    for name in given.runs:
        print(row(name, train(name, out, given.steps, overrides), reference), flush=True)


if __name__ == "__main__":
    main()
