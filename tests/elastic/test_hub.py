"""The hub and its links over real sockets: joining, silence, strangers, and leaving together."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.nodes import Node, Unfit
from hpc_train.elastic.rendezvous.addresses import ServerAddress
from hpc_train.elastic.rendezvous.channel import LONGEST_LINE, MAX_PENDING, Channel, encode
from hpc_train.elastic.rendezvous.client import RendezvousClient, ServerLost
from hpc_train.elastic.rendezvous.coordinator import Coordinator
from hpc_train.elastic.rendezvous.messages import Leave, NodeReport, Start, report_message
from hpc_train.elastic.rendezvous.server import Member, RendezvousServer
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import EXITS, Action, Exit, Failure
from tests.elastic.test_agent import until
from tests.elastic.test_coordinator import DONE, Course

TOKEN = "secret"
SILENT_S = 1.0
HELLO = b'{"kind": "hello", "token": "secret", "node": {}}\n'


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator decides at once when a node is lost; test_coordinator.py has its wait for further losses."""
    monkeypatch.setattr("hpc_train.elastic.rendezvous.coordinator.NODE_LOSS_WAIT_S", 0.05)


class Served:
    """A hub of ``nodes`` nodes; ``starts`` and ``left`` are what it decided."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        is_suspended: Callable[[], bool] | None = None,
        silent_s: float = SILENT_S,
        **elastic: Any,
    ) -> None:
        self.head: Coordinator = Course(folder, nodes, joined=0, **elastic).head
        self.head.join_until = time.monotonic() + 60
        self.starts: list[list[int]] = []
        self.left: list[Leave] = []
        self.broken: Exception | None = None  # what ``begin`` raises
        self.padding = ""  # makes start messages longer
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # the kernel takes little of a long message
        self.address = ServerAddress("127.0.0.1", listener.getsockname()[1], TOKEN)
        self.hub = RendezvousServer(self.head, listener, TOKEN, silent_s, self._begin, self._leave, is_suspended)
        self.hub.start()

    def _begin(self, start: Start) -> dict[str, Any]:
        if self.broken is not None:
            raise self.broken
        self.starts.append([node.number for node in start.nodes])
        return {"attempt": len(self.starts) - 1, "order": self.starts[-1], "padding": self.padding}

    def _leave(self, leave: Leave) -> int:
        self.left.append(leave)
        return EXITS[leave.decision.action]

    def link(self, number: int) -> RendezvousClient:
        return RendezvousClient.connect(self.address, Node(number, f"n{number}", f"n{number}", None, 0, 2), SILENT_S)


def connected(served: Served) -> socket.socket:
    return socket.create_connection((served.address.host, served.address.port), timeout=60)


def joined(served: Served, number: int) -> socket.socket:
    """A connection that has introduced itself as node ``number``."""
    connection = connected(served)
    hello = {"kind": "hello", "node": Node(number, f"n{number}", f"n{number}", None, 0, 2).to_json()}
    connection.sendall(TOKEN.encode() + json.dumps(hello).encode() + b"\n")
    return connection


def all_from(connection: socket.socket) -> bytes:
    """What the hub sends until it closes the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            found += data
    return found


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def order_of(link: RendezvousClient) -> dict[str, Any]:
    found = until(lambda: link.order(0.5), timeout=60)
    assert isinstance(found, dict)
    return found


def test_agents_start_and_leave_together(tmp_path: Path) -> None:
    served = Served(tmp_path, 3)
    links = [served.link(number) for number in range(3)]
    assert [order_of(link)["spec"]["attempt"] for link in links] == [0, 0, 0]
    for link in links:
        link.send_attempt_end(0, DONE)
    assert [order_of(link)["code"] for link in links] == [0, 0, 0]
    threads = [threading.Thread(target=link.leave, args=(30,)) for link in links[1:]]
    for thread in threads:
        thread.start()
    assert all(thread.is_alive() for thread in threads)
    links[0].leave(30)
    for thread in threads:
        thread.join()
    served.hub.join()


@pytest.mark.parametrize("why", [{"unfit": Unfit("no driver", "load it")}, {"refusal": "a wrong key"}])
def test_a_node_that_cannot_take_part_says_so_as_it_joins(tmp_path: Path, why: dict[str, Any]) -> None:
    served = Served(tmp_path, 1)
    link = RendezvousClient.connect(served.address, Node(0, "n0", "n0", None, 0, 0, **why), SILENT_S)
    assert order_of(link)["code"] == Exit.REFUSED
    assert served.starts == []


def test_a_stop_at_one_node_reaches_the_hub(tmp_path: Path) -> None:
    served = Served(tmp_path, 2)
    link = served.link(0)
    link.send_stop("SIGTERM")
    assert order_of(link)["code"] == Exit.STOPPED


def test_reports_of_another_attempt_are_ignored(tmp_path: Path) -> None:
    served = Served(tmp_path, 1)
    link = served.link(0)
    order_of(link)
    link.send_attempt_end(7, DONE)
    link.send_attempt_end(-1, DONE)
    assert link.order(0.3) is None
    link.send_attempt_end(0, DONE)
    assert order_of(link)["code"] == 0


def test_a_hang_on_one_node_lets_the_others_save_their_stacks_first(tmp_path: Path) -> None:
    served = Served(tmp_path, 2)
    links = [served.link(number) for number in range(2)]
    assert [order_of(link)["spec"]["attempt"] for link in links] == [0, 0]
    links[1].send_stacks_saved(0)
    assert until(lambda: links[0].must_save_stacks(0))
    assert not any(link.have_all_saved(0) for link in links)
    links[0].send_stacks_saved(0)
    assert until(lambda: all(link.have_all_saved(0) for link in links))
    assert not any(link.is_to_end(0) for link in links), "the node with the hang reports it"


def test_a_silent_node_is_lost_and_its_agent_may_join_again(tmp_path: Path) -> None:
    served = Served(tmp_path, 2, min_nodes=1)
    first = served.link(0)
    silent = mute(served, 1)
    assert order_of(first)["spec"]["order"] == [0, 1]
    until(lambda: first.is_to_end(0), timeout=60)
    first.send_attempt_end(0, NodeReport(Exit.FAILED, None, 9))
    assert order_of(first)["spec"]["order"] == [0]
    assert not first.is_to_end(1)
    again = served.link(1)
    until(lambda: 1 in served.head.present, timeout=60)
    assert again.order(0.5) is None, "it waits as a spare"
    first.send_attempt_end(1, DONE)
    assert order_of(again)["code"] == 0
    silent.close()


def mute(served: Served, number: int) -> Channel:
    """Joins, and says nothing after that, as a frozen node does."""
    return Channel(joined(served, number))


def test_a_silent_node_of_a_suspended_job_is_not_lost(tmp_path: Path) -> None:
    """Slurm is asked once per silence."""
    answers = [True, False]
    asked: list[float] = []

    def is_suspended() -> bool:
        asked.append(time.monotonic())
        return answers[len(asked) - 1]

    served = Served(tmp_path, 2, is_suspended)
    first, silent = served.link(0), mute(served, 1)
    order_of(first)
    until(lambda: first.is_to_end(0), timeout=60)
    first_question, second_question = asked
    assert second_question - first_question > SILENT_S / 2
    assert served.head.present.keys() == {0}
    silent.close()


def test_a_slurm_that_does_not_answer_does_not_hold_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.elastic.rendezvous.server.ASK_S", 600.0)
    answer, asked = threading.Event(), list[float]()

    def is_suspended() -> bool:
        asked.append(time.monotonic())
        return answer.wait(60)

    served = Served(tmp_path, 2, is_suspended)
    first, silent = served.link(0), mute(served, 1)
    order_of(first)
    until(lambda: asked, timeout=60)
    first.send_stop("SIGTERM")
    until(lambda: served.head.stop, timeout=60)
    assert 1 in served.head.present, "the hub goes on while it waits for Slurm"
    monkeypatch.setattr("hpc_train.elastic.rendezvous.server.ASK_S", 0.0)
    until(lambda: first.is_to_end(0), timeout=60)
    answer.set()
    assert len(asked) == 1
    silent.close()


def test_a_silent_hub_is_not_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel would take the connection, even where the process is frozen."""
    monkeypatch.setattr("hpc_train.elastic.rendezvous.client.SERVER_BUSY_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ServerAddress("127.0.0.1", server.getsockname()[1], TOKEN)
        link = RendezvousClient.connect(address, Node(0, "n0", "n0", None, 0, 2), 0.5)
        with pytest.raises(ServerLost, match="silent"):
            until(lambda: link.order(0.2), timeout=60)
        assert link.silent


def test_time_in_which_the_job_was_suspended_is_no_silence(tmp_path: Path) -> None:
    """All of it stands still, hub and agents, for longer than a node may be silent."""
    served = Served(tmp_path, 2)
    links = [served.link(number) for number in range(2)]
    for link in links:
        order_of(link)
    ctypes.PyDLL(None).sleep(2)  # it holds the lock of the interpreter, so that no thread goes on
    time.sleep(SILENT_S / 2)
    assert served.head.present.keys() == {0, 1}
    assert not any(link.lost or link.is_to_end(0) for link in links)
    pauses = [links[0].pauses.get(timeout=60).seconds]
    while not links[0].pauses.empty():
        pauses.append(links[0].pauses.get().seconds)
    assert max(pauses) > 1.9, "the agent can tell for how long"


STRANGERS = [
    b"",
    b"sec",
    b"secret".upper() + HELLO,
    HELLO,
    b'{"kind": "stop", "reason": "SIGTERM", "token": "secret"}\n',
    b"[" * 1500 + b"\n",
    TOKEN.encode(),
    TOKEN.encode() + b'{"kind": "hello", "node": {"number": 1}}\n',
    TOKEN.encode() + b'{"kind": "hello"}\n',
    TOKEN.encode() + b'{"kind": "stop", "reason": "SIGTERM"}\n',
    TOKEN.encode() + b"[]\n",
    TOKEN.encode() + b"[" * 1500 + b"\n",
]


def test_strangers_are_not_taken_in(tmp_path: Path) -> None:
    """What they send, or that they send nothing, ends their connection and nothing else."""
    served = Served(tmp_path, 1)
    strangers = [connected(served) for _ in STRANGERS]
    for stranger, text in zip(strangers, STRANGERS, strict=True):
        stranger.sendall(text)
    for stranger in strangers:
        all_from(stranger)  # the hub closes
        stranger.close()
    link = served.link(0)
    assert order_of(link)["spec"]["order"] == [0]
    assert served.head.stop is None
    link.send_attempt_end(0, DONE)
    assert order_of(link)["code"] == 0


NONSENSE = [
    b"[" * 1500,
    b"no JSON",
    b"[]",
    b"{}",
    b'{"kind": "bye"}',
    b'{"kind": "beat", "more": 1}',
    b'{"kind": "stop"}',
    b'{"kind": "stop", "reason": 7}',
    b'{"kind": "stop", "reason": "\\ud800"}',
    b'{"kind": "ended", "attempt": 0, "exit": 0, "failure": null, "step": true}',
    b'{"kind": "ended", "attempt": 0, "exit": 0, "failure": null, "step": NaN}',
    b'{"kind": "ended", "attempt": null, "exit": 0, "failure": null, "step": 9}',
    b'{"kind": "ended", "attempt": 0, "exit": 0, "failure": null, "step": "nine"}',
    b'{"kind": "ended", "attempt": 0, "exit": 1, "failure": {"failure": "killed", "rank": "one"}, "step": 9}',
    b'{"kind": "ended", "attempt": 0, "exit": 1, "failure": "killed", "step": 9}',
]


def test_agents_that_send_nonsense_are_lost_and_told_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    served = Served(tmp_path, 1 + len(NONSENSE), silent_s=60.0, min_nodes=1)
    first = served.link(0)
    others = {number: joined(served, number) for number in range(1, 1 + len(NONSENSE))}
    assert order_of(first)["spec"]["order"] == [0, *others]
    reasons = {}
    for (number, other), text in zip(others.items(), NONSENSE, strict=True):
        other.sendall(text + b"\n")
        answer = json.loads(all_from(other).splitlines()[-1])
        assert answer["kind"] == "dropped", text
        assert "its agent sent an invalid message" in answer["why"], text
        reasons[number] = answer["why"]
        other.close()
    error = capfd.readouterr().err
    assert all(f"the rendezvous server drops node n{number}: {why}" in error for number, why in reasons.items())
    until(lambda: first.is_to_end(0), timeout=60)
    first.send_attempt_end(0, NodeReport(Exit.FAILED, None, 9))
    assert order_of(first)["spec"]["order"] == [0]
    first.send_attempt_end(1, DONE)
    assert order_of(first)["code"] == 0


def of_spare(served: Served) -> tuple[RendezvousClient, socket.socket]:
    """The agents of a node with workers and of a spare, in the first attempt."""
    first, spare = served.link(0), joined(served, 1)
    assert order_of(first)["spec"]["order"] == [0]
    return first, spare


def test_a_spare_has_nothing_to_report(tmp_path: Path) -> None:
    served = Served(tmp_path, 2, spares=1)
    first, spare = of_spare(served)
    failed = NodeReport(Exit.FAILED, WorkerFailure(0, Failure.KILLED, "", "", 0.0), 1 << 40)
    for message in (report_message(0, failed), {"kind": "store_lost", "attempt": 0}):
        spare.sendall(json.dumps(message).encode() + b"\n")
    spare.sendall(b"no JSON\n")
    all_from(spare)  # the hub has read all of it
    assert not first.is_to_end(0)
    first.send_attempt_end(0, DONE)
    assert order_of(first)["code"] == 0


def test_a_node_of_a_joiner_that_is_no_longer_needed_leaves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    served = Served(tmp_path, 1)
    first = served.link(0)
    order_of(first)
    host = served.head.present[0]
    first.send_invitation(1, 2, host)
    first.send_invitation(3, 1, host)
    until(lambda: served.head.admits(3))
    late = served.link(1)
    assert order_of(late) == {"kind": "leave", "action": Action.FINISH, "code": Exit.DONE}
    late.leave(60)
    assert capfd.readouterr().err == "node n1 does not join: the run needs fewer nodes\n"
    first.send_attempt_end(0, DONE)
    assert order_of(first)["code"] == 0


def test_another_agent_cannot_take_the_place_of_one_that_lives(tmp_path: Path) -> None:
    """As where two steps of a job run at the same time."""
    served = Served(tmp_path, 1)
    first = served.link(0)
    order_of(first)
    other = joined(served, 0)
    assert "another agent has joined as node 0" in json.loads(all_from(other))["why"]
    first.send_attempt_end(0, DONE)
    assert order_of(first)["code"] == 0


def test_an_agent_that_connects_again_replaces_its_lost_connection(tmp_path: Path) -> None:
    served = Served(tmp_path, 2)
    first, second = served.link(0), served.link(1)
    order_of(first)
    again = served.link(1)  # of the same process
    until(lambda: second.lost and first.is_to_end(0), timeout=60)
    assert not again.lost


IMPOSSIBLE: list[dict[str, Any]] = [
    {"number": 2},
    {"number": -1},
    {"number": True},
    {"gpus": 3},
    {"workers": 0},
    {"workers": 1 << 40},
    {"name": None},
    {"gpu_memory": float("nan")},
    {"facts": {}},
    {"facts": {"links": [{"a": "GPU0", "b": "NIC0", "path_type": "WIRE"}]}},
    {"facts": {"gpus": [{"index": "0"}]}},
    {"facts": {"cores": [["0"]]}},
    {"facts": {"settings": [{"name": "A", "value": 1, "source": "B"}]}},
]


def test_a_node_that_cannot_be_is_not_taken_in(tmp_path: Path) -> None:
    """Otherwise a later decision about all nodes fails, and with it the job."""
    served = Served(tmp_path, 2)
    possible = Node(1, "n1", "n1", None, 0, 2).to_json()
    for change in IMPOSSIBLE:
        node = json.loads(json.dumps(possible))
        facts = change.get("facts")
        node |= change if facts is None else {"facts": facts and node["facts"] | facts}
        with connected(served) as connection:
            connection.sendall(TOKEN.encode() + json.dumps({"kind": "hello", "node": node}).encode() + b"\n")
            assert json.loads(all_from(connection))["kind"] == "dropped", change
    links = [served.link(number) for number in range(2)]
    assert [order_of(link)["spec"]["order"] for link in links] == [[0, 1]] * 2


def test_a_node_that_receives_nothing_holds_up_nobody(tmp_path: Path) -> None:
    """Each costs as much memory as its messages, until it counts as silent."""
    served = Served(tmp_path, 6, min_nodes=1)
    served.padding = "x" * (3 << 20)
    deaf = [joined(served, number) for number in range(1, 6)]
    for connection in deaf:
        threading.Thread(target=beat_for_ever, args=(connection,), daemon=True).start()
    until(lambda: len(served.head.present) == 5, timeout=60)
    first = served.link(0)
    assert order_of(first)["spec"]["order"] == list(range(6))
    until(lambda: first.is_to_end(0), timeout=60)
    until(lambda: served.head.present.keys() == {0}, timeout=60)
    assert not first.lost
    first.send_attempt_end(0, NodeReport(Exit.FAILED, None, 9))
    assert order_of(first)["spec"]["order"] == [0]


def beat_for_ever(connection: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection.sendall(b'{"kind": "beat"}\n')
            time.sleep(0.2)


def test_agents_that_do_not_introduce_themselves_do_not_pile_up(tmp_path: Path) -> None:
    served = Served(tmp_path, 1)
    before = descriptors()
    silent = [connected(served) for _ in range(300)]
    for connection in silent:
        connection.sendall(TOKEN.encode())
    until(lambda: descriptors() - before - len(silent) <= 2 * MAX_PENDING + 1, timeout=60)
    link = served.link(0)
    assert order_of(link)["spec"]["order"] == [0]
    for connection in silent:
        connection.close()


FLOOD = """
import collections, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
port, held = int(sys.argv[1]), collections.deque(maxlen=int(sys.argv[2]))
while True:
    try:
        held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
        sys.stdout.write(".")
        sys.stdout.flush()
    except OSError:
        pass
    time.sleep(0.001 if len(held) == held.maxlen else 0)
"""


@contextmanager
def flood(port: int, held: int = 400) -> Iterator[Callable[[int], None]]:
    """Keeps up to ``held`` connections from another process open inside the ``with`` block.

    It yields a function that waits until the given number of connections has been opened.
    """
    process = subprocess.Popen([sys.executable, "-c", FLOOD, str(port), str(held)], stdout=subprocess.PIPE)
    assert process.stdout is not None

    def wait(opened: int) -> None:
        assert process.stdout is not None
        assert len(process.stdout.read(opened)) == opened

    try:
        yield wait
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_agent_is_taken_in_during_a_flood_of_connections(tmp_path: Path) -> None:
    served = Served(tmp_path, 2)
    first, before = served.link(0), descriptors()
    with flood(served.address.port) as opened:
        opened(500)
        assert descriptors() - before < 400 / 2, "of 400 connections a few dozen are kept"
        second = served.link(1)
        assert [order_of(link)["spec"]["order"] for link in (first, second)] == [[0, 1]] * 2
        opened(500)
        for link in (first, second):
            link.send_attempt_end(0, DONE)
        assert [order_of(link)["code"] for link in (first, second)] == [0, 0]


def test_a_hub_without_free_descriptors_goes_on_when_there_are_some_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    served = Served(tmp_path, 1)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    pending = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (pending.fileno() + 1, limit[1]))
    try:
        pending.connect((served.address.host, served.address.port))
        began = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - began < 0.5 / 2, "it does not spin"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    pending.close()
    said = capfd.readouterr().err
    assert said.count("the rendezvous server cannot accept connections: a process may open") == 1
    assert said.count("ulimit -n 65536") == 1
    link = served.link(0)
    assert order_of(link)["spec"]["order"] == [0]
    link.send_attempt_end(0, DONE)
    assert order_of(link)["code"] == 0


def test_an_agent_notices_that_the_hub_is_gone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ServerAddress("127.0.0.1", server.getsockname()[1], TOKEN)
        link = RendezvousClient.connect(address, Node(0, "n0", "n0", None, 0, 2), SILENT_S)
        server.accept()[0].close()
        with pytest.raises(ServerLost):
            until(lambda: link.order(0.2), timeout=60)
        assert link.is_to_end(0)
    with pytest.raises(ServerLost):
        RendezvousClient.connect(address, Node(0, "n0", "n0", None, 0, 2), SILENT_S, patience_s=0.5)


@pytest.mark.parametrize("in_slurm", [True, False])
def test_a_hub_whose_file_system_stays_away_ends_the_job_for_another_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], in_slurm: bool
) -> None:
    served = Served(tmp_path, 1)
    served.head.elsewhere = in_slurm
    link = served.link(0)
    order_of(link)
    served.broken = OSError(errno.ESTALE, "Stale file handle")
    link.send_attempt_end(0, NodeReport(Exit.FAILED, WorkerFailure(0, Failure.KILLED, "", "", 0.0), 9))
    assert order_of(link)["code"] == EXITS[Action.REQUEUE]
    assert served.left[0].decision.action is Action.REQUEUE
    assert served.left[0].decision.reason.startswith(
        "the rendezvous server cannot continue: [Errno 116] Stale file handle"
    )
    assert capfd.readouterr().err == ""


def test_two_hundred_nodes(tmp_path: Path) -> None:
    many = Served(tmp_path, 200, silent_s=60.0)
    channels = []
    for number in range(200):
        channel = Channel(joined(many, number))
        channel.send({"kind": "beat"})
        channels.append(channel)
    until(lambda: many.starts, timeout=60)
    assert many.starts[0] == list(range(200))
    for channel in channels:
        channel.close()


def test_the_token_is_not_for_everybody(run: RunDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (run.attempts / "server-7.0.0.new").symlink_to(elsewhere)
    (run.attempts / "server-7.0.0.json").symlink_to(elsewhere)
    before = os.umask(0)
    try:
        ServerAddress("n0", 7, TOKEN).publish(run, "7.0.0")
    finally:
        os.umask(before)
    assert not elsewhere.exists(), "a link that another member of the group has made beforehand is not followed"
    assert (run.attempts / "server-7.0.0.json").lstat().st_mode == 0o100600
    assert not [path for path in run.attempts.iterdir() if path.name.startswith(".")]
    assert ServerAddress.find(run, "7.0.0") == ServerAddress("n0", 7, TOKEN)
    assert ServerAddress.find(run, "7.0.1") is None


def test_a_member_that_was_dropped_since_the_selector_reported_it(tmp_path: Path) -> None:
    """As where an agent connects again while its old connection has still something to receive."""
    served = Served(tmp_path, 1)
    with channels() as (channel, _):
        while not channel.has_unsent:
            channel.send({"text": "x" * 1000})
        member = Member(channel, 0.0, is_writing=True)
        channel.close()
        served.hub._serve_member(member)


def test_a_channel_keeps_what_its_peer_does_not_receive_yet() -> None:
    with channels() as (channel, peer):
        for number in range(2000):
            channel.send({"number": number, "text": "x" * 1000})
        assert channel.has_unsent, "it has not waited"
        reader, found = Channel(peer), list[int]()
        while len(found) < 2000:
            channel.flush()
            found += [message["number"] for message in reader.read()]
        assert found == list(range(2000))
        assert not channel.has_unsent


def test_a_peer_that_falls_too_far_behind_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.elastic.rendezvous.channel.MOST_UNSENT", 1 << 20)
    with channels() as (channel, peer):
        peer.sendall(b'{"kind": "beat"}\n')
        while channel.has_unsent or not channel._failure:
            channel.send({"text": "x" * 10_000})
        with pytest.raises(ConnectionError, match="it does not receive"):
            list(channel.read())
        channel.send({"text": "more"})
        assert not channel.has_unsent


@contextmanager
def channels() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel over TCP, and the other end of its connection; the kernel holds little between them."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as peer:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        peer.connect(server.getsockname())
        channel = Channel(server.accept()[0])
        yield channel, peer
        channel.close()


def test_a_message_is_found_whatever_the_pieces_are() -> None:
    with channels() as (channel, peer):
        text, found = b'{"kind": "beat"}\n{"kind": "bye"}\n{}\n', list[str | None]()
        for start in range(0, len(text), 3):
            peer.sendall(text[start : start + 3])
            assert channel.wait(60)
            found += [message.get("kind") for message in channel.read()]
        assert found == ["beat", "bye", None]


def test_a_long_traceback_reaches_the_hub_shortened() -> None:
    text = "first" + "é" * (5 << 20) + "last"
    report = NodeReport(Exit.FAILED, WorkerFailure(0, Failure.USER_ERROR, text, text, 0.0), 9)
    message = report_message(0, report)
    assert len(encode(message)) < LONGEST_LINE
    assert message["failure"]["traceback"].startswith("first") and message["failure"]["traceback"].endswith("last")
