"""Adapts a metric of torchmetrics: its states are added up over micro-batches and ranks like the sums of any metric."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_train.data.dataset import IGNORED
from hpc_train.errors import UserError
from hpc_train.train.metrics.metric import Metric


class TorchMetric(Metric):
    """Feeds ``metric`` with predictions ``[n, ...]`` and targets ``[n]`` without padding.

    Args:
        where: the config key of the metric.

    Raises:
        UserError: a state of the metric is not a tensor whose ``dist_reduce_fx`` is sum.
    """

    def __init__(self, metric: Any, where: str) -> None:
        metric.sync_on_compute = False  # the states are added up over the ranks here
        self._metric = metric
        self._defaults = {name: value for name, value in metric._defaults.items() if isinstance(value, Tensor)}
        other = [
            name
            for name in metric._defaults
            if name not in self._defaults or getattr(metric._reductions[name], "__name__", "") != "dim_zero_sum"
        ]
        if other or not self._defaults:
            states = f"its state {other[0]} is not a sum" if other else "it has no states"
            raise UserError(
                f"{type(metric).__name__} cannot be added up over ranks: {states}",
                where=f"{where}._target_",
                fix="a metric whose states all have dist_reduce_fx='sum', or a subclass of hpc_train.metrics.Metric",
            )

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._metric.to(targets.device)
        self._metric.reset()
        predictions, labels = _without_padding(outputs, targets)
        if labels.numel():
            self._metric.update(predictions, labels)
        states = [getattr(self._metric, name) - default.to(targets.device) for name, default in self._defaults.items()]
        return torch.cat([state.to(torch.float64).reshape(-1) for state in states])

    def value(self, sums: Tensor) -> float | Mapping[str, float]:
        self._metric.to("cpu")
        self._metric.reset()
        parts = sums.split([default.numel() for default in self._defaults.values()])
        for (name, default), part in zip(self._defaults.items(), parts, strict=True):
            value = part.view(default.shape) + default.cpu()
            setattr(self._metric, name, value if default.is_floating_point() else value.round().to(default.dtype))
        with warnings.catch_warnings():  # it has not seen the updates of other ranks
            warnings.filterwarnings("ignore", message=".*before the .*update.* method")
            found = self._metric.compute()
        if isinstance(found, Mapping):
            return {str(key): float(value) for key, value in found.items()}
        if found.numel() == 1:
            return float(found)
        return {str(index): float(value) for index, value in enumerate(found.flatten())}


def _without_padding(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Removes the targets that are ``IGNORED`` and their outputs, which may have the classes in one more dim."""
    if outputs.ndim == targets.ndim + 1 and outputs.shape[:-1] != targets.shape:
        outputs = outputs.movedim(1, -1)
    if outputs.shape[: targets.ndim] != targets.shape:
        raise ValueError(f"outputs of shape {[*outputs.shape]} do not fit targets of shape {[*targets.shape]}")
    counts = targets != IGNORED
    return outputs[counts], targets[counts]
