"""Computes metrics of evaluations from sums that are added up over micro-batches and ranks.

A metric sees the outputs and targets of each micro-batch on the ranks that compute the loss: those of the last pipeline
stage, where each sample of the evaluation set appears once and the rest is padding. Tensor-parallel ranks hold equal
outputs, so only those of the first are added. The sums are in fp64 and are reduced once per evaluation, so the value is
that of one process under every layout.

The outputs are those from which the model computes its loss. With ``train.loss_chunks`` only the logits of one chunk of
the sequence exist at a time, and a metric is called once for each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.import_path import locate
from hpc_train.config.schema import TargetConfig
from hpc_train.errors import UserError
from hpc_train.models.model import Model
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.mesh import Mesh
from hpc_train.train.metrics.calls import named_errors
from hpc_train.train.metrics.metric import Mean, Metric
from hpc_train.train.metrics.torchmetrics_adapter import TorchMetric


def build_metric(name: str, config: TargetConfig) -> Metric:
    """Builds a metric: a class with ``sums`` and ``value``, a function ``(outputs, targets) -> (sum, count)``, or a
    metric of torchmetrics.

    Raises:
        UserError: the target cannot be imported or called, or is none of these.
    """
    where = f"metrics.{name}"
    target = locate(config._target_, f"{where}._target_")
    if not isinstance(target, type):
        return Mean(partial(target, **config.args))
    with named_errors(f"metric {name} ({config._target_})", "its constructor"):
        built = target(**config.args)
    if callable(getattr(built, "sums", None)) and callable(getattr(built, "value", None)):
        return built  # type: ignore[no-any-return]
    if any(base.__module__.startswith("torchmetrics.") for base in target.__mro__):
        return TorchMetric(built, where)
    raise UserError(
        f"{config._target_} has no methods sums and value",
        where=f"{where}._target_",
        fix="a subclass of hpc_train.metrics.Metric, a function (outputs, targets) -> (sum, count), or a metric of "
        "torchmetrics",
    )


class MetricSums:
    """Adds up the sums of ``metrics`` (name -> config) during one evaluation. All ranks use it together."""

    def __init__(self, metrics: Mapping[str, TargetConfig], mesh: Mesh) -> None:
        self._mesh = mesh
        self._targets = {name: config._target_ for name, config in metrics.items()}
        self._metrics = {name: build_metric(name, config) for name, config in metrics.items()}
        self._sums: dict[str, Tensor] = {}

    @contextmanager
    def watching(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        """Starts from zero and adds up the evaluations of ``parts`` in this context; does nothing without metrics."""
        self._sums.clear()
        with ExitStack() as stack:
            for part in parts if self._metrics else ():
                holder = part.head if isinstance(part, Model) else part
                if holder is not None:
                    stack.enter_context(_observed(holder, self._add))
            yield

    @torch._disable_dynamo
    def _add(self, outputs: Any, targets: Tensor) -> None:
        for name, metric in self._metrics.items():
            with named_errors(self._title(name), "sums()"):
                found = _flat(metric.sums(outputs, targets), targets.device)
                known = self._sums.get(name)
                self._sums[name] = found if known is None else known + found

    def read(self) -> dict[str, float]:
        """Returns the values over all samples, the same on every rank. Collective.

        Raises:
            UserError: the model has shown no outputs.
        """
        if not self._metrics:
            return {}
        values: dict[str, float] = {}
        for name, sums in self._over_ranks().items():
            with named_errors(self._title(name), "value()"):
                found = self._metrics[name].value(sums)
                if isinstance(found, Mapping):
                    values |= {f"{name}_{key}": float(value) for key, value in found.items()}
                else:
                    values[name] = float(found)
        return values

    def _over_ranks(self) -> dict[str, Tensor]:
        """Returns the sums over all ranks on the CPU; ranks without the head add zeros."""
        sizes = torch.tensor([self._sums[name].numel() if name in self._sums else 0 for name in self._metrics])
        alone = self._mesh.layout.world_size == 1
        if not alone:
            dist.all_reduce(sizes, dist.ReduceOp.MAX, group=self._mesh.control)
        if not sizes.all():
            raise UserError(
                "metrics need the outputs of the model, but its forward pass shows none in evaluation mode",
                where="metrics",
                fix="let the head compute its loss in Head.loss, or remove the metrics",
            )
        counts = self._mesh.tp_rank == 0
        parts = [
            self._sums[name] * counts if name in self._sums else torch.zeros(size, dtype=torch.float64)
            for name, size in zip(self._metrics, sizes.tolist(), strict=True)
        ]
        together = torch.cat([part.to(self._mesh.device) for part in parts])
        if not alone:
            dist.all_reduce(together)
        return dict(zip(self._metrics, together.cpu().split(sizes.tolist()), strict=True))

    def _title(self, name: str) -> str:
        return f"metric {name} ({self._targets[name]})"


@contextmanager
def _observed(holder: Any, observe: Callable[[Any, Tensor], None]) -> Iterator[None]:
    """Shows ``observe`` the outputs and targets of ``holder``, a ``Head`` or ``WrappedModel``, in this context."""
    assert isinstance(holder, nn.Module | WrappedModel)
    holder.observe = observe  # type: ignore[assignment]
    try:
        yield
    finally:
        holder.observe = None  # type: ignore[assignment]


def _flat(found: Any, device: torch.device) -> Tensor:
    """Returns the sums of a metric as a 1-dimensional fp64 tensor without gradients."""
    if isinstance(found, Tensor):
        return found.detach().to(torch.float64).reshape(-1)
    values = [torch.as_tensor(value, device=device).detach().to(torch.float64).reshape(-1) for value in found]
    return torch.cat(values)
