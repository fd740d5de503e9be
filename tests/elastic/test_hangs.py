"""When silence is a hang, what proves it, and which rank is at fault: all of it without a process."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train.config.values import parse_hang_timeout
from hpc_train.elastic import watch as watch_module
from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.hang_bounds import (
    COLD_S,
    COMPILATION_S,
    FACTOR,
    SECOND_LOOK_S,
    SEEN_S,
    START_S,
    STOPPED_S,
    UNSEEN_S,
    HangWatch,
    Silence,
    Stage,
    Starvation,
    patience_s,
)
from hpc_train.elastic.hangs import WINDOW_S, Collective, Evidence, GroupState, RankState, culprit, group_states, proof
from hpc_train.elastic.rendezvous.messages import FailureReport, primary_cause
from hpc_train.elastic.watch import OTHERS_S, SAVE_TICK_S, OtherNodes, Watch
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.run.agent_worker import Beat, Phase
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Failure
from hpc_train.run.processes import Activity, activity
from hpc_train.run.requests import MOST_HOLD_S
from hpc_train.telemetry.tracebacks import stack_place

PATIENCE_S = 120.0
TICK = 0.25


class Clock:
    """Lets a watch see the heartbeats of two ranks, as time passes."""

    def __init__(self, watch: HangWatch) -> None:
        self.watch = watch
        self.now = 100.0
        self.beats: dict[int, Beat] = {}
        self.quiet: list[Silence] = []

    def enter(self, phase: Phase, step: int) -> None:
        self.beats = {rank: Beat(step, phase, self.now, step, self.now) for rank in (0, 1)}

    def wait(self, seconds: float, stopped: Sequence[int] = ()) -> Silence | None:
        until = self.now + seconds
        found = None
        while self.now < until - 1e-9 and found is None:
            self.now += min(TICK, until - self.now)
            found = self.watch.check(self.beats, self.now, stopped)
            if found is not None and found.stage is Stage.QUIET:
                self.quiet.append(found)
                found = None
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


def test_a_number_bounds_the_first_step_and_not_the_start() -> None:
    watch = HangWatch(15.0, start_s=900.0)
    bounds = {phase: watch.bound(phase) for phase in Phase}
    assert (bounds[Phase.STARTING], bounds[Phase.FIRST_STEP], bounds[Phase.STEP]) == (900.0, 15.0, 15.0)
    assert bounds[Phase.CHECKPOINT] == UNSEEN_S
    assert HangWatch(15.0, compiles=True).bound(Phase.FIRST_STEP) == COMPILATION_S
    assert HangWatch(900.0, compiles=True).bound(Phase.FIRST_STEP) == 900.0
    assert HangWatch(start_s=900.0).bound(Phase.FIRST_STEP) == 900.0
    clock = Clock(watch)
    clock.enter(Phase.FIRST_STEP, 0)
    hang = clock.wait(20)
    assert hang is not None and hang.stage is Stage.HANG


def test_a_silence_of_a_minute_is_told_in_any_phase() -> None:
    clock = Clock(HangWatch())
    for phase in (Phase.STARTING, Phase.FIRST_STEP, Phase.EVALUATION, Phase.STARTING):
        clock.quiet.clear()
        clock.enter(phase, 0)
        assert clock.wait(250) is None
        assert [round(told.seconds) for told in clock.quiet] == [60, 120, 240]
        assert clock.quiet[0].phase is phase


@pytest.mark.parametrize("timeout", [None, 4.0])
def test_a_rank_that_a_person_holds_does_not_hang_for_an_hour(timeout: float | None) -> None:
    watch = HangWatch(timeout)
    clock = Clock(watch)
    start = clock.steps(20, 0.5)
    bound = watch.bound(Phase.STEP)
    clock.enter(Phase.HELD, start)
    assert clock.wait(MOST_HOLD_S) is None
    assert clock.quiet == []
    clock.enter(Phase.STEP, start)
    assert watch.bound(Phase.STEP) == bound, "the hold is not a step"
    clock.enter(Phase.HELD, start)
    hang = clock.wait(1.1 * MOST_HOLD_S)
    assert hang is not None and hang.stage is Stage.HANG


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


@pytest.mark.parametrize("seconds", [6, 20])
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (2, 0), (128, 8)])
def test_links_storage_and_allocators_may_pause(nodes: int, gpus: int, seconds: float) -> None:
    clock = Clock(HangWatch(patience_s=patience_s(nodes, gpus, {})))
    step = clock.steps(20, 0.25)
    clock.enter(Phase.STEP, step)
    slow = clock.wait(seconds)
    assert slow is not None
    assert slow.stage is Stage.SLOW
    assert 3.0 < slow.seconds <= 3.0 + 2 * TICK
    assert clock.wait(seconds - slow.seconds) is None
    assert clock.steps(20, 0.25, step + 1)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (2, 0), (128, 8)])
def test_a_silence_for_ever_is_examined_twice_and_is_then_a_hang(nodes: int, gpus: int) -> None:
    bound = patience_s(nodes, gpus, {})
    clock = Clock(HangWatch(patience_s=bound))
    step = clock.steps(20, 0.5)
    for _ in range(2):
        clock.enter(Phase.STEP, step)
        stages = [clock.wait(1000) for _ in range(3)]
        assert [one and one.stage for one in stages] == [Stage.SLOW, Stage.STILL_SLOW, Stage.HANG]
        for one, expected in zip(stages, (3.0, SECOND_LOOK_S, bound), strict=True):
            assert one is not None
            assert expected < one.seconds <= expected + 2 * TICK
        clock.watch.begin()  # another attempt, another silence


def test_the_second_look_leaves_slow_steps_their_time() -> None:
    clock = Clock(HangWatch(patience_s=PATIENCE_S))
    clock.steps(20, 8.0)
    clock.enter(Phase.STEP, 20)
    first, second = clock.wait(1000), clock.wait(1000)
    assert first is not None
    assert second is not None
    assert (round(first.seconds), round(second.seconds)) == (40, 80)


def test_a_bound_that_the_user_gives_is_that_of_a_hang_on_several_nodes_too() -> None:
    clock = Clock(HangWatch(50.0, patience_s=PATIENCE_S))
    clock.steps(20, 0.5)
    slow, hang = clock.wait(100), clock.wait(100)
    assert slow is not None
    assert hang is not None
    assert (slow.stage, hang.stage, hang.bound) == (Stage.SLOW, Stage.HANG, 50.0), (
        "no second look: the user has decided"
    )


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.FIRST_STEP, Phase.STEP, Phase.EVALUATION, Phase.CHECKPOINT])
@pytest.mark.parametrize("patience", [0.0, PATIENCE_S])
def test_a_stopped_worker_is_found_at_once_in_every_phase(phase: Phase, patience: float) -> None:
    clock = Clock(HangWatch(patience_s=patience))
    clock.enter(phase, 0)
    assert clock.wait(STOPPED_S - TICK, stopped=[1]) is None
    assert clock.wait(TICK) is None, "it goes on"
    found = clock.wait(STOPPED_S + 2 * TICK, stopped=[1])
    assert found is not None
    assert (found.rank, found.stage) == (1, Stage.STOPPED)


def test_a_stopped_worker_is_left_alone_without_detection() -> None:
    assert Clock(HangWatch(0.0)).wait(100, stopped=[0, 1]) is None


@pytest.mark.parametrize(
    ("nodes", "gpus", "values", "seconds"),
    [
        (1, 0, {}, 0),
        (1, 8, {}, 120),
        (1, 8, {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"}, 120),
        (2, 0, {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"}, 120),
        (2, 8, {}, 120),
        (128, 8, {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"}, 240.5),  # 4.096 us x 2^22 x 7, twice
        (2, 8, {"NCCL_IB_TIMEOUT": "0", "NCCL_IB_RETRY_CNT": "many"}, 120),
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


def groups(backend: str = "gloo", **entered: tuple[Any, ...]) -> dict[str, object]:
    return {"groups": {f"{backend} {name}": GroupState(*value) for name, value in entered.items()}}


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
        (  # all hosts have queued the collective, and the GPU of rank 1 has not begun it
            [
                state(0, **groups("nccl", dp=(9, True, "all_reduce", 30, 9))),
                state(1, **groups("nccl", dp=(9, True, "all_reduce", 30, 8))),
            ],
            1,
        ),
        (  # the host of rank 0 has queued fewer, which nobody waits for
            [
                state(0, **groups("nccl", dp=(11, True, "all_reduce", 30, 9))),
                state(1, **groups("nccl", dp=(14, True, "all_reduce", 30, 8))),
            ],
            1,
        ),
        (  # the host of rank 1 has queued nothing more
            [
                state(0, **groups("nccl", dp=(11, True, "all_reduce", 30, 9))),
                state(1, **groups("nccl", dp=(8, False, "all_reduce", 30, 8))),
            ],
            1,
        ),
        ([state(0), state(1, process="D")], 1),
        ([state(0), state(1, stopped_child=4711)], 1),
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


ALL_REDUCE = Collective("gloo 5", "mesh_dp", 7, "all_reduce", "[[3]]", False, is_finished=False, created_s=1.0)


def test_the_messages_of_the_control_group_are_not_waited_for() -> None:
    earlier = replace(ALL_REDUCE, number=6, is_finished=True)
    control = [replace(one, description="control") for one in (earlier, ALL_REDUCE)]
    assert group_states(control) == {}
    [saving] = group_states(control, saves=True).values()
    assert saving.inside, "a save has no other group"
    assert group_states([earlier, ALL_REDUCE]) == {"gloo 5": GroupState(7, True, "all_reduce [[3]]", 1)}
    assert group_states([replace(ALL_REDUCE, is_message=True)]) == {}


def test_what_the_gpu_has_begun_is_known_where_durations_are() -> None:
    done = replace(ALL_REDUCE, group="nccl 5 [0, 1]", number=6, is_finished=True, has_started=True)
    queued = replace(done, number=7, is_finished=False, has_started=False)
    [unknown] = group_states([done, queued]).values()
    [known] = group_states([replace(done, duration_s=0.1), queued]).values()
    assert (unknown.reached, known.reached, known.entered, known.inside) == (None, 6, 7, True)


OUTSIDE = [state(0, **groups(dp=(9, True))), state(1, **groups(dp=(8, False)))]


def later(states: list[RankState], seconds: float = 25.0, **known: Any) -> list[RankState]:
    """The same states at the second look; ``known`` is what has changed for rank 1."""
    after = [replace(one, seconds=one.seconds + seconds) for one in states]
    return [replace(one, **known) if one.rank == 1 else one for one in after]


def test_a_rank_that_idles_outside_of_the_collective_of_all_others_proves_a_hang() -> None:
    found = proof(later(OUTSIDE, cpu_s=0.5), OUTSIDE, messages=False)
    assert found is not None
    assert found.rank == 1


@pytest.mark.parametrize(
    "known",
    [
        {"cpu_s": 5.0},  # computes, or waits for its GPU
        {"process": "D"},
        {"process": "t"},  # somebody debugs it
        {"storage": True},
        {"waits": True},  # in another group
        {"answered": False},
        {"step": 8},
        {"phase": "evaluation"},
        {"phase": "first_step"},
        groups(dp=(9, True)),  # it was late
        {"groups": {}},
    ],
)
def test_a_rank_that_may_go_on_proves_nothing(known: dict[str, Any]) -> None:
    assert proof(later(OUTSIDE, **known), OUTSIDE, messages=False) is None


def test_one_look_or_a_short_time_or_a_pipeline_or_missing_data_proves_nothing() -> None:
    assert proof(later(OUTSIDE), [], messages=False) is None
    assert proof(later(OUTSIDE, seconds=WINDOW_S / 2), OUTSIDE, messages=False) is None
    assert proof(later(OUTSIDE), OUTSIDE, messages=True) is None
    reads = [replace(one, arrived_step=6) for one in OUTSIDE]
    assert proof(later(reads), reads, messages=False) is None
    elsewhere = [state(0, **groups(dp=(9, False))), OUTSIDE[1]]
    assert proof(later(elsewhere), elsewhere, messages=False) is None, "no rank of this node waits for it"
    assert proof(later(OUTSIDE[1:]), OUTSIDE[1:], messages=False) is None


@pytest.mark.parametrize(
    ("operations", "rank"),
    [
        (("all_reduce [[3]]", "barrier [[1]]"), 1),
        (("all_to_all [[3]]", "all_to_all [[9]]"), None),  # each rank sends as much as it has
    ],
)
def test_operations_that_never_match_prove_a_hang(operations: tuple[str, str], rank: int | None) -> None:
    before = (30, 0)
    states = [state(one, **groups(dp=(9, True, operations[one], before[one]))) for one in (0, 1)]
    found = proof(states, [], messages=True)
    assert (found and found.rank) == rank
    ended = [states[0], state(1, **groups(dp=(9, False, operations[1], 0)))]
    assert proof(ended, [], messages=True) is None


def test_a_rank_that_is_stopped_by_a_signal_proves_a_hang() -> None:
    found = proof([state(0), state(1, process="T")], [], messages=True)
    assert found is not None
    assert (found.rank, found.reason) == (1, "is stopped by a signal")


LAYOUT = Layout(
    dp=2, pp=1, tp=1, shard=1, data_parallel="ddp", schedule="1f1b", stages_per_rank=1, micro_batches=1, micro_size=1
)


@dataclass
class Node:
    """Two ranks under a real watch, without processes: the time passes as the test says."""

    path: Path
    monkeypatch: pytest.MonkeyPatch
    patience: float = PATIENCE_S
    now: float = 1000.0
    beat: Beat = field(default_factory=lambda: Beat(0, Phase.STEP, 0.0, 0, 0.0))
    states: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    failures: list[WorkerFailure] = field(default_factory=list)
    gets: float | None = None  # the share of a processor that rank 1, which is ready, gets; None: it sleeps
    cpu_s: float = 0.0

    def __post_init__(self) -> None:
        run = RunDirectory(self.path)
        run.logs.mkdir(parents=True, exist_ok=True)
        self.watch = Watch(run, "n0", HangWatch())
        self.watch.begin(EventLog.open(run, "agent-n0", 0), LAYOUT, self.patience)
        self.alive = [SimpleNamespace(rank=rank, pid=rank, block=SimpleNamespace(beat=self._beat)) for rank in (0, 1)]
        self.monkeypatch.setattr(watch_module.time, "monotonic", lambda: self.now)
        self.monkeypatch.setattr(
            watch_module, "process_state", lambda pid: self.states.get(pid, {}).get("process", "S")
        )
        self.monkeypatch.setattr(
            watch_module, "activity", lambda pid: Activity(pid == 1 and self.gets is not None, self.cpu_s)
        )
        self.monkeypatch.setattr(watch_module, "collect", self._collect)
        self.monkeypatch.setattr(self.watch.stragglers, "check", lambda workers, now: [])

    def _beat(self) -> Beat:
        return self.beat

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def _collect(self, workers: object, node: str, limit_s: float = 0.0) -> list[Evidence]:
        silent = self.now - self.beat.since
        found = []
        for rank in (0, 1):
            known: dict[str, Any] = {
                "step": self.beat.step,
                "arrived_step": self.beat.step,
                "phase": self.beat.phase.name.lower(),
            }
            known |= self.states.get(rank, {})
            busy = known.pop("busy", 0.0)
            found.append(Evidence(state(rank, **known, seconds=silent, cpu_s=busy * silent), rank, "stacks", b"{}"))
        return found

    def fail(self, failure: WorkerFailure) -> None:
        self.failures.append(failure)

    def steps(self, number: int, seconds: float = 0.25) -> None:
        for _ in range(number):
            self.enter(Phase.STEP)
            self.stall(seconds)

    def enter(self, phase: Phase) -> None:
        self.beat = Beat(self.beat.step + 1, phase, self.now, self.beat.step + 1, self.now)

    def stall(self, seconds: float, **of_second: Any) -> float | None:
        """Returns after how long the watch fails the workers; None if it does not within ``seconds``."""
        began = self.now
        self.states = {0: groups(dp=(9, True)), 1: groups(dp=(8, False)) | of_second} if of_second else {}
        while self.now < began + seconds - 1e-9 and not self.failures:
            self.now += TICK
            self.cpu_s += TICK * (self.gets or 0.0)
            self.watch.check(self)  # type: ignore[arg-type]
        return self.now - began if self.failures else None

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.watch.run.read_events() if event["event"] == name]


@pytest.mark.parametrize("seconds", [6.0, 20.0])
def test_a_stall_that_ends_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    node = Node(tmp_path, monkeypatch)
    node.steps(20)
    node.enter(Phase.STEP)
    assert node.stall(seconds, busy=0.0) is None
    node.steps(20)
    [slow] = node.events("slow_step")
    assert slow["rank"] == 1
    assert "it counts as a hang after 120.0 s" in slow["message"]
    assert Path(slow["stacks"]).read_text().count("--- rank") == 2


@pytest.mark.parametrize(
    ("of_second", "after"),
    [
        ({"process": "T"}, STOPPED_S),
        ({"busy": 0.0}, SECOND_LOOK_S),  # idle, outside of the collective
        ({"busy": 1.0}, PATIENCE_S),  # computes
        ({"process": "D", "storage": True}, PATIENCE_S),
        ({"storage": True}, PATIENCE_S),
        ({"waits": True}, PATIENCE_S),
    ],
)
def test_a_stall_for_ever_is_found_as_early_as_it_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_second: dict[str, Any], after: float
) -> None:
    node = Node(tmp_path, monkeypatch)
    node.steps(20)
    node.enter(Phase.STEP)
    assert node.stall(1000.0, **of_second) == pytest.approx(after, abs=3 * TICK)
    [failure] = node.failures
    assert (failure.rank, failure.failure, failure.waits) == (1, Failure.HANG, False)
    [reported] = node.events("hang_detected")
    assert reported["rank"] == 1
    assert ("allows 120.0" in reported["message"]) == (after == PATIENCE_S)


@pytest.mark.parametrize(("saved_after", "waited"), [(0.0, 0.0), (1.0, 1.0), (60.0, OTHERS_S)])
def test_ranks_that_hang_live_until_the_other_nodes_have_saved_their_stacks_but_not_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_after: float, waited: float
) -> None:
    node = Node(tmp_path, monkeypatch)
    told: list[float] = []
    others = OtherNodes(lambda: told.append(node.now), lambda: node.now >= told[0] + saved_after)
    node.watch.begin(EventLog.open(node.watch.run, "agent-n0", 0), LAYOUT, PATIENCE_S, others)
    node.steps(20)
    node.enter(Phase.STEP)
    node.stall(1000.0, process="T")
    assert len(node.failures) == 1
    assert node.now - told[0] == pytest.approx(waited, abs=2 * SAVE_TICK_S)


def test_a_node_saves_its_stacks_once_for_a_hang_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch)
    told: list[int] = []
    others = OtherNodes(lambda: told.append(1), bool)
    node.watch.begin(EventLog.open(node.watch.run, "agent-n0", 0), LAYOUT, PATIENCE_S, others)
    node.steps(20)
    stacks = node.watch.run.logs / "stacks" / "hang-n0-000.txt"
    node.watch.keep_stacks()
    assert stacks.read_text().count("--- rank") == 2
    stacks.unlink()
    node.watch.keep_stacks()
    assert told == [1]
    assert not stacks.exists()


def test_a_collective_that_timed_out_saves_the_stacks_of_the_others_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch)
    lost = WorkerFailure(1, Failure.COMMUNICATION, "Connection closed by peer", "", 0.0)
    late = WorkerFailure(1, Failure.COMMUNICATION, "Timed out waiting 60000ms for recv operation to complete", "", 0.0)
    for failure, reports in ((lost, 0), (late, 1)):
        node.failures = [failure]
        for _ in range(3):
            node.watch.check(node)  # type: ignore[arg-type]
        assert len(node.events("collective_timed_out")) == reports
    [reported] = node.events("collective_timed_out")
    assert reported["rank"] == 1
    assert [state["rank"] for state in reported["ranks"]] == [0, 1]
    assert Path(reported["stacks"]).read_text().count("--- rank") == 2


def test_an_evaluation_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch)
    node.steps(20)
    node.enter(Phase.EVALUATION)
    assert node.stall(UNSEEN_S - 1, busy=0.0) is None
    assert node.events("slow_step") == []


def test_a_first_step_without_progress_is_told_with_the_line_of_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, monkeypatch, patience=0.0)
    node.enter(Phase.FIRST_STEP)
    assert node.stall(130.0, busy=1.0) is None
    first, second = node.events("no_progress")
    assert first["message"].startswith("no step for 1:00: first_step, rank ")
    assert second["message"].startswith("no step for 2:00: ")
    assert "it counts as a hang after 30:00" in capsys.readouterr().err


def test_the_place_in_the_output_of_faulthandler_is_that_of_the_main_thread() -> None:
    library = '  File "/usr/lib/python3.11/site-packages/torch/distributed/c10d.py", line 9 in all_reduce\n'
    other = f'Thread 0x0f (most recent call first):\n  File "/home/a/other.py", line 1 in wait\n{library}'
    main = f'Current thread 0x01 (most recent call first):\n{library}  File "/home/a/net.py", line 7 in forward\n'
    assert stack_place(f"{other}\n{main}") == "net.py:7 in forward"
    assert stack_place(f"{other}\n{main.splitlines()[0]}\n{library}") == "c10d.py:9 in all_reduce"
    assert stack_place("") is None


def test_on_one_cpu_node_a_slow_step_is_a_hang_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, patience=0.0)
    node.steps(20)
    node.enter(Phase.STEP)
    assert node.stall(1000.0, busy=1.0) == pytest.approx(3.0, abs=3 * TICK)


@pytest.mark.parametrize(("gets", "after"), [(0.0, None), (0.1, 2 + 1 / 0.1), (1.0, 3.0), (2.5, 3.0), (None, 3.0)])
def test_a_rank_that_waits_for_a_processor_is_late_and_not_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gets: float | None, after: float | None
) -> None:
    """More than half of the bound passes before anybody looks."""
    node = Node(tmp_path, monkeypatch, patience=0.0)
    node.steps(20)
    node.enter(Phase.STEP)
    node.gets = gets
    found = node.stall(100.0, busy=1.0)
    assert found is None if after is None else found == pytest.approx(after, abs=4 * TICK)


def test_the_share_of_a_process_that_gets_no_processor() -> None:
    core = {min(os.sched_getaffinity(0))}
    processes = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2)]
    processes.append(subprocess.Popen(["sleep", "60"]))
    try:
        for process in processes:
            os.sched_setaffinity(process.pid, core)
        os.sched_setscheduler(processes[0].pid, os.SCHED_IDLE, os.sched_param(0))
        starved, asleep = Starvation(), Starvation()
        for watch, process in ((starved, processes[0]), (asleep, processes[-1])):
            assert watch.share({0: activity(process.pid)}, time.monotonic()) == 1.0
        time.sleep(0.5)
        assert starved.share({0: activity(processes[0].pid)}, time.monotonic()) < 0.5
        assert asleep.share({0: activity(processes[-1].pid)}, time.monotonic()) == 1.0
    finally:
        for process in processes:
            process.kill()
            process.wait()
