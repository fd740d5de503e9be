"""A model that is disturbed in one of its forward passes, and a hook that kills a rank."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.hooks import Hook, HookContext

FOR_EVER_S = 5000.0
CYCLES_PER_S = 2e9  # of a GPU's clock, at most


class Disturbed(nn.Module):
    """Computes next-token logits; in its ``call``-th forward pass ``rank`` is disturbed, once in the life of a run.

    Args:
        how: a name of ``DISTURBANCES``.
        rank: the rank that is disturbed; -1 for every rank.
        once: a file that exists afterwards, so that a restarted run is not disturbed again; what the disturbance has
            to tell goes into it. With every rank, the name of each file ends with the rank.
    """

    def __init__(
        self, how: str, once: str, call: int = 4, rank: int = 0, seconds: float = FOR_EVER_S, vocab_size: int = 256
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, 64)
        self.output = nn.Linear(64, vocab_size)
        self.how, self.once, self.call, self.rank, self.seconds = how, Path(once), call, rank, seconds
        self.calls = 0
        self.collections: list[int] = []  # the number of forward passes before each full garbage collection
        if how == "tell":
            gc.callbacks.append(self._note_collection)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call and self.rank in (-1, dist.get_rank()) and not self.file.exists():
            self.file.touch()
            DISTURBANCES[self.how](self, inputs)
        logits: Tensor = self.output(self.table(inputs))
        return logits

    @property
    def file(self) -> Path:
        return told_by(self.once, dist.get_rank()) if self.rank == -1 else self.once

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2 and self.calls:
            self.collections.append(self.calls)


def told_by(once: Path, rank: int) -> Path:
    """Returns the file of one of all ranks."""
    return once.with_name(f"{once.name}-{rank}")


def _kill(model: Disturbed, inputs: Tensor) -> None:
    model.file.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def _stall(model: Disturbed, inputs: Tensor) -> None:
    """Occupies the GPU with a kernel that spins; on the CPU the process sleeps."""
    if inputs.is_cuda:
        torch.cuda._sleep(int(model.seconds * CYCLES_PER_S))
    else:
        time.sleep(model.seconds)


def _stall_then_hang(model: Disturbed, inputs: Tensor) -> None:
    """Stalls, and four forward passes later for ever, with a collective queued behind the kernel that spins.

    On the CPU the other ranks wait for this one in a collective.
    """
    if model.seconds < FOR_EVER_S:
        _stall(model, inputs)
        model.call, model.seconds = model.call + 4, FOR_EVER_S
        model.file.unlink()
        return
    _stall(model, inputs)
    dist.all_reduce(torch.ones(1, device=inputs.device))


def _read_out_of_bounds(model: Disturbed, inputs: Tensor) -> None:
    """An embedding beyond its table: an assertion of the kernel on a GPU, an exception on the CPU."""
    model.table(inputs + 1_000_000).sum().item()


def _lose_memory(model: Disturbed, inputs: Tensor) -> None:
    """Raises what torch raises for a GPU with an uncorrectable memory error."""
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def _tell(model: Disturbed, inputs: Tensor) -> None:
    """Writes what is set in the process of a worker."""
    import resource

    facts: dict[str, Any] = {
        "device": str(inputs.device),
        "pid": os.getpid(),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
        "sockets": sum(_link(entry).startswith("socket:") for entry in Path("/proc/self/fd").iterdir()),
        "collector": gc.isenabled(),
        "collections": model.collections,
        "gpu": f"GPU-{torch.cuda.get_device_properties(inputs.device).uuid}" if inputs.is_cuda else "",
        "expandable": [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()] if inputs.is_cuda else [],
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("CUDA", "NCCL", "TORCH"))}
        | {name: os.environ[name] for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if name in os.environ},
        "error": _product_error(inputs.device),
    }
    model.file.write_text(json.dumps(facts))


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _product_error(device: torch.device) -> float:
    """Returns the largest error of an fp32 matrix product, relative to its largest element."""
    left, right = (torch.randn(512, 512, device=device) for _ in range(2))
    exact = left.double() @ right.double()
    return float(((left @ right).double() - exact).abs().max() / exact.abs().max())


DISTURBANCES: dict[str, Callable[[Disturbed, Tensor], None]] = {
    "kill": _kill,
    "stall, then hang": _stall_then_hang,
    "read out of bounds": _read_out_of_bounds,
    "lose memory": _lose_memory,
    "tell": _tell,
}


def disturbed(how: str, once: Path, **arguments: float) -> list[str]:
    """Returns the overrides of a training with this model."""
    given = {"how": f"'{how}'", "once": str(once), **arguments}
    target = ["model=custom", "model._target_=gpu_checks.models.Disturbed", "model.class_dim=last"]
    return [*target, *(f"+model.args.{name}={value}" for name, value in given.items())]


class Killer(Hook):
    """Kills the process of ``rank`` after the step ``at``, once in the life of a run: then the file ``once`` exists."""

    def __init__(self, once: str, at: int, rank: int) -> None:
        self.once = Path(once)
        self.at = at
        self.rank = rank

    def step(self, context: HookContext) -> None:
        if context.step == self.at and context.rank == self.rank and not self.once.exists():
            self.once.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def killed(once: Path, at: int, rank: int) -> list[str]:
    """Returns the overrides of a training with this hook."""
    arguments = {"once": once, "at": at, "rank": rank}
    return [
        "+hooks.killer._target_=gpu_checks.models.Killer",
        *(f"+hooks.killer.args.{k}={v}" for k, v in arguments.items()),
    ]
