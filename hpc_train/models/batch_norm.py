"""Batch normalisation with statistics over all ranks, on the CPU as well.

torch's ``SyncBatchNorm`` runs on accelerators only, and DDP refuses it elsewhere. This one forms the same sums with a
differentiable all-reduce; the engine replaces it by torch's fused one where there is an accelerator.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """Normalises ``[micro, channels, ...]`` by the mean and variance over the micro-batches of all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [1, -1] + [1] * (input.ndim - 2)
        mean, variance, count = _global_moments(input.float() if input.dtype.itemsize < 4 else input, axes)
        self._track(mean.detach(), variance.detach(), count)
        normal = (input - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dims behind the channels."""

    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Moves the running statistics as ``nn.BatchNorm2d`` does: with the unbiased variance."""
        if not self.track_running_stats:
            return
        self.num_batches_tracked.add_(1)  # type: ignore[operator, union-attr]
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum  # type: ignore[arg-type]
        self.running_mean.lerp_(mean, rate)  # type: ignore[union-attr]
        self.running_var.lerp_(variance * count / max(1, count - 1), rate)  # type: ignore[union-attr]


def _global_moments(values: Tensor, axes: list[int]) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance per channel over all ranks, and the number of values of a channel.

    Every rank holds equally many values. The variance is taken around the global mean, in a second all-reduce, because
    the difference of two large sums loses digits.
    """
    count = values.numel() // values.shape[1] * dist.get_world_size()
    mean = all_reduce(values.sum(dim=axes)) / count
    shape = [1, -1] + [1] * (values.ndim - 2)
    variance = all_reduce((values - mean.view(shape)).square().sum(dim=axes)) / count
    return mean, variance, count


def convert(module: nn.Module) -> nn.Module:
    """Replaces every batch normalisation of ``module`` by one over all ranks; names and values stay."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return _converted(module)
    for name, child in module.named_children():
        setattr(module, name, convert(child))
    return module


def _converted(norm: _BatchNorm) -> SyncBatchNorm:
    new = SyncBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    new.weight, new.bias = norm.weight, norm.bias
    new.running_mean, new.running_var = norm.running_mean, norm.running_var
    new.num_batches_tracked = norm.num_batches_tracked
    new.train(norm.training)
    return new
