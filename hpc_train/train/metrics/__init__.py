"""Computes metrics of evaluations from sums that are added up over micro-batches and ranks.

A metric gets the outputs and targets of each micro-batch on the ranks that compute the loss (the last pipeline stage).
Each sample of the evaluation set appears once; all other rows are padding. Tensor-parallel ranks hold equal outputs, so
only the outputs of the first rank are added. The sums are in fp64 and are reduced once per evaluation, so under every
layout the value is the same as in one process.

The outputs are the tensors from which the model computes its loss. With ``train.loss_chunks``, only the logits of one
chunk of the sequence exist at a time, and a metric is called once for each chunk.
"""

from __future__ import annotations

import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.import_path import locate
from hpc_train.config.schema import TargetConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.errors import UserError
from hpc_train.models.model import Model
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.engine import sum_over_ranks
from hpc_train.parallel.local_replicas import across_replicas
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.exits import CollectiveFailure


class Metric(ABC):
    """Base class of metrics that are functions of sums over samples. A subclass needs no attributes except its
    arguments."""

    @abstractmethod
    def sums(self, outputs: Any, targets: Tensor) -> Tensor | Sequence[Tensor | float]:
        """Returns the sums of one micro-batch: a tensor, or several numbers, of the same size in every call.

        Args:
            outputs: the outputs that the model's loss gets: logits with the classes in the last dim, or the outputs of
                a custom module.
            targets: the targets of the loss. Targets of -100 are padding and must not contribute.
        """

    @abstractmethod
    def value(self, sums: Tensor) -> float | Mapping[str, float]:
        """Returns the value of the metric for the sums over all samples, a 1-dimensional fp64 tensor on the CPU. A
        mapping returns several values, whose keys are appended to the name of the metric."""


class Mean(Metric):
    """Computes the mean of a function that returns ``(sum, count)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def sums(self, outputs: Any, targets: Tensor) -> Tensor | Sequence[Tensor | float]:
        sums: Tensor | Sequence[Tensor | float] = self._function(outputs, targets)
        return sums

    def value(self, sums: Tensor) -> float:
        if sums.numel() != 2:
            raise ValueError(f"the function returned {sums.numel()} numbers, not a sum and a count")
        return float(sums[0] / sums[1]) if sums[1] else float("nan")


class TorchMetric(Metric):
    """Feeds ``metric`` with predictions ``[n, ...]`` and targets ``[n]`` without padding.

    Args:
        where: the config key of the metric.

    Raises:
        UserError: a state of the metric is not a tensor whose ``dist_reduce_fx`` is sum.
    """

    def __init__(self, metric: Any, where: str) -> None:
        metric.sync_on_compute = False  # this class adds up the states over the ranks
        self._metric = metric
        self._defaults = {name: value for name, value in metric._defaults.items() if isinstance(value, Tensor)}
        problem = "it has no states" if not self._defaults else None
        for name in metric._defaults:
            if name not in self._defaults or getattr(metric._reductions[name], "__name__", "") != "dim_zero_sum":
                problem = f"its state {name} is not a sum"
                break
        if problem is not None:
            raise UserError(
                f"{type(metric).__name__} cannot be added up over ranks: {problem}",
                where=f"{where}._target_",
                fix="a metric whose states all have dist_reduce_fx='sum', or a subclass of hpc_train.metrics.Metric",
            )

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._metric.to(targets.device)
        self._metric.reset()
        if outputs.ndim == targets.ndim + 1 and outputs.shape[:-1] != targets.shape:
            outputs = outputs.movedim(1, -1)  # the dim of the classes
        if outputs.shape[: targets.ndim] != targets.shape:
            raise ValueError(f"outputs of shape {[*outputs.shape]} do not fit targets of shape {[*targets.shape]}")
        counts = targets != IGNORED
        if counts.any():
            self._metric.update(outputs[counts], targets[counts])
        states = [getattr(self._metric, name) - default.to(targets.device) for name, default in self._defaults.items()]
        return torch.cat([state.to(torch.float64).reshape(-1) for state in states])

    def value(self, sums: Tensor) -> float | Mapping[str, float]:
        self._metric.to("cpu")
        self._metric.reset()
        parts = sums.split([default.numel() for default in self._defaults.values()])
        for (name, default), part in zip(self._defaults.items(), parts, strict=True):
            value = part.view(default.shape) + default.cpu()
            setattr(self._metric, name, value if default.is_floating_point() else value.round().to(default.dtype))
        with warnings.catch_warnings():  # the metric itself has no updates from other ranks
            warnings.filterwarnings("ignore", message=".*before the .*update.* method")
            values = self._metric.compute()
        if isinstance(values, Mapping):
            return {str(key): float(value) for key, value in values.items()}
        if values.numel() == 1:
            return float(values)
        return {str(index): float(value) for index, value in enumerate(values.flatten())}


def build_metric(name: str, config: TargetConfig) -> Metric:
    """Builds a metric: a class with ``sums`` and ``value``, a function ``(outputs, targets) -> (sum, count)``, or a
    metric of torchmetrics.

    Raises:
        UserError: the target cannot be imported or called, or is not a metric.
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
    """Adds up the sums of ``metrics`` (name -> config) during an evaluation. All ranks use it together."""

    def __init__(self, metrics: Mapping[str, TargetConfig], mesh: Mesh) -> None:
        self._mesh = mesh
        self._targets = {name: config._target_ for name, config in metrics.items()}
        self._metrics = {name: build_metric(name, config) for name, config in metrics.items()}
        self._sums: dict[str, Tensor] = {}

    def go_on(self, mesh: Mesh) -> MetricSums:
        """Returns the sums over the replicas that are left, which ``mesh`` has."""
        left = copy(self)
        left._mesh = mesh
        return left

    @contextmanager
    def watching(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        """Starts from zero and adds up the evaluations of ``parts`` in this context; does nothing without metrics."""
        self._sums.clear()
        with ExitStack() as stack:
            for part in parts if self._metrics else ():
                holder = part.head if isinstance(part, Model) else part
                if holder is not None:
                    assert isinstance(holder, nn.Module | WrappedModel)
                    holder.observe = self._add  # type: ignore[assignment]
                    stack.callback(setattr, holder, "observe", None)
            yield

    @torch._disable_dynamo
    def _add(self, outputs: Any, targets: Tensor) -> None:
        for name, metric in self._metrics.items():
            with named_errors(self._title(name), "sums()"):
                sums = metric.sums(outputs, targets)
                if not isinstance(sums, Tensor):
                    parts = [torch.as_tensor(value, device=targets.device) for value in sums]
                    sums = torch.cat([part.to(torch.float64).reshape(-1) for part in parts])
                added = sums.detach().to(torch.float64).reshape(-1)
                if name in self._sums:
                    added = self._sums[name] + added
                self._sums[name] = added

    def read(self) -> dict[str, float]:
        """Returns the values over all samples, the same on every rank. Collective.

        Raises:
            UserError: the model has provided no outputs.
        """
        if not self._metrics:
            return {}
        values: dict[str, float] = {}
        for name, sums in self._over_ranks().items():
            with named_errors(self._title(name), "value()"):
                value = self._metrics[name].value(sums)
                if isinstance(value, Mapping):
                    values |= {f"{name}_{key}": float(number) for key, number in value.items()}
                else:
                    values[name] = float(value)
        return values

    def _over_ranks(self) -> dict[str, Tensor]:
        """Returns the sums over all ranks on the CPU; ranks without the head add zeros."""
        nothing = torch.empty(0, dtype=torch.float64)
        sizes = torch.tensor([self._sums.get(name, nothing).numel() for name in self._metrics])
        if self._mesh.layout.world_size > 1:
            with across_replicas(self._mesh):
                dist.all_reduce(sizes, dist.ReduceOp.MAX, group=self._mesh.control)
        if not sizes.all():
            raise UserError(
                "metrics need the outputs of the model, but its forward pass provides none in evaluation mode",
                where="metrics",
                fix="let the head compute its loss in Head.loss, or remove the metrics",
            )
        parts = []
        for name, size in zip(self._metrics, sizes.tolist(), strict=True):
            sums = torch.zeros(size, dtype=torch.float64)
            if name in self._sums:
                sums = self._sums[name] * (self._mesh.tp_rank == 0)
            parts.append(sums.to(self._mesh.device))
        together = torch.cat(parts)
        sum_over_ranks(together, self._mesh)
        return dict(zip(self._metrics, together.cpu().split(sizes.tolist()), strict=True))

    def _title(self, name: str) -> str:
        return f"metric {name} ({self._targets[name]})"


_UNCHANGED = (UserError, CollectiveFailure, MemoryError)  # the reaction of the agent depends on these types
_PACKAGE = Path(__file__).parents[2]


class CallFailed(RuntimeError):
    """Reports an error in a metric or hook. ``__cause__`` is the original error."""


@contextmanager
def named_errors(title: str, method: str, step: int | None = None) -> Iterator[None]:
    """Adds the name of the callee to the errors of this context.

    Args:
        title: the callee, such as ``hook mine (mylab.Hook)``.
        step: the number of completed steps.

    Raises:
        CallFailed: replaces an error whose type is not in ``_UNCHANGED``.
    """
    try:
        yield
    except (CallFailed, *_UNCHANGED):
        raise
    except Exception as error:
        what = f"{title} failed in {method}"
        if step is not None:
            what += f" after step {step}"
        frames = traceback.extract_tb(error.__traceback__)
        line = frames[-1]
        for frame in frames:  # the innermost frame that is neither in hpc_train nor in an installed package
            path = Path(frame.filename)
            if not (path.is_relative_to(_PACKAGE) or "site-packages" in path.parts or path.name.startswith("<")):
                line = frame
        raise CallFailed(f"{what}: {type(error).__name__}: {error} ({line.filename}:{line.lineno})") from error
