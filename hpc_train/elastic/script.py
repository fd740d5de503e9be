"""Starts and watches the processes of ``run.command``, which need not use hpc_train.

A script gets the variables that torchrun sets and starts its own store at ``MASTER_PORT``, a port that was free when
the attempt began and differs between attempts. It needs no warm parent: it is a new program in a separate session, so
that all processes that it has started can be killed with it. A stop request reaches it as SIGTERM.

Its sign of life is the file ``$HPC_TRAIN_PROGRESS`` of its rank, which it touches or into which it writes the number of
its step, or a newer file in ``run.progress_dir``, which counts for all ranks. Only the agent of node 0 looks there, and
the rendezvous server notifies the others, because thousands of nodes that look at thousands of files keep a shared file
system busy. If ``elastic.hang_timeout_s`` is a number, each line that a rank prints is a sign of life, too, and a rank
without any sign counts as hung. Otherwise a rank without the file and the directory is not watched.

Nothing in a script answers requests for its stacks. A handler of a signal would have to be installed in its interpreter
before its own code runs (``sitecustomize``, ``PYTHONSTARTUP``), would be inherited by programs that do not expect it,
and would be replaced by a script that uses the signal. So its stacks are read from outside, by py-spy where it is
installed, and from the kernel.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hpc_train.config.import_path import install_extra
from hpc_train.config.roles import ROLE
from hpc_train.config.schema import Config
from hpc_train.config.values import command_words, parse_hang_timeout
from hpc_train.elastic.hang_bounds import START_S
from hpc_train.layout.user_code import PYTHONS
from hpc_train.machine.temporary import SCRIPTS, TemporaryDirectory
from hpc_train.run.agent_worker import Beat, Phase, WorkerSpec
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RUN_DIRECTORY, RunDirectory
from hpc_train.run.event_log import Clock
from hpc_train.run.files import BackgroundCall
from hpc_train.run.processes import command_line, process_tree, threads_in_kernel
from hpc_train.telemetry.metrics import MetricsLog

PROGRESS = "HPC_TRAIN_PROGRESS"
TOKEN = "HPC_TRAIN_ROLES_TOKEN"  # a secret of the supervisors of an attempt (``elastic/roles.py``)
LOOK_EVERY_S = 2.0  # between two looks into run.progress_dir, which may be on a network file system
LOOK_S = 0.2  # wait at most this long for such a look, which goes on in its thread
LOOK_SHARE = 0.05  # of the time, at most, that is spent on looks
NOTIFIED_PER_S = 500  # agents that are notified of newer files
MOST_ENTRIES = 20_000  # of run.progress_dir and the directories below it


@dataclass
class FolderProgress:
    """Holds the time of the newest change in ``run.progress_dir``, in nanoseconds since 1970; 0 without any."""

    newest: int = 0

    def note(self, changed: int) -> None:
        self.newest = max(self.newest, changed)


@dataclass(frozen=True)
class Script:
    """Describes the command of a run, as the agent of a node starts it in each attempt.

    Attributes:
        words: the program and its arguments, with the files of the frozen code.
        environment: what frozen code adds to the environment.
        run_id: the same for all attempts and nodes.
        folder: node-local, for the progress files of the ranks.
        max_restarts: ``elastic.max_restarts``.
        hears_output: whether a line of output is a sign of life.
        progress: what is known of ``run.progress_dir``.
        runs_roles: whether it is the supervisor of ``run.roles``, and not a command of the user.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    run_id: str
    folder: Path
    max_restarts: int | None = None
    hears_output: bool = False
    progress: FolderProgress = field(default_factory=FolderProgress)
    runs_roles: bool = False

    @classmethod
    def of(cls, run: RunDirectory, config: Config, folder: Path) -> Script:
        """Returns the script of ``run``."""
        code = frozen_code(run)
        runs_roles = config.run.command is None
        words = command_words(config.run.command) or ["python", "-m", "hpc_train.elastic.roles"]
        if words[0] in PYTHONS:
            words[0] = sys.executable
        script = cls(
            words,
            {},
            str(run.record().get("run_id") or run.path.name),
            folder,
            config.elastic.max_restarts,
            hears_output=not runs_roles and bool(parse_hang_timeout(config.elastic.hang_timeout_s)),
            runs_roles=runs_roles,
        )
        if code is None:
            return script
        files = [word for word in words if word.endswith(".py")]
        # Python puts the current directory or that of the script first, which PYTHONSAFEPATH prevents
        folders = [code.copied_path(Path(word).parent) for word in files if Path(word).is_file()]
        variables = code.environment()
        path = [*(str(copy) for copy in folders if copy is not None), variables["PYTHONPATH"]]
        copies = {word: code.copied_path(word) for word in files}
        frozen_words = [str(copies.get(word) or word) for word in words]
        return replace(script, words=frozen_words, environment=variables | {"PYTHONPATH": os.pathsep.join(path)})

    def start(self, spec: WorkerSpec, output: Connection) -> ScriptProcess:
        """Starts the command as the worker ``spec``; its standard output and error go to ``output``."""
        cpus = "-" if spec.cpus is None else ",".join(map(str, spec.cpus))
        wrapper = [sys.executable, "-m", "hpc_train.elastic.exec_script", str(os.getpid()), cpus]
        progress = self.folder / f"progress-{spec.attempt:03d}-{spec.local_rank}"
        variables = {**os.environ, **self.environment, **spec.environment, **self._torchrun_variables(spec)}
        variables |= {PROGRESS: str(progress), RUN_DIRECTORY: spec.run_dir}
        if self.runs_roles:
            variables[TOKEN] = spec.store_prefix
        metrics = None
        if spec.rank == 0:
            run = RunDirectory(Path(spec.run_dir))
            metrics = StepLog(run, spec.attempt, spec.layout.world_size, Clock.inherited(spec.environment))
        process = subprocess.Popen(
            [*wrapper, *self.words],
            stdin=subprocess.DEVNULL,
            stdout=output.fileno(),
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        shown = ScriptProgress(progress, self.progress, metrics, process.pid, self.hears_output)
        return ScriptProcess(process, shown, self.runs_roles)

    def _torchrun_variables(self, spec: WorkerSpec) -> dict[str, str]:
        """Returns the variables that torchrun documents, for a script that starts its own store at the master's port.

        The count of restarts goes on after a requeue, which the limit does not count.
        """
        world = str(spec.layout.world_size)
        return {
            "RANK": str(spec.rank),
            "LOCAL_RANK": str(spec.local_rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(spec.node_rank),
            "GROUP_WORLD_SIZE": str(spec.nodes),
            "ROLE_RANK": str(spec.rank),
            "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": os.environ.get(ROLE, "default"),
            "MASTER_ADDR": spec.master_address,
            "MASTER_PORT": str(spec.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(spec.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(max(self.max_restarts or 0, spec.attempt)),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }


@dataclass
class FolderLooks:
    """Looks for newer files in a directory and the directories below it; used by the agent of node 0 only.

    Attributes:
        nodes: the number of agents that are notified.
        bound_s: the time after which workers without progress count as hung.
    """

    path: Path
    nodes: int
    bound_s: float
    _looking: BackgroundCall[tuple[int, float]] = field(init=False)
    _next: float = field(default=0.0, init=False)
    _newest: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._looking = BackgroundCall(lambda: _newest_change(self.path))

    @classmethod
    def of(cls, config: Config, nodes: int) -> FolderLooks | None:
        """Returns the looks into ``run.progress_dir``; None without one."""
        bound_s = parse_hang_timeout(config.elastic.hang_timeout_s) or START_S
        directory = config.run.progress_dir
        if directory is None:
            return None
        return cls(Path(directory), nodes, bound_s)

    def new(self, now: float) -> int | None:
        """Returns the time of a new change, in nanoseconds since 1970; None if there is none or it is too early.

        Args:
            now: time on the monotonic clock.
        """
        if now < self._next:
            return None
        try:
            newest, walk_s = self._looking.poll(LOOK_S)
        except TimeoutError:  # the next call asks for the result of the same look
            return None
        self._next = now + look_pause_s(walk_s, self.nodes, self.bound_s)
        if newest <= self._newest:
            return None
        self._newest = newest
        return newest


def look_pause_s(walk_s: float, nodes: int, bound_s: float) -> float:
    """Returns the pause after a look that took ``walk_s``: several looks come within the bound of a hang."""
    return max(LOOK_EVERY_S, min(max(walk_s / LOOK_SHARE, nodes / NOTIFIED_PER_S), bound_s / 4))


def _newest_change(path: Path) -> tuple[int, float]:
    """Returns the time of the newest change, in nanoseconds since 1970, and the seconds that it took to find it."""
    began = time.monotonic()
    newest = 0
    left = MOST_ENTRIES
    for folder, _, files in os.walk(path):
        for name in files[:left]:
            with suppress(OSError):
                newest = max(newest, (Path(folder) / name).stat().st_mtime_ns)
        left -= len(files)
        if left <= 0:
            break
    return newest, time.monotonic() - began


LOG_EVERY_S = 5.0


class StepLog:
    """Writes the steps that rank 0 of a script reports as metrics of the run, at most one line per ``LOG_EVERY_S``."""

    def __init__(self, run: RunDirectory, attempt: int, world_size: int, clock: Clock) -> None:
        self._clock = clock
        self._head = {"attempt": attempt, "world_size": world_size}
        self._log = MetricsLog(run, attempt)
        self._last: tuple[float, int] | None = None  # time and step of the last line
        self._unwritten: int | None = None

    def note(self, step: int) -> None:
        self._unwritten = step
        if self._last is None or self._clock.now() - self._last[0] >= LOG_EVERY_S:
            self._write()

    def close(self) -> None:
        self._write()
        self._log.close()

    def _write(self) -> None:
        if self._unwritten is None:
            return
        now = self._clock.now()
        step = self._unwritten
        self._unwritten = None
        line: dict[str, Any] = {"time": now, "step": step} | self._head
        if self._last is not None and step > self._last[1]:
            line["step_s"] = (now - self._last[0]) / (step - self._last[1])
        self._last = now, step
        self._log.write(line)


class ScriptProgress:
    """Shows the progress of a script to the agent, in place of the shared memory of a worker
    (``run/agent_worker.SharedBlock``).

    Args:
        metrics: gets the numbers that the script writes into its file; None on other ranks than 0.
    """

    def __init__(
        self,
        path: Path,
        folder: FolderProgress,
        metrics: StepLog | None = None,
        pid: int | None = None,
        hears_output: bool = False,
    ) -> None:
        self._path = path
        self._folder = folder
        self._metrics = metrics
        self._began = time.time_ns()
        self._changed = 0, self._began
        self._hears_output = hears_output
        self._beat = Beat(0, Phase.STARTING, time.monotonic(), 0, 0.0) if hears_output else None
        self._stacks = ProcessStacks(pid)

    def note_output(self) -> None:
        """Takes what the rank has printed as a sign of life, unless only its progress counts."""
        if self._hears_output:
            step = 0 if self._beat is None else self._beat.step
            self._beat = Beat(step, Phase.RUNNING, time.monotonic(), step, 0.0)

    def beat(self) -> Beat | None:
        """Returns the newest sign of life; None before the first, if only progress is one."""
        touched = 0
        with suppress(OSError):
            touched = self._path.stat().st_mtime_ns
        changed = touched, max(self._began, self._folder.newest)
        if changed != self._changed:
            self._changed = changed
            number = None
            # the file may be empty, or have something else than a number
            with suppress(OSError, ValueError), self._path.open("rb") as file:
                number = int(file.read(64))
            if number is not None and self._metrics is not None:
                self._metrics.note(number)
            before = 0 if self._beat is None else self._beat.step
            step = before + 1 if number is None else number
            self._beat = Beat(step, Phase.RUNNING, time.monotonic(), step, 0.0)
        return self._beat

    def ask(self) -> int:
        return 0

    def answer_to(self, number: int) -> bytes:
        return b""

    def clear_stacks(self) -> None:
        self._stacks.begin()

    def stacks(self) -> str:
        """Returns what the threads of the rank do; empty until it is known."""
        return self._stacks.text()

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._path.unlink(missing_ok=True)


PY_SPY = "py-spy"
PY_SPY_S = 1.5  # for its dump, which takes some ten milliseconds
MOST_PROCESSES = 16  # of a rank whose stacks are shown


class ProcessStacks:
    """Shows from outside what a process and its child processes do: their threads as the kernel sees them, and their
    Python stacks by py-spy, which reads the memory of a process and does not stop it.

    Args:
        pid: the process; None shows nothing.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._texts: list[str] = []  # of each process
        self._dumps: list[subprocess.Popen[str]] = []  # likewise; empty without py-spy
        self._until = 0.0

    def begin(self) -> None:
        """Reads the state of the processes, and starts py-spy if it is installed."""
        if self._pid is None:
            return
        pids = process_tree(self._pid)[:MOST_PROCESSES]
        self._texts = ["\n  ".join([f"process {pid}: {command_line(pid)}", *threads_in_kernel(pid)]) for pid in pids]
        folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        program = shutil.which(PY_SPY, path=os.pathsep.join(folders))
        if program is None:
            self._texts.append(f"(no Python stacks: {PY_SPY} is not installed; {install_extra('stacks')})")
            return
        self._dumps = [_dump_of(pid, program) for pid in pids]
        self._until = time.monotonic() + PY_SPY_S

    def text(self) -> str:
        """Returns the states and stacks; empty while py-spy works, which is killed after ``PY_SPY_S``."""
        working = [dump for dump in self._dumps if dump.poll() is None]
        if working and time.monotonic() < self._until:
            return ""
        for dump in working:
            dump.kill()
        for number, dump in enumerate(self._dumps):
            printed, _ = dump.communicate()
            stacks = printed.partition("\n\n")[2].rstrip()  # without the head, which names the process
            if stacks:
                self._texts[number] += f"\n{stacks}"
        self._dumps = []
        return "\n".join(self._texts)


def _dump_of(pid: int, program: str) -> subprocess.Popen[str]:
    """Starts py-spy, which prints the stacks of a process; it fails for other programs than Python."""
    return subprocess.Popen(
        [program, "dump", "--nonblocking", "--pid", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )


class ScriptProcess:
    """Wraps the process of a script in the part of ``multiprocessing.Process`` that agents use."""

    def __init__(self, process: subprocess.Popen[bytes], progress: ScriptProgress, runs_roles: bool) -> None:
        self._process = process
        self.runs_roles = runs_roles
        self.progress = progress
        self.pid = process.pid
        self.sentinel = os.pidfd_open(process.pid)
        self._closed = False

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def kill_session(self) -> None:
        """Kills the script and all processes that it has started and that have not left its process group."""
        if self._process.returncode is not None and Path(f"/proc/{self.pid}").exists():
            return  # the script and its group are gone, and a new process has its id
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.sentinel)


@contextmanager
def node_local_folder() -> Iterator[Path]:
    """Yields a directory for the progress files of this node's ranks."""
    folder = TemporaryDirectory.make(SCRIPTS, Path(tempfile.gettempdir()))
    try:
        yield folder.path
    finally:
        folder.remove()
