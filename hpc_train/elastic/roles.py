"""Runs on each node of a job with roles (``run.roles``) and starts the agents of the roles there.

The agents of the job start these supervisors like any other command, so they handle a lost node, the time limit and the
requeue. The supervisor of the first node decides: it places the roles on the nodes, gives each a port, starts a role
when those before it are ready, and ends the run. The others start and stop the agents of their nodes as it orders.

A role is a separate run in ``RUN/roles/NAME``, whose agents get their part of the job by the variables of
``schedulers/environment.py``. They restart its processes after a failure, without the other roles.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from hpc_train.checkpoint.space import stop_time
from hpc_train.config.roles import (
    MOST_RESTARTS,
    OUTPUT,
    PORT,
    RESTART_ALL,
    ROLE,
    STARTED,
    NodeGroup,
    Placement,
    Role,
    check_roles,
    config_of_node,
    place,
    roles_of,
)
from hpc_train.config.schema import Config
from hpc_train.elastic.rendezvous.addresses import candidate_ports
from hpc_train.elastic.rendezvous.channel import Admission, Channel, Message
from hpc_train.elastic.script import PROGRESS, TOKEN
from hpc_train.errors import UserError
from hpc_train.machine.allocation import Allocation, current_allocation, listening_at, meeting_at, workers_per_node
from hpc_train.machine.amd_gpus import restrict_to
from hpc_train.machine.gpus import DRIVER, visible_devices
from hpc_train.opening import open_file
from hpc_train.run.directory import RUN_DIRECTORY, RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag
from hpc_train.schedulers import environment as of_job
from hpc_train.schedulers.current import current_job
from hpc_train.schedulers.kubernetes.manifest import REFERENCE

TICK_S = 0.2
PORTS = 64  # candidates per node
FIRST_PORT = 20000  # Ray uses 10002 to 19999
CONNECT_S = 120.0  # until the supervisors of all nodes are connected
LOST_S = 10.0  # meanwhile the agents of the job end all supervisors, because that of the first node has failed
LOOK_S = 1.0  # for an answer of a port
KILL_S = 10.0  # after the grace, within which an agent kills its processes
# variables of this process that the agents of roles do not get
OF_A_RANK = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
NOT_PASSED_ON = frozenset({*OF_A_RANK, *of_job.OF_THIS_START, PROGRESS, RUN_DIRECTORY, REFERENCE})


@dataclass(frozen=True)
class NodeReport:
    """Describes a node to the supervisor of the first node.

    Attributes:
        number: its number in the job.
        address: the address at which other nodes reach it.
        gpus: its visible GPUs.
        ports: ports that are free.
    """

    number: int
    name: str
    address: str
    gpus: tuple[str, ...]
    ports: tuple[int, ...]


class RoleAgents:
    """Starts the agents of roles on this node, and prints their output with the name of the role."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._agents: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}

    def start(
        self, role: str, variables: Mapping[str, str], port: int | None, gpus: Sequence[str] | None
    ) -> str | None:
        """Starts the agent of ``role``; returns why it cannot.

        Args:
            port: a fixed port, on which the processes of the role will listen.
            gpus: the GPUs of the role; None for all.
        """
        if port is not None and not is_free(port):
            return f"port {port} of {socket.gethostname()} is in use by another process"
        environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        environment |= variables
        if gpus is not None and DRIVER.is_dir():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        elif gpus is not None:
            restrict_to(gpus, environment)
        agent = [sys.executable, "-m", "hpc_train", "agent", "--echo", str(self._run.of_role(role).path)]
        process = subprocess.Popen(
            [sys.executable, "-m", "hpc_train.elastic.exec_script", str(os.getpid()), "-", *agent],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        printer = threading.Thread(target=_print, args=(role, process), daemon=True)
        printer.start()
        self._agents[role] = process, printer
        return None

    def signal(self, role: str, number: int) -> None:
        if role in self._agents:
            self._agents[role][0].send_signal(number)

    def ended(self) -> Iterator[tuple[str, int]]:
        """Yields the roles whose agent has ended since the last call, with its exit code."""
        for role, (process, printer) in [*self._agents.items()]:
            code = process.poll()
            if code is not None:
                printer.join(LOOK_S)
                del self._agents[role]
                yield role, code


def _print(role: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{role}: {line}", end="", flush=True)


def is_free(port: int) -> bool:
    """Returns whether a process of this node may listen on ``port``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


@dataclass
class RoleState:
    """Follows a role from its start to its end.

    Attributes:
        placement: its nodes and GPUs.
        port: the port for a server, the same on all of its nodes.
        first_attempt: the first attempt of this start.
        started: when its agents were started, on the monotonic clock; None before.
        codes: the exit codes of its agents that have ended, by node.
        problem: why an agent could not be started.
        sent: the last signal that was sent to its agents.
        is_done: whether it has ended by itself, without a failure.
    """

    role: Role
    run: RunDirectory
    placement: Placement
    port: int
    first_attempt: int = 0
    started: float | None = None
    is_ready: bool = False
    codes: dict[int, int] = field(default_factory=dict)
    problem: str = ""
    sent: signal.Signals | None = None
    is_done: bool = False
    _offsets: dict[Path, int] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        return self.started is not None and len(self.codes) < len(self.placement.nodes)

    @property
    def code(self) -> int | None:
        """Returns the exit code of the role, that of the agent of its first node; None until it has ended."""
        if self.problem:
            return Exit.REFUSED
        return self.codes.get(self.placement.nodes[0])

    def cause(self, code: int) -> tuple[str, int]:
        """Returns the message of the failure with which the role has ended, and the exit code of its command.

        Args:
            code: the exit code of its agent, which counts if no process of the command has failed.
        """
        if self.problem:
            return self.problem, code
        attempts = range(self.first_attempt, self.run.newest_attempt() + 1)
        events = [event for attempt in attempts for event in self.run.events_of("agent-*", attempt)]
        ends = sorted((event for event in events if event.exit_code is not None), key=lambda event: event.time)
        if not ends:
            return f"its agent has ended with code {code}", code
        message = ends[-1].message
        for event in events:
            if event.kind.is_failure and event.exit_code is None and event.attempt == ends[-1].attempt:
                message = f"rank {event.rank} on {event.node}: {event.message}"
        return message, ends[-1].get("command_exit_code", code)

    def why_not_ready(self, addresses: Sequence[str]) -> str | None:
        """Returns what is missing until the role is ready, on nodes with ``addresses``; None if it is ready."""
        kind, _, condition = self.role.ready.partition(":")
        if kind == PORT:
            for address in addresses:
                try:
                    socket.create_connection((address, self.port), LOOK_S).close()
                except OSError:
                    return f"nothing accepts connections at {address}:{self.port}"
        elif kind == OUTPUT and not any(condition in line for line in self._new_lines()):
            return f"no line of its output contains {condition!r}"
        elif kind == STARTED and self.run.newest_attempt() < self.first_attempt:
            return "its processes have not started"
        return None

    def _new_lines(self) -> Iterator[str]:
        for path in self.run.logs.glob("*.log"):
            attempt = path.stem.rpartition("-")[2]
            if not attempt.isdecimal() or int(attempt) < self.first_attempt:
                continue
            with open_file(path, self.run.path) as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if line.endswith(b"\n"):
                        self._offsets[path] = self._offsets.get(path, 0) + len(line)
                        yield line.decode(errors="replace")


@dataclass(frozen=True)
class Ending:
    """Describes why and since when all roles stop.

    Attributes:
        code: the exit code of the run; None if all roles start again.
        by_request: whether a stop was requested: the first role stops before the others.
    """

    code: int | None
    since: float
    by_request: bool = False


class Leader:
    """Decides for all nodes; runs on the first node.

    Args:
        report: describes this node.
        allocation: this node, as others reach it.
        token: admits the supervisors of the other nodes.
    """

    def __init__(
        self, run: RunDirectory, config: Config, report: NodeReport, allocation: Allocation, stop: StopFlag, token: str
    ) -> None:
        self._run = run
        self._config = config
        self._allocation = allocation
        self._stop = stop
        self._token = token
        self._grace_s = stop_time(config, run, allocation.nodes).seconds
        self._start_s = math.inf
        if config.elastic.hang_timeout_s != "0":
            self._start_s = config.elastic.start_timeout_s
        self._reports = {report.number: report}
        self._channels: dict[int, Channel] = {}
        self._selector = selectors.DefaultSelector()
        self._agents = RoleAgents(run)
        self._states: dict[str, RoleState] = {}
        self._ending: Ending | None = None
        self._restarts = 0
        self._failure = ""

    def work(self, listener: socket.socket | None) -> int:
        """Runs the roles to their end; returns the exit code.

        Args:
            listener: where the supervisors of the other nodes connect; None on a single node.
        """
        admission = None
        if listener is not None:
            admission = Admission(listener, self._token, self._selector, self._admit)
            admission.listen()
        until = time.monotonic() + CONNECT_S
        while len(self._reports) < self._allocation.nodes:
            if self._stop.requested:
                return Exit.STOPPED
            if time.monotonic() > until:
                nodes = self._allocation.nodes
                raise UserError(
                    f"only {len(self._reports)} of {nodes} nodes have connected to {self._reports[0].name}",
                    where="run.roles",
                    fix="check the network between the nodes, and cluster.interface",
                )
            self._exchange(admission)
        self._begin()
        while True:
            self._exchange(admission)
            if self._ending is None:
                self._advance()
            if self._ending is not None and self._have_stopped(self._ending):
                if self._ending.code is not None:
                    break
                self._ending = None
                self._begin()
        for channel in self._channels.values():
            channel.send({"kind": "leave", "code": self._ending.code})
        if self._failure:
            print(self._failure, flush=True)  # the last line is the message of the failure
        return self._ending.code

    def _admit(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._read(channel))

    def _exchange(self, admission: Admission | None) -> None:
        """Waits a moment for messages, and handles them and the ends of agents."""
        if admission is None:
            time.sleep(TICK_S)
        else:
            for key, _ in self._selector.select(TICK_S):
                key.data()
            admission.tend(time.monotonic())
        for role, code in self._agents.ended():
            self._note_end(0, role, code)

    def _read(self, channel: Channel) -> None:
        try:
            for message in channel.read():
                if message["kind"] == "joined":
                    report = NodeReport(**message["report"])
                    self._reports[report.number] = report
                    self._channels[report.number] = channel
                else:
                    self._note_end(message["node"], message["role"], message["code"], message["problem"])
        except ConnectionError:  # the agents of the job notice the loss of the node
            self._selector.unregister(channel)

    def _begin(self) -> None:
        """Places all roles and chooses their ports; none has started."""
        groups = []
        first = 0
        for size in self._allocation.component_sizes or (self._allocation.nodes,):
            gpus = min(len(self._reports[node].gpus) for node in range(first, first + size))
            groups.append(NodeGroup(size, gpus))
            first += size
        # the nodes may have fewer GPUs than the submission assumed
        check_roles(self._config, groups, self._allocation.nodes)
        placements = place(self._config, groups)
        used = {node for placement in placements.values() for node in placement.nodes}
        for number in sorted(self._reports.keys() - used):
            print(f"no role runs on {self._reports[number].name}", flush=True)
        self._states = {}
        ports: set[int] = set()
        for role in roles_of(self._config):
            placement = placements[role.name]
            port = role.fixed_port
            if port is None:
                free = set.intersection(*(set(self._reports[node].ports) for node in placement.nodes)) - ports
                if not free:
                    what = f"no port from {FIRST_PORT} is free on all nodes of the role {role.name}"
                    raise UserError(what, where="run.roles", fix="end the processes that listen on so many ports")
                port = min(free)
                ports.add(port)
            run = self._run.of_role(role.name)
            self._states[role.name] = RoleState(role, run, placement, port)

    def _advance(self) -> None:
        """Starts the roles that may start, and decides what follows the end of a role."""
        if self._stop.requested:
            self._end(Exit.STOPPED, by_request=True)
            return
        main = next(iter(self._states))
        for name, state in self._states.items():
            if state.code is not None:
                self._end_of(state, is_main=name == main)
            elif state.started is None:
                if all(self._states[other].is_ready for other in state.role.after):
                    self._start(state)
            elif not state.is_ready:
                waited_s = time.monotonic() - state.started
                missing = state.why_not_ready([self._reports[node].address for node in state.placement.nodes])
                if missing is None:
                    state.is_ready = True
                    print(f"role {name} is ready after {waited_s:.1f} s", flush=True)
                elif waited_s > self._start_s:
                    limit = f"after {waited_s:.0f} s (elastic.start_timeout_s)"
                    self._failure = f"role {name} is not ready {limit}: {missing}"
                    self._end(Exit.FAILED)
            if self._ending is not None:
                return

    def _end_of(self, state: RoleState, is_main: bool) -> None:
        """Decides what follows the end of a role."""
        role = state.role
        code = state.code
        if code == Exit.DONE and not is_main:
            if not state.is_done:
                print(f"role {role.name} is done", flush=True)
            state.is_ready = state.is_done = True
        elif code == Exit.DONE:
            self._end(Exit.DONE)
        elif code == Exit.STOPPED:
            print(f"role {role.name} has stopped", flush=True)
            self._end(Exit.STOPPED)
        else:
            assert code is not None
            message, code = state.cause(code)
            most = self._config.elastic.max_restarts
            if role.on_failure == RESTART_ALL and self._restarts < (MOST_RESTARTS if most is None else most):
                self._restarts += 1
                print(f"role {role.name} failed: {message}; all roles start again", flush=True)
                self._end(None)
                return
            self._failure = f"role {role.name} failed with exit code {code}: {message}"
            self._end(code if code > 0 else Exit.FAILED)

    def _start(self, state: RoleState) -> None:
        role = state.role
        names = ", ".join(self._reports[node].name for node in state.placement.nodes)
        print(f"starting role {role.name} on {names}", flush=True)
        state.started = time.monotonic()
        state.first_attempt = state.run.newest_attempt() + 1
        for index, node in enumerate(state.placement.nodes):
            variables = self._variables(state, index)
            gpus = None
            if role.gpus is not None:
                gpus = [self._reports[node].gpus[gpu] for gpu in state.placement.gpus[index]]
            order = {"variables": variables, "port": role.fixed_port, "gpus": gpus}
            if node in self._channels:
                self._channels[node].send({"kind": "start", "role": role.name, "order": order})
            elif (problem := self._agents.start(role.name, variables, role.fixed_port, gpus)) is not None:
                self._note_end(node, role.name, Exit.REFUSED, problem)

    def _variables(self, state: RoleState, index: int) -> dict[str, str]:
        """Returns the variables of the role's agent on its node ``index``."""
        variables = {ROLE: state.role.name}
        for name, other in self._states.items():
            addresses = [self._reports[node].address for node in other.placement.nodes]
            prefix = f"{ROLE}_{name.upper()}"
            variables |= {f"{prefix}_NODES": ",".join(addresses), f"{prefix}_ADDRESS": addresses[0]}
            variables |= {f"{prefix}_PORT": str(other.port)}
        reports = [self._reports[node] for node in state.placement.nodes]
        job = current_job()
        if job.job_id:
            variables |= {
                of_job.NODES: ",".join(report.name for report in reports),
                of_job.NODE_RANK: str(index),
                of_job.ADDRESS: reports[0].address,
                of_job.JOB_ID: job.job_id,
                of_job.RESTART: str(job.restart),
                of_job.LAUNCH: f"{self._token[:8]}-{self._restarts}",
                of_job.REQUEUE: "true",  # the agents of the job ask for it
            }
        return variables

    def _note_end(self, node: int, role: str, code: int, problem: str = "") -> None:
        state = self._states[role]
        state.codes[node] = code
        state.problem = state.problem or problem

    def _end(self, code: int | None, by_request: bool = False) -> None:
        self._ending = Ending(code, time.monotonic(), by_request)

    def _have_stopped(self, ending: Ending) -> bool:
        """Asks the roles to stop, kills those that take too long, and returns whether all have stopped."""
        waited_s = time.monotonic() - ending.since
        main, *others = self._states.values()
        alive = [state for state in (main, *others) if state.is_alive]
        limit_s = 0.9 * self._grace_s if ending.by_request else self._grace_s + KILL_S
        for state in alive:
            waits = ending.by_request and state is not main and main.is_alive and waited_s < self._grace_s / 2
            if waited_s > limit_s and state.sent is not signal.SIGKILL:
                print(f"role {state.role.name} has not stopped within {limit_s:.0f} s and is killed", flush=True)
                self._signal(state, signal.SIGKILL)
            elif state.sent is None and not waits:
                self._signal(state, signal.SIGTERM)
        return not alive

    def _signal(self, state: RoleState, number: signal.Signals) -> None:
        state.sent = number
        for node in state.placement.nodes:
            if node in self._channels:
                self._channels[node].send({"kind": "signal", "role": state.role.name, "signal": int(number)})
            else:
                self._agents.signal(state.role.name, number)


def follow(run: RunDirectory, report: NodeReport, leader: tuple[str, int], token: str) -> int:
    """Starts and stops the agents of this node as the supervisor of the first node orders; returns the exit code.

    Args:
        leader: its address and port.
    """
    agents = RoleAgents(run)
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            connection = socket.create_connection(leader, CONNECT_S)
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(TICK_S)
    connection.sendall(token.encode())
    channel = Channel(connection)
    channel.send({"kind": "joined", "report": asdict(report)})

    def send_end(role: str, code: int, problem: str = "") -> None:
        end = {"node": report.number, "role": role, "code": int(code), "problem": problem}
        channel.send({"kind": "ended"} | end)

    while True:
        orders: list[Message] = []
        if channel.wait(TICK_S):
            orders += channel.read()
        for order in orders:
            if order["kind"] == "leave":
                return Exit.DONE if order["code"] == Exit.DONE else Exit.STOPPED  # the leader reports a failure
            if order["kind"] == "signal":
                agents.signal(order["role"], order["signal"])
                continue
            problem = agents.start(order["role"], **order["order"])
            if problem is not None:
                send_end(order["role"], Exit.REFUSED, problem)
        for role, code in agents.ended():
            send_end(role, code)


def main() -> int:
    """Runs the supervisor of this node; returns the exit code."""
    stop = StopFlag()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.request(signal.Signals(number).name))
    run = RunDirectory(Path(os.environ[RUN_DIRECTORY]))
    config = load(run)
    token = os.environ.pop(TOKEN)
    allocation = meeting_at(current_allocation(), config.cluster.interface)
    cluster = config_of_node(config, allocation.component_sizes, allocation.node_rank).cluster
    gpus = visible_devices()[: workers_per_node(cluster)[0]]
    candidates = (port for port in candidate_ports(token) if port >= FIRST_PORT)
    ports = tuple(islice(filter(is_free, candidates), PORTS))
    report = NodeReport(allocation.node_rank, allocation.node_name, allocation.address, gpus, ports)
    port = int(os.environ["MASTER_PORT"])
    if allocation.node_rank > 0:
        try:
            return follow(run, report, (os.environ["MASTER_ADDR"], port), token)
        except OSError as error:
            print(f"{allocation.node_name} has lost the supervisor of the first node: {error}", flush=True)
            time.sleep(LOST_S)
            return Exit.FAILED
    leader = Leader(run, config, report, allocation, stop, token)
    try:
        if allocation.nodes == 1:
            return leader.work(None)
        allocation, _ = listening_at(allocation, is_chosen=config.cluster.interface is not None)
        with socket.create_server((allocation.listen_address, port)) as listener:
            return leader.work(listener)
    except UserError as error:
        print(f"{error.what}; {error.fix}", flush=True)  # the last line is the message of the failure
        return Exit.REFUSED


if __name__ == "__main__":
    sys.exit(main())
