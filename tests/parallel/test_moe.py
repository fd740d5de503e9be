"""Compares mixtures of experts with one process under every layout that supports them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.own_experts import BoundedExperts
from hpc_train.config.schema import CustomModelConfig, HFModelConfig
from hpc_train.errors import UserError
from hpc_train.layout.techniques import KINDS, SCHEDULES
from hpc_train.layout.validate import validate
from hpc_train.models.build import build_model
from hpc_train.parallel.experts import apply_expert_parallel
from hpc_train.parallel.precision.masters import local_part
from tests.models.test_moe import hidden_states, mixture
from tests.parallel.cells import MIXTURES, Cell, Form, covering, in_two_forms
from tests.parallel.oracle import check_cells, kept_mesh
from tests.ranks import run_on_world

STEPS = {"micro_batches": 4}


def replicas(world_size: int) -> list[Cell]:
    """Returns every mixture under every data-parallel kind, with 1 and 4 micro-batches."""
    strategies: list[dict[str, Any]] = [{"dp": world_size, "data_parallel": kind} for kind in KINDS]
    strategies += [strategy | {"shard": 2} for strategy in strategies if KINDS[strategy["data_parallel"]].shards]
    return [
        Cell(world_size, model, strategy=strategy, batch=batch)
        for model in MIXTURES
        for strategy in strategies
        for batch in ({"micro_batches": 1}, STEPS)
    ]


@in_two_forms(60)
def test_replicas(form: Form) -> None:
    check_cells(form(replicas(4)))


def divided(world_size: int, pp: int = 1) -> list[Cell]:
    """Returns every mixture under every data-parallel kind whose ranks divide the experts, if they can."""
    strategies: list[dict[str, Any]] = [
        {"dp": world_size // pp, "pp": pp, "ep": ep, "data_parallel": kind}
        for kind in KINDS
        for ep in (2, 4)
        if world_size % (pp * ep) == 0
    ]
    if pp == 1:
        strategies += [strategy | {"shard": 2} for strategy in strategies if KINDS[strategy["data_parallel"]].shards]
    return [
        Cell(world_size, model, strategy=strategy, batch=batch)
        for model, options in MIXTURES.items()
        for strategy in strategies
        if options["experts"] % strategy["ep"] == 0
        for batch in ({"micro_batches": 1}, STEPS)
        if pp == 1 or batch is STEPS
    ]


def divided_stages() -> list[Cell]:
    """Returns two mixtures under every schedule, with experts that the ranks of a stage divide."""
    return [
        Cell(4, model, strategy=strategy | {"schedule": name, "stages_per_rank": row.stages_per_rank[0]}, batch=STEPS)
        for model in ("gpt-moe", "gpt-moe-bias")
        for name, row in SCHEDULES.items()
        if name != "sequential"
        for strategy in ({"dp": 2, "pp": 2, "ep": 2, "data_parallel": kind} for kind in ("allreduce", "zero1", "zero2"))
    ]


def divided_and_recomputed() -> list[Cell]:
    return [
        Cell(4, model, strategy={"dp": 4, "ep": 2, "data_parallel": kind}, batch=STEPS, **extra)
        for model in MIXTURES
        for kind in ("ddp", "zero1", "zero3")
        for extra in (
            {"train": {"activation_checkpointing": "full"}},
            {"train": {"activation_checkpointing": "ops"}},
            {"precision": "fp32"},
            {"precision": "fp32", "loss_scale": 1024.0},
        )
    ]


def test_divided_experts() -> None:
    cells = divided(4) + divided(4, pp=2) + divided_and_recomputed()
    keys = ("model", "precision", "loss_scale", "data_parallel", "ep", "shard", "pp", "activation_checkpointing")
    check_cells(covering(cells, *keys))


# test_divided_experts covers every value
@pytest.mark.long_form(200)
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "cells", [divided(4), divided(4, pp=2) + divided_stages(), divided_and_recomputed()], ids=["dp", "pp", "others"]
)
def test_every_layout_of_divided_experts(cells: list[Cell]) -> None:
    check_cells(cells)


def sharing_sequences() -> list[Cell]:
    """Returns every mixture under layouts whose ranks hold different tokens of the same sequences."""
    splits = ({"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2})
    tensor_ranks = [
        Cell(4, model, strategy={"tp": 4, "ep": ep}, batch=STEPS)
        for model, options in MIXTURES.items()
        for ep in (1, 2, 4)
        if options["experts"] % ep == 0
    ]
    return tensor_ranks + [
        Cell(4, model, strategy=split | {"data_parallel": kind, "ep": ep, "shard": shard}, batch=STEPS)
        for model, options in MIXTURES.items()
        for split in splits
        for kind in (("allreduce", "zero1") if "pp" in split else KINDS)
        for ep in (1, 2, 4)
        for shard in (("fill", 2) if KINDS[kind].shards and split.get("cp", 1) * split.get("dp", 1) > 2 else ("fill",))
        if options["experts"] % ep == 0 and not ("tp" in split and kind == "ddp") and not ("pp" in split and ep == 4)
    ]


def sharing_sequences_and_recomputed() -> list[Cell]:
    return [
        Cell(4, model, strategy=split | {"data_parallel": kind}, batch=STEPS, **extra)
        for model in MIXTURES
        for split in ({"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "ep": 2}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2, "ep": 2})
        for kind in ("allreduce", "zero3")
        for extra in (
            {"train": {"activation_checkpointing": "full"}},
            {"train": {"activation_checkpointing": "ops"}},
            {"precision": "fp32", "loss_scale": 1024.0},
        )
    ]


@in_two_forms(700)
def test_shared_sequences(form: Form) -> None:
    cells = sharing_sequences() + sharing_sequences_and_recomputed()
    keys = ("pp", "cp", "tp")  # test_divided_experts covers the kinds
    fewer_experts_than_ranks = Cell(4, "gpt-moe", strategy={"tp": 4, "ep": 2}, batch=STEPS)
    check_cells([fewer_experts_than_ranks, *form(cells, *keys)], timeout=1200)


def differences_of_layers(rank: int, world_size: int) -> dict[str, float]:
    """Returns the largest difference between a layer whose experts ``ep`` ranks divide and the layer of one process, in
    its results and its gradients, for inputs that a training does not have."""
    found = {}
    for ep, case, dtype in product((2, 4), CASES, (torch.float64, torch.bfloat16)):
        layout = Cell(world_size, "gpt-moe", strategy={"dp": world_size, "ep": ep}).layout()
        whole, parts = (mixture(dtype, **CASES[case]) for _ in range(2))
        hidden = hidden_states(world_size, dtype).detach()
        if case == "ties":  # the first experts compute all tokens, the others are empty
            for built in (whole, parts):
                built.router.weight.data.zero_()
        if case == "one expert":
            for built in (whole, parts):
                built.router.weight.data.zero_()[3] = 1.0
            hidden = hidden.abs()
        if case == "one token":
            hidden = hidden[:1, :1]
        own = slice(rank, rank + 1)  # the sequences of this rank, of which the last ones may have none
        mesh = kept_mesh(layout, rank)
        apply_expert_parallel(parts, mesh)
        inputs = [value.clone().requires_grad_() for value in (hidden, hidden[own])]
        rows = list[int]()
        parts.experts.register_forward_pre_hook(lambda _, given, rows=rows: rows.append(len(given[0])))
        for built, values in zip((whole, parts), inputs, strict=True):
            built(values, {}).square().sum().backward()
        kept = parts.router.counts[:-1].sum() - parts.router.counts[-1]
        computed_and_kept = torch.stack((torch.tensor(rows).sum(), kept))
        dist.all_reduce(computed_and_kept)
        assert computed_and_kept[0] == computed_and_kept[1] > 0, case
        worst = _difference(parts(inputs[1].detach(), {}), whole(inputs[0].detach(), {})[own])
        worst = max(worst, _difference(inputs[1].grad, inputs[0].grad[own]))
        for (name, parameter), expected in zip(parts.named_parameters(), whole.parameters(), strict=True):
            gradient = torch.zeros_like(local_part(parameter)) if parameter.grad is None else local_part(parameter.grad)
            dist.all_reduce(gradient, group=mesh.gradient_group(parameter))
            held = slice(None)
            if name.startswith("experts"):
                count = len(expected) // ep
                held = slice(rank % ep * count, (rank % ep + 1) * count)
            worst = max(worst, _difference(gradient, expected.grad[held]))
        found[f"ep {ep}, {case}, {dtype}"] = worst
    return found


CASES: dict[str, dict[str, Any]] = {
    "ties": {},
    "one expert": {"top_k": 1, "normalize": False},
    "one token": {},
    "shared experts": {"shared_experts": 2},
    "capacity": {"capacity_factor": 0.5},
}


def _difference(found: Any, expected: Any) -> float:
    if not found.numel():
        return 0.0
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-3))


def test_layers_with_divided_experts() -> None:
    for found in run_on_world(4, differences_of_layers):
        wrong = {case: error for case, error in found.items() if not error <= (0.05 if "bfloat16" in case else 1e-12)}
        assert not wrong


def test_a_users_experts_are_divided() -> None:
    cell = Cell(2, "gpt-own-experts", strategy={"dp": 2, "ep": 2, "data_parallel": "zero3"}, batch=STEPS)
    model = build_model(cell.config().model, 0)
    assert any(isinstance(module, BoundedExperts) for module in model.modules())
    check_cells([cell])


def test_the_experts_of_strangers_are_not_divided(tmp_path: Path) -> None:
    Path(tmp_path, "config.json").write_text('{"model_type": "mixtral", "num_hidden_layers": 2}', encoding="utf-8")
    block = "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock"
    for model in (
        CustomModelConfig(_target_=block),
        CustomModelConfig(_target_="tests.parallel.strangers.Experts"),
        HFModelConfig(name_or_path=str(tmp_path), task="causal_lm"),
    ):
        config = replace(Cell(2, strategy={"dp": 2, "ep": 2}).config(), model=model)
        with pytest.raises(UserError, match=r"only the experts of `model.moe`(.|\n)*import reads Mixtral"):
            validate(config, nodes=1, workers_per_node=2)


@in_two_forms(120)
def test_pipelines(form: Form) -> None:
    cells = [
        Cell(2, model, strategy={"pp": 2, "schedule": name, "stages_per_rank": row.stages_per_rank[0]}, batch=STEPS)
        for model in MIXTURES
        for name, row in SCHEDULES.items()
        if name != "sequential"
    ]
    check_cells(form(cells))


@in_two_forms(60)
def test_pipelines_of_replicas(form: Form) -> None:
    cells = [
        Cell(4, model, strategy={"pp": 2, "dp": 2, "data_parallel": kind}, batch=STEPS)
        for model in MIXTURES
        for kind in ("allreduce", "zero1")
    ]
    check_cells(form(cells))


@in_two_forms(60)
def test_recomputation_and_precision(form: Form) -> None:
    cells = [
        Cell(2, model, strategy=strategy, batch=STEPS, **extra)
        for model in MIXTURES
        for strategy in ({"dp": 2}, {"dp": 2, "data_parallel": "zero2"}, {"pp": 2})
        for extra in (
            {"train": {"activation_checkpointing": "full"}},
            {"train": {"activation_checkpointing": "ops"}},
            {"precision": "fp32"},
            {"precision": "fp32", "loss_scale": 1024.0},
        )
    ]
    check_cells(form(cells))


@pytest.mark.long_form(900)  # test_recomputation_and_precision covers the numbers of the same code without the compiler
@pytest.mark.timeout(3000)
def test_compiled() -> None:
    cells = [
        Cell(2, model, strategy=strategy, batch=STEPS, train={"compile": True} | train)
        for model in ("gpt-moe", "gpt-moe-bias")
        for strategy in ({"dp": 2}, {"dp": 2, "data_parallel": "zero3"})
        for train in ({}, {"activation_checkpointing": "full"})
    ]
    check_cells(cells, timeout=2500)


@pytest.mark.long_form(120)  # test_divided_experts: the same code without the compiler
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "strategy",
    [
        {"dp": 2, "data_parallel": "allreduce"},
        {"dp": 2, "data_parallel": "zero3"},
        {"tp": 2},
        {"cp": 2, "data_parallel": "zero3"},
    ],
    ids=str,
)
@pytest.mark.parametrize("recomputation", ["none", "full", "ops"])
def test_compiled_layers_with_divided_experts(strategy: dict[str, Any], recomputation: str) -> None:
    train = {"compile": True, "activation_checkpointing": recomputation}
    check_cells([Cell(2, "gpt-moe", strategy=strategy | {"ep": 2}, batch=STEPS, train=train)], timeout=900)


@pytest.mark.parametrize(
    ("strategy", "train", "reason"),
    [
        ({"dp": 6, "data_parallel": "zero1", "tp": 2, "shard": 2, "ep": 3}, {}, "one of them must divide the other"),
        ({"dp": 2, "ep": 4}, {}, "strategy.ep=4 does not divide the number of ranks of a pipeline stage=2"),
        ({"dp": 2, "ep": 2}, {"reproducible": "any_world_size"}, "routers"),
        ({"dp": 2}, {"reproducible": "any_world_size"}, "routers"),
        ({"dp": 2}, {"compile": True, "cuda_graphs": True}, "CUDA graphs"),
    ],
    ids=str,
)
def test_layouts_that_would_be_wrong_are_refused(strategy: Any, train: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Cell(12, "gpt-moe", strategy=strategy, batch={"global_size": 12}, train=train).layout()
