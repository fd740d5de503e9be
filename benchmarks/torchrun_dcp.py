"""The trainer beside the same training in a script with torch.distributed.checkpoint, which torchrun, ``exec`` and the
launcher of NVIDIA's resiliency extension start, under the same faults.

    python -m benchmarks.torchrun_dcp [--by LAUNCHER ...] [TRIALS [KIND ...]]

All train two ranks on this machine. Each trial injects one fault into rank 1 and starts the command again if it ends
without having finished, as a batch system with requeue would, at most ``STARTS`` times. The trials alternate. A row
says how many trainings finished, how many of them with the weights of the training without a fault, the median time
from the fault to the end of the first step after a restart, and how many processes were left.

Under the trainer and under ``exec`` a rank counts as hung after 4 s (``elastic.hang_timeout_s=4``, and
``--hang-timeout 4``, where each step prints a line). The script gives its process group a timeout of 60 s; the default
is 30 minutes. It does not call the heartbeats of the resiliency extension, which its launcher needs to find hangs. That
launcher, ``ft_launcher``, is measured if it is on the PATH.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import NewLines
from tests.checkpoint.tensors import assert_same_bits
from tests.faults.plan import Fault, happened, variables
from tests.faults.trial import COMMON, MARK, freeze, kill_all, processes, start, undisturbed

KINDS = (
    *("kill", "segfault", "abort", "bus", "exit", "loader", "stop", "gil", "storage", "collective"),
    *("storage_in_save", "disk", "memory", "request", "agent", "nan"),
)
STEPS, AT = 16, 6
LIMIT_S = 150.0  # a start that has not ended by then counts as hung
STARTS = 3


@dataclass(frozen=True)
class Outcome:
    """Records how one trial ended; ``recovery`` is in seconds from the fault to the end of the
    first step after a restart."""

    finished: bool
    same_weights: bool
    recovery: float | None
    left: int


def by_this_agent(folder: Path, plan: Sequence[Fault]) -> Outcome:
    whole = undisturbed(folder / "whole", STEPS, *COMMON, plan=plan)
    run = freeze(folder / "run", STEPS, *COMMON)
    finished, left = _run(run.path, lambda: start(run, plan))
    last = f"step-{STEPS:08d}"
    same = finished and _same_bits(run.checkpoints / last, whole.checkpoints / last)
    steps = [line for path in sorted(run.metrics.glob("*.jsonl")) for line in NewLines(path).read()]
    return Outcome(finished, same, _recovery(run.path, steps, "attempt"), left)


SCRIPT = "benchmarks.dcp_training"
ON_TWO = ("--standalone", "--nproc-per-node=2", "--max-restarts=9")
LAUNCHERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", *ON_TWO, "--module", SCRIPT),
    "exec": (
        *(sys.executable, "-m", "hpc_train", "exec", *ON_TWO, "--hang-timeout=4", "--name=run"),
        *("--set=run.snapshot=false", "--", sys.executable, "-m", SCRIPT),
    ),
    "ft_launcher": ("ft_launcher", "--ignore-missing-fault-tol-cfg", *ON_TWO, "--module", SCRIPT),
}


def by_launcher(name: str, folder: Path, plan: Sequence[Fault]) -> Outcome:
    """Runs the script under a launcher with the faults, and before the first trial of the launcher without any."""
    whole = folder.parent / f"whole-{name}"
    if not whole.exists():
        whole.mkdir()
        finished, _ = _run(whole, lambda: _start(name, whole, []))
        if not finished:
            raise SystemExit(f"{name} did not finish a training without faults:\n{(whole / 'errors').read_text()}")
    folder.mkdir()
    finished, left = _run(folder, lambda: _start(name, folder, plan))
    same = finished and (folder / "weights").read_text() == (whole / "weights").read_text()
    steps = list(NewLines(folder / "steps.jsonl").read())
    return Outcome(finished, same, _recovery(folder, steps, "process"), left)


DOORS: dict[str, Callable[[Path, Sequence[Fault]], Outcome]] = {
    "this agent": by_this_agent,
    **{name: partial(by_launcher, name) for name in LAUNCHERS},
}


def _start(name: str, folder: Path, plan: Sequence[Fault]) -> subprocess.Popen[str]:
    variables_of_run = {"OMP_NUM_THREADS": "1", "HPC_TRAIN_ROOT": str(folder / "runs"), MARK: str(folder)}
    return subprocess.Popen(
        [*LAUNCHERS[name], str(folder), str(STEPS)],
        env=os.environ | variables_of_run | variables(plan),
        stdout=subprocess.DEVNULL,
        stderr=(folder / "errors").open("a"),
        start_new_session=True,
        text=True,
    )


def _run(folder: Path, begin: Callable[[], subprocess.Popen[str]]) -> tuple[bool, int]:
    """Returns whether the command finished with exit code 0, and how many processes its starts left behind."""
    left = 0
    for _ in range(STARTS):
        command = begin()
        try:
            command.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            command.kill()
            command.communicate()
            kill_all(RunDirectory(folder))
            return False, left
        time.sleep(5)
        left += len(processes(RunDirectory(folder)))
        kill_all(RunDirectory(folder))
        if command.returncode == 0:
            return True, left
    return False, left


def _recovery(folder: Path, steps: Sequence[dict[str, Any]], start: str) -> float | None:
    """Returns the seconds from the fault to the end of the first step that another start of the workers took; None
    without such a step or without a fault."""
    fault = happened(folder, 0)
    if not fault.exists():
        return None
    injected = float(fault.read_text() or "nan")
    return next((step["time"] - injected for step in steps if step[start] != steps[0][start]), None)


def _same_bits(one: Path, other: Path) -> bool:
    try:
        assert_same_bits(one, other)
    except (AssertionError, OSError):
        return False
    return True


def compare(kind: str, trials: int, doors: Sequence[str], folder: Path) -> None:
    found: dict[str, list[Outcome]] = {name: [] for name in doors}
    for number in range(trials):
        for name in doors:
            found[name].append(DOORS[name](folder / f"{kind}-{number}-{name}", [Fault(kind, 1, AT)]))
    for name, outcomes in found.items():
        times = [one.recovery for one in outcomes if one.recovery is not None]
        median = f"{statistics.median(times):.1f} s" if times else "-"
        finished, same = sum(one.finished for one in outcomes), sum(one.same_weights for one in outcomes)
        left = sum(one.left for one in outcomes)
        print(f"| `{kind}` | {name} | {finished} of {trials} | {same} of {trials} | {median} | {left} |", flush=True)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="?", type=int, default=3)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--by", action="append", choices=DOORS, metavar="LAUNCHER", help=f"one of {', '.join(DOORS)}")
    options = parser.parse_args()
    doors = options.by or [name for name in DOORS if name != "ft_launcher" or shutil.which(name)]
    print("| fault | run by | finished | same weights | first step after | processes left |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            compare(kind, options.trials, doors, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
