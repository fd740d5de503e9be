"""Any ``nn.Module`` and a loss under the forward contract of a ``Model``, without the three parts.

Such a model cannot be cut into stages; it trains under the data-parallel strategies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpc_train.errors import UserError
from hpc_train.models.batch_norm import SyncBatchNorm
from hpc_train.models.layer import count_correct, cross_entropy, squared_error

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]


class WrappedModel(nn.Module):
    """Runs ``module(inputs)`` and sums its loss.

    The wrapper shares the module's own tables of parameters, buffers and children instead of holding it as a child: so
    names have no prefix, and checkpoints fit the bare module.

    Args:
        module: what to train. A method ``loss(outputs, targets) -> (sum, count)`` of its own replaces ``loss``; what
            it returns is divided as ``Head.loss`` says, and the count may also be a plain number.
        loss: ``cross_entropy`` (int64 targets; classes in dim 1, or in the last dim where that fits the targets) or
            ``mse`` (targets of any number format and the shape of the outputs).

    Raises:
        UserError: there is no such loss.
    """

    def __init__(self, module: nn.Module, loss: str) -> None:
        super().__init__()
        if loss not in _LOSSES:
            raise UserError(f"unknown loss {loss!r}", where="model.loss", fix=" or ".join(_LOSSES))
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._module = (module,)  # in a tuple, so that it is not registered as a child
        own = getattr(module, "loss", None)
        self.own_count = callable(own)  # see ``Head.own_count``; the built-in losses count the targets
        self._loss: Loss = own if callable(own) else _LOSSES[loss]
        self._classifies = not callable(own) and loss == "cross_entropy"
        if self.has_batch_statistics and not self._synchronised and _first_of_several():
            warnings.warn(
                "the model normalises by batch statistics, which are of each rank's own micro-batch: results depend on "
                "the number of ranks (model.sync_batch_norm=true takes them over all ranks)",
                stacklevel=2,
            )

    @property
    def has_batch_statistics(self) -> bool:
        """Whether samples of a batch influence each other, so that padding is not harmless."""
        return any(isinstance(part, _BatchNorm) for part in self._module[0].modules())

    @property
    def _synchronised(self) -> bool:
        norms = [part for part in self._module[0].modules() if isinstance(part, _BatchNorm)]
        return all(isinstance(norm, SyncBatchNorm) for norm in norms)

    def train(self, mode: bool = True) -> WrappedModel:
        super().train(mode)
        self._module[0].training = mode
        return self

    def forward(
        self, inputs: Tensor, context: Mapping[str, Tensor], targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
        """As ``Model.forward`` with all parts present; ``context`` goes to the module as keyword arguments."""
        outputs = self._module[0](inputs, **context)
        if targets is None:
            return outputs
        if self._classifies:
            outputs = _classes_last(outputs, targets)
        total, count = self._loss(outputs, targets)
        if not isinstance(count, Tensor):
            count = total.new_full((), count, dtype=torch.float64)
        if self.training:
            return total, count
        return (total, count, count_correct(outputs, targets) if self._classifies else None)


def _first_of_several() -> bool:
    """Whether this is rank 0 of several: there it says what concerns all."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0


def _classes_last(outputs: Tensor, targets: Tensor) -> Tensor:
    """Logits with the classes in the last dim, from ``[micro, classes, ...]`` or ``[micro, ..., classes]``."""
    if outputs.ndim == targets.ndim + 1:
        if outputs.shape[:1] + outputs.shape[2:] == targets.shape:
            return outputs.movedim(1, -1)
        if outputs.shape[:-1] == targets.shape:
            return outputs
    raise UserError(
        f"outputs of shape {tuple(outputs.shape)} are no class scores for targets of shape {tuple(targets.shape)}",
        where="model.loss",
        fix="a model that returns [micro, classes, ...] or [micro, ..., classes], or model.loss=mse",
    )


def _mse(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.shape != targets.shape:
        raise UserError(
            f"outputs of shape {tuple(outputs.shape)} against targets of shape {tuple(targets.shape)}",
            where="model.loss",
            fix="mse needs equal shapes",
        )
    return squared_error(outputs, targets)


_LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": _mse}
