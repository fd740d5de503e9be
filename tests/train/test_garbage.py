"""Python's garbage is collected after the same steps on all ranks, and none of it holds tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hpc_train.parallel.build import build_engine
from hpc_train.train.trainer import GarbageCollection
from tests.parallel.cells import Cell, Form, covering, in_two_forms
from tests.parallel.oracle import local_batch, mesh_of
from tests.ranks import run_on_world

FIRST, EVERY = 4, 3  # the step after which a resumed run begins, and the interval


class Cycle:
    """Refers to itself, so that only a collection frees it."""

    freed = 0

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        Cycle.freed += 1


@pytest.fixture(autouse=True)
def _automatic() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()
    gc.unfreeze()


def freed_after(garbage: GarbageCollection, steps: range) -> list[int]:
    """Returns the steps after which the cycles that were made since are freed."""
    found = []
    for step in steps:
        Cycle.freed = 0
        Cycle()
        garbage.after(step)
        found += [step] if Cycle.freed else []
    return found


def test_garbage_is_collected_after_the_first_step_and_after_multiples() -> None:
    garbage = GarbageCollection(EVERY)
    with garbage.scheduled():
        assert not gc.isenabled()
        assert freed_after(garbage, range(FIRST + 1, 13)) == [FIRST + 1, 6, 9, 12]
        assert gc.get_freeze_count() > 0
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_an_error_restores_automatic_collection() -> None:
    with pytest.raises(ZeroDivisionError), GarbageCollection(EVERY).scheduled():
        raise ZeroDivisionError
    assert gc.isenabled()


def tensors_in_cycles(rank: int, _: int, cells: list[Cell]) -> list[int]:
    """Returns the number of tensors that only a collection frees, after two steps of each cell."""
    found = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        batches = [local_batch(cell, mesh.layout, mesh.dp_rank, step) for step in range(3)]
        engine.train_step(0, batches[0])  # torch sets itself up in the first step
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        for step in (1, 2):
            engine.train_step(step, batches[step])
            engine.clip_grad_norm_(1.0)
        gc.collect()
        gc.set_debug(0)
        gc.enable()
        found.append(sum(isinstance(value, torch.Tensor) for value in gc.garbage))
        gc.garbage.clear()
    return found


@in_two_forms(15)
def test_no_step_leaves_tensors_to_the_garbage_collector(form: Form) -> None:
    """They would stay in the device's memory until the next collection."""
    splits: list[dict[str, Any]] = [{"dp": 2, "data_parallel": kind} for kind in ("allreduce", "ddp", "zero1", "zero3")]
    splits += [{"tp": 2}, {"pp": 2, "schedule": "1f1b"}, {"pp": 2, "schedule": "zbv", "stages_per_rank": 2}]
    cells = [Cell(2, "gpt", "bf16", split) for split in splits]
    cells += [Cell(2, "gpt", "bf16", splits[0], train={"activation_checkpointing": "full", "loss_chunks": 2})]
    if form is covering:
        cells = [cells[3], cells[6], cells[7]]
    assert run_on_world(2, tensors_in_cycles, cells) == [[0] * len(cells)] * 2
