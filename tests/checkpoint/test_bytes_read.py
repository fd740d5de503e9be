"""A restart reads each byte of a checkpoint once for its digest and once to load it, whatever the layouts are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint import restoring
from hpc_train.parallel import parallelize
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.requests import StopFlag
from tests.checkpoint.tensors import assert_same_bits
from tests.checkpoint.test_restore import save_made_up
from tests.checkpoint.training import make_manager
from tests.ranks import run_on_world
from tests.train.runs import frozen, run_attempt

MODEL = ("model.dim=256", "model.ffn_dim=1024", "model.vocab_size=4096")
HSDP = ("+strategy=hsdp", "strategy.shard=2")


def bytes_read() -> int:
    """Returns the bytes that this process has read from files, pipes and sockets."""
    return int(Path("/proc/self/io").read_text().split()[1])


def restore_counted(rank: int, world_size: int, path: str) -> list[int]:
    """Restores twice, saves as step 8, and returns the bytes that this rank has read from files each time."""
    manager = make_manager(rank, world_size, path)
    received = 0

    def broadcast(*args: Any) -> None:
        nonlocal received
        before = bytes_read()
        broadcast_tensors(*args)
        received += bytes_read() - before

    broadcast_tensors = restoring.broadcast_tensors
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "broadcast_tensors", broadcast)
        for _ in range(2):
            before = bytes_read() - received
            assert manager.restore() is not None
            counts.append(bytes_read() - received - before)
    manager.save(8, {"tokens": 9, "loss_scale": None})
    return counts


ZERO3 = ("+strategy=zero3",)
LONG = pytest.mark.long_form(15)


@pytest.mark.parametrize(
    ("saved", "loaded", "ranks"),
    [
        (("+strategy=dp",), ("+strategy=dp",), (4, 4)),
        (ZERO3, ZERO3, (2, 4)),
        pytest.param(HSDP, HSDP, (4, 4), marks=LONG),
        pytest.param(ZERO3, ("+strategy=dp",), (4, 2), marks=LONG),
        pytest.param(("+strategy=pp",), ("+strategy=pp",), (2, 4), marks=LONG),
    ],
)
def test_each_byte_is_read_once(
    tmp_path: Path, saved: tuple[str, ...], loaded: tuple[str, ...], ranks: tuple[int, int]
) -> None:
    source = frozen(tmp_path / "source", *saved, *MODEL)
    run_on_world(ranks[0], save_made_up, str(source.path))
    run = frozen(tmp_path / "run", *loaded, *MODEL)
    (source.path / "checkpoints").rename(run.path / "checkpoints")
    checkpoint = run.checkpoints / "step-00000007"
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    counts = run_on_world(ranks[1], restore_counted, str(run.path))
    assert_same_bits(checkpoint, run.checkpoints / "step-00000008")
    hashed_and_loaded, loaded_again = (sum(column) / size for column in zip(*counts, strict=True))
    assert 1.9 < hashed_and_loaded < 2.05
    assert 0.9 < loaded_again < 1.05, "this job has verified the checkpoint already"


def refuse_draws(spec: WorkerSpec, stop: StopFlag) -> None:
    def fill(model: Any, name: str, *args: Any) -> None:
        raise AssertionError(f"{name} is drawn, although the checkpoint has it")

    parallelize._fill = fill  # type: ignore[assignment]


def test_a_resumed_run_draws_no_parameters(tmp_path: Path) -> None:
    run_attempt(frozen(tmp_path, "+strategy=dp", "train.steps=2"), 2)
    assert run_attempt(frozen(tmp_path, "+strategy=dp", "train.steps=4"), 2, refuse_draws) == [0, 0]
