"""The classes that synchronise the gradients of data-parallel ranks, one per data-parallel kind, behind one interface.

The backward divides by the number of targets in the data, which is known before the step. A loss that returns a count
of its own (samples, weights, elements) knows it only after the last forward, so ``finish_own_count`` multiplies the
gradients by the ratio of the two once: one all-reduce of a scalar and one pass over the gradients.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpc_train.config.description_file import import_attribute
from hpc_train.config.schema import StrategyConfig
from hpc_train.errors import UserError
from hpc_train.models.model import canonical_name
from hpc_train.parallel import fsdp
from hpc_train.parallel.bucket_search import SearchedReplicas, Tell
from hpc_train.parallel.compression.build import Compression
from hpc_train.parallel.gradient_norm import multiply_
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.reduction import GradientReduction, SendOrder, first_cap, sum_partial_gradients
from hpc_train.plan.layout import Layout


class Replicas(Protocol):
    """The interface through which an engine synchronises gradients.

    Attributes:
        module: what a training forward is called on.
        loss_factor: what the loss is multiplied by, so that gradients come out as the sum over the dp ranks.
        compression: of the gradients, if any.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def loss_factor(self) -> int: ...

    @property
    def compression(self) -> Compression | None: ...

    def begin(self, step: int, backwards: int) -> None:
        """Called before a step with so many backwards."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """The context of the forward and backward of one micro-batch."""

    def backward_done(self) -> None:
        """Called when a backward of a pipeline stage has added all its gradients."""

    def finish(self) -> None:
        """Called after the last backward; afterwards the gradients are those of the global batch."""

    def evaluated(self) -> None:
        """Called after forwards without a backward."""


class LocalReplicas:
    """Gradients that nothing sums over the data axis here: of a single rank, or under ``train.reproducible``."""

    loss_factor = 1
    compression: Compression | None = None

    def __init__(self, module: nn.Module, mesh: Mesh, strategy: StrategyConfig, **_: object) -> None:
        self.module = module
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def begin(self, step: int, backwards: int) -> None:
        pass

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward_done(self) -> None:
        pass

    def finish(self) -> None:
        sum_partial_gradients(self._parameters)

    def evaluated(self) -> None:
        pass


class AllReduceReplicas(LocalReplicas):
    """The kind ``allreduce``: buckets of gradients are summed during the last backward, compressed or not."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        strategy: StrategyConfig,
        *,
        tied: Mapping[str, str],
        turns: SendOrder,
        own_count: bool,
    ) -> None:
        super().__init__(module, mesh, strategy)
        named = {canonical_name(raw): p for raw, p in module.named_parameters() if p.requires_grad}
        group, compresses = mesh.group("dp"), strategy.compression != "none"
        waits = compresses and own_count  # for the division, which comes before the compression
        self.reduction = GradientReduction(named.values(), group, first_cap(strategy), None if waits else turns)
        if compresses:
            self.compression = Compression(strategy, named, group, tied, cut=mesh.layout.pp > 1)

    def begin(self, step: int, backwards: int) -> None:
        self.reduction.begin(backwards, None if self.compression is None else self.compression.exchange(step))

    def rebucket(self, cap_mb: float) -> None:
        """Changes the size of the buckets. Call it between two steps."""
        self.reduction.rebucket(cap_mb)

    def backward_done(self) -> None:
        self.reduction.backward_done()

    def finish(self) -> None:
        self.reduction.reduce()


class DDPReplicas:
    """The kind ``ddp``: DistributedDataParallel all-reduces buckets of gradients during the last backward."""

    compression: Compression | None = None

    def __init__(self, module: nn.Module, mesh: Mesh, strategy: StrategyConfig, **_: object) -> None:
        self._bare, self._mesh, self._strategy = module, mesh, strategy
        self.loss_factor = mesh.layout.dp
        self._wrap(first_cap(strategy))

    def _wrap(self, cap_mb: float) -> None:
        self._wrapped = replicate(self._bare, self._mesh, self._strategy, cap_mb)
        self.module: nn.Module = self._wrapped
        # A static graph is learnt in the first backward, which fails inside no_sync (an assertion of torch's reducer).
        # Reducing after every micro-batch of the first step gives the same sums.
        self._sync_always = self._strategy.static_graph

    def rebucket(self, cap_mb: float) -> None:
        """Changes the size of the buckets between two steps. The old wrapper is deleted first, or both would reduce."""
        del self._wrapped, self.module
        gc.collect()
        self._wrap(cap_mb)

    def begin(self, step: int, backwards: int) -> None:
        pass

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return accumulating(self._wrapped, last or self._sync_always)

    def backward_done(self) -> None:
        pass

    def finish(self) -> None:
        self._sync_always = False

    def evaluated(self) -> None:
        pass


class Sharded:
    """The kinds ``zero1``, ``zero2`` and ``zero3``; ``module`` was sharded before it got its values."""

    compression: Compression | None = None

    def __init__(self, module: nn.Module, mesh: Mesh, strategy: StrategyConfig, **_: object) -> None:
        self.module = module
        self.loss_factor = mesh.layout.dp
        self._kind = mesh.layout.kind

    def begin(self, step: int, backwards: int) -> None:
        pass

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        fsdp.begin_backward(self.module, self._kind, last)
        return nullcontext()

    def backward_done(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def evaluated(self) -> None:
        fsdp.release(self.module)


def make_replicas(
    module: nn.Module,
    mesh: Mesh,
    strategy: StrategyConfig,
    tied: Mapping[str, str],
    tell: Tell | None = None,
    turns: SendOrder | None = None,
    own_count: bool = False,
) -> Replicas:
    """Builds the replicas of ``module``, which holds its values and is sharded if its kind shards.

    Args:
        tied: alias -> canonical name.
        tell: of the size of buckets that was found.
        turns: of the other stages of this rank, whose gradients are final before this one's.
        own_count: of the model; gradients that are compressed are then not sent before ``finish``.
    """
    layout, turns = mesh.layout, [] if turns is None else turns
    kind = layout.kind
    served = replica_class(layout) if layout.dp > 1 else LocalReplicas
    replicas: Any = served(module, mesh, strategy, tied=tied, turns=turns, own_count=own_count)
    searches = strategy.bucket_cap_mb == "auto" and layout.dp > 1 and kind.bucket_search != "never"
    return SearchedReplicas(replicas, mesh, tell) if searches else replicas


def replica_class(layout: Layout) -> Any:
    """The class that the row of ``layout``'s data-parallel kind names.

    Raises:
        UserError: it cannot be imported, or lacks a method that the row's facts ask for.
    """
    kind, where = layout.kind, f"strategy.data_parallel={layout.data_parallel}"
    found = import_attribute(kind.replicas, where)
    methods = [*_METHODS, *(["rebucket"] if kind.bucket_search != "never" else [])]
    missing = [name for name in methods if not callable(getattr(found, name, None))]
    if missing:
        raise UserError(
            f"{kind.replicas} has no method {' and no method '.join(missing)}",
            where=where,
            fix="the methods of hpc_train.parallel.replicas.Replicas, and rebucket where the row names a bucket search",
        )
    return found


_METHODS = ("begin", "micro_batch", "backward_done", "finish", "evaluated")


# The name changed in torch 2.13.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def replicate(model: nn.Module, mesh: Mesh, strategy: StrategyConfig, bucket_cap_mb: float) -> DistributedDataParallel:
    """Wraps ``model``, which holds its values already, for the dp ranks.

    The gradients come out averaged over the dp ranks: scale the loss by their number where a sum is wanted. Buffers
    are not broadcast: nothing in a forward may depend on another rank's (batch statistics: ``models/batch_norm.py``).
    """
    return DistributedDataParallel(
        model,
        process_group=mesh.group("dp"),
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,
        static_graph=strategy.static_graph,
        **_KEEP_BUFFERS,
    )


@contextmanager
def accumulating(model: DistributedDataParallel, last: bool) -> Iterator[None]:
    """The context of forward and backward of a micro-batch: gradients are reduced in the ``last`` one only.

    Raises:
        UserError: a parameter was not used in the step before.
    """
    try:
        with nullcontext() if last else model.no_sync():
            yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        raise UserError(
            "the model has parameters that its forward does not use: DDP waits for their gradients",
            where="strategy.static_graph",
            fix="strategy.static_graph=true if every step leaves out the same ones, else "
            "strategy.data_parallel=allreduce",
        ) from error


def finish_own_count(
    replicas: Iterable[Replicas], parameters: Iterable[nn.Parameter], mesh: Mesh, own_count: Tensor, target_count: int
) -> None:
    """Finishes all ``replicas`` of this rank, and divides the gradients by the count of the loss. Collective.

    Compression carries what it leaves out to the next step, so there the division comes before the reduction, which
    has not begun. Elsewhere it comes after it: a part of the gradients was reduced during the backward.

    Args:
        parameters: all of this rank, every copy of a tied one.
        own_count: what the loss counted on this rank.
        target_count: of the data of the global batch, by which the gradients are divided already.
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
    """Divides gradients by ``own_count`` of all ranks in place of ``target_count``. Collective.

    Tensor-parallel ranks computed the same count, and only the first one's counts. Where it is zero, the sum of losses
    is left as it is.
    """
    count = own_count.to(mesh.device, torch.float64) * (mesh.tp_rank == 0)
    if mesh.layout.world_size > 1:
        dist.all_reduce(count)
    ratio = max(1, target_count) / torch.where(count == 0, 1.0, count)
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    multiply_([grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients], ratio)
