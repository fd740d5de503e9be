"""Copies of a rank's tensors in host memory, so that training goes on while they are written. The memory is reused."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostCopies:
    """Buffers for one snapshot; the next one overwrites them. They are pinned for tensors on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies what this rank holds of ``state``, of a DTensor its shard. The copies are complete on return."""
        devices = set()
        for name, tensor in state.items():
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            self._buffer(name, local).copy_(local, non_blocking=True)
            if local.is_cuda:
                devices.add(local.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._buffers[name] for name in state}

    def _buffer(self, name: str, local: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        return buffer
