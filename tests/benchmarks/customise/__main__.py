"""Lines of user code and losses of the same 20 steps: hpc_train, Lightning, Accelerate and plain DDP.

    python -m tests.benchmarks.customise [--tasks own_model,metric] [--frameworks hpc_train,torch]

Two workers over gloo on the CPU, in fp64. The last columns compare the loss of every step with that of one process in
plain torch. It prints a Markdown table; docs/customise.md has it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile

from tests.benchmarks.customise.lines import FRAMEWORKS, ROOT, TASKS, user_lines
from tests.benchmarks.customise.one_process import oracle
from tests.benchmarks.customise.peer import LOGGED
from tests.benchmarks.customise.shared import SAME, WORLD

LIMIT_S = 600
HEADER = (
    "| Task | With | Lines | First loss | Last loss | Largest difference | Macro F1 |\n|---|---|---|---|---|---|---|"
)
Logged = dict[str, list[float]]


def measure(framework: str, task: str) -> Logged:
    """Returns the losses of all steps and, for the metric, its value.

    Raises:
        RuntimeError: the training failed; the message has its output.
    """
    return _ours(task) if framework == "hpc_train" else _theirs(framework, task)


def _ours(task: str) -> Logged:
    with tempfile.TemporaryDirectory() as root:
        run = importlib.import_module(f"tests.benchmarks.customise.with_hpc_train.{task}").main(
            [*SAME, f"run.root={root}"]
        )
        if run.result is None:
            raise RuntimeError(run.status().message)
        logged = {"loss": [line["loss"] for line in run.metrics() if "loss" in line]}
        return logged | ({"f1": [run.result["val_f1"]]} if task == "metric" else {})


def _theirs(framework: str, task: str) -> Logged:
    """Starts the ranks with the variables of torchrun, which all three frameworks find."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    own |= {"TORCHELASTIC_RUN_ID": "customise", "OMP_NUM_THREADS": 1, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    command = [sys.executable, "-m", "tests.benchmarks.customise.peer", framework, task]
    ranks = []
    for rank in range(WORLD):
        variables = {name: str(value) for name, value in (own | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, **pipes))
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    found = [line for line in outputs[0].splitlines() if line.startswith(LOGGED)]
    if not found:
        raise RuntimeError("\n".join(outputs))
    logged: Logged = json.loads(found[0].removeprefix(LOGGED))
    return logged


def row(task: str, framework: str, logged: Logged, expected: Logged) -> str:
    losses = logged["loss"]
    pairs = zip(losses, expected["loss"], strict=True)
    difference = max(abs(found - right) for found, right in pairs)
    f1 = f"{logged['f1'][-1]:.6f}" if "f1" in logged else ""
    lines = user_lines(framework, task) if framework in FRAMEWORKS else ""
    return f"| {task} | {framework} | {lines} | {losses[0]:.10f} | {losses[-1]:.10f} | {difference:.1e} | {f1} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    options = parser.parse_args()
    packages = ("hpc_train", "lightning", "accelerate", "torchmetrics", "torch")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages) + "\n\n" + HEADER, flush=True)
    for task in options.tasks.split(","):
        expected = oracle(task)
        print(row(task, "one process", expected, expected), flush=True)
        for framework in options.frameworks.split(","):
            print(row(task, framework, measure(framework, task), expected), flush=True)


if __name__ == "__main__":
    main()
