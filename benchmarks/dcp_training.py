"""A training as a careful PyTorch user writes it: DDP, torch.distributed.checkpoint and torchrun, nothing of hpc_train.

    torchrun --nproc-per-node=2 --max-restarts=9 -m benchmarks.dcp_training FOLDER STEPS

It saves every ``EVERY`` steps and continues from the newest checkpoint whose ``.metadata`` exists. At the end rank 0
writes the SHA-256 of the weights to FOLDER/weights. The faults of the plan in the environment are injected as in the
trainings of hpc_train (``tests.faults.injections``).
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset

from hpc_train.run.files import append_line
from hpc_train.run.requests import StopFlag
from tests.faults.injections import INJECTIONS, kill, read_what_never_comes
from tests.faults.plan import happened, read_plan

EVERY, KEPT, BATCH, WIDTH = 4, 2, 8, 16
TIMEOUT = timedelta(seconds=60)  # the default is 30 minutes


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def main(folder: str, steps: str) -> int:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = Path(folder, "checkpoints")
    first = _resume(checkpoints, model, optimizer)
    for step, batch in enumerate(_batches(first, int(steps)), start=first):
        _inject(folder, step)
        loss = (model(batch) - batch).square().mean() * _factor(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            append_line(Path(folder, "steps.jsonl"), {"process": os.getpid(), "time": time.time()})
        print(f"step {step}", flush=True)
        if (step + 1) % EVERY == 0:
            _save(checkpoints, step + 1, model, optimizer)
    if dist.get_rank() == 0:
        weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
        Path(folder, "weights").write_text(hashlib.sha256(weights).hexdigest())
    dist.destroy_process_group()
    return 0


def _batches(first: int, steps: int) -> Iterator[Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    samples = [range(step * BATCH + rank, (step + 1) * BATCH, ranks) for step in range(first, steps)]
    indices = [index for step in samples for index in step]
    yield from DataLoader(Subset(Samples(), indices), batch_size=BATCH // ranks, num_workers=1)


def _resume(checkpoints: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    found = sorted(path for path in checkpoints.glob("step-*") if (path / ".metadata").exists())
    if not found:
        return 0
    state: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=found[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(found[-1].name.removeprefix("step-"))


def _save(checkpoints: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=checkpoints / f"step-{step:08d}")
    if dist.get_rank() == 0:
        for old in sorted(checkpoints.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)


def _inject(folder: str, step: int) -> None:
    for number, fault in enumerate(read_plan()):
        mark = happened(folder, number)
        if fault.rank == dist.get_rank() and fault.step == step and not mark.exists():
            mark.write_text(str(time.time()))
            OWN.get(fault.kind, INJECTIONS.get(fault.kind, _nothing))(StopFlag())


def _factor(step: int) -> float:
    bad = any(fault.kind == "nan" and fault.step == step and fault.rank == dist.get_rank() for fault in read_plan())
    return float("nan") if bad else 1.0


def _nothing(stop: StopFlag) -> None:
    pass


def _hang_in_the_next_save(stop: StopFlag) -> None:
    os.fsync = lambda descriptor: read_what_never_comes()


def _full_disk_in_the_next_save(stop: StopFlag) -> None:
    sync = os.fsync

    def full(descriptor: int) -> None:
        os.fsync = sync
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = full  # type: ignore[assignment]


def _request(stop: StopFlag) -> None:
    kill(os.getppid(), signal.SIGTERM)


# faults that differ here: torchrun is the parent of its workers, and DCP calls os.fsync
OWN: dict[str, Callable[[StopFlag], None]] = {
    "agent": lambda stop: kill(os.getppid()),
    "request": _request,
    "storage_in_save": _hang_in_the_next_save,
    "disk": _full_disk_in_the_next_save,
}


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a loader process that a fault has killed must not decide the exit code
