"""Finds the parameters that a forward pass writes to, and keeps the buffers that it changes equal on all replicas.

Teachers, clipped weights and normalized prototypes are such parameters. ZeRO computes with copies of the parameters
that it frees after the pass, so what is written to a copy is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from hpc_train.models.model import canonical_name

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def watching_writes(parts: Iterable[nn.Module]) -> Iterator[set[str]]:
    """Collects the names of the parameters to which the forward passes in this context write.

    Do not use it with compiled code, which would be compiled with the hooks.
    """
    written: set[str] = set()
    with ExitStack() as hooks:
        for part in parts:
            for prefix, module in part.named_modules():
                is_gathered = isinstance(module, FSDPModule)
                if module is part or is_gathered:
                    _watch(module, prefix, written, hooks)
        yield written


def _watch(module: nn.Module, prefix: str, written: set[str], hooks: ExitStack) -> None:
    before: list[tuple[str, Tensor, tuple[int, int] | None]] = []

    def begin(*_: Any) -> None:
        # the parameters that are whole now; inner groups are gathered later
        before[:] = [
            (name, parameter, _state(parameter))
            for name, parameter in module.named_parameters(prefix)
            if not isinstance(parameter, DTensor)
        ]

    def end(*_: Any) -> None:
        for name, parameter, state in before:
            if state is not None and _state(parameter) not in (None, state):
                written.add(canonical_name(name))
        before.clear()

    # inside of FSDP's hooks, which gather the parameters and free them
    hooks.callback(module.register_forward_pre_hook(begin).remove)
    hooks.callback(module.register_forward_hook(end, prepend=True).remove)


def _state(tensor: Tensor) -> tuple[int, int] | None:
    """Returns what a write changes; None if FSDP has freed the memory of ``tensor``."""
    is_freed = tensor.numel() > 0 and tensor.untyped_storage().size() == 0
    if is_freed:
        return None
    return tensor._version, checksum(tensor)


def checksum(tensor: Tensor) -> int:
    """Returns the sum of the bits of the elements, which a write through ``.data`` changes, unlike the version."""
    held = tensor.detach().contiguous().reshape(-1)
    return int(held.view(BITS[held.itemsize]).sum(dtype=torch.int64))


def written_in_lookups(parts: Iterable[nn.Module]) -> list[str]:
    """Returns the embeddings that scale the rows which they look up (``max_norm``), wherever their norms exceed it."""
    return [
        canonical_name(f"{name}.weight")
        for part in parts
        for name, module in part.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]


REFUSE, FIRST_RANK, MEAN = "refuse", "rank0", "mean"  # the values of ``train.buffers``


class SharedBuffers:
    """Gives the buffers of ``parts`` one value on all ranks of ``group``, after each step (``train.buffers``).

    Each rank sees its own samples, so a codebook, a queue or a running mean differs between the ranks after one step.
    Batch statistics are averaged by ``models/batch_norm.py`` and are left alone here.

    Args:
        policy: the value of ``train.buffers``. ``rank0`` takes the values of the first rank, as DDP does before a
            forward pass, ``mean`` takes the values of the first rank for integer buffers, and the mean over the ranks
            for all others.
    """

    def __init__(self, parts: Iterable[nn.Module], policy: str, group: dist.ProcessGroup) -> None:
        self._policy = policy
        self._group = group
        shares = policy != REFUSE and dist.get_world_size(group) > 1
        modules = [module for part in parts for module in part.modules()] if shares else []
        self._modules = [module for module in modules if not isinstance(module, _NormBase)]

    @torch.no_grad()
    def share(self) -> None:
        """Makes the buffers equal. Collective; does nothing with the policy ``refuse``."""
        by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for module in self._modules:
            for buffer in module._buffers.values():
                if buffer is not None and buffer.numel():
                    by_type.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for (dtype, _), buffers in by_type.items():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            if self._policy == MEAN and dtype.is_floating_point:
                wide = flat.float() if dtype.itemsize < 4 else flat  # no dtype of 8 bits can be promoted
                dist.all_reduce(wide, group=self._group)
                flat = (wide / dist.get_world_size(self._group)).to(dtype)
            else:
                dist.broadcast(flat, group=self._group, group_src=0)
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))
