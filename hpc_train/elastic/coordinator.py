"""Who takes part in the next attempt, when an attempt is over, and what follows: the hub's head, without sockets.

It is told what happens, with the time, and asked for the next order. It opens no connection, starts no process and
looks at no clock, so that a test can lead it through any course of events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hpc_train.cluster.gpus import KEY
from hpc_train.config.schema import Config
from hpc_train.elastic.culprit import find_culprit
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
from hpc_train.elastic.nodes import TOO_OFTEN, Node, NodeFailures, in_order_of_rank, why_unfit
from hpc_train.errors import UserError
from hpc_train.fabric.rank_binding import refuse_slices_of_one_gpu
from hpc_train.plan.layout import Layout, resolve_layout
from hpc_train.run.exits import Action, Exit, Failure

ECHO_S = 2.0  # from the echo of a failure until the attempt is ended: time for the true cause to arrive
SETTLE_S = 1.0  # from the loss of a node until it is decided: others may go down with it
UNANSWERED_S = 60.0  # an agent that cannot end its workers is as good as lost
FRUITLESS = 2  # attempts in a row on a node that fails at every start, until the job is to run elsewhere
NODE_MAY_BE_TO_BLAME = {  # with as how many failures of the node it counts
    **dict.fromkeys((Failure.NODE_LOST, Failure.KILLED, Failure.EXITED, Failure.HANG, Failure.KERNEL), 1),
    Failure.DEVICE: TOO_OFTEN,
}


@dataclass(frozen=True)
class NodeReport:
    """What an agent says of the end of an attempt on its node; ``step``: the furthest of its workers."""

    exit: Exit
    failure: WorkerFailure | None
    step: int


@dataclass(frozen=True)
class FailureReport:
    """Why an attempt ended; ``noticed`` on the coordinator's clock."""

    failure: WorkerFailure
    node: str
    noticed: float


@dataclass(frozen=True)
class Start:
    """The next attempt, on ``nodes`` in the order of rank; ``cause`` ended the one before, which had ``before``."""

    nodes: tuple[Node, ...]
    layout: Layout
    before: tuple[Node, ...] = ()
    cause: FailureReport | None = None


@dataclass(frozen=True)
class End:
    """The attempt cannot go on: its workers are to be killed. ``hang``: what they are at is to be kept first."""

    hang: bool = False


@dataclass(frozen=True)
class Leave:
    """The job has nothing more to do. ``stop``: the signal that asked the run to stop."""

    decision: RestartDecision
    cause: FailureReport | None = None
    stop: str | None = None


Order = Start | End | Leave


@dataclass
class Coordinator:
    """Of one start of a job on ``expected`` nodes, spares among them; the last of them has until ``join_until``."""

    config: Config
    expected: int
    history: History
    node_failures: NodeFailures
    join_until: float
    refusal: Callable[[], str | None] = lambda: None  # why the run is not to be restarted, whatever failed
    names: Sequence[str] = ()  # of all nodes, by their number
    elsewhere: bool = False  # whether a requeue may bring other nodes
    stop: str | None = None  # the signal that asked the run to stop
    present: dict[int, Node] = field(default_factory=dict, init=False)
    unfit: dict[int, Node] = field(default_factory=dict, init=False)  # have joined, and cannot take part
    _verdict: RestartDecision | None = field(default=None, init=False)  # on the whole job, by a single node
    _team: tuple[Node, ...] = field(default=(), init=False)  # of the attempt that runs
    _working: set[int] = field(default_factory=set, init=False)  # those of the team that have not reported its end
    _reports: list[NodeReport] = field(default_factory=list, init=False)
    _causes: list[FailureReport] = field(default_factory=list, init=False)
    _has_stepped: bool = field(default=False, init=False)  # whether an attempt has got further than those before
    _told_at: float | None = field(default=None, init=False)  # when the order to end was given

    def postpone(self, seconds: float) -> None:
        """Nobody here did anything for so long: the time that was given to others does not count it."""
        self.join_until += seconds
        self._told_at = None if self._told_at is None else self._told_at + seconds

    def joined(self, node: Node) -> None:
        """The agent of a node has said what the node brings in, or why it cannot take part."""
        if node.refusal is not None:
            self._verdict = RestartDecision(Action.REFUSE, node.refusal)
        elif node.unfit is not None:
            self.unfit[node.number] = node
        else:
            self.present[node.number] = node

    def left(self, number: int, why: str, now: float) -> None:
        """The agent of a node is gone."""
        node = self.present.pop(number, None)
        if node is not None and number in self._working:
            message = f"node {node.name} is lost: {why}"
            rank = self._team.index(node) * node.workers
            self._working.discard(number)
            self._fail(WorkerFailure(rank, Failure.NODE_LOST, message, message, 0.0), node, now)

    def reported(self, number: int, report: NodeReport, now: float) -> None:
        """The workers of a node have ended."""
        self._working.discard(number)
        self._reports.append(report)
        if report.failure is not None:
            self._fail(report.failure, self.present[number], now)

    def quit(self, why: str) -> None:
        """The workers of a node were killed by somebody who does not want to wait."""
        self._verdict = RestartDecision(Action.FAIL, why)

    def store_lost(self, now: float) -> None:
        message = "the store of the attempt was killed"
        node = self.present.get(0, self._team[0])
        self._fail(WorkerFailure(0, Failure.COMMUNICATION, message, message, 0.0, -9), node, now)

    def unable(self, why: str) -> Leave:
        """The hub cannot go on. A job may where it starts again; what somebody has stopped is not to."""
        why = f"the hub cannot go on: {why}"
        if self.elsewhere and self.stop in (None, ANNOUNCEMENT):
            return Leave(RestartDecision(Action.REQUEUE, why), stop=self.stop)
        advice = "the same command with run.name goes on from the last checkpoint"
        return Leave(RestartDecision(Action.FAIL, f"{why}. When that is fixed, {advice}"), stop=self.stop)

    def next(self, now: float) -> Order | None:
        """What is to be done now; each order is given once."""
        if self._verdict is not None:
            return Leave(self._verdict, stop=self.stop)
        if not self._team:
            return self._gather(now)
        if self._told_at is None and self._is_lost(now):
            self._told_at = now
            return End(any(cause.failure.failure is Failure.HANG for cause in self._causes))
        if self._told_at is not None and now - self._told_at > UNANSWERED_S:
            for number in tuple(self._working):
                self.left(number, "its agent cannot end its workers", now)
        lost_at = max((cause.noticed for cause in self._causes if _is_loss(cause)), default=None)
        if self._working or (lost_at is not None and now - lost_at < SETTLE_S):
            return None
        return self._conclude()

    def _fail(self, failure: WorkerFailure, node: Node, now: float) -> None:
        self._causes.append(FailureReport(failure, node.name, now))

    def _is_lost(self, now: float) -> bool:
        """Whether the attempt is beyond help, and why is known or has had the time to be."""
        if not self._working or not self._causes:
            return False
        known = any(not is_secondary(cause.failure) or cause.failure.exit_code == -9 for cause in self._causes)
        return known or now - self._causes[0].noticed > ECHO_S

    def _gather(self, now: float) -> Order | None:
        if self.stop is not None:
            return Leave(self._stopped(), stop=self.stop)
        absent = [number for number in range(self.expected) if number not in {*self.present, *self.unfit}]
        if absent and now < self.join_until:
            return None
        if self.unfit and not self.present:
            return self._refuse(now)
        cause = self._note_absent(absent, now) if absent else None
        if self.unfit:
            cause = self._note_unfit(now)
        try:
            start = self._choose()
        except UserError as error:
            return Leave(RestartDecision(Action.REFUSE, str(error)))
        if start is not None:
            return self._begin(replace(start, cause=cause))
        nowhere = self.unfit and not self.elsewhere
        reason = cause.failure.message if cause else ""
        return Leave(RestartDecision(Action.FAIL) if nowhere else RestartDecision(Action.REQUEUE, reason), cause)

    def _refuse(self, now: float) -> Leave:
        """Refuses the job: a cause that all nodes report is not the fault of a node."""
        reasons, fixes = why_unfit(self.unfit.values())
        message = str(UserError(reasons, where=KEY, fix=fixes))
        return Leave(RestartDecision(Action.REFUSE, message), self._unfit_cause(Failure.REFUSED, message, now))

    def _note_unfit(self, now: float) -> FailureReport:
        """Nodes that cannot use their GPUs, while others can, are avoided from now on."""
        for node in self.unfit.values():
            self.node_failures.note(node.name, Failure.UNFIT_NODE, TOO_OFTEN)
        reasons, _ = why_unfit(self.unfit.values())
        return self._unfit_cause(Failure.UNFIT_NODE, reasons, now)

    def _unfit_cause(self, failure: Failure, message: str, now: float) -> FailureReport:
        first = min(self.unfit)
        rank = first * max((node.workers for node in self.present.values()), default=0)
        return FailureReport(WorkerFailure(rank, failure, message, message, 0.0), self.unfit[first].name, now)

    def _note_absent(self, numbers: Sequence[int], now: float) -> FailureReport:
        """Nodes whose agents have not come are avoided from now on, unless it is most of them: then it is not they."""
        names = [self.names[number] if self.names else f"node {number}" for number in numbers]
        if 2 * len(numbers) <= self.expected:
            for name in names:
                self.node_failures.note(name, Failure.NODE_LOST, TOO_OFTEN)
        message = f"no agent came from {', '.join(names)} in time (elastic.join_timeout_s)"
        rank = numbers[0] * max((node.workers for node in self.present.values()), default=0)
        return FailureReport(WorkerFailure(rank, Failure.NODE_LOST, message, message, 0.0), names[0], now)

    def _conclude(self) -> Order:
        cause = root(self._causes)
        stopped = any(report.exit is Exit.STOPPED for report in self._reports)
        exit_code = Exit.FAILED if cause else Exit.STOPPED if stopped else Exit.DONE
        step = max((report.step for report in self._reports), default=0)
        failure = cause.failure.failure if cause else None
        seen_on = self._seen_on(failure)
        ended = Ended(exit_code, failure, step, self.stop, first=failure is Failure.KERNEL and not seen_on)
        decision, before, self.history = decide(self.history, ended), self.history, self.history.after(step)
        self._has_stepped |= self.history.furthest > before.furthest
        if cause is not None:
            elsewhere = bool(seen_on - {cause.node})
            self._note(cause, is_codes=failure is Failure.KERNEL and (elsewhere or decision.action is Action.FAIL))
        if decision.action is Action.STOP:
            decision = self._stopped()
        if decision.action not in (Action.RESTART, Action.REPLACE):
            return Leave(decision, cause, self.stop)
        if (refusal := self.refusal()) is not None:
            return Leave(RestartDecision(Action.GIVE_UP, refusal), cause, self.stop)
        unfit = failure is Failure.UNFIT_NODE or self._fails_at_every_start(cause)
        # one restart on the same GPUs, for an error that does not last
        unfit |= failure is Failure.DEVICE and self.elsewhere and cause is not None and cause.node in seen_on
        try:
            start = self._choose(only_sound=unfit)
        except UserError as error:
            start, why = None, str(error)
        else:
            why = "too few nodes are fit" if unfit else self._who_is_left(cause)
        if start is None:
            return Leave(RestartDecision(Action.REQUEUE, why), cause)
        return self._begin(replace(start, before=self._team, cause=cause))

    def _seen_on(self, failure: Failure | None) -> set[str]:
        """The nodes where an error of a GPU of this class has ended an attempt of the run recent."""
        if failure not in (Failure.DEVICE, Failure.KERNEL):
            return set()
        return {line["node"] for line in self.node_failures.recent() if line["class"] == failure}

    def _note(self, cause: FailureReport, is_codes: bool) -> None:
        """A failure counts against its node, unless it is the code's, as an error in a kernel on different nodes."""
        failure = cause.failure.failure
        if failure in NODE_MAY_BE_TO_BLAME and not is_codes:
            self.node_failures.note(cause.node, failure, NODE_MAY_BE_TO_BLAME[failure])

    def _who_is_left(self, cause: FailureReport | None) -> str:
        left = f"{len(self.present)} of {self.expected} nodes left"
        if cause is None or cause.failure.failure is not Failure.NODE_LOST:
            return left
        return f"{cause.failure.message}; {left}"

    def _stopped(self) -> RestartDecision:
        """What a stop on request is: that by the run's own ceiling is for good."""
        if self.stop != OVER_BUDGET:
            return RestartDecision(Action.STOP)
        return RestartDecision(Action.GIVE_UP, self.refusal() or OVER_BUDGET)

    def _begin(self, start: Start) -> Start:
        self._team = start.nodes
        self._working = {node.number for node in start.nodes}
        self._reports, self._causes, self._told_at = [], [], None
        return start

    def _fails_at_every_start(self, cause: FailureReport | None) -> bool:
        """Whether a requeue is to bring another node. What fails after some steps fails the same way elsewhere."""
        if not self.elsewhere or cause is None or self._has_stepped or self.history.fruitless < FRUITLESS:
            return False
        return cause.node in self.node_failures.failing_nodes()

    def _choose(self, only_sound: bool = False) -> Start | None:
        """The nodes of the next attempt: as many as the run asks for, fewer where it is elastic and they are not there.

        None: too few are there. Nodes that have failed too often are taken where there are no others, unless
        ``only_sound``.

        Raises:
            UserError: the run cannot be laid out on them.
        """
        size = self.expected - self.config.elastic.spares
        fewest = min(self.config.elastic.min_nodes or size, size)
        failing = self.node_failures.failing_nodes()
        nodes = sorted(self.present.values(), key=lambda node: (node.name in failing, node.number))
        sound = sum(node.name not in failing for node in nodes)
        most = min(size, sound if sound >= fewest or only_sound else len(nodes))
        refusal: UserError | None = None
        for count in range(most, fewest - 1, -1):
            chosen = in_order_of_rank(nodes[:count])
            try:
                workers = min(node.workers for node in chosen)
                layout = resolve_layout(self.config, count, workers)
                for node in chosen:
                    refuse_slices_of_one_gpu(node.facts, min(workers, layout.world_size))
                return Start(chosen, layout)
            except UserError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal
        return None


def root(causes: Sequence[FailureReport]) -> FailureReport | None:
    """A lost node comes before all: whatever failed, the attempt could not have gone on. Of a hang, all nodes' word."""
    if len(causes) > 1 and all(cause.failure.states for cause in causes):
        hang = find_culprit([cause.failure for cause in causes])
        return next(replace(cause, failure=hang) for cause in causes if cause.failure.states == hang.states)
    return min(
        causes, key=lambda cause: (not _is_loss(cause), is_secondary(cause.failure), cause.noticed), default=None
    )


def _is_loss(cause: FailureReport) -> bool:
    return cause.failure.failure is Failure.NODE_LOST
