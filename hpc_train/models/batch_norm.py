"""Normalizes batches under data parallelism: global statistics, the fused kernel, and checks of the batch size.

torch's ``SyncBatchNorm`` runs on accelerators only, and DDP refuses it elsewhere. The class here computes the same sums
with a differentiable all-reduce; on an accelerator the engine replaces it by torch's fused class.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hpc_train.config.schema import BatchConfig, DataConfig, StreamDataConfig
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout


class SyncBatchNorm(_BatchNorm):
    """Normalizes ``[micro, channels, ...]`` by the mean and variance over the micro-batches of all ranks of ``group``.
    ``join`` sets ``group`` to the data-parallel ranks; with None, only the values of this rank are used."""

    group: dist.ProcessGroup | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.group is None:
            return super().forward(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [1, -1] + [1] * (input.ndim - 2)
        wide = input.float() if input.dtype.itemsize < 4 else input
        # Every rank holds the same number of values. A second all-reduce computes the variance around the global mean,
        # because the difference of two large sums would lose digits.
        count = wide.numel() // wide.shape[1] * dist.get_world_size(self.group)
        mean = _Sum.apply(wide.sum(dim=axes), self.group) / count
        variance = _Sum.apply((wide - mean.view(shape)).square().sum(dim=axes), self.group) / count
        self._track(mean.detach(), variance.detach(), count)
        normal = (input - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accepts any number of dimensions after the channels."""

    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Updates the running statistics with the unbiased variance, as ``nn.BatchNorm2d`` does."""
        if not self.track_running_stats:
            return
        self.num_batches_tracked.add_(1)  # type: ignore[operator, union-attr]
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum  # type: ignore[arg-type]
        self.running_mean.lerp_(mean, rate)  # type: ignore[union-attr]
        self.running_var.lerp_(variance * count / max(1, count - 1), rate)  # type: ignore[union-attr]


class _Sum(torch.autograd.Function):
    """Adds up a tensor over the ranks of a group, and in the backward pass its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        dist.all_reduce(value, group=group)
        ctx.mark_dirty(value)
        return value

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def convert(module: nn.Module) -> nn.Module:
    """Replaces every batch normalization in ``module`` by a ``SyncBatchNorm``; names and values do not change."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        new = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        new.weight = module.weight
        new.bias = module.bias
        new.running_mean = module.running_mean
        new.running_var = module.running_var
        new.num_batches_tracked = module.num_batches_tracked
        new.train(module.training)
        return new
    for name, child in module.named_children():
        setattr(module, name, convert(child))
    return module


def has_batch_statistics(model: nn.Module) -> bool:
    """Returns whether the samples of a batch influence each other in ``model``."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def has_statistics(model: nn.Module) -> bool:
    """Returns whether ranks exchange the statistics of the samples that they compute."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    return any(isinstance(norm, _BatchNorm) or norm.track_running_stats for norm in norms)


def check_batch(batch: BatchConfig, data: DataConfig, layout: Layout) -> None:
    """Checks that no step contains padding, which would enter the batch statistics; raises UserError if the global
    batch does not divide over the ranks, or the last batches of an epoch or of a stream are padded."""
    size = batch.global_size
    slots = layout.dp * layout.micro_batches * layout.micro_size
    if slots != size:
        raise UserError(
            f"a global batch of {size} does not divide over {layout.dp} ranks x {layout.micro_batches} micro-batches: "
            f"{slots - size} padded samples would enter the batch statistics of the model",
            where="batch.global_size",
            fix=f"batch.global_size={slots}, or a model without BatchNorm",
        )
    if not batch.drop_last:
        raise UserError(
            "the last batch of an epoch is padded, and padding would enter the batch statistics of the model",
            where="batch.drop_last",
            fix="batch.drop_last=true",
        )
    if isinstance(data, StreamDataConfig) and not data.repeat:
        raise UserError(
            "the last batches of a stream are padded, and padding would enter the batch statistics of the model",
            where="data.repeat",
            fix="data.repeat=true, and train.steps=N to end the run",
        )


def is_synchronized(model: nn.Module) -> bool:
    """Returns whether every batch normalization of ``model`` is a ``SyncBatchNorm``."""
    return all(isinstance(module, SyncBatchNorm) for module in model.modules() if isinstance(module, _BatchNorm))


def join(model: nn.Module, device: torch.device, group: dist.ProcessGroup) -> None:
    """Makes each ``SyncBatchNorm`` of ``model`` compute over ``group``.

    On an accelerator, torch's class, which is a single kernel, replaces it.
    """
    ours = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    if not ours or dist.get_world_size(group) == 1:
        return
    for norm in ours:
        norm.group = group
    if device.type != "cpu":
        nn.SyncBatchNorm.convert_sync_batchnorm(model, group)


def keep_weights_fp32(model: nn.Module) -> None:
    """Makes each batch normalization cast weights in bf16 or fp16 to fp32, the dtype of its running statistics.

    The kernels refuse weights in a narrower dtype, which ZeRO and ``precision.weights=bf16`` provide.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            module.forward = MethodType(_with_fp32_weights, module)  # type: ignore[method-assign]


def _with_fp32_weights(norm: _BatchNorm, input: Tensor) -> Tensor:
    narrow = {name: value for name, value in norm.named_parameters(recurse=False) if value.itemsize < 4}
    if narrow:  # calls this function again
        return functional_call(norm, {name: value.float() for name, value in narrow.items()}, (input,))
    return type(norm).forward(norm, input)


class RunningStatistics:
    """Averages the running statistics of ``parts`` over the replicas, and restores the statistics of a skipped step.

    Otherwise, one sample that is not finite would make every later evaluation, on every rank, not finite.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        norms = [module for part in parts for module in part.modules() if isinstance(module, _NormBase)]
        self._local = [norm for norm in norms if not isinstance(norm, SyncBatchNorm | nn.SyncBatchNorm)]
        self._of_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in (buffer for norm in norms for buffer in norm.buffers(recurse=False)):
            self._of_type.setdefault(buffer.dtype, []).append(buffer.view(-1))
        self._before: dict[torch.dtype, Tensor] = {}

    def begin(self) -> None:
        """Remembers the statistics before a training step."""
        self._before = {dtype: torch.cat(buffers) for dtype, buffers in self._of_type.items()}

    def average(self, group: dist.ProcessGroup) -> None:
        """Averages what each rank computes from its own samples, i.e. without ``SyncBatchNorm``, over ``group``.

        Thus checkpoints and evaluation see one model.
        """
        ranks = dist.get_world_size(group)
        statistics = [
            buffer
            for norm in self._local
            if norm.training  # a mean of equal values may differ from them in its last bit
            for buffer in (norm.running_mean, norm.running_var)
            if buffer is not None
        ]
        if statistics and ranks > 1:
            flat = torch.cat(statistics) / ranks
            dist.all_reduce(flat, group=group)
            _fill(statistics, flat)

    def commit(self, finite: Tensor) -> None:
        """Restores the statistics of ``begin`` unless ``finite``, a scalar bool on the device, is true."""
        for dtype, before in self._before.items():
            buffers = self._of_type[dtype]
            _fill(buffers, torch.where(finite, torch.cat(buffers), before))
        self._before = {}


def _fill(buffers: list[Tensor], flat: Tensor) -> None:
    torch._foreach_copy_(buffers, list(flat.split([buffer.numel() for buffer in buffers])))
