"""Keeps the buffers that a forward pass changes equal on all replicas (``train.buffers``).

Each rank sees its own samples, so a codebook, a queue or a running mean differs between the ranks after one step. Batch
statistics are averaged by ``models/batch_norm.py`` and are left alone here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

REFUSE, FIRST_RANK, MEAN = "refuse", "rank0", "mean"  # the values of ``train.buffers``


class SharedBuffers:
    """Gives the buffers of ``parts`` one value on all ranks of ``group``, after each step.

    Args:
        policy: the value of ``train.buffers``. ``rank0`` takes the values of the first rank, as DDP does before a
            forward pass, ``mean`` those of buffers of integers, and the mean over the ranks of the others.
    """

    def __init__(self, parts: Iterable[nn.Module], policy: str, group: dist.ProcessGroup) -> None:
        self._policy = policy
        self._group = group
        shares = policy != REFUSE and dist.get_world_size(group) > 1
        modules = [module for part in parts for module in part.modules()] if shares else []
        self._modules = [module for module in modules if not isinstance(module, _NormBase)]

    def share(self) -> None:
        """Makes the buffers equal. Collective; does nothing with the policy ``refuse``."""
        if self._modules:
            self._share_all()

    @torch.no_grad()
    def _share_all(self) -> None:
        of_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for module in self._modules:
            for buffer in module._buffers.values():
                if buffer is not None and buffer.numel():
                    of_type.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for (dtype, _), buffers in of_type.items():
            self._share(buffers, average=self._policy == MEAN and dtype.is_floating_point)

    def _share(self, buffers: Sequence[Tensor], average: bool) -> None:
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        if average:
            wide = flat.float() if flat.itemsize < 4 else flat
            dist.all_reduce(wide, group=self._group)
            flat = (wide / dist.get_world_size(self._group)).to(flat.dtype)
        else:
            dist.broadcast(flat, group=self._group, group_src=0)
        for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))
