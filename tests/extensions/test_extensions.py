"""A schedule and a data-parallel kind of a user's own package train, and what they lack is refused before a start."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import estimate
from hpc_train.layout.techniques import SCHEDULES, DataParallelKind, PipelineSchedule, find_kind, find_schedule
from tests.extensions.package import dualpipev, kinds
from tests.parallel.cells import Cell
from tests.parallel.oracle import check_cells
from tests.parallel.test_techniques import waiting_share
from tests.train.runs import frozen, run_attempt

SCHEDULE = "tests.extensions.package.dualpipev:SCHEDULE"
KIND = "tests.extensions.package.kinds:KIND"
DUALPIPEV = {"schedule": SCHEDULE, "stages_per_rank": 2}


def test_each_trains_as_one_process_does() -> None:
    check_cells(
        [Cell(2, "gpt-tied", strategy=split) for split in ({"pp": 2} | DUALPIPEV, {"dp": 2, "data_parallel": KIND})]
    )


@pytest.mark.long_form(15)
def test_each_trains_with_other_techniques_as_one_process_does() -> None:
    splits: list[dict[str, Any]] = [
        {"pp": 4} | DUALPIPEV,
        {"pp": 2, "dp": 2, "data_parallel": KIND} | DUALPIPEV,
        *({"pp": 2, "dp": 2, "data_parallel": kind} | DUALPIPEV for kind in ("allreduce", "zero1", "zero2")),
        {"dp": 4, "data_parallel": KIND},
        {"pp": 2, "dp": 2, "data_parallel": KIND},
    ]
    cells = [Cell(4, "gpt-tied", strategy=split) for split in splits]
    cells.append(Cell(4, "vit", strategy={"dp": 4, "data_parallel": KIND}, batch={"micro_batches": 3}))
    check_cells(cells)


@pytest.mark.long_form(15)  # the numbers above; that workers find a kind of the user's: tests/parallel
def test_a_run_trains_with_both(tmp_path: Path) -> None:
    both = [f"strategy.schedule={SCHEDULE}", "strategy.stages_per_rank=2", f"strategy.data_parallel={KIND}"]
    run = frozen(tmp_path / "run", "+strategy=hybrid", *both, "train.steps=3", "model.dropout=0")
    assert run_attempt(run, 4, timeout=300) == [0] * 4
    alone = frozen(tmp_path / "alone", "+strategy=single", "train.steps=3", "model.dropout=0")
    assert run_attempt(alone, 1, timeout=300) == [0]
    losses = [[line["loss"] for line in each.read_metrics()] for each in (run, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_memory_in_flight_and_bubble_are_those_of_its_row() -> None:
    from hpc_train.parallel.pipeline.schedules import check_extension, recorded_actions

    for pp, micro_batches in ((2, 4), (4, 8), (4, 12)):
        layout = Layout(1, pp, 1, 1, "ddp", SCHEDULE, 2, micro_batches, 1)
        check_extension(layout)
        assert waiting_share(recorded_actions(layout), layout.stages) == pytest.approx(layout.bubble_share)
        assert [layout.in_flight(stage) for stage in (0, 2 * pp - 1)] == [2 * pp, 1]
    ours, zbv = (
        Cell(2, strategy={"pp": 2, "schedule": schedule, "stages_per_rank": 2}) for schedule in (SCHEDULE, "zbv")
    )
    mine, other = (estimate(cell.config(), cell.layout()) for cell in (ours, zbv))
    assert mine is not None and other is not None and mine.activations > other.activations


@pytest.mark.parametrize(
    ("strategy", "train", "message"),
    [
        (
            {"dp": 2, "data_parallel": "ddp"},
            {},
            "dualpipev does not support data_parallel=ddp: a split backward runs their hooks",
        ),
        ({"stages_per_rank": 1}, {}, "stages_per_rank is 1, but the schedule dualpipev requires 2 stages"),
        ({}, {"compile": True}, "train.compile does not support the schedule dualpipev"),
        ({"schedule": "zbv", "dp": 2, "data_parallel": KIND}, {}, "zbv does not support data_parallel=afterwards"),
        ({"pp": 1, "dp": 2, "tp": 2, "data_parallel": KIND}, {}, "afterwards cannot reduce the gradients of tensor"),
        (
            {"pp": 1, "dp": 4, "data_parallel": KIND},
            {"reproducible": "any_world_size"},
            "afterwards, which reduces gradients",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(strategy: dict[str, Any], train: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Cell(4, strategy={"pp": 2} | DUALPIPEV | strategy, train=train).layout()


FACTS = [("dualpipev", "SCHEDULE", PipelineSchedule), ("kinds", "KIND", DataParallelKind)]
KEYS = {"SCHEDULE": "schedule", "KIND": "data_parallel"}


@pytest.mark.parametrize(
    ("module", "attribute", "fact"),
    [(module, row, fact) for module, row, of in FACTS for fact in of.__dataclass_fields__],
)
def test_a_row_without_one_fact_is_refused_when_the_config_is_validated(
    module: str, attribute: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(__file__).parent / "package" / f"{module}.py"
    text, removed = re.subn(rf"^    {fact}=.*\n", "", source.read_text(), flags=re.MULTILINE)
    path = write_package(tmp_path, monkeypatch, text)
    assert removed == 1
    with pytest.raises(UserError) as refused:
        Cell(4, strategy={"pp": 2, KEYS[attribute]: f"{path}:{attribute}"}).layout()
    assert refused.value.what == f"mine_{tmp_path.name}.row:{attribute} does not state {fact}"
    assert refused.value.where == f"{tmp_path}/mine_{tmp_path.name}/row.py"
    assert f"{fact}=..." in refused.value.fix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch_that_is_absent", "cannot be loaded: ModuleNotFoundError"),
        ("SCHEDULE = 3", "is of type int, but must be a PipelineSchedule"),
        ("from tests.extensions.contradiction import *", "cannot be loaded"),
        ('{row}SCHEDULE = replace(SCHEDULE, placement="linear")', "placement linear has one stage per rank"),
        ("{row}SCHEDULE = replace(SCHEDULE, compiles=True)", "compiles and ops_checkpointing must be False"),
        ('{row}SCHEDULE = replace(SCHEDULE, data_parallel=("dpp",))', "data_parallel contains 'dpp'"),
        ('{row}SCHEDULE = replace(SCHEDULE, auto="always")', "auto chooses among the built-in schedules only"),
        ("{row}SCHEDULE = replace(SCHEDULE, color=1)", "unexpected keyword argument 'color'"),
    ],
)
def test_a_wrong_row_is_refused(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = (Path(__file__).parent / "package" / "dualpipev.py").read_text() + "\nfrom dataclasses import replace\n"
    path = write_package(tmp_path, monkeypatch, text.replace("{row}", row))
    with pytest.raises(UserError, match=message):
        Cell(4, strategy={"pp": 2, "schedule": f"{path}:SCHEDULE"}).layout()


def write_package(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """A package whose ``row.py`` is ``text`` and which fails when it is imported as a whole; returns the module."""
    name = f"mine_{folder.name}"  # rows are loaded once per process
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('the package was imported')\n")
    (folder / name / "row.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return f"{name}.row"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.at_all:SCHEDULE", "nowhere.at_all:SCHEDULE cannot be found"),
        ("tests.extensions.package.nothing:SCHEDULE", "tests.extensions.package.nothing:SCHEDULE cannot be found"),
        ("tests.extensions.package.dualpipev:NOTHING", "defines no NOTHING"),
        ("tests.extensions.package.kinds:KIND", "is of type DataParallelKind, but must be a PipelineSchedule"),
        ("tests/extensions:KIND", "cannot be found"),
        ("dualpipe", "strategy.schedule is 'dualpipe'"),
    ],
)
def test_a_path_that_leads_to_no_row_is_refused(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_schedule(path)


def test_a_row_that_torch_contradicts_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_train.parallel.pipeline.schedules import check_extension

    layout = Layout(1, 2, 1, 1, "ddp", SCHEDULE, 2, 4, 1)
    for facts, message in (
        ({"in_flight": SCHEDULES["zbv"].in_flight}, "in_flight of schedule 'dualpipev' differs from"),
        ({"splits_backward": False}, "splits_backward of schedule 'dualpipev' differs from"),
        ({"placement": "looped"}, "placement of schedule 'dualpipev' differs from"),
        ({"torch_class": "torch.distributed.pipelining:ScheduleDualPipe"}, "cannot be imported"),
        ({"torch_class": "torch:Tensor"}, "torch:Tensor is not a pipeline schedule"),
        ({"torch_class": "torch.distributed.pipelining:ScheduleInterleaved1F1B"}, "differs from"),
    ):
        changed = replace(dualpipev.SCHEDULE, **facts)  # type: ignore[arg-type]
        monkeypatch.setattr(Layout, "pipeline", property(lambda _, row=changed: row))
        with pytest.raises(UserError, match=message):
            check_extension(layout)
    monkeypatch.setattr(Layout, "pipeline", property(lambda _: dualpipev.SCHEDULE))
    with pytest.raises(UserError, match="does not accept 2 stages on each of 2 ranks with 3 micro-batches"):
        check_extension(replace(layout, micro_batches=3))


def test_a_kind_whose_class_lacks_a_method_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_train.parallel.replicas import replica_class

    layout = Layout(2, 1, 1, 1, KIND, "1f1b", 1, 1, 1)
    assert replica_class(layout).__name__ == "SummedAfterwards"
    for facts, message in (
        ({"replicas": "tests.extensions.package.replicas:Nothing"}, "cannot be imported"),
        ({"replicas": "torch.nn:Linear"}, "no method begin and no method micro_batch"),
    ):
        changed = replace(kinds.KIND, **facts)  # type: ignore[arg-type]
        monkeypatch.setattr(Layout, "kind", property(lambda _, row=changed: row))
        with pytest.raises(UserError, match=message):
            replica_class(layout)


def test_validation_imports_no_torch() -> None:
    script = (
        "import sys; from hpc_train.layout.techniques import find_kind, find_schedule; "
        f"find_schedule({SCHEDULE!r}); find_kind({KIND!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_rows_are_found_by_their_path() -> None:
    assert find_schedule(SCHEDULE).name == "dualpipev" and find_kind(KIND).name == "afterwards"
