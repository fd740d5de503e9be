"""Defines the process of a worker: the warm parent that forks it, and the wrapper around its entry point.

The warm parent is the standard library's forkserver with torch imported, so that a worker starts in milliseconds
instead of seconds. It must run no tensor operation: torch hangs in children of a parent that ever ran a parallel one. A
worker dies with the agent, writes into the agent's pipe, translates signals into a flag, calls its entry point
(``hpc_train.train.worker:train``) and reports the outcome.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

from hpc_train.elastic.warm_parent.head_start import IMPORTS, SIGNALS, HeadStart
from hpc_train.errors import UserCodeError, UserError
from hpc_train.machine.environment import rejected_variable
from hpc_train.machine.temporary import SOCKETS, TemporaryDirectory
from hpc_train.run.agent_worker import SharedBlock, WorkerSpec
from hpc_train.run.exits import CollectiveFailure, Exit, Failure, classify
from hpc_train.run.processes import die_with_parent, process_state
from hpc_train.run.requests import StopFlag
from hpc_train.search_path import safe_path, shadowing_file

Entry = Callable[[WorkerSpec, StopFlag], Exit]
SHOW_STACKS = signal.SIGQUIT  # as a JVM does: print the stacks of all threads and continue
REPORTS = {Exit.DONE: "finished", Exit.STOPPED: "stopped"}


def main(
    warm_parent_pid: int,
    spec: WorkerSpec,
    output: Connection,
    report: Connection,
    block: SharedBlock,
    entry: str,
) -> None:
    """Runs ``entry`` ("module:function") as the worker ``spec``; never returns."""
    from hpc_train.elastic.warm_parent.imports import failure  # the warm parent has imported it, and agents must not

    die_with_warm_parent(warm_parent_pid)
    gc.freeze()  # what the warm parent has imported stays shared with it: the collector does not write to it
    gc.enable()
    sys.argv[1:] = [spec.run_dir]  # W&B records it, and the command line of the run may hold values of cluster.env
    os.environ.update(spec.environment)
    if spec.cpus is not None:  # before CUDA, threads and loaders start, which inherit the affinity
        with contextlib.suppress(OSError):  # the job may have lost these CPUs: stay unbound
            os.sched_setaffinity(0, spec.cpus)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a core file would be as large as the worker's memory
    _redirect(output)
    faulthandler.register(SHOW_STACKS, block.descriptor, all_threads=True)
    spec = replace(spec, heartbeat=block.descriptor)
    stop = _flag_on_signals()
    report.send({"kind": "ready"})
    code = _run(entry, spec, stop, report, failure)
    sys.stdout.flush()
    sys.stderr.flush()
    # named semaphores, such as the lock of tqdm, which torch.compile uses: an exit handler would remove them; without
    # it, multiprocessing's resource tracker warns on the console
    for finalizer in list(util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()
    os._exit(code)  # skip exit handlers: after a failure they may wait for peers that are gone


def _redirect(output: Connection) -> None:
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        old.reconfigure(line_buffering=True)  # handlers of loggers may hold it
        # a new one, since the old one cannot change its errors if it was opened on a file: it would seek in the pipe
        errors = "replace" if old.errors == "strict" else old.errors
        raw = io.FileIO(descriptor, "w", closefd=False)
        new = io.TextIOWrapper(io.BufferedWriter(raw), encoding=old.encoding, errors=errors, line_buffering=True)
        setattr(sys, name, new)
    faulthandler.enable()


def _flag_on_signals() -> StopFlag:
    """Makes TERM, USR1 and USR2 set the flag. SIGINT and SIGHUP are ignored because the agent handles them."""
    stop = StopFlag()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, frame: stop.request(signal.Signals(received).name))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    unblock_signals()
    return stop


def _run(entry: str, spec: WorkerSpec, stop: StopFlag, report: Connection, failed_import: BaseException | None) -> Exit:
    try:
        if failed_import is not None:
            raise explained(failed_import)
        module, function = entry.split(":")
        train: Entry = getattr(importlib.import_module(module), function)
        code = train(spec, stop)
        report.send({"kind": REPORTS[code], "reason": stop.reason})
        return code
    except BaseException as error:
        failure = _failure(error, Path(spec.run_dir))
        report.send(failure)
        traceback.print_exc()
        if failure["class"] is Failure.REFUSED:
            return Exit.REFUSED
        return Exit.FAILED


def _failure(error: BaseException, run: Path) -> dict[str, Any]:
    frame = error.__traceback__
    below = frame.tb_next if frame else None
    text = "".join(traceback.format_exception(type(error), error, below))
    secondary = False
    if isinstance(error, UserCodeError):
        text = str(error)
    if isinstance(error, CollectiveFailure):
        text = str(error) if error.__cause__ is None else text
        secondary = error.secondary
    if isinstance(error, SystemExit):
        message = f"the code called exit({error})"
    else:
        message = str(error) or type(error).__name__
    return {
        "kind": "failed",
        "class": classify(error, run),
        "message": _encodable(message),
        "traceback": _encodable(text),
        "secondary": secondary,
        "time": time.time(),
    }


def _encodable(text: str) -> str:
    """Writes out the halves of surrogate pairs, which the name of a file in another encoding has, as in ``\\udce9``.

    They can neither be printed nor sent.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def explained(error: BaseException) -> BaseException:
    """Returns the ``UserError`` for an import of the warm parent that failed because of a file or a variable of the
    user; otherwise ``error``.
    """
    if (message := shadowing_file(error)) is not None:
        return UserError(message)
    return rejected_variable(error, os.environ) or error


FORKSERVER = multiprocessing.get_context("forkserver")
WARM_PARENT = "hpc_train.elastic.warm_parent.imports"
LONGEST_SOCKET = 107  # bytes in the name of a Unix socket, unix(7)
SOCKET_IN_TMPDIR = "/pymp-12345678/listener-12345678"  # what multiprocessing appends to $TMPDIR
LOST = 255  # multiprocessing's exit code of a process whose forkserver has died


def start_warm_parent(preload: Sequence[str], begun: HeadStart | None = None) -> int:
    """Starts the warm parent, which imports ``preload`` in the background; returns its pid.

    If an import fails, the workers report its exception, instead of dying with their warm parent.

    Args:
        begun: becomes the warm parent; without it that is a new process.
    """
    FORKSERVER.set_forkserver_preload([WARM_PARENT])
    os.environ[IMPORTS] = ",".join(preload)
    with contextlib.nullcontext() if begun is None else begun.becomes_forkserver():
        return ensure_warm_parent()


def ensure_warm_parent() -> int:
    """Restarts the warm parent if it was killed; returns its pid."""
    _claim_socket_folder()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    was_safe = "PYTHONSAFEPATH" in os.environ
    os.environ.update(safe_path())  # workers get the search path of this process
    try:
        resource_tracker.ensure_running()  # leaves INT and TERM unblocked
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        forkserver.ensure_running()
    finally:
        if not was_safe:
            os.environ.pop("PYTHONSAFEPATH", None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def _claim_socket_folder() -> None:
    """Creates the folder of multiprocessing's sockets, which workers and loaders inherit.

    It is under /tmp if the names of sockets under $TMPDIR would be too long (fixed in Python 3.14).
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" in config:
        return
    fits = len(os.fsencode(tempfile.gettempdir() + SOCKET_IN_TMPDIR)) <= LONGEST_SOCKET
    parent = Path(tempfile.gettempdir() if fits else "/tmp")
    folder = TemporaryDirectory.make(SOCKETS, parent)
    config["tempdir"] = str(folder.path)
    util.Finalize(None, folder.remove, exitpriority=-100)


def died_with_warm_parent(exit_code: int | None) -> bool:
    """Returns whether a process that ended with ``exit_code`` died because its warm parent died.

    A dying parent closes its pipes before the kernel shows it as dead, so this polls for a second.
    """
    until = time.monotonic() + 1.0
    while exit_code == LOST and time.monotonic() < until:
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if pid is None or process_state(pid) in ("", "Z"):
            return True
        time.sleep(0.02)
    return False


CRASHES = (signal.SIGABRT, signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)


def crash_of(warm_parent: int) -> signal.Signals | None:
    """Returns the signal of ``CRASHES`` that ended the process; None if another one did, or none within a second."""
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        try:
            end = os.waitid(os.P_PID, warm_parent, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # multiprocessing reaps it
        except ChildProcessError:
            return None
        if end is not None:
            killed = end.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            if killed and end.si_status in CRASHES:
                return signal.Signals(end.si_status)
            return None
        time.sleep(0.02)
    return None


def fork_process(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Forks a process that calls ``target(*args)``; waits for the imports of the warm parent if necessary."""
    process = FORKSERVER.Process(target=target, args=args, daemon=False)
    process.start()
    return process


def die_with_warm_parent(warm_parent: int) -> None:
    """Makes the kernel kill this process when the warm parent dies, which dies with the agent. A forked process calls
    it first.

    The warm parent ends when no process holds the write end of its pipe. Forked processes inherit that end and close it
    here, so that only the agent holds it.
    """
    die_with_parent(warm_parent)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]


def unblock_signals() -> None:
    """Delivers the signals that arrived since the fork; called after the handlers are installed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
