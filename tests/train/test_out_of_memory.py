"""An error of memory: its class, and a message that says what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.run.exits import Failure, classify
from hpc_train.run.stop import StopFlag
from hpc_train.run.worker_spec import WorkerSpec
from tests.train.runs import frozen, run_attempt


def too_large(spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.parallel.replica_engine import ReplicaEngine

    def broken(self: Any, *args: Any) -> None:
        torch.empty(1 << 50)

    ReplicaEngine.train_step = broken  # type: ignore[assignment]


def test_the_message_says_what_helps_in_this_run(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp")
    message = (
        r"OutOfMemory: out of memory on rank \d, which had used \d\.\d+ GiB of the host: .*allocate.* In this run "
        r"would help: batch\.micro_size=2 \(now 4; .*\); train\.activation_checkpointing=full; strategy=zero3; fewer"
    )
    with pytest.raises(AssertionError, match=message):
        run_attempt(run, 2, too_large)


def test_torch_says_it_in_several_ways() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 50)
    found = [error.value, torch.OutOfMemoryError("CUDA out of memory."), MemoryError()]
    assert [classify(one) for one in found] == [Failure.OUT_OF_MEMORY] * 3
    assert classify(RuntimeError("[enforce fail at tcp.cc] Connection closed")) is Failure.COMMUNICATION
