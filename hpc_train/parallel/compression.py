"""Sums a bucket of gradients over the data-parallel ranks: dense, compressed with top-k or with PowerSGD.

Top-k sends only the largest elements of each gradient. The other elements are added to the next gradient (error
feedback as in arXiv:1809.07599). With the momentum correction of Deep Gradient Compression (arXiv:1712.01887, section
3.2) the velocity is accumulated instead of the gradient, and both are set to zero for elements that are sent.

PowerSGD (Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2) sends each gradient matrix as a product of two thin
matrices, computed by one step of subspace iteration that starts from the basis of the previous step. The error of the
product is added to the next gradient. Vectors, and matrices for which two factors would not be smaller, are sent
uncompressed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import StrategyConfig
from hpc_train.parallel.mesh import all_gather_tensor
from hpc_train.parallel.parallelize import parameter_seed


class PendingState:
    """Holds one tensor per parameter; ``commit`` applies the values of a step only if the step is not skipped."""

    def __init__(self, tensors: Iterable[tuple[nn.Parameter, Tensor]] = ()) -> None:
        self._values = dict(tensors)
        self._pending: dict[nn.Parameter, Tensor] = {}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._values

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._values[parameter]

    def set_next(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Sets the value after this step; ``value`` is not copied."""
        self._pending[parameter] = value.view_as(self._values[parameter])

    def withdraw(self, parameter: nn.Parameter) -> None:
        """Keeps the value from before this step."""
        self._pending.pop(parameter, None)

    def commit(self, finite: Tensor) -> None:
        """Applies the values of the step if ``finite``, a scalar bool on the device."""
        for parameter, value in self._pending.items():
            present = self._values[parameter]
            present.copy_(torch.where(finite, value, present))
        self._pending.clear()


def zeros(parameters: Iterable[nn.Parameter]) -> PendingState:
    return PendingState((p, torch.zeros(p.shape, dtype=p.dtype, device=p.device)) for p in parameters)


class Exchange:
    """Sums buckets of gradients over the ranks of one group.

    Attributes:
        residual: what this rank has not sent of each gradient, in the shape of the parameter.
        basis: state that is the same on all ranks of the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, residual: PendingState | None = None, basis: PendingState | None = None
    ) -> None:
        self._group = group
        self.residual = residual or PendingState()
        self.basis = basis or PendingState()

    def run(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], used: Tensor) -> Iterator[dist.Work]:
        """Starts collectives and yields each before it needs the result; at the end the tensors hold the sums.

        All ranks process the same buckets in the same order, so the order of all collectives is the same.

        Args:
            parameters: the parameters of the bucket, which have one dtype.
            gradients: the gradients of this rank, which are changed in place.
            used: 1 for each parameter that has a gradient on this rank and 0 for the others, ``[parameters]`` in their
                dtype; changed in place.
        """
        raise NotImplementedError

    def withdraw(self, parameter: nn.Parameter) -> None:
        """Keeps the state of ``parameter`` as it was before this step, since it has no gradient on any rank."""
        self.residual.withdraw(parameter)
        self.basis.withdraw(parameter)

    @torch.no_grad()
    def commit(self, finite: Tensor) -> None:
        """Updates the state for the next step if ``finite``, a scalar bool. Call it after the reduction."""
        self.residual.commit(finite)
        self.basis.commit(finite)


class Dense(Exchange):
    """Sums a bucket with one all-reduce of a flat copy, in ``dtype`` if given."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> None:
        super().__init__(group)
        self._dtype = dtype

    def run(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], used: Tensor) -> Iterator[dist.Work]:
        if len(gradients) == 1 and gradients[0].is_contiguous() and self._dtype is None:
            # two messages take less memory than a copy of the gradient, which may be that of a large embedding
            works = [dist.all_reduce(each, group=self._group, async_op=True) for each in (gradients[0], used)]
            yield from works
            return
        flat = flatten([*gradients, used])
        if self._dtype is not None:
            flat = flat.to(self._dtype)
        yield dist.all_reduce(flat, group=self._group, async_op=True)
        unflatten(flat, [*gradients, used])


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a concatenated copy of all tensors, ``[elements]``."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies the pieces of ``flat`` into ``tensors``."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_([*tensors], [p.view_as(t) for p, t in zip(pieces, tensors, strict=True)])


class TopK(Exchange):
    """Gathers values and indices of all ranks in one collective and adds them up.

    Args:
        share: the share of the elements of each parameter that is sent, rounded up.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, share: float) -> None:
        super().__init__(group, zeros(parameters))
        self._share = share

    def run(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], used: Tensor) -> Iterator[dist.Work]:
        values = []
        indices = []
        start = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            corrected = self.residual[parameter].view(-1) + gradient.reshape(-1)
            # topk treats NaN as the largest
            index = corrected.abs().topk(math.ceil(self._share * corrected.numel()), sorted=False).indices
            values.append(corrected[index])
            indices.append(index + start)
            self.residual.set_next(parameter, corrected.index_fill_(0, index, 0))
            start += gradient.numel()
        value = flatten(values)
        index = flatten(indices).to(torch.int32)
        sent = torch.cat([value.view(torch.int32), index, used.to(torch.int32)])  # one message
        received = sent.new_empty(dist.get_world_size(self._group) * sent.numel())
        yield all_gather_tensor(received, sent, group=self._group, async_op=True)
        total = value.new_zeros(start)
        used.zero_()
        sizes = [sent.numel() - index.numel() - used.numel(), index.numel(), used.numel()]
        for row in received.view(-1, sent.numel()):  # the same order, and thereby the same bits, on all ranks
            theirs, where, uses = row.split(sizes)
            total.index_add_(0, where, theirs.clone().view(value.dtype))
            used += uses
        unflatten(total, gradients)


class PowerSGD(Exchange):
    """Sums a bucket with two all-reduces, of the left and of the right factors.

    Args:
        parameters: name -> parameter; ``seed`` and the name determine the first basis.
        rank: the rank of the approximation.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, rank: int, seed: int = 0
    ) -> None:
        chosen = {name: p for name, p in parameters.items() if pays(p.shape, rank)}
        bases = ((p, _first_basis(p, rank, parameter_seed(seed, name))) for name, p in chosen.items())
        super().__init__(group, zeros(chosen.values()), PendingState(bases))

    def run(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], used: Tensor) -> Iterator[dist.Work]:
        pairs = list(zip(parameters, gradients, strict=True))
        others = [gradient for parameter, gradient in pairs if parameter not in self.basis]
        matrices = [(parameter, gradient) for parameter, gradient in pairs if parameter in self.basis]
        # [rows, columns]; a convolution's columns are its input channels and kernel
        corrected = [(self.residual[parameter] + gradient).flatten(1) for parameter, gradient in matrices]
        lefts = [matrix @ self.basis[p] for matrix, (p, _) in zip(corrected, matrices, strict=True)]  # [rows, rank]
        flat = flatten([*lefts, *others, used])
        yield dist.all_reduce(flat, group=self._group, async_op=True)
        unflatten(flat, [*lefts, *others, used])
        if not matrices:
            return
        lefts = [_orthonormal(left) for left in lefts]
        rights = [matrix.t() @ left for matrix, left in zip(corrected, lefts, strict=True)]  # [columns, rank]
        for matrix, left, right, (parameter, _) in zip(corrected, lefts, rights, matrices, strict=True):
            self.residual.set_next(parameter, matrix.sub_(left @ right.t()))
        flat = flatten(rights)
        yield dist.all_reduce(flat, group=self._group, async_op=True)
        unflatten(flat, rights)
        for left, right, (parameter, gradient) in zip(lefts, rights, matrices, strict=True):
            gradient.copy_((left @ right.t()).view_as(gradient))
            self.basis.set_next(parameter, _orthonormal(right))


def pays(shape: Sequence[int], rank: int) -> bool:
    """Returns whether the two factors of a gradient of ``shape`` have fewer elements than the gradient."""
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows + columns) * min(rank, rows, columns) < rows * columns


def _first_basis(parameter: nn.Parameter, rank: int, seed: int) -> Tensor:
    """Returns an orthonormal basis, ``[columns, rank]``."""
    rows, columns = parameter.shape[0], parameter[0].numel()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(columns, min(rank, rows, columns), generator=generator, dtype=parameter.dtype)
    return _orthonormal(drawn).to(parameter.device)


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q.contiguous()


@dataclass(frozen=True)
class LocalTensor:
    """Holds the residual of a rank for one parameter.

    Each rank that sends a gradient of the parameter has a slot. Only the sum over all slots matters.

    Attributes:
        name: the canonical name of the parameter.
        slot: the slot of this rank, in [0, ``slots``).
    """

    name: str
    tensor: Tensor
    slot: int
    slots: int


class Compression:
    """Holds the exchange of compressed gradients of one module.

    Args:
        parameters: name -> parameter of one module; a tied copy has its own name.
        tied: alias -> canonical name in the whole model.
        cut: whether the model is cut into stages, since each stage may have a copy of a tied parameter.
    """

    def __init__(
        self,
        strategy: StrategyConfig,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        tied: Mapping[str, str],
        cut: bool,
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._tied = tied
        self._cut = cut
        self.exchange = make_exchange(strategy.compression, strategy, parameters, group)

    def local_state(self) -> Iterator[LocalTensor]:
        """Yields the state that differs between ranks, such as residuals."""
        rank = dist.get_rank(self._group)
        ranks = dist.get_world_size(self._group)
        for local_name, parameter in self._parameters.items():
            if parameter not in self.exchange.residual:
                continue
            name = self._tied.get(local_name, local_name)
            copies = [local_name]
            if self._cut:
                copies = [name, *(alias for alias, canonical in self._tied.items() if canonical == name)]
            slot = copies.index(local_name) * ranks + rank
            yield LocalTensor(name, self.exchange.residual[parameter], slot, ranks * len(copies))

    def shared_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields ``NAME.basis``, where a tied copy has its own name, and the tensor, which all ranks hold equally."""
        for name, parameter in self._parameters.items():
            if parameter in self.exchange.basis:
                yield f"{name}.basis", self.exchange.basis[parameter]


def make_exchange(
    technique: str, strategy: StrategyConfig, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
) -> Exchange:
    """Returns the exchange of ``technique``, a value of ``strategy.compression``."""
    if technique == "topk":
        return TopK(parameters.values(), group, strategy.compression_share)
    if technique == "powersgd":
        return PowerSGD(parameters, group, strategy.compression_rank)
    dtypes = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    return Dense(group, dtypes[technique])
