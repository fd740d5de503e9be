"""Defines small worker entries without torch for the tests of the agent, and runs an agent with one of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from hpc_train.errors import UserError
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.files import read_json
from hpc_train.run.requests import StopFlag
from hpc_train.telemetry.metrics import MetricsLog
from tests import warm_parents


def _mark(spec: WorkerSpec, text: str) -> None:
    Path(spec.run_dir, f"mark-{spec.rank}").write_text(f"{os.getpid()} {text}")


def _wait_for_stop(stop: StopFlag, seconds: float = 30) -> Exit:
    until = time.monotonic() + seconds
    while not stop.requested and time.monotonic() < until:
        time.sleep(0.02)
    return Exit.STOPPED if stop.requested else Exit.DONE


_kept: list[object] = []


def finish(spec: WorkerSpec, stop: StopFlag) -> Exit:
    _kept.append(multiprocessing.Lock())  # a library's global lock, such as that of tqdm
    print(f"hello from {spec.rank} of {spec.layout.world_size}")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    _mark(spec, f"{spec.master_port} {os.environ['OMP_NUM_THREADS']} {files} {spec.store_prefix}")
    return Exit.DONE


def trains(spec: WorkerSpec, stop: StopFlag) -> Exit:
    from hpc_train.train.worker import train

    _mark(spec, str(spec.attempt))
    return train(spec, stop)


LINES = 5_000  # more than a pipe holds


def records_gpus_and_prints_much(spec: WorkerSpec, stop: StopFlag) -> Exit:
    _mark(spec, os.environ["CUDA_VISIBLE_DEVICES"])
    for number in range(LINES):
        print(f"line {number} " + "x" * 60)
    sys.stdout.write("no newline at the end")
    return Exit.DONE


def until_stopped(spec: WorkerSpec, stop: StopFlag) -> Exit:
    _mark(spec, str(spec.master_port))
    return _wait_for_stop(stop)


def stops_and_finishes_when_told(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Waits for a stop request in the first attempt; the next one finishes when told."""
    if spec.attempt > 0:
        return finish_when_told(spec, stop)
    _mark(spec, "")
    return _wait_for_stop(stop)


def finish_when_told(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Finishes as soon as the run directory contains a file ``go``."""
    _mark(spec, "")
    until = time.monotonic() + 60
    while not Path(spec.run_dir, "go").exists():
        if time.monotonic() > until:
            return Exit.FAILED
        time.sleep(0.02)
    return Exit.DONE


def one_is_killed_when_told(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Kills rank 1 in the first attempt when ``go`` exists; the next attempt finishes at once."""
    if spec.attempt > 0:
        return Exit.DONE
    code = finish_when_told(spec, stop)
    if spec.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return code if spec.rank == 1 else _wait_for_stop(StopFlag())


def one_is_killed_when_told_twice(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Kills rank 1 in the first attempt when ``go`` is removed; the next attempt finishes when ``go-again`` is. The
    files are removed and not created because the disk is full.
    """
    if spec.attempt == 0:
        _mark(spec, "")
    path, until = Path(spec.run_dir, "go-again" if spec.attempt else "go"), time.monotonic() + 60
    while path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    if spec.rank == 1 and spec.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return Exit.DONE if spec.attempt else _wait_for_stop(StopFlag())


def logs_many_steps(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Logs ``$STEPS`` steps as rank 0 of a training does, and records the agent's memory on the way."""
    run, steps, found = RunDirectory(Path(spec.run_dir)), int(os.environ["STEPS"]), []
    agent = psutil.Process(read_json(run.attempts / f"{spec.attempt:03d}.json")["pid"])
    metrics, events = MetricsLog(run, spec.attempt), EventLog.open(run, "rank-0000", spec.attempt, 0)
    for step in range(1, steps + 1):
        line = {"time": time.time(), "step": step, "attempt": spec.attempt, "loss": 1.0, "tokens_per_s": 1.0}
        metrics.write(line | {f"value_{number}": step / 7 for number in range(15)})
        print(f"step {step}/{steps}  loss 1.0000  lr 0.001  grad_norm 1.0  1,000 tokens/s")
        if step % 20 == 0:
            events.write("checkpoint_saved", step=step, path="/a/checkpoint", bytes=1, seconds=1.0)
        if step % (steps // 10) == 0:
            time.sleep(1.5)  # the agent looks twice per second
            files = sum(len(names) for _, _, names in os.walk(run.path))
            found.append({"memory": agent.memory_info().rss, "threads": agent.num_threads(), "files": files})
    _mark(spec, json.dumps(found))
    return Exit.DONE


def _lose_connection() -> Exit:
    """Raises the error of the other ranks when one dies: it occurs after the first failure, but may arrive first."""
    raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")


def one_leaves_children(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Rank 1 forks two processes, one of which never ends, and is killed; rank 0 reports a lost connection.

    The next attempt requires that both processes are gone, as they would hold the memory of its GPU.
    """
    children = Path(spec.run_dir, "children")
    if spec.attempt > 0:
        own = [Path(f"/proc/{pid}/stat") for pid in children.read_text().split()]
        assert not [path for path in own if path.exists() and ") Z " not in path.read_text()]
        return Exit.DONE
    if spec.rank == 1:
        pids = []
        for seconds in (0.3, 120.0):
            pids.append(os.fork())
            if pids[-1] == 0:
                time.sleep(seconds)
                Path(spec.run_dir, f"slept-{seconds}").touch()
                os._exit(0)
        children.write_text(" ".join(map(str, pids)))
        print("the last words of rank one", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return _lose_connection()


def one_raises(spec: WorkerSpec, stop: StopFlag) -> Exit:
    if spec.rank == 1:
        time.sleep(0.3)
        raise ArithmeticError("rank one cannot count")
    return _lose_connection() if spec.rank == 0 else _wait_for_stop(StopFlag())


def one_gpu_fails_in_the_watchdog(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Aborts rank 1; the abort prints the stacks of all threads after the error."""

    def abort(depth: int) -> None:
        if depth > 0:
            abort(depth - 1)
        words = "watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered"
        os.write(
            2, f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {words}\n".encode()
        )
        os.abort()

    if spec.rank == 1:
        for _ in range(3):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        abort(60)
    return _lose_connection()


def one_is_killed(spec: WorkerSpec, stop: StopFlag) -> Exit:
    if spec.rank == 1:
        print("the last words of rank one", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return _lose_connection()


def one_exits(spec: WorkerSpec, stop: StopFlag) -> Exit:
    if spec.rank == 1:
        os._exit(0)
    return _wait_for_stop(StopFlag())


def one_refuses(spec: WorkerSpec, stop: StopFlag) -> Exit:
    if spec.rank == 1:
        raise UserError("no such data", where="data.path", fix="another path")
    return _lose_connection()


def never_stops(spec: WorkerSpec, stop: StopFlag) -> Exit:
    _mark(spec, "")
    return _wait_for_stop(StopFlag())


def serve(listener: socket.socket) -> threading.Thread:
    """Starts a store that sends ``welcome`` to every client."""

    def welcome() -> None:
        while True:
            connection, _ = listener.accept()
            connection.sendall(b"welcome")
            connection.close()

    thread = threading.Thread(target=welcome, daemon=True)
    thread.start()
    return thread


def start_agent(
    run: Path, entry: str, store: str = "tests.elastic.entries:serve", **environment: str
) -> subprocess.Popen[str]:
    """Starts an agent in its own process and session, as a launcher does."""
    module = entry if ":" in entry else f"tests.elastic.entries:{entry}"
    script = (
        "import os, sys; from pathlib import Path\n"
        "from hpc_train.elastic.agent import AgentOptions, run_agent\n"
        "from hpc_train.run.directory import RunDirectory\n"
        "from rich.console import Console\n"
        "from hpc_train.telemetry.progress import Progress\n"
        f"run = RunDirectory(Path({str(run)!r}))\n"
        "tick = Progress(run, Console()).tick if 'FOREGROUND' in os.environ else None\n"
        f"options = AgentOptions({module!r}, {store!r}, join=os.environ.get('JOIN'))\n"
        "code = run_agent(run, options, on_tick=tick)\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=warm_parents.with_server(os.environ) | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
