"""The tracking process follows all attempts of a job; one that hangs, refuses or dies costs the ranks nothing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.telemetry.sinks import tracking
from hpc_train.telemetry.sinks.tracking import TrackingProcess, tracked
from tests.telemetry.test_wandb import logged
from tests.train.runs import frozen, run_attempt


def warnings(run: RunDirectory) -> list[str]:
    return [event["message"] for event in run.read_events() if event["event"] == "warning"]


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


class Silent:
    """Accepts connections, counts them, and never answers."""

    def __init__(self, listener: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.accepted: list[socket.socket] = []
        self._listener = listener
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self.accepted.append(self._listener.accept()[0])
            except OSError:
                return


@contextmanager
def silent() -> Iterator[Silent]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Silent(listener)
        yield server
        listener.shutdown(socket.SHUT_RDWR)
        for connection in server.accepted:
            connection.close()


@pytest.fixture
def silent_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    with silent() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield server


@pytest.mark.long_form(6)  # ranks have no trackers: the tests below start them without a rank
def test_no_rank_opens_a_connection_to_a_tracker(tmp_path: Path, silent_service: Silent) -> None:
    keys = ["telemetry.wandb.mode=online", f"telemetry.mlflow.uri={silent_service.url}", "train.steps=3"]
    run = frozen(tmp_path / "run", "+strategy=single", *keys)
    assert run_attempt(run, 1) == [0]
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3]
    assert silent_service.accepted == []


@pytest.mark.long_form(8)  # test_wandb.py::test_a_failure_is_told_once has the decision
def test_a_tracker_that_hangs_is_reported_and_left(
    tmp_path: Path, silent_service: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "FINISH_S", 0.5)
    run = frozen(tmp_path / "run", "+strategy=single", "telemetry.wandb.mode=online", "telemetry.tensorboard=true")
    logged(run, 0, [1])
    with tracked(run, load(run)) as process:
        assert process is not None
        wait_for(lambda: silent_service.accepted)
        wait_for((run.path / "tensorboard").exists)
        process.end(True, None)
    assert run.record()["wandb"]["problem"] == "it did not finish in 0.5 s"
    (message,) = [message for message in warnings(run) if "did not finish" in message]
    assert message.startswith("W&B: it did not finish in 0.5 s; continuing without it.")
    assert f"python -m hpc_train sync {run.path} --to wandb" in message


def started(path: Path, *more: str) -> tuple[RunDirectory, TrackingProcess]:
    run = frozen(path, "+strategy=single", "telemetry.tensorboard=true", *more)
    return run, TrackingProcess(run, load(run), ["tensorboard"])


def steps(run: RunDirectory) -> list[int]:
    """Returns the steps whose losses TensorBoard shows."""
    if not (run.path / "tensorboard").exists():
        return []
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("loss")] if "loss" in events.Tags()["scalars"] else []


@pytest.mark.long_form(12)  # test_wandb.py follows two attempts
def test_one_process_follows_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores the signals that Ctrl-C, scancel and a preemption send to all processes of a job, and removes the
    temporary directories that W&B leaves to exit handlers."""
    monkeypatch.setattr(tracking, "FINISH_S", 200)  # a machine with other work
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    run, process = started(tmp_path / "run", "telemetry.wandb.mode=offline")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        os.kill(process.pid, number)
    logged(run, 0, [1, 2, 3])
    wait_for(lambda: steps(run))
    logged(run, 1, [3, 4])
    process.end(True, None)
    assert steps(run) == [1, 2, 3, 4]
    assert list(run.path.rglob("offline-run-*"))
    assert not [one.name for one in (tmp_path / "tmp").iterdir()]
    assert warnings(run) == []


def test_a_tracking_process_that_dies_or_hangs_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "STOPPED_S", 0.1)
    monkeypatch.setattr(tracking, "MARGIN_S", 0.1)
    for name, number, word in (("dies", signal.SIGKILL, "has ended with -9"), ("hangs", signal.SIGSTOP, "was killed")):
        run, process = started(tmp_path / name)
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            wait_for(lambda run=run: warnings(run))  # type: ignore[misc]
        process.end(False, None)
        (message,) = warnings(run)
        assert word in message and f"python -m hpc_train sync {run.path} --to tensorboard" in message
