"""``strategy.bucket_cap_mb=auto``: the gradients are exact while it searches, and all ranks keep the same size."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hpc_train.errors import UserError
from hpc_train.parallel import bucket_search
from hpc_train.parallel.bucket_search import BucketChoice, SearchedReplicas
from hpc_train.parallel.mesh import join_mesh
from hpc_train.parallel.replicas import DDPReplicas
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.requests import StopFlag
from tests.parallel import oracle
from tests.parallel.cells import Cell
from tests.ranks import run_ranks
from tests.train.runs import frozen, run_attempt

SIZES = (0.0005, 0.002, 1.0)
STEPS = 1 + len(SIZES) * 2 + 1


def search_sooner() -> None:
    bucket_search.SIZES_MB, bucket_search.WARM_UP, bucket_search.COUNTED = SIZES, 1, 1


def compare(rank: int, world_size: int, cell: Cell) -> tuple[oracle.Outcome, list[BucketChoice]]:
    search_sooner()
    oracle.STEPS = STEPS
    choices: list[BucketChoice] = []
    init: Any = SearchedReplicas.__init__

    def listening(self: SearchedReplicas, replicas: Any, mesh: Any, tell: Any) -> None:
        init(self, replicas, mesh, choices.append)

    SearchedReplicas.__init__ = listening  # type: ignore[method-assign]
    return oracle.compare_cells(rank, world_size, [cell])[0], choices


def pipeline(**strategy: Any) -> Cell:
    return Cell(4, strategy={"dp": 2, "pp": 2, "bucket_cap_mb": "auto"} | strategy, batch={"micro_batches": 4})


@pytest.mark.parametrize(
    "cell",
    [
        Cell(2, strategy={"dp": 2, "bucket_cap_mb": "auto"}, batch={"micro_batches": 3}),
        Cell(2, strategy={"dp": 2, "bucket_cap_mb": "auto", "data_parallel": "allreduce"}),
        pipeline(data_parallel="allreduce"),
    ],
    ids=["ddp", "allreduce", "pipeline"],
)
def test_gradients_are_exact_during_the_search(cell: Cell) -> None:
    ranks = run_ranks(cell.world_size, compare, cell)
    assert oracle.merge([outcome for outcome, _ in ranks]).worst <= oracle.TOLERANCE[cell.precision]
    choices = [choice for _, choices in ranks for choice in choices]
    assert len(choices) == cell.world_size and choices.count(choices[0]) == len(choices)
    assert choices[0].cap_mb in choices[0].seconds and tuple(choices[0].seconds) == SIZES


def test_ddp_inside_a_pipeline_is_refused() -> None:
    with pytest.raises(UserError, match="cannot change the buckets of ddp"):
        pipeline().layout()
    alone = Cell(2, strategy={"pp": 2, "data_parallel": "ddp", "bucket_cap_mb": "auto"})
    assert alone.layout().dp_cp == 1, "without replicas the key has no effect"


def test_a_static_graph_is_refused_by_what_replaces_ddp() -> None:
    replaced = Cell(2, strategy={"dp": 2, "static_graph": True, "compression": "topk"})
    with pytest.raises(UserError, match="data_parallel=allreduce, which this layout uses instead of ddp"):
        replaced.layout()


def reductions_after_a_change(rank: int, world_size: int) -> tuple[bool, int]:
    cell = Cell(2, strategy={"dp": 2, "bucket_cap_mb": 1})
    mesh = join_mesh(cell.layout(), rank, torch.device("cpu"))
    replicas = DDPReplicas(torch.nn.Linear(2, 2), mesh, cell.config().strategy)
    before = weakref.ref(replicas.module)
    replicas.module(torch.ones(1, 2)).sum().backward()
    replicas.rebucket(25)
    replicas.module(torch.ones(1, 2)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        replicas.module(torch.ones(1, 2)).sum().backward()
    return before() is None, sum(event.name == "gloo:all_reduce" for event in profiler.events() or [])


def test_buckets_of_another_size_take_the_place_of_those_before() -> None:
    assert run_ranks(2, reductions_after_a_change) == [(True, 1)] * 2


def sooner(spec: WorkerSpec, stop: StopFlag) -> None:
    search_sooner()


def test_a_run_keeps_what_it_found(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "strategy.bucket_cap_mb=auto", "train.steps=10")
    assert run_attempt(run, 2, sooner) == [0, 0]
    found = run.record()["bucket_cap"]
    assert found["cap_mb"] in SIZES and len(found["seconds"]) == len(SIZES)
    chosen = [event for event in run.read_events() if event["event"] == "bucket_size_chosen"]
    assert [event["cap_mb"] for event in chosen] == [found["cap_mb"]]
    frozen(tmp_path / "run", "+strategy=dp", "strategy.bucket_cap_mb=auto", "train.steps=20")
    assert run_attempt(run, 2, sooner) == [0, 0]
    assert run.record()["bucket_cap"] == found  # not measured again
    assert sum(event["event"] == "bucket_size_chosen" for event in run.read_events()) == 1
