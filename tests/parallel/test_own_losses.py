"""Losses of a user's own under every strategy: several heads, a variational autoencoder, and contrastive losses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch

from hpc_train.config.schema.data import OwnKeys
from hpc_train.data.custom import CustomDataset
from hpc_train.data.feed import EvalFeed
from hpc_train.errors import UserError
from hpc_train.layout.techniques import KINDS, SCHEDULES
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.train.evaluation import evaluate
from tests.parallel.cells import Cell, Form, Refused, in_two_forms
from tests.parallel.oracle import check_cells, global_batch, mesh_of
from tests.ranks import run_on_world

ACCUMULATED = {"micro_batches": 3}
AT_ONCE = {"micro_batches": 1}
REPRODUCIBLE: dict[str, Any] = {
    "train": {"reproducible": "any_world_size"},
    "batch": {"logical_micro_batches": 8},
}
CONTRASTIVE = ("custom-contrastive", "gpt-contrastive")
SUMS = ("custom-heads", "custom-vae", "gpt-heads")
COMPRESSED = {"dp": 2, "data_parallel": "allreduce", "compression": "topk", "compression_share": 1.0}


def replicas(world_size: int) -> list[dict[str, Any]]:
    """Every kind, and shards beside replicas."""
    splits: list[dict[str, Any]] = [{"dp": world_size, "data_parallel": kind, "bucket_cap_mb": 0.001} for kind in KINDS]
    if world_size > 2:
        splits += [split | {"shard": 2} for split in splits if KINDS[split["data_parallel"]].shards]
    return splits


def pipelines(world_size: int) -> list[dict[str, Any]]:
    """Every schedule on two ranks; on four, every pair with two replicas."""
    pairs = [(schedule, kind) for schedule, row in SCHEDULES.items() for kind in row.data_parallel]
    if world_size == 2:
        pairs = [(schedule, "ddp") for schedule in SCHEDULES]
    return [
        {
            "dp": world_size // 2,
            "data_parallel": kind,
            "pp": 2,
            "schedule": schedule,
            "stages_per_rank": SCHEDULES[schedule].stages_per_rank[0],
        }
        for schedule, kind in pairs
    ]


def cells(world_size: int) -> list[Cell]:
    batches = (AT_ONCE, ACCUMULATED)
    if world_size == 1:
        chosen = [Cell(1, model, batch=batch) for model in SUMS for batch in batches]
        return chosen + [Cell(1, model, batch=AT_ONCE) for model in CONTRASTIVE]
    chosen = [
        Cell(world_size, model, strategy=split, batch=batches[(number + place) % 2] if model in SUMS else AT_ONCE)
        for number, split in enumerate(replicas(world_size))
        for place, model in enumerate((*SUMS, *CONTRASTIVE))
    ]
    if world_size == 2:
        chosen += [Cell(2, model, strategy={"dp": 2}, **REPRODUCIBLE) for model in SUMS[1:]]
        chosen += [Cell(2, "custom-heads", strategy=COMPRESSED, batch=ACCUMULATED)]
        chosen += [Cell(2, "custom-vae", strategy={"dp": 2}, loss_scale=1024.0)]
    chosen += [Cell(world_size, "gpt-heads", strategy=split) for split in pipelines(world_size)]
    ddp = {"dp": world_size, "data_parallel": "ddp"}
    return [*chosen, Cell(world_size, "custom-contrastive", strategy=ddp, loss_scale=1024.0)]


@in_two_forms(150)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.long_form(150)) for n in (1, 4))])
def test_own_losses_train_as_in_one_process(world_size: int, form: Form, record: Callable[..., None]) -> None:
    """Ten samples are unevenly divided among four ranks, and ignored ones leave ranks different numbers of rows."""
    keys = ("model", "data_parallel", "reproducible", "compression", "pp")
    record(check_cells(form(cells(world_size), *keys)), [])


def evaluations(rank: int, world_size: int, cells: list[Cell]) -> list[tuple[float, float]]:
    """The loss of an evaluation of 13 samples in batches of 8, and that of one process which has no padding."""
    found = []
    for cell in cells:
        inputs, targets = (
            torch.cat(both)[:13] for both in zip(global_batch(cell, 0), global_batch(cell, 1), strict=True)
        )
        dataset = CustomDataset([*zip(inputs, targets, strict=True)], OwnKeys(kind="samples"), 0)
        dataset.floats = "float64"
        config, mesh = cell.config(), mesh_of(cell, rank)
        feed = EvalFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, mesh.device)
        numbers = evaluate(build_engine(config, mesh), feed)
        model = build_model(config.model, config.train.seed).double().eval()
        sums = [model(inputs[part], {}, targets[part]) for part in (slice(0, 8), slice(8, 13))]
        assert numbers is not None
        found.append((numbers.loss, float(sum(total for total, *_ in sums) / sum(count for _, count, *_ in sums))))
    return found


@in_two_forms(10)
def test_an_evaluation_has_the_loss_of_one_process_though_the_last_batch_is_padded(form: Form) -> None:
    """The last of four ranks has no sample in the last batch."""
    strategies = [{"dp": 4, "data_parallel": kind} for kind in ("allreduce", "zero3")]
    cells = [
        Cell(4, model, strategy=strategy, batch=AT_ONCE | {"global_size": 8})
        for model in ("custom-contrastive", "custom-heads", "custom-vae")
        for strategy in strategies
    ]
    for found, expected in chain(*run_on_world(4, evaluations, form(cells, "model"))):
        assert found == pytest.approx(expected, rel=1e-12)


SPLIT: list[dict[str, Any]] = [{"strategy": split} for split in pipelines(2)]
SPLIT += [{"strategy": {"dp": 2}} | each for each in ({"batch": ACCUMULATED}, REPRODUCIBLE)]
DECLARED = "compares samples, as its parameter gather declares"


def test_a_loss_that_compares_samples_is_refused_before_workers_start(record: Callable[..., None]) -> None:
    """The source of the module declares it, which a login node reads without torch."""
    refused = []
    for fields in SPLIT:
        cell = Cell(2, "custom-contrastive", **fields)
        with pytest.raises(UserError, match=f"{DECLARED}|can be cut into pipeline stages") as found:
            cell.layout()
        refused.append(Refused(cell, found.value.what))
    record([], refused)


def refusals(rank: int, world_size: int, cells: list[Cell]) -> list[str]:
    found = []
    for cell in cells:
        with pytest.raises(UserError, match=DECLARED) as problem:
            build_engine(cell.config(), mesh_of(cell, rank))
        found.append(str(problem.value))
    return found


def test_a_head_that_compares_samples_is_refused_when_its_model_is_built() -> None:
    cells = [Cell(2, "gpt-contrastive", **fields) for fields in (SPLIT[0], SPLIT[-2], SPLIT[-1])]
    for found in run_on_world(2, refusals, cells):
        assert all("ContrastiveHead.loss (" in message and "module.py:" in message for message in found)
        assert ["pp=2" in found[0], "batch.micro_batches=1" in found[1], "reproducible" in found[2]] == [True] * 3
