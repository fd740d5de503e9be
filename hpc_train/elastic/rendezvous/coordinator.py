"""Makes the decisions of the rendezvous server: which nodes take part in the next attempt, when an attempt is over, and
what follows.

The server passes it events with their times and asks it for the next order. It opens no connection, starts no process
and reads no clock, so tests can drive it through any sequence of events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from hpc_train.config.schema import Config
from hpc_train.elastic.decision import (
    ANNOUNCEMENT,
    OVER_BUDGET,
    Ended,
    History,
    RestartDecision,
    WorkerFailure,
    decide,
    is_secondary,
)
from hpc_train.elastic.nodes import HEALTH_CHECK_KEY, TOO_OFTEN, Node, NodeFailures, in_order_of_rank, why_unfit
from hpc_train.elastic.rendezvous.messages import (
    End,
    FailureReport,
    GoOn,
    Leave,
    NodeReport,
    Order,
    SaveStacks,
    Start,
    StopWorkers,
    is_loss,
    primary_cause,
)
from hpc_train.errors import UserError
from hpc_train.layout.resolve import resolve_layout
from hpc_train.machine.network.facts import Machines
from hpc_train.machine.network.rank_binding import refuse_slices_of_same_gpu
from hpc_train.run.exits import OF_DISKS, Action, Exit, Failure, concerns_gpu
from hpc_train.run.requests import ResizeRequest

SECONDARY_WAIT_S = 2.0  # from a secondary failure until the attempt is ended, so that the primary cause can arrive
NODE_LOSS_WAIT_S = 1.0  # from the loss of a node until the decision, since more nodes may be lost with it
END_TIMEOUT_S = 60.0  # an agent that cannot end its workers within this time counts as lost
LOOK_S = 5.0  # between two questions whether another agent has taken the job over
GUESTS_WAIT_S = 60.0  # from the first node of a joiner job until the run grows without the others
MAX_FAILED_STARTS = 2  # failed starts in a row on a node until the job must run elsewhere
LOSSES = frozenset({Failure.NODE_LOST, Failure.KILLED})  # after which other replicas go on (``strategy.local_steps``)
NODE_MAY_BE_TO_BLAME = {  # class of failure -> the number of node failures that it counts as
    **dict.fromkeys((Failure.NODE_LOST, Failure.KILLED, Failure.HANG, Failure.KERNEL), 1),
    Failure.DEVICE: TOO_OFTEN,
}


@dataclass
class Coordinator:
    """Coordinates one start of a job on ``expected`` nodes (spares included); nodes may join until ``join_until``."""

    config: Config
    expected: int
    history: History
    node_failures: NodeFailures
    join_until: float
    refusal: Callable[[], str | None] = lambda: None  # why the run must not restart after any failure
    superseded: Callable[[], str | None] = lambda: None  # why this server must not decide any more, asked after a stall
    taken_over: Callable[[], str | None] = lambda: None  # likewise, asked while nodes are absent
    names: Sequence[str] = ()  # names of all nodes, by node number
    elsewhere: bool = False  # whether a requeue may get other nodes
    saved: Callable[[], bool | None] = lambda: None  # whether the run has a checkpoint; None if that is unknown
    stop: str | None = None  # the signal that asked the run to stop
    resize: ResizeRequest | None = None  # an accepted request that no attempt has fulfilled yet
    present: dict[int, Node] = field(default_factory=dict, init=False)
    unfit: dict[int, Node] = field(default_factory=dict, init=False)  # joined, but cannot take part
    _machines: Machines = field(default_factory=Machines, init=False)
    _verdict: RestartDecision | None = field(default=None, init=False)  # on the job, caused by a single node
    _team: tuple[Node, ...] = field(default=(), init=False)  # nodes of the running attempt, without lost replicas
    _started: Start | None = field(default=None, init=False)  # the running attempt
    _lost: set[int] = field(default_factory=set, init=False)  # replicas without which the attempt goes on
    _ending: set[int] = field(default_factory=set, init=False)  # nodes of lost replicas whose workers must end
    _ending_since: float = field(default=0.0, init=False)
    _considered: set[int] = field(default_factory=set, init=False)  # idle nodes that do not make the attempt larger
    _working: set[int] = field(default_factory=set, init=False)  # nodes of the team that have not reported the end
    _reports: list[NodeReport] = field(default_factory=list, init=False)
    _causes: list[FailureReport] = field(default_factory=list, init=False)
    _look_at: float = field(default=0.0, init=False)  # when taken_over is asked next
    _has_stepped: bool = field(default=False, init=False)  # whether an attempt made progress
    _frozen: set[str] = field(default_factory=set, init=False)  # names of nodes that were lost by doing nothing
    _saved: set[int] = field(default_factory=set, init=False)  # nodes that have saved the stacks of their ranks
    _save_ordered: SaveStacks | None = field(default=None, init=False)  # the newest one
    _end_ordered_at: float | None = field(default=None, init=False)  # time at which End was ordered
    _stop_ordered: bool = field(default=False, init=False)  # whether StopWorkers was ordered
    _size: int = field(init=False)  # the number of nodes that train if all are fit
    _first_guest: int = field(init=False)  # the nodes from this number on belong to joiner jobs
    _numbers: int = field(init=False)  # nodes have smaller numbers
    _released: set[int] = field(default_factory=set, init=False)  # nodes that have been given back
    _newest_joiner: int = field(default=0, init=False)  # the number of its first node
    _retiring: set[int] = field(default_factory=set, init=False)  # lost nodes of joiners, and those of ending ones
    _guests_until: float | None = field(default=None, init=False)  # when the run grows without the nodes not yet here

    def __post_init__(self) -> None:
        self._size = self.expected - self.config.elastic.spares
        self._first_guest = self._numbers = self.expected

    def postpone(self, seconds: float) -> None:
        """Extends all timeouts by ``seconds`` during which this process stalled."""
        self.join_until += seconds
        self._end_ordered_at = None if self._end_ordered_at is None else self._end_ordered_at + seconds
        if seconds > self.config.elastic.heartbeat_timeout_s and (why := self.superseded()) is not None:
            self._verdict = RestartDecision(Action.STOP, why)

    def admits(self, number: int) -> bool:
        """Returns whether the job, or one of its joiners, has or had a node ``number``."""
        return 0 <= number < self._numbers

    def was_released(self, number: int) -> bool:
        """Returns whether the run continues without a node that it had, or could have had."""
        return number in self._released

    def is_guest(self, number: int) -> bool:
        """Returns whether a node belongs to a joiner job."""
        return number >= self._first_guest

    def invite(self, first: int, count: int, host: Node) -> None:
        """Admits the nodes of a joiner job, which are numbered from ``first``.

        Args:
            host: the batch host, as other nodes reach it.
        """
        self._released |= {number for number in range(self._first_guest, first) if number not in self.present}
        self._newest_joiner = first
        self._numbers = first + count
        self.names = [*self.names, *(f"node {number} (not joined)" for number in range(len(self.names), self._numbers))]
        self._guests_until = None
        self.present[0] = replace(host, facts=self._machines.add(host.facts))

    def retire(self, number: int) -> bool:
        """Notes that the joiner job of a node ends; returns whether the node has no workers and may leave at once."""
        self._retiring.add(number)
        if number in self._working:
            return False
        self.present.pop(number, None)
        self._released.add(number)
        return True

    def declines(self, node: Node) -> str | None:
        """Returns why a node cannot train with the others: the run continues without it or, for a node of a joiner job,
        it is unfit, or its hardware differs.
        """
        if node.number in self._released:
            return f"node {node.name} does not join: the run needs fewer nodes"
        host = self.present.get(0)
        if not self.is_guest(node.number) or host is None:
            return None
        if node.unfit is not None:
            self.node_failures.note(node.name, Failure.UNFIT_NODE, TOO_OFTEN)
        if not node.can_train:
            self._released.add(node.number)
            return f"node {node.name} does not join: {node.refusal or why_unfit([node])[0]}"
        hardware = (
            ("workers", lambda node: node.workers),
            ("GPUs", lambda node: sorted({str(gpu.model) for gpu in node.facts.gpus})),
            ("NICs", lambda node: sorted({str(nic.kind) for nic in node.facts.nics})),
        )
        for what, value_of in hardware:
            if value_of(node) != value_of(host):
                self._released.add(node.number)
                values = f"{value_of(node)}, node {host.name} {value_of(host)}"
                return f"node {node.name} does not join: it has the {what} {values}"
        return None

    def joined(self, node: Node) -> None:
        """Notes that an agent has joined and described its node, or why the node cannot take part."""
        if self.is_guest(node.number):
            self.names = [*self.names[: node.number], node.name, *self.names[node.number + 1 :]]
            self._retiring.discard(node.number)  # it was lost, and is here again
            if self._newest_joiner <= node.number < node.job_end:  # its job may have got fewer nodes
                self._retiring |= {*range(node.job_end, self._numbers)}
        if node.refusal is not None:
            self._verdict = RestartDecision(Action.REFUSE, node.refusal)
        elif node.unfit is not None:
            self.unfit[node.number] = node
        else:
            self.present[node.number] = replace(node, facts=self._machines.add(node.facts))

    def left(self, number: int, why: str, now: float, frozen: bool = False) -> None:
        """Notes that the agent of a node is gone. ``frozen`` states that the agent still exists but does nothing, so
        its node is avoided."""
        node = self.present.pop(number, None)
        if node is not None and frozen:
            self._frozen.add(node.name)
        if node is not None and self.is_guest(number):
            self._retiring.add(number)
        if node is not None and number in self._working:
            message = f"node {node.name} is lost: {why}"
            assert self._started is not None
            rank = self._started.nodes.index(node) * node.workers
            self._working.discard(number)
            failure = WorkerFailure(rank, Failure.NODE_LOST, message, message, 0.0)
            self._causes.append(FailureReport(failure, node.name, now))

    def reported(self, number: int, report: NodeReport, now: float) -> None:
        """Notes that the workers of a node have ended; a node without workers has nothing to report."""
        if number not in self._working:
            return
        self._working.discard(number)
        self._reports.append(report)
        if report.failure is not None:
            self._causes.append(FailureReport(report.failure, self.present[number].name, now))

    def request_resize(self, request: ResizeRequest) -> None:
        """Notes that the run is to continue on other nodes; replaces an earlier request, or withdraws it."""
        is_reached = request.nodes == len(self._team) and not self._stop_ordered
        self.resize = None if is_reached else request

    def stacks_saved(self, number: int) -> None:
        """Notes that a node has saved the stacks of its ranks. The first node does so because its ranks hang."""
        self._saved.add(number)

    def quit(self, why: str) -> None:
        """Notes that a user killed the workers of a node without waiting."""
        self._verdict = RestartDecision(Action.FAIL, why)

    def store_lost(self, now: float) -> None:
        message = "the store of the attempt was killed"
        node = self.present.get(0, self._team[0])
        failure = WorkerFailure(0, Failure.COMMUNICATION, message, message, 0.0, -9)
        self._causes.append(FailureReport(failure, node.name, now))

    def cannot_continue(self, outage: str) -> Leave:
        """Returns how the job ends if the server cannot continue: a requeue, except after a user's stop request."""
        why = f"the rendezvous server cannot continue: {outage}"
        if not self.elsewhere:
            why += (
                ". Fix this, then rerun with the same run.name; the run resumes from its last checkpoint, if it has one"
            )
        again = self.stop in (None, ANNOUNCEMENT)
        decision = RestartDecision(Action.REQUEUE if again else Action.FAIL, why)
        return Leave(decision, stop=self.stop, outage=outage)

    def next(self, now: float) -> Order | None:
        """Returns the next order at time ``now``, or None; each order is returned once."""
        if self._verdict is not None:
            return Leave(self._verdict, stop=self.stop)
        if not self._team:
            return self._gather(now)
        if self._saved and (save := SaveStacks(self._working <= self._saved)) != self._save_ordered:
            self._save_ordered = save
            return save
        has_guests = self._numbers > self._first_guest
        if has_guests and self._guests_until is None and any(map(self.is_guest, self._idle())):
            self._guests_until = now + GUESTS_WAIT_S
        if self._change_is_due(now):
            self._stop_ordered = True
            return StopWorkers()
        if self._end_ordered_at is None and self._causes and self._may_go_on():
            order = self._go_on(now)
            if order is not None:
                return order
        elif self._end_ordered_at is None and self._working and self._causes:
            # the attempt cannot continue: its cause is known, or had time to arrive
            causes = self._causes
            known = any(not is_secondary(cause.failure) or cause.failure.exit_code == -9 for cause in causes)
            if known or now - causes[0].noticed > SECONDARY_WAIT_S:
                self._end_ordered_at = now
                return End()
        if self._end_ordered_at is not None and now - self._end_ordered_at > END_TIMEOUT_S:
            for number in tuple(self._working):
                self.left(number, "its agent cannot end its workers", now, frozen=True)
        lost_at = max((cause.noticed for cause in self._causes if is_loss(cause)), default=None)
        if self._working or (lost_at is not None and now - lost_at < NODE_LOSS_WAIT_S):
            return None
        return self._conclude(now)

    def _may_go_on(self) -> bool:
        """Returns whether the replicas that are left can go on: a node is lost, or a worker was killed, and only that
        replica has failed; the first replica, which reports the run, is left; and there are enough nodes."""
        assert self._started is not None
        cause = primary_cause(self._causes)
        if self._started.layout.replicas == 1 or cause is None or cause.failure.failure not in LOSSES:
            return False
        return 0 not in self._failed_replicas() and len(self.present) >= self._fewest_nodes

    def _failed_replicas(self) -> set[int]:
        """Returns the replicas that are lost, those that share a node with them included."""
        assert self._started is not None
        of_nodes = self._replicas_of_nodes()
        lost = set(self._lost)
        failed = [replicas for node, replicas in of_nodes.items() if node.number not in self._working]
        while failed:
            lost.update(*failed)
            failed = [replicas for replicas in of_nodes.values() if replicas & lost and not replicas <= lost]
        return lost

    def _replicas_of_nodes(self) -> dict[Node, set[int]]:
        assert self._started is not None
        layout = self._started.layout
        nodes = self._started.nodes
        workers = min(layout.world_size, *(node.workers for node in nodes))
        size = layout.replica.world_size
        return {
            node: {rank // size for rank in range(position * workers, (position + 1) * workers)}
            for position, node in enumerate(nodes)
        }

    def _nodes_without(self, lost: set[int]) -> list[Node]:
        return [node for node, replicas in self._replicas_of_nodes().items() if not replicas & lost]

    def _go_on(self, now: float) -> Order | None:
        """Returns the order to end the rest of lost replicas, and when it has ended, the order to go on."""
        lost = self._failed_replicas()
        left = self._nodes_without(lost)
        ending = self._working - {node.number for node in left}
        if not ending <= self._ending:
            self._ending = ending
            self._ending_since = now
            return End(tuple(sorted(ending)))
        if ending:
            if now - self._ending_since > END_TIMEOUT_S:
                for number in ending:
                    self.left(number, "its agent cannot end its workers", now, frozen=True)
            return None
        cause = primary_cause(self._causes)
        assert cause is not None
        if now - cause.noticed < NODE_LOSS_WAIT_S and is_loss(cause):
            return None
        nodes = tuple(node.name for node in self._team if node not in left)
        self.node_failures.note(cause.node, cause.failure.failure, NODE_MAY_BE_TO_BLAME[cause.failure.failure])
        self._causes = []
        self._ending = set()
        self._team = tuple(left)
        self._lost = lost
        self._considered = set()
        return GoOn(tuple(sorted(lost)), nodes, cause)

    def _can_refill(self) -> bool:
        """Returns whether sound idle nodes can replace lost replicas."""
        if not self._lost:
            return False
        idle = self._idle()
        if idle <= self._considered:
            return False
        self._considered = idle
        try:
            start = self._choose(only_sound=len(self._team) >= self._fewest_nodes)
        except UserError:
            return False
        return start is not None and len(start.nodes) > len(self._team)

    def _idle(self) -> set[int]:
        return self.present.keys() - {node.number for node in self._team}

    def _change_is_due(self, now: float) -> bool:
        """Returns whether the workers, which all work, must stop now because the nodes of the run change."""
        if self._stop_ordered or self._causes or self.stop is not None or len(self._working) < len(self._team):
            return False
        return bool(self._retiring & self._working) or self._can_resize(now) or self._can_refill()

    def _can_resize(self, now: float) -> bool:
        """Returns whether the run has the nodes for the requested size, or has waited for them long enough."""
        if self.resize is None:
            return False
        if self.resize.nodes <= len(self._team):
            return self.resize.nodes < len(self._team) or self._stop_ordered
        awaited = {*range(self._first_guest, self._numbers)} - self._released - self._retiring
        is_late = self._guests_until is not None and now > self._guests_until
        return bool(awaited & self._idle()) and (is_late or awaited <= {*self.present, *self.unfit})

    def _release(self) -> tuple[tuple[int, str], ...]:
        """Removes the nodes that a requested resize does not need; returns their numbers and names.

        The batch host stays. Nodes of the newest joiner job go first. Of the job, nodes that have failed too often go
        first, then spares, then the nodes of the last ranks.
        """
        released = self._retiring - self._released
        if self.resize is not None and self.resize.nodes < len(self._team):
            failing = self.node_failures.failing_nodes()

            def order(node: Node) -> tuple[bool, bool, bool, int]:
                is_guest = self.is_guest(node.number)
                rank = self._team.index(node) if node in self._team else len(self._team)
                is_failing = node.name in failing and not is_guest
                return is_guest, node.number > 0, is_failing, node.number if is_guest else rank

            size = self.resize.nodes + self.config.elastic.spares
            staying = [node for node in self.present.values() if node.number not in released]
            needed = {node.number for node in sorted(staying, key=order)[:size]}
            released = {*range(self._numbers)} - self._released - needed
            self.expected = min(self.expected, size)
        return self._drop(released)

    def _drop(self, numbers: set[int]) -> tuple[tuple[int, str], ...]:
        for number in numbers:
            self.present.pop(number, None)
            self.unfit.pop(number, None)
        self._released |= numbers
        return tuple((number, self.names[number]) for number in sorted(numbers))

    def _gather(self, now: float) -> Order | None:
        if self.stop is not None:
            return Leave(self._stopped(), stop=self.stop)
        joined = {*self.present, *self.unfit}
        if len(joined) < self.expected and now < self.join_until:
            if now >= self._look_at:
                self._look_at = now + LOOK_S
                if (why := self.taken_over()) is not None:
                    return Leave(RestartDecision(Action.STOP, why))
            return None
        absent = [number for number in range(self.expected) if number not in joined]
        reasons, fixes = why_unfit(self.unfit.values())
        keys = [*dict.fromkeys(node.unfit.key for node in self.unfit.values() if node.unfit is not None)]
        # a job of one node, which fails the site's check, may get another one
        is_only_unhealthy = self.elsewhere and self.expected == 1 and keys == [HEALTH_CHECK_KEY]
        if self.unfit and not self.present and not is_only_unhealthy:
            # a failure that all nodes report is not the fault of one node
            message = str(UserError(reasons, where=", ".join(keys), fix=fixes))
            return Leave(RestartDecision(Action.REFUSE, message), self._unfit_cause(Failure.REFUSED, message, now))
        cause = self._note_absent(absent, now) if absent else None
        if self.unfit:  # exclude nodes that cannot take part while others can
            for node in self.unfit.values():
                self.node_failures.note(node.name, Failure.UNFIT_NODE, TOO_OFTEN)
            cause = self._unfit_cause(Failure.UNFIT_NODE, reasons, now)
        try:
            start = self._choose()
        except UserError as error:
            return Leave(RestartDecision(Action.REFUSE, str(error)))
        if start is not None:
            return self._begin(replace(start, cause=cause))
        if self.unfit and not self.elsewhere:
            return Leave(RestartDecision(Action.FAIL), cause)
        return Leave(RestartDecision(Action.REQUEUE, cause.failure.message if cause else ""), cause)

    def _unfit_cause(self, failure: Failure, message: str, now: float) -> FailureReport:
        first = min(self.unfit)
        rank = first * max((node.workers for node in self.present.values()), default=0)
        return FailureReport(WorkerFailure(rank, failure, message, message, 0.0), self.unfit[first].name, now)

    def _note_absent(self, numbers: Sequence[int], now: float) -> FailureReport:
        """Excludes absent nodes, unless most are absent: then the cause is elsewhere."""
        names = [self.names[number] if self.names else f"node {number}" for number in numbers]
        if 2 * len(numbers) <= self.expected:
            for name in names:
                self.node_failures.note(name, Failure.NODE_LOST, TOO_OFTEN)
        message = f"no agent joined from {', '.join(names)} in time (elastic.join_timeout_s)"
        rank = numbers[0] * max((node.workers for node in self.present.values()), default=0)
        return FailureReport(WorkerFailure(rank, Failure.NODE_LOST, message, message, 0.0), names[0], now)

    def _conclude(self, now: float) -> Order:
        cause = primary_cause(self._causes)
        failure = cause.failure.failure if cause else None
        seen_on: set[str] = set()  # nodes on which a GPU error of this class recently ended an attempt of the run
        if failure in (Failure.DEVICE, Failure.KERNEL):
            seen_on = {line["node"] for line in self.node_failures.recent() if line["class"] == failure}
        decision = self._decide(cause, seen_on)
        changes = self._stop_ordered or bool(self._retiring - self._released)
        if decision.action is Action.STOP and self.stop is None and changes:
            decision = RestartDecision(Action.RESTART)
        if decision.action is Action.STOP:
            decision = self._stopped()
            cause = None
        if decision.action not in (Action.RESTART, Action.REPLACE):
            return Leave(decision, cause, self.stop)
        if (refusal := self.refusal()) is not None:
            return Leave(RestartDecision(Action.GIVE_UP, refusal), cause, self.stop)

        unfit = failure is Failure.UNFIT_NODE
        if cause is not None and self.elsewhere:
            # a failure after some steps would repeat on any node
            at_starts = not self._has_stepped and self.history.without_progress >= MAX_FAILED_STARTS
            unfit |= at_starts and cause.node in self.node_failures.failing_nodes()
            # a device error gets one restart on the same GPUs, in case it is transient
            unfit |= failure is Failure.DEVICE and cause.node in seen_on
        why = "too few nodes are fit"
        if not unfit:
            why = f"{len(self.present)} of {self.expected} nodes left"
            if cause is not None and failure is Failure.NODE_LOST:
                why = f"{cause.failure.message}; {why}"
        return self._restart(now, cause, why, only_sound=unfit)

    def _restart(self, now: float, cause: FailureReport | None, why: str, only_sound: bool) -> Order:
        """Returns the next attempt, on other nodes if a resize is due; a requeue if too few are left (``why``)."""
        resize = self.resize if self._can_resize(now) else None
        released = self._release()
        if resize is not None:
            self._size = resize.nodes
            self._guests_until = None
        try:
            start = self._choose(only_sound=only_sound)
        except UserError as error:
            start = None
            why = str(error)
        if start is None:
            return Leave(RestartDecision(Action.REQUEUE, why), cause)
        if resize is not None:
            in_use = {node.number for node in start.nodes}
            released += self._drop({*filter(self.is_guest, self.present)} - in_use)  # too many for a layout
            if resize.nodes <= max(len(in_use), len(self._team)):
                self.resize = None  # otherwise some nodes of a joiner may still come
        reached = max((report.step for report in self._reports), default=0)
        change = replace(start, before=self._team, cause=cause, reached=reached, resize=resize, released=released)
        return self._begin(replace(change, guests=sum(map(self.is_guest, self.present))))

    def _decide(self, cause: FailureReport | None, seen_on: set[str]) -> RestartDecision:
        """Returns the decision on the attempt that ended, which becomes part of the history."""
        stopped = any(report.exit is Exit.STOPPED for report in self._reports)
        step = max((report.step for report in self._reports), default=0)
        ended = Ended(Exit.STOPPED if stopped else Exit.DONE, None, step, self.stop)
        if cause is not None:
            failure = cause.failure.failure
            message = cause.failure.message
            ended = Ended(
                Exit.FAILED,
                failure,
                step,
                self.stop,
                first=failure is Failure.KERNEL and not seen_on,
                gpu_memory=failure is Failure.OUT_OF_MEMORY and concerns_gpu(message),
                message=message,
                saved=self.saved() if failure in OF_DISKS else None,
            )
        decision = decide(self.history, ended)
        before = self.history
        self.history = before.after(step, ended.gpu_memory)
        if cause is None:  # an attempt that a resize ends before its first step is not a failed start
            self.history = replace(self.history, without_progress=before.without_progress)
        self._has_stepped |= self.history.furthest > before.furthest
        if cause is None:
            return decision
        return self._blame(cause, decision, sorted(seen_on - {cause.node}))

    def _blame(self, cause: FailureReport, decision: RestartDecision, elsewhere: Sequence[str]) -> RestartDecision:
        """Counts a failure against its node, unless the code caused it; returns the decision.

        A kernel error is the node's fault until it ends an attempt on another node, so the job tries another node if it
        has one. ``elsewhere`` lists the other nodes that failed in the same way.
        """
        failure = cause.failure.failure
        is_first = failure is Failure.KERNEL and decision.action is Action.FAIL and not elsewhere
        if is_first and self.stop is None:
            failing = self.node_failures.failing_nodes() | {cause.node}
            if sum(node.name not in failing for node in self.present.values()) >= self._fewest_nodes:
                decision = RestartDecision(Action.REPLACE)
        is_codes = failure is Failure.KERNEL and (bool(elsewhere) or decision.action is Action.FAIL)
        if failure in NODE_MAY_BE_TO_BLAME and not is_codes:
            frozen = failure is Failure.NODE_LOST and cause.node in self._frozen
            self.node_failures.note(cause.node, failure, TOO_OFTEN if frozen else NODE_MAY_BE_TO_BLAME[failure])
        if is_codes and elsewhere and decision.action is Action.FAIL:
            where = f"the same error ended an attempt on {', '.join(elsewhere)}, so no GPU causes it"
            return replace(decision, reason=f"{where}: {decision.reason}")
        return decision

    @property
    def _fewest_nodes(self) -> int:
        size = min(self.expected - self.config.elastic.spares, self._size)  # the nodes of joiner jobs may go
        return min(self.config.elastic.min_nodes or size, size)

    def _stopped(self) -> RestartDecision:
        """Returns the decision for a stop on request; reaching the run's own GPU-hour limit is final."""
        if self.stop != OVER_BUDGET:
            return RestartDecision(Action.STOP)
        return RestartDecision(Action.GIVE_UP, self.refusal() or OVER_BUDGET)

    def _begin(self, start: Start) -> Start:
        self._team = start.nodes
        self._started = start
        self._lost = set()
        self._ending = set()
        self._working = {node.number for node in start.nodes}
        self._reports = []
        self._causes = []
        self._saved = set()
        self._save_ordered = None
        self._end_ordered_at = None
        self._stop_ordered = False
        return start

    def _choose(self, only_sound: bool = False) -> Start | None:
        """Chooses the nodes of the next attempt: as many as the run requests, or fewer if it is elastic and nodes are
        missing.

        Returns None if too few nodes are present. Nodes that failed too often are used only if there are no others, and
        never with ``only_sound``.

        Raises:
            UserError: the run has no valid layout on them.
        """
        size = self._size
        fewest = self._fewest_nodes
        failing = self.node_failures.failing_nodes()
        nodes = sorted(self.present.values(), key=lambda node: (node.name in failing, node.number))
        sound = sum(node.name not in failing for node in nodes)
        most = min(size, sound if sound >= fewest or only_sound else len(nodes))
        workers = [*accumulate((node.workers for node in nodes), min)]  # of the first nodes
        refusal: UserError | None = None
        for count in range(most, fewest - 1, -1):
            try:
                sizes = [node.gpu_memory for node in nodes[:count] if node.gpu_memory is not None]
                memory = min(sizes) if len(sizes) == count else None  # None: unknown
                layout = resolve_layout(self.config, count, workers[count - 1], memory)
                chosen = in_order_of_rank(nodes[:count])
                for node in chosen:
                    refuse_slices_of_same_gpu(node.facts, min(workers[count - 1], layout.world_size))
                return Start(chosen, layout)
            except UserError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal
        return None
