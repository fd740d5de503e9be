"""The recorders of NCCL and gloo are read as one, and a straggler is found by the times of the device that computes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as distributed_c10d

from hpc_train.elastic.hangs import group_states, read_collectives
from hpc_train.elastic.watch import arrivals_of, find_straggler
from hpc_train.train.processes import collectives


def entry(
    number: int,
    created_s: float,
    group: tuple[str, str] = ("5", "mesh_dp"),
    name: str = "gloo:all_reduce",
    **known: Any,
) -> dict[str, Any]:
    """As torch writes it; a JSON dump has 0 for a time that is not known, and no duration without timing."""
    plain = {
        "record_id": number, "pg_id": 3, "process_group": list(group), "collective_seq_id": number, "p2p_seq_id": 0,
        "op_id": number, "profiling_name": name, "time_created_ns": int(created_s * 1e9), "input_sizes": [[3]],
        "input_dtypes": ["Float"], "output_sizes": [[3]], "output_dtypes": ["Float"], "state": "scheduled",
        "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": True, "timeout_ms": 600000,
        "is_p2p": False,
    }  # fmt: skip
    return plain | known


def dump(entries: Iterable[dict[str, Any]], recorder: str = "gloo", ranks: str = "") -> bytes:
    config = {"5": {"name": "5", "desc": "mesh_dp", "ranks": ranks}} if ranks else {"": {"name": "", "ranks": "[]"}}
    return json.dumps({recorder: {"version": "2.10", "entries": [*entries], "pg_config": config}}).encode()


def on_host(times: Iterable[float], description: str = "mesh_dp") -> bytes:
    return dump(entry(number, time, ("5", description)) for number, time in enumerate(times))


Fake = Callable[[bool, bool], bytes]


def recorder(*entries: dict[str, Any], ranks: dict[str, str] | None = None) -> Fake:
    """A function of torch's module with NCCL, whose dump has these entries."""

    def function(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes:
        assert (includeCollectives, onlyActive) == (True, False)
        config = {name: {"name": name, "ranks": of} for name, of in (ranks or {}).items()}
        return json.dumps({"version": "2.10", "pg_config": config} | ({"entries": entries} if entries else {})).encode()

    return function


def broken(includeCollectives: bool, onlyActive: bool) -> bytes:
    raise torch.AcceleratorError("CUDA error: unspecified launch failure")


@pytest.fixture
def torch_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake, Fake], None]:
    def install(nccl: Fake, gloo: Fake) -> None:
        monkeypatch.setattr(distributed_c10d, "_dump_nccl_trace_json", nccl, raising=False)
        monkeypatch.setattr(distributed_c10d, "_dump_fr_trace_json", gloo)

    return install


OF_NCCL = entry(56, 10.0, name="nccl:all_reduce", retired=False)
OF_GLOO = entry(4, 11.0, ("2", "control"), retired=False)
RANKS = {"5": "[0, 2]"}


def test_the_collectives_of_nccl_are_seen_beside_those_of_gloo(torch_with: Callable[[Fake, Fake], None]) -> None:
    torch_with(recorder(OF_NCCL, ranks=RANKS), recorder(OF_GLOO))
    found = read_collectives(collectives())
    assert [(one.group, one.description, one.number, one.operation) for one in found] == [
        ("nccl 5 [0, 2]", "mesh_dp", 56, "all_reduce"),
        ("gloo 2", "control", 4, "all_reduce"),
    ]
    assert group_states(found)["nccl 5 [0, 2]"].inside


def test_a_version_that_lists_nccl_in_both_dumps_counts_its_collectives_once(
    torch_with: Callable[[Fake, Fake], None],
) -> None:
    torch_with(recorder(OF_NCCL, OF_GLOO, ranks=RANKS), recorder(OF_NCCL, OF_GLOO))
    found = read_collectives(collectives())
    assert [one.group for one in found] == ["nccl 5 [0, 2]", "gloo 2"]
    assert {state.before for state in group_states(found, saves=True).values()} == {0}


def test_backends_count_apart_and_groups_of_one_name_are_told_apart_by_their_ranks(
    torch_with: Callable[[Fake, Fake], None],
) -> None:
    """The first group of all ranks has both backends; a split names the groups of all ranks alike."""
    both = ("0", "default_pg")
    torch_with(recorder(entry(9, 1.0, both, "nccl:all_reduce")), recorder(entry(2, 1.0, both, "gloo:barrier")))
    assert {name: state.entered for name, state in group_states(read_collectives(collectives())).items()} == {
        "nccl 0": 9,
        "gloo 0": 2,
    }
    first, second = (read_collectives(dump([OF_NCCL], "nccl", ranks))[0].group for ranks in ("[0, 2]", "[1, 3]"))
    assert first != second


def test_what_one_recorder_has_is_kept_if_the_other_one_fails(torch_with: Callable[[Fake, Fake], None]) -> None:
    torch_with(broken, recorder(OF_GLOO))
    assert [one.group for one in read_collectives(collectives())] == ["gloo 2"]
    torch_with(recorder(OF_NCCL), broken)
    assert [one.group for one in read_collectives(collectives())] == ["nccl 5"]


def test_empty_recorders_have_no_collectives(torch_with: Callable[[Fake, Fake], None]) -> None:
    torch_with(recorder(), recorder())
    assert read_collectives(collectives()) == []
    assert read_collectives(b"") == []


def test_a_collective_ends_with_its_completion_even_if_the_watchdog_has_not_looked_yet() -> None:
    [done] = read_collectives(dump([entry(1, 1.0, name="nccl:all_reduce", retired=False, state="completed")]))
    assert done.is_finished
    assert done.has_started


Run = Callable[..., dict[int, bytes]]


def run_of(ranks: int, steps: int, work: dict[int, float], noise: float, seed: int) -> dict[int, bytes]:
    """When each rank enters its all-reduce: all go on together from the last one; exponential noise on every rank."""
    return {rank: on_host(times) for rank, times in entered(ranks, steps, work, noise, seed).items()}


def entered(ranks: int, steps: int, work: dict[int, float], noise: float, seed: int) -> dict[int, list[float]]:
    random_ = random.Random(seed)
    found: dict[int, list[float]] = {rank: [] for rank in range(ranks)}
    now = 1000.0
    for _ in range(steps):
        for rank in range(ranks):
            found[rank].append(now + work.get(rank, 0.1) + random_.expovariate(1 / noise))
        now = max(times[-1] for times in found.values())
    return found


def run_on_gpus(ranks: int, steps: int, work: dict[int, float], noise: float, seed: int) -> dict[int, bytes]:
    """The same on GPUs. Their hosts run ahead by random times; torch's watchdog looks ten times per second."""
    random_ = random.Random(seed)
    begun = entered(ranks, steps, work, noise, seed)
    ends = [max(times) + 0.01 for times in zip(*begun.values(), strict=True)]
    return {
        rank: dump(
            (
                entry(
                    number, begin - random_.uniform(0.0, 2.0), name="nccl:all_reduce", state="completed",
                    duration_ms=1e3 * (ends[number] - begin), time_discovered_started_ns=int(1e9 * begin),
                    time_discovered_completed_ns=int(1e9 * (ends[number] + random_.uniform(0.0, 0.1))),
                )
                for number, begin in enumerate(times)
            ),
            "nccl",
        )
        for rank, times in begun.items()
    }  # fmt: skip


@pytest.mark.parametrize("run", [run_of, run_on_gpus])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_that_takes_twice_as_long_is_named(ranks: int, run: Run) -> None:
    for seed in range(20 if run is run_of else 5):
        found = find_straggler(arrivals_of(run(ranks, 60, {1: 0.2}, noise=0.02, seed=seed)))
        assert found is not None
        assert found.rank == 1
        assert 0.3 < found.share < 0.6


@pytest.mark.parametrize("run", [run_of, run_on_gpus])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.long_form(4, cases=["8-run_of"])
def test_noise_names_nobody(ranks: int, run: Run) -> None:
    """Also where it doubles the time of a step."""
    for seed in range(25 * ranks if run is run_of else 10):
        assert find_straggler(arrivals_of(run(ranks, 60, {}, noise=0.1, seed=seed))) is None


def test_the_host_of_a_gpu_is_not_taken_for_the_gpu() -> None:
    """Rank 1 queues its collectives late, and its GPU is on time: without durations nothing is known."""
    late = {
        rank: dump(
            (
                entry(
                    number, number + 0.5 * rank, name="nccl:all_reduce", time_discovered_completed_ns=int(1e9 * number)
                )
                for number in range(1, 60)
            ),
            "nccl",
        )
        for rank in (0, 1)
    }
    assert find_straggler(arrivals_of(late)) is None
    of_host = {rank: json.loads(on_host(number + 0.5 * rank for number in range(60))) for rank in (0, 1)}
    both = {rank: json.dumps(json.loads(late[rank]) | of_host[rank]).encode() for rank in (0, 1)}
    assert find_straggler(arrivals_of(both)) is None, "the messages of the hosts say nothing about the GPUs"


def test_operations_that_ranks_leave_at_different_times_are_not_compared() -> None:
    def ended(operation: str, milliseconds: float) -> bytes:
        done: dict[str, Any] = {
            "duration_ms": milliseconds,
            "time_discovered_completed_ns": int(2e9),
            "state": "completed",
        }
        return dump([entry(1, 1.0, name=f"nccl:{operation}", **done)], "nccl")

    assert arrivals_of({0: ended("all_reduce", 5.0), 1: ended("all_reduce", 9.0)}) != {}
    assert arrivals_of({0: ended("broadcast", 5.0), 1: ended("broadcast", 9.0)}) == {}


def test_ranks_that_do_different_work_are_not_compared() -> None:
    assert not arrivals_of({0: on_host([1.0, 2.0], "mesh_pp"), 1: on_host([1.5, 2.5], "mesh_pp")})
    world = {0: on_host([1.0, 2.0], "default_pg"), 1: on_host([1.5, 2.5], "default_pg")}
    assert not arrivals_of(world, pipeline=True)
    assert arrivals_of(world, pipeline=False)
    assert arrivals_of({0: on_host([1.0, 2.0]), 1: on_host([1.5, 2.5])}, since=1.9).keys() == {("gloo 5", 1)}
