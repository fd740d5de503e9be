"""What each saver of memory costs in speed: ``bench step`` of one experiment, with one thing switched at a time.

    python -m tests.benchmarks.savers [--experiment gpt1b_h200] [--pairs 20] [--steps 10] [overrides]

The first row is the experiment as it stands, in turn with a bare PyTorch loop on the same device. A row that cannot be
measured (out of memory, a library that is not installed) says so, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

AS_IT_STANDS = "as it stands"
ROWS: dict[str, tuple[str, ...]] = {
    AS_IT_STANDS: (),
    "not compiled": ("train.compile=false",),
    "logits whole": ("train.loss_chunks=1",),
    "checkpointing: ops": ("train.activation_checkpointing=ops",),
    "checkpointing: every third layer": ("train.activation_checkpointing=selective:3",),
    "checkpointing: full": ("train.activation_checkpointing=full",),
    "half the micro-batch": ("batch.micro_size=4",),
    "moments in bf16": ("optim.moments=bf16",),
    "moments in 8 bits": ("optim.moments=8bit",),
    "optimizer on the host": ("strategy.offload=optimizer",),
}


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--experiment", default="gpt1b_h200")
    parser.add_argument("--pairs", default="20")
    parser.add_argument("--steps", default="10")
    options, overrides = parser.parse_known_args()
    first: float | None = None
    print(f"{'':34}{'tokens/s':>10} {'of first':>9} {'MFU':>7} {'GiB':>7}")
    for name, switched in ROWS.items():
        arguments = [f"+experiment={options.experiment}", *overrides, *switched]
        arguments += ["--pairs", options.pairs, "--steps", options.steps, "--json"]
        result = measured([*arguments, *(["--against", "raw"] if name == AS_IT_STANDS else [])])
        if isinstance(result, str):
            print(f"{name:34}{result}", flush=True)
            continue
        first = first or speed(result)
        print(row(name, result, first), flush=True)
        if result["against"]:
            print(f"{'  the bare loop':34}{speed(result['against']):10,.0f} {1 / result['against']['ratio']:9.3f}")


def measured(arguments: list[str]) -> dict[str, Any] | str:
    """The result of ``bench step``, or the last line of what went wrong."""
    command = [sys.executable, "-m", "hpc_train", "bench", "step", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    return next(reversed((done.stdout + done.stderr).strip().splitlines()), "failed")


def speed(rates: dict[str, Any]) -> float:
    return float(rates["tokens_per_s"]["median"])


def row(name: str, result: dict[str, Any], first: float) -> str:
    memory, mfu = result["memory"], result["mfu"]
    peak = max(memory["device_peak_bytes"] or memory["host_peak_bytes"])
    share = f"{100 * mfu['value']:.1f} %" if mfu else "n/a"
    return f"{name:34}{speed(result):10,.0f} {speed(result) / first:9.3f} {share:>7} {peak / 2**30:7.2f}"


if __name__ == "__main__":
    main()
