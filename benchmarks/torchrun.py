"""The agent beside ``torch.distributed.elastic``: the same two ranks of the same training under the same faults.

    python -m benchmarks.torchrun [TRIALS]

prints how often the training went on by itself and how long its first new step took, for trials in alternation, and how
many processes are left when the agent itself is killed. Both start ``tests.faults.entry``, which resumes from the
newest checkpoint; only who starts it again differs.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_train.layout.resolve import resolve_layout
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import NewLines
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag
from tests.faults.plan import Fault, happened, variables
from tests.faults.trial import MARK, freeze, kill_all, processes, start

STRUCK_AT, STEPS = 6, 100_000
LIMIT_S = 60.0  # after that it is as good as hung
KINDS = ("kill", "segfault", "exit", "stop")  # the first with all trials, the others with a fifth of them
Start = Callable[[RunDirectory, Sequence[Fault]], subprocess.Popen[str]]


def by_torchrun(run: RunDirectory, plan: Sequence[Fault]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=9"]
    return subprocess.Popen(
        [*command, "--module", "benchmarks.torchrun", "worker", str(run.path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", MARK: str(run.path)} | variables(plan),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )


DOORS: dict[str, Start] = {"this agent": start, "torchrun": by_torchrun}


def worker(path: str) -> int:
    """What torchrun starts."""
    from tests.faults.entry import train

    run, rank = RunDirectory(Path(path)), int(os.environ["RANK"])
    spec = WorkerSpec(
        run_dir=path,
        attempt=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        rank=rank,
        local_rank=rank,
        local_world_size=2,
        node_rank=0,
        nodes=1,
        layout=resolve_layout(load(run), 1, 2),
        master_address=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
        gpus_per_node=0,
        threads=1,
    )
    return int(train(spec, StopFlag()))


def trial(door: Start, kind: str, folder: Path) -> float | None:
    """Seconds from the fault to the end of the first step after it; None where there is none in time."""
    run = freeze(folder, STEPS, "checkpoint.every=2")
    agent = door(run, [Fault(kind, 1, STRUCK_AT)])
    try:
        mark = happened(run.path, 0)
        _wait(mark.exists, 4 * LIMIT_S)
        injected = float(mark.read_text() or time.time())
        _wait(lambda: bool(_first_step(run, injected)) or agent.poll() is not None, LIMIT_S)
        found = _first_step(run, injected)
        return None if found is None else found - injected
    finally:
        kill_all(run)
        agent.communicate()


def orphans(door: Start, folder: Path) -> int:
    """Processes that are left 5 s after a SIGKILL of the agent."""
    run = freeze(folder, STEPS)
    agent = door(run, [])
    _wait(lambda: any(run.metrics.glob("*.jsonl")), 4 * LIMIT_S)
    agent.kill()
    agent.wait()
    time.sleep(5)
    left = len(processes(run))
    kill_all(run)
    return left


def _first_step(run: RunDirectory, injected: float) -> float | None:
    """When the first line of a later attempt was written."""
    later = [path for path in run.metrics.glob("attempt-*.jsonl") if not path.name.endswith("-000.jsonl")]
    times = [line["time"] for path in later for line in NewLines(path).read() if line["time"] > injected]
    return min(times, default=None)


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)


def compare(kind: str, trials: int, folder: Path) -> None:
    """In alternation."""
    found: dict[str, list[float | None]] = {name: [] for name in DOORS}
    for number in range(trials):
        for place, (name, door) in enumerate(DOORS.items()):
            found[name].append(trial(door, kind, folder / f"{kind}-{number}-{place}"))
    for name, seconds in found.items():
        good = sorted(one for one in seconds if one is not None)
        times = f"{statistics.median(good):7.2f}s {good[int(0.95 * (len(good) - 1))]:7.2f}s" if good else ""
        print(f"{kind:24} {name:16} {len(good):3} of {trials:2} {times}", flush=True)


def main(trials: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    print(f"{'fault':24} {'started again by':16} {'went on':>9} {'median':>8} {'p95':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            compare(kind, trials if kind == KINDS[0] else max(1, trials // 5), Path(folder))
        for place, (name, door) in enumerate(DOORS.items()):
            left = orphans(door, Path(folder, f"orphans-{place}"))
            print(f"{'SIGKILL of the agent':24} {name:16} {left} processes left after 5 s")
    return 0


if __name__ == "__main__":
    sys.exit(worker(sys.argv[2]) if sys.argv[1:2] == ["worker"] else main(int((sys.argv[1:] or ["10"])[0])))
