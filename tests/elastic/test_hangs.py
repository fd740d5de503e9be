"""When silence is a hang, which rank is at fault, and which one is a straggler: all of it without a process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from hpc_train.config.values import parse_hang_timeout
from hpc_train.elastic.coordinator import FailureReport, primary_cause
from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.hangs import (
    COLD_S,
    FACTOR,
    PATIENCE_S,
    SEEN_S,
    START_S,
    UNSEEN_S,
    GroupState,
    Hang,
    HangWatch,
    RankState,
    culprit,
    group_states,
    patience_s,
)
from hpc_train.elastic.watch import arrivals_of, find_straggler
from hpc_train.errors import UserError
from hpc_train.run.agent_worker import Beat, Phase
from hpc_train.run.exits import Failure

TICK = 0.25


class Clock:
    """Lets a watch see the heartbeats of two ranks, as time passes."""

    def __init__(self, watch: HangWatch) -> None:
        self.watch, self.now, self.beats = watch, 100.0, {}

    def enter(self, phase: Phase, step: int) -> None:
        self.beats = {rank: Beat(step, phase, self.now, step, self.now) for rank in (0, 1)}

    def wait(self, seconds: float) -> Hang | None:
        until = self.now + seconds
        found = None
        while self.now < until - 1e-9 and found is None:
            self.now += min(TICK, until - self.now)
            found = self.watch.check(self.beats, self.now)
        return found

    def steps(self, number: int, seconds: float, start: int = 1) -> int:
        for step in range(start, start + number):
            self.enter(Phase.STEP, step)
            assert self.wait(seconds) is None
        return start + number


def test_the_bound_of_a_step_is_learned() -> None:
    watch = HangWatch()
    clock = Clock(watch)
    clock.enter(Phase.FIRST_STEP, 0)
    assert clock.wait(20) is None, "it may compile"
    clock.steps(3, 0.5)
    assert watch.bound(Phase.STEP) == pytest.approx(FACTOR * 20, rel=0.05)
    clock.steps(300, 0.5, start=4)
    assert watch.bound(Phase.STEP) == 3.0
    hang = clock.wait(10)
    assert hang is not None
    assert 3.0 < hang.seconds <= 3.0 + 2 * TICK
    watch.begin()
    assert watch.bound(Phase.STEP) == 3.0, "it is known in the next attempt"
    clock.steps(300, 2.0, start=400)
    assert watch.bound(Phase.STEP) == pytest.approx(10.0)


def test_rare_slow_steps_are_normal() -> None:
    watch = HangWatch()
    clock = Clock(watch)
    for start in range(0, 1000, 50):
        clock.steps(49, 0.3, start)
        clock.steps(1, 2.5, start + 49)
    assert watch.bound(Phase.STEP) == pytest.approx(12.5)


def test_evaluations_and_checkpoints_have_bounds_of_their_own() -> None:
    watch = HangWatch()
    clock = Clock(watch)
    assert watch.bound(Phase.STARTING) == START_S
    step = clock.steps(20, 0.3)
    for seconds in (200, 40):
        clock.enter(Phase.CHECKPOINT, step)
        assert watch.bound(Phase.CHECKPOINT) >= UNSEEN_S
        assert clock.wait(seconds) is None
        step = clock.steps(5, 0.3, step)
    assert watch.bound(Phase.CHECKPOINT) == pytest.approx(FACTOR * 200)
    clock.enter(Phase.EVALUATION, step)
    clock.wait(1)
    clock.steps(5, 0.3, step)
    assert watch.bound(Phase.EVALUATION) == COLD_S


def test_ranks_may_wait_for_one_that_saves() -> None:
    clock = Clock(HangWatch())
    step = clock.steps(20, 0.3)
    clock.enter(Phase.STEP, step)
    clock.beats[1] = Beat(step, Phase.CHECKPOINT, clock.now, step, clock.now)
    assert clock.wait(100) is None
    assert clock.wait(UNSEEN_S) is not None


def test_on_several_nodes_a_slow_step_is_told_once_before_it_is_a_hang() -> None:
    clock = Clock(HangWatch(patience_s=PATIENCE_S))
    step = clock.steps(20, 0.5)
    for _ in range(2):
        clock.enter(Phase.STEP, step)
        slow = clock.wait(20)
        assert slow is not None
        assert slow.only_slow
        assert 3.0 < slow.seconds <= 3.0 + 2 * TICK
        assert clock.wait(PATIENCE_S - 5) is None, "it was reported"
        step = clock.steps(300, 0.5, step + 1)  # the slow one is forgotten
    clock.enter(Phase.STEP, step)
    assert clock.wait(20) is not None
    hang = clock.wait(PATIENCE_S)
    assert hang is not None
    assert not hang.only_slow
    assert PATIENCE_S < hang.seconds <= PATIENCE_S + 2 * TICK
    clock.watch.begin()
    clock.enter(Phase.STEP, step)
    slow = clock.wait(20)
    assert slow is not None
    assert slow.only_slow, "another attempt, another silence"


def test_a_bound_that_the_user_gives_is_that_of_a_hang_on_several_nodes_too() -> None:
    clock = Clock(HangWatch(5.0, patience_s=PATIENCE_S))
    clock.steps(20, 0.5)
    slow, hang = clock.wait(10), clock.wait(10)
    assert slow is not None
    assert hang is not None
    assert (slow.only_slow, hang.only_slow, hang.bound) == (True, False, 5.0)


@pytest.mark.parametrize(
    ("nodes", "gpus", "values", "seconds"),
    [
        (1, 0, {}, 0),
        (1, 8, {}, 30),
        (2, 0, {}, 30),
        (2, 8, {}, 60.1),  # 4.096 us x 2^20 x 7, twice
        (2, 8, {"NCCL_IB_TIMEOUT": "14"}, 30),
        (128, 8, {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"}, 240.5),
        (2, 8, {"NCCL_IB_TIMEOUT": "0", "NCCL_IB_RETRY_CNT": "many"}, 60.1),
    ],
)
def test_a_hang_is_not_taken_for_one_before_nccl_has_given_up(
    nodes: int, gpus: int, values: dict[str, str], seconds: float
) -> None:
    assert patience_s(nodes, gpus, values) == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize(("setting", "bound"), [("20", 20.0), ("0", None), ("1.5", 1.5)])
def test_a_bound_that_the_user_gives(setting: str, bound: float | None) -> None:
    clock = Clock(HangWatch(parse_hang_timeout(setting)))
    clock.steps(1, 1.0)
    hang = clock.wait(5000)
    assert (hang and hang.bound) == bound


@pytest.mark.parametrize("text", ["-1", "soon", "inf", "nan"])
def test_another_bound_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="hang_timeout_s is"):
        parse_hang_timeout(text)


def test_time_in_which_the_agent_stood_still_does_not_count() -> None:
    """A suspended job, or a machine so busy that nobody gets on."""
    watch = HangWatch()
    clock = Clock(watch)
    clock.steps(20, 0.3)
    clock.now += 1000
    assert watch.check(clock.beats, clock.now) is None
    for _ in range(int(2 / SEEN_S)):
        clock.now += 60
        assert watch.check(clock.beats, clock.now) is None


def state(rank: int, **known: object) -> RankState:
    usual: dict[str, object] = {"step": 7, "phase": "step", "seconds": 4.0, "arrived_step": 7, "process": "S"}
    return RankState(rank=rank, node="n0", **{**usual, "answered": True, **known})  # type: ignore[arg-type]


def groups(**entered: tuple[Any, ...]) -> dict[str, object]:
    return {"groups": {name: GroupState(*value) for name, value in entered.items()}}


@pytest.mark.parametrize(
    ("states", "rank"),
    [
        ([state(0), state(1, process="T"), state(2, step=6)], 1),
        ([state(0), state(1, answered=False)], 1),
        ([state(0, answered=False), state(1, answered=False), state(2, answered=False, arrived_step=6)], 2),
        ([state(0, arrived_step=6), state(1)], 0),
        ([state(0, **groups(dp=(9, True))), state(1, **groups(dp=(8, False)))], 1),
        # ranks 0 and 2 are one replica: 2 waits for what 0 sends, 3 for 2, 1 for 0
        (
            [
                state(0, **groups(a=(8, False), pp=(4, False))),
                state(1, **groups(a=(9, True), pp=(4, False))),
                state(2, **groups(b=(5, False), pp=(5, True))),
                state(3, **groups(b=(6, True), pp=(5, False))),
            ],
            0,
        ),
        ([state(0, **groups(dp=(9, True, "all_reduce", 30))), state(1, **groups(dp=(9, True, "barrier", 0)))], 1),
        ([state(0), state(1, process="D")], 1),
        ([state(0), state(1)], None),
    ],
)
def test_the_rank_that_the_others_wait_for(states: list[RankState], rank: int | None) -> None:
    assert culprit(states)[0] == rank
    again = [RankState.parse(json.loads(json.dumps(asdict(one)))) for one in states]
    assert again == states, "agents can tell each other"


def hang(*states: RankState) -> WorkerFailure:
    """As the agent of a node with these ranks tells it."""
    rank, reason = culprit(states)
    message = "no sign of life for 4.0 s in step after step 7; " + (reason if rank is None else f"rank {rank} {reason}")
    plain = tuple(asdict(one) for one in states)
    first = states[0].rank if rank is None else rank
    return WorkerFailure(first, Failure.HANG, message, message, 1.0, waits=rank is None, states=plain)


@pytest.mark.parametrize(
    ("nodes", "rank"),
    [
        # one worker per node: alone, none of them is behind anybody
        ([hang(state(0, **groups(dp=(9, True)))), hang(state(1, **groups(dp=(8, False))))], 1),
        ([hang(state(0, answered=False)), hang(state(1, **groups(dp=(9, True))))], 0),
        ([hang(state(0), state(1)), hang(state(2), state(3, process="T"))], 3),
        ([hang(state(0), state(1)), hang(state(2), state(3))], 0),
    ],
)
def test_the_nodes_settle_whose_rank_it_is(nodes: list[WorkerFailure], rank: int) -> None:
    causes = [FailureReport(failure, f"n{number}", 5.0 + number) for number, failure in enumerate(nodes)]
    found = primary_cause(causes)
    assert found is not None
    assert found.failure.rank == rank
    assert rank in [one["rank"] for one in nodes[int(found.node[1:])].states]


def dump(times: Iterator[float], description: str = "mesh_dp", retired: bool = True) -> bytes:
    entries = [
        {
            "process_group": ["5", description],
            "collective_seq_id": number,
            "is_p2p": False,
            "profiling_name": "gloo:all_reduce",
            "input_sizes": [[3]],
            "retired": retired,
            "time_created_ns": int(time * 1e9),
        }
        for number, time in enumerate(times)
    ]
    return json.dumps({"entries": entries}).encode()


def test_the_messages_of_the_control_group_are_not_waited_for() -> None:
    assert group_states(dump(iter([1.0, 2.0]), "control", retired=False)) == {}
    [saving] = group_states(dump(iter([1.0, 2.0]), "control", retired=False), saves=True).values()
    assert saving.inside, "a save has no other group"
    assert group_states(dump(iter([1.0, 2.0]), "mesh_dp", retired=False)) == {
        "5": GroupState(1, True, "gloo:all_reduce [[3]]", 1)
    }
    assert group_states(b"") == {}


def run_of(ranks: int, steps: int, work: dict[int, float], noise: float, seed: int) -> dict[int, bytes]:
    """When each rank enters its all-reduce: all go on together from the last one; exponential noise on every rank."""
    random_ = random.Random(seed)
    entered: dict[int, list[float]] = {rank: [] for rank in range(ranks)}
    now = 1000.0
    for _ in range(steps):
        for rank in range(ranks):
            entered[rank].append(now + work.get(rank, 0.1) + random_.expovariate(1 / noise))
        now = max(times[-1] for times in entered.values())
    return {rank: dump(iter(times)) for rank, times in entered.items()}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_that_takes_twice_as_long_is_named(ranks: int) -> None:
    for seed in range(20):
        found = find_straggler(arrivals_of(run_of(ranks, 60, {1: 0.2}, noise=0.02, seed=seed)))
        assert found is not None
        assert found.rank == 1
        assert 0.3 < found.share < 0.6


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_noise_names_nobody(ranks: int) -> None:
    """Also where it doubles the time of a step."""
    for seed in range(200):
        assert find_straggler(arrivals_of(run_of(ranks, 60, {}, noise=0.1, seed=seed))) is None


def test_ranks_that_do_different_work_are_not_compared() -> None:
    assert not arrivals_of({0: dump(iter([1.0, 2.0]), "mesh_pp"), 1: dump(iter([1.5, 2.5]), "mesh_pp")})
    world = {0: dump(iter([1.0, 2.0]), "default_pg"), 1: dump(iter([1.5, 2.5]), "default_pg")}
    assert not arrivals_of(world, pipeline=True)
    assert arrivals_of(world, pipeline=False)
    assert arrivals_of({0: dump(iter([1.0, 2.0])), 1: dump(iter([1.5, 2.5]))}, since=1.9).keys() == {("5", 1)}
