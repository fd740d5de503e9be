"""The z-loss is that of one process under every strategy and in every form of the loss, and no evaluation has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hpc_train.config.compose import typed
from hpc_train.config.identity import check_identity
from hpc_train.errors import UserError
from hpc_train.layout.techniques import KINDS, SCHEDULES
from hpc_train.layout.validate import validate
from hpc_train.parallel.build import build_engine
from tests.config.composing import compose
from tests.parallel.cells import Cell, Form, in_two_forms
from tests.parallel.oracle import check_cells, mesh_of
from tests.ranks import run_on_world

Z: dict[str, Any] = {"z_loss": 0.3}  # far more than is usual, so that an error shows
MODELS = ("gpt-tied", "gpt-options", "gpt")


def cells(world_size: int, splits: list[dict[str, Any]], **fields: Any) -> list[Cell]:
    """One cell for each split, in turn with whole logits and chunks of the loss."""
    batches = [2 * split.get("pp", 1) * split.get("stages_per_rank", 1) for split in splits]
    return [
        Cell(
            world_size,
            MODELS[number % 3],
            strategy=split,
            batch={"micro_batches": 1 if split.get("schedule") == "sequential" else batch},
            train=Z | ({"loss_chunks": 3} if number % 2 else {}),
            **fields,
        )
        for number, (split, batch) in enumerate(zip(splits, batches, strict=True))
    ]


def test_one_rank_in_every_form_of_the_loss(record: Callable[..., None]) -> None:
    forms: list[dict[str, Any]] = [{"loss_chunks": 1}, {"loss_chunks": 3}, {"activation_checkpointing": "full"}]
    record(check_cells([Cell(1, model, train=Z | form) for model in MODELS for form in forms]), [])


@in_two_forms(20)
def test_two_ranks_of_every_kind(form: Form, record: Callable[..., None]) -> None:
    splits: list[dict[str, Any]] = [{"dp": 2, "data_parallel": kind} for kind in KINDS]
    splits += [{"tp": 2}, {"cp": 2}, {"tp": 2}, {"cp": 2}]
    record(check_cells(form(cells(2, splits), "dp", "tp", "cp", "model", "loss_chunks")), [])


@in_two_forms(15)
def test_every_pipeline_schedule(form: Form, record: Callable[..., None]) -> None:
    splits = [{"pp": 2, "schedule": name, "stages_per_rank": row.stages_per_rank[0]} for name, row in SCHEDULES.items()]
    record(check_cells(form(cells(2, splits), "stages_per_rank")), [])


@pytest.mark.long_form(40)
def test_several_axes(record: Callable[..., None]) -> None:
    """Also recomputed chunks: a stage of gpipe keeps several micro-batches."""
    splits: list[dict[str, Any]] = [
        {"pp": 2, "dp": 2, "data_parallel": "zero2", "schedule": "gpipe"},
        {"pp": 2, "tp": 2, "schedule": "1f1b"},
        {"dp": 2, "cp": 2, "data_parallel": "zero2"},
        {"pp": 2, "cp": 2, "schedule": "1f1b"},
        {"dp": 2, "tp": 2, "data_parallel": "zero3"},
        {"cp": 2, "tp": 2, "data_parallel": "allreduce"},
    ]
    record(check_cells(cells(4, splits)), [])


def test_a_loss_scale_and_padding(record: Callable[..., None]) -> None:
    splits: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}]
    record(check_cells(cells(2, splits, loss_scale=1024.0)), [])


def test_what_is_no_language_model_is_refused() -> None:
    config = typed(compose(["model=hf", "model.name_or_path=x", "model.task=masked_lm", "train.z_loss=1e-4"]))
    with pytest.raises(UserError, match=r"model\.task=masked_lm predicts no next token"):
        validate(config, 1, 1)
    with pytest.raises(UserError, match=r"train\.z_loss is -1"):
        Cell(1, train={"z_loss": -1.0}).layout()


def build(rank: int, world_size: int, model: str) -> None:
    cell = Cell(1, model, train=Z)
    build_engine(cell.config(), mesh_of(cell, rank))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("custom", "has no head that returns the logits of each token"),
        ("custom-weighted", "computes its own loss"),
        ("gpt-weighted", "computes its own loss"),
        ("gpt-contrastive", "computes its own loss"),
    ],
)
def test_a_loss_of_the_users_is_refused(model: str, reason: str) -> None:
    with pytest.raises(AssertionError, match=rf"train\.z_loss is set, but the model {reason}"):
        run_on_world(1, build, model)


def test_a_run_keeps_its_z_loss() -> None:
    config = typed(compose(["train.z_loss=1e-4"]))
    other = replace(config, train=replace(config.train, z_loss=0.0))
    with pytest.raises(UserError, match="z_loss"):
        check_identity(config, other)
