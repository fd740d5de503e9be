"""One attempt on one node: start the workers, watch them, end all when one fails, and say how it went."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from socket import socket

from hpc_train.elastic import warm_parent
from hpc_train.elastic.failures import WorkerFailure, is_echo, root_cause
from hpc_train.elastic.logs import WorkerLog
from hpc_train.elastic.stop_requests import StopRequests
from hpc_train.elastic.watch import Watch
from hpc_train.elastic.workers import Workers
from hpc_train.run.exits import Exit, Failure
from hpc_train.run.worker_spec import WorkerSpec

TICK_S = 0.25
# From a failure until the other workers are killed: time for the true cause to arrive.
ECHO_GRACE_S = 3.0  # after the echo of another failure
REPORT_GRACE_S = 0.1  # after an exception that may be an echo with words of its own


@dataclass(frozen=True)
class Outcome:
    """How the workers of this node ended; ``failure`` is the first real one, ``step`` the furthest of them."""

    exit: Exit
    failure: WorkerFailure | None = None
    step: int = 0


def run_attempt(
    specs: Sequence[WorkerSpec],
    listener: socket | None,
    log: WorkerLog,
    stop: StopRequests,
    stop_grace_s: float,
    on_tick: Callable[[], None],
    entry: str,
    watch: Watch,
) -> Outcome:
    """Runs the workers ``specs`` to their end. No worker is alive when this returns or raises."""
    workers = Workers(log)
    try:
        _start(workers, specs, listener, entry)
        _watch(workers, stop, stop_grace_s, on_tick, watch)
    finally:
        workers.kill()
        log.close()
    return replace(_outcome(workers, stop_grace_s), step=max((worker.step for worker in workers), default=0))


def _start(workers: Workers, specs: Sequence[WorkerSpec], listener: socket | None, entry: str) -> None:
    pid = warm_parent.ensure()
    try:
        for spec in specs:
            workers.start(pid, spec, listener if spec.rank == 0 else None, entry)
    except (EOFError, ConnectionError) as error:  # the warm parent is gone, and its workers with it
        message = f"the warm parent ended while it started rank {spec.rank}: {error!r}; its words are above"
        workers.fail(WorkerFailure(spec.rank, Failure.KILLED, message, message, time.time()))
    finally:
        if listener is not None:
            listener.close()  # rank 0 has it now, and the port is to close with it


def _watch(
    workers: Workers, stop: StopRequests, stop_grace_s: float, on_tick: Callable[[], None], watch: Watch
) -> None:
    failed_at: float | None = None
    while workers.alive:
        workers.wait(TICK_S)
        watch.look(workers)
        now = time.monotonic()
        if workers.failures and failed_at is None:
            failed_at = now
            for worker in workers.alive:
                worker.signal(signal.SIGTERM)
        if stop.requested:
            _pass_on(workers)
        late = stop.requested and now - stop.since > stop_grace_s
        if late or (failed_at is not None and now - failed_at > _grace(workers.failures)):
            workers.kill()
        on_tick()


def _grace(failures: Sequence[WorkerFailure]) -> float:
    causes = [failure for failure in failures if not is_echo(failure)]
    if not causes:
        return ECHO_GRACE_S
    return REPORT_GRACE_S if all(failure.exit_code is None for failure in causes) else 0.0


def _pass_on(workers: Workers) -> None:
    for worker in workers:
        if worker.ready and not worker.told_to_stop:
            worker.told_to_stop = True
            worker.signal(signal.SIGUSR2)


def _outcome(workers: Workers, stop_grace_s: float) -> Outcome:
    if workers.failures:
        cause = root_cause(workers.failures)
        return Outcome(Exit.REFUSED if cause.failure is Failure.REFUSED else Exit.FAILED, cause)
    late = [worker for worker in workers if worker.end is None]
    if late:
        message = f"had not stopped {stop_grace_s:g} s after the request (elastic.stop_grace_s)"
        return Outcome(Exit.FAILED, WorkerFailure(late[0].rank, Failure.KILLED, message, message, time.time()))
    stopped = any(worker.end and worker.end["kind"] == "stopped" for worker in workers)
    return Outcome(Exit.STOPPED if stopped else Exit.DONE)
