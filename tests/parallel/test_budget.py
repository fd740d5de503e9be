"""A budget of bytes decides what each layer recomputes, keeps no more than that, and changes no gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from hpc_train.config.schema import BatchConfig, Config, PrecisionConfig
from hpc_train.config.values import LayerMode, parse_recomputation
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import estimate
from hpc_train.layout.recomputation import kept_by_layers, layer_bytes, recomputation_of
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.validate import checked_layout
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import join_mesh
from hpc_train.parallel.precision.dtypes import kept_by
from tests.parallel.cells import Cell, Form, in_two_forms
from tests.parallel.memory import Allocations, batch_of_eight, gpt_config, norms_of_gpus
from tests.parallel.oracle import check_cells, kept_mesh
from tests.ranks import run_on_world, run_ranks

LAYERS, SEQUENCE, KEY = 12, 32, "activation_checkpointing"


def config_of(budget: str, layers: int = LAYERS, **strategy: Any) -> Config:
    sizes = {"n_layers": layers, "dim": 32, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 64}
    batch = {"global_size": 8, "micro_size": 2}
    return gpt_config(sizes, SEQUENCE, batch, strategy, activation_checkpointing=budget)


def layout_of(config: Config) -> Layout:
    ranks = config.strategy.pp
    assert isinstance(ranks, int)
    return resolve_layout(config, 1, ranks)


def with_budget(config: Config, size: float) -> Config:
    return replace(config, train=replace(config.train, activation_checkpointing=f"{size / 1024:.3f}KiB"))


def chosen(config: Config) -> tuple[LayerMode, ...]:
    return recomputation_of(config, layout_of(config)).chosen


def test_cheap_operations_are_recomputed_first_and_whole_layers_only_if_that_is_not_enough() -> None:
    config = config_of("1GiB")
    sizes = layer_bytes(config, layout_of(config))
    assert sizes["full"] < sizes["ops"] < sizes["none"]
    none, ops, full = (sizes[mode] for mode in ("none", "ops", "full"))
    for size, modes in (
        (12 * none, ["none"] * 12),
        (12 * none - 1024, ["ops"] + ["none"] * 11),
        (5 * ops + 7 * none, ["ops"] * 5 + ["none"] * 7),
        (12 * ops, ["ops"] * 12),
        (3 * full + 9 * ops, ["full"] * 3 + ["ops"] * 9),
        (12 * full, ["full"] * 12),
    ):
        assert [*chosen(with_budget(config, size + 1))] == modes
    found = chosen(with_budget(config, 12 * ops - 1024))
    assert found.count("full") == 1, "the last whole layer leaves room for others"
    assert found.count("none") == (ops - full - 1024) // (none - ops) > 0


def test_the_layers_of_a_stage_with_more_micro_batches_in_flight_come_first() -> None:
    config = config_of("1GiB", 8, pp=2, schedule="interleaved_1f1b", stages_per_rank=2)
    layout = layout_of(config)
    in_flight = [layout.in_flight(stage) for stage in range(4)]
    assert in_flight[0] > in_flight[2] and in_flight[1] > in_flight[3]
    most = max(kept_by_layers(config, layout, rank) for rank in range(2))
    modes = chosen(with_budget(config, 0.9 * most))
    assert modes[0] == "ops" and modes[4] == "none"


def test_a_schedule_that_splits_the_backward_recomputes_only_whole_layers() -> None:
    config = config_of("1GiB", pp=2, schedule="zbv", stages_per_rank=2)
    most = max(kept_by_layers(config, layout_of(config), rank) for rank in range(2))
    assert set(chosen(with_budget(config, 0.6 * most))) == {"none", "full"}


def test_a_budget_that_cannot_be_met_or_compared_is_refused() -> None:
    with pytest.raises(UserError, match=r"is 1KiB, but the layers of a rank keep 96 KiB even if all are recomputed"):
        checked_layout(config_of("1KiB"), 1, 1)
    with pytest.raises(UserError, match=r"'8 gigs', which is unknown"):
        parse_recomputation("8 gigs")


def test_the_layout_says_what_was_chosen_and_the_estimate_follows() -> None:
    config = config_of("1GiB")
    sizes = layer_bytes(config, layout_of(config))
    small = with_budget(config, 5 * sizes["full"] + 7 * sizes["ops"] + 1)
    (note,) = [note for note in layout_of(small).notes if "optim.warmup_steps" not in note]
    assert note.startswith(
        "activation checkpointing recomputes 5 of 12 layers and the cheap operations of 7 more, and keeps"
    )
    plain, spared = (estimate(each, layout_of(each)) for each in (config, small))
    assert plain is not None and spared is not None
    saved = 5 * (sizes["none"] - sizes["full"]) + 7 * (sizes["none"] - sizes["ops"])
    recomputed = sizes["none"] - sizes["ops"]  # of the layer whose gradients are computed
    assert plain.total - spared.total == pytest.approx(saved - recomputed, rel=0.05)


def kept_in_step(rank: int, world_size: int, configs: list[Config]) -> list[int]:
    """The bytes that the layers of this rank keep in a step, before its first backward."""
    found = []
    for config in configs:
        mesh = kept_mesh(resolve_layout(config, 1, world_size), rank)
        engine: Any = build_engine(config, mesh)
        layers = [*engine.parts[0].layers.values()]
        before, after = list[int](), list[int]()
        with norms_of_gpus(), Allocations() as allocations:
            layers[0].register_forward_pre_hook(partial(_look, allocations, before))
            layers[-1].register_forward_hook(partial(_look, allocations, after))
            engine.train_step(0, batch_of_eight(SEQUENCE, 64, mesh.layout.micro_batches))
        found.append(after[mesh.layout.in_flight(mesh.pp_rank) - 1] - before[0])
    return found


def _look(allocations: Allocations, alive: list[int], *_: Any) -> None:
    alive.append(allocations.alive)


SHARES = (1.0, 0.8, 0.6, 0.4)


@pytest.mark.long_form(15)
@pytest.mark.parametrize("strategy", [{}, {"pp": 2}], ids=["single", "1f1b"])
def test_a_real_step_keeps_what_the_formula_says_and_no_more_than_the_budget(strategy: dict[str, Any]) -> None:
    whole = config_of("1GiB", **strategy)
    layout = layout_of(whole)
    sizes = kept_by_layers(whole, layout, 0)
    configs = [with_budget(whole, share * sizes + 1) for share in SHARES]
    found = run_on_world(layout.world_size, kept_in_step, configs)[0]
    for share, config, kept in zip(SHARES, configs, found, strict=True):
        stated = kept_by_layers(config, layout, 0)
        assert 0.9 * share * sizes < stated <= share * sizes + 1
        assert kept == pytest.approx(stated, rel=0.05), share
        statistics = LAYERS * 2 * SEQUENCE * 4 * 4  # of two norms and two heads, few at the widths of real models
        outputs = 3 * 2 * SEQUENCE * 32 * 4 if layout.pp > 1 else 0  # of the stage, which wait for their gradients
        assert kept <= share * sizes + statistics + outputs + 1, share


def kept_by_one_layer(rank: int, world_size: int, configs: list[Config]) -> list[int]:
    """The bytes that one more compiled layer keeps. The graphs run as inductor's partitioner cuts them."""
    import torch._inductor.compile_fx as inductor
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    inductor.compile_fx = lambda graph, inputs, **_: aot_eager_decomp_partition(graph, inputs)  # type: ignore[assignment]
    found = []
    for config in configs:
        fewer = replace(config, model=replace(config.model, n_layers=LAYERS - 1))  # type: ignore[call-arg]
        found.append(kept_for_backward(config) - kept_for_backward(fewer))
    return found


def kept_for_backward(config: Config) -> int:
    """Returns the bytes of all tensors that a forward saves, without parameters and their casts."""
    engine: Any = build_engine(config, join_mesh(layout_of(config), 0, torch.device("cpu")))
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def known() -> set[int]:
        weights = (*engine.named_parameters().values(), *kept_by(engine.parts[0]))
        return {weight.untyped_storage().data_ptr() for weight in weights}

    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE) % 64
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.train_step(0, StepBatch((Batch(tokens, tokens),), 2 * SEQUENCE))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.long_form(30)
def test_a_compiled_layer_keeps_what_the_formula_says() -> None:
    """It keeps neither the activation function nor, beside the results of the branches, their sums in fp32."""
    plain = config_of("none")
    train = replace(plain.train, compile=True)
    plain = replace(plain, batch=BatchConfig(global_size=2, micro_size=2), train=train)
    formats = [{"name": "fp32"}, {"name": "bf16"}, {"name": "bf16", "residual": "fp32"}]
    configs = [replace(plain, precision=PrecisionConfig(**each)) for each in formats]
    (found,) = run_ranks(1, kept_by_one_layer, configs)
    for config, kept in zip(configs, found, strict=True):
        assert kept == pytest.approx(layer_bytes(config, layout_of(config))["none"], rel=0.05), config.precision


def budgeted(share: float, world_size: int, **strategy: Any) -> Cell:
    """A cell whose layers may keep ``share`` of what they keep otherwise, and differ in what they recompute."""
    cell = Cell(world_size, "gpt-tied", strategy=strategy, batch={"micro_batches": 4}, train={KEY: "1GiB"})
    layout = cell.layout()
    size = share * max(kept_by_layers(cell.config(), layout, rank) for rank in range(layout.pp))
    cell = replace(cell, train={KEY: f"{size / 1024:.4f}KiB"})
    assert len(set(recomputation_of(cell.config(), cell.layout()).chosen)) > 1, cell
    return cell


@pytest.mark.long_form(10, cases=["short"])  # test_activation_checkpointing.py compares what a budget chooses from
@in_two_forms(20)
def test_a_budget_changes_no_gradient(form: Form, record: Callable[..., None]) -> None:
    cells = [
        budgeted(share, 2, **split)
        for share in (0.95, 0.5)
        for split in ({"tp": 2}, *({"dp": 2, "data_parallel": kind} for kind in ("zero3", "allreduce", "ddp")))
    ]
    cells += [budgeted(share, 2, pp=2) for share in (0.9, 0.5)]
    cells += [budgeted(0.6, 2, pp=2, schedule="zbv", stages_per_rank=2)]
    record(check_cells(form(cells, "tp", "stages_per_rank")), [])
