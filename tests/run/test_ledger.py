"""Where the time of a run went, from the events and metrics that its processes write."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.schema import Config, RunConfig
from hpc_train.elastic.decision import over_budget
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import Clock, EventLog, age_of_this_process
from hpc_train.run.events import Event
from hpc_train.run.ledger import Account, Ledger, account_for, attempts_of, read_ledger
from hpc_train.run.rows import Line
from hpc_train.telemetry.metrics import MetricsLog
from hpc_train.telemetry.progress import spent_line


class Log:
    """Events and lines of metrics as agents and rank 0 write them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lines: list[Line] = []

    def event(self, time: float, event: str, attempt: int = 0, step: int | None = None, **details: Any) -> None:
        head = {"time": time, "event": event, "rank": None, "node": "n0", "attempt": attempt, "step": step}
        self.events.append(Event(head | details))

    def started(self, time: float, attempt: int = 0, launch: str = "7.0.0", began: float | None = None) -> None:
        of_job = {"launch": launch, "job_id": launch.partition(".")[0], "began": time if began is None else began}
        self.event(time, "started", attempt, world_size=4, gpus=8, **of_job)

    def line(self, time: float, step: int, attempt: int = 0, **pauses: float) -> None:
        line = {"time": time, "step": step, "attempt": attempt, "world_size": 4, "loss": 1.0, "step_s": 1.0}
        self.lines.append(Line(line | {"save_s": 0.0} | pauses))

    def ledger(self, *submitted: float, now: float | None = None, frozen: Mapping[str, float] = {}) -> Ledger:
        return account_for(attempts_of(self.events, self.lines, frozen), submitted, now)


def seconds(account: Account) -> dict[str, float]:
    """What is not 0, without the device seconds."""
    devices = ("gpu_s", "rank_s", "held_s", "useful_share")
    return {name: value for name, value in account.as_json().items() if value and name not in devices}


def test_an_undisturbed_run_with_its_queue_evaluation_and_saves() -> None:
    log = Log()
    log.started(110.0, began=105.0)
    log.line(121.0, 1)
    log.line(133.0, 10, eval_s=3.0)
    log.line(145.0, 20, save_s=2.0)
    log.event(150.0, "training_finished", step=20, step_s=0.1, save_s=5.0)
    log.event(151.0, "finished", exit_code=0)
    found = log.ledger(5.0)
    expected = {"queue_s": 100.0, "start_up_s": 15.0, "steps_s": 20.0, "evaluation_s": 3.0}
    assert seconds(found.total) == expected | {"checkpoint_s": 7.0, "other_s": 1.0}
    assert found.total.held_s == 151.0 - 105.0
    assert found.total.useful_share == pytest.approx(23 / 46)
    assert found.total.gpu_s == 8 * 46.0
    assert found.total.rank_s == 0
    log.event(110.0, "joined", seconds=30.0, gpus=4)
    assert log.ledger(5.0).total.gpu_s == 8 * 46.0 + 4 * 30.0, "the node of a joiner waited for its imports"
    log.event(200.0, "left", seconds=20.0, gpus=4)
    assert seconds(log.ledger(5.0).total) == seconds(found.total), "a joiner without a run, which has ended before"
    assert log.ledger(5.0).total.gpu_s == 8 * 46.0 + 4 * (30.0 + 20.0)


def test_a_restart_in_place_counts_steps_that_were_done_again_as_lost() -> None:
    log = Log()
    log.started(100.0)
    log.line(111.0, 1)
    log.line(120.0, 10)
    log.event(120.5, "checkpoint_saved", step=8, seconds=0.5)
    log.event(124.0, "worker_failed", **{"class": "killed"})
    log.started(124.5, attempt=1)
    log.event(125.0, "resumed", attempt=1, step=8)
    log.line(138.0, 20, attempt=1)
    log.event(139.0, "training_finished", attempt=1, step=20, step_s=0.1, save_s=1.0)
    found = log.ledger()
    expected = {"start_up_s": 10.0, "steps_s": 8.0 + 12.0, "lost_s": 2.0 + 4.0, "restart_s": 2.0, "checkpoint_s": 1.0}
    assert seconds(found.total) == expected
    assert found.total.held_s == 39.0
    assert len(found.attempts) == 2
    assert len(found.jobs) == 1


def test_wrong_numbers_have_their_own_account() -> None:
    log = Log()
    log.started(100.0)
    log.line(111.0, 1)
    log.line(125.0, 10, step_s=14 / 9, verify_s=5.0)
    log.event(125.5, "checkpoint_saved", step=4, seconds=0.5)
    log.event(127.0, "corruption", step=11, first=4, steps=1, final=True, message="wrong gradients")
    log.event(127.0, "worker_failed", **{"class": "corruption"})
    log.started(128.0, attempt=1)
    log.event(129.0, "resumed", attempt=1, step=4)
    log.line(136.0, 10, attempt=1)
    log.event(137.0, "worker_failed", attempt=1, **{"class": "killed"})
    total = log.ledger().total
    expected = {"start_up_s": 10.0, "steps_s": 4.0, "verification_s": 5.0, "corrupted_s": 8.0, "corrupted_steps": 7.0}
    assert seconds(total) == expected | {"lost_s": 7.0, "restart_s": 3.0}
    assert total.held_s == 37.0
    line = spent_line(total)
    assert "verification 0:05 · lost work 0:07 · 7 steps lost to wrong numbers 0:08 · restarts" in line
    log.events[-1]["class"] = "unfit_node"
    log.event(136.5, "corruption", attempt=1, step=11, first=4, steps=2, final=False, message="wrong gradients")
    assert log.ledger().total.corrupted_s == 15.0, "its node was left out, although a repetition was right"


def test_steps_up_to_a_checkpoint_count_although_no_line_was_logged() -> None:
    log = Log()
    log.started(100.0)
    log.line(111.0, 1)
    log.event(114.5, "checkpoint_saved", step=4, seconds=0.5)
    log.event(118.0, "failed", exit_code=1)
    assert seconds(log.ledger().total) == {"start_up_s": 10.0, "steps_s": 4.0, "lost_s": 4.0}


def test_a_requeue_begins_a_new_job_and_its_wait_is_queue() -> None:
    log = Log()
    log.started(100.0)
    log.line(111.0, 1)
    log.event(116.0, "training_stopped", step=5, step_s=1.0, save_s=1.0)
    log.event(116.5, "requeued", step=5)
    log.started(240.0, attempt=1, launch="7.0.1", began=236.5)
    log.event(245.0, "resumed", attempt=1, step=5)
    log.line(251.0, 10, attempt=1)
    log.event(251.0, "training_finished", attempt=1, step=10, step_s=0.1, save_s=0.0)
    found = log.ledger(90.0)
    assert [seconds(job) for job in found.jobs] == [
        {"queue_s": 10.0, "start_up_s": 10.0, "steps_s": 5.0, "checkpoint_s": 1.0, "other_s": 0.5},
        {"queue_s": 120.0, "start_up_s": 9.5, "steps_s": 5.0},
    ]


def test_a_day_between_a_failure_and_the_next_submission_is_nobodys_time() -> None:
    log = Log()
    log.started(100.0)
    log.line(111.0, 1)
    log.event(112.0, "failed", exit_code=1)
    log.started(90000.0, attempt=1, launch="8.0.0")
    log.line(90005.0, 1, attempt=1)
    log.event(90005.0, "training_finished", attempt=1, step=1, step_s=0.1, save_s=0.0)
    found = log.ledger(90.0, 89970.0)
    expected = {"queue_s": 40.0, "start_up_s": 14.0, "steps_s": 1.0, "lost_s": 2.0}
    assert seconds(found.total) == expected


def test_an_older_checkpoint_loses_the_steps_of_all_attempts_before() -> None:
    log = Log()
    log.started(100.0)
    log.line(101.0, 1)
    log.line(110.0, 10)
    log.event(110.0, "node_lost")
    log.started(110.0, attempt=1)
    log.event(110.0, "resumed", attempt=1, step=9)
    log.line(115.0, 14, attempt=1)
    log.event(115.0, "hang_detected", attempt=1)
    log.started(115.0, attempt=2)
    log.event(115.0, "resumed", attempt=2, step=4)
    log.line(131.0, 20, attempt=2)
    log.event(131.0, "training_finished", attempt=2, step=20, step_s=0.1, save_s=0.0)
    assert seconds(log.ledger().total) == {"steps_s": 4.0 + 16.0, "lost_s": 6.0 + 5.0}


def test_going_back_to_a_checkpoint_inside_an_attempt() -> None:
    log = Log()
    log.started(100.0)
    log.line(101.0, 1)
    log.line(110.0, 10)
    log.event(110.0, "rolled_back", step=10, to_step=6, bad_steps=[9, 10])
    log.line(114.0, 10)
    log.event(114.0, "training_finished", step=10, step_s=0.1, save_s=0.0)
    assert seconds(log.ledger().total) == {"steps_s": 10.0, "lost_s": 4.0}


def test_a_live_run_keeps_what_it_has_done_and_a_dead_one_only_its_checkpoints() -> None:
    log = Log()
    log.started(100.0)
    log.line(111.0, 1)
    log.line(120.0, 10)
    log.event(120.0, "checkpoint_saved", step=5, seconds=0.1)
    assert seconds(log.ledger(now=121.0).total) == {"start_up_s": 10.0, "steps_s": 10.0}
    assert seconds(log.ledger().total) == {"start_up_s": 10.0, "steps_s": 5.0, "lost_s": 5.0}


def test_a_job_that_waits_now() -> None:
    log = Log()
    assert seconds(log.ledger(40.0, now=50.0).total) == {"queue_s": 10.0}
    log.started(100.0)
    log.line(101.0, 1)
    log.event(103.0, "training_stopped", step=2, step_s=1.0, save_s=1.0)
    log.event(104.0, "requeued", step=2)
    found = log.ledger(90.0, now=124.0)
    assert seconds(found.total) == {"queue_s": 10.0 + 20.0, "steps_s": 2.0, "checkpoint_s": 1.0, "other_s": 1.0}
    assert [job.queue_s for job in found.jobs] == [10.0], "it is no start of a job yet"
    assert seconds(log.ledger(90.0).total)["queue_s"] == 10.0, "nothing waits any more"


def test_a_start_that_takes_long() -> None:
    log = Log()
    log.started(100.0)
    assert seconds(log.ledger(40.0, now=160.0).total) == {"queue_s": 60.0, "start_up_s": 60.0}
    log.event(130.0, "failed", exit_code=1)
    assert seconds(log.ledger(40.0).total) == {"queue_s": 60.0, "start_up_s": 30.0}


@pytest.mark.parametrize(("event", "account"), [("suspended", "suspended_s"), ("paused", "frozen_s")])
def test_time_in_which_the_job_did_not_execute_is_no_step(event: str, account: str) -> None:
    """One stop in the start and one in step 12, whose duration contains it."""
    log = Log()
    log.started(100.0)
    log.event(107.0, event, seconds=5.0, until=106.0)
    log.line(116.0, 1)
    log.line(126.0, 11)
    log.event(156.5, event, seconds=29.0, until=156.0)
    log.line(157.0, 12, step_s=31.0)
    log.event(157.0, "training_finished", step=12, step_s=0.1, save_s=0.0)
    found = log.ledger().total
    assert seconds(found) == {"start_up_s": 10.0, "steps_s": 13.0, account: 34.0}
    assert found.held_s == (23.0 if event == "suspended" else 57.0), "a suspended job holds no device"


def test_a_suspension_during_a_save_is_no_save() -> None:
    log = Log()
    log.started(100.0)
    log.line(111.0, 1)
    log.event(152.5, "suspended", seconds=37.0, until=152.0)
    log.line(153.0, 3, save_s=40.0)
    log.event(153.0, "training_finished", step=3, step_s=0.1, save_s=0.0)
    expected = {"start_up_s": 10.0, "steps_s": 3.0, "checkpoint_s": 3.0, "suspended_s": 37.0}
    assert seconds(log.ledger().total) == expected


def test_time_in_which_a_frozen_node_held_the_job_is_no_queue() -> None:
    log = Log()
    log.started(100.0)
    log.line(111.0, 1)
    log.event(112.0, "node_lost")
    log.event(114.0, "requeued", step=1)
    log.event(240.5, "stop_requested", reason="lease lost")  # by the frozen node, when it wakes up
    assert seconds(log.ledger(now=200.0, frozen={"7.0": 150.0}).total)["queue_s"] == 50.0
    log.started(240.0, attempt=1, launch="7.0.1", began=236.0)
    log.line(246.0, 10, attempt=1)
    log.event(246.0, "training_finished", attempt=1, step=10, step_s=0.1, save_s=0.0)
    first, second = log.ledger(frozen={"7.0": 150.0, "8.0": 300.0}).jobs
    assert (first.other_s, first.frozen_s, second.queue_s) == (2.0, 36.0, 86.0)


def test_clocks_that_differ_make_no_negative_time() -> None:
    log = Log()
    log.started(100.0, began=130.0)
    log.line(111.0, 1)
    log.event(90.0, "worker_failed")
    assert all(value >= 0 for value in log.ledger().total.as_json().values())


def test_a_run_without_gpus_has_rank_hours() -> None:
    log = Log()
    log.started(100.0)
    log.events[0]["gpus"] = 0
    log.line(110.0, 5)
    log.event(110.0, "training_finished", step=5, step_s=0.1, save_s=0.0)
    assert (log.ledger().total.gpu_hours, log.ledger().total.rank_s) == (0.0, 4 * 10.0)
    log.events[0]["nodes"] = ["n0", "n1"]
    log.event(100.0, "joined", seconds=30.0, gpus=0)
    assert log.ledger().total.rank_s == 4 * 10.0 + 2 * 30.0


def test_nothing_was_started() -> None:
    assert Ledger(()).total == Account() == log_of_submission().total


def log_of_submission() -> Ledger:
    log = Log()
    log.event(1.0, "submitted", job_id="7")
    return log.ledger(1.0)


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
def test_a_wall_clock_that_is_set_is_not_booked(jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of a job take over the clock of its agent, which counts on from its start."""
    run, real = RunDirectory(tmp_path), time.time
    run.create()
    agent = EventLog.open(run, "agent-n0", 0, clock=Clock.at(real()))
    agent.write("started", world_size=4, gpus=8, launch="7.0.0", job_id="7", began=agent.now() - 1)
    agent.write("worker_failed", **{"class": "killed"})
    monkeypatch.setattr("time.time", lambda: real() + jump)
    agent.of(1).write("started", world_size=4, gpus=8, launch="7.0.0", job_id="7", began=agent.now() - 1)
    worker = EventLog.open(run, "rank-0000", 1, 0, Clock.inherited(agent.clock.environment()))
    worker.write("resumed", step=0)
    metrics = MetricsLog(run, 1, worker)
    metrics.write({"time": worker.now(), "step": 1, "attempt": 1, "step_s": 0.1})
    metrics.close()
    agent.of(1).write("stopped", exit_code=75)
    names = [event["event"] for event in run.read_events()]
    assert names == ["started", "worker_failed", "started", "resumed", "stopped"]
    total = read_ledger(run, agent.now()).total
    assert 1 <= total.held_s < 600
    assert over_budget(run, Config(run=RunConfig(max_gpu_hours=8 * 600 / 3600)), agent.now()) is None


def test_a_clock_counts_on_only_on_its_own_node() -> None:
    clock = Clock.at(1000.0)
    assert 1000.0 <= clock.now() < 1600.0
    assert Clock.inherited(clock.environment()) == clock
    (name,) = clock.environment()
    assert Clock.inherited({name: "another-boot 17.0"}) == Clock.inherited({}) == Clock()
    assert Clock().environment() == {}
    now = time.time()
    assert clock.of_wall(now - 5) == pytest.approx(clock.now() - 5, abs=60)
    assert 0 < age_of_this_process() < 1e6


def test_the_events_of_a_job_whose_clock_is_behind_follow_those_of_the_job_before(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    for attempt, begin in enumerate((9000.0, 1000.0)):
        log = EventLog.open(run, "agent-n0", attempt, clock=Clock.at(begin))
        log.write("started")
        log.write("checkpoint_saved", step=5 + attempt)
    assert [event["attempt"] for event in run.read_events()] == [0, 0, 1, 1]
