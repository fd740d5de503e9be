"""Who takes part in the next attempt, led through courses of events without sockets or clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.schema import BatchConfig, ClusterConfig, Config, ElasticConfig, StrategyConfig
from hpc_train.elastic.decision import OVER_BUDGET, History, RestartDecision, WorkerFailure
from hpc_train.elastic.nodes import Node, NodeFailures, Unfit, check_health
from hpc_train.elastic.rendezvous.coordinator import (
    END_TIMEOUT_S,
    GUESTS_WAIT_S,
    LOOK_S,
    NODE_LOSS_WAIT_S,
    SECONDARY_WAIT_S,
    Coordinator,
)
from hpc_train.elastic.rendezvous.messages import End, GoOn, Leave, NodeReport, SaveStacks, Start, StopWorkers
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Action, Exit, Failure
from hpc_train.run.requests import ResizeRequest
from tests.elastic.conftest import TINY

JOIN_UNTIL = 100.0
DONE = NodeReport(Exit.DONE, None, 9)
NO_DRIVER = Unfit("4 are allocated to the step, and the process sees none: no driver", "cluster.exclude=NODE")
UNHEALTHY = Unfit("Xid 79 on GPU 3", "cluster.exclude=NODE", "cluster.health_check")


def failed(failure: Failure, step: int = 9, rank: int = 0, message: str = "no") -> NodeReport:
    return NodeReport(Exit.FAILED, WorkerFailure(rank, failure, message, "no", 0.0), step)


class Course:
    """A job of ``nodes`` nodes with two workers each; the time goes on by itself as far as orders ask for it."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        joined: int | None = None,
        local: Mapping[str, Any] | None = None,
        **elastic: Any,
    ) -> None:
        run = RunDirectory(folder)
        run.create()
        config = Config(
            cluster=ClusterConfig(gpus_per_node=0, cpu_workers=2),
            strategy=StrategyConfig(name="dp", dp="fill", **local or {}),
            model=TINY,
            batch=BatchConfig(global_size=4096),
            elastic=ElasticConfig(**elastic),
        )
        names = [f"n{number}" for number in range(nodes)]
        self.head = Coordinator(config, nodes, History(0), NodeFailures(run, 3600), JOIN_UNTIL, names=names)
        self.now = 0.0
        for number in range(nodes if joined is None else joined):
            self.join(number)

    def join(self, number: int) -> None:
        self.head.joined(Node(number, f"n{number}", f"n{number}", None, 0, 2))

    def join_unfit(self, *numbers: int, unfit: Unfit = NO_DRIVER) -> None:
        for number in numbers:
            node = Node(number, f"n{number}", f"n{number}", None, 0, 0, unfit=unfit)
            self.head.joined(Node.from_json(node.to_json()))

    def lose(self, *numbers: int) -> None:
        for number in numbers:
            self.head.left(number, "gone", self.now)

    def report(self, report: NodeReport, *numbers: int) -> None:
        for number in numbers:
            self.head.reported(number, report, self.now)

    def next(self, after: float = 0.0) -> Any:
        self.now += after
        return self.head.next(self.now)

    def started(self, after: float = 0.0) -> list[int]:
        """The numbers of the nodes of the next attempt, in the order of rank."""
        order = self.next(after)
        assert isinstance(order, Start), order
        return [node.number for node in order.nodes]


def action(order: Any) -> Action:
    assert isinstance(order, Leave), order
    return order.decision.action


def test_an_attempt_begins_when_all_have_joined_and_ends_when_all_are_done(tmp_path: Path) -> None:
    course = Course(tmp_path, 3, joined=2)
    assert course.next() is None
    course.join(2)
    assert course.started() == [0, 1, 2]
    course.report(DONE, 0, 1)
    assert course.next() is None
    course.report(DONE, 2)
    assert action(course.next()) is Action.FINISH


def test_a_failure_ends_the_attempt_everywhere_and_the_same_nodes_start_again(tmp_path: Path) -> None:
    course = Course(tmp_path, 3)
    course.started()
    course.report(failed(Failure.KILLED), 1)
    assert isinstance(course.next(), End)
    assert course.next() is None, "the order is given once, and the others have not answered"
    course.report(NodeReport(Exit.FAILED, None, 9), 0, 2)
    assert course.started() == [0, 1, 2]


def test_a_node_that_a_preflight_names_is_left_out_or_the_job_asks_for_another(tmp_path: Path) -> None:
    network, device = ("slow_node", {"partners": ["n0", "n2"]}), ("slow_gpu", {"gpu": "GPU-7"})
    tcp = ("unfit_node", {"reason": "tcp"})
    cases = (("spare", 1, network), ("gpu", 1, device), ("tcp", 1, tcp), ("none", 0, network))
    for name, spares, (event, facts) in cases:
        course = Course(tmp_path / name, 3 + spares, spares=spares)
        assert course.started() == [0, 1, 2]
        events = EventLog.open(RunDirectory(tmp_path / name), "rank-0000", 0, 0)
        events.write(event, node="n1", **facts)
        course.report(failed(Failure.UNFIT_NODE, step=0), 0, 1, 2)
        if spares:
            assert course.started() == [0, 2, 3]
        else:
            assert action(course.next()) is Action.REQUEUE


def test_gpus_that_no_node_can_use_refuse_the_job(tmp_path: Path) -> None:
    course = Course(tmp_path, 2, joined=0, min_nodes=1)
    course.head.elsewhere = True
    course.join_unfit(1)
    assert course.next() is None, "the other node may be able to"
    course.join_unfit(0)
    order = course.next()
    assert action(order) is Action.REFUSE
    assert order.decision.reason.splitlines() == [
        "nodes n0, n1 cannot use their GPUs: 4 are allocated to the step, and the process sees none: no driver",
        "  set in: cluster.gpus_per_node",
        "  fix:    cluster.exclude=NODE",
    ]
    assert order.cause.failure.failure is Failure.REFUSED
    assert course.head.node_failures.failing_nodes() == frozenset(), "it is not the nodes"
    late = Course(tmp_path / "late", 2, joined=0)
    late.join_unfit(0)
    assert action(late.next(JOIN_UNTIL + 1)) is Action.REFUSE, "all that have come report it"


@pytest.mark.parametrize(
    ("unfit", "message"),
    [
        (NO_DRIVER, "node n1 cannot use its GPUs: 4 are allocated to the step, and the process sees none: no driver"),
        (UNHEALTHY, "the health check of node n1 failed: Xid 79 on GPU 3"),
    ],
)
@pytest.mark.parametrize(
    ("elastic", "elsewhere", "expected"),
    [
        ({"spares": 1}, True, [0, 2]),
        ({"min_nodes": 2}, True, [0, 2]),
        ({}, True, Action.REQUEUE),
        ({}, False, Action.FAIL),
    ],
)
def test_an_unfit_node_is_done_without(
    tmp_path: Path, elastic: dict[str, int], elsewhere: bool, expected: Any, unfit: Unfit, message: str
) -> None:
    course = Course(tmp_path, 3, joined=0, **elastic)
    course.head.elsewhere = elsewhere
    course.join(0)
    course.join_unfit(1, unfit=unfit)
    course.join(2)
    order = course.next()
    assert course.head.node_failures.failing_nodes() == {"n1"}, "a requeue leaves it out"
    assert (order.cause.node, order.cause.failure.failure) == ("n1", Failure.UNFIT_NODE)
    assert order.cause.failure.message == message
    found = [node.number for node in order.nodes] if isinstance(order, Start) else action(order)
    assert found == expected


def test_the_only_node_of_a_job_that_fails_the_sites_check_is_replaced(tmp_path: Path) -> None:
    course = Course(tmp_path / "job", 1, joined=0)
    course.head.elsewhere = True
    course.join_unfit(0, unfit=UNHEALTHY)
    assert action(course.next()) is Action.REQUEUE
    assert course.head.node_failures.failing_nodes() == {"n0"}
    for folder, nodes, elsewhere in (("foreground", 1, False), ("all", 2, True)):
        course = Course(tmp_path / folder, nodes, joined=0)
        course.head.elsewhere = elsewhere
        course.join_unfit(*range(nodes), unfit=UNHEALTHY)
        order = course.next()
        assert action(order) is Action.REFUSE and "set in: cluster.health_check" in order.decision.reason


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("true", None),
        ("test -d / && echo fine", None),
        ("echo looking; echo 'Xid 79 on GPU 3' >&2; exit 3", "Xid 79 on GPU 3"),
        ("exit 4", "exit code 4"),
        ("sleep 60 & sleep 60", "it did not end within 0.2 s (cluster.health_check_timeout_s)"),
    ],
)
def test_the_sites_check(command: str, reason: str | None) -> None:
    limit = 0.2 if "sleep" in command else 60.0
    found = check_health(ClusterConfig(health_check=command, health_check_timeout_s=limit))
    assert (found and found.reason) == reason
    assert found is None or (found.key == "cluster.health_check" and command in found.fix)


def test_a_check_that_does_not_exist_is_refused() -> None:
    assert check_health(ClusterConfig()) is None
    with pytest.raises(UserError, match="no-such-check: command not found") as refused:
        check_health(ClusterConfig(health_check="no-such-check"))
    assert refused.value.where == "cluster.health_check"


def test_fewer_nodes_go_on_with_the_layout_that_was_frozen_for_them(tmp_path: Path) -> None:
    course = Course(tmp_path, 4, min_nodes=1)
    layouts = {"3": {"strategy": {"data_parallel": "zero2"}}, "2": None, "1": {"strategy": {"pp": 2}}}
    strategy = StrategyConfig(name="auto", dp="fill", for_nodes=layouts)
    course.head.config = replace(course.head.config, strategy=strategy)
    assert course.started() == [0, 1, 2, 3]
    course.lose(3)
    assert isinstance(course.next(), End)
    course.report(failed(Failure.COMMUNICATION), 0, 1, 2)
    assert course.next() is None
    order = course.next(NODE_LOSS_WAIT_S)
    assert len(order.nodes) == 3 and order.layout.data_parallel == "zero2"
    course.lose(2)
    assert isinstance(course.next(), End)
    course.report(failed(Failure.COMMUNICATION, step=20), 0, 1)
    assert course.next() is None
    order = course.next(NODE_LOSS_WAIT_S)
    assert len(order.nodes) == 1, "no layout fits two nodes"
    assert (order.layout.dp, order.layout.pp, order.layout.data_parallel) == (1, 2, "ddp")


def test_a_mistake_in_the_config_is_refused_whatever_the_other_nodes_say(tmp_path: Path) -> None:
    course = Course(tmp_path, 3, joined=2, min_nodes=1)
    course.head.joined(Node(2, "n2", "n2", None, 0, 0, refusal="8 GPUs per node are asked for"))
    order = course.next()
    assert (action(order), order.decision.reason) == (Action.REFUSE, "8 GPUs per node are asked for")


def test_before_ranks_that_hang_are_killed_all_nodes_save_their_stacks(tmp_path: Path) -> None:
    course = Course(tmp_path, 3)
    course.started()
    course.head.stacks_saved(1)  # its ranks hang
    assert course.next() == SaveStacks(done=False)
    assert course.next() is None
    course.head.stacks_saved(0)
    assert course.next() is None
    course.lose(2)  # it saves nothing any more
    assert [course.next(), course.next()] == [SaveStacks(done=True), End()]
    course.report(failed(Failure.HANG), 0, 1)
    course.join(2)
    assert course.started(NODE_LOSS_WAIT_S) == [0, 1, 2]
    assert course.next() is None, "nothing hangs in the new attempt"


def test_an_echo_waits_for_its_cause(tmp_path: Path) -> None:
    course = Course(tmp_path, 3)
    course.started()
    course.report(failed(Failure.COMMUNICATION), 0)
    assert course.next() is None
    course.report(failed(Failure.USER_ERROR, step=0, rank=5), 2)
    assert isinstance(course.next(), End)
    course.report(failed(Failure.COMMUNICATION), 1)
    cause = course.next().cause
    assert (cause.node, cause.failure.rank) == ("n2", 5)
    course = Course(tmp_path / "alone", 2)
    course.started()
    course.report(failed(Failure.COMMUNICATION), 0)
    assert isinstance(course.next(SECONDARY_WAIT_S + 0.1), End), "no cause has come"


def test_a_spare_takes_over_and_then_fewer_nodes_go_on(tmp_path: Path) -> None:
    course = Course(tmp_path, 4, spares=1, min_nodes=2)
    assert course.started() == [0, 1, 2], "the last is the spare"
    course.lose(1)
    assert isinstance(course.next(), End)
    course.report(failed(Failure.COMMUNICATION), 0, 2)
    assert course.next() is None, "others may go down with it"
    assert course.started(NODE_LOSS_WAIT_S) == [0, 2, 3]
    course.lose(3)
    course.next()
    course.report(failed(Failure.COMMUNICATION, step=20), 0, 2)
    assert course.started(NODE_LOSS_WAIT_S) == [0, 2]
    course.lose(2)
    course.next()
    course.report(failed(Failure.COMMUNICATION, step=30), 0)
    assert action(course.next(NODE_LOSS_WAIT_S)) is Action.REQUEUE, "fewer than elastic.min_nodes"


def resized(course: Course, nodes: int) -> None:
    course.head.request_resize(ResizeRequest(nodes, "user", 0.0))


def stopped(course: Course, *numbers: int, step: int = 9) -> None:
    course.report(NodeReport(Exit.STOPPED, None, step), *numbers)


def test_a_run_shrinks_on_request_and_gives_nodes_back(tmp_path: Path) -> None:
    course = Course(tmp_path, 4)
    course.started()
    resized(course, 3)
    resized(course, 4)
    assert course.next() is None, "the request was withdrawn"
    resized(course, 2)
    assert isinstance(course.next(), StopWorkers)
    assert course.next() is None, "the order is given once"
    stopped(course, 0, 1, 2, 3, step=0)
    start = course.next()
    assert [node.number for node in start.nodes] == [0, 1]
    assert (start.released, start.cause, start.resize.nodes, start.layout.dp) == (((2, "n2"), (3, "n3")), None, 2, 4)
    assert [course.head.was_released(number) for number in range(4)] == [False, False, True, True]
    course.lose(2, 3)
    assert course.next() is None, "their agents have left"
    resized(course, 1)
    assert isinstance(course.next(), StopWorkers)
    resized(course, 2)
    stopped(course, 0, 1)
    start = course.next()
    assert (len(start.nodes), start.released) == (2, ()), "the newest request counts"
    course.lose(1)
    course.next()
    course.report(failed(Failure.COMMUNICATION), 0)
    assert action(course.next(NODE_LOSS_WAIT_S)) is Action.REQUEUE, "the requested size is that of the job"


def test_spares_and_failing_nodes_are_given_back_first(tmp_path: Path) -> None:
    course = Course(tmp_path, 5, spares=1)
    assert course.started() == [0, 1, 2, 3]
    for number in (0, 2):
        course.head.node_failures.note(f"n{number}", Failure.KILLED, 2)
    resized(course, 2)
    course.next()
    stopped(course, 0, 1, 2, 3)
    start = course.next()
    assert ([node.number for node in start.nodes], start.released) == ([1, 3], ((2, "n2"), (4, "n4"))), (
        "n0 is a spare now"
    )


def guest(course: Course, number: int, workers: int = 2, job_end: int = 0) -> str | None:
    """Lets the agent of a joiner's node join; returns why it is declined."""
    node = Node(number, f"n{number}", f"n{number}", None, 0, workers, job_end=job_end)
    why = course.head.declines(node)
    if why is None:
        course.head.joined(node)
    return why


def test_a_run_grows_when_its_joiner_has_started(tmp_path: Path) -> None:
    course = Course(tmp_path, 1)
    assert course.started() == [0]
    assert not course.head.admits(1)
    course.head.invite(1, 3, course.head.present[0])
    resized(course, 4)
    assert guest(course, 3, workers=4) == "node n3 does not join: it has the workers 4, node n0 2"
    assert guest(course, 1) is None
    assert course.next() is None, "another node of the joiner starts"
    guest(course, 2)
    assert isinstance(course.next(), StopWorkers)
    stopped(course, 0)
    start = course.next()
    assert ([node.number for node in start.nodes], start.guests, start.resize.nodes) == ([0, 1, 2], 2, 4)
    assert course.head.retire(2) is False
    assert isinstance(course.next(), StopWorkers), "its job reaches its time limit"
    stopped(course, 0, 1, 2, step=12)
    start = course.next()
    assert ([node.number for node in start.nodes], start.released, start.resize) == ([0, 1], ((2, "n2"),), None)
    course.lose(1)
    assert isinstance(course.next(), End)
    course.report(failed(Failure.COMMUNICATION, step=13), 0)
    start = course.next(NODE_LOSS_WAIT_S)
    assert [node.number for node in start.nodes] == [0], "the nodes of a joiner may be lost without elastic.min_nodes"
    assert start.released == ((1, "n1"),), "its job gives it back"


def test_a_run_grows_without_the_nodes_of_a_joiner_that_do_not_start(tmp_path: Path) -> None:
    course = Course(tmp_path, 2)
    course.started()
    course.head.invite(2, 2, course.head.present[0])
    resized(course, 4)
    guest(course, 2)
    assert course.next() is None
    assert isinstance(course.next(GUESTS_WAIT_S + 1), StopWorkers)
    stopped(course, 0, 1)
    assert course.started() == [0, 1, 2]
    assert course.next(GUESTS_WAIT_S + 1) is None
    guest(course, 3)
    assert isinstance(course.next(), StopWorkers), "it has come late"
    stopped(course, 0, 1, 2)
    assert course.started() == [0, 1, 2, 3]
    resized(course, 2)
    course.next()
    stopped(course, 0, 1, 2, 3)
    start = course.next()
    assert ([node.number for node in start.nodes], start.guests) == ([0, 1], 0), "the joiner goes first"


def test_a_run_does_not_wait_for_nodes_that_its_joiner_did_not_get(tmp_path: Path) -> None:
    course = Course(tmp_path, 1)
    course.started()
    course.head.invite(1, 3, course.head.present[0])
    resized(course, 4)
    guest(course, 1, job_end=3)
    assert course.next() is None, "another node of the joiner starts"
    guest(course, 2, job_end=3)
    assert isinstance(course.next(), StopWorkers)
    stopped(course, 0)
    start = course.next()
    assert ([node.number for node in start.nodes], start.released) == ([0, 1, 2], ((3, "node 3 (not joined)"),))
    course.head.invite(4, 1, course.head.present[0])
    guest(course, 2, job_end=3)
    assert course.next() is None and course.head.admits(4), "the next joiner may come"
    guest(course, 4, job_end=5)
    assert isinstance(course.next(), StopWorkers)


def test_nodes_of_a_joiner_for_which_there_is_no_layout_leave(tmp_path: Path) -> None:
    course = Course(tmp_path, 1)
    course.head.config = replace(course.head.config, batch=BatchConfig(global_size=4))
    course.started()
    course.head.invite(1, 2, course.head.present[0])
    resized(course, 3)
    guest(course, 1)
    guest(course, 2)
    assert isinstance(course.next(), StopWorkers)
    stopped(course, 0)
    start = course.next()
    assert ([node.number for node in start.nodes], start.released) == ([0, 1], ((2, "n2"),))
    assert course.next(GUESTS_WAIT_S + 1) is None


def test_a_guest_that_waits_replaces_a_lost_node(tmp_path: Path) -> None:
    course = Course(tmp_path, 2)
    course.started()
    course.head.invite(2, 3, course.head.present[0])
    resized(course, 5)
    why = course.head.declines(Node(4, "n4", "n4", None, 0, 0, refusal="no such interface"))
    assert why == "node n4 does not join: no such interface", "and the run goes on"
    guest(course, 2)
    course.lose(1)
    course.next()
    course.report(failed(Failure.COMMUNICATION), 0)
    assert course.started(NODE_LOSS_WAIT_S) == [0, 2]
    assert course.head.retire(3) is True, "it has no workers"


def test_a_node_that_is_lost_while_the_run_shrinks(tmp_path: Path) -> None:
    course = Course(tmp_path, 4)
    course.started()
    resized(course, 3)
    assert isinstance(course.next(), StopWorkers)
    course.lose(1)
    assert isinstance(course.next(), End)
    stopped(course, 0, step=12)
    course.report(failed(Failure.COMMUNICATION, step=11), 2, 3)
    start = course.next(NODE_LOSS_WAIT_S)
    assert ([node.number for node in start.nodes], start.released) == ([0, 2, 3], ((1, "n1"),))
    assert (start.cause.node, start.reached) == ("n1", 12)


def test_a_stop_request_goes_before_a_resize(tmp_path: Path) -> None:
    course = Course(tmp_path, 2)
    course.started()
    resized(course, 1)
    assert isinstance(course.next(), StopWorkers)
    course.head.stop = "SIGUSR2"
    stopped(course, 0, 1)
    assert action(course.next()) is Action.REQUEUE
    done = Course(tmp_path / "done", 2)
    done.started()
    resized(done, 1)
    done.next()
    done.report(DONE, 0, 1)
    assert action(done.next()) is Action.FINISH, "it was the last step"


def test_three_nodes_at_once_are_one_decision(tmp_path: Path) -> None:
    course = Course(tmp_path, 4, min_nodes=1)
    course.started()
    course.lose(1)
    assert isinstance(course.next(), End)
    course.report(failed(Failure.COMMUNICATION), 0)
    course.now += NODE_LOSS_WAIT_S / 2
    course.lose(2, 3)
    assert course.next(NODE_LOSS_WAIT_S / 2) is None
    assert course.started(NODE_LOSS_WAIT_S / 2) == [0]


def test_a_run_that_is_not_elastic_is_requeued_node_loss_options(tmp_path: Path) -> None:
    course = Course(tmp_path, 2)
    course.started()
    course.lose(1)
    course.next()
    course.report(failed(Failure.COMMUNICATION), 0)
    assert action(course.next(NODE_LOSS_WAIT_S)) is Action.REQUEUE


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_node_is_avoided_at_once_and_another_lost_node_is_not(tmp_path: Path, frozen: bool) -> None:
    course = Course(tmp_path, 2)
    course.started()
    course.head.left(1, "gone", course.now, frozen)
    course.next()
    course.report(failed(Failure.COMMUNICATION), 0)
    assert action(course.next(NODE_LOSS_WAIT_S)) is Action.REQUEUE
    assert course.head.node_failures.failing_nodes() == ({"n1"} if frozen else set())


def test_a_lost_node_that_comes_back_is_a_spare(tmp_path: Path) -> None:
    course = Course(tmp_path, 2, min_nodes=1)
    course.started()
    course.lose(1)
    course.next()
    course.join(1)
    course.report(failed(Failure.COMMUNICATION), 0)
    assert course.started(NODE_LOSS_WAIT_S) == [0, 1]


def test_a_node_that_fails_at_every_start_is_done_without(tmp_path: Path) -> None:
    course = Course(tmp_path, 3, min_nodes=2)
    for _ in range(2):
        assert course.started() == [0, 1, 2]
        course.report(failed(Failure.KILLED, step=0), 1)
        course.next()
        course.report(NodeReport(Exit.FAILED, None, 0), 0, 2)
    assert course.started() == [0, 2]
    course.report(DONE, 0, 2)
    assert action(course.next()) is Action.FINISH


def test_nodes_that_never_join_are_done_without_where_the_run_is_elastic(tmp_path: Path) -> None:
    course = Course(tmp_path / "elastic", 3, joined=2, min_nodes=2)
    assert course.next(JOIN_UNTIL - 1) is None
    assert course.started(2) == [0, 1]
    assert course.head.node_failures.failing_nodes() == {"n2"}, "a requeue leaves it out"
    order = Course(tmp_path / "fixed", 3, joined=2).next(JOIN_UNTIL + 1)
    assert action(order) is Action.REQUEUE
    assert (order.cause.node, order.cause.failure.rank) == ("n2", 4)
    few = Course(tmp_path / "few", 4, joined=1, min_nodes=1)
    few.next(JOIN_UNTIL + 1)
    assert few.head.node_failures.failing_nodes() == frozenset(), "not all of the others are broken"


def test_time_in_which_the_hub_stood_still_does_not_count(tmp_path: Path) -> None:
    course = Course(tmp_path, 2, joined=1)
    course.head.postpone(1000.0)
    assert course.next(JOIN_UNTIL + 999) is None, "the other node has had no time to join either"
    course.join(1)
    assert course.started() == [0, 1]


def test_a_hub_that_slurm_replaced_while_it_stood_still_blames_no_node(tmp_path: Path) -> None:
    course = Course(tmp_path, 2)
    course.started()
    course.head.superseded = lambda: "Slurm has requeued the job"
    course.head.stop = "SIGTERM"
    course.lose(1)
    course.head.postpone(160.0)
    order = course.next()
    assert (action(order), order.decision.reason) == (Action.STOP, "Slurm has requeued the job")
    assert course.head.node_failures.recent() == []
    other = Course(tmp_path / "other", 2)
    other.head.superseded = lambda: "Slurm has requeued the job"
    other.head.postpone(3.0)
    assert other.started() == [0, 1], "a short stall is no reason to ask"


def fail_on(course: Course, nodes: list[int], number: int, failure: Failure, step: int, message: str = "no") -> None:
    """An attempt on ``nodes``, which a failure on ``number`` ends."""
    assert course.started() == nodes
    course.report(failed(failure, step, message=message), number)
    if len(nodes) > 1:
        assert isinstance(course.next(), End)
    course.report(NodeReport(Exit.FAILED, None, step), *(node for node in nodes if node != number))


@pytest.mark.parametrize(("elastic", "left"), [({"spares": 1}, [0, 2]), ({"min_nodes": 2}, [0, 2])])
def test_a_node_whose_gpu_failed_is_done_without(tmp_path: Path, elastic: dict[str, int], left: list[int]) -> None:
    course = Course(tmp_path, 3, **elastic)
    team = [0, 1] if "spares" in elastic else [0, 1, 2]
    fail_on(course, team, 1, Failure.DEVICE, step=9)
    assert course.started() == left
    assert course.head.node_failures.failing_nodes() == {"n1"}


@pytest.mark.parametrize("steps", [(0, 0), (9, 20)])
def test_a_gpu_that_fails_again_on_the_only_nodes_takes_the_job_elsewhere(
    tmp_path: Path, steps: tuple[int, int]
) -> None:
    """One restart on the same nodes, for an error that does not last."""
    course = Course(tmp_path, 2)
    course.head.elsewhere = True
    for step in steps:
        fail_on(course, [0, 1], 1, Failure.DEVICE, step)
    order = course.next()
    assert action(order) is Action.REQUEUE
    assert order.cause.node == "n1"
    assert course.head.node_failures.failing_nodes() == {"n1"}, "the requeue excludes it"


def test_a_gpu_that_fails_without_another_node_gives_the_run_up(tmp_path: Path) -> None:
    course = Course(tmp_path, 1)
    for _ in range(3):
        fail_on(course, [0], 0, Failure.DEVICE, step=0)
    order = course.next()
    assert action(order) is Action.GIVE_UP
    assert order.decision.reason.startswith("no new step in 3 attempts. the GPU or its driver failed")


@pytest.mark.parametrize(
    ("course_of_steps", "expected"),
    [
        ((0, 0), Action.FAIL),  # at the start: once more, and no third time
        ((9, 9), Action.FAIL),
        ((9, 20, 20), Action.FAIL),
    ],
)
def test_an_error_in_a_kernel_that_comes_again_without_a_new_step_is_the_codes(
    tmp_path: Path, course_of_steps: tuple[int, ...], expected: Action
) -> None:
    course = Course(tmp_path, 2)
    course.head.elsewhere = True
    for step in course_of_steps:
        fail_on(course, [0, 1], 1, Failure.KERNEL, step)
    order = course.next()
    assert action(order) is expected
    assert "index out of range" in order.decision.reason


def test_an_error_in_a_kernel_that_follows_to_another_node_is_the_codes(tmp_path: Path) -> None:
    course = Course(tmp_path, 3, spares=1)
    fail_on(course, [0, 1], 1, Failure.KERNEL, step=9)
    fail_on(course, [0, 1], 1, Failure.KERNEL, step=20)
    fail_on(course, [0, 2], 2, Failure.KERNEL, step=20)
    order = course.next()
    assert action(order) is Action.FAIL
    assert order.decision.reason.startswith("the same error ended an attempt on n1, so no GPU causes it: usually an ")
    assert course.head.node_failures.failing_nodes() == {"n1"}


@pytest.mark.parametrize(("elastic", "team"), [({"spares": 1}, [0, 1]), ({"min_nodes": 2}, [0, 1, 2])])
@pytest.mark.parametrize("follows", [True, False])
def test_an_error_in_a_kernel_that_comes_again_is_tried_on_another_node_of_the_job(
    tmp_path: Path, elastic: dict[str, int], team: list[int], follows: bool
) -> None:
    """Twice on one node without a new step: its GPU or the code, which a node of the job that is free decides."""
    course = Course(tmp_path, 3, **elastic)
    for _ in range(2):
        fail_on(course, team, 1, Failure.KERNEL, step=9)
    if follows:
        fail_on(course, [0, 2], 2, Failure.KERNEL, step=9)
        assert action(course.next()) is Action.FAIL
    else:
        assert course.started() == [0, 2]
        course.report(DONE, 0, 2)
        assert action(course.next()) is Action.FINISH
    assert course.head.node_failures.failing_nodes() == {"n1"}


def test_a_gpu_that_fails_is_the_cause_of_errors_on_other_nodes(tmp_path: Path) -> None:
    course = Course(tmp_path, 3, spares=1)
    assert course.started() == [0, 1]
    course.report(failed(Failure.KILLED), 0)
    course.next(1.0)
    course.report(failed(Failure.DEVICE), 1)
    assert course.started() == [0, 2]


def test_out_of_gpu_memory_after_good_steps_restarts_once(tmp_path: Path) -> None:
    gpu, host = "CUDA out of memory. Tried to allocate 2.00 GiB", "out of host memory according to the kernel"
    course = Course(tmp_path / "gpu", 2)
    fail_on(course, [0, 1], 1, Failure.OUT_OF_MEMORY, 30, gpu)
    fail_on(course, [0, 1], 1, Failure.OUT_OF_MEMORY, 60, gpu)
    assert action(course.next()) is Action.FAIL
    assert course.head.node_failures.recent() == [], "it is not counted against the node"
    for message, step in ((gpu, 0), (host, 30)):
        course = Course(tmp_path / f"at-{step}", 2)
        fail_on(course, [0, 1], 1, Failure.OUT_OF_MEMORY, step, message)
        assert action(course.next()) is Action.FAIL


@pytest.mark.parametrize(("step", "attempts", "expected"), [(0, 2, Action.REQUEUE), (3, 4, Action.GIVE_UP)])
def test_a_job_goes_elsewhere_where_a_node_fails_at_every_start(
    tmp_path: Path, step: int, attempts: int, expected: Action
) -> None:
    """What fails after some steps fails so elsewhere too."""
    course = Course(tmp_path, 2)
    course.head.elsewhere = True
    for _ in range(attempts):
        assert course.started() == [0, 1]
        course.report(failed(Failure.KILLED, step=step), 1)
        course.next()
        course.report(NodeReport(Exit.FAILED, None, step), 0)
    assert action(course.next()) is expected


def test_an_agent_that_cannot_end_its_workers_is_lost(tmp_path: Path) -> None:
    course = Course(tmp_path, 2, min_nodes=1)
    course.started()
    course.report(failed(Failure.KILLED), 0)
    course.next()
    assert course.next(61) is None
    assert course.started(NODE_LOSS_WAIT_S) == [0]


@pytest.mark.parametrize(
    ("signal", "expected"),
    [("SIGTERM", Action.STOP), ("SIGUSR2", Action.REQUEUE), (OVER_BUDGET, Action.GIVE_UP)],
)
def test_stop_requests(tmp_path: Path, signal: str, expected: Action) -> None:
    course = Course(tmp_path, 2)
    course.started()
    course.head.stop = signal
    course.report(NodeReport(Exit.STOPPED, None, 9), 0, 1)
    assert action(course.next()) is expected
    waiting = Course(tmp_path / "waiting", 2, joined=1)
    waiting.head.stop = signal
    nothing_was_started = Action.GIVE_UP if signal == OVER_BUDGET else Action.STOP
    assert action(waiting.next()) is nothing_was_started


def test_a_crash_loop_takes_three_attempts(tmp_path: Path) -> None:
    course, attempts = Course(tmp_path, 2), 0
    order = course.next()
    while isinstance(order, Start):
        attempts += 1
        course.report(failed(Failure.HANG, step=0), 0)
        course.next()
        course.report(NodeReport(Exit.FAILED, None, 0), 1)
        order = course.next()
    assert (attempts, action(order)) == (3, Action.GIVE_UP)


def test_a_rank_that_exits_by_itself_is_not_counted_against_its_node(tmp_path: Path) -> None:
    course = Course(tmp_path, 2)
    course.started()
    for _ in range(2):
        course.report(failed(Failure.EXITED, step=0, rank=1), 1)
        course.report(failed(Failure.COMMUNICATION, step=0), 0)
        assert course.started() == [0, 1]
    assert course.head.node_failures.recent() == []


def test_a_killed_store_is_restarted_in_place(tmp_path: Path) -> None:
    course = Course(tmp_path, 2)
    course.started()
    course.head.store_lost(course.now)
    assert isinstance(course.next(), End)
    course.report(NodeReport(Exit.FAILED, None, 9), 0, 1)
    assert course.started() == [0, 1]


def test_a_server_whose_nodes_stay_away_looks_whether_another_agent_has_taken_over(tmp_path: Path) -> None:
    course = Course(tmp_path, nodes=2, joined=1)
    course.head.taken_over = lambda: None
    assert course.next() is None
    course.head.taken_over = lambda: "taken over"
    assert course.next() is None, "it looks rarely"
    order = course.next(after=LOOK_S)
    assert isinstance(order, Leave) and order.decision == RestartDecision(Action.STOP, "taken over")


STOPPED = NodeReport(Exit.STOPPED, None, 9)


def local(folder: Path, nodes: int, shard: int, **elastic: Any) -> Course:
    """A job of replicas of ``shard`` ranks, which has started."""
    course = Course(folder, nodes, local={"local_steps": 5, "shard": shard}, **elastic)
    assert course.started() == [*range(nodes)]
    return course


def test_replicas_go_on_without_the_nodes_that_are_lost(tmp_path: Path) -> None:
    course = local(tmp_path, 4, shard=2, min_nodes=1)
    course.lose(2)
    assert course.next() is None, "more nodes may be lost with it"
    order = course.next(after=NODE_LOSS_WAIT_S)
    assert (order.lost, order.nodes, order.cause.failure.failure) == ((2,), ("n2",), Failure.NODE_LOST)
    course.lose(1)
    order = course.next(after=NODE_LOSS_WAIT_S)
    assert isinstance(order, GoOn) and (order.lost, order.nodes) == ((1, 2), ("n1",))
    assert course.next() is None
    course.report(DONE, 0, 3)
    assert action(course.next()) is Action.FINISH


def test_a_node_whose_worker_was_killed_joins_the_replicas_that_went_on(tmp_path: Path) -> None:
    course = local(tmp_path, 3, shard=1)
    course.report(failed(Failure.KILLED), 1)
    order = course.next()
    assert isinstance(order, GoOn) and order.lost == (2, 3), "both replicas of the node"
    assert isinstance(course.next(), StopWorkers)
    course.report(STOPPED, 0, 2)
    start = course.next()
    assert isinstance(start, Start) and start.cause is None
    assert [node.number for node in start.nodes] == [0, 1, 2]
    assert [node.number for node in start.before] == [0, 2]


def test_a_lost_node_that_comes_back_joins_the_replicas_that_went_on(tmp_path: Path) -> None:
    course = local(tmp_path, 2, shard=2, min_nodes=1)
    course.lose(1)
    assert isinstance(course.next(after=NODE_LOSS_WAIT_S), GoOn)
    course.join(1)
    assert isinstance(course.next(), StopWorkers)


def test_the_rest_of_a_lost_replica_ends_before_the_others_go_on(tmp_path: Path) -> None:
    course = local(tmp_path, 6, shard=4, min_nodes=2)
    course.report(failed(Failure.KILLED), 5)
    assert course.next() == End((4,))
    assert course.next() is None
    course.report(failed(Failure.COMMUNICATION), 4)
    order = course.next()
    assert isinstance(order, GoOn) and (order.lost, order.nodes) == ((2,), ("n4", "n5"))

    course.report(failed(Failure.KILLED), 2)
    assert course.next() == End((3,))
    order = course.next(after=END_TIMEOUT_S + 1)
    assert order is None, "its agent is lost too, and others may be lost with it"
    order = course.next(after=NODE_LOSS_WAIT_S)
    assert isinstance(order, GoOn) and order.lost == (1, 2)


@pytest.mark.parametrize(
    ("elastic", "failure", "number"),
    [
        ({"min_nodes": 1}, Failure.USER_ERROR, 2),
        ({"min_nodes": 1}, Failure.COMMUNICATION, 2),
        ({"min_nodes": 1}, Failure.KILLED, 0),  # the first replica
        ({}, Failure.NODE_LOST, 2),  # the run needs all nodes
    ],
)
def test_losses_after_which_replicas_do_not_go_on(
    tmp_path: Path, elastic: dict[str, Any], failure: Failure, number: int
) -> None:
    course = local(tmp_path, 3, shard=2, **elastic)
    if failure is Failure.NODE_LOST:
        course.lose(number)
    else:
        course.report(failed(failure), number)
    assert course.next(after=SECONDARY_WAIT_S + 1) == End()
