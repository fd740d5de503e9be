"""Copies of a rank's tensors in host memory, so that training goes on while they are written. The memory is reused.

Of what several ranks hold one of them writes it, as the save's plan says. The plan is made in the background, after the
copies; it is the same for the same tensors, so from the second save on a rank copies only what it will write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostCopies:
    """Buffers for one snapshot; the next one overwrites them. They are pinned for tensors on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._planned: tuple[frozenset[str], frozenset[str]] | None = None  # of which names, this rank writes which

    @torch.no_grad()  # without it DTensors ask autograd for their shards
    def take(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies what this rank holds of ``state`` and will write, of a DTensor its shard; complete on return."""
        devices, names = set(), self._names(state)
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in names}
        for name in names:
            tensor = state[name]
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            self._buffer(name, local).copy_(local, non_blocking=True)
            if local.is_cuda:
                devices.add(local.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._buffers)

    def planned(self, state: Iterable[str], written: Iterable[str]) -> None:
        """Of a save of the names in ``state``, this rank writes ``written``."""
        self._planned = frozenset(state), frozenset(written)

    def forget_plan(self) -> None:
        """After a save that failed: perhaps other ranks hold other tensors now."""
        self._planned = None

    def _names(self, state: Mapping[str, Tensor]) -> Collection[str]:
        if self._planned is None or self._planned[0] != state.keys():
            return state.keys()
        return self._planned[1]

    def _buffer(self, name: str, local: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        return buffer
