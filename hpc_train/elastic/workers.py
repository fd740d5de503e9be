"""Handles the workers of one node in one attempt for the agent: processes, output, reports, and the class of a silent
death.

Workers write into pipes that the agent drains, and a thread of the agent writes the log, one file per attempt
(``run/file_writer.py``), so neither waits for a file system.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

from hpc_train.elastic.decision import WorkerFailure, ended_without_report
from hpc_train.elastic.script import Script, ScriptProcess, ScriptProgress
from hpc_train.elastic.worker_process import FORKSERVER, REPORTS, died_with_warm_parent, fork_process, main
from hpc_train.machine.kernel_counters import OomKills
from hpc_train.opening import open_to_append
from hpc_train.run.agent_worker import SharedBlock, WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import HOST_MEMORY, SHELL_SIGNALS, Exit, Failure, classify_message, end_of_script
from hpc_train.run.file_writer import FileWriter
from hpc_train.run.requests import STOP_SIGNALS
from hpc_train.run.streams import unescaped

SAME_SIGNAL_S = 0.5
READ_BYTES = 1 << 16
CHILDREN_S = 1.0  # for processes that a worker forked to end by themselves; loader processes die with their worker
KILLED_S = 5.0  # for killed processes to end; the kernel may have to release much memory of a GPU


@dataclass
class Worker:
    """Holds one worker process.

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
        """Returns the failures of workers so far, except of workers that the agent ended itself."""
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
        """Kills the live workers and waits until they are gone; kills what ended scripts have left behind."""
        for worker in self.alive:
            worker.ended_by_agent = True
            if isinstance(worker.process, ScriptProcess):
                worker.process.kill_session()
            else:
                worker.signal(signal.SIGKILL)
        while self.alive:
            self.wait(1.0)
        for worker in self._workers:
            if isinstance(worker.process, ScriptProcess):
                worker.process.kill_session()

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
            if isinstance(worker.block, ScriptProgress):
                worker.block.note_output()

    def _read_reports(self, worker: Worker) -> None:
        try:
            while not worker.reports.closed and worker.reports.poll():
                report = worker.reports.recv()
                if report["kind"] == "ready":
                    worker.ready = True
                    continue
                worker.end = report
                if report["kind"] == "failed":
                    fields = report["message"], report["traceback"], report["time"]
                    self._failures[worker.rank] = WorkerFailure(
                        worker.rank, Failure(report["class"]), *fields, waits=report.get("secondary", False)
                    )
        except (EOFError, OSError):
            worker.reports.close()

    def _note_end(self, worker: Worker) -> None:
        process = worker.process
        is_silent = worker.end is None and not worker.ended_by_agent
        if is_silent:
            code = process.exitcode or 0
            output = self._log.tail(worker.rank, RETAINED_LINES)
            killed = OomKills.now() - self._killed_before
            end = None
            if isinstance(process, ScriptProcess):
                if code != 0:
                    process.kill_session()  # what it has started; now, since its id may soon be that of another process
                outcome = end_of_script(code, asked_to_stop=worker.stop_forwarded or self._stopped_with_agent(code))
                if isinstance(outcome, Exit):
                    worker.end = {"kind": REPORTS[outcome]}
                elif process.runs_roles and code > 0:
                    end = Failure.ROLE, output[-1] if output else f"it exited with code {code}"
                else:
                    end = class_of_script_end(code, outcome, killed, output)
            else:
                end = class_of_end(code, killed, died_with_warm_parent(code), output)
            if end is not None:
                tail = [] if end[0] is Failure.ROLE else self._log.tail(worker.rank)
                self._failures[worker.rank] = ended_without_report(worker.rank, code, end, tail, time.time())
        if isinstance(process, ScriptProcess):
            process.close()
        worker.output.close()
        beat = worker.block.beat()
        worker.step = 0 if beat is None else beat.step
        worker.block.close()
        worker.gone = True

    def _stopped_with_agent(self, code: int) -> bool:
        """Returns whether a script died of a stop signal that its agent also received, since Slurm signals all
        processes."""
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
        # NCCL's watchdog thread prints an error of the rank's GPU and aborts the process
        for line in output:
            reported = classify_message(line)
            if reported in (Failure.DEVICE, Failure.KERNEL):
                return reported, f"{name}: {line.strip()}"
    if exit_code == -signal.SIGBUS and SHARED_MEMORY.is_dir():
        status = os.statvfs(SHARED_MEMORY)
        if status.f_blocks > 0 and status.f_bavail < FULL * status.f_blocks:
            return Failure.DISK_FULL, f"{name}: {SHARED_MEMORY} is full (batch.loader_workers=0 does not use it)"
    return Failure.KILLED, name


def cpu_limit() -> str:
    """Returns text for the message about a killed process if the kernel limits its CPU time; empty without a limit."""
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
    message = ": ".join(filter(None, [f"run.command exited with code {exit_code}", _last_words(output)]))
    if failure is Failure.REFUSED:
        return failure, message
    classified = next(filter(None, map(classify_message, _last_traceback(output))), None)
    return classified or failure, message


def _last_words(output: Sequence[str]) -> str:
    """Returns the exception at the end of the last traceback of Python, or the last line if there is none; empty
    without any output.
    """
    lines = [line for line in _last_traceback(output) if line.strip()]
    if not lines:
        return ""
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


LIMIT_BYTES = 100 * 2**20
RETAINED_LINES = 500  # per rank; an aborting worker prints the stacks of all threads after the cause
TAIL_LINES = 50  # per rank, appended to a log that reached its limit
LONGEST_LINE = 64 * 1024


@dataclass(frozen=True)
class Echo:
    """Prints lines of the workers to standard output, in a thread that may wait for a terminal or a pipe.

    Attributes:
        shows_rank: whether each line begins with its rank.
    """

    writer: FileWriter
    shows_rank: bool

    def put(self, rank: int, lines: Sequence[bytes]) -> None:
        head = f"[{rank}] " if self.shows_rank else ""
        text = "".join(f"{head}{line.decode(errors='replace')}\n" for line in lines)

        def write(again: bool) -> None:
            stream = unescaped(sys.stdout)  # the output of the user's own program
            stream.write(text)
            stream.flush()

        self.writer.put(self.STDOUT, write, len(text), wait=False)

    STDOUT = Path("/dev/stdout")  # the name of the queue


class WorkerLog:
    """Writes one log file. ``write(rank, data)`` takes bytes as they arrive and writes complete lines.

    Args:
        echo: prints the lines as well.
    """

    def __init__(
        self, path: Path, writer: FileWriter, limit_bytes: int = LIMIT_BYTES, *, echo: Echo | None = None
    ) -> None:
        self.path = path
        self._writer = writer
        self._echo = echo
        self._file: BinaryIO | None = None  # used by the writer's thread only
        self._room = limit_bytes
        self._limit = limit_bytes
        self._partial: dict[int, bytes] = {}
        self._tails: dict[int, deque[bytes]] = {}

    def write(self, rank: int, data: bytes) -> None:
        *lines, rest = (self._partial.get(rank, b"") + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines = [*lines, rest]
            rest = b""
        self._partial[rank] = rest
        if lines:
            self._tails.setdefault(rank, deque(maxlen=RETAINED_LINES)).extend(lines)
            # in UTC, so that files of several nodes can be merged: 2026-01-31T12:00:00.000
            now = datetime.now(UTC).isoformat(timespec="milliseconds").encode()[:23]
            head = b"%s [%d] " % (now, rank)
            if self._echo is not None:
                self._echo.put(rank, lines)
            self._append(b"".join(b"%s%s\n" % (head, line) for line in lines))

    def tail(self, rank: int, lines: int = 20) -> list[str]:
        """Returns the last lines of a rank, including those that did not fit into the file."""
        retained = [*self._tails.get(rank, ()), *filter(None, [self._partial.get(rank)])]
        return [line.decode(errors="replace") for line in retained[-lines:]]

    def close(self) -> None:
        """Writes unfinished lines, and after the limit was reached, the last lines of each rank.

        Returns when the file is complete, unless the file system fails or does not respond.
        """
        for rank, rest in sorted(self._partial.items()):
            if rest:
                self.write(rank, b"\n")
        if self._room == 0:
            last = {rank: list(tail)[-TAIL_LINES:] for rank, tail in sorted(self._tails.items())}
            tails = [b"[%d] %s\n" % (rank, line) for rank, lines in last.items() for line in lines]
            self._put(b"--- the last lines of each rank ---\n" + b"".join(tails))
        self._writer.put(self.path, lambda again: self._close_file())

    def _append(self, data: bytes) -> None:
        if self._room == 0:
            return
        if len(data) > self._room:
            self._room = 0
            self._put(b"--- this log has reached its limit of %d bytes; the rest is omitted ---\n" % self._limit)
            return
        self._room -= len(data)
        self._put(data)

    def _put(self, data: bytes) -> None:
        left = memoryview(data)

        def write(again: bool) -> None:
            nonlocal left
            while left:
                left = left[self._write(left) :]

        self._writer.put(self.path, write, len(data), wait=False)

    def _write(self, data: memoryview) -> int:
        """Writes a part of ``data``, returns its size; opens the file again after an error: it may be stale."""
        if self._file is None:
            self.path.parent.mkdir(exist_ok=True)
            self._file = open_to_append(self.path, self.path.parent)
        try:
            return self._file.write(data) or 0
        except OSError:
            with suppress(OSError):
                self._close_file()
            raise

    def _close_file(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            file.close()


RETAINED_ATTEMPTS = 10
# the number in the names of stacks, collectives and NCCL's logs; answers to `stacks` begin with another number
_OF_ATTEMPT = re.compile(r"(?:(?:hang|slow)-.*-|collectives-|nccl-|)(\d{3,})(?:\.txt$|-rank-)")


def prune_logs(run: RunDirectory, attempt: int) -> None:
    """Removes the stacks and NCCL's logs, a file per rank, of all but the last ``RETAINED_ATTEMPTS`` attempts."""
    for folder in (run.logs / "stacks", run.logs / "nccl"):
        for path in folder.iterdir() if folder.is_dir() else ():
            match = _OF_ATTEMPT.match(path.name)
            if match is not None and int(match[1]) <= attempt - RETAINED_ATTEMPTS:
                path.unlink(missing_ok=True)
