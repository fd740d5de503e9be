"""Every layout without pipelines trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpc_train.layout.techniques import KINDS
from tests.checkpoint.progress import LONG, Progress
from tests.checkpoint.tiny import LIMIT_S
from tests.parallel.cells import MODELS, SAVERS, Cell, cells, covering, saver_cells
from tests.parallel.oracle import AT_ONCE, SEPARATES, check_cells

THREE = {"micro_batches": 3}
FULL, SOME = ({"activation_checkpointing": mode} for mode in ("full", "selective:3"))
ON_TWO = [
    Cell(2, "gpt-tied", strategy={"dp": 2, "bucket_cap_mb": 0.001}, batch=THREE),
    Cell(2, "custom", strategy={"dp": 2, "data_parallel": "allreduce"}, batch=THREE),
    Cell(2, "gpt", strategy={"dp": 2, "data_parallel": "zero1"}, train=FULL),
    Cell(2, "custom", strategy={"dp": 2, "data_parallel": "zero2"}, batch={"micro_batches": 2}),
    Cell(2, "vit", strategy={"dp": 2, "data_parallel": "zero3"}, batch=THREE, train=SOME),
    Cell(2, "gpt-tied", strategy={"tp": 2}, train=FULL | {"loss_chunks": 2}, loss_scale=1024.0),
]
ON_FOUR = [
    Cell(4, "vit", strategy={"dp": 4, "data_parallel": "zero3", "shard": 2}, batch=THREE),
    Cell(4, "gpt-tied", strategy={"dp": 2, "tp": 2, "data_parallel": "zero3"}),
]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_trains_as_one_process_does(world_size: int, record: Callable[..., None]) -> None:
    """Each strategy, each model and each number of micro-batches; the long form has them in all combinations."""
    allowed, refused = cells(world_size, pipelines=False)
    record(check_cells({1: covering(allowed, "model"), 2: ON_TWO, 4: ON_FOUR}[world_size]), refused)
    assert {cell.strategy.get("data_parallel", "ddp") for cell in ON_TWO} == set(KINDS)


def test_sums_over_three_ranks(record: Callable[..., None]) -> None:
    """No factor is exact in a world that is no power of two; the head of a loss of its own is called more than once."""
    zero3 = {"dp": 3, "data_parallel": "zero3"}
    some = [
        Cell(3, strategy={"dp": 3, "data_parallel": "zero1"}, batch=THREE),
        Cell(3, "gpt-untied-heads", strategy=zero3, batch=THREE, train=FULL),
        Cell(3, "custom", strategy=zero3 | {"comm": "user_buffers"}, batch=THREE),
        Cell(3, "vit", strategy=zero3 | {"comm": "user_buffers"}, batch=THREE, loss_scale=1024.0),
    ]
    if SEPARATES:
        some.append(Cell(3, strategy=zero3 | {"comm": "separate"}, batch=THREE))
    record(check_cells(some), [])


@pytest.mark.long_form(70)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_layouts_of_a_model(world_size: int, model: str, record: Callable[..., None]) -> None:
    record(check_cells([cell for cell in cells(world_size, pipelines=False)[0] if cell.model == model]), [])


@pytest.mark.long_form(20)  # gpt-options is one of the models above
def test_all_options_of_the_gpt_train_as_one_process_does(record: Callable[..., None]) -> None:
    """Where a model is cut: parameters, heads and sequence, stages, and inside a step that is computed again."""
    splits: list[dict[str, Any]] = [
        {"dp": 2, "data_parallel": "zero3"},
        {"tp": 2},
        {"pp": 2, "schedule": "1f1b"},
        {"pp": 2, "schedule": "zbv", "stages_per_rank": 2},
    ]
    chosen = [Cell(2, "gpt-options", strategy=split, batch={"micro_batches": 4}) for split in splits]
    trains = [{"activation_checkpointing": mode, "loss_chunks": 2} for mode in ("full", "ops")]
    chosen += [Cell(2, "gpt-options", strategy=splits[1], train=train) for train in trains]
    record(check_cells(chosen), [])


STRATEGIES: list[dict[str, Any]] = [*({"dp": 2, "data_parallel": kind} for kind in KINDS), {"tp": 2}]
HALVES = {"micro_batches": 2}
OPTIONS = {
    "fp32": [
        Cell(2, model, "fp32", split, HALVES | {"global_size": 8})
        for split in STRATEGIES
        for model in ("gpt", "gpt-tied", "vit")
    ],
    "recomputed": [
        Cell(2, model, strategy=split, batch=HALVES, train={"activation_checkpointing": mode})
        for mode in ("full", "selective:3", "ops")
        for split in STRATEGIES
        for model in ("gpt", "vit")
    ],
    "scaled": [
        Cell(2, strategy=split, train={"loss_chunks": chunks}, loss_scale=1024.0)
        for split in STRATEGIES
        for chunks in (1, 2)
    ],
    "custom": [Cell(2, "custom", strategy=split, batch=HALVES) for split in STRATEGIES[:-1]],
    "custom on four ranks": [
        Cell(4, "custom", strategy={"dp": 4, "data_parallel": kind, "shard": shard}, batch=HALVES)
        for kind in KINDS
        for shard in (["fill", 2] if kind.startswith("zero") else ["fill"])
    ],
    "small buckets": [
        Cell(2, "gpt-tied", strategy=split | {"bucket_cap_mb": 0.001}, batch={"micro_batches": number})
        for split in STRATEGIES[:2]
        for number in (1, 3)
    ],
}


@pytest.mark.long_form(60)  # ON_TWO has each of them
@pytest.mark.parametrize("option", OPTIONS)
def test_options_under_every_strategy(option: str, record: Callable[..., None]) -> None:
    record(check_cells(OPTIONS[option]), [])


REASONS = (
    "requires zero2 or zero3",
    "does not support tensor or pipeline parallelism",
    "activation_checkpointing=ops does not support",
    "train.compile does not support",
    "no rank has a complete gradient to compress",
    "has slices of gradients",
)


def test_what_saves_memory_or_time_changes_no_gradient(record: Callable[..., None]) -> None:
    """In combinations, on two ranks."""
    allowed, refused = saver_cells(2, ("several", "all at once"))
    record(check_cells(covering(allowed, "activation_checkpointing", "offload")), refused)
    assert all(any(reason in entry.reason for reason in REASONS) for entry in refused), {r.reason for r in refused}


@pytest.mark.skipif(not LONG, reason="HPC_TRAIN_LONG=1")
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_saver_under_every_strategy(world_size: int, saver: str, record: Callable[..., None]) -> None:
    """Cut short, it goes on."""
    allowed, refused = saver_cells(world_size, (saver,))
    progress = Progress.of("savers")
    still = set(progress.open(allowed))
    allowed = [cell for cell in allowed if str(cell) in still]
    for first in range(0, len(allowed), AT_ONCE):
        some = allowed[first : first + AT_ONCE]
        record(check_cells(some, timeout=LIMIT_S), [])
        for cell in some:
            progress.passed(cell)
    record([], refused)
    assert all(any(reason in entry.reason for reason in REASONS) for entry in refused), {r.reason for r in refused}


ZBV: dict[str, Any] = {"schedule": "zbv", "stages_per_rank": 2}


SEVERAL_AXES = [
    ("gpt-options", {"dp": 2, "tp": 2, "data_parallel": "zero3"}),
    ("gpt-tied", {"pp": 2, "dp": 2, "data_parallel": "allreduce"} | ZBV),
    ("gpt-tied", {"pp": 2, "tp": 2} | ZBV),
    ("gpt-options", {"pp": 2, "dp": 2, "data_parallel": "zero3", "schedule": "1f1b"}),
    ("gpt-tied", {"dp": 2, "tp": 2, "data_parallel": "zero2"}),
    ("gpt-tied", {"pp": 2, "tp": 2, "schedule": "1f1b"}),
    ("gpt-options", {"pp": 2, "tp": 2, "schedule": "gpipe"}),
    ("gpt-options", {"pp": 2, "tp": 2} | ZBV),
    ("gpt-options", {"pp": 2, "dp": 2, "data_parallel": "zero2"} | ZBV),
]


@pytest.mark.long_form(50)  # the short form has each axis alone with chunks of the loss
def test_chunks_of_the_loss_under_several_axes(record: Callable[..., None]) -> None:
    """The head's gradients wait for a reduction, a tied copy on another stage or the other half of a backward pass.

    All cells have micro-batches of two samples, so that they share the sharding decisions of DTensor.
    """
    chosen = [
        Cell(
            4,
            model,
            strategy=split,
            batch={"micro_batches": 4} if "pp" in split and "dp" in split else {"micro_size": 2},
            train={"loss_chunks": 3},
        )
        for model, split in SEVERAL_AXES
    ]
    record(check_cells(chosen), [])
