"""One run that suffers a plan of faults, with a real agent and real workers, and what must hold afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_train.elastic.agent import STORE
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json, read_lines
from tests.checkpoint.tensors import assert_same_bits
from tests.elastic.entries import start_agent
from tests.faults.plan import NO_RANK, Fault, happened, variables
from tests.train.runs import frozen

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
MARK = "HPC_TRAIN_TEST_TRIAL"  # in the environment of every process of a trial


@dataclass(frozen=True)
class Trial:
    """How a run ended that was struck by ``plan``."""

    run: RunDirectory
    plan: Sequence[Fault]
    code: int
    error: str

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.run.read_events() if event["event"] in names]

    @property
    def told(self) -> list[tuple[str, int]]:
        """Class and rank of each failure that the event log names, in order."""
        return [(event["class"], event["rank"]) for event in self.events("worker_failed")]

    def recoveries(self) -> list[float]:
        """Seconds from each fault to the end of the first step of an attempt after it."""
        lines = [line for path in self.run.metrics.glob("*.jsonl") for line in _lines(path)]
        struck = [float(happened(self.run.path, number).read_text()) for number in range(len(self.plan))]
        firsts = sorted(min(times) for times in _by_attempt(lines).values())
        return [min(first for first in firsts if first > at) - at for at in struck]


def freeze(path: Path, steps: int, *overrides: str) -> RunDirectory:
    return frozen(path, *TWO_REPLICAS, f"train.steps={steps}", *overrides)


def start(run: RunDirectory, plan: Sequence[Fault] = ()) -> subprocess.Popen[str]:
    return start_agent(run.path, "tests.faults.entry:train", STORE, **variables(plan), **{MARK: str(run.path)})


def finish(run: RunDirectory, agent: subprocess.Popen[str], plan: Sequence[Fault] = (), timeout: float = 800) -> Trial:
    try:
        _, error = agent.communicate(timeout=timeout)
    finally:
        agent.kill()
    return Trial(run, plan, agent.returncode, error)


def undisturbed(path: Path, steps: int, *overrides: str) -> RunDirectory:
    run = freeze(path, steps, *overrides)
    trial = finish(run, start(run))
    assert trial.code == 0, trial.error
    return run


def struck(path: Path, steps: int, plan: Sequence[Fault], *overrides: str, timeout: float = 800) -> Trial:
    run = freeze(path, steps, *overrides)
    return finish(run, start(run, plan), plan, timeout)


def assert_survived(trial: Trial, reference: RunDirectory) -> None:
    """The run ended as the undisturbed one did, bit for bit, told what had happened, and left nothing behind."""
    assert trial.code == 0, trial.error
    for number, fault in enumerate(trial.plan):
        assert happened(trial.run.path, number).exists(), f"{fault} never struck"
    assert len(trial.told) == len(trial.plan), trial.error
    for fault, (failure, rank) in zip(trial.plan, trial.told, strict=True):
        assert failure == fault.failure, f"{fault}\n{trial.error}"
        assert rank == fault.rank or fault.kind in NO_RANK, f"{fault}\n{trial.error}"
    last = sorted(reference.checkpoints.glob("step-*"))[-1].name
    assert_same_bits(trial.run.checkpoints / last, reference.checkpoints / last)
    assert_nothing_left(trial.run)


def assert_nothing_left(run: RunDirectory) -> None:
    """No process, no port, no shared memory of the run."""
    until = time.monotonic() + 10
    while (left := _processes(run)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []
    for path in run.attempts.glob("[0-9]*.json"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", read_json(path)["port"]), timeout=5)
    pids = set((run.path / "pids").read_text().split())
    shared = [path.name for path in Path("/dev/shm").iterdir() if pids & set(path.name.split("_"))]
    assert shared == []


def _processes(run: RunDirectory) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            marked = f"{MARK}={run.path}\0".encode() in path.read_bytes()
        except OSError:
            continue
        if marked and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path))


def _by_attempt(lines: list[dict[str, Any]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for line in lines:
        found.setdefault(line["attempt"], []).append(line["time"])
    return found
