"""SIGKILL at every point of the protocol and at random times, of one rank or all: only committed states are loaded.

One directory goes through all kills; each attempt loads what the ones before have left, compares every value, and saves
on until it is killed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.store import CheckpointStore, Retention
from tests.checkpoint.progress import LONG, Progress
from tests.checkpoint.tiny import LIMIT_S, commit_together, newest_good
from tests.ranks import CONTEXT

pytestmark = pytest.mark.timeout(LIMIT_S + 50)

KILLS = 500 if LONG else 6
RANKS = 4 if LONG else 2
SAVES = 4
CALLS = ("make_directory", "create", "write", "sync", "sync_directory", "rename", "remove")


@dataclass(frozen=True)
class Kill:
    """Who dies when: at the ``call``-th change of the disk, or ``seconds`` after the first save began."""

    victims: tuple[int, ...]
    call: int | None
    seconds: float

    def arm(self, rank: int) -> None:
        if rank not in self.victims:
            return
        if self.call is None:
            timer = threading.Timer(self.seconds, die)
            timer.daemon = True
            timer.start()
            return
        counter = iter(range(1 << 30))
        for name in CALLS:
            setattr(disk, name, self._deadly(getattr(disk, name), counter))

    def _deadly(self, original: Any, counter: Any) -> Any:
        def call(*args: Any) -> Any:
            if next(counter) == self.call:
                die()
            return original(*args)

        return call


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plan(number: int) -> Kill:
    choose = random.Random(number)
    rank = number % RANKS
    victims = tuple(range(RANKS)) if number % 5 == 0 else (rank,)
    if number % 3 == 0:
        return Kill(victims, None, choose.uniform(0, 0.1))
    points = 45 if 0 in victims else 20  # the first rank also makes the directory, commits and removes
    return Kill(victims, choose.randrange(points), 0.0)


def attempt(rank: int, number: int, folder: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    join = f"file://{folder}/join-{number}"
    store = CheckpointStore(Path(folder) / "checkpoints")
    try:
        dist.init_process_group("gloo", init_method=join, rank=rank, world_size=RANKS)
        step = newest_good(store, number)
        sender.send(("loaded", step))
        if number < KILLS:
            plan(number).arm(rank)
            for following in range((step or 0) + 1, (step or 0) + 1 + SAVES):
                commit_together(store, following, number)
                sender.send(("saved", following))
                if rank == 0:
                    store.prune(Retention(2), number)
    except BaseException as error:
        sender.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        sender.close()
        os._exit(0)


def run(number: int, folder: Path) -> dict[int, list[tuple[str, Any]]]:
    """What each rank reported before it ended."""
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [
        CONTEXT.Process(target=attempt, args=(rank, number, str(folder), pipes[rank][1])) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    reported: dict[int, list[tuple[str, Any]]] = {}
    for rank, (receiver, sender) in enumerate(pipes):
        sender.close()
        reported[rank] = []
        while receiver.poll(120):
            try:
                reported[rank].append(receiver.recv())
            except EOFError:
                break
    for process in processes:
        process.kill()
        process.join()
    return reported


def test_whatever_is_killed_only_committed_states_are_loaded(tmp_path: Path) -> None:
    progress = Progress.of("kills")
    todo = [*map(int, progress.open(range(KILLS))), KILLS]  # the last one kills nobody
    saved, killed, wrong = 0, 0, []
    for number in todo:
        reported = run(number, tmp_path)
        loaded = {message[1] for found in reported.values() for message in found if message[0] == "loaded"}
        problems = [message[1] for found in reported.values() for message in found if message[0] == "failed"]
        if len(loaded) != 1 or (next(iter(loaded)) or 0) < saved or any("AssertionError" in text for text in problems):
            wrong.append(f"attempt {number}, {plan(number)}: {saved} was saved, loaded {loaded}, {problems}")
        else:
            progress.passed(number)
        steps = [message[1] for found in reported.values() for message in found if message[0] == "saved"]
        killed += len(steps) < RANKS * SAVES
        saved = max([saved, *steps])
    assert wrong == []
    assert killed >= len(todo) // 2
    assert list((tmp_path / "checkpoints").glob("bad.*")) == []  # what a kill leaves was never committed
