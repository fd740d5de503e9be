"""Fine-tunes a language model of transformers on questions and answers, and exports it for transformers.

    python examples/fine_tuning.py MODEL [OVERRIDE...]

MODEL is a directory or a name on the hub, with its tokenizer. The loss is on the answers. On a login node the script
submits a job to Slurm; elsewhere the run is a process of this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hpc_train


def main(model: str, *overrides: str) -> None:
    records = [{"prompt": f"What is {a} plus {b}?", "completion": f" {a + b}"} for a in range(20) for b in range(20)]
    Path("sums.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run = hpc_train.submit([
        "+strategy=zero3", "run.name=sums",
        "model=hf", "model.task=causal_lm", f"model.name_or_path={model}",
        "data=sft", "data.path=sums.jsonl", f"data.tokenizer={model}", "data.packing=true",
        "optim.lr=2e-5", "train.epochs=3", *overrides,
    ])  # fmt: skip
    assert isinstance(run, hpc_train.Run)  # and not a sweep
    status = run.wait()
    if status.exit_code != 0:
        sys.exit(f"{status.state}: {status.message}")
    losses = run.columns("step", "loss")["loss"]
    print(f"loss of the answers: {losses[0]:.3f} -> {losses[-1]:.3f}")
    command = [sys.executable, "-m", "hpc_train", "checkpoint", "export", str(run.path), "--to", "sums-model"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
