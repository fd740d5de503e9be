"""The loss of the default task with each compression and with local steps against dense gradients, as CSV and a plot.

    make bench-compression
    python -m benchmarks.compression_convergence [--out FOLDER] [--steps N] [--runs none,topk,…] [OVERRIDE ...]

The plot needs the extra ``plots``. Runs lie in FOLDER by name, so that one that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpc_train.run.directory import RunDirectory

RUNS: dict[str, tuple[str, ...]] = {
    "none": (),
    "fp16": (),
    "bf16": (),
    "powersgd": (),
    "topk": (),
    "zero2-bf16": ("strategy.data_parallel=zero2", "strategy.compression=bf16"),
    "local": ("strategy.local_steps=20", "strategy.shard=1"),
}


def train(name: str, out: Path, steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    """One run; its lines of metrics."""
    own = RUNS[name] or (f"strategy.compression={name}",)
    common = ["cluster=local", "cluster.cpu_workers=2", f"train.steps={steps}", "telemetry.wandb.mode=disabled"]
    place = [f"run.root={out}", f"run.name={name}", "run.snapshot=false"]
    call = [sys.executable, "-m", "hpc_train", "+strategy=dp", *common, *place, *own, *overrides]
    subprocess.run(call, check=True, stdout=subprocess.DEVNULL)
    return RunDirectory(out / name).read_metrics()


def write(found: dict[str, list[dict[str, Any]]], out: Path) -> None:
    with (out / "compression_convergence.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["technique", "step", "loss", "val_loss"])
        for name, lines in found.items():
            writer.writerows([name, line["step"], line["loss"], line.get("val_loss")] for line in lines)


def plot(found: dict[str, list[dict[str, Any]]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, lines in found.items():
        style: dict[str, Any] = {"color": "black", "linewidth": 2} if name == "none" else {}
        pyplot.plot([line["step"] for line in lines], [line["loss"] for line in lines], label=name, **style)
    pyplot.xlabel("step")
    pyplot.ylabel("training loss")
    pyplot.legend(title="compression")
    pyplot.savefig(out / "compression_convergence.png", dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("compression_convergence"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", default=",".join(RUNS))
    given, overrides = parser.parse_known_args(argv)
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    found = {name: train(name, out, given.steps, overrides) for name in given.runs.split(",")}
    write(found, out)
    for name, lines in found.items():
        last = lines[-1]
        print(f"{name:12s} step {last['step']}: loss {last['loss']:.4f}, val_loss {last['val_loss']:.4f}")
    plot(found, out)
    print(out / "compression_convergence.png")


if __name__ == "__main__":
    main()
