"""The agent of a node runs the node's workers, attempt after attempt, as ordered by the rendezvous server.

It never imports torch and behaves the same however it was started (a foreground command, submitit, a batch script). The
agent of the batch host, or of the only node, also runs the rendezvous server.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_train.config.roles import config_of_node
from hpc_train.config.schema import Config
from hpc_train.config.values import runs_command, with_alternative
from hpc_train.elastic.nodes import Node, Unfit
from hpc_train.elastic.requeue import JobEnd, find_killed_step, refuse_third_kill
from hpc_train.elastic.resize import guest_of
from hpc_train.elastic.warm_parent.head_start import HeadStart
from hpc_train.elastic.worker_process import start_warm_parent
from hpc_train.errors import UserError
from hpc_train.layout.resolve import resolve_layout
from hpc_train.machine.allocation import Allocation, current_allocation, listening_at, meeting_at, workers_of_run
from hpc_train.machine.environment import (
    apply,
    export_job_environment,
    node_environment,
    node_local_caches,
    refuse_loopback_down,
    refuse_unknown_interface,
    refuse_unreadable_sizes,
    threads_per_rank,
)
from hpc_train.machine.gpus import UnusableGpus
from hpc_train.machine.placement import switch_address
from hpc_train.registration import MONITOR, registered
from hpc_train.run.code import frozen_code, use_frozen_code
from hpc_train.run.directory import RUN_DIRECTORY, RunDirectory
from hpc_train.run.event_log import CLOCK, Clock, EventLog
from hpc_train.run.events import Event
from hpc_train.run.exits import Exit, Failure
from hpc_train.run.file_writer import FileWriter
from hpc_train.run.files import read_or, write_for_group
from hpc_train.run.freeze import load
from hpc_train.run.lease import hold_lease
from hpc_train.run.processes import out_of_resources, raise_descriptor_limit, refuse_few_descriptors
from hpc_train.run.requests import StopRequests, stop_was_requested, watch_signals
from hpc_train.run.streams import nonfailing_streams

if TYPE_CHECKING:
    from hpc_train.elastic.script import Script

ENTRY = "hpc_train.train.worker:train"
LOOP_ENTRY = "hpc_train.train.custom_loop:train"  # of run.entry
STORE = "hpc_train.elastic.rendezvous.store:serve"

Reserve = Callable[[StopRequests], AbstractContextManager[None]]


@dataclass(frozen=True)
class AgentOptions:
    """Describes what an agent runs, and for which job.

    Attributes:
        entry: the worker's entry point, as "module:function"; by default, the trainer or ``run.entry``.
            ``run.command`` does not use it.
        store: the entry point of an attempt's store.
        alternative: which of the jobs of ``cluster.first`` this is, counted from 1; 0 for the job without it.
        echo: whether the output of the workers is also printed.
        join: the launch of the run that this job adds nodes to, and the number of its first node (``guest_of``).
    """

    entry: str | None = None
    store: str = STORE
    alternative: int = 0
    echo: bool = False
    join: str | None = None


def run_agent(
    run: RunDirectory,
    options: AgentOptions | None = None,
    *,
    on_tick: Callable[[], None] | None = None,
    reserve: Reserve | None = None,
    begun: HeadStart | None = None,
) -> int:
    """Runs this node's workers of ``run`` to their end; returns the exit code.

    Args:
        on_tick: called a few times per second while workers run.
        reserve: a context that holds the workers' resources (GPUs, cores); entering it may wait, and returns early when
            a stop is requested.
        begun: the head start of the warm parent, if any.
    """
    options = options or AgentOptions()
    raise_descriptor_limit()
    allocation = current_allocation()
    end = JobEnd.of_this_process(run)
    if options.join is not None:
        allocation = guest_of(allocation, options.join)
        end = None  # the first job records how the run ends
    with nonfailing_streams(), watch_signals() as stop:
        try:
            refuse_few_descriptors()
            if allocation.nodes == 1:
                refuse_loopback_down()
            if end is not None:
                with suppress(OSError):  # the batch script also removes it
                    end.begin()
            with _sole_agent(run, allocation, stop), reserve(stop) if reserve else nullcontext():
                code = _run(run, options, allocation, end, stop, on_tick or (lambda: None), begun)
            if end is None or code != Exit.STOPPED or not end.must_ask() or end.ask():
                return code
            resume = f"Resume the run with: python -m hpc_train resume {run.path}"
            print(f"the command that requeues the job failed. {resume}", file=sys.stderr)
            return Exit.GAVE_UP
        except (UserError, OSError, RuntimeError) as error:
            refusal = error if isinstance(error, UserError) else out_of_resources(error)
            if refusal is None:
                raise
            print(refusal, file=sys.stderr)
            if end is not None and allocation.node_rank == 0:  # only node 0 records the job's end
                end.record(Exit.REFUSED)
            return Exit.REFUSED


def _preload(config: Config, entry: str, store: str) -> list[str]:
    """Returns the modules that the warm parent imports: all modules that are slow to import and that this run needs."""
    modules = [path.partition(":")[0] for path in (entry, store)]
    pipeline = [] if config.strategy.pp == 1 else ["hpc_train.parallel.pipeline.engine"]
    return [*dict.fromkeys(modules), *pipeline]


@contextmanager
def _sole_agent(run: RunDirectory, allocation: Allocation, stop: StopRequests) -> Iterator[None]:
    if allocation.node_rank > 0:
        yield
        return
    with hold_lease(run, on_loss=lambda: stop.request("lease lost"), give_up=lambda: stop.requested):
        yield


def _run(
    run: RunDirectory,
    options: AgentOptions,
    allocation: Allocation,
    end: JobEnd | None,
    stop: StopRequests,
    on_tick: Callable[[], None],
    begun: HeadStart | None,
) -> int:
    config = with_alternative(load(run), options.alternative)
    export_job_environment(config.cluster.env)
    allocation = _on_the_network(config, allocation)
    use_frozen_code(frozen_code(run))
    if config.run.group is not None:
        write_for_group()
    if allocation.node_rank == 0:
        _refuse_third_kill(run, config, allocation)
        if read_or(lambda: stop_was_requested(run), False):  # by a signal that came before this process watched them
            stop.request("SIGUSR1")
    node = _this_node(config_of_node(config, allocation.component_sizes, allocation.node_rank), allocation)
    os.environ.pop(CLOCK, None)  # set by an enclosing job
    events = EventLog.open(run, f"agent-{allocation.node_name}", 0, clock=Clock.at(time.time()))
    output = FileWriter("the output of the workers")
    printed = FileWriter("the printed output of the workers")
    with (
        closing(events),
        closing(output),
        closing(printed),
        calling(config.run.on_event, run, events, is_first=allocation.node_rank == 0) as events,
        node_local_caches(f"{allocation.launch_id}-{allocation.node_name}") as caches,
    ):
        users = dict(os.environ)
        workers = node.workers
        if allocation.nodes == 1 and workers:
            workers = min(workers, resolve_layout(config, 1, workers).world_size)
        threads = threads_per_rank(config.train.threads, max(1, workers))
        # what the warm parent, and so all workers, inherit; the agent of each role sets the threads of its workers
        environment_record = apply([*(() if config.run.roles else node_environment(threads)), *caches])
        with _code_of_workers(run, config, options, begun) as code:
            from hpc_train.elastic.agent_session import Session  # while the warm parent imports

            session = Session(
                run,
                config,
                allocation,
                node,
                end,
                stop,
                events,
                output,
                printed if options.echo else None,
                users,
                environment_record,
                code,
                options.store,
                on_tick,
                is_guest=options.join is not None,
            )
            if allocation.node_rank != 0:
                return session.work()
            with registered(MONITOR)(run, config.telemetry, allocation, events):
                return session.work()


def _refuse_third_kill(run: RunDirectory, config: Config, allocation: Allocation) -> None:
    """Raises UserError, and records it, if Slurm has killed the last two steps of this job for their memory."""
    attempt = read_or(run.newest_attempt, -1)
    killed = read_or(lambda: find_killed_step(run, allocation.launch_id, attempt), None)
    try:
        refuse_third_kill(run, killed, config.cluster.mem)
    except UserError as error:
        assert killed is not None
        with closing(EventLog.open(run, f"agent-{allocation.node_name}", attempt)) as events:
            details: dict[str, Any] = {"class": Failure.OUT_OF_MEMORY, "rank": None, "node": killed.node}
            events.write("failed", exit_code=int(Exit.REFUSED), message=str(error), **details)
        raise


@contextmanager
def _code_of_workers(
    run: RunDirectory, config: Config, options: AgentOptions, begun: HeadStart | None
) -> Iterator[str | Script]:
    """Yields the command of the run, or the entry point of its workers after it has started their warm parent."""
    if not runs_command(config):
        entry = options.entry or (ENTRY if config.run.entry is None else LOOP_ENTRY)
        start_warm_parent(_preload(config, entry, options.store), begun)
        yield entry
        return
    if begun is not None:
        begun.end()
    from hpc_train.elastic.script import Script, node_local_folder  # other runs do not need it yet

    with node_local_folder() as progress:
        yield Script.of(run, config, progress)


def _on_the_network(config: Config, allocation: Allocation) -> Allocation:
    """Returns ``allocation`` with the address at which the nodes meet."""
    interface = config.cluster.interface
    allocation = meeting_at(allocation, interface)
    if allocation.node_rank > 0:
        return allocation
    allocation, doubt = listening_at(allocation, is_chosen=interface is not None)
    if doubt is not None:
        fix = "set cluster.interface to the interface of the job"
        print(f"{allocation.node_name} listens on all interfaces: {doubt}; {fix}", file=sys.stderr, flush=True)
    return allocation


def _this_node(config: Config, allocation: Allocation) -> Node:
    """Describes this node before the site's check, or states why it cannot take part."""
    gpus = workers = 0
    unfit = refusal = None
    try:
        refuse_unknown_interface()
        refuse_unreadable_sizes(os.environ)
        gpus, workers = workers_of_run(config)
    except UnusableGpus as error:
        unfit = Unfit(error.reason, error.fix)
    except UserError as error:
        refusal = str(error)
    number = allocation.node_rank
    name = allocation.node_name
    address = allocation.address
    switch = switch_address()
    return Node(number, name, address, switch, gpus, workers, unfit=unfit, refusal=refusal, job_end=allocation.nodes)


CALL_S = 10.0  # for one event, and for all that are left when the agent ends
LAST_S = 1.0  # for the thread to note that its last call was killed

# what the agent of another node passes on: the state of its node, and the end of a job that has lost the first node
OF_OTHER_NODES = frozenset({"gpu_idle", "node_lost", "requeued", "stopped_retrying", "failed"})


@contextmanager
def calling(command: str | None, run: RunDirectory, events: EventLog, is_first: bool) -> Iterator[EventLog]:
    """Yields a log whose events are passed to ``command`` (``run.on_event``); ``events`` itself if there is none.

    The batch script calls the command if no agent is left to record how the job ended.

    Args:
        is_first: whether this is the agent of the first node, which passes on all of its events.
    """
    if command is None:
        yield events
        return
    calls = EventCalls(command, run, events)
    try:
        yield events.heard_by(lambda event: calls.add(event) if is_first or event.name in OF_OTHER_NODES else None)
    finally:
        calls.close()


class EventCalls:
    """Calls a command for each event, in order. A call that fails is a warning in the event log, once per reason.

    A thread calls it, so that it delays neither the event log nor a restart. At its end, the agent waits a few seconds
    for the remaining calls.
    """

    def __init__(self, command: str, run: RunDirectory, events: EventLog) -> None:
        self._command = command
        self._run = run
        self._events = events
        self._queue: queue.Queue[Event | None] = queue.Queue()
        self._problems: set[str] = set()
        self._until = float("inf")
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, name="on_event", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Calls the command soon. Does not wait."""
        self._queue.put(event)

    def close(self) -> None:
        """Waits for the remaining calls, for at most ``CALL_S`` seconds."""
        self._until = time.monotonic() + CALL_S
        self._queue.put(None)
        self._thread.join(CALL_S)
        self._kill()  # the call began before the end
        self._thread.join(LAST_S)

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            left_s = min(CALL_S, self._until - time.monotonic())
            if left_s <= 0:
                return
            problem = self._call(event, left_s)
            if problem is not None and problem not in self._problems:
                self._problems.add(problem)
                log = self._events.of(max(0, read_or(self._run.newest_attempt, 0)))
                log.write("warning", message=f"run.on_event failed for the event {event.name}: {problem}")

    def _call(self, event: Event, limit_s: float) -> str | None:
        """Returns why the command has failed; None if it succeeds."""
        environment = {**os.environ, RUN_DIRECTORY: str(self._run.path)}
        try:
            process = self._process = subprocess.Popen(
                ["bash", "-c", self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
            _, error = process.communicate(json.dumps(event) + "\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"it did not end within {CALL_S:g} s"
        except OSError as refused:
            return f"it cannot be started: {refused}"
        finally:
            self._kill()
        if process.returncode == 0:
            return None
        lines = error.strip().splitlines()
        return lines[-1] if lines else f"exit code {process.returncode}"

    def _kill(self) -> None:
        """Kills the process of the current call and the processes that it has started."""
        process = self._process
        self._process = None  # its number may become that of another process
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
