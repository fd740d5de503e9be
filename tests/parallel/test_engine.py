"""What every engine of whole models promises beside its gradients: number formats, no waiting, modes, refusals."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import Config, CustomModelConfig
from hpc_train.data.dataset import IGNORED, Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.techniques import KINDS
from hpc_train.models.build import build_model
from hpc_train.models.model import canonical_name
from hpc_train.parallel import gradient_norm
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import Engine, StepResult
from hpc_train.parallel.fsdp import SharedGroups
from hpc_train.parallel.parallelize import materialize, take_first_replica
from hpc_train.parallel.pipeline.balance import measure_blocks
from hpc_train.train.optimizers.optimizer import Optimizer
from tests.parallel.cells import CLASSES, IMAGE, Cell, Form, in_two_forms
from tests.parallel.oracle import local_batch, mesh_of, train_plainly, whole
from tests.ranks import run_on_world, run_ranks

WAITING = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")
SPLITS: list[dict[str, Any]] = [{"dp": 2, "data_parallel": kind} for kind in KINDS]
SPLITS += [{"tp": 2}]


def losses_and_norms(rank: int, world_size: int, cells: list[Cell], scale: float | None) -> list[tuple[float, ...]]:
    found = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        loss_scale = None if scale is None else torch.tensor(scale)
        result = engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0), loss_scale)
        norm = engine.clip_grad_norm_(0.0, loss_scale).item()
        assert all(value.grad.dtype == torch.float32 for value in engine.named_parameters().values())
        found.append((engine.reduce(result).loss, norm))
    return found


@pytest.mark.long_form(10)  # tests/parallel/test_precision.py compares bf16
@pytest.mark.parametrize(("precision", "scale"), [("bf16", None), ("fp16", 256.0)])
def test_half_precision_stays_near_single_precision(precision: str, scale: float | None) -> None:
    batch = {"micro_batches": 2}
    chosen = [Cell(2, "gpt-tied", precision, split, batch) for split in SPLITS] + [
        Cell(2, "vit", precision, split, batch) for split in SPLITS[::5]
    ]
    savers = {"activation_checkpointing": "ops", "loss_chunks": 2}
    chosen += [Cell(2, "gpt-tied", precision, split, batch, savers) for split in SPLITS[::4]]
    chosen += [Cell(2, "gpt-weighted", precision, split, batch) for split in SPLITS[:3]]
    near = {model: train_plainly(Cell(1, model, "fp32")) for model in ("gpt-tied", "gpt-weighted", "vit")}
    for ranks in run_on_world(2, losses_and_norms, chosen, scale):
        for cell, (loss, norm) in zip(chosen, ranks, strict=True):
            assert loss == pytest.approx(near[cell.model].losses[0], rel=0.01), cell
            assert norm == pytest.approx(near[cell.model].norms[0], rel=0.05), cell


def step_without_waiting(rank: int, world_size: int, cells: list[Cell]) -> None:
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        batches = [local_batch(cell, mesh.layout, mesh.dp_rank, step) for step in range(3)]
        engine.train_step(0, batches[0])  # torch sets itself up in the first step
        # ranks of a user's module under ZeRO tell each other on the host what they do, which needs no device
        mock.patch.object(SharedGroups, "_agree", lambda self, number, flags: [*flags]).start()
        waits = [mock.patch.object(Tensor, name, side_effect=AssertionError(f"{cell} waits")) for name in WAITING]
        for wait in waits:
            wait.start()
        engine.train_step(1, batches[1], loss_scale=None)
        engine.clip_grad_norm_(1.0)
        engine.eval_step(batches[2])
        mock.patch.stopall()


def test_no_step_waits_for_the_device() -> None:
    chosen = [Cell(2, "gpt", "fp32", split) for split in SPLITS]
    chosen += [Cell(2, model, "fp32", SPLITS[2]) for model in ("gpt-weighted", "custom-weighted")]
    run_on_world(2, step_without_waiting, chosen)


def steps_of_equal_bits(rank: int, world_size: int, cell: Cell) -> bool:
    mesh = mesh_of(cell, rank)
    engine = build_engine(cell.config(), mesh)
    batch = local_batch(cell, mesh.layout, mesh.dp_rank, 0)
    sums = []
    for _ in range(2):
        engine.train_step(0, batch)
        gradients = [parameter.grad for parameter in engine.named_parameters().values()]
        sums.append(torch.cat([whole(gradient).flatten() for gradient in gradients if gradient is not None]))
    return torch.equal(*sums)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_adds_up_gradients_in_the_order_of_later_steps(kind: str) -> None:
    """A run that is resumed begins with a first step. The sum of two ranks would not depend on the order."""
    split = {"dp": 3, "data_parallel": kind}
    if KINDS[kind].buckets:
        split["bucket_cap_mb"] = 0.002
    assert all(run_on_world(3, steps_of_equal_bits, Cell(3, "gpt", "fp32", split)))


def hand_out_transposed(rank: int, world_size: int) -> tuple[list[list[float]], bool]:
    """Returns a parameter that only the first rank had, where broadcasts accept what those of NCCL do."""
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(torch.full((2, 3), float(rank)).t())

    def broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert tensor.is_contiguous(), "Tensors must be contiguous"
        return accepted(tensor, *args, **kwargs)

    accepted = dist.broadcast
    with mock.patch.object(dist, "broadcast", broadcast):
        take_first_replica(model, mesh_of(Cell(2, strategy={"dp": 2}), rank))
    return model.weight.tolist(), model.weight.is_contiguous()


def test_parameters_of_any_strides_are_those_of_the_first_rank() -> None:
    assert run_on_world(2, hand_out_transposed) == [([[0.0, 0.0]] * 3, False)] * 2


def modes(rank: int, world_size: int, cells: list[Cell]) -> None:
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        (part,) = engine.parts
        before = {name: whole(value.detach()) for name, value in engine.named_parameters().items()}
        batch = local_batch(cell, mesh.layout, mesh.dp_rank, 0)
        first = engine.reduce(engine.eval_step(batch))
        assert part.training and first.accuracy is not None
        part.eval()
        engine.eval_step(batch)
        assert not part.training
        with torch.no_grad():
            for value in engine.named_parameters().values():
                value.mul_(0.5)
        assert engine.reduce(engine.eval_step(batch)).loss != first.loss, f"{cell}: stale parameters"
        for name, value in engine.named_parameters().items():
            torch.testing.assert_close(whole(value.detach()), before[name] * 0.5)


def test_evaluation_restores_the_mode_and_sees_changed_parameters() -> None:
    splits: list[dict[str, Any]] = [{"dp": 2}, {"dp": 2, "data_parallel": "zero3"}, {"tp": 2}]
    run_on_world(2, modes, [Cell(2, "gpt-tied", strategy=split) for split in splits])


def values(rank: int, world_size: int, cells: list[Cell]) -> None:
    for cell in cells:
        config = cell.config()
        plain: Any = build_model(config.model, config.train.seed)
        materialize(plain, torch.device("cpu"), config.train.seed, torch.float64)
        engine = build_engine(config, mesh_of(cell, rank))
        expected = dict(plain.named_parameters())
        found = engine.named_parameters()
        assert set(found) == set(expected)
        for name, value in found.items():
            assert torch.equal(whole(value.detach()), expected[name]), f"{cell}: {name}"


@in_two_forms(15)
def test_every_layout_starts_from_the_same_weights(form: Form) -> None:
    splits: list[dict[str, Any]] = [
        {"dp": 4, "data_parallel": "zero3"},
        {"dp": 4, "data_parallel": "zero2", "shard": 2},
    ]
    splits += [{"dp": 2, "tp": 2, "data_parallel": kind} for kind in ("allreduce", "zero1", "zero3")]
    chosen = [Cell(4, model, strategy=split) for split in splits for model in ("gpt-tied", "vit")]
    run_on_world(4, values, form([*chosen, Cell(4, "vit", strategy={"tp": 4})], "model", "shard", "dp"))


def norm_without_some_gradients(rank: int, world_size: int) -> float:
    mesh = mesh_of(Cell(2, strategy={"dp": 2}), rank)
    used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    used.grad = torch.tensor([30.0, 40.0])
    scale = torch.tensor(10.0)
    norm = gradient_norm.clip_({"used": used, "unused": unused}, mesh, 1.0, scale)
    torch.testing.assert_close(used.grad, torch.tensor([0.6, 0.8]))
    assert unused.grad is None
    nothing = gradient_norm.clip_({"unused": unused}, mesh, 1.0)
    assert nothing.item() == 0.0
    used.grad = torch.tensor([30.0, 40.0])
    assert gradient_norm.clip_({"used": used}, mesh, 1.0, skip=frozenset({"used"})).item() == 0.0
    stages = mesh_of(Cell(2, strategy={"pp": 2}), rank)  # here no rank knows the others' gradients
    used.grad = torch.tensor([float("inf"), 1.0]) if rank == 1 else torch.tensor([1.0, 1.0])
    assert not gradient_norm.clip_({"used": used}, stages, 1.0).isfinite()
    return norm.item()


def test_the_norm_ignores_what_has_no_gradient_and_shows_what_is_not_finite() -> None:
    assert run_on_world(2, norm_without_some_gradients) == pytest.approx([5.0, 5.0])


def unused_parameters(rank: int, world_size: int, cells: list[Cell]) -> None:
    for cell in cells:
        config = cell.config()
        config.model = custom(unused=True)
        mesh = mesh_of(cell, rank)
        engine = build_engine(config, mesh)
        for step in range(2):
            engine.train_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
            engine.clip_grad_norm_(1.0)
        assert engine.named_parameters()["unused"].grad is None, cell


def test_unused_parameters_get_no_gradient() -> None:
    splits = [{"dp": 2, "data_parallel": kind} for kind in KINDS if kind != "ddp"]
    run_on_world(2, unused_parameters, [Cell(2, "custom", strategy=split) for split in splits])


def compiled(rank: int, world_size: int, cells: list[Cell], cache: str) -> list[tuple[float, float, list[str], int]]:
    """Losses, norms, names, and the graphs that this rank compiled because the cache had none."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    from torch._dynamo.utils import counters

    found = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        loss = engine.reduce(engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))).loss
        misses = counters["inductor"]["fxgraph_cache_miss"]
        found.append((loss, engine.clip_grad_norm_(0.0).item(), list(engine.named_parameters()), misses))
        counters.clear()
    return found


@pytest.mark.long_form(60)  # most of a minute of the C++ compiler
def test_compiled_layers_keep_names_and_gradients_and_are_compiled_by_one_rank(tmp_path: Path) -> None:
    train = {"compile": True, "activation_checkpointing": "ops"}
    chosen = [Cell(2, "gpt", "fp32", {"dp": 2, "data_parallel": "zero2"}, train=train)]
    expected = train_plainly(Cell(1, "gpt", "fp32"))
    ranks = run_ranks(2, compiled, chosen, str(tmp_path), timeout=250)
    # all layers are one graph, and the head another, with a forward and a backward each
    assert sum(cell[3] for rank in ranks for cell in rank) == 4
    for loss, norm, names, _ in ranks[0]:
        assert loss == pytest.approx(expected.losses[0], rel=1e-5)
        assert norm == pytest.approx(expected.norms[0], rel=1e-4)
        assert set(names) == set(expected.parameters)


def custom(**args: Any) -> CustomModelConfig:
    return CustomModelConfig(_target_="tests.parallel.module.Tiny", args={"classes": CLASSES} | args)


def batch_statistics(rank: int, world_size: int, kinds: list[str], synchronized: bool) -> list[list[float]]:
    found = []
    for kind in kinds:
        split = {"dp": world_size, "data_parallel": kind}
        cell = Cell(world_size, "custom", strategy=split, batch={"global_size": 8})
        config = cell.config()
        config.model = custom(batch_norm=True)
        config.model.sync_batch_norm = synchronized
        mesh = mesh_of(cell, rank)
        engine = build_engine(config, mesh)
        engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        norm = engine.clip_grad_norm_(0.0).item()
        found.append([norm, *engine.named_buffers()["norm.running_var"].tolist()])
    return found


@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_statistics_are_the_same_on_every_rank(synchronized: bool) -> None:
    kinds = [*KINDS] if synchronized else ["ddp", "zero3"]
    first, second = run_on_world(2, batch_statistics, kinds, synchronized)
    assert first == second
    ((alone,),) = run_on_world(1, batch_statistics, ["ddp"], synchronized)
    for found in first:
        assert found == pytest.approx(alone if synchronized else first[0], rel=1e-12)


def after_steps(rank: int, cell: Cell, config: Config, steps: int) -> tuple[Engine, StepResult]:
    """Returns the engine and the result of the last of some steps of the optimizer."""
    mesh = mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    optimizer = Optimizer(config.optim, engine.named_parameters())
    for step in range(steps):
        result = engine.train_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
        optimizer.step(1e-2, engine.clip_grad_norm_(0.0).isfinite())
    return engine, result


def narrow_batch_norms(rank: int, world_size: int, chosen: list[tuple[str, str]]) -> list[tuple[float, list[float]]]:
    """The loss of a second step in bf16 and the variance that the first has seen, for kinds and dtypes of weights."""
    found = []
    for kind, weights in chosen:
        strategy = {"dp": world_size, "data_parallel": kind}
        cell = Cell(world_size, "custom", "bf16", strategy, batch={"global_size": 8})
        config = cell.config()
        config.model, config.precision.weights = custom(batch_norm=True), weights
        engine, result = after_steps(rank, cell, config, 2)
        found.append((engine.reduce(result).loss, engine.named_buffers()["norm.running_var"].tolist()))
    return found


def test_batch_norms_compute_with_weights_in_bf16() -> None:
    """ZeRO and bf16 weights give them parameters in bf16, which the kernels refuse beside statistics in fp32."""
    ((wide, narrow),) = run_on_world(1, narrow_batch_norms, [("ddp", "fp32"), ("ddp", "bf16")])
    assert narrow == (pytest.approx(wide[0], rel=1e-3), pytest.approx(wide[1], rel=1e-3))
    first, second = run_on_world(2, narrow_batch_norms, [("ddp", "fp32"), ("zero2", "fp32"), ("zero3", "bf16")])
    assert first == second
    for loss, variance in first:
        assert (loss, variance) == (pytest.approx(wide[0], rel=0.05), pytest.approx(wide[1], rel=0.05))


def statistics_in_parts(rank: int, world_size: int, chosen: list[tuple[dict[str, Any], int]]) -> list[list[float]]:
    """The gradient norm of a step of a model of three parts, and the statistics of its layers if the rank has all.

    Args:
        chosen: strategies and numbers of micro-batches.
    """
    found = []
    for strategy, micro_batches in chosen:
        cell = Cell(world_size, "own", strategy=strategy, batch={"global_size": 8, "micro_batches": micro_batches})
        config = cell.config()
        args = {"width": 16, "image_size": IMAGE, "n_classes": CLASSES}
        target = "tests.parallel.module.NormedNet"
        config.model = CustomModelConfig(_target_=target, args=args, sync_batch_norm=True)
        mesh = mesh_of(cell, rank)
        engine = build_engine(config, mesh)
        engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        norm = engine.clip_grad_norm_(0.0).item()
        variances = {name: value.mean().item() for name, value in engine.named_buffers().items() if "var" in name}
        found.append([norm, *variances.values()] if mesh.layout.pp == 1 else [norm])
    return found


def test_models_of_three_parts_synchronize_batch_statistics() -> None:
    ((alone,),) = run_on_world(1, statistics_in_parts, [({}, 1)])
    first, second = run_on_world(2, statistics_in_parts, [({"dp": 2}, 1), ({"dp": 2}, 2), ({"dp": 2}, 4)])
    assert first == second and first[0] == pytest.approx(alone, rel=1e-12)
    stages = {"dp": 2, "pp": 2, "data_parallel": "zero1"}
    split_backward = {"dp": 2, "pp": 2, "data_parallel": "allreduce", "schedule": "zbv", "stages_per_rank": 2}
    for one, four in run_on_world(4, statistics_in_parts, [(stages, 2), (split_backward, 4)]):
        assert one == pytest.approx(first[1][:1], rel=1e-12)
        assert four == pytest.approx(first[2][:1], rel=1e-12)


def statistics_of_a_skipped_step(
    rank: int, world_size: int, strategy: dict[str, Any], synchronized: bool
) -> list[bool]:
    """Whether three steps leave all buffers alone; in the second the inputs of one rank are not finite."""
    cell = Cell(world_size, "own", strategy=strategy, batch={"global_size": 8, "micro_batches": 2})
    config = cell.config()
    args = {"width": 16, "image_size": IMAGE, "n_classes": CLASSES}
    target = "tests.parallel.module.NormedNet"
    config.model = CustomModelConfig(_target_=target, args=args, sync_batch_norm=synchronized)
    mesh = mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    kept = []
    for step, poisoned in enumerate((False, True, False)):
        before = {name: value.clone() for name, value in engine.named_buffers().items()}
        batch = local_batch(cell, mesh.layout, mesh.dp_rank, step)
        if poisoned and mesh.dp_rank == 1:
            batch.micro_batches[0].inputs.fill_(float("nan"))
        engine.train_step(step, batch)
        engine.commit(engine.clip_grad_norm_(0.0).isfinite())
        same = {torch.equal(before[name], value) for name, value in engine.named_buffers().items()}
        kept.append(same == {True})
        assert len(same) == 1 or not before
    return kept


@pytest.mark.long_form(3, cases=["strategy1-False"])  # the other cases have both values
@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("strategy", [{"dp": 2}, {"dp": 2, "pp": 2, "data_parallel": "zero1"}])
def test_a_skipped_step_leaves_the_running_statistics_alone(strategy: dict[str, Any], synchronized: bool) -> None:
    ranks = run_on_world(2 * strategy.get("pp", 1), statistics_of_a_skipped_step, strategy, synchronized)
    assert all(kept in ([False, True, False], [True] * 3) for kept in ranks)
    assert [False, True, False] in ranks, "some rank holds statistics"


def norm_of_half_a_model(rank: int, world_size: int, strategy: dict[str, Any]) -> tuple[float, int]:
    """The gradient norm of a step of a model with a frozen half, and the number of its blocks that were measured."""
    cell = Cell(world_size, "own", strategy=strategy, batch={"micro_batches": 2})
    config = cell.config()
    args = {"width": 16, "image_size": IMAGE, "n_classes": CLASSES}
    config.model = CustomModelConfig(_target_="tests.parallel.module.FrozenNet", args=args)
    mesh = mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    batch = local_batch(cell, mesh.layout, mesh.dp_rank, 0)
    engine.train_step(0, batch)
    model: Any = build_model(config.model, config.train.seed)
    costs = measure_blocks(config, mesh, model, batch.micro_batches[0])
    return engine.clip_grad_norm_(0.0).item(), len(costs)


def test_a_pipeline_stage_may_be_frozen() -> None:
    ((alone, measured),) = run_on_world(1, norm_of_half_a_model, {})
    assert measured == 6, "a stem, four layers and a head"
    for norm, _ in run_on_world(4, norm_of_half_a_model, {"dp": 2, "pp": 2, "data_parallel": "ddp"}):
        assert norm == pytest.approx(alone, rel=1e-12)


def losses_of(rank: int, world_size: int, model: str, chosen: list[tuple[str, str]]) -> list[float]:
    """The loss of a third step for kinds of data parallelism and dtypes of moments."""
    found = []
    for kind, moments in chosen:
        strategy = {"dp": world_size, "data_parallel": kind}
        cell = Cell(world_size, "custom", "fp32", strategy, batch={"global_size": 8}, optim={"moments": moments})
        config = cell.config()
        config.model = CustomModelConfig(_target_=f"tests.parallel.module.{model}", args={"classes": CLASSES})
        engine, result = after_steps(rank, cell, config, 3)
        found.append(engine.reduce(result).loss)
    return found


@pytest.mark.long_form(6)
def test_parameters_in_other_memory_formats() -> None:
    """FSDP and the moments of fewer bits need contiguous parameters; the values are the same."""
    chosen = [("ddp", "fp32"), ("ddp", "bf16"), ("zero2", "fp32"), ("zero3", "bf16")]
    assert run_on_world(2, losses_of, "StridedTiny", chosen) == run_on_world(2, losses_of, "Tiny", chosen)


def refusal(rank: int, world_size: int, cell: Cell, model: CustomModelConfig, residual: str) -> str:
    config = cell.config()
    config.model, config.precision.residual = model, residual
    try:
        build_engine(config, mesh_of(cell, rank))
    except UserError as error:
        return str(error)
    return "nothing was refused"


def test_what_a_module_without_parts_cannot_do() -> None:
    def why(cell: Cell, model: CustomModelConfig, residual: str = "compute") -> str:
        first, *others = run_on_world(cell.world_size, refusal, cell, model, residual)
        assert all(other == first for other in others)
        return first

    assert "no stem, layers and head" in why(Cell(2, strategy={"pp": 2}), custom())
    assert "no stem, layers and head" in why(Cell(2, strategy={"tp": 2}), custom())
    assert "no repeated blocks were found" in why(Cell(1, train={"activation_checkpointing": "full"}), custom())
    wide = Cell(1, precision="bf16")
    assert "whose forward decides" in why(wide, custom(), residual="fp32")
    assert "does not divide" in why(Cell(4, strategy={"dp": 4}), custom(batch_norm=True))
    padded = Cell(2, strategy={"dp": 2}, batch={"drop_last": False})
    assert "padding would enter" in why(padded, custom(batch_norm=True))


def odd_sequence(rank: int, world_size: int, strategy: dict[str, Any]) -> None:
    cell = Cell(world_size, strategy=strategy)
    engine = build_engine(cell.config(), mesh_of(cell, rank))
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    batch = StepBatch((Batch(tokens, tokens),) * 2, 28)
    for step in (engine.eval_step, partial(engine.train_step, 0)):
        with pytest.raises(UserError, match="7 tokens cannot be split over 2 tensor-parallel ranks"):
            step(batch)


@pytest.mark.parametrize("strategy", [{"tp": 2}, {"tp": 2, "pp": 2}])
def test_a_sequence_that_does_not_divide_over_tensor_parallel_ranks(strategy: dict[str, Any]) -> None:
    run_on_world(2 * strategy.get("pp", 1), odd_sequence, strategy)


def several_inputs(rank: int, world_size: int) -> None:
    cell = Cell(world_size, strategy={"pp": 2})
    engine = build_engine(cell.config(), mesh_of(cell, rank))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    for batch in (Batch({"tokens": tokens}, tokens), Batch(tokens, {"next": tokens})):
        for step in (engine.eval_step, partial(engine.train_step, 0)):
            with pytest.raises(UserError, match="of a micro-batch are a dict, but pipeline stages take one tensor"):
                step(StepBatch((batch, batch), 32))


def test_several_inputs_are_refused_by_pipelines() -> None:
    run_on_world(2, several_inputs)


def only_padding(rank: int, world_size: int) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    batch = StepBatch((Batch(tokens, tokens.new_full((2, 8), IGNORED)),), 0)
    for model in ("gpt", "gpt-weighted"):
        cell = Cell(1, model)
        engine = build_engine(cell.config(), mesh_of(cell, rank))
        numbers = engine.reduce(engine.train_step(0, batch))
        assert (numbers.loss, numbers.target_count, engine.clip_grad_norm_(1.0).item()) == (0.0, 0, 0.0), model


def test_a_batch_of_padding_only_has_no_loss_and_no_gradient() -> None:
    """The count of the data is zero, or that of a loss that counts itself."""
    run_on_world(1, only_padding)


def test_canonical_names() -> None:
    raw = "module.layers.0._checkpoint_wrapped_module._orig_mod.ffn.w1.weight"
    assert canonical_name(raw) == "layers.0.ffn.w1.weight"
    assert canonical_name("layers.0.module.weight") == "layers.0.module.weight"
