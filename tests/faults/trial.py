"""Runs one training under a plan of faults, with a real agent and real workers, and checks the result."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_train.elastic.rendezvous.addresses import candidate_ports
from hpc_train.elastic.workers import RETAINED_ATTEMPTS
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import NewLines, read_json
from tests.checkpoint.tensors import assert_same_bits
from tests.faults.plan import HANGS, MARK, PASSING, Fault, bad_windows, happened, variables
from tests.faults.surroundings import Surroundings
from tests.train.runs import frozen
from tests.warm_parents import with_server

TWO_REPLICAS = [
    "+strategy=dp",
    "cluster=local",
    "cluster.gpus_per_node=0",
    "cluster.cpu_workers=2",
    "train.threads=1",
    "train.eval_every=0",
    "optim.schedule=constant",
    "elastic.hang_timeout_s=4",
]
EVERY = "checkpoint.every=4"
COMMON = [
    EVERY,
    "batch.loader_workers=1",
    "elastic.stop_grace_s=6",
    "train.nonfinite_limit=1",
    "train.spike_mads=1000",
    "train.max_rollbacks=1000",
]
NONE = Surroundings()


@dataclass(frozen=True)
class Trial:
    """Records how a run under ``plan`` ended; ``codes`` holds the exit codes of its successive agents."""

    run: RunDirectory
    plan: Sequence[Fault]
    codes: Sequence[int]
    error: str

    @property
    def code(self) -> int:
        return self.codes[-1]

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.run.read_events() if event["event"] in names]

    @property
    def reported(self) -> list[tuple[str, int]]:
        """Returns the class and rank of each failure that the event log names, in order."""
        return [(event["class"], event["rank"]) for event in self.events("worker_failed")]

    @property
    def steps_lost(self) -> int:
        """Returns how many steps that a checkpoint contained were trained again by a later attempt."""
        begun: dict[int, dict[str, Any]] = {}
        for line in sorted(self._lines, key=lambda line: line["time"]):
            begun.setdefault(line["attempt"], line)
        saved, lost = 0, 0
        events = self.events("checkpoint_saved", "rolled_back")
        for entry in sorted([*events, *begun.values()], key=lambda entry: entry["time"]):
            if "event" in entry:
                saved = entry.get("to_step", entry["step"])
            else:
                lost += max(0, saved + 1 - entry["step"])
        return lost

    @property
    def _lines(self) -> list[dict[str, Any]]:
        return [line for path in self.run.metrics.glob("*.jsonl") for line in NewLines(path).read()]

    def recoveries(self) -> list[float]:
        """Returns seconds from each fault that ended an attempt to the end of the first step of the next attempt."""
        ended = [number for number, fault in enumerate(self.plan) if fault.kind not in PASSING]
        injected = [float(happened(self.run.path, number).read_text()) for number in ended]
        firsts = sorted(min(times) for times in _by_attempt(self._lines).values())
        return [min(first for first in firsts if first > at) - at for at in injected]


def freeze(path: Path, steps: int, *overrides: str) -> RunDirectory:
    return frozen(path, *TWO_REPLICAS, f"train.steps={steps}", *overrides)


def start(
    run: RunDirectory, plan: Sequence[Fault] = (), around: Surroundings = NONE, entry: str = "train"
) -> subprocess.Popen[str]:
    """Starts an agent in its own session, as a launcher does."""
    environment = dict(around.variables) | variables(plan) | {MARK: str(run.path)}
    # -m is not possible, because forked workers would run the module again
    script = "import sys; from tests.faults.agent import main; sys.exit(main(*sys.argv[1:]))"
    return subprocess.Popen(
        [*around.prefix, sys.executable, "-c", script, str(run.path), f"tests.faults.entry:{entry}"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(run: RunDirectory, agent: subprocess.Popen[str], plan: Sequence[Fault] = (), timeout: float = 800) -> Trial:
    try:
        _, error = agent.communicate(timeout=timeout)
    finally:
        agent.kill()
    return Trial(run, plan, [agent.returncode], error)


def undisturbed(path: Path, steps: int, *overrides: str, plan: Sequence[Fault] = ()) -> RunDirectory:
    """Trains without faults; the run skips the bad batches of ``plan``."""
    run = freeze(path, steps, *overrides)
    trial = finish(run, start(run, plan, Surroundings(variables=with_server(os.environ)), "train_past"))
    assert trial.code == 0, trial.error
    return run


def run_with_faults(
    path: Path, steps: int, plan: Sequence[Fault], *overrides: str, around: Surroundings = NONE, timeout: float = 800
) -> Trial:
    """Runs a plan and starts the agent again after each fault that ends it."""
    run, codes, error = freeze(path, steps, *overrides), list[int](), ""
    while not codes or codes == [fault.leads_to.end for fault in plan if fault.leads_to.end is not None][: len(codes)]:
        trial = finish(run, start(run, plan, around), plan, timeout)
        codes, error = [*codes, trial.code], error + trial.error
    return Trial(run, plan, codes, error)


def assert_survived(trial: Trial, reference: RunDirectory) -> None:
    """Checks that all failures were reported, the last checkpoint equals ``reference`` bitwise, and nothing is left."""
    leads_to = [fault.leads_to for fault in trial.plan]
    assert trial.codes == [*(one.end for one in leads_to if one.end is not None), 0], trial.error
    for number, fault in enumerate(trial.plan):
        assert happened(trial.run.path, number).exists(), f"{fault} was not injected"
    failing = [fault for fault in trial.plan if fault.leads_to.failure is not None]
    assert len(trial.reported) == len(failing), trial.error
    for fault, (failure, rank) in zip(failing, trial.reported, strict=True):
        assert failure == fault.leads_to.failure, f"{fault}\n{trial.error}"
        assert rank == fault.rank or not fault.leads_to.names_rank, f"{fault}\n{trial.error}"
    assert len(trial.events("checkpoint_failed")) == sum(fault.kind == "disk" for fault in trial.plan)
    if windows := sorted(bad_windows(trial.plan)):
        assert trial.events("rolled_back")[-1]["skipped_windows"] == [list(window) for window in windows]
    assert trial.steps_lost == 0, trial.error
    last = sorted(reference.checkpoints.glob("step-*"))[-1].name
    assert_same_bits(trial.run.checkpoints / last, reference.checkpoints / last)
    assert_nothing_left(trial.run)


def assert_survives(path: Path, plan: Sequence[Fault], around: Surroundings, *overrides: str) -> Trial:
    steps = max(fault.step for fault in plan) + 9  # the last fault may occur in a recovery
    whole = undisturbed(path.with_name(f"{path.name}-undisturbed"), steps, *COMMON, *overrides, plan=plan)
    with ports_taken(path, attempts=4 * len(plan)):
        trial = run_with_faults(path, steps, plan, *COMMON, *overrides, around=around)
    assert_survived(trial, whole)
    assert_hangs_are_reported(trial)
    return trial


def assert_hangs_are_reported(trial: Trial) -> None:
    """Checks that each hang was reported with its rank, its phase, and the stacks of all ranks.

    The agents keep the stacks of the last attempts. A rank that thrashes at its memory limit, or that dies slowly on a
    busy machine, may look like a hang first; the class of the failure decides.
    """
    expected = [fault for fault in trial.plan if fault.kind in HANGS]
    hung = {failure["attempt"] for failure in trial.events("worker_failed") if failure["class"] == "hang"}
    hangs = [hang for hang in trial.events("hang_detected") if hang["attempt"] in hung]
    reported = [(hang["rank"], hang["phase"]) for hang in hangs]
    assert reported == [(one.rank, "checkpoint" if one.kind == "storage_in_save" else "step") for one in expected]
    last = max(event["attempt"] for event in trial.events("started"))
    for hang in hangs:
        if hang["attempt"] <= last - RETAINED_ATTEMPTS:
            assert not Path(hang["stacks"]).exists()
            continue
        stacks = Path(hang["stacks"]).read_text()
        assert "--- rank 0 on" in stacks
        assert "trainer.py" in stacks


@contextmanager
def ports_taken(run: Path, attempts: int) -> Iterator[None]:
    """Listens on the first port of each of the first ``attempts`` attempts of ``run``."""
    with ExitStack() as listening:
        for attempt in range(attempts):
            with suppress(OSError):  # two attempts of the same port
                listening.enter_context(socket.create_server(("127.0.0.1", next(candidate_ports(f"{run}:{attempt}")))))
        yield


def assert_nothing_left(run: RunDirectory) -> None:
    """Checks that no process, no port and no shared memory of the run is left."""
    until = time.monotonic() + 10
    while (left := processes(run)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []
    for path in run.attempts.glob("[0-9]*.json"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", read_json(path)["port"]), timeout=5)
    pids = set((run.path / "pids").read_text().split())
    shared = [path.name for path in Path("/dev/shm").iterdir() if pids & set(path.name.split("_"))]
    assert shared == []


def kill_all(run: RunDirectory) -> None:
    """Kills the processes of the run and those that they start meanwhile."""
    while left := processes(run):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def processes(run: RunDirectory) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            marked = f"{MARK}={run.path}\0".encode() in path.read_bytes()
        except OSError:
            continue
        if marked and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def _by_attempt(lines: list[dict[str, Any]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for line in lines:
        found.setdefault(line["attempt"], []).append(line["time"])
    return found
