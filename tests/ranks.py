"""Runs a function on several ranks, which are real processes that communicate over gloo.

``run_ranks`` forks new processes for each call; ``run_on_world`` keeps the ranks of each world size for the whole test
process. The ranks are forked from a warm parent that has imported torch but has run no operator: a process whose parent
has run a parallel operator can deadlock in its own. The processes of a test session fork their warm parents from one
server, see ``tests/warm_parents``.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import multiprocessing as mp
import os
import random
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hpc_train.run.processes import without_collector

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.forkserver"])


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Calls ``function(rank, world_size, *args)`` on every rank of a gloo group and returns the results by rank.

    ``function`` must be defined at module level. Arguments and results are pickled: pass tensors as arrays or lists.
    """
    world = _World(world_size)
    try:
        return world.run(function, args, timeout, again=False)
    finally:
        world.kill()


def run_on_world(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120, imports: Sequence[str] = ()
) -> list[Any]:
    """Does the same on ranks that earlier calls have used, so that the caches of torch and of the tests are warm.

    The first rank imports the modules ``imports`` before the others are forked from it. ``function`` must not patch
    anything and must create process groups only through ``kept``. Each call restores the random state, the defaults of
    torch and the environment. A world is replaced after a failure or a timeout, and when it has too many threads.
    """
    key = world_size, tuple(imports)
    world = _WORLDS.get(key) or _World(world_size, imports)
    _WORLDS[key] = world
    reusable = False
    try:
        result = world.run(function, args, timeout, again=True)
        reusable = world.threads() <= MOST_THREADS
        return result
    finally:
        if reusable:
            world.pause()
        else:
            world.kill()
            del _WORLDS[key]


class _World:
    """Holds ranks in one gloo group; each rank runs the functions that it receives."""

    def __init__(self, world_size: int, imports: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory()
        pipes = [CONTEXT.Pipe() for _ in range(world_size)]
        self._connections = [ours for ours, _ in pipes]
        store, theirs_of = f"{self._folder.name}/store", [theirs for _, theirs in pipes]
        self._is_family = bool(imports)
        if self._is_family:
            self._processes = [CONTEXT.Process(target=_family, args=(imports, store, theirs_of))]
        else:
            self._processes = [
                CONTEXT.Process(target=_rank, args=(rank, world_size, store, theirs))
                for rank, theirs in enumerate(theirs_of)
            ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, again: bool) -> list[Any]:
        """Runs ``function`` on every rank; ``again`` restores the state of the ranks for the next function."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            with suppress(BrokenPipeError):  # collect reports that the rank has ended
                connection.send((function, args, again))
        return collect(self._connections, timeout)

    def pause(self) -> None:
        """Stops the ranks until the next function: idle, each thread of gloo still wakes up 100 times per second."""
        self._signal(signal.SIGSTOP)

    def threads(self) -> int:
        """Returns the number of threads of a rank; each process group that is kept adds one or two."""
        return len([*Path(f"/proc/{self._processes[0].pid}/task").iterdir()])

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):  # also until a family has its process group
                (os.killpg if self._is_family else os.kill)(process.pid or 0, number)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


_WORLDS: dict[tuple[int, tuple[str, ...]], _World] = {}
MOST_THREADS = 60  # of a rank


@atexit.register
def _kill_worlds() -> None:
    while _WORLDS:
        _WORLDS.popitem()[1].kill()


def collect(receivers: list[Connection], timeout: float) -> list[Any]:
    """Returns the value that each rank sends through its pipe as ``(True, value)``.

    Raises:
        AssertionError: a rank sent ``(False, traceback)``, or died before it sent anything.
        TimeoutError: a rank sent nothing within ``timeout`` seconds.
    """
    results: dict[int, Any] = {}
    errors: list[str] = []
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        ready = wait(list(waiting), timeout if not errors else 2)
        if not ready:
            break
        for receiver in ready:
            rank = waiting.pop(receiver)  # type: ignore[index]
            try:
                ok, value = receiver.recv()  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                ok, value = False, "died without a word"
            if ok:
                results[rank] = value
            else:
                errors.append(f"rank {rank}: {value}")
    if errors:
        raise AssertionError("\n".join(errors))
    if waiting:
        raise TimeoutError(f"ranks {sorted(waiting.values())} gave no result in {timeout} s")
    return [results[rank] for rank in range(len(receivers))]


def _family(imports: Sequence[str], store: str, connections: list[Connection]) -> None:
    """Imports modules, forks the other ranks, which end with this process, and becomes rank 0."""
    os.setpgid(0, 0)
    with without_collector():
        for name in imports:
            importlib.import_module(name)
    rank = next((rank for rank in range(1, len(connections)) if os.fork() == 0), 0)
    for each in connections[:rank] + connections[rank + 1 :]:
        each.close()
    _rank(rank, len(connections), store, connections[rank])


def _rank(rank: int, world_size: int, store: str, connection: Connection) -> None:
    """Runs functions until the test process closes the pipe or ends."""
    import torch
    import torch.distributed as dist

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the warm parent ends with the test process
    gc.freeze()  # as workers do: the collector does not read, write and so copy what the warm parent has imported
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        while True:
            function, args, again = connection.recv()
            with _restored() if again else nullcontext():
                value = function(rank, world_size, *args)
            connection.send((True, value))
    except EOFError:
        pass
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        connection.close()
        os._exit(0)


_KEPT: dict[Hashable, Any] = {}
_KEPT_GROUPS: set[Any] = set()


def kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns the result of the first call of ``make`` with ``key`` on this rank and keeps its process groups."""
    if key not in _KEPT:
        before = _groups()
        _KEPT[key] = make()
        _KEPT_GROUPS.update(_groups() - before)
    return _KEPT[key]


def _groups() -> set[Any]:
    from torch.distributed import distributed_c10d

    return set(distributed_c10d._world.pg_map)


@contextmanager
def _restored() -> Iterator[None]:
    """Restores the state that a function may change, and destroys the process groups of its engines.

    Raises:
        AssertionError: the function left a mesh or threads behind. Caches of DTensor refer to the groups of a mesh, so
            these groups cannot be destroyed for the next function.
    """
    import numpy as np
    import torch

    environment, drawn, numpy_drawn, torch_drawn = (
        dict(os.environ), random.getstate(), np.random.get_state(), torch.get_rng_state(),
    )  # fmt: skip
    groups, threads = _groups(), _threads()
    dtype, workers = torch.get_default_dtype(), torch.get_num_threads()
    deterministic, grad = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    yield
    if environment != os.environ:
        os.environ.clear()
        os.environ.update(environment)
    random.setstate(drawn)
    np.random.set_state(numpy_drawn)
    torch.set_rng_state(torch_drawn)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(workers)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_grad_enabled(grad)
    made = _groups() - groups - _KEPT_GROUPS
    made = {group for group in made if group.group_desc != "names"}  # these keep the names of groups apart
    for thread in _threads() - threads:
        thread.join(1)  # it may be about to end
    left = [*(group.group_desc for group in made if "mesh" in group.group_desc), *(_threads() - threads)]
    assert not left, f"left behind for the next function, which only run_ranks allows: {left}"
    for group in made:
        torch.distributed.destroy_process_group(group)


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
