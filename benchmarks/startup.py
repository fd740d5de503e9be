"""Start-up times: commands, the first line of a worker, the first step after a restart, and the submission of a sweep.

    python -m benchmarks.startup --jobs 1000

prints a table in Markdown, with medians in seconds, and the imports that take most of the time. CPU seconds are those
of the command and of its children that have ended. The sweep goes to stand-ins for the commands of Slurm, which answer
at once. With ``--slurm`` the first line of a worker is also measured in a job of the cluster of this machine, in turns
with a trivial job, whose batch script only prints: from the call of ``sbatch`` to the line in the file.

Bytecode is compiled before and kept, as after an installation by pip or ``make install``.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

HPC_TRAIN = (sys.executable, "-m", "hpc_train")
RUN = ("+strategy=dp", "train.steps=100000", "telemetry.wandb.mode=disabled", "telemetry.log_every=1")
COMMANDS = {"--help": ["--help"], "--version": ["--version"], "status": ["status"], "--cfg job": ["--cfg", "job"]}
STEPS = 6  # after a restart
PATIENCE_S = 300.0
POLL_S = 0.005
IMPORTS = {
    "a command that trains": "hpc_train.commands.train",
    "the agent": "hpc_train.elastic.agent",
    "the warm parent of the workers": "hpc_train.train.worker",
}
SHOWN = 12  # packages in an import profile


class Row(NamedTuple):
    """A row of the table; ``cpu`` is None where it is not measured."""

    name: str
    seconds: float
    cpu: float | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1000, help="jobs of the sweep")
    parser.add_argument("--workers", type=int, default=1, help="of the run whose start is measured")
    parser.add_argument("--slurm", action="store_true", help="measure a job of the cluster of this machine, too")
    options = parser.parse_args(arguments)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for package in ("hpc_train", "hydra_plugins"):
        compileall.compile_dir(package, quiet=1)
    with tempfile.TemporaryDirectory(prefix="startup-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ["HPC_TRAIN_ROOT"] = str(folder / "runs")
        print("| | seconds | CPU seconds |\n|---|---|---|", flush=True)
        for row in _rows(folder, options):
            print(f"| {row.name} | {row.seconds:.2f} | {'' if row.cpu is None else f'{row.cpu:.2f}'} |", flush=True)
    for what, module in IMPORTS.items():
        print(f"\nImports of {what} (`{module}`):\n\n{_import_profile(module)}", flush=True)


def _rows(folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    repeats = options.repeats
    yield _median("`python -c pass`", repeats, lambda: _timed([sys.executable, "-c", "pass"]))
    yield _median("`import torch`", repeats, lambda: _timed([sys.executable, "-c", "import torch"]))
    for name, words in COMMANDS.items():
        yield _median(f"`{name}`", repeats, partial(_timed, [*HPC_TRAIN, *words]))
    numbers = iter(range(10**6))
    local = [f"cluster.cpu_workers={options.workers}", "cluster=local"]
    yield _median("first line of a worker", repeats, lambda: _first_line(folder, next(numbers), local))
    restarts = [_restart(folder, next(numbers), local) for _ in range(max(1, repeats // 3))]
    names = ("a killed worker until the first line of the next", "first step after a restart", "a later step")
    for index, name in enumerate(names):
        yield Row(name, median(found[index] for found in restarts))
    if options.slurm:
        yield _median("`srun true`", repeats, lambda: _timed(["srun", "--nodes=1", "--ntasks=1", "true"]))
        slurm = ["cluster=slurm", "cluster.gpus_per_node=0", f"cluster.cpu_workers={options.workers}", "-m"]
        names = ("`import torch`, in turns with the next two", "first line of a trivial job")
        names = (*names, "first line of a worker in a job")
        turns = [_turn(folder, next(numbers), slurm) for _ in range(repeats)]
        yield from (Row(name, median(turn[index] for turn in turns)) for index, name in enumerate(names))
    yield _median(f"submission of {options.jobs} jobs", 1, lambda: _sweep(folder, options.jobs))


def _median(name: str, repeats: int, measure: Callable[[], tuple[float, float | None]]) -> Row:
    found = [measure() for _ in range(repeats)]
    cpu = [each[1] for each in found if each[1] is not None]
    return Row(name, median(each[0] for each in found), median(cpu) if cpu else None)


def _timed(command: Sequence[str]) -> tuple[float, float]:
    """Returns the wall and CPU seconds of a command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _first_line(folder: Path, number: int, where: Sequence[str]) -> tuple[float, None]:
    """Returns the seconds from the start of a command to the first line that a worker prints."""
    began = time.perf_counter()
    with _running(folder, number, where) as run:
        _wait(lambda: any(path.stat().st_size for path in (run / "logs").glob("*.log")), "a line of a worker")
        return time.perf_counter() - began, None


def _turn(folder: Path, number: int, where: Sequence[str]) -> tuple[float, float, float]:
    """Returns the seconds of an import of torch, of a trivial job, and until the first line of a worker in a job."""
    return (
        _timed([sys.executable, "-c", "import torch"])[0],
        _trivial(folder, number),
        _first_line(folder, number, where)[0],
    )


def _trivial(folder: Path, number: int) -> float:
    """Returns the seconds from ``sbatch`` to the line that a batch script prints."""
    script, output = folder / "trivial.sbatch", folder / f"trivial-{number}.out"
    script.write_text("#!/bin/sh\necho here\n")
    began = time.perf_counter()
    subprocess.run(["sbatch", f"--output={output}", script], check=True, stdout=subprocess.DEVNULL)
    _wait(lambda: output.exists() and output.stat().st_size, "the line of a trivial job")
    return time.perf_counter() - began


def _restart(folder: Path, number: int, where: Sequence[str]) -> tuple[float, float, float]:
    """Kills a worker; returns the seconds until the next prints, of the first step after it, and of a later step."""
    with _running(folder, number, where) as run:
        _wait(lambda: len(_step_seconds(run, 0)) >= STEPS, "the first steps")
        logs = list((run / "logs").glob("*.log"))
        began = time.perf_counter()
        os.kill(_worker(), signal.SIGKILL)
        _wait(lambda: len(list((run / "logs").glob("*.log"))) > len(logs), "a line after the restart")
        seconds = time.perf_counter() - began
        _wait(lambda: len(_step_seconds(run, 1)) >= STEPS, "the steps after the restart")
        first, *later = _step_seconds(run, 1)
        return seconds, first, median(later)


@contextmanager
def _running(folder: Path, number: int, where: Sequence[str]) -> Iterator[Path]:
    """Starts a run and yields its directory; ends it and its processes afterwards."""
    words = [*RUN, f"run.name=startup-{number}", *where]
    command = subprocess.Popen(
        [*HPC_TRAIN, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield folder / "runs" / f"startup-{number}"
    finally:
        if "-m" in words:
            subprocess.run([*HPC_TRAIN, "cancel", f"startup-{number}"], check=False, stdout=subprocess.DEVNULL)
        with suppress(psutil.NoSuchProcess):
            for process in [psutil.Process(command.pid), *_children(command.pid)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        command.wait()


def _children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _worker() -> int:
    """Returns a worker: the newest process, after the warm parent and the server of torch's store."""
    return max(each.pid for each in _children(os.getpid()) if any("forkserver" in word for word in each.cmdline()))


def _step_seconds(run: Path, attempt: int) -> list[float]:
    with suppress(FileNotFoundError):
        lines = (run / "metrics" / f"attempt-{attempt:03d}.jsonl").read_text().splitlines()
        return [json.loads(line)["step_s"] for line in lines[:-1]]
    return []


def _wait(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come within {PATIENCE_S:.0f} s")
        time.sleep(POLL_S)


def _sweep(folder: Path, jobs: int) -> tuple[float, float]:
    """Returns the wall and CPU seconds of the submission of ``jobs`` jobs over two keys."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("srun", "scontrol", "sinfo", "squeue", "sacct", "sacctmgr", "sbatch"):
        (tools / name).write_text("#!/bin/sh\necho Submitted batch job 41\n" if name == "sbatch" else "#!/bin/sh\n")
        (tools / name).chmod(0o755)
    rates = max(1, jobs // 10)
    keys = [
        "optim.lr=" + ",".join(f"{1e-5 * (number + 1):g}" for number in range(rates)),
        "optim.weight_decay=" + ",".join(f"{0.01 * number:g}" for number in range(jobs // rates)),
    ]
    words = [*keys, "cluster=slurm", "cluster.gpus_per_node=4", "launch.detach=true", "launch.yes=true"]
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{tools}:{before}"
    try:
        found = _timed([*HPC_TRAIN, "+strategy=dp", *words, "run.name=sweep", "-m"])
    finally:
        os.environ["PATH"] = before
    written = len(list((folder / "runs" / "sweep").glob("*/config.yaml")))
    assert written == rates * (jobs // rates), f"{written} runs were written"
    return found


def _import_profile(module: str) -> str:
    """Returns a table of the packages whose modules take most of the time of ``import module``."""
    command = [sys.executable, "-X", "importtime", "-c", f"import gc; gc.disable(); import {module}"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    seconds: dict[str, float] = {}
    for line in lines:
        own, _, name = line.removeprefix("import time:").split("|")
        if own.strip().isdigit():
            words = name.strip().split(".")
            package = ".".join(words[: 2 if words[0] in ("torch", "hpc_train") else 1])
            seconds[package] = seconds.get(package, 0.0) + int(own) / 1e6
    largest = sorted(seconds.items(), key=lambda item: item[1], reverse=True)[:SHOWN]
    rows = [f"| {name} | {spent:.3f} |" for name, spent in [("all", sum(seconds.values())), *largest]]
    return "\n".join(["| package | seconds |", "|---|---|", *rows])


if __name__ == "__main__":
    main()
