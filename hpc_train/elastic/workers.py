"""The workers of one node in one attempt, as the agent sees them: processes, output, reports, and the class of a silent
death.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hpc_train.elastic.decision import WorkerFailure, ended_without_report
from hpc_train.elastic.logs import RETAINED_LINES, WorkerLog
from hpc_train.elastic.script import Script, ScriptProcess, ScriptProgress
from hpc_train.elastic.worker_process import FORKSERVER, REPORTS, died_with_warm_parent, fork_process, main
from hpc_train.machine.kernel_counters import OomKills
from hpc_train.run.agent_worker import SharedBlock, WorkerSpec
from hpc_train.run.exits import HOST_MEMORY, SHELL_SIGNALS, Exit, Failure, classify_message, end_of_script
from hpc_train.run.requests import STOP_SIGNALS

SAME_SIGNAL_S = 0.5
READ_BYTES = 1 << 16
CHILDREN_S = 1.0  # for processes that a worker forked to end by themselves; loader processes die with their worker
KILLED_S = 5.0  # for killed processes to end; the kernel may have to release much memory of a GPU


@dataclass
class Worker:
    """One worker process.

    ``end`` is its last report (finished, stopped or failed); ``gone`` is set once its exit was processed.
    """

    rank: int
    process: BaseProcess | ScriptProcess
    output: Connection
    reports: Connection
    block: SharedBlock | ScriptProgress
    ready: bool = False
    stop_forwarded: bool = False
    ended_by_agent: bool = False
    end: dict[str, Any] | None = None
    gone: bool = False
    step: int = 0  # steps completed when it ended

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "the process was started"
        return self.process.pid

    @property
    def is_script(self) -> bool:
        return isinstance(self.process, ScriptProcess)

    def signal(self, number: signal.Signals) -> None:
        if self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def request_stop(self) -> None:
        """Asks the worker once to stop, when it is able to."""
        if self.ready and not self.stop_forwarded:
            self.stop_forwarded = True
            self.signal(signal.SIGTERM if self.is_script else signal.SIGUSR2)

    def warn_of_failure(self) -> None:
        """Asks the worker to stop because of another rank's failure. A script is only killed, after the primary cause
        had time to arrive: its end by a signal would look like a separate failure.
        """
        if not self.is_script:
            self.signal(signal.SIGTERM)


class Workers:
    """Starts workers, drains their pipes and records how they ended."""

    def __init__(self, log: WorkerLog, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self._log = log
        self._stop_requested = stop_requested
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
        """The failures of workers so far, except of those that the agent ended itself."""
        return list(self._failures.values())

    def start(self, warm_parent_pid: int, spec: WorkerSpec, entry: str) -> None:
        output, output_end = FORKSERVER.Pipe(duplex=False)
        reports, report_end = FORKSERVER.Pipe(duplex=False)
        block = SharedBlock.create()
        process = fork_process(main, warm_parent_pid, spec, output_end, report_end, block, entry)
        output_end.close()
        report_end.close()
        os.set_blocking(output.fileno(), False)
        self._workers.append(Worker(spec.rank, process, output, reports, block))

    def start_script(self, spec: WorkerSpec, script: Script) -> None:
        """Starts the command of the run as the worker ``spec``."""
        output, output_end = FORKSERVER.Pipe(duplex=False)
        reports, report_end = FORKSERVER.Pipe(duplex=False)
        report_end.close()  # the exit code is its report
        try:
            process = script.start(spec, output_end)
        finally:
            output_end.close()
        os.set_blocking(output.fileno(), False)
        self._workers.append(Worker(spec.rank, process, output, reports, process.progress, ready=True))

    def wait(self, timeout: float) -> None:
        """Waits at most ``timeout`` seconds for output, reports or exits, and processes them."""
        running = self.alive
        waited: list[Any] = [worker.process.sentinel for worker in running]
        waited += [pipe for worker in running for pipe in (worker.output, worker.reports) if not pipe.closed]
        wait(waited, timeout)
        for worker in running:
            # checked before the pipes are drained, since nothing arrives after the exit
            ended = worker.process.exitcode is not None
            self._read_output(worker)
            self._read_reports(worker)
            if ended:
                self._note_end(worker)

    def fail(self, failure: WorkerFailure) -> None:
        """Records a failure that a worker cannot report itself."""
        self._failures[failure.rank] = failure

    def kill(self) -> None:
        """Kills the live workers and waits until they are gone."""
        for worker in self.alive:
            worker.ended_by_agent = True
            if isinstance(worker.process, ScriptProcess):
                worker.process.kill_session()
            else:
                worker.signal(signal.SIGKILL)
        while self.alive:
            self.wait(1.0)

    @property
    def succeeded(self) -> bool:
        """Returns whether all workers have reported that they finished or stopped."""
        return not self._failures and all(worker.end is not None for worker in self._workers)

    def end_children(self) -> None:
        """Waits until the processes that the ended workers forked are gone, and kills those that stay.

        A forked process inherits the GPU context of its worker, which keeps the memory of the GPU in use, and the
        worker's end of the pipe for reports, which shows here that it lives.
        """
        if self._open_reports(CHILDREN_S):
            for pid in _writers([worker.reports.fileno() for worker in self._open_reports(0.0)]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for worker in self._open_reports(KILLED_S):
            print(f"processes that rank {worker.rank} forked do not end", flush=True)
            worker.reports.close()

    def _open_reports(self, limit_s: float) -> list[Worker]:
        """Returns the ended workers whose pipe for reports is still open in a process after ``limit_s`` seconds."""
        until = time.monotonic() + limit_s
        while True:
            for worker in self._workers:
                self._read_reports(worker)
            left = [worker for worker in self._workers if worker.gone and not worker.reports.closed]
            if not left or time.monotonic() >= until:
                return left
            wait([worker.reports for worker in left], until - time.monotonic())

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
        if isinstance(worker.process, ScriptProcess):
            if not worker.ended_by_agent:
                self._note_script_end(worker, worker.process)
            worker.process.close()
        elif worker.end is None and not worker.ended_by_agent:
            tail = self._log.tail(worker.rank)
            code = worker.process.exitcode or 0
            output = self._log.tail(worker.rank, RETAINED_LINES)
            end = class_of_end(code, OomKills.now() - self._killed_before, died_with_warm_parent(code), output)
            self._failures[worker.rank] = ended_without_report(worker.rank, code, end, tail, time.time())
        worker.output.close()
        beat = worker.block.beat()
        worker.step = 0 if beat is None else beat.step
        worker.block.close()
        worker.gone = True

    def _note_script_end(self, worker: Worker, process: ScriptProcess) -> None:
        """Records how a script ended, by its exit code and the last lines of its output."""
        code = process.exitcode or 0
        if code != 0:
            process.kill_session()  # what it has started; now, since its id may soon be that of another process
        outcome = end_of_script(code, asked_to_stop=worker.stop_forwarded or self._stopped_with_agent(code))
        if isinstance(outcome, Exit):
            worker.end = {"kind": REPORTS[outcome]}
            return
        output = self._log.tail(worker.rank, RETAINED_LINES)
        end = class_of_script_end(code, outcome, OomKills.now() - self._killed_before, output)
        tail = self._log.tail(worker.rank)
        self._failures[worker.rank] = ended_without_report(worker.rank, code, end, tail, time.time())

    def _stopped_with_agent(self, code: int) -> bool:
        """Returns whether a script died of a stop signal that its agent got as well: Slurm signals all processes."""
        until = time.monotonic() + (SAME_SIGNAL_S if -code in STOP_SIGNALS else 0.0)
        while time.monotonic() < until and not self._stop_requested():
            time.sleep(0.01)
        return -code in STOP_SIGNALS and self._stop_requested()


def _writers(pipes: Sequence[int]) -> list[int]:
    """Returns the processes of this user, other than this one, that hold an end of one of the ``pipes``."""
    names = {f"pipe:[{os.fstat(pipe).st_ino}]" for pipe in pipes}
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            held = {str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()}
            if held & names and int(process.name) != os.getpid():
                pids += [int(process.name)]
    return pids


def _reported(rank: int, report: dict[str, Any]) -> WorkerFailure:
    fields = report["message"], report["traceback"], report["time"]
    return WorkerFailure(rank, Failure(report["class"]), *fields, waits=report.get("secondary", False))


SHARED_MEMORY = Path("/dev/shm")
FULL = 0.01  # free share below which it counts as full


def class_of_end(
    exit_code: int, killed: OomKills, with_warm_parent: bool = False, output: Sequence[str] = ()
) -> tuple[Failure, str]:
    """Returns the class of a worker's silent death and a one-line message.

    Args:
        exit_code: negative for a signal.
        with_warm_parent: the worker was killed because its warm parent ended.
        killed: processes that the kernel killed for memory while the worker ran.
        output: the last lines that it printed.
    """
    if with_warm_parent:
        _, cause = _killed("the warm parent was killed", killed)
        message = "killed by the kernel when the warm parent of the node's workers ended"
        # the class stays, as a restart is right: the workers themselves may fit into the memory
        return Failure.KILLED, message if killed == OomKills() else f"{message}: {cause}"
    if exit_code >= 0:
        return Failure.EXITED, f"exited early with code {exit_code}, without an exception"
    name = f"killed by {signal.Signals(-exit_code).name}"
    if exit_code in (-signal.SIGKILL, -signal.SIGXCPU):
        failure, message = _killed(name, killed)
        return failure, message if failure is Failure.OUT_OF_MEMORY else f"{message}{cpu_limit()}"
    if exit_code == -signal.SIGABRT:
        return _aborted(name, output)
    if exit_code == -signal.SIGBUS and _is_full(SHARED_MEMORY):
        return Failure.DISK_FULL, f"{name}: {SHARED_MEMORY} is full (batch.loader_workers=0 does not use it)"
    return Failure.KILLED, name


def cpu_limit() -> str:
    """Returns what to add to a message about a killed process if the kernel limits its CPU time; empty without."""
    seconds = resource.getrlimit(resource.RLIMIT_CPU)[0]
    if seconds == resource.RLIM_INFINITY:
        return ""
    return f"; a process may use {seconds} s of CPU time (ulimit -t)"


def class_of_script_end(
    exit_code: int, failure: Failure, killed: OomKills, output: Sequence[str] = ()
) -> tuple[Failure, str]:
    """Returns the class of a script's failure and a one-line message; see ``class_of_end``.

    Args:
        failure: the class according to the exit code (``run/exits.end_of_script``).
    """
    if failure is Failure.KILLED:
        return class_of_end(exit_code if exit_code < 0 else SHELL_SIGNALS - exit_code, killed, output=output)
    message = f"run.command exited with code {exit_code}: {_last_words(output)}"
    if failure is Failure.REFUSED:
        return failure, message
    classified = next(filter(None, map(classify_message, _last_traceback(output))), None)
    return classified or failure, message


def _last_words(output: Sequence[str]) -> str:
    """Returns the exception at the end of the last traceback of Python, or the last line if there is none."""
    lines = [line for line in _last_traceback(output) if line.strip()]
    if not lines:
        return "it printed nothing"
    ends = [number for number, line in enumerate(lines) if EXCEPTION.match(line)]
    if not lines[0].startswith(TRACEBACK) or not ends:
        return lines[-1].strip()
    first = lines[ends[0]].strip()
    following = lines[ends[0] + 1 :][:1] if first.endswith(":") else []  # a message that begins with an empty line
    return " ".join([first, *(line.strip() for line in following)])


TRACEBACK = "Traceback (most recent call last)"
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")  # its line begins at the left margin, unlike those of the frames


def _last_traceback(output: Sequence[str]) -> Sequence[str]:
    """Returns the lines from the last traceback of Python on; only the last lines if there is none."""
    for number in range(len(output) - 1, -1, -1):
        if output[number].startswith(TRACEBACK):
            return output[number:]
    return output[-3:]


def _killed(name: str, killed: OomKills) -> tuple[Failure, str]:
    if killed.group > 0:
        return (
            Failure.OUT_OF_MEMORY,
            f"{name}: {HOST_MEMORY} (limit of --mem or of a container)",
        )
    return Failure.KILLED, name + (" (the kernel killed a process for memory on this node)" if killed.node > 0 else "")


def _aborted(name: str, output: Sequence[str]) -> tuple[Failure, str]:
    """Classifies an abort by its output: NCCL's watchdog thread prints an error of the rank's GPU and aborts the
    process.
    """
    for line in output:
        failure = classify_message(line)
        if failure in (Failure.DEVICE, Failure.KERNEL):
            return failure, f"{name}: {line.strip()}"
    return Failure.KILLED, name


def _is_full(path: Path) -> bool:
    try:
        status = os.statvfs(path)
    except OSError:
        return False
    return status.f_blocks > 0 and status.f_bavail < FULL * status.f_blocks
