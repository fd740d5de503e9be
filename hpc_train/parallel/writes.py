"""Finds the parameters that a forward pass writes to: teachers, clipped weights, normalized prototypes.

Autograd and the optimizer write between the passes, the forward pass of most models never does. ZeRO computes with
copies of the parameters that it frees after the pass, so what is written to a copy is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpc_train.models.model import canonical_name

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def watching_writes(parts: Iterable[nn.Module]) -> Iterator[set[str]]:
    """Collects the names of the parameters to which the forward passes in this context write.

    Not to be used with compiled code, which would be compiled with the hooks.
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
        # those that are whole now: the parameters of inner groups are gathered later
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
    return int(held.view(_BITS[held.itemsize]).sum(dtype=torch.int64))


def written_in_lookups(parts: Iterable[nn.Module]) -> list[str]:
    """Returns the embeddings that scale the rows which they look up (``max_norm``), wherever their norms exceed it."""
    return [
        canonical_name(f"{name}.weight")
        for part in parts
        for name, module in part.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]
