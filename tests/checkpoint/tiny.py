"""Creates checkpoints of two small tensors with the protocol of a run: begin, write, commit; search, verify, load."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hpc_train.checkpoint.agreement import on_first
from hpc_train.checkpoint.manifest import Manifest
from hpc_train.checkpoint.reader import SafeReader
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore
from hpc_train.checkpoint.verified import VerifiedSearch
from hpc_train.checkpoint.writer import quiet, write_tensors
from tests.checkpoint.progress import LONG

LIMIT_S = 20_000 if LONG else 250  # time limit of a test


def state_of(step: int, rank: int = 0) -> dict[str, Tensor]:
    values = torch.arange(96, dtype=torch.float64).reshape(8, 12)
    return {f"model.w{rank}": values + step, f"optim.w{rank}.step": torch.tensor(step)}


def commit(store: CheckpointStore, step: int, attempt: int = 0) -> Checkpoint:
    """Commits a checkpoint in one process, without a process group."""
    writing = store.begin(step, attempt)
    files = write_tensors(state_of(step), writing, None, lambda size, count: None)
    return store.commit(writing, Manifest(step, files, {"tokens": 10 * step}, attempt=attempt))


def commit_together(store: CheckpointStore, step: int, attempt: int) -> None:
    """Commits one checkpoint from all ranks. Collective."""
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    writing = on_first(lambda: store.begin(step, attempt), group)
    files = write_tensors(state_of(step, rank), writing, group, lambda size, count: None)
    on_first(lambda: store.commit(writing, Manifest(step, files, attempt=attempt)), group)


def newest_good(store: CheckpointStore, attempt: int = 9) -> int | None:
    """Finds and loads the newest good checkpoint, checks its state, and returns its step or None. Collective."""
    group = dist.group.WORLD
    assert group is not None
    found = VerifiedSearch(store, group, True, 0.0, lambda bad, why: store.set_aside(bad, attempt) and None).newest()
    if found is None:
        return None
    step, rank = found.checkpoint.step, dist.get_rank()
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in state_of(0, rank).items()}
    with quiet():
        dcp.load(loaded, storage_reader=SafeReader(found.checkpoint.path, found.manifest), process_group=group)
    wanted = state_of(step, rank)
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted), f"not the state of step {step}"
    return step
