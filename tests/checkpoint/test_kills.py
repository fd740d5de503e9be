"""SIGKILL at every point of the protocol and at random times, of one rank or all: only committed states are loaded.

One directory goes through all kills; each attempt loads what the ones before have left, compares every value, and saves
on until it is killed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_train.checkpoint import Checkpoints, disk
from hpc_train.checkpoint.store import CheckpointStore, Retention
from tests.checkpoint.progress import LONG, Progress
from tests.checkpoint.test_standalone import Loop
from tests.checkpoint.tiny import LIMIT_S, commit_together, newest_good
from tests.ranks import CONTEXT, run_on_world

pytestmark = pytest.mark.timeout(LIMIT_S + 50)

KILLS = 500 if LONG else 6
RANKS = 4 if LONG else 2
SAVES = 4
CALLS = ("make_directory", "create", "write", "sync", "sync_directory", "rename", "remove")


@dataclass(frozen=True)
class Kill:
    """Who dies when: at the ``call``-th change of the disk of some kinds, or ``seconds`` after the first save began."""

    victims: tuple[int, ...]
    call: int | None
    seconds: float
    kinds: tuple[str, ...] = CALLS

    def arm(self, rank: int) -> None:
        if rank not in self.victims:
            return
        if self.call is None:
            timer = threading.Timer(self.seconds, die)
            timer.daemon = True
            timer.start()
            return
        counter = iter(range(1 << 30))
        for name in self.kinds:
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


def attempt(rank: int, ranks: int, number: int, folder: str, sender: Connection) -> None:
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


def run(
    number: int, folder: Path, target: Callable[..., None] = attempt, ranks: int = RANKS
) -> dict[int, list[tuple[Any, ...]]]:
    """What each rank reported before it ended."""
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        CONTEXT.Process(target=target, args=(rank, ranks, number, str(folder), pipes[rank][1])) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    reported: dict[int, list[tuple[Any, ...]]] = {}
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


LOOP_KILLS = 100 if LONG else 4
KINDS = {"rename": 2 * SAVES, "write": 60, "sync_directory": 4 * SAVES, "create": SAVES, "sync": SAVES, "remove": SAVES}


def loop_plan(number: int, ranks: int) -> Kill:
    """Chooses a call of a kind; the first rank renames to commit. One attempt in seven ends at a random time."""
    choose = random.Random(number)
    victims = tuple(range(ranks)) if number % 5 == 0 else (number % ranks,)
    if number % 7 == len(KINDS):
        return Kill(victims, None, choose.uniform(0, 0.1))
    kind = [*KINDS][number % 7]
    if kind in ("rename", "sync_directory", "remove"):
        victims = (0,)
    return Kill(victims, choose.randrange(KINDS[kind]), 0.0, (kind,))


def loop_attempt(rank: int, ranks: int, number: int, folder: str, sender: Connection) -> None:
    """Trains a loop of a user from the newest checkpoint, and saves each step until it is killed."""
    torch.set_num_threads(1)
    try:
        join = f"file://{folder}/join-{number}"
        dist.init_process_group("gloo", init_method=join, rank=rank, world_size=ranks)
        loop = Loop.of("fsdp2")
        checkpoints = Checkpoints(f"{folder}/checkpoints", asynchronous=number % 2 == 1, **loop.objects)
        loaded = checkpoints.load()
        sender.send(("loaded", loaded, loop.state() if loaded else None))
        if number < LOOP_KILLS:
            loop_plan(number, ranks).arm(rank)
        step = loaded or 0
        for following in range(step + 1, step + 1 + SAVES):
            loop.step(following)
            sender.send(("saves", following, loop.state()))
            checkpoints.save(following)
            checkpoints.wait()
            sender.send(("saved", following))
        checkpoints.close()
    except BaseException as error:
        sender.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        sender.close()
        os._exit(0)


def undisturbed(rank: int, ranks: int, steps: int) -> list[dict[str, Any]]:
    loop = Loop.of("fsdp2")
    states = []
    for step in range(1, steps + 1):
        loop.step(step)
        states.append(loop.state())
    return states


def test_a_loop_that_is_killed_while_it_saves_continues_with_the_same_bits(tmp_path: Path) -> None:
    """The first half of the attempts has two ranks, as the run without kills; the others have one to three."""
    states: dict[int, list[dict[str, Any]]] = {}  # step -> what was saved
    problems: list[str] = []  # of ranks that survive
    saved, killed, last_of_two = 0, 0, 0
    for number in range(LOOP_KILLS + 1):  # the last one kills nobody
        ranks = 2 if number < LOOP_KILLS // 2 else 1 + number % 3
        reported = run(number, tmp_path, loop_attempt, ranks)
        messages = [message for of_rank in reported.values() for message in of_rank]
        loads = [(step, state) for kind, step, state in (m for m in messages if m[0] == "loaded")]
        assert len(loads) == ranks, (number, messages)
        for step, state in loads:
            assert (step or 0) >= saved, (number, loop_plan(number, ranks), step, saved)
            assert step is None or state in states[step], (number, loop_plan(number, ranks), step)
        problems += [message[1] for message in messages if message[0] == "failed"]
        for _, step, state in (message for message in messages if message[0] == "saves"):
            states.setdefault(step, []).append(state)
        steps = [message[1] for message in messages if message[0] == "saved"]
        killed += len(steps) < ranks * SAVES
        saved = max([saved, *steps])
        if number == LOOP_KILLS // 2 - 1:
            last_of_two = saved
    expected = run_on_world(2, undisturbed, last_of_two)[0]
    for step, state in enumerate(expected, start=1):
        assert all(other == state for other in states[step]), step
    assert killed >= LOOP_KILLS // 2
    assert any("another rank may have ended" in text for text in problems)
    assert all(text.startswith(("SaveFailed: ", "RuntimeError: ")) for text in problems), (
        problems
    )  # the latter: in a step
    assert not list((tmp_path / "checkpoints").glob("bad.*"))
