"""What a background save copies: all at first, and from then on what this rank's plan writes."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.checkpoint.tensors import read_tensors
from tests.checkpoint.training import make_manager
from tests.ranks import run_ranks
from tests.train.runs import frozen


def save_replicas(rank: int, world_size: int, path: str) -> tuple[list[int], int]:
    manager = make_manager(rank, world_size, path)
    copied = []
    for step in (1, 2, 3):
        for parameter in manager.engine.named_parameters().values():
            parameter.detach().fill_(step)
        manager.save(step, {})
        copied.append(sum(buffer.nbytes for buffer in manager._copies._buffers.values()))
    manager.wait()
    manager._copies.forget_plan()
    manager.save(4, {})
    copied.append(sum(buffer.nbytes for buffer in manager._copies._buffers.values()))
    manager.wait()
    return copied, len(manager._copies._buffers)


def test_replicas_copy_together_what_one_of_them_copied(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "checkpoint.asynchronous=true", "checkpoint.keep=9")
    (first, count), (second, _) = run_ranks(2, save_replicas, str(run.path))
    assert first[0] == first[3] and second[0] == second[3]
    assert first[1] == first[2] and second[1] == second[2]
    assert 0 < first[1] < first[0] and 0 < second[1] < second[0]
    for step in (1, 2, 3):
        found = read_tensors(run.checkpoints / f"step-{step:08d}")
        assert all(torch.equal(t, torch.full_like(t, step)) for name, t in found.items() if name.startswith("model."))
    assert first[1] + second[1] == sum(tensor.nbytes for tensor in found.values())
    assert count == len(found)
