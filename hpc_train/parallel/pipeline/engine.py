"""Implements the engine that trains a model in pipeline stages with one of torch's schedules, and evaluates it.

Every rank of a pipeline reads the same batch; the first stage uses the inputs and the last one the targets. The forward
pass of the last stage computes the loss, so that the hooks of FSDP and DDP see one module from inputs to loss.

Evaluation has its own forward pass, because torch's fails for stages placed in a V. Stage s computes micro-batch m in
tick s + m, so all stages work at the same time. All ranks send and receive in one global order of messages, (tick,
stage). Both ends of the first incomplete message wait for nothing else, so no placement can deadlock, even if a send
blocks until its receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import Config
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.models import batch_norm
from hpc_train.models.model import Model, check_hidden_shape, named_buffers, named_parameters, refuse_ragged
from hpc_train.models.moe import Routers
from hpc_train.models.wrapped import evaluating
from hpc_train.parallel import gradient_norm
from hpc_train.parallel.compression import Compression
from hpc_train.parallel.context import own_tokens
from hpc_train.parallel.engine import (
    MicroBatchSeeds,
    StepNumbers,
    StepResult,
    reduce_result,
    refusing_wrong_targets,
    with_routers,
)
from hpc_train.parallel.gradient_norm import UpdatesInBackward
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import parallelize
from hpc_train.parallel.pipeline.schedules import Part, Schedule, check_extension
from hpc_train.parallel.pipeline.split import TiedWeights, cut, split_layers
from hpc_train.parallel.precision.dtypes import KeptCasts, hidden_dtype, kept_dtype, parameter_dtype
from hpc_train.parallel.reduction import SendOrder
from hpc_train.parallel.replicas import finish_own_count, make_replicas
from hpc_train.parallel.tensor import check_sequence
from hpc_train.parallel.writes import SharedBuffers


@dataclass
class _Loss:
    """Scales the sum of losses of a micro-batch and records it; the schedule calls it."""

    scale: float = 1.0
    loss_scale: Tensor | None = None
    sums: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def begin(self, scale: float, loss_scale: Tensor | None) -> None:
        self.scale = scale
        self.loss_scale = loss_scale
        self.sums.clear()
        self.counts.clear()

    def __call__(self, output: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        total, count = output
        self.sums.append(total.detach())
        self.counts.append(count.detach())
        # in this order, because torch detaches the loss in place, which views do not allow
        loss = total.squeeze(0) * self.scale
        if self.loss_scale is None:
            return loss
        return loss * self.loss_scale


class PipelineEngine:
    """Trains this rank's stages of a pipeline; implements ``Engine``.

    Args:
        model: the whole model on ``meta``; it is not changed.
        layers: the layers of each stage from a profile; None follows ``strategy.pp_split``.
        restored: see ``parallelize``.

    Raises:
        UserError: the model cannot be cut into the stages of ``mesh.layout``.
    """

    updates: UpdatesInBackward | None = None

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: Model,
        layers: Sequence[range] | None = None,
        restored: Collection[str] = (),
    ) -> None:
        layout = mesh.layout
        check_extension(layout)
        self._mesh = mesh
        self._precision = config.precision.name
        self._whole = model
        layers = layers or split_layers(len(model.layers), layout.stages, config.strategy.pp_split)
        placement = layout.placement
        held = [stage for stage in range(layout.stages) if placement[stage] == mesh.pp_rank]
        models = {stage: parallelize(config, mesh, cut(model, stage, layers), restored) for stage in held}
        self._tied = TiedWeights(models, model.tied, layers, placement, mesh)
        self._parameters = named_parameters(models.values(), model.tied)
        self.aliases = model.tied
        self._own_count = self.check_loss = model.own_count
        self._copies = [parameter for part in models.values() for parameter in part.parameters()]
        send_order: SendOrder = []
        self._replicas = {  # in the order in which gradients are complete: the last stage is first in every schedule
            stage: make_replicas(models[stage], mesh, config.strategy, model.tied, send_order, self._own_count)
            for stage in reversed(held)
        }
        dtype = hidden_dtype(config.precision)
        sequence_shards = any(part.sequence_shards > 1 for part in models.values())
        self._seeds = MicroBatchSeeds(config.train.seed, mesh, sequence_shards)
        self._parts = []
        for stage, part in models.items():
            replicas = self._replicas[stage]
            calls = (self._seeds, replicas.backward_done)
            self._parts.append(Part(stage, part, replicas.module, self._precision, dtype, *calls))
        self._statistics = batch_norm.RunningStatistics(self.parts)
        self._routers = Routers(self.parts, mesh.group("dp_cp"), mesh.group("tp"))
        self._buffers = SharedBuffers(self.parts, config.train.buffers, mesh.group("dp_cp"))
        self._casts = KeptCasts(models.values(), kept_dtype(config.precision, layout))
        self._loss = _Loss()
        self._schedule: Schedule | None = None
        self._schedule_shape: tuple[int, torch.Size] | None = None
        self._forward = ForwardPass(self._parts, placement, mesh.group("pp"))

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return tuple(part.model for part in self._parts)

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        return self._parameters

    def named_buffers(self) -> Mapping[str, Tensor]:
        return named_buffers(self.parts)

    def compressions(self) -> tuple[Compression, ...]:
        compressions = (replicas.compression for replicas in self._replicas.values())
        return tuple(compression for compression in compressions if compression is not None)

    def read_anew(self, written: Collection[str]) -> None:
        self._casts.leave_out(parameter for name, parameter in self._parameters.items() if name in written)

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        self._tied.refresh()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._statistics.begin()
        micro_batches = self._own_tokens(batch)
        schedule = self._schedule_for(micro_batches, batch.micro_batches[0])
        factor = next(iter(self._replicas.values())).loss_factor
        self._loss.begin(factor / max(1, batch.target_count), loss_scale)
        self._routers.begin(factor / max(1, batch.target_count), loss_scale)
        for replicas in self._replicas.values():
            replicas.begin(step, len(micro_batches))
        self._seeds.begin(step, batch)
        with refusing_wrong_targets(self._parts[-1].model, batch.micro_batches), self._casts.step():
            schedule.step(micro_batches)
        result = with_routers(self._result(self._loss.sums, self._loss.counts), self._routers)
        if self._own_count:
            finish_own_count(self._replicas.values(), self._copies, self._mesh, result.target_count, batch.target_count)
        else:
            for replicas in self._replicas.values():
                replicas.finish()
        self._tied.add_gradients()
        self._statistics.average(self._mesh.group("dp"))
        self._buffers.share()
        return result

    def commit(self, finite: Tensor) -> None:
        for compression in self.compressions():
            compression.exchange.commit(finite)
        self._statistics.commit(finite)
        self._routers.commit(finite)

    def eval_step(self, batch: StepBatch) -> StepResult:
        self._tied.refresh()
        with ExitStack() as modes, refusing_wrong_targets(self._parts[-1].model, batch.micro_batches):
            for part in self.parts:
                modes.enter_context(evaluating(part))
            sums = self._forward.run(self._own_tokens(batch))
        for replicas in self._replicas.values():
            replicas.evaluated()
        result = self._result([total for total, _, _ in sums], [count for _, count, _ in sums])
        correct = [right for _, _, right in sums if right is not None]
        if correct:
            return replace(result, correct=torch.stack(correct).sum())
        return result

    def outputs(self, inputs: Tensor, context: Mapping[str, Tensor] | None = None) -> Tensor:
        raise UserError(
            "no rank holds the whole model, so its outputs cannot be computed outside of a step",
            where="strategy.pp",
            fix="use a strategy without stages, such as zero3 or tp",
        )

    def reduce(self, result: StepResult) -> StepNumbers:
        return reduce_result(result, self._mesh)

    def clip_grad_norm_(self, max_norm: float, loss_scale: Tensor | None = None) -> Tensor:
        return gradient_norm.clip_(self._parameters, self._mesh, max_norm, loss_scale, self._tied.copies)

    def _own_tokens(self, batch: StepBatch) -> tuple[Batch, ...]:
        """Returns the micro-batches with the tokens that this rank computes."""
        model = self._parts[0].model
        for micro in batch.micro_batches:
            _check_tensors(micro)
        local = tuple(own_tokens(micro, model, self._mesh) for micro in batch.micro_batches)
        for micro in local:
            check_sequence(model, micro.inputs)
        return local

    def _schedule_for(self, micro_batches: tuple[Batch, ...], full_batch: Batch) -> Schedule:
        """Returns the schedule for this number and shape of micro-batches, which usually stay the same during a run.

        Args:
            full_batch: the first one with all tokens of its samples.
        """
        example = micro_batches[0]
        shape = (len(micro_batches), example.inputs.shape)
        if self._schedule is None or shape != self._schedule_shape:
            if self._schedule is None:
                check_hidden_shape(self._whole, full_batch.inputs, full_batch.context)
            self._schedule = Schedule(self._mesh, self._parts, len(micro_batches), example, self._loss)
            self._schedule_shape = shape
        return self._schedule

    def _result(self, sums: list[Tensor], counts: list[Tensor]) -> StepResult:
        if sums:
            return StepResult(torch.stack(sums).sum(), torch.stack(counts).sum())
        zero = torch.zeros((), dtype=parameter_dtype(self._precision), device=self._mesh.device)
        return StepResult(zero, zero.to(torch.int64))


def _check_tensors(micro: Batch) -> None:
    """Raises UserError if the inputs or targets are several tensors, which no stage sends on."""
    for name, value in (("inputs", micro.inputs), ("targets", micro.targets)):
        if not isinstance(value, Tensor):
            refuse_ragged(micro)
            raise UserError(
                f"the {name} of a micro-batch are a dict, but pipeline stages take one tensor",
                where="strategy.pp, data.collate",
                fix=f"return one tensor as {name} and the others as context, or use strategy=zero3",
            )


Sums = tuple[Tensor, Tensor, Tensor | None]  # of one micro-batch: loss, target count, correct predictions


def forward_order(stages: Sequence[int], placement: Sequence[int], micro_batches: int) -> list[tuple[str, int, int]]:
    """Returns the actions of a rank in a forward pass, ``("receive" | "compute", stage, micro-batch)``, in order.

    A receive gets the input of ``stage``; a compute sends its output to the rank of the next stage. The output of stage
    s for micro-batch m is the message at position (s + m, s) in the order of all ranks.

    Args:
        stages: the stages of this rank.
        placement: the pp rank of every stage.
    """
    events = []
    for stage in stages:
        for micro in range(micro_batches):
            events.append(((stage + micro, stage), ("compute", stage, micro)))
            if stage > 0 and placement[stage - 1] != placement[stage]:
                events.append(((stage - 1 + micro, stage - 1), ("receive", stage, micro)))
    return [event for _, event in sorted(events)]


class ForwardPass:
    """Runs micro-batches forward through the stages of all ranks.

    Args:
        parts: the stages of this rank.
        placement: the pp rank of every stage.
        group: the ranks of this pipeline.
    """

    def __init__(self, parts: Sequence[Part], placement: Sequence[int], group: dist.ProcessGroup) -> None:
        self._parts = {part.stage: part for part in parts}
        self._placement = placement
        self._group = group

    @torch.no_grad()
    def run(self, micro_batches: Sequence[Batch]) -> list[Sums]:
        """Returns the sums of each micro-batch on the rank of the last stage, and an empty list on the others.

        Micro-batches may differ in shape; all ranks of the pipeline pass the same ones.
        """
        last = len(self._placement) - 1
        arriving: dict[tuple[int, int], tuple[Tensor, dist.Work | None]] = {}
        sending: deque[tuple[Tensor, dist.Work]] = deque()
        results: list[Sums] = []
        for action, stage, micro in forward_order(list(self._parts), self._placement, len(micro_batches)):
            batch = micro_batches[micro]
            part = self._parts[stage]
            if action == "receive":
                empty = torch.empty(part.hidden_shape(batch.inputs), dtype=part.dtype, device=batch.inputs.device)
                work = dist.irecv(empty, group=self._group, group_src=self._placement[stage - 1])
                arriving[stage, micro] = (empty, work)
                continue
            hidden = batch.inputs
            if stage > 0:
                hidden, work = arriving.pop((stage, micro))
                if work is not None:
                    work.wait()
            if stage == last:
                results.append(part.forward(hidden, batch.context, batch.targets))
                continue
            output = part.forward(hidden, batch.context)
            if self._placement[stage + 1] == self._placement[stage]:
                arriving[stage + 1, micro] = (output, None)
            else:
                sent = dist.isend(output, group=self._group, group_dst=self._placement[stage + 1])
                assert sent is not None  # None is returned outside the group
                sending.append((output, sent))
            while len(sending) > last:  # limits the memory; these messages have usually arrived
                sending.popleft()[1].wait()
        for _, sent in sending:
            sent.wait()
        return results
