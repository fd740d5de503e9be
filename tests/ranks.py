"""Runs a function on several ranks: real processes forked from a warm parent, real gloo.

The parent has imported torch and run nothing; a child of a parent that ever ran a parallel op can hang in its own.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

CONTEXT = mp.get_context("forkserver")
# what a rank would else import for itself, half a second each
_PRELOAD = ["torch.distributed.pipelining", "torch.distributed.fsdp", "hpc_train.train.worker", "pytest"]
CONTEXT.set_forkserver_preload(_PRELOAD)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Calls ``function(rank, world_size, *args)`` on every rank inside a gloo group; returns what each returned.

    ``function`` is a module-level function; arguments and results travel by pickle (tensors: as numpy or lists).
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            CONTEXT.Process(target=_rank, args=(rank, world_size, f"{folder}/store", pipes[rank][1], function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return collect([receiver for receiver, _ in pipes], timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def collect(receivers: list[Connection], timeout: float) -> list[Any]:
    """What each rank sends through its pipe as ``(True, value)``.

    Raises:
        AssertionError: a rank sent ``(False, traceback)``, or died before it sent anything.
        TimeoutError: one sent nothing in ``timeout`` seconds.
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
            except EOFError:
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


def _rank(rank: int, world_size: int, store: str, sender: Connection, function: Any, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        sender.send((True, function(rank, world_size, *args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        os._exit(0)
