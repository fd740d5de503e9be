"""How seldom the agents of a job use the shared file system, counted rather than timed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.scale import config_of
from benchmarks.simulated_nodes import GPUS, simulated
from hpc_train.elastic import agent_loop
from hpc_train.elastic.agent_loop import Agent, Outcome
from hpc_train.elastic.attempts import Attempts
from hpc_train.elastic.fabric import Fabric
from hpc_train.elastic.hang_bounds import START_S, HangWatch
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous import client
from hpc_train.elastic.rendezvous.addresses import AttemptSpec, ServerAddress
from hpc_train.elastic.rendezvous.client import ServerLost, lookup_interval_s, wait_for_server
from hpc_train.elastic.rendezvous.messages import Start
from hpc_train.elastic.rendezvous.store import Stores
from hpc_train.elastic.script import (
    LOOK_EVERY_S,
    NOTIFIED_PER_S,
    FolderLooks,
    Script,
    ScriptProgress,
    look_pause_s,
)
from hpc_train.elastic.watch import Watch
from hpc_train.layout.resolve import resolve_layout
from hpc_train.machine.allocation import Allocation
from hpc_train.run.agent_worker import Beat, Phase, WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.requests import (
    REQUESTS_EVERY_S,
    NewRequests,
    StopRequests,
    request_resize,
    request_stacks,
    resize_requested,
    stacks_requested,
)
from tests.elastic.conftest import Opened
from tests.elastic.test_agent import until
from tests.elastic.test_hub import Served

LAYOUT = resolve_layout(config_of(2), 2, GPUS)


def test_an_agent_whose_workers_train_reads_no_shared_file(
    run: RunDirectory, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(run, "n1", HangWatch())
    watch.begin(EventLog.open(run, "agent-n1", 0), resolve_layout(config_of(1), 1, GPUS), 0.0)
    now, steps = time.monotonic(), iter(range(10_000))
    monkeypatch.setattr("hpc_train.elastic.watch.time.monotonic", lambda: now)

    def beat() -> Beat:
        step = next(steps)
        return Beat(step, Phase.STEP, now, step, now)

    worker = SimpleNamespace(rank=0, pid=os.getpid(), block=SimpleNamespace(beat=beat))
    workers: Any = SimpleNamespace(alive=[worker], failures=[])
    with opened.below(run.path) as paths:
        for _ in range(100):
            now += 1.0
            watch.check(workers)
    assert paths == []


def test_node_0_looks_for_requests_for_stacks(run: RunDirectory, opened: Opened) -> None:
    request_stacks(run)
    requests = NewRequests(lambda: stacks_requested(run), stacks_requested(run))
    with opened.below(run.path) as paths:
        assert [requests.new(second) for second in range(20)] == [None] * 20
    assert len(paths) == 20 / REQUESTS_EVERY_S
    assert request_stacks(run) == 2
    assert [requests.new(20.0), requests.new(20.5), requests.new(30.0)] == [2, None, None]


def test_a_resize_request_concerns_the_newest_submission(run: RunDirectory) -> None:
    requests = NewRequests(lambda: resize_requested(run), None)
    assert requests.new(0.0) is None
    request_resize(run, 4, "user")
    newest = request_resize(run, 2, "job 7 waits")
    assert requests.new(10.0) == newest == resize_requested(run)
    (run.attempts / "resize.json").write_text('{"nodes": "2", "reason": "user", "time": 1.0}')
    assert resize_requested(run) is None
    request_resize(run, 2, "user")
    run.update_record(submissions=[{"time": time.time() + 60}])
    assert resize_requested(run) is None, "it was for an earlier job"


def test_waiting_agents_look_for_the_server_less_often_in_a_large_job(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    looks: list[float] = []
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(ServerAddress, "find", lambda *_: looks.append(now))
    for count in (2, 1000):
        now, looks[:] = 0.0, []
        with pytest.raises(ServerLost):
            wait_for_server(run, Allocation(count, 1, "n1", "7", "7.0", "n1"), lambda: False, lambda: False, 300)
        assert len(looks) <= 1 + 300 / (0.8 * lookup_interval_s(count))
        assert len(looks) >= 300 / (2 * lookup_interval_s(count))
    assert count * len(looks) / 300 < 300, "of all agents per second"


def test_a_waiting_agent_stops_at_once(run: RunDirectory) -> None:
    allocation = Allocation(5000, 1, "n1", "7", "7.0", "n1")
    answers = iter([False, True])
    assert wait_for_server(run, allocation, lambda: next(answers), lambda: False, 60) is None
    assert wait_for_server(run, allocation, lambda: False, lambda: True, 60) is None, "node 0 has ended"


def test_the_agent_with_the_server_estimates_the_time_to_stop_from_few_files(run: RunDirectory, opened: Opened) -> None:
    run.update_record(submissions=[])  # a lost record is read from the events of the agents
    for number in range(100):
        run.events_file(f"agent-n{number}", 0).touch()
        run.events_file(f"rank-{number:04d}", 0).touch()
    EventLog.open(run, "rank-0000", 1).write("checkpoint_saved", step=2, seconds=77.0)
    allocation = Allocation(2, 0, "n0", None, "scale.1", "127.0.0.1", ("n0", "n1"))
    events = EventLog.open(run, "agent-n0", 2)
    fabric = Fabric(run, config_of(2), [])
    attempts = Attempts(run, config_of(2), allocation, None, Stores("none:none"), fabric, events)
    with opened.below(run.events) as paths:
        spec = attempts._attempt_spec(2, Start(tuple(simulated(2)), LAYOUT), 1, {})
    assert spec.stop_grace_s == 210, "2 x 77 + 30 rounded up"
    assert len(paths) <= 6, "the directory and the files of rank 0, twice"


def test_an_agent_reads_no_events_for_an_attempt(
    run: RunDirectory, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    EventLog.open(run, "rank-0000", 0).write("checkpoint_saved", step=1, seconds=1000.0)
    graces: list[float] = []

    def run_attempt(specs: Sequence[WorkerSpec], log: object, stop: object, grace_s: float, *_: object) -> Outcome:
        graces.extend([grace_s, *(one.stop_grace_s for one in specs)])
        return Outcome(Exit.DONE)

    monkeypatch.setattr(agent_loop, "run_attempt", run_attempt)
    agent = agent_of(run, simulated(2)[1])
    client: Any = SimpleNamespace(send_attempt_end=lambda *_: None)
    spec = AttemptSpec(1, "7.0", "7", "n0", 1, 0.0, "n0", 1, 2, GPUS, GPUS, LAYOUT, (0, 1), {}, "random", 90, 2)
    with opened.below(run.events) as paths:
        agent._take_part(client, spec)
    assert paths == []
    assert graces == [90.0] * (1 + GPUS)


def agent_of(run: RunDirectory, node: Node, **others: Any) -> Agent:
    """Returns the agent of a node of two, whose workers are not started."""
    inert = SimpleNamespace(
        begin=lambda *_: None, hold=lambda *_: None, wait_for_memory=lambda *_: None, is_used_up=False
    )
    names = ("server", "watch", "gpu_errors", "budget", "output", "deletion")
    given: Any = dict.fromkeys(names, inert) | {"stores": None, "entry": "entry"} | others
    return Agent(
        run=run,
        config=config_of(2),
        allocation=Allocation(2, node.number, node.name, None, "7.0", ""),
        node=node,
        stop=StopRequests(),
        on_tick=lambda: None,
        events=EventLog.open(run, f"agent-{node.name}", 0),
        **given,
    )


@pytest.mark.parametrize("asked", [(0, 1), (1,)])
def test_one_agent_records_a_stop_request_of_the_job(run: RunDirectory, tmp_path: Path, asked: tuple[int, ...]) -> None:
    served = Served(tmp_path / "hub", 2)
    links = [served.link(number) for number in range(2)]
    first, second = simulated(2)
    agents = [
        agent_of(run, first, stores=SimpleNamespace(), accepted_stop=lambda: served.head.stop),
        agent_of(run, second),
    ]
    for number in asked:
        agents[number].stop.request("SIGUSR2")

    def reported() -> list[tuple[str, str]]:
        for agent, link in zip(agents, links, strict=True):
            agent._tick(link)
        return [(event["event"], event["reason"]) for event in run.read_events()]

    assert until(reported) == [("stop_requested", "SIGUSR2")]
    until(lambda: served.head.stop)
    assert reported() == [("stop_requested", "SIGUSR2")]
    assert [path.name for path in run.events.iterdir()] == [f"agent-{first.name}-000.jsonl"]
    for link in links:
        link._channel.close()


def test_one_agent_looks_for_the_progress_of_a_script_and_the_server_tells_the_others(
    run: RunDirectory, tmp_path: Path, opened: Opened
) -> None:
    served, watched = Served(tmp_path / "hub", 2), tmp_path / "watched"
    links = [served.link(number) for number in range(2)]
    until(lambda: len(served.head.present) == 2)
    scripts = [Script(["true"], {}, "1", tmp_path) for _ in links]
    looks = FolderLooks(watched, nodes=2, bound_s=START_S)
    first, second = simulated(2)
    agents = [
        agent_of(run, first, entry=scripts[0], stores=SimpleNamespace(), looks=looks),
        agent_of(run, second, entry=scripts[1]),
    ]
    shown = [ScriptProgress(tmp_path / f"progress-{number}", script.progress) for number, script in enumerate(scripts)]
    assert [one.beat() for one in shown] == [None, None]
    (watched / "last").mkdir(parents=True)
    os.utime(file_in(watched / "last"), (time.time() + 60, time.time() + 60))

    def beats() -> bool:
        for agent, link in zip(agents, links, strict=True):
            agent._tick(link)
        return all(one.beat() is not None for one in shown)

    with opened.below(watched) as paths:
        until(beats)
        for _ in range(20):
            beats()
    assert paths == [str(watched), str(watched / "last")], "one agent has looked once"
    for link in links:
        link._channel.close()


def file_in(folder: Path) -> Path:
    (folder / "model").touch()
    return folder / "model"


def test_a_look_for_the_progress_of_a_script_takes_a_few_percent_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, walks = 0.0, []

    def walk(path: Path) -> tuple[int, float]:
        walks.append(now)
        return len(walks), 3.0

    monkeypatch.setattr("hpc_train.elastic.script._newest_change", walk)
    looks = FolderLooks(tmp_path, nodes=2, bound_s=START_S)
    found = []
    while now < 600:
        found.append(looks.new(now))
        now += 0.25
    assert walks == [0, 60, 120, 180, 240, 300, 360, 420, 480, 540]
    assert [number for number in found if number is not None] == list(range(1, 11))


@pytest.mark.parametrize("bound_s", [8, 60, START_S])
@pytest.mark.parametrize("nodes", [1, 1000, 100_000])
@pytest.mark.parametrize("walk_s", [0.0, 1.0, 1000.0])
def test_looks_for_the_progress_of_a_script_come_several_times_within_the_bound_of_a_hang(
    bound_s: float, nodes: int, walk_s: float
) -> None:
    pause_s = look_pause_s(walk_s, nodes, bound_s)
    assert LOOK_EVERY_S <= pause_s <= bound_s / 4
    if bound_s == START_S:
        assert pause_s >= min(20 * walk_s, START_S / 4)
        assert nodes / pause_s <= NOTIFIED_PER_S
