"""Context parallelism trains as one process does, in every combination, and keeps 1/cp of the activations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.config.schema import Config
from hpc_train.config.values import LayerMode
from hpc_train.errors import UserError
from hpc_train.layout.recomputation import layer_bytes
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.techniques import KINDS
from hpc_train.layout.validate import validate
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import seed_step
from hpc_train.parallel.parallelize import materialize
from hpc_train.parallel.pipeline.balance import measure_blocks
from tests.parallel.cells import SEQUENCE, VOCABULARY, Cell, Form, in_two_forms
from tests.parallel.memory import Allocations, gpt_config, norms_of_gpus
from tests.parallel.oracle import check_cells, kept_mesh, local_batch, mesh_of
from tests.ranks import run_on_world

CPU = torch.device("cpu")


def cell(ranks: int, model: str = "gpt", train: dict[str, Any] | None = None, **strategy: Any) -> Cell:
    stages = strategy.get("pp", 1) * strategy.get("stages_per_rank", 1)
    return Cell(ranks, model, strategy=strategy, batch={"micro_batches": max(2, stages)}, train=train or {})


TWO = [
    *(cell(2, model, cp=2, data_parallel=kind) for kind, model in zip(KINDS, ("gpt", "gpt-tied") * 3, strict=False)),
    cell(2, "gpt-options", cp=2, data_parallel="zero3"),
    cell(2, "gpt-windows", cp=2),
    cell(2, cp=2, train={"activation_checkpointing": "ops", "loss_chunks": 2}),
    cell(2, cp=2, data_parallel="zero3", offload="all", train={"activation_checkpointing": "selective"}),
    cell(2, cp=2, compression="topk", compression_share=1.0),  # it omits no element
    replace(cell(2, cp=2), loss_scale=1024.0),
    cell(2, "gpt-options", cp=2, data_parallel="ddp"),
    cell(2, cp=2, train={"activation_checkpointing": "full", "loss_chunks": 2}),
    *(cell(2, model, cp=2, context="ring") for model in ("gpt-windows", "gpt-tied", "gpt-options")),
    *(cell(2, "gpt-tied", cp=2, context="ring", data_parallel=kind) for kind in ("zero3", "allreduce")),
    *(cell(2, cp=2, context="ring", train={"activation_checkpointing": mode}) for mode in ("full", "ops")),
    *(cell(2, model, cp=2, context="ring") for model in ("gpt-moe", "gpt-moe-bias")),
]
FOUR = [
    cell(4, cp=4),  # two heads of keys and values, each for two ranks
    *(cell(4, "gpt-tied", dp=2, cp=2, data_parallel=kind) for kind in ("ddp", "zero3")),
    cell(4, dp=2, cp=2, data_parallel="zero3", shard=2),
    cell(4, cp=2, tp=2, data_parallel="allreduce"),
    cell(4, "gpt-tied", cp=2, pp=2, schedule="1f1b"),
    cell(4, "gpt-tied", cp=2, pp=2, schedule="zbv", stages_per_rank=2, data_parallel="allreduce"),
    cell(4, "gpt-options", cp=4, data_parallel="zero2"),
    *(cell(4, "gpt-tied", dp=2, cp=2, data_parallel=kind) for kind in ("allreduce", "zero1", "zero2")),
    cell(4, dp=2, cp=2, data_parallel="zero2", shard=2),
    cell(4, "gpt-options", cp=2, tp=2, data_parallel="zero3"),
    cell(4, "gpt-options", cp=2, pp=2, schedule="gpipe", data_parallel="zero3"),
    cell(4, cp=2, pp=2, schedule="interleaved_1f1b", stages_per_rank=2, data_parallel="zero2"),
    *(cell(4, model, cp=4, context="ring") for model in ("gpt", "gpt-options", "gpt-few-heads")),
    cell(4, "gpt-few-heads", cp=4, context="both"),  # two ranks exchange heads, and rings have two
    cell(4, "gpt-few-heads", cp=4, context="both", data_parallel="zero2", train={"activation_checkpointing": "ops"}),
    *(cell(4, "gpt-tied", dp=2, cp=2, context="ring", data_parallel=kind) for kind in ("ddp", "zero1", "zero3")),
    cell(4, "gpt-windows", cp=2, tp=2, context="ring", data_parallel="zero3"),
    cell(4, "gpt-tied", cp=2, pp=2, context="ring", schedule="zbv", stages_per_rank=2, data_parallel="allreduce"),
    cell(4, cp=2, pp=2, context="ring", schedule="1f1b", train={"activation_checkpointing": "full"}),
    cell(4, "gpt-moe", cp=2, tp=2, context="ring", data_parallel="zero1"),
    cell(4, "gpt-moe", dp=2, cp=2, ep=2, context="ring", data_parallel="zero2"),
]


LONG = [  # with sequences of 32 tokens
    cell(8, "gpt-few-heads", cp=8, context="ring"),
    cell(8, "gpt-options", cp=8, context="both", data_parallel="zero3"),
    cell(8, cp=4, tp=2, context="both", data_parallel="allreduce"),
    cell(8, "gpt-few-heads", cp=4, pp=2, context="both", schedule="1f1b"),
    cell(8, "gpt-few-heads", cp=4, pp=2, context="both", schedule="zbv", stages_per_rank=2, data_parallel="zero1"),
    cell(8, "gpt-few-heads", cp=4, dp=2, context="both", data_parallel="zero2"),
    cell(8, "gpt-moe", cp=4, tp=2, context="both", data_parallel="zero1"),
]


@pytest.mark.long_form(15, cases=["4-short"])  # two ranks in the short form
@in_two_forms(100)
@pytest.mark.parametrize("cells", [TWO, FOUR], ids=["2", "4"])
def test_a_split_sequence_trains_as_a_whole_one_does(
    cells: list[Cell], form: Form, record: Callable[..., None]
) -> None:
    """The short form has every model on two ranks, and each other axis beside this one."""
    keys = ("model", "context") if cells is TWO else ("cp", "pp", "tp", "context")
    record(check_cells(form(cells, *keys)), [])


@pytest.mark.long_form(120)
def test_rings_of_eight_ranks_train_as_one_process_does(record: Callable[..., None]) -> None:
    """Some of the ranks exchange heads, beside stages and ranks that divide layers."""
    record(check_cells([replace(cell, sequence=32) for cell in LONG], timeout=280), [])


@pytest.mark.long_form(60)  # most of a minute of the C++ compiler; test_compile has the graphs
def test_compiled_layers_exchange_heads(record: Callable[..., None]) -> None:
    split = [cell(2, cp=2, train={"compile": True}), cell(2, cp=2, context="ring", train={"compile": True})]
    record(check_cells(split, timeout=280), [])


REFUSED: list[tuple[Cell, str]] = [
    (cell(2, cp=4), "strategy.cp is 4, but there are 2 ranks"),
    (cell(3, cp=3), r"strategy.cp=3 does not divide model.n_heads=4"),
    (cell(3, cp=3), r"strategy.cp=3 does not divide data.sequence_length=8"),
    (cell(8, cp=4, tp=2, data_parallel="zero1"), "heads per tensor-parallel rank of model.n_heads=2"),
    (cell(8, cp=8, context="ring"), r"2 x strategy.cp = 16 does not divide data.sequence_length=8"),
]


@pytest.mark.parametrize(("refused", "reason"), REFUSED)
def test_what_is_not_supported_is_refused(refused: Cell, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as error:
        refused.layout()
    assert "strategy.cp" in str(error.value)


def test_shared_heads_that_no_group_of_ranks_divides_are_refused() -> None:
    config = Cell(6, strategy={"cp": 6}).config()
    model = replace(config.model, n_heads=12, n_kv_heads=4, dim=24)  # type: ignore[call-arg]
    data = replace(config.data, sequence_length=12)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"strategy.cp=6 does not divide model.n_kv_heads=4"):
        validate(replace(config, model=model, data=data), 1, 6)


@pytest.mark.parametrize("strategy", [{"cp": 2}, {"tp": 2}])
def test_evaluation_sets_whose_sequences_cannot_be_split_are_refused(strategy: dict[str, Any]) -> None:
    config = replace(Cell(2, strategy=strategy).config(), eval_sets={"odd": {"sequence_length": 7}})
    with pytest.raises(UserError, match=r"strategy\.[ct]p=2 does not divide eval_sets\.odd\.sequence_length=7") as odd:
        validate(config, 1, 2)
    assert "eval_sets.odd.sequence_length" in odd.value.fix
    config.eval_sets["odd"] = {"sequence_lenth": 8}
    with pytest.raises(UserError) as error:
        validate(config, 1, 2)
    assert str(error.value).count("sequence_lenth is not a config key") == 1


def test_ranks_of_one_sample_are_neighbors() -> None:
    layout = cell(8, dp=2, pp=2, cp=2).layout()
    assert (layout.world_size, layout.dp_cp, layout.stage_ranks) == (8, 4, 4)
    assert str(layout).startswith("dp 2 x pp 2 x cp 2 x tp 1 (ddp, ")
    assert cell(8, dp=2, cp=4, data_parallel="zero3").layout().shard == 8
    assert "cp" not in str(cell(2, dp=2).layout())


def places(rank: int, _: int, one: Cell) -> tuple[Any, ...]:
    mesh = mesh_of(one, rank)
    groups = {axis: torch.distributed.get_process_group_ranks(mesh.group(axis)) for axis in ("dp", "cp", "dp_cp")}
    seed_step(1, 2, mesh)
    return mesh.dp_rank, mesh.cp_rank, groups, torch.rand(1).item()


def test_the_groups_of_a_rank_and_its_random_numbers() -> None:
    found = run_on_world(4, places, cell(4, dp=2, cp=2))
    assert [(dp, cp) for dp, cp, *_ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[1][2] == {"dp": [1, 3], "cp": [0, 1], "dp_cp": [0, 1, 2, 3]}
    assert found[2][2] == {"dp": [0, 2], "cp": [2, 3], "dp_cp": [0, 1, 2, 3]}
    assert len({drawn for *_, drawn in found}) == 4  # dropout of different tokens is independent
    together = run_on_world(4, places, cell(4, cp=2, tp=2, data_parallel="allreduce"))
    assert [drawn == together[0][3] for *_, drawn in together] == [True, True, False, False]


def outputs_of(rank: int, _: int, cells: list[Cell]) -> None:
    inputs = torch.randint(VOCABULARY, (3, SEQUENCE), generator=torch.Generator().manual_seed(0))
    for one in cells:
        config = one.config()
        whole: Any = build_model(config.model, config.train.seed)
        materialize(whole, CPU, config.train.seed, torch.float64)
        found = build_engine(config, mesh_of(one, rank)).outputs(inputs)
        torch.testing.assert_close(found, whole.eval()(inputs, {}), rtol=1e-10, atol=1e-10)
        with pytest.raises(UserError, match="tokens cannot be split over 2 context-parallel ranks"):
            build_engine(config, mesh_of(one, rank)).outputs(inputs[:, :7])


@pytest.mark.long_form(10)
def test_the_outputs_are_those_of_the_whole_sequence() -> None:
    split = [cell(4, cp=2, dp=2), cell(4, cp=2, tp=2, data_parallel="zero3"), cell(4, cp=2, dp=2, context="ring")]
    run_on_world(4, outputs_of, split)


def block_costs(rank: int, _: int, one: Cell) -> list[tuple[str, int]]:
    config, mesh = one.config(), mesh_of(one, rank)
    model: Any = build_model(config.model, config.train.seed)
    example = local_batch(one, mesh.layout, mesh.dp_rank, 0).micro_batches[0]
    return [(cost.name, cost.activation_bytes) for cost in measure_blocks(config, mesh, model, example)]


def test_the_ranks_of_a_sample_measure_a_block_together() -> None:
    whole = run_on_world(2, block_costs, cell(2, pp=2, schedule="1f1b"))[0]
    split = run_on_world(4, block_costs, cell(4, pp=2, cp=2, schedule="1f1b"))
    assert all(found == split[0] for found in split)
    layers = [(a, b) for (name, a), (_, b) in zip(whole, split[0], strict=True) if name.startswith("layers.")]
    assert all(half == pytest.approx(all_of / 2, rel=0.1) for all_of, half in layers)


LAYERS, DIM, TOKENS = 4, 64, 64


def memory_config(layers: int, mode: str, options: dict[str, Any], ranks: int) -> Config:
    """Returns a GPT with ``options``, of which ``context`` is that of the strategy."""
    options = dict(options)
    strategy = {"cp": ranks, "context": options.pop("context", "ulysses")}
    sizes = {"dim": DIM, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 4 * DIM, "vocab_size": VOCABULARY}
    sizes |= {"n_layers": layers} | options
    return gpt_config(sizes, TOKENS, {"global_size": 2}, strategy, activation_checkpointing=mode)


def kept_by(rank: int, world_size: int, cases: list[tuple[int, str, dict[str, Any]]]) -> list[int]:
    """Returns the bytes that a rank keeps for the backward pass of so many layers."""
    found = []
    for layers, mode, options in cases:
        config = memory_config(layers, mode, options, world_size)
        mesh = kept_mesh(resolve_layout(config, 1, world_size), rank)
        model: Any = build_engine(config, mesh).parts[0]
        hidden: Tensor = torch.randn(2, TOKENS // world_size, DIM, requires_grad=True)
        with norms_of_gpus(), Allocations() as allocations:
            context = model.prepare(hidden, {})
            for layer in model.layers.values():
                hidden = layer(hidden, context)
            found.append(settled(allocations))
    return found


def settled(allocations: Allocations) -> int:
    """Returns the bytes that are alive once gloo's threads have let go of the tensors of finished exchanges."""
    before, now = -1, allocations.alive
    while before != now:
        time.sleep(0.2)
        before, now = now, allocations.alive
    return now


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 4, "qk_norm": True},
        {"context": "ring"},
        {"n_kv_heads": 1, "qk_norm": True, "context": "ring"},
    ],
    ids=["plain", "grouped", "ring", "ring-grouped"],
)
@pytest.mark.long_form(15)
def test_each_rank_keeps_its_share_of_the_activations(options: dict[str, Any]) -> None:
    kept = {ranks: _kept_by_layers(ranks, options) for ranks in (1, 2, 4)}
    for ranks, by_mode in kept.items():
        for mode, held in by_mode.items():
            if mode != "ops":  # which keeps all that is exchanged
                # without activation checkpointing, attention's result is kept before and after an exchange of heads
                assert held == pytest.approx(kept[1][mode] / ranks, rel=0.06 if mode == "none" else 0.01), (ranks, mode)
            assert held == pytest.approx(_estimated(ranks, mode, options), rel=0.05), (ranks, mode)


@pytest.mark.long_form(25)
def test_the_copies_of_shared_heads_are_kept() -> None:
    """All ranks share one head of keys and values, or each two of them one of two."""
    for ranks, heads in ((4, 1), (4, 2)):
        options = {"n_kv_heads": heads, "ffn_dim": 8}
        for mode, held in _kept_by_layers(ranks, options).items():
            assert held == pytest.approx(_estimated(ranks, mode, options), rel=0.03), (ranks, mode)


MODES: tuple[LayerMode, ...] = ("none", "full", "ops")


def _kept_by_layers(ranks: int, options: dict[str, Any]) -> dict[LayerMode, int]:
    """Returns what further layers keep on the first rank, by what they recompute."""
    cases = [(layers, mode, options) for mode in MODES for layers in (LAYERS, 4 * LAYERS)]
    found = run_on_world(ranks, kept_by, cases)[0]
    return {mode: found[2 * at + 1] - found[2 * at] for at, mode in enumerate(MODES)}


def _estimated(ranks: int, mode: LayerMode, options: dict[str, Any]) -> float:
    config = memory_config(LAYERS, mode, options, ranks)
    return 3 * LAYERS * layer_bytes(config, resolve_layout(config, 1, ranks))[mode]
