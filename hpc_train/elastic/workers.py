"""The workers of one node in one attempt, as the agent sees them: processes, their output and their reports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from hpc_train.cluster.oom_kills import OomKills
from hpc_train.elastic import warm_parent
from hpc_train.elastic.failures import WorkerFailure, ended_without_report
from hpc_train.elastic.logs import KEPT_LINES, WorkerLog
from hpc_train.elastic.process_end import class_of_end
from hpc_train.elastic.worker_process import main
from hpc_train.run.exits import Failure
from hpc_train.run.heartbeat import SharedBlock
from hpc_train.run.worker_spec import WorkerSpec

READ_BYTES = 1 << 16


@dataclass
class Worker:
    """One worker process.

    ``end`` is its last report (finished, stopped or failed); ``gone`` says that its end was taken note of.
    """

    rank: int
    process: BaseProcess
    output: Connection
    reports: Connection
    block: SharedBlock
    ready: bool = False
    told_to_stop: bool = False
    ended_by_agent: bool = False
    end: dict[str, Any] | None = None
    gone: bool = False
    step: int = 0  # that it had done when it ended

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        if self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Workers:
    """Starts workers, empties their pipes, and tells how they ended."""

    def __init__(self, log: WorkerLog) -> None:
        self._log = log
        self._workers: list[Worker] = []
        self._failures: dict[int, WorkerFailure] = {}
        self._killed_before = OomKills.now()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self._workers if not worker.gone]

    @property
    def failures(self) -> Sequence[WorkerFailure]:
        """How workers failed so far; not those that the agent ended itself."""
        return list(self._failures.values())

    def start(self, warm_parent_pid: int, spec: WorkerSpec, listener: socket.socket | None, entry: str) -> None:
        output, output_end = warm_parent.CONTEXT.Pipe(duplex=False)
        reports, report_end = warm_parent.CONTEXT.Pipe(duplex=False)
        block = SharedBlock.create()
        process = warm_parent.fork(main, warm_parent_pid, spec, output_end, report_end, block, listener, entry)
        output_end.close()
        report_end.close()
        os.set_blocking(output.fileno(), False)
        self._workers.append(Worker(spec.rank, process, output, reports, block))

    def wait(self, timeout: float) -> None:
        """Waits for output, a report or an end, for ``timeout`` seconds at most, and takes note of all of them."""
        running = self.alive
        waited: list[Any] = [worker.process.sentinel for worker in running]
        waited += [pipe for worker in running for pipe in (worker.output, worker.reports) if not pipe.closed]
        wait(waited, timeout)
        for worker in running:
            ended = (
                worker.process.exitcode is not None
            )  # asked before the pipes are emptied: nothing comes after the end
            self._read_output(worker)
            self._read_reports(worker)
            if ended:
                self._note_end(worker)

    def fail(self, failure: WorkerFailure) -> None:
        """A failure that a worker cannot tell of itself."""
        self._failures[failure.rank] = failure

    def kill(self) -> None:
        """Kills what is alive and waits until it is gone."""
        for worker in self.alive:
            worker.ended_by_agent = True
            worker.signal(signal.SIGKILL)
        while self.alive:
            self.wait(1.0)

    def _read_output(self, worker: Worker) -> None:
        while not worker.output.closed:
            try:
                data = os.read(worker.output.fileno(), READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                worker.output.close()
                return
            self._log.write(worker.rank, data)

    def _read_reports(self, worker: Worker) -> None:
        try:
            while not worker.reports.closed and worker.reports.poll():
                report = worker.reports.recv()
                if report["kind"] == "ready":
                    worker.ready = True
                    continue
                worker.end = report
                if report["kind"] == "failed":
                    self._failures[worker.rank] = _reported(worker.rank, report)
        except (EOFError, OSError):
            worker.reports.close()

    def _note_end(self, worker: Worker) -> None:
        if worker.end is None and not worker.ended_by_agent:
            tail = self._log.tail(worker.rank)
            code = worker.process.exitcode or 0
            output = self._log.tail(worker.rank, KEPT_LINES)
            end = class_of_end(code, OomKills.now() - self._killed_before, warm_parent.took_along(code), output)
            self._failures[worker.rank] = ended_without_report(worker.rank, code, end, tail, time.time())
        worker.output.close()
        worker.reports.close()
        worker.step = worker.block.beat().step
        worker.block.close()
        worker.gone = True


def _reported(rank: int, report: dict[str, Any]) -> WorkerFailure:
    told = report["message"], report["traceback"], report["time"]
    return WorkerFailure(rank, Failure(report["class"]), *told, waits=report.get("echo", False))
