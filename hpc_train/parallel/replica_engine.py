"""Implements the engine of a model without pipeline stages: each rank runs all layers, with any data-parallel kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hpc_train.config.schema import Config
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.techniques import CompilerMode, compiler_mode
from hpc_train.models import batch_norm
from hpc_train.models.model import Model, aliases, named_buffers, named_parameters, refuse_ragged
from hpc_train.models.wrapped import WrappedModel, evaluating
from hpc_train.parallel import gradient_norm
from hpc_train.parallel.compression import Compression
from hpc_train.parallel.context import own_tokens, whole_sequence
from hpc_train.parallel.engine import StepNumbers, StepResult, reduce_result
from hpc_train.parallel.gradient_norm import UpdatesInBackward
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import parallelize
from hpc_train.parallel.precision.dtypes import KeptCasts, autocast, kept_dtype
from hpc_train.parallel.replicas import finish_own_count, make_replicas
from hpc_train.parallel.tensor import check_sequence
from hpc_train.parallel.writes import SharedBuffers
from hpc_train.parallel.wrong_target import refusing_wrong_targets


class ReplicaEngine:
    """Trains one whole model per data-parallel rank; implements ``Engine``.

    Args:
        model: a model on ``meta``, or one with values, of which those of dp rank 0 are used.
    """

    def __init__(self, config: Config, mesh: Mesh, model: Model | WrappedModel) -> None:
        self._mesh = mesh
        self._precision = config.precision.name
        self._own_count = model.own_count
        self.check_loss = (model.own_count or isinstance(model, WrappedModel)) and not model.mixes_samples
        self._model = parallelize(config, mesh, model)
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
        self._buffers = SharedBuffers([self._model], config.train.buffers, mesh.group("dp_cp"))
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
        self._replicas.begin(step, len(batch.micro_batches))
        with self._casts.step():
            sums = self._accumulate(batch.micro_batches, factor, loss_scale)
        if self._graphed:
            for parameter in self._parameters.values():
                parameter.grad = parameter.grad if parameter in self._used else None
        result = StepResult(*(torch.stack(column).sum(0) for column in zip(*sums, strict=True)))
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
