"""Every pipeline trains and evaluates as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples.own_pipeline_model import ResidualNet
from hpc_train.config.schema import CustomModelConfig
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.techniques import KINDS, SCHEDULES
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh, join_mesh
from hpc_train.parallel.parallelize import materialize
from hpc_train.parallel.pipeline.engine import PipelineEngine
from hpc_train.parallel.pipeline.schedules import _Stage
from hpc_train.parallel.pipeline.split import _group_across
from tests.parallel.cells import MODELS, Cell, Form, cells, in_two_forms
from tests.parallel.oracle import check_cells, error, local_batch, mesh_of, whole
from tests.ranks import run_on_world, run_ranks


def pipeline(schedule: str, **fields: Any) -> dict[str, Any]:
    return {"pp": 2, "schedule": schedule, "stages_per_rank": SCHEDULES[schedule].stages_per_rank[0]} | fields


TWO, FOUR = {"micro_batches": 2}, {"micro_batches": 4}
EACH_SCHEDULE = [
    Cell(2, "gpt", strategy=pipeline("sequential"), batch={"micro_batches": 1}),
    Cell(2, "vit", strategy=pipeline("gpipe", pp_split=[2, 1]), batch={"micro_size": 5}),
    Cell(2, "gpt-tied", strategy=pipeline("1f1b"), batch=FOUR, train={"loss_chunks": 2}, loss_scale=1024.0),
    Cell(2, "gpt-tied", strategy=pipeline("interleaved_1f1b", pp_split=[0, 1, 3, 0]), batch=FOUR),
    Cell(2, "gpt", strategy=pipeline("interleaved_zero_bubble"), batch=FOUR),
    Cell(2, "gpt-tied", strategy=pipeline("zbv"), batch=FOUR, train={"z_loss": 0.3}),
    Cell(2, "vit", strategy=pipeline("dualpipev"), batch=FOUR),
]
EACH_DATA_PARALLELISM = [
    Cell(4, "gpt-tied", strategy=pipeline("1f1b", dp=2), batch=TWO),
    Cell(4, "gpt-tied", strategy=pipeline("zbv", dp=2, data_parallel="allreduce"), batch=FOUR),
    Cell(4, "vit", strategy=pipeline("1f1b", dp=2, data_parallel="zero1"), batch=TWO),
    Cell(4, "vit", strategy=pipeline("gpipe", dp=2, data_parallel="zero2"), batch=TWO),
    Cell(4, "vit", strategy=pipeline("1f1b", dp=2, data_parallel="zero3"), batch=TWO),
    Cell(4, "gpt", strategy=pipeline("1f1b", tp=2), batch=TWO),
    Cell(4, "gpt-tied", strategy=pipeline("1f1b", pp=4), batch=FOUR),
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_pipeline_trains_as_one_process_does(world_size: int, record: Callable[..., None]) -> None:
    """Two ranks have each schedule; four have each data parallelism, tensor parallelism and four stages."""
    chosen = EACH_SCHEDULE if world_size == 2 else EACH_DATA_PARALLELISM
    record(check_cells(chosen), cells(world_size, pipelines=True)[1])
    key, names = ("schedule", SCHEDULES) if world_size == 2 else ("data_parallel", KINDS)
    assert {cell.strategy.get(key, "ddp") for cell in chosen} == set(names)


@pytest.mark.long_form(150)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_pipelines_of_a_model(world_size: int, model: str, record: Callable[..., None]) -> None:
    record(check_cells([cell for cell in cells(world_size, pipelines=True)[0] if cell.model == model]), [])


THREE_DIMENSIONS = [
    pipeline("zbv", dp=2, tp=2, data_parallel="zero2"),
    pipeline("interleaved_1f1b", dp=4, data_parallel="zero2", shard=2),
    *(pipeline("1f1b", dp=2, tp=2, data_parallel=kind) for kind in ("allreduce", "zero3")),
]


@pytest.mark.long_form(25)  # eight ranks; each pair of these axes has cells of four ranks above
@pytest.mark.parametrize("split", THREE_DIMENSIONS, ids=lambda split: " ".join(f"{k}={v}" for k, v in split.items()))
def test_three_dimensions(split: dict[str, Any], record: Callable[..., None]) -> None:
    record(check_cells([Cell(8, "gpt-tied", strategy=split)]), [])


@pytest.mark.long_form(25)  # EACH_SCHEDULE has splits and stages without layers
def test_a_given_split_and_more_stages_and_micro_batches(record: Callable[..., None]) -> None:
    chosen = [
        Cell(2, "gpt-tied", strategy=pipeline("1f1b", pp_split=[1, 2])),
        Cell(2, "vit", strategy=pipeline("1f1b", pp_split=[2, 1]), batch={"micro_size": 1}),
        Cell(2, "gpt-tied", strategy=pipeline("1f1b", pp_split=[3, 0])),
        Cell(2, "vit", strategy=pipeline("gpipe", pp_split=[0, 3])),
        Cell(2, "gpt-tied", strategy=pipeline("interleaved_1f1b", pp_split=[0, 1, 3, 0])),
        Cell(2, "gpt", strategy=pipeline("zbv", pp_split=[0, 2, 2, 0])),
        Cell(2, "gpt-tied", strategy=pipeline("interleaved_1f1b", stages_per_rank=3), batch={"micro_batches": 8}),
        Cell(2, "gpt-tied", strategy=pipeline("interleaved_zero_bubble", stages_per_rank=3)),
        Cell(2, "gpt-tied", strategy=pipeline("zbv"), batch={"micro_batches": 5}),
        Cell(2, "gpt", strategy=pipeline("gpipe"), batch={"micro_batches": 10}),
    ]
    record(check_cells(chosen), [])


def test_the_example_of_an_own_model_trains_in_a_pipeline() -> None:
    check_cells([Cell(2, "own", strategy={"dp": 2}), Cell(2, "own", strategy={"pp": 2})])


class WrongShape(ResidualNet):
    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        return (len(inputs), self.width + 1)


def first_step(rank: int, world_size: int) -> str:
    cell = Cell(2, "own", strategy={"pp": 2})
    config, mesh = cell.config(), mesh_of(cell, rank)
    config.model = CustomModelConfig(_target_=f"{__name__}.WrongShape", args={"image_size": 8})
    engine = build_engine(config, mesh)
    try:
        engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
    except UserError as error:
        return error.what
    return ""


def test_hidden_states_of_another_shape_are_an_error_before_the_first_message() -> None:
    for message in run_on_world(2, first_step):
        assert "stem of the model WrongShape returns hidden states of shape (2, 32)" in message
        assert "hidden_shape returns (2, 33)" in message


@pytest.mark.long_form(45)  # test_activation_offload has recomputation in pipelines
def test_activation_checkpointing_in_a_pipeline(record: Callable[..., None]) -> None:
    chosen = []
    for mode in ("full", "selective", "ops"):
        for schedule, kind in (
            ("1f1b", "ddp"),
            ("1f1b", "zero3"),
            ("interleaved_1f1b", "allreduce"),
            ("interleaved_zero_bubble", "zero1"),
            ("zbv", "allreduce"),
            ("zbv", "zero2"),
        ):
            split = pipeline(schedule, dp=2, data_parallel=kind, bucket_cap_mb=0.001)
            cell = Cell(4, "gpt-tied", strategy=split, train={"activation_checkpointing": mode})
            if mode == "ops" and SCHEDULES[schedule].splits_backward:
                with pytest.raises(UserError, match="activation_checkpointing=ops does not support"):
                    cell.layout()
            else:
                chosen.append(cell)
    record(check_cells(chosen), [])


@pytest.mark.long_form(30)  # EACH_SCHEDULE has a loss scale
def test_a_loss_scale_in_a_pipeline(record: Callable[..., None]) -> None:
    train = {"loss_chunks": 2}
    chosen = [
        Cell(2, "gpt-tied", strategy=pipeline(schedule), train=train, loss_scale=1024.0) for schedule in SCHEDULES
    ]
    chosen += [Cell(2, "vit", "fp32", pipeline(schedule), {"global_size": 8}) for schedule in SCHEDULES]
    record(check_cells(chosen), [])


def test_a_middle_stage_without_layers_is_refused() -> None:
    with pytest.raises(UserError, match="must list 4 stages with 4 layers"):
        Cell(2, strategy=pipeline("interleaved_1f1b", pp_split=[2, 0, 1, 1])).layout()


@pytest.mark.long_form(60)  # the test of given splits has stages without layers
def test_stages_of_stem_or_head_alone_with_replicas_and_tensor_parallelism(record: Callable[..., None]) -> None:
    ends = [0, 3]
    chosen = [
        Cell(4, model, strategy=pipeline("1f1b", dp=2, data_parallel=kind, pp_split=split))
        for kind in KINDS
        for model, split in (("gpt-tied", ends[::-1]), ("vit", ends))
    ]
    chosen += [
        Cell(4, model, strategy=pipeline("1f1b", tp=2, pp_split=split))
        for split in (ends, ends[::-1])
        for model in ("gpt", "vit")
    ]
    record(check_cells(chosen), [])


def test_auto_takes_a_schedule_that_goes_and_says_why() -> None:
    for fields, batch, schedule in (
        ({}, {}, "1f1b"),
        ({"stages_per_rank": 2}, {}, "interleaved_1f1b"),
        ({"stages_per_rank": 1}, {"micro_batches": 1}, "sequential"),
    ):
        layout = Cell(2, strategy={"pp": 2, "schedule": "auto"} | fields, batch=batch).layout()
        assert layout.schedule == schedule
        assert any(f"schedule {schedule}" in note for note in layout.notes)
    with pytest.raises(UserError, match=r"a multiple of 2|cannot fill"):
        Cell(2, strategy={"pp": 2, "schedule": "auto", "stages_per_rank": 2}, batch={"micro_batches": 5}).layout()


@pytest.mark.long_form(60)  # most of a minute of the C++ compiler
def test_compiled_layers_in_a_pipeline(record: Callable[..., None]) -> None:
    record(check_cells([Cell(2, strategy=pipeline("1f1b"), train={"compile": True})], timeout=250), [])


def test_a_rank_with_neighboring_stages_sends_itself_nothing() -> None:
    """Torch 2.11 connects the ranks with these messages, and gloo refuses those to the rank itself."""
    assert run_on_world(2, _first_messages, Cell(2, "gpt", strategy=pipeline("zbv"))) == [{1}, {0}]


def _first_messages(rank: int, _: int, cell: Cell) -> set[int]:
    """The ranks with which the stages of this rank exchange the messages before the first step."""
    mesh = mesh_of(cell, rank)
    engine = build_engine(cell.config(), mesh)
    assert isinstance(engine, PipelineEngine)
    micro_batches = local_batch(cell, mesh.layout, mesh.dp_rank, 0).micro_batches
    schedule: Any = engine._schedule_for(micro_batches, micro_batches[0])._schedule
    return {op.group_peer for stage in schedule._stages for op in stage._get_init_p2p_neighbors_ops()}


def sizes_of_groups(rank: int, world_size: int, schedules: list[dict[str, Any]]) -> list[set[int]]:
    """The sizes of the groups over which a step sends, for each schedule."""
    found = []
    for strategy in schedules:
        cell = Cell(world_size, strategy={"pp": world_size} | strategy, batch={"micro_batches": 8})
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        sizes: set[int] = set()
        over_links = _Stage._over_links

        def noted(stage: _Stage, ops: list[dist.P2POp], over_links: Any = over_links, sizes: Any = sizes) -> Any:
            sent = over_links(stage, ops)
            sizes.update(op.group.size() for op in sent)
            return sent

        with mock.patch.object(_Stage, "_over_links", noted):
            engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        found.append(sizes)
    return found


def test_neighbors_have_a_group_of_their_own() -> None:
    """With NCCL a message that waits would hold up those of the other neighbor."""
    chosen = [{"schedule": "1f1b"}, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}]
    assert run_on_world(4, sizes_of_groups, chosen) == [[{2}, {2}]] * 4


@in_two_forms(40)
def test_evaluation_leaves_the_training_alone_and_takes_other_shapes(form: Form) -> None:
    """An evaluation has forward passes only, so the short form has one schedule."""
    schedules = ("zbv", *(name for name in SCHEDULES if name != "zbv"))
    batch = {"global_size": 4, "micro_batches": 4}
    cells = [
        Cell(2, "gpt-tied", strategy=pipeline(schedule), batch={} if schedule == "sequential" else batch)
        for schedule in schedules
    ]
    run_on_world(2, _evaluate_between, form(cells, "pp"))


@pytest.mark.long_form(20)
def test_evaluation_leaves_the_training_of_replicas_alone() -> None:
    splits = [("1f1b", "zero3"), ("zbv", "zero2"), ("1f1b", "zero2"), ("1f1b", "ddp")]
    cells = [Cell(4, "vit", strategy=pipeline(schedule, dp=2, data_parallel=kind)) for schedule, kind in splits]
    run_on_world(4, _evaluate_between, cells)


def _evaluate_between(rank: int, _: int, chosen: list[Cell]) -> None:
    for cell in chosen:
        mesh = mesh_of(cell, rank)
        plain, evaluated = (_two_steps(cell, mesh, evaluate) for evaluate in (False, True))
        for name, value in plain.items():
            assert torch.equal(value, evaluated[name]), f"{cell}: {name}"


def _two_steps(cell: Cell, mesh: Mesh, evaluate: bool) -> dict[str, Tensor]:
    """The local parameters after two steps; after each evaluations in two shapes that must agree."""
    engine = build_engine(cell.config(), mesh)
    optimizer = torch.optim.SGD(engine.named_parameters().values(), lr=0.1)
    for step in range(2):
        batch = local_batch(cell, mesh.layout, mesh.dp_rank, step)
        engine.train_step(step, batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        if evaluate:
            numbers = [engine.reduce(engine.eval_step(shape)) for shape in (batch, _one_by_one(batch))]
            assert numbers[0].target_count == batch.target_count == numbers[1].target_count, cell
            assert numbers[0].accuracy == numbers[1].accuracy, cell
            assert numbers[0].loss == pytest.approx(numbers[1].loss, rel=1e-12), cell
            assert all(part.training for part in engine.parts)
    return {name: _local(value.detach()).clone() for name, value in engine.named_parameters().items()}


def _one_by_one(batch: StepBatch) -> StepBatch:
    """The same samples in micro-batches of one."""
    pieces = [
        Batch(*piece)
        for micro in batch.micro_batches
        for piece in zip(micro.inputs.split(1), micro.targets.split(1), strict=True)
    ]
    return StepBatch(tuple(pieces), batch.target_count)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.long_form(10)  # tests/parallel/test_packing.py has documents in pipelines
def test_every_stage_gets_the_context() -> None:
    chosen = [Cell(2, "gpt", strategy=pipeline(schedule)) for schedule in ("1f1b", "interleaved_1f1b", "zbv")]
    run_on_world(2, _with_documents, chosen)


def _with_documents(rank: int, _: int, chosen: list[Cell]) -> None:
    """Positions that start anew and attention inside documents, against the whole model on this rank."""
    for cell in chosen:
        config, mesh = cell.config(), mesh_of(cell, rank)
        batch = _documents(local_batch(cell, mesh.layout, 0, 0))
        model = build_model(config.model, config.train.seed)
        assert isinstance(model, Model)
        materialize(model, mesh.device, config.train.seed, torch.float64)
        loss: Any = sum(model(micro.inputs, micro.context, micro.targets)[0] for micro in batch.micro_batches)
        (loss / batch.target_count).backward()
        engine = build_engine(config, mesh)
        result = engine.reduce(engine.train_step(0, batch))
        evaluated = engine.reduce(engine.eval_step(batch))
        assert result.loss == pytest.approx(loss.item() / batch.target_count, rel=1e-12), cell
        assert evaluated.loss == pytest.approx(result.loss, rel=1e-12), cell
        expected = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        found = {name: whole(parameter.grad) for name, parameter in engine.named_parameters().items()}
        assert error(found, expected) < 1e-10, cell


def _documents(batch: StepBatch) -> StepBatch:
    """``batch`` with two documents per sequence, cut elsewhere in every sample."""
    micro_batches = []
    for index, micro in enumerate(batch.micro_batches):
        samples, length = micro.inputs.shape
        starts = 1 + (index + torch.arange(samples).unsqueeze(1)) % (length - 1)
        places = torch.arange(length).expand(samples, length)
        second = (places >= starts).long()
        context = {"document_ids": second, "positions": places - second * starts}
        micro_batches.append(replace(micro, context=context))
    return StepBatch(tuple(micro_batches), batch.target_count)


def half_precision(world_size: int) -> list[Cell]:
    if world_size == 2:
        bf16 = Cell(2, "gpt-tied", "bf16", pipeline("1f1b"), TWO)
        return [bf16, Cell(2, "vit", "fp16", pipeline("zbv"), FOUR, loss_scale=1024.0)]
    kinds = [("1f1b", "allreduce"), ("1f1b", "zero2"), ("zbv", "zero1"), ("interleaved_1f1b", "ddp")]
    return [
        Cell(4, model, precision, pipeline(schedule, dp=2, data_parallel=kind), loss_scale=loss_scale)
        for precision, loss_scale in (("bf16", None), ("fp16", 1024.0))
        for schedule, kind in kinds
        for model in ("gpt-tied", "vit")
    ]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long_form(35))])
def test_half_precision_travels_in_the_type_that_the_model_computes(world_size: int) -> None:
    chosen = half_precision(world_size)
    for rank in run_on_world(world_size, _half_errors, chosen):
        for cell, (of_loss, of_gradients) in zip(chosen, rank, strict=True):
            assert of_loss < 0.01, cell
            assert of_gradients < 0.1, cell


def _half_errors(rank: int, _: int, chosen: list[Cell]) -> list[tuple[float, float]]:
    """Of the first step's loss and gradients against fp32; checks what leaves every stage on the way."""
    errors = []
    for cell in chosen:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        assert isinstance(engine, PipelineEngine)
        seen = _watch_types(engine)
        loss, gradients = _first_step(cell, mesh, engine)
        assert all(found == wanted for found, wanted in seen) and seen, f"{cell}: {seen}"
        exact = replace(cell, precision="fp32", loss_scale=None)
        wanted, wanted_gradients = _first_step(exact, mesh, build_engine(exact.config(), mesh))
        errors.append((abs(loss - wanted) / wanted, error(gradients, wanted_gradients)))
    return errors


def _first_step(cell: Cell, mesh: Mesh, engine: Engine) -> tuple[float, dict[str, Tensor]]:
    scale = None if cell.loss_scale is None else torch.tensor(cell.loss_scale)
    loss = engine.reduce(engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0), scale)).loss
    engine.clip_grad_norm_(0, scale)
    return loss, {name: whole(parameter.grad) for name, parameter in engine.named_parameters().items()}


def _watch_types(engine: PipelineEngine) -> list[tuple[torch.dtype, torch.dtype]]:
    """What each forward of a stage gives, beside the type that the next stage expects."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    for part in engine._parts:
        part.model.register_forward_hook(
            lambda _, __, output, dtype=part.dtype: (
                seen.append((output.dtype, dtype)) if isinstance(output, Tensor) else seen.append((dtype, dtype))
            )
        )
    return seen


def timeouts(rank: int, world_size: int) -> list[float]:
    """Those of the control group and of the group of the first and the last stage."""
    layout = Cell(world_size, strategy={"pp": world_size}, batch={"micro_batches": 4}).layout()
    mesh = join_mesh(layout, rank, torch.device("cpu"), timedelta(seconds=77))
    groups = [mesh.control, _group_across((0, world_size - 1), mesh)]
    backends: list[Any] = [group._get_backend(mesh.device) for group in groups if group is not None]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_every_group_has_the_timeout_of_the_config() -> None:
    assert run_ranks(3, timeouts) == [[77, 77], [77], [77, 77]]
