"""``train.debug=true`` names what is wrong, with its rank; the command ``debug`` shows a rank only to its owner."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_train.config.values import DEBUG_STEPS
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.requests import StopFlag
from hpc_train.train.hold import accept, listening, look
from tests.other_user import common, needs_root, start_as_other  # noqa: F401
from tests.train.runs import frozen, run_attempt


def third_layer_of_the_second_step(spec: WorkerSpec, stop: StopFlag) -> None:
    """On rank 1 the feed-forward of ``layers.2`` gives NaN."""
    from hpc_train.models.gpt import GatedFeedForward

    compute, calls = GatedFeedForward.forward, 0

    def broken(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        wrong = spec.rank == 1 and calls == 4 + 3
        return compute(self, hidden) * (float("nan") if wrong else 1.0)

    GatedFeedForward.forward = broken  # type: ignore[method-assign]


def root_of_zero(spec: WorkerSpec, stop: StopFlag) -> None:
    """The loss is finite and its gradient is not."""
    from hpc_train.models.gpt import GPTHead

    compute = GPTHead.loss

    def broken(self: Any, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = compute(self, hidden, targets)
        return total + (hidden * 0).abs().sum().sqrt(), count

    GPTHead.loss = broken  # type: ignore[method-assign]


def a_collective_of_its_own(spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.parallel.replica_engine import ReplicaEngine

    compute = ReplicaEngine.train_step

    def broken(self: Any, *args: Any) -> Any:
        if spec.rank == 1:
            dist.all_reduce(torch.zeros(3), group=self._mesh.group("dp"))
        return compute(self, *args)

    ReplicaEngine.train_step = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("strategy", "prepare", "message"),
    [
        (
            "zero3",
            third_layer_of_the_second_step,
            r"FloatingPointError: rank 1, step 2: the output of layers\.2\.ffn \(\w*GatedFeedForward\) is not finite; "
            "its inputs are finite; its parameters are finite",
        ),
        ("tp", third_layer_of_the_second_step, r"rank 1, step 2: the output of layers\.2\.ffn \(GatedFeedForward\) is"),
        ("dp", root_of_zero, r"FloatingPointError: rank \d, step 1: in the backward pass: Function '\w+' returned nan"),
        ("dp", a_collective_of_its_own, "Detected mismatch between collectives on ranks"),
    ],
)
@pytest.mark.long_form(4, cases=["tp", "dp"])
def test_the_mistake_is_named(tmp_path: Path, strategy: str, prepare: Any, message: str) -> None:
    run = frozen(tmp_path / "run", f"+strategy={strategy}", "train.debug=true")
    with pytest.raises(AssertionError, match=message):
        run_attempt(run, 2, prepare, timeout=400)


@pytest.mark.long_form(15)  # the runs with a mistake
def test_without_a_mistake_it_ends_after_a_few_steps_of_the_same_run(tmp_path: Path) -> None:
    steps = ["train.steps=50", "telemetry.log_every=7", "checkpoint.every=3", "batch.micro_batches=2"]
    debugged = frozen(tmp_path / "debugged", "+strategy=pp", "train.debug=true", *steps)
    assert run_attempt(debugged, 2, timeout=400) == [0, 0]
    lines = debugged.read_metrics()
    assert [line["step"] for line in lines] == list(range(1, DEBUG_STEPS + 1))
    assert lines[-1]["lr"] > lines[0]["lr"] * 1.2, "the learning rate is that of 50 steps: far from its end"
    saved = {path.name for path in debugged.checkpoints.iterdir()}
    assert f"step-{DEBUG_STEPS:08d}" in saved
    assert len(saved) <= 2, "a slow machine also saves before the last evaluation"


@needs_root
def test_another_user_cannot_attach(common: Path) -> None:  # noqa: F811
    """Neither through the modes of the socket and its directory, nor by its credentials if the modes are wrong."""
    common.chmod(0o700)
    path = common / "debug"

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(path))
            assert other.recv(1) == b"", "the connection is closed"

    with listening(path) as listener:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(AssertionError, match="PermissionError"):
            start_as_other(connect)()
        common.chmod(0o755)
        path.chmod(0o666)
        wait = start_as_other(connect)
        with socket.socket(socket.AF_UNIX) as mine:
            threading.Timer(0.5, lambda: mine.connect(str(path))).start()
            with accept(listener, time.monotonic() + 60, lambda: False) as connection:
                wait()
                assert connection.getpeername() == ""
    assert not path.exists()
    with pytest.raises(PermissionError, match="other users may enter"), listening(path):
        pass


@pytest.mark.parametrize("statement", ["p seen", "while True: pass", None])
def test_a_hold_ends_in_the_middle_of_a_statement_too(statement: str | None) -> None:
    """A statement that returns, one that does not, and none."""
    seen = 17
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if statement is not None:
            theirs.sendall(f"{statement}\n".encode())
        ends = iter(["", "", *["its limit has passed"] * 100])
        assert look(ours, sys._getframe(), "held", lambda: next(ends)) == "its limit has passed"
        shown = theirs.recv(1 << 16).decode()
    assert shown.startswith("held\n> ")
    assert shown.endswith("the hold is over: its limit has passed\n")
    assert (str(seen) in shown) == (statement == "p seen")
