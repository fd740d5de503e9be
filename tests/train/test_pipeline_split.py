"""Splits that follow from what blocks cost: found, written, reported, and taken again at resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_train.config.schema import Config, CustomModelConfig, GPTConfig, OptimConfig
from hpc_train.data.build import build_dataset
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.partition import layers_of, partition
from hpc_train.models.build import build_model
from hpc_train.models.gpt import GPT
from hpc_train.models.model import Model
from hpc_train.parallel.mesh import join_mesh
from hpc_train.parallel.pipeline import balance
from hpc_train.parallel.pipeline.balance import BlockCost, measure_blocks, plan_split, stage_bytes
from hpc_train.run.directory import PIPELINE_SPLIT, RunDirectory
from hpc_train.run.files import NewLines
from tests.parallel.cells import Cell
from tests.parallel.oracle import local_batch
from tests.ranks import run_ranks
from tests.train.runs import frozen, run_attempt

# A head of 8192 x 64 against layers of 40 thousand parameters: half of a step is the head's.
LOPSIDED = ["+strategy=pp", "model.vocab_size=8192", "model.dim=64", "model.ffn_dim=128", "data.sequence_length=32"]


def events(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [event for path in sorted(run.events.iterdir()) for event in NewLines(path).read() if event["event"] == kind]


@pytest.mark.long_form(15)  # the measuring below, and the docs' dry run
def test_a_measured_split_is_written_told_and_taken_again(tmp_path: Path) -> None:
    overrides = [*LOPSIDED, "strategy.pp_split=measured"]
    run = frozen(tmp_path / "run", *overrides, "train.steps=6")
    assert run_attempt(run, 2) == [0, 0]
    written = json.loads((run.path / PIPELINE_SPLIT).read_text())
    assert written["how"] == "measured" and written["stages"] == 2 and sum(written["layers"]) == 4
    assert [block["name"] for block in written["blocks"]] == ["stem", *(f"layers.{n}" for n in range(4)), "head"]
    costs = [block["seconds"] for block in written["blocks"]]
    assert min(costs) > 0 and min(block["activation_bytes"] for block in written["blocks"]) > 0
    best = partition(costs, 2)
    assert best is not None and written["layers"] == [len(held) for held in layers_of(best)]
    assert max(written["predicted"]["stage_s"]) <= max(written["even"]["stage_s"])
    (reported,), (found,) = events(run, "pipeline_split"), events(run, "pipeline_balance")
    assert reported["layers"] == written["layers"] and len(found["stage_s"]) == 2 and 0 < found["bubble_share"] < 1

    frozen(run.path, *overrides, "train.steps=7")
    assert run_attempt(run, 2) == [0, 0]
    log = (run.logs / "rank-0-001.log").read_text()
    assert "resumed from" in log and "reused from an earlier attempt" in log
    assert json.loads((run.path / PIPELINE_SPLIT).read_text()) == written

    frozen(run.path, *LOPSIDED, "strategy.pp_split=flops", "train.steps=8")  # any split loads any checkpoint
    assert run_attempt(run, 2) == [0, 0]
    counted = json.loads((run.path / PIPELINE_SPLIT).read_text())
    assert counted["how"] == "flops" and counted["layers"] == [4, 0]
    assert "resumed from" in (run.logs / "rank-0-002.log").read_text()


@pytest.mark.parametrize("model", ["gpt", "gpt-tied", "vit"])
def test_the_flops_of_blocks_are_those_of_the_model(model: str) -> None:
    cell = Cell(1, model)
    built = build_model(cell.config().model, 0)
    assert isinstance(built, Model)
    inputs = torch.empty((1, 8) if model.startswith("gpt") else (1, 3, 8, 8), device="meta")
    flops = built.block_flops(inputs)
    assert flops is not None and len(flops) == len(built.layers) + 2
    assert sum(flops) == pytest.approx(built.flops_per_sample(inputs))


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long_form(8))])
def test_blocks_are_measured_under_tensor_parallelism_and_activation_checkpointing(tp: int) -> None:
    cell = Cell(2 * tp, "gpt-tied", "fp32", {"pp": 2, "tp": tp, "schedule": "1f1b"})
    checkpointed = Cell(2 * tp, "gpt-tied", "bf16", {"pp": 2, "dp": tp}, train={"activation_checkpointing": "full"})
    for plain, frugal in run_ranks(2 * tp, _costs, [cell, checkpointed]):
        assert len(plain) == len(frugal) == 5
        # half of a layer on each of two ranks, and the norms
        assert (plain[1].parameters < frugal[1].parameters) == (tp == 2)
        assert frugal[1].activation_bytes < plain[1].activation_bytes


def _costs(rank: int, _: int, cells: list[Cell]) -> list[tuple[BlockCost, ...]]:
    found = []
    for cell in cells:
        mesh = join_mesh(cell.layout(), rank, torch.device("cpu"))
        model = build_model(cell.config().model, 0)
        assert isinstance(model, Model)
        found.append(measure_blocks(cell.config(), mesh, model, local_batch(cell, mesh.layout, 0, 0).micro_batches[0]))
    return found


def test_the_memory_of_a_stage() -> None:
    blocks = [BlockCost("stem", 1.0, 1000, 10), BlockCost("layers.0", 1.0, 500, 7)]
    config = Config(optim=OptimConfig(name="adamw"))

    def layout(data_parallel: str, schedule: str) -> Layout:
        return Layout(4, 2, 1, 4, data_parallel, schedule, 1, 8, 1)

    assert stage_bytes(config, layout("ddp", "1f1b"), 0, blocks) == 4 * 1500 * 4 + 2 * 17
    assert stage_bytes(config, layout("ddp", "gpipe"), 1, blocks) == 4 * 1500 * 4 + 8 * 17
    sharded = 1500 * 4 * 2 + 1500 * 3 + 17  # whole parameters and gradients; a quarter of three fp32 values
    assert stage_bytes(config, layout("zero3", "1f1b"), 1, blocks) == sharded
    assert stage_bytes(config, layout("zero1", "1f1b"), 1, blocks) == sharded
    # of four ranks, the two that hold the same experts share their state
    mixed = [BlockCost("layers.0", 1.0, 500, 7, experts=400)]
    whole = 500 * 4 * 2 + 7
    assert stage_bytes(config, replace(layout("zero3", "1f1b"), ep=2), 1, mixed) == whole + 100 * 3 + 400 * 3 * 2
    assert stage_bytes(config, replace(layout("zero3", "1f1b"), ep=4), 1, mixed) == whole + 100 * 3 + 400 * 3 * 4
    assert stage_bytes(config, layout("zero3", "1f1b"), 1, mixed) == whole + 500 * 3


@pytest.mark.parametrize("ep", [1, 2])
def test_the_experts_of_a_rank_are_counted_as_they_are_measured(ep: int) -> None:
    cell = Cell(4, "gpt-moe", "fp32", {"pp": 2, "dp": 2, "ep": ep, "data_parallel": "zero2", "pp_split": "flops"})
    for counted, measured in run_ranks(4, _counted_and_measured, cell):
        assert [(block.parameters, block.experts) for block in counted] == measured
        assert any(held for _, held in measured)


def _counted_and_measured(rank: int, _: int, cell: Cell) -> tuple[tuple[BlockCost, ...], list[tuple[int, int]]]:
    mesh = join_mesh(cell.layout(), rank, torch.device("cpu"))
    config = cell.config()
    counted = plan_split(config, mesh, build_dataset(config.data, "train", 0))
    model = build_model(config.model, 0)
    assert counted is not None and isinstance(model, Model)
    costs = measure_blocks(config, mesh, model, local_batch(cell, mesh.layout, 0, 0).micro_batches[0])
    return counted.blocks, [(block.parameters, block.experts) for block in costs]


def uncounted() -> Model:
    model = GPT(GPTConfig(vocab_size=32, n_layers=4, dim=16, n_heads=2, n_kv_heads=2, ffn_dim=32))
    model.block_flops = lambda _: None  # type: ignore
    return model


def misstated() -> Model:
    model = uncounted()
    model.hidden_shape = lambda inputs: (len(inputs),)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("model", "how", "message"),
    [
        ("uncounted", "flops", r"block_flops(.|\n)*fix: *strategy.pp_split=measured"),
        ("misstated", "measured", r"hidden_shape of the model GPT returns \(2,\)"),
    ],
)
def test_a_model_without_the_facts_is_refused(
    model: str, how: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(2, strategy={"pp": 2, "schedule": "1f1b", "pp_split": how})
    config = replace(cell.config(), model=CustomModelConfig(_target_=f"{__name__}.{model}"))
    mesh: Any = SimpleNamespace(layout=cell.layout(), device=torch.device("cpu"))
    monkeypatch.setattr(balance, "_read", lambda *_: None)  # no earlier attempt
    with pytest.raises(UserError, match=message):
        plan_split(config, mesh, build_dataset(config.data, "train", 0))


def test_words_are_checked_before_a_submission() -> None:
    assert Cell(2, strategy={"pp": 2, "pp_split": "measured"}).layout().pp == 2
    with pytest.raises(UserError, match=r"one of even \| flops \| measured"):
        Cell(2, strategy={"pp": 2, "pp_split": "best"}).layout()
