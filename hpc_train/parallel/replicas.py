"""How the data-parallel ranks of one model are kept in step: one class per way, behind one small interface."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import nn

from hpc_train.config.layout import ZERO
from hpc_train.config.schema import StrategyConfig
from hpc_train.parallel import ddp, fsdp
from hpc_train.parallel.bucket_search import SearchedReplicas, Tell, first_cap
from hpc_train.parallel.compression.build import Compression
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.naming import canonical_name
from hpc_train.parallel.reduction import GradientReduction, Turns, settle_partial


class Replicas(Protocol):
    """What the engine asks of data parallelism.

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
        """Before a step of so many backwards."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch."""

    def backward_done(self) -> None:
        """After a backward of a pipeline stage has added all its gradients."""

    def finish(self) -> None:
        """After the last backward: the gradients are those of the global batch."""

    def evaluated(self) -> None:
        """After forwards without a backward."""


class Reduced:
    """Bare modules whose gradients we sum ourselves, during the last backward; also a single rank."""

    loss_factor = 1

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        strategy: StrategyConfig,
        tied: Mapping[str, str],
        turns: Turns,
        own_count: bool,
    ) -> None:
        self.module = module
        named = {canonical_name(raw): p for raw, p in module.named_parameters() if p.requires_grad}
        self._parameters = list(named.values())
        layout, group = mesh.layout, mesh.group("dp")
        self.reduction: GradientReduction | None = None
        self.compression: Compression | None = None
        if layout.dp > 1 and layout.data_parallel == "reduce":
            compresses = strategy.compression != "none"
            waits = compresses and own_count  # for the division, which comes before the compression
            self.reduction = GradientReduction(self._parameters, group, first_cap(strategy), None if waits else turns)
            if compresses:
                self.compression = Compression(strategy, named, group, tied, cut=layout.pp > 1)

    def begin(self, step: int, backwards: int) -> None:
        if self.reduction is not None:
            self.reduction.begin(backwards, None if self.compression is None else self.compression.exchange(step))

    def rebucket(self, cap_mb: float) -> None:
        """Between steps: buckets of another size."""
        if self.reduction is not None:
            self.reduction.rebucket(cap_mb)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward_done(self) -> None:
        if self.reduction is not None:
            self.reduction.backward_done()

    def finish(self) -> None:
        if self.reduction is not None:
            self.reduction.reduce()
        else:
            settle_partial(self._parameters)

    def evaluated(self) -> None:
        pass


class Replicated:
    """DistributedDataParallel."""

    compression: Compression | None = None

    def __init__(self, module: nn.Module, mesh: Mesh, strategy: StrategyConfig) -> None:
        self._bare, self._mesh, self._strategy = module, mesh, strategy
        self.loss_factor = mesh.layout.dp
        self._wrap(first_cap(strategy))

    def _wrap(self, cap_mb: float) -> None:
        self._wrapped = ddp.replicate(self._bare, self._mesh, self._strategy, cap_mb)
        self.module: nn.Module = self._wrapped
        # A static graph is learnt in the first backward, which fails inside no_sync (an assertion of torch's reducer).
        # Reducing after every micro-batch of the first step gives the same sums.
        self._sync_always = self._strategy.static_graph

    def rebucket(self, cap_mb: float) -> None:
        """Between steps: buckets of another size. The one before has to be gone by then, or both would reduce."""
        del self._wrapped, self.module
        gc.collect()
        self._wrap(cap_mb)

    def begin(self, step: int, backwards: int) -> None:
        pass

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return ddp.accumulating(self._wrapped, last or self._sync_always)

    def backward_done(self) -> None:
        pass

    def finish(self) -> None:
        self._sync_always = False

    def evaluated(self) -> None:
        pass


class Sharded:
    """ZeRO; ``module`` was sharded before it got its values."""

    compression: Compression | None = None

    def __init__(self, module: nn.Module, mesh: Mesh, data_parallel: str) -> None:
        self.module = module
        self.loss_factor = mesh.layout.dp
        self._data_parallel = data_parallel

    def begin(self, step: int, backwards: int) -> None:
        pass

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        fsdp.begin_backward(self.module, self._data_parallel, last)
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
    turns: Turns | None = None,
    own_count: bool = False,
) -> Replicas:
    """``module`` holds its values, and is sharded where the strategy says so.

    Args:
        tied: alias -> canonical name.
        tell: of the size of buckets that was found.
        turns: of the other stages of this rank, whose gradients are final before this one's.
        own_count: of the model; gradients that are compressed are then not sent before ``finish``.
    """
    layout, data_parallel = mesh.layout, mesh.layout.data_parallel
    if layout.dp > 1 and data_parallel in ZERO:
        return Sharded(module, mesh, data_parallel)
    ddp = layout.dp > 1 and data_parallel == "ddp"
    turns = [] if turns is None else turns
    replicas = Replicated(module, mesh, strategy) if ddp else Reduced(module, mesh, strategy, tied, turns, own_count)
    searches = strategy.bucket_cap_mb == "auto" and layout.dp > 1 and data_parallel in ("ddp", "reduce")
    return SearchedReplicas(replicas, mesh, tell) if searches else replicas
