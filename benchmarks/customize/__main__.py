"""Lines of user code and losses of the same 20 steps: hpc_train, Lightning, Accelerate and plain DDP.

    python -m benchmarks.customize [--tasks own_model,metric] [--frameworks hpc_train,torch]

Two workers over gloo on the CPU, in fp64. The last columns compare the loss of every step with that of one process in
plain torch. It prints a Markdown table; docs/customize.md has it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import multiprocessing
import socket
import tempfile
from pathlib import Path

from benchmarks.customize.lines import FRAMEWORKS, TASKS, user_lines
from benchmarks.customize.one_process import oracle
from benchmarks.customize.peer import run_rank
from benchmarks.customize.shared import SAME, WORLD, save_tiny_llama

LIMIT_S = 600
PRELOADED = [  # imported once
    "lightning",
    "accelerate",
    "torchmetrics",
    "transformers",
    "benchmarks.customize.shared",
]
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
        run = importlib.import_module(f"benchmarks.customize.with_hpc_train.{task}").main([*SAME, f"run.root={root}"])
        if run.result is None:
            raise RuntimeError(run.status().message)
        logged = {"loss": [line["loss"] for line in run.metrics() if "loss" in line]}
        return logged | ({"f1": [run.result["val_f1"]]} if task == "metric" else {})


def _theirs(framework: str, task: str) -> Logged:
    """Starts the ranks with the variables of torchrun, which all three frameworks find."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results = context.Queue()
    ranks = [context.Process(target=run_rank, args=(framework, task, rank, port, results)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    try:
        found = results.get(timeout=LIMIT_S)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if isinstance(found, str):
        raise RuntimeError(found)
    return dict(found)


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
    packages = ("hpc_train", "lightning", "accelerate", "transformers", "torchmetrics", "torch")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages) + "\n\n" + HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_llama(Path(folder))
        _print_rows(options.tasks.split(","), options.frameworks.split(","))


def _print_rows(tasks: list[str], frameworks: list[str]) -> None:
    for task in tasks:
        expected = oracle(task)
        print(row(task, "one process", expected, expected), flush=True)
        for framework in frameworks:
            print(row(task, framework, measure(framework, task), expected), flush=True)


if __name__ == "__main__":
    main()
