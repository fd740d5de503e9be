"""The shell around a worker: what happens in a forked child before and after training.

The child dies with the agent, writes its output into the agent's pipe, turns signals into a flag, calls the entry
(``hpc_train.train.worker:train``), and reports how that ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from hpc_train.elastic import warm_parent
from hpc_train.run.exits import CollectiveFailure, Exit, Failure, classify
from hpc_train.run.heartbeat import SharedBlock
from hpc_train.run.stop import StopFlag
from hpc_train.run.worker_spec import WorkerSpec

Entry = Callable[[WorkerSpec, StopFlag, int | None], Exit]
SHOW_STACKS = signal.SIGQUIT  # as a JVM does: the stacks of all threads, and on with the work
REPORTS = {Exit.DONE: "finished", Exit.STOPPED: "stopped"}


def main(
    warm_parent_pid: int,
    spec: WorkerSpec,
    output: Connection,
    report: Connection,
    block: SharedBlock,
    listener: socket.socket | None,
    entry: str,
) -> None:
    """Runs ``entry`` ("module:function") as the worker ``spec``; never returns.

    ``listener`` is the listening socket of the attempt's store, for rank 0.
    """
    warm_parent.die_with(warm_parent_pid)
    _settle(spec)
    _no_core_files()
    _redirect(output)
    faulthandler.register(SHOW_STACKS, block.descriptor, all_threads=True)
    spec = replace(spec, heartbeat=block.descriptor)
    stop = _flag_on_signals()
    report.send({"kind": "ready"})
    code = _run(entry, spec, stop, listener, report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no exit handlers: after a failure they may wait for peers that are gone


def _settle(spec: WorkerSpec) -> None:
    """Environment and CPUs, before CUDA starts and before any thread or loader: they inherit both."""
    os.environ.update(spec.environment)
    if spec.cpus is not None:
        with contextlib.suppress(OSError):  # the job's CPUs were taken away meanwhile: it runs where it may
            os.sched_setaffinity(0, spec.cpus)


def _no_core_files() -> None:
    """The core of a worker is as large as its memory, and a failing job writes one for each of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def _redirect(output: Connection) -> None:
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()


def _flag_on_signals() -> StopFlag:
    """TERM, USR1 and USR2 set the flag. A Ctrl-C or a hang-up of the terminal is the agent's to judge."""
    stop = StopFlag()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, frame: stop.request(signal.Signals(received).name))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    warm_parent.unblock_signals()
    return stop


def _run(entry: str, spec: WorkerSpec, stop: StopFlag, listener: socket.socket | None, report: Connection) -> Exit:
    try:
        module, function = entry.split(":")
        train: Entry = getattr(importlib.import_module(module), function)
        code = train(spec, stop, None if listener is None else listener.detach())
        report.send({"kind": REPORTS[code], "reason": stop.reason})
        return code
    except BaseException as error:
        report.send(_failure(error))
        traceback.print_exc()
        return Exit.REFUSED if classify(error) is Failure.REFUSED else Exit.FAILED


def _failure(error: BaseException) -> dict[str, Any]:
    own_frame = error.__traceback__
    below = own_frame.tb_next if own_frame else None
    told, echo = "".join(traceback.format_exception(type(error), error, below)), False
    if isinstance(error, CollectiveFailure):
        told, echo = (str(error) if error.__cause__ is None else told), error.echo
    return {
        "kind": "failed",
        "class": classify(error),
        "message": str(error) or type(error).__name__,
        "traceback": told,
        "echo": echo,
        "time": time.time(),
    }
