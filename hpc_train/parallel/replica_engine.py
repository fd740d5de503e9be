"""Implements the engine of a model without pipeline stages: each rank runs all layers, with any data-parallel kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, compress

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import Config
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.techniques import CompilerMode, compiler_mode
from hpc_train.models import batch_norm
from hpc_train.models.model import Model, aliases, named_buffers, named_parameters, refuse_ragged
from hpc_train.models.moe import Routers
from hpc_train.models.wrapped import WrappedModel, evaluating
from hpc_train.parallel import gradient_norm
from hpc_train.parallel.compression import Compression
from hpc_train.parallel.context import own_tokens, whole_sequence
from hpc_train.parallel.engine import (
    MicroBatchSeeds,
    StepNumbers,
    StepResult,
    has_sequence_shards,
    reduce_result,
    refusing_wrong_targets,
    seed_micro_batch,
    with_routers,
)
from hpc_train.parallel.gradient_norm import UpdatesInBackward
from hpc_train.parallel.mesh import Mesh, all_gather_tensor
from hpc_train.parallel.parallelize import parallelize
from hpc_train.parallel.precision.dtypes import KeptCasts, autocast, kept_dtype, parameter_dtype
from hpc_train.parallel.replicas import divide_by_count_, finish_own_count, make_replicas
from hpc_train.parallel.tensor import check_sequence
from hpc_train.parallel.writes import SharedBuffers


class ReplicaEngine:
    """Trains one whole model per data-parallel rank; implements ``Engine``.

    Args:
        model: a model on ``meta``, or one with values, of which those of dp rank 0 are used.
        restored: see ``parallelize``.
    """

    def __init__(self, config: Config, mesh: Mesh, model: Model | WrappedModel, restored: Collection[str] = ()) -> None:
        self._mesh = mesh
        self._precision = config.precision.name
        self._own_count = model.own_count
        self.check_loss = (model.own_count or isinstance(model, WrappedModel)) and not model.mixes_samples
        self._model = parallelize(config, mesh, model, restored)
        tied = getattr(self._model, "tied", {})
        self._parameters = named_parameters([self._model], tied)
        self.aliases: Mapping[str, str] = aliases(
            (*self._model.named_parameters(remove_duplicate=False), *self._model.named_buffers(remove_duplicate=False))
        )
        self.updates = self._make_updates(config)
        self._replicas = make_replicas(
            self._model, mesh, config.strategy, tied, own_count=self._own_count, updates=self.updates
        )
        self._statistics = batch_norm.RunningStatistics([self._model])
        self._routers = Routers([self._model], mesh.group("dp_cp"), mesh.group("tp"))
        self._buffers = SharedBuffers([self._model], config.train.buffers, mesh.group("dp_cp"))
        self._seeds = MicroBatchSeeds(config.train.seed, mesh, has_sequence_shards(self))
        self._graphed = compiler_mode(config) == CompilerMode.CUDA_GRAPHS
        # CUDA graphs read parameters where they are, but would copy the casts of each step
        casts = None if self._graphed else kept_dtype(config.precision, mesh.layout)
        self._casts = KeptCasts([self._model], casts)
        self._used: set[nn.Parameter] = set()  # in this step; gradients that stay allocated do not show it
        for parameter in self._model.parameters() if self._graphed else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._used.add)

    def _make_updates(self, config: Config) -> UpdatesInBackward | None:
        if not config.optim.in_backward:
            return None
        if self._own_count:
            raise UserError(
                "optim.in_backward is true, but the loss returns its own count, by which the gradients are divided "
                "after the backward",
                where="optim.in_backward, model",
                fix="optim.in_backward=false, or a loss that counts the targets that are not ignored",
            )
        trained = (parameter for parameter in self._parameters.values() if parameter.requires_grad)
        return UpdatesInBackward(trained, self._mesh.device)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return (self._model,)

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        return self._parameters

    def named_buffers(self) -> Mapping[str, Tensor]:
        return named_buffers(self.parts)

    def compressions(self) -> tuple[Compression, ...]:
        if self._replicas.compression is None:
            return ()
        return (self._replicas.compression,)

    def read_anew(self, written: Collection[str]) -> None:
        self._casts.leave_out(parameter for name, parameter in self._parameters.items() if name in written)

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        clear_gradients(self._parameters.values(), keep_memory=self._graphed)
        self._used.clear()
        self._statistics.begin()
        factor = self._replicas.loss_factor / max(1, batch.target_count)
        self._routers.begin(factor, loss_scale)
        self._replicas.begin(step, len(batch.micro_batches))
        self._seeds.begin(step, batch)
        with self._casts.step():
            sums = self._accumulate(batch.micro_batches, factor, loss_scale)
        if self._graphed:
            for parameter in self._parameters.values():
                parameter.grad = parameter.grad if parameter in self._used else None
        loss_sum, count = (torch.stack(column).sum(0) for column in zip(*sums, strict=True))
        result = with_routers(StepResult(loss_sum, count), self._routers)
        if self._own_count:
            finish_own_count(
                [self._replicas], self._parameters.values(), self._mesh, result.target_count, batch.target_count
            )
        else:
            self._replicas.finish()
        self._statistics.average(self._mesh.group("dp"))
        self._buffers.share()
        return result

    def _accumulate(
        self, micro_batches: Sequence[Batch], factor: float, loss_scale: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Adds the gradients of all micro-batches and returns the sum of losses and the count of each."""
        sums: list[tuple[Tensor, Tensor]] = []
        for index, micro in enumerate(micro_batches):
            self._seeds(index)
            with self._replicas.micro_batch(last=index == len(micro_batches) - 1):
                loss_sum, count, *_ = self._forward(self._replicas.module, micro)
                loss = loss_sum * factor
                (loss if loss_scale is None else loss * loss_scale).backward()
            sums.append((loss_sum.detach(), count.detach()))
        return sums

    def commit(self, finite: Tensor) -> None:
        for compression in self.compressions():
            compression.exchange.commit(finite)
        self._statistics.commit(finite)
        self._routers.commit(finite)

    def eval_step(self, batch: StepBatch) -> StepResult:
        # hooks of the bare model gather ZeRO's parameters, and DDP's wrapper is not needed
        with evaluating(self._model), torch.no_grad():
            columns = list(zip(*(self._forward(self._model, micro) for micro in batch.micro_batches), strict=True))
        self._replicas.evaluated()
        loss_sum, count, *correct = ([*column] for column in columns)
        right = correct[0] if correct and correct[0][0] is not None else None
        return StepResult(_total(loss_sum), _total(count), None if right is None else _total(right))

    def outputs(self, inputs: Tensor, context: Mapping[str, Tensor] | None = None) -> Tensor:
        local = self._own_tokens(Batch(inputs, inputs, context or {}))
        with evaluating(self._model), torch.no_grad(), autocast(self._precision, self._mesh.device):
            outputs = self._model(local.inputs, local.context)
            result: Tensor = whole_sequence(outputs.clone() if self._graphed else outputs, self._mesh)
        self._replicas.evaluated()
        return result

    def reduce(self, result: StepResult) -> StepNumbers:
        return reduce_result(result, self._mesh)

    def clip_grad_norm_(self, max_norm: float, loss_scale: Tensor | None = None) -> Tensor:
        if self.updates is not None and self.updates.active:
            return self.updates.end()
        return gradient_norm.clip_(self._parameters, self._mesh, max_norm, loss_scale)

    def _forward(self, module: nn.Module, micro: Batch) -> tuple[Tensor, ...]:
        local = self._own_tokens(micro)
        if self._graphed:
            torch.compiler.cudagraph_mark_step_begin()
        with refusing_wrong_targets(self._model, [micro]), autocast(self._precision, self._mesh.device):
            results = module(local.inputs, local.context, local.targets)
        if not self._graphed:
            return results
        # the next micro-batch uses the memory of these results again
        return tuple(value.clone() if isinstance(value, Tensor) else value for value in results)

    def _own_tokens(self, micro: Batch) -> Batch:
        """Returns the tokens of ``micro`` that this rank computes."""
        if not isinstance(self._model, Model):
            return micro
        refuse_ragged(micro)
        local = own_tokens(micro, self._model, self._mesh)
        check_sequence(self._model, local.inputs)
        return local


def _total(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum(0)


def clear_gradients(parameters: Iterable[nn.Parameter], keep_memory: bool) -> None:
    """Clears the gradients of the last step.

    Args:
        keep_memory: whether gradients stay allocated and are set to zero. Otherwise the first micro-batch's become the
            parameters' without a copy, which a CUDA graph does not allow: its next replay writes to the same memory.
    """
    gradients: list[Tensor] = []
    for parameter in parameters:
        if not keep_memory:
            parameter.grad = None
        elif parameter.grad is not None:
            gradients.append(parameter.grad)
        elif parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    if gradients:
        torch._foreach_zero_(gradients)


class ReproducibleEngine(ReplicaEngine):
    """Trains with the same bits on any number of ranks (``train.reproducible=any_world_size``).

    The ranks compute logical micro-batches, whose number and size do not depend on the number of ranks. Each
    micro-batch draws its random numbers from (seed, step, micro-batch). Floating-point addition is not associative, and
    the order of an ordinary all-reduce depends on the number of ranks, so gradients and losses are summed over a fixed
    binary tree whose leaves are the logical micro-batches. Every rank then holds the whole gradient; norm, clipping and
    update are the same as in one process. The bits still depend on the processor, the version of torch and the number
    of threads.

    Each rank sums the largest sub-trees whose leaves it computes. An all-to-all sends each rank its share of the
    elements of all sub-trees, the rank adds these up to the root, and an all-gather distributes the result. If each
    rank holds one sub-tree (both numbers are powers of two), a rank sends 2 (N - 1) / N times the bytes, like a ring
    all-reduce. With several sub-trees per rank, the first half takes up to 2 log2(V) times as much. Nothing overlaps
    with the backward pass, and each level of the tree that a rank sums needs a copy of the gradients.

    Raises:
        UserError: the model has batch statistics, so its samples influence each other. The first training step raises
            it if the forward pass changes buffers.
    """

    def __init__(self, config: Config, mesh: Mesh, model: Model | WrappedModel, restored: Collection[str] = ()) -> None:
        if batch_norm.has_batch_statistics(model):
            raise UserError(
                "batch statistics depend on the number of ranks, so the bits of the weights would depend on it too",
                where="train.reproducible, model",
                fix="train.reproducible=null, or use a model without BatchNorm",
            )
        super().__init__(config, mesh, model, restored)
        self._seed = config.train.seed
        self._own = mesh.layout.logical_of(mesh.dp_rank)
        self._reduction = TreeReduction(mesh)
        self._checked = False
        self._unused: set[str] = set()  # parameters without a gradient in this rank's micro-batches of the step

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        """See ``Engine.train_step``. The first rank returns the whole result, the others zeros."""
        scale = 1.0 / max(1, batch.target_count)

        def leaf(node: range) -> Tensor | None:
            if len(node) > 1:
                return None
            seed_micro_batch(self._seed, step, node.start, self._mesh.device)
            micro = batch.micro_batches[node.start - self._own.start]
            return self._gradient(micro, scale, loss_scale)

        self._unused = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        with self._casts.step():
            node_sums = [tree_sum(node, leaf) for node in self._reduction.nodes]
        total = self._reduction.reduce(node_sums)
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        *pieces, loss_sum, counted, used = total.split([*sizes, 1, int(self._own_count), len(sizes)])
        for parameter, piece in zip(self._parameters.values(), pieces, strict=True):
            parameter.grad = None
            if parameter.requires_grad:  # fused optimizers expect the memory format of the parameter
                shaped = piece.view_as(parameter)
                contiguous = parameter.is_contiguous()
                parameter.grad = shaped if contiguous else torch.empty_like(parameter).copy_(shaped)
        if self._unused:  # one process does not update parameters without a gradient in any micro-batch
            for parameter, uses in zip(self._parameters.values(), used.tolist(), strict=True):
                if uses == 0:
                    parameter.grad = None
        first = self._mesh.rank == 0
        if self._own_count:
            count = counted.view(()) * first
            divide_by_count_(self._parameters.values(), self._mesh, count, batch.target_count)
        else:
            count = torch.full((), batch.target_count * first, device=self._mesh.device)
        return StepResult(loss_sum.view(()) * first, count)

    def _gradient(self, micro: Batch, scale: float, loss_scale: Tensor | None) -> Tensor:
        """Returns one flat tensor: the gradient of a micro-batch, its sum of losses, the loss's own count if any, and
        1 for each parameter that has a gradient."""
        for parameter in self._parameters.values():
            parameter.grad = None
        before = {}
        if not self._checked:
            before = {name: value.clone() for name, value in self.named_buffers().items()}
        loss_sum, count, *_ = self._forward(self._model, micro)
        self._check_buffers(before)
        loss = loss_sum * scale
        (loss if loss_scale is None else loss * loss_scale).backward()
        with_gradient = [parameter.grad is not None for parameter in self._parameters.values()]
        self._unused.difference_update(compress(self._parameters, with_gradient))
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters.values()
        ]
        sums = [loss_sum, count] if self._own_count else [loss_sum]
        dtype = parameter_dtype(self._precision)  # a frozen weight may be in the compute dtype
        flat = [
            *(gradient.reshape(-1) for gradient in gradients),
            *(value.detach().to(dtype).view(1) for value in sums),
        ]
        return torch.cat([*flat, torch.tensor(with_gradient, dtype=dtype, device=loss_sum.device)])

    def _check_buffers(self, before: Mapping[str, Tensor]) -> None:
        """Raises UserError if the forward pass has changed buffers, since each rank would have its own values."""
        self._checked = True
        after = self.named_buffers()
        changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        if changed:
            raise UserError(
                f"the forward pass changes the buffer {changed[0]}, whose values then depend on the number of ranks, "
                "and so would the bits of the weights",
                where="train.reproducible, model",
                fix="train.reproducible=null, or use a model whose forward pass changes no buffers",
            )


def halves(node: range) -> tuple[range, range]:
    """Returns the two children of a node, which is the range of its leaves."""
    middle = node.start + (len(node) + 1) // 2
    return range(node.start, middle), range(middle, node.stop)


def cover(node: range, held: range) -> list[range]:
    """Returns the largest nodes in the sub-tree of ``node`` whose leaves are all in ``held``, from left to right."""
    if node.stop <= held.start or held.stop <= node.start:
        return []
    if held.start <= node.start and node.stop <= held.stop:
        return [node]
    left, right = halves(node)
    return cover(left, held) + cover(right, held)


def tree_sum(node: range, sum_of: Callable[[range], Tensor | None]) -> Tensor:
    """Returns the sum over the leaves of ``node`` from the ``sum_of`` sums, which it may overwrite."""
    total = sum_of(node)
    if total is not None:
        return total
    left, right = halves(node)
    return tree_sum(left, sum_of).add_(tree_sum(right, sum_of))


class TreeReduction:
    """Sums vectors over the logical micro-batches of all dp ranks of ``mesh``.

    Attributes:
        nodes: the sub-trees that this rank sums before ``reduce``.
    """

    def __init__(self, mesh: Mesh) -> None:
        layout = mesh.layout
        self._root = range(layout.logical_micro_batches)
        self._rank_nodes = [cover(self._root, layout.logical_of(rank)) for rank in range(layout.dp)]
        self._group = mesh.group("dp")
        self.nodes = self._rank_nodes[mesh.dp_rank]

    def reduce(self, sums: list[Tensor]) -> Tensor:
        """Sums over all leaves. Collective.

        Args:
            sums: a tensor ``[size]`` for each of ``nodes``.

        Returns:
            The sum ``[size]``, with the same bits on every rank and for every number of ranks.
        """
        ranks = len(self._rank_nodes)
        size = sums[0].numel()
        if ranks == 1:
            return sums[0]
        share = math.ceil(size / ranks)
        sent = sums[0].new_zeros(ranks, len(sums), share)  # each rank's share of each sum
        for index, node_sum in enumerate(sums):
            padded = torch.nn.functional.pad(node_sum, (0, ranks * share - size))
            sent[:, index] = padded.view(ranks, share)
        counts = [len(nodes) for nodes in self._rank_nodes]
        received = sent.new_empty(sum(counts), share)  # this rank's share of the sum of every node
        dist.all_to_all_single(received, sent.flatten(0, 1), counts, [len(sums)] * ranks, group=self._group)
        sums_by_node = dict(zip(chain.from_iterable(self._rank_nodes), received, strict=True))
        gathered = sums[0].new_empty(ranks * share)
        all_gather_tensor(gathered, tree_sum(self._root, sums_by_node.get), group=self._group)
        return gathered[:size]
