"""Runs torch's pipeline schedules with stages that know the shapes of their messages before the first micro-batch.

Without these shapes torch would run an extra forward and backward pass, which changes running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    _PipelineScheduleRuntime,
)

from hpc_train.config.extensions import is_import_path
from hpc_train.config.import_path import locate
from hpc_train.data.dataset import Batch
from hpc_train.data.device_copy import with_equal_numbers
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.orders import PipelineShape
from hpc_train.models.model import Model
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision.dtypes import autocast

Loss = Callable[[tuple[Tensor, Tensor], Tensor], Tensor]
Links = Mapping[int, dist.ProcessGroup]


@dataclass(frozen=True)
class Part:
    """Holds one pipeline stage of this rank.

    Attributes:
        model: the model cut to the stage, which FSDP may have sharded.
        module: the module that the schedule calls: ``model`` or its DDP wrapper.
        precision: the precision of the config.
        dtype: the dtype of hidden states between stages.
        begin_forward: called before a forward pass with the index of its micro-batch in the step and the stage.
        backward_done: called when a micro-batch has added to the gradients of all parameters.
    """

    stage: int
    model: Model
    module: nn.Module
    precision: str
    dtype: torch.dtype
    begin_forward: Callable[[int, int], None]
    backward_done: Callable[[], None]

    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        """Returns the shape of the hidden states between stages for a micro-batch of ``inputs``."""
        micro, tokens, *rest = self.model.hidden_shape(inputs)
        return (micro, tokens // self.model.sequence_shards, *rest)

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor], targets: Tensor | None = None) -> Any:
        """Calls ``model`` under autocast and without DDP, for evaluation."""
        with autocast(self.precision, hidden.device):
            return self.cast_output(self.model(hidden, context=context, targets=targets))

    def cast_output(self, output: Any) -> Any:
        """Casts hidden states to the type that the next stage expects, and returns sums unchanged."""
        if isinstance(output, Tensor):
            return output.to(self.dtype).contiguous()
        return output


class _Stage(PipelineStage):
    """Defines a stage that computes under autocast and casts its output to the announced dtype.

    Args:
        links: the groups of neighbors, over which the messages go; see ``Mesh.links``.
    """

    def __init__(self, part: Part, stages: int, example: Batch, group: dist.ProcessGroup, links: Links) -> None:
        inputs = torch.empty_like(example.inputs, device="meta")
        shape = part.hidden_shape(inputs)
        hidden = torch.empty(shape, dtype=part.dtype, device="meta", requires_grad=True)
        outputs: tuple[Tensor, ...] = (hidden,)
        if part.stage == stages - 1:  # the sum of losses and the number of targets
            loss_sum = torch.empty(1, device="meta", requires_grad=True)
            outputs = loss_sum, torch.empty(1, device="meta", dtype=torch.int64)
        super().__init__(
            part.module,
            part.stage,
            stages,
            example.inputs.device,
            input_args=(inputs if part.stage == 0 else hidden,),
            output_args=outputs,
            group=group,
        )
        self._part = part
        self._links = links

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over_links(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over_links(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over_links(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._over_links(super().get_bwd_send_ops(bwd_chunk_id))

    def _over_links(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if not self._links:
            return ops
        return [dist.P2POp(op.op, op.tensor, op.peer, self._links.get(op.group_peer, self.group), op.tag) for op in ops]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._part.begin_forward(fwd_chunk_id, self._part.stage)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(self._part.precision, self.device):
            output = super().forward_maybe_with_nosync(*args, **kwargs)
        if self.is_last:  # torch concatenates these over micro-batches, which scalars do not allow
            return tuple(value.reshape(1) for value in output)
        return self._part.cast_output(output)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Returns the messages that connect the ranks of neighboring stages before the first step.

        In a V, two neighbors are on one rank. Torch 2.11 would send these messages from the rank to itself, which
        gloo refuses; later versions do not call this method.
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Compares the outputs with those announced, except on the last stage, which sends nothing.

        A model chooses the types of its sums; torch 2.11 would raise an error, and later versions do not call this.
        """
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:  # otherwise the gradients of weights are computed separately
            self._part.backward_done()

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_weight_one_chunk(*args, **kwargs)
        self._part.backward_done()


class Schedule:
    """Runs one of torch's schedules for a fixed number of equally shaped micro-batches.

    Args:
        parts: the stages of this rank.
        example: a micro-batch with the shape of all of them.
        loss: maps the last stage's output for a micro-batch to the scalar that is differentiated.
    """

    def __init__(self, mesh: Mesh, parts: Sequence[Part], micro_batches: int, example: Batch, loss: Loss) -> None:
        layout = mesh.layout
        group = mesh.group("pp")
        kind = schedule_class(layout)
        # other classes of a user's may send to both neighbors in one batch, which must have one group
        links: Links = {}
        if issubclass(kind, PipelineScheduleSingle | _PipelineScheduleRuntime):
            links = mesh.links
        built = [_Stage(part, layout.stages, example, group, links) for part in parts]
        # the gradients are those of the mean over the global batch, so they must not be scaled again
        held = built[0] if issubclass(kind, PipelineScheduleSingle) else built
        self._schedule = kind(held, micro_batches, loss_fn=loss, scale_grads=False)
        self._is_first = parts[0].stage == 0

    def step(self, micro_batches: Sequence[Batch]) -> None:
        """Runs forward and backward pass over all micro-batches; gradients accumulate in ``.grad``."""
        inputs = (_join([batch.inputs for batch in micro_batches]),) if self._is_first else ()
        contexts = with_equal_numbers([batch.context for batch in micro_batches])
        context = {name: _join([context[name] for context in contexts]) for name in contexts[0]}
        targets = _join([batch.targets for batch in micro_batches])
        # torch cannot split keywords without a tensor, so every stage gets the targets; only the head uses them
        self._schedule.step(*inputs, target=targets, context=context, targets=targets, return_outputs=False)


def _join(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    return torch.cat(values)


def schedule_class(layout: Layout) -> Any:
    """Imports torch's class for the schedule of ``layout``.

    Raises:
        UserError: the class cannot be imported or is not a schedule of torch.
    """
    path = layout.pipeline.torch_class
    where = f"strategy.schedule={layout.schedule}"
    imported = locate(path, where)
    if isinstance(imported, type) and issubclass(imported, PipelineScheduleSingle | PipelineScheduleMulti):
        return imported
    raise UserError(
        f"{path} is not a pipeline schedule of torch",
        where=where,
        fix="set torch_class to a subclass of PipelineScheduleSingle or PipelineScheduleMulti",
    )


Action = tuple[str, int]  # FORWARD, FULL_BACKWARD, BACKWARD_INPUT or BACKWARD_WEIGHT, and the stage


def recorded_actions(layout: Layout) -> list[list[Action]]:
    """Returns the actions of each rank in one step, in order, as torch's schedule of ``layout`` plans them."""
    schedule = planned_schedule(layout)
    single = isinstance(schedule, PipelineScheduleSingle)
    orders: Any = schedule._get_pipeline_order() if single else schedule.pipeline_order
    return [
        [
            (part.computation_type.name, part.stage_index)
            for action in orders[rank]
            if action is not None
            for part in (action.sub_actions or (action,))
            if part.computation_type.name in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT")
        ]
        for rank in range(layout.pp)
    ]


def planned_schedule(layout: Layout) -> Any:
    """Returns torch's schedule of ``layout`` with the plan of a step, on rank 0, which cannot run."""
    kind = schedule_class(layout)
    stages = [
        SimpleNamespace(  # the attributes that torch's schedules read from a stage to plan a step
            stage_index=stage,
            num_stages=layout.stages,
            group_rank=0,
            group_size=layout.pp,
            group=None,
            stage_index_to_group_rank={},
            submod=None,
            has_backward=True,
            is_first=stage == 0,
            is_last=stage == layout.stages - 1,
            device=torch.device("cpu"),
        )
        for stage, rank in enumerate(layout.placement)
        if rank == 0
    ]
    planned = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(planned, layout.micro_batches, loss_fn=lambda *_: None)


def count_in_flight(actions: Sequence[Action], stages: Sequence[int]) -> set[tuple[int, ...]]:
    """Returns the micro-batches in flight on each of a rank's ``stages``, for all moments with the largest sum.

    A micro-batch is in flight from its forward pass until the gradients of the weights are computed.
    """
    in_flight = dict.fromkeys(stages, 0)
    counts = set()
    for action, stage in actions:
        in_flight[stage] += {"FORWARD": 1, "BACKWARD_INPUT": 0}.get(action, -1)
        counts.add(tuple(in_flight.values()))
    most = max(map(sum, counts))
    return {count for count in counts if sum(count) == most}


def check_extension(layout: Layout) -> None:
    """Compares the description of a schedule from a user's package with the actions of torch's schedule.

    Raises:
        UserError: torch does not accept the stages, or the description is wrong.
    """
    if not is_import_path(layout.schedule):
        return
    row = layout.pipeline
    where = f"strategy.schedule={layout.schedule}"
    try:
        ranks = recorded_actions(layout)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"{row.torch_class} does not accept {layout.stages_per_rank} stages on each of {layout.pp} ranks with "
            f"{layout.micro_batches} micro-batches: {error}",
            where=where,
            fix="correct stages_per_rank, placement or micro_batches in the description of the schedule",
        ) from error
    for rank, actions in enumerate(ranks):
        _check_rank(layout, rank, actions, where)


def _check_rank(layout: Layout, rank: int, actions: Sequence[Action], where: str) -> None:
    row = layout.pipeline
    stages = [stage for stage, owner in enumerate(layout.placement) if owner == rank]
    wrong: dict[str, object] = {"placement": {stage for _, stage in actions} != {*stages}}
    if not wrong["placement"]:
        stated = tuple(layout.in_flight(stage) for stage in stages)
        wrong["in_flight"] = stated not in count_in_flight(actions, stages)
    wrong["splits_backward"] = row.splits_backward != any(action == "BACKWARD_WEIGHT" for action, _ in actions)
    if row.order is not None:
        shape = PipelineShape(layout.pp, layout.stages_per_rank, layout.micro_batches)
        wrong["order"] = [(action.work, action.stage) for action in row.order(shape, rank)] != [*actions]
    for fact, differs in wrong.items():
        if differs:
            raise UserError(
                f"{fact} of schedule {row.name!r} differs from {row.torch_class} on rank {rank} of {layout.pp}",
                where=where,
                fix=f"correct {fact}; hpc_train.parallel.pipeline.schedules.recorded_actions returns the actions",
            )


class DualPipeV(ScheduleDualPipeV):
    """Runs torch's schedule, but sends each message as soon as it is computed.

    Torch joins a forward and the backward after it into one action, so that a function of the user may compute both at
    once. Without such a function it sends the result of the forward after the backward, and the next rank waits for it.
    Separately, they compute the same in the same order.
    """

    def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
        joined = super()._calculate_single_rank_operations(rank)
        return [part for action in joined if action is not None for part in action.sub_actions or (action,)]
