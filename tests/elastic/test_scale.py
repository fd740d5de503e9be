"""What the control plane costs with many nodes, counted rather than timed."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from benchmarks.scale import config_of
from benchmarks.simulated_nodes import GPUS, ODD_EVERY, simulated
from hpc_train.config.schema import BatchConfig
from hpc_train.elastic.attempts import Attempts
from hpc_train.elastic.fabric import Fabric
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous import coordinator
from hpc_train.elastic.rendezvous.addresses import AttemptSpec
from hpc_train.elastic.rendezvous.messages import Start
from hpc_train.elastic.rendezvous.server import BEATS, BEATS_PER_S, beat_s
from hpc_train.elastic.rendezvous.store import Stores
from hpc_train.layout.resolve import resolve_layout
from hpc_train.machine.allocation import Allocation
from hpc_train.machine.network import rails
from hpc_train.machine.network.facts import Gpu, Machines, NodeFacts, by_machine
from hpc_train.machine.network.rank_binding import bindings
from hpc_train.preflight.bandwidth import expected_bandwidths, read_fabric
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Action
from tests.elastic.test_agent import until
from tests.elastic.test_coordinator import Course, action
from tests.elastic.test_hub import Served, joined, order_of

NODES = ODD_EVERY  # the last one is odd


@pytest.fixture(scope="module")
def nodes() -> list[Node]:
    machines = Machines()
    return [replace(node, facts=machines.add(node.facts)) for node in simulated(NODES)]


def started(nodes: list[Node]) -> Start:
    return Start(tuple(nodes), resolve_layout(config_of(len(nodes)), len(nodes), GPUS))


def decided(run: RunDirectory, nodes: list[Node]) -> dict[str, str]:
    return Fabric(run, config_of(len(nodes)), []).decide(started(nodes), EventLog.open(run, "agent-n0", 0))


def test_nodes_of_the_same_machine_are_judged_once(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[NodeFacts] = []
    before = rails._far_from_every_gpu

    def far(facts: NodeFacts, active: set[str]) -> set[str]:
        judged.append(facts)
        return before(facts, active)

    monkeypatch.setattr(rails, "_far_from_every_gpu", far)
    machines = Machines()
    decided(run, [replace(node, facts=machines.add(node.facts)) for node in simulated(NODES)])
    assert len(judged) == 2, "the usual machine and the odd one"
    judged.clear()
    found = read_fabric(run)
    assert expected_bandwidths(found, GPUS).world is not None
    assert len(judged) == 2


def test_the_record_of_the_fabric_is_small_and_complete(run: RunDirectory, nodes: list[Node]) -> None:
    decided(run, nodes)
    text = run.fabric.read_text()
    of_nodes = text[text.index('"nodes"') :]
    assert len(of_nodes) / NODES < 850, "less than 1 MB at 1,000 nodes"
    assert len(text) - len(of_nodes) < 150_000
    assert list(read_fabric(run)) == [node.facts for node in nodes] == [node.facts for node in simulated(NODES)]


def test_the_start_message_does_not_grow_with_the_nodes(run: RunDirectory, nodes: list[Node]) -> None:
    allocation = Allocation(NODES, 0, "node00000", None, "scale.1", "127.0.0.1", tuple(node.name for node in nodes))
    events = EventLog.open(run, "agent-n0", 0)
    stores = Stores("none:none")
    attempts = Attempts(run, config_of(NODES), allocation, None, stores, Fabric(run, config_of(NODES), []), events)
    message = attempts.begin(started(nodes))
    for listener in stores._offered.values():
        listener.close()
    assert len(json.dumps(message)) < 2_000
    assert AttemptSpec.parse(message).order == tuple(range(NODES))
    order = (7, 3, 4, 5, 0, 1, 9)
    assert AttemptSpec.parse(replace(AttemptSpec.parse(message), order=order).message()).order == order


def test_nodes_share_only_what_is_equal() -> None:
    base = simulated(1)[0].facts
    gpu, *others = base.gpus
    slices = (f"MIG-{gpu.uuid}-a", f"MIG-{gpu.uuid}-b")
    different = [
        replace(base, versions=(("driver", "1"),)),
        replace(base, gpus=(replace(gpu, model="NVIDIA H200"), *others)),
        replace(base, gpus=(replace(gpu, slices=slices), *others), visible=(slices[1],)),
        replace(base, nics=base.nics[1:]),
        replace(base, gpus=(*others, replace(gpu, uuid=None)), visible=tuple(str(one.uuid) for one in base.gpus)),
    ]
    machines = Machines()
    added = [machines.add(facts) for facts in (base, *different)]
    assert added == [base, *different]
    assert len(by_machine(added)) == len(added)
    other = replace(different[2], node="n9", gpus=(replace(gpu, uuid="GPU-9", slices=("MIG-9", "MIG-8")), *others))
    again = machines.add(replace(other, visible=("MIG-8",)))
    assert again == replace(other, visible=("MIG-8",))
    assert again.results is added[3].results
    assert bindings(again, 1) == bindings(added[3], 1)


def test_visible_devices_of_other_gpus_are_another_machine() -> None:
    facts = NodeFacts(gpus=tuple(Gpu(i, uuid=f"GPU-a{i}", cpus=(i,)) for i in range(2)), visible=("GPU-a0", "GPU-a1"))
    machines = Machines()
    added = [machines.add(one) for one in (facts, replace(facts, visible=("GPU-a1", "GPU-a0")))]
    assert len(by_machine(added)) == 2


class Counted(UserDict[int, Node]):
    """The nodes that are present, counting how often all of them are visited."""

    visits = 0

    def __iter__(self) -> Iterator[int]:
        self.visits += 1
        return super().__iter__()


def test_the_coordinator_visits_the_nodes_a_few_times_per_event(tmp_path: Path) -> None:
    course = Course(tmp_path, 500, joined=499)
    course.head.present = counted = Counted(course.head.present)  # type: ignore[assignment]
    assert course.next() is None
    assert counted.visits <= 2
    course.join(499)
    counted.visits = 0
    assert len(course.started()) == 500
    assert counted.visits <= 10
    counted.visits = 0
    assert course.next() is None
    assert counted.visits == 0, "heartbeats do not visit them"


def test_a_layout_that_fits_no_number_of_nodes_costs_no_sort_per_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(tmp_path, 300, min_nodes=1)
    course.head.config = replace(course.head.config, batch=BatchConfig(global_size=1))
    orders: list[int] = []

    def in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
        orders.append(len(nodes))
        return tuple(nodes)

    monkeypatch.setattr(coordinator, "in_order_of_rank", in_order)
    assert action(course.next()) is Action.REFUSE
    assert orders == []


def test_heartbeats_become_rarer_with_thousands_of_nodes() -> None:
    assert beat_s(15, 1) == beat_s(15, BEATS_PER_S) == 1
    assert beat_s(15, 4 * BEATS_PER_S) == 4
    assert beat_s(15, 100 * BEATS_PER_S) == 15 / BEATS, "several within the timeout"


def test_the_server_sends_heartbeats_while_it_prepares_an_attempt(tmp_path: Path) -> None:
    served, release = held(Served(tmp_path, 1))
    connection, received = joined(served, 0), b""
    while b'"start"' not in received:
        data = connection.recv(1 << 16)
        assert data
        received += data
        connection.sendall(b'{"kind": "beat"}\n')
        if received.count(b'"beat"') >= 3:
            release.set()
        assert release.is_set() or served.starts == []
    connection.close()


def test_a_node_that_leaves_while_an_attempt_is_prepared_ends_it(tmp_path: Path) -> None:
    served, release = held(Served(tmp_path, 2, min_nodes=1))
    links = [served.link(number) for number in range(2)]
    until(lambda: len(served.head.present) == 2)
    links[1]._channel.close()
    until(lambda: len(served.head.present) == 1)
    release.set()
    assert order_of(links[0])["spec"]["attempt"] == 0
    until(lambda: links[0].is_to_end(0))


def held(served: Served) -> tuple[Served, Event]:
    """Returns the server, which prepares an attempt only after the event is set."""
    release, begin = Event(), served.hub._begin

    def wait(start: Start) -> dict[str, Any]:
        assert release.wait(60)
        return begin(start)

    served.hub._begin = wait
    return served, release


def test_the_server_tells_all_agents_of_a_request_for_stacks(tmp_path: Path) -> None:
    served = Served(tmp_path, 2)
    links = [served.link(number) for number in range(2)]
    assert [order_of(link)["spec"]["attempt"] for link in links] == [0, 0], "both have joined"
    links[0].send_stacks_request(7)
    until(lambda: [link.stacks_requested for link in links] == [7, 7])
