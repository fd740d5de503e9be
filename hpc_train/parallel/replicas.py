"""Synchronizes the gradients of data-parallel ranks, with one class per data-parallel kind and a common interface.

The backward pass divides by the number of targets in the data, which is known before the step. The count of a user's
own loss (samples, weights, elements) is only known after the last forward pass, so ``finish_own_count`` multiplies the
gradients by the ratio of the two counts, with one all-reduce of a scalar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_train.config.import_path import locate
from hpc_train.config.schema import StrategyConfig
from hpc_train.config.values import bucket_mb
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.models.model import canonical_name
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel import fsdp
from hpc_train.parallel.compression import Compression
from hpc_train.parallel.engine import Replicas
from hpc_train.parallel.fsdp import SharedGroups
from hpc_train.parallel.gradient_norm import UpdatesInBackward, multiply_
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision.masters import local_part
from hpc_train.parallel.reduction import GradientReduction, SendOrder, sum_partial_gradients


class LocalReplicas:
    """Leaves gradients local, for a single rank and for ``train.reproducible``, which sums them itself."""

    loss_factor = 1
    compression: Compression | None = None

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        strategy: StrategyConfig,
        *,
        updates: UpdatesInBackward | None = None,
        **_: object,
    ) -> None:
        self.module = module
        self._updates = updates
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if updates is not None:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(lambda final: updates.use([final]))

    def begin(self, step: int, backwards: int) -> None:
        assert backwards == 1 or self._updates is None or not self._updates.active, "no gradient would be final"

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward_done(self) -> None:
        pass

    def finish(self) -> None:
        sum_partial_gradients(self._parameters)

    def evaluated(self) -> None:
        pass


class AllReduceReplicas(LocalReplicas):
    """Implements the kind ``allreduce``, which sums buckets of gradients during the last backward pass."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        strategy: StrategyConfig,
        *,
        tied: Mapping[str, str],
        send_order: SendOrder,
        own_count: bool,
        updates: UpdatesInBackward | None = None,
    ) -> None:
        super().__init__(module, mesh, strategy)
        named = {canonical_name(raw): p for raw, p in module.named_parameters() if p.requires_grad}
        compresses = strategy.compression != "none"
        self.reduction = GradientReduction(
            {parameter: mesh.gradient_group(parameter) for parameter in named.values()},
            bucket_mb(strategy, mesh.device.type),
            None if compresses and own_count else send_order,  # the division by the count precedes the compression
            None if updates is None else updates.use,
        )
        if compresses:
            self.compression = Compression(strategy, named, mesh.group("dp_cp"), tied, cut=mesh.layout.pp > 1)

    def begin(self, step: int, backwards: int) -> None:
        self.reduction.begin(backwards, None if self.compression is None else self.compression.exchange)

    def backward_done(self) -> None:
        self.reduction.backward_done()

    def finish(self) -> None:
        self.reduction.reduce()


class DDPReplicas:
    """Implements the kind ``ddp`` with DistributedDataParallel, which does not accept a frozen module.

    It averages the gradients. Buffers are not broadcast, since no forward pass depends on those of another rank;
    ``models/batch_norm.py`` averages statistics.

    DDP sums the gradients of its first backward pass in one bucket, and then makes smaller ones, in which three or more
    ranks add them up in another order. A backward pass of zeros comes first, so that the first step after a restart has
    the bits of a run that did not stop. It also fixes the buckets: from the last parameter to the first.
    """

    compression: Compression | None = None

    def __init__(self, module: nn.Module, mesh: Mesh, strategy: StrategyConfig, **_: object) -> None:
        self.loss_factor = mesh.layout.dp_cp
        self.module = module
        self._wrapped: DistributedDataParallel | None = None
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if trained:
            self.module = self._wrapped = DistributedDataParallel(
                module,
                process_group=mesh.group("dp_cp"),
                bucket_cap_mb=bucket_mb(strategy, mesh.device.type),
                gradient_as_bucket_view=True,
                **_KEEP_BUFFERS,
            )
            self._wrapped.reducer.prepare_for_backward([])
            for parameter in reversed(trained):
                parameter.backward(torch.zeros_like(parameter))
            for parameter in trained:
                parameter.grad = None
            self._wrapped.reducer._rebuild_buckets()

    def begin(self, step: int, backwards: int) -> None:
        pass

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        if self._wrapped is None:
            return nullcontext()
        return explaining_unused(nullcontext() if last else self._wrapped.no_sync())

    def backward_done(self) -> None:
        pass

    def finish(self) -> None:
        """Raises UserError before the gradients are used if DDP has not reduced all of them."""
        if self._wrapped is not None:
            with explaining_unused(nullcontext()):
                self._wrapped._check_reducer_finalized()  # type: ignore[no-untyped-call]

    def evaluated(self) -> None:
        pass


class Sharded:
    """Implements the kinds ``zero1``, ``zero2`` and ``zero3`` for a ``module`` that is sharded already."""

    loss_factor = 1
    compression: Compression | None = None

    def __init__(self, module: nn.Module, mesh: Mesh, strategy: StrategyConfig, **_: object) -> None:
        self.module = module
        self._kind = mesh.layout.kind
        self._modules = fsdp.sharded_modules(module)
        trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
        whole = {parameter: mesh.group("dp_cp") for parameter in trained if fsdp.is_replicated(parameter)}
        self._reduction = GradientReduction(whole, bucket_mb(strategy, mesh.device.type))
        fsdp.choose_communication(module, strategy.comm)
        self._shared = SharedGroups(module, mesh) if isinstance(module, WrappedModel) else None
        self._last: bool | None = None  # the micro-batches for which they are configured
        if strategy.compression == "bf16":
            fsdp.cast_gradients(module, torch.bfloat16)

    def begin(self, step: int, backwards: int) -> None:
        self._reduction.begin(backwards)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        if last is not self._last:
            fsdp.begin_backward(self._modules, self._kind, last)
            self._last = last
        return nullcontext()

    def backward_done(self) -> None:
        pass

    def finish(self) -> None:
        if self._shared is not None:
            self._shared.finish()
        self._reduction.reduce()

    def evaluated(self) -> None:
        fsdp.release(self._modules)
        if self._shared is not None:
            self._shared.evaluated()


def make_replicas(
    module: nn.Module,
    mesh: Mesh,
    strategy: StrategyConfig,
    tied: Mapping[str, str],
    send_order: SendOrder | None = None,
    own_count: bool = False,
    updates: UpdatesInBackward | None = None,
) -> Replicas:
    """Builds the replicas of ``module``, which has its values and is sharded if its kind shards.

    Args:
        tied: alias -> canonical name.
        send_order: the reductions of this rank's other stages, whose gradients are final earlier.
        own_count: whether the loss has its own count; compressed gradients are then sent by ``finish``.
        updates: uses each gradient as soon as it covers the global batch; only for kinds that support it.
    """
    kind: Any = LocalReplicas
    if mesh.layout.dp_cp > 1:
        kind = replica_class(mesh.layout)
    elif mesh.layout.ep > 1:  # tensor-parallel ranks that hold the same experts
        kind = AllReduceReplicas
    order = [] if send_order is None else send_order  # a list that the stages share and extend
    options: dict[str, Any] = {"tied": tied, "send_order": order, "own_count": own_count}
    if updates is not None:
        options["updates"] = updates
    replicas: Replicas = kind(module, mesh, strategy, **options)
    return replicas


def replica_class(layout: Layout) -> Any:
    """Imports the class that the data-parallel kind of ``layout`` names.

    Raises:
        UserError: the class cannot be imported, or lacks a method that the kind requires.
    """
    where = f"strategy.data_parallel={layout.data_parallel}"
    imported = locate(layout.kind.replicas, where)
    missing = [name for name in _METHODS if not callable(getattr(imported, name, None))]
    if missing:
        raise UserError(
            f"{layout.kind.replicas} has no method {' and no method '.join(missing)}",
            where=where,
            fix="implement the methods of hpc_train.parallel.engine.Replicas",
        )
    return imported


_METHODS = ("begin", "micro_batch", "backward_done", "finish", "evaluated")


# torch 2.13 renamed this argument
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


@contextmanager
def explaining_unused(inner: AbstractContextManager[object]) -> Iterator[None]:
    """Enters ``inner``, and raises UserError for the error of DDP about parameters that are not used."""
    try:
        with inner:
            yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        raise UserError(
            "the forward pass does not use some parameters, and DDP waits for their gradients",
            where="strategy.data_parallel=ddp",
            fix="strategy.data_parallel=allreduce, which trains such a model as one process does",
        ) from error


def finish_own_count(
    replicas: Iterable[Replicas], parameters: Iterable[nn.Parameter], mesh: Mesh, own_count: Tensor, target_count: int
) -> None:
    """Finishes all ``replicas`` of this rank, and divides the gradients by the count of the loss. Collective.

    Compression adds its error to the next step, so it needs divided gradients, and its reduction starts here. Otherwise
    the division follows the reduction, since a part of the gradients was reduced during the backward pass.

    Args:
        parameters: all parameters of this rank, including all copies of tied ones.
        own_count: the count of the loss on this rank.
        target_count: the number of targets of the global batch, by which the gradients were divided.
    """
    replicas = list(replicas)
    compresses = any(each.compression is not None for each in replicas)
    if compresses:
        divide_by_count_(parameters, mesh, own_count, target_count)
    for each in replicas:
        each.finish()
    if not compresses:
        divide_by_count_(parameters, mesh, own_count, target_count)


@torch.no_grad()
def divide_by_count_(parameters: Iterable[nn.Parameter], mesh: Mesh, own_count: Tensor, target_count: int) -> None:
    """Divides gradients by the sum of ``own_count`` over the replica instead of ``target_count``. Collective.

    Tensor-parallel ranks have the same count, so only the count of the first is added. A sum of zero divides by 1.
    """
    count = own_count.to(mesh.device, torch.float64) * (mesh.tp_rank == 0)
    if mesh.layout.world_size > 1:
        dist.all_reduce(count, group=mesh.group("replica"))
    ratio = max(1, target_count) / torch.where(count == 0, 1.0, count)
    multiply_([local_part(parameter.grad) for parameter in parameters if parameter.grad is not None], ratio)
