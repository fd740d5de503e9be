"""Continues a live run on another number of nodes, at the request of a user.

To get fewer nodes, the job gives some back. To get more, the agent of node 0 submits a joiner: a second job of the same
run, whose agents join the rendezvous server when it starts. The first job owns the run: its agent of node 0 decides,
and the joiner ends with it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpc_train.config.schema import Config
from hpc_train.config.values import growing_nodes
from hpc_train.elastic.nodes import Node, NodeFailures
from hpc_train.elastic.rendezvous.addresses import AttemptSpec, ServerAddress, bind
from hpc_train.elastic.rendezvous.server import RendezvousServer
from hpc_train.errors import UserError
from hpc_train.layout.resolve import resolve_layout
from hpc_train.machine.allocation import Allocation, listening_at, meeting_at
from hpc_train.run.directory import RANK_0, RunDirectory
from hpc_train.run.requests import ResizeRequest
from hpc_train.schedulers.scheduler import CurrentJob
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.client import BRIEF_S, SlurmError
from hpc_train.schedulers.states import state_of
from hpc_train.units import counted, format_duration

SUBMIT_S = 300.0
JOINERS_EVERY_S = 60.0  # between two looks at waiting joiners, and whether more nodes are worth the change
MIN_GAIN = 5.0  # the time that more nodes save, in multiples of the cost of the change
NICE = 1_000_000  # of a joiner that only idle nodes may serve: any other job goes before it


def refusal_of(request: ResizeRequest, config: Config, spec: AttemptSpec, job: CurrentJob, held: int) -> str | None:
    """Returns why the run cannot continue on the requested nodes; None if it can.

    Args:
        spec: the attempt that runs.
        held: the nodes of the job, without those of joiners.
    """
    if config.run.roles:
        return "the nodes of run.roles are fixed"
    fewest = config.elastic.min_nodes or 1
    if request.nodes < fewest:
        return f"elastic.min_nodes={fewest} is the smallest number of nodes"
    try:
        resolve_layout(config, request.nodes, spec.workers_per_node)
    except UserError as error:
        return error.what
    if request.nodes > spec.nodes:
        return job.why_no_joiner()
    if request.nodes + config.elastic.spares < held:
        return job.why_no_release()
    return None


def growth_of(run: RunDirectory, config: Config, spec: AttemptSpec) -> ResizeRequest | None:
    """Returns the request of a run that grows by itself (``elastic.grow``); None if it has all nodes or the gain is
    small.

    The change costs what the present attempt took from its start to its first step, and the slowest save. With N nodes
    instead of n, the steps that are left take at best n / N of their time.
    """
    most = growing_nodes(config)
    lines = [*run.follow(run.metrics_file(spec.attempt)).read()]
    steps = run.record().get("total_steps") or config.train.steps
    if most is None or spec.nodes >= most or not steps or not lines or lines[0].step_s is None:
        return None
    newest = lines[-1]
    events = [*run.events_of(RANK_0)]
    resumed = [event.step or 0 for event in events if event.name == "resumed" and event.attempt == spec.attempt]
    first_s = (lines[0].step - max(resumed, default=0)) * lines[0].step_s  # of the steps of the first line
    save_s = max((event.seconds or 0.0 for event in events if event.name == "checkpoint_saved"), default=0.0)
    cost_s = lines[0].time - spec.started - first_s + save_s
    left_s = (steps - newest.step) * (newest.step_s or 0.0)
    gain_s = left_s * (1 - spec.nodes / most)
    if gain_s < MIN_GAIN * cost_s:
        return None
    figures = f"saves at most {format_duration(gain_s)} of {format_duration(left_s)}, costs {format_duration(cost_s)}"
    return ResizeRequest(most, f"elastic.grow={config.elastic.grow} ({figures})", time.time(), of_user=False)


@dataclass(frozen=True)
class Joiner:
    """A job that adds ``count`` nodes to a run, with the numbers from ``first``.

    ``is_automatic`` states that no user has asked for them.
    """

    job_id: str
    first: int
    count: int
    is_automatic: bool = False

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass
class JobNodes:
    """The nodes of the first job and of its joiners; used by the threads of the agent of node 0.

    Attributes:
        count: the nodes that the first job was started with; they have the numbers below it.
    """

    job: CurrentJob
    count: int
    joiners: list[Joiner] = field(default_factory=list)
    _released: set[int] = field(default_factory=set)

    @property
    def held(self) -> int:
        """Returns how many nodes the first job holds."""
        return self.count - sum(number < self.count for number in self._released)

    def note_released(self, numbers: Collection[int]) -> None:
        self._released |= set(numbers)

    def release(self, released: Sequence[tuple[int, str]]) -> str | None:
        """Gives back nodes whose agents have left; returns why this failed, None if it did not.

        A joiner none of whose agents is left ends by itself. It needs its first node, the batch host, until then.
        """
        problems = []
        names = [name for number, name in released if number < self.count]
        if names:
            problems += [self.job.release(names)]
        for joiner in self.joiners:
            names = [name for number, name in released if number in joiner.numbers[1:]]
            if names and not self._released.issuperset(joiner.numbers):
                problems += [self.job.release(names, joiner.job_id)]
        return "; ".join(filter(None, problems)) or None

    def waiting(self, joined: Collection[int]) -> list[Joiner]:
        """Returns the joiners of which no node has joined.

        Args:
            joined: the numbers of the nodes of the run.
        """
        return [joiner for joiner in self.joiners if not set(joiner.numbers) & (set(joined) | self._released)]

    def drop_ended(self, joined: Collection[int]) -> list[str]:
        """Forgets the joiners that have ended before any of their nodes joined; says which. Asks Slurm."""
        waiting = {joiner.job_id: joiner for joiner in self.waiting(joined)}
        jobs = client.list_jobs([f"--jobs={','.join(waiting)}"], BRIEF_S) if waiting else None
        problems = []
        for job in jobs or ():
            if not state_of(job.state).is_alive:
                self.joiners.remove(waiting[job.job_id])
                problems.append(f"job {job.job_id} has ended before its nodes joined: {job.state}")
        return problems

    def cancel_waiting(self, joined: Collection[int]) -> None:
        """Cancels the joiners of which no node has joined."""
        waiting = self.waiting(joined)
        self.joiners = [joiner for joiner in self.joiners if joiner not in waiting]
        try:
            if waiting:
                client.cancel([joiner.job_id for joiner in waiting])
        except SlurmError as error:  # they end by themselves when they find no server
            print(f"cannot cancel a job that was to add nodes: {error.what}", file=sys.stderr, flush=True)


@dataclass
class Growth:
    """Submits joiners.

    Attributes:
        host: describes this node as others reach it at an address.
        users: the environment before hpc_train has changed it, which the joiner inherits.
        on_network: called with the allocation when this node, the only one so far, listens on the network.
    """

    run: RunDirectory
    config: Config
    allocation: Allocation
    server: RendezvousServer
    address: ServerAddress
    nodes: JobNodes
    host: Callable[[Allocation], Node]
    users: Mapping[str, str]
    on_network: Callable[[Allocation], None]
    _next: int = field(init=False)
    _on_network: bool = field(init=False)

    def __post_init__(self) -> None:
        self._next = self.allocation.nodes
        self._on_network = self.allocation.nodes > 1

    def submit(self, count: int, present: Collection[str], is_automatic: bool) -> tuple[Joiner, Node]:
        """Submits a joiner of ``count`` nodes; returns it and this node as others reach it.

        Args:
            present: the names of the nodes of the run, which the joiner must not get.
            is_automatic: whether no user has asked for the nodes. Then fewer are enough, too.

        Raises:
            UserError: Slurm refuses it, or this node cannot listen on the network.
        """
        if not self._on_network:
            self._listen()
        first = self._next
        limit = self.nodes.job.limit()
        minutes = "" if limit.limit_s is None else str(max(1, int(limit.limit_s - (limit.run_s or 0.0)) // 60))
        target = f"{self.allocation.launch_id}:{first}"
        nodes = f"1-{count}" if is_automatic and count > 1 else str(count)
        nice = "0" if self.config.elastic.grow != "idle" or not is_automatic else str(NICE)
        failing = NodeFailures(self.run, self.config.elastic.exclude_hours * 3600).failing_nodes()
        words = [str(self.run.path), nodes, target, minutes, ",".join(sorted({*present, *failing})), nice]
        command = [sys.executable, "-m", "hpc_train.launch.joiner", *words]
        done = subprocess.run(command, env=self.users, capture_output=True, text=True, timeout=SUBMIT_S, check=False)
        if done.returncode != 0:
            problem = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"the joiner cannot be submitted: {problem}",
                where="resize",
                fix=f"`resize {self.run.path} nodes=N` with fewer nodes, or again when Slurm accepts a job of "
                f"{counted(count, 'node', 'nodes')}",
            )
        joiner = Joiner(done.stdout.split()[-1], first, count, is_automatic)
        self._next += count
        self.nodes.joiners.append(joiner)
        return joiner, self.host(self.allocation)

    def _listen(self) -> None:
        """Lets the server and later stores listen on the network. Until now this node was the only one."""
        interface = self.config.cluster.interface
        several = replace(self.allocation, nodes=2, address=self.allocation.node_name, listen_address="")
        several, _ = listening_at(meeting_at(several, interface), is_chosen=interface is not None)
        listener = bind(several, f"{several.launch_id}:network")
        address = replace(self.address, host=several.address, port=listener.getsockname()[1])
        self.server.listen(listener)
        address.publish(self.run, several.launch_id)
        self.allocation = replace(several, nodes=1)
        self.on_network(self.allocation)
        self._on_network = True


def guest_of(allocation: Allocation, target: str) -> Allocation:
    """Returns the allocation of a joiner's node as one of the run.

    Args:
        target: the launch of the first job, and the number of the first node of the joiner: ``7.0.0:2``.
    """
    launch, _, first = target.rpartition(":")
    return replace(
        allocation,
        nodes=int(first) + allocation.nodes,
        node_rank=int(first) + allocation.node_rank,
        launch_id=launch,
        address=allocation.node_name,
        listen_address="",
    )
