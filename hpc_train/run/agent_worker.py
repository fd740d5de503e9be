"""What an agent tells a worker: who it is in which attempt of which run.

What a worker tells its agent while it works, through memory that both share: no lock, no system call, no file.

The memory is anonymous (memfd) and goes with the two processes, however they end. Its first page holds the heartbeat;
behind it come what the agent asks for when a worker hangs: its collectives, and its stacks, which faulthandler writes
even where the interpreter's lock is held for ever.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.reduction import DupFd
from typing import Any

from hpc_train.plan.layout import Layout


@dataclass(frozen=True)
class WorkerSpec:
    """One worker of one attempt. ``layout`` is the effective one, derived by the agent of node 0.

    ``environment`` and ``cpus`` are applied as soon as the worker is forked; ``cpus`` None leaves it unbound.
    """

    run_dir: str
    attempt: int
    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    layout: Layout
    master_address: str
    master_port: int
    gpus_per_node: int  # 0: this attempt runs on the CPU with gloo
    threads: int  # intra-op CPU threads
    cuda_device: int = 0  # among those that the worker sees
    environment: dict[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] | None = None
    stop_grace_s: float = 60.0  # from a stop request until the agent kills this worker
    heartbeat: int | None = None  # in the worker: the open file of its heartbeat


PAGE = 4096
ANSWER_BYTES = 16 << 20
STACKS_AT = PAGE + ANSWER_BYTES  # sparse: what is never written takes no memory
_BEAT = struct.Struct("@qqdqd")  # step, phase, since, step of the arrival, arrival
_QUESTION = struct.Struct("@qqq")  # number of the last question, written by the agent; length and number of the answer
_QUESTION_AT = 512


class Phase(IntEnum):
    """What a worker is at."""

    STARTING = 0  # imports, joins, builds, restores
    FIRST_STEP = 1  # of the attempt: may compile
    STEP = 2
    EVALUATION = 3
    CHECKPOINT = 4
    STOPPING = 5


@dataclass(frozen=True)
class Beat:
    """The state of a worker. Times are on the monotonic clock, which all processes of a node share.

    Attributes:
        step: steps that were done when it entered ``phase``.
        since: when it entered it.
        arrived_step: the step before which it last posted its message to the other ranks (``train/control.py``).
        arrived: when it posted it; 0 before the first.
    """

    step: int
    phase: Phase
    since: float
    arrived_step: int
    arrived: float


class Heartbeat:
    """The worker's side. Without a block nobody watches, and nothing is told."""

    def __init__(self, block: SharedBlock | None = None) -> None:
        self._memory: Any = bytearray(PAGE) if block is None else block.page
        self.enter(Phase.STARTING, 0)

    @classmethod
    def of(cls, descriptor: int | None) -> Heartbeat:
        """Of the block that the agent has handed over as an open file."""
        return cls(None if descriptor is None else SharedBlock(descriptor))

    def enter(self, phase: Phase, step: int) -> None:
        struct.pack_into("@qqd", self._memory, 0, step, phase, time.monotonic())

    def arrive(self, step: int) -> None:
        """This rank's message before ``step`` is posted."""
        struct.pack_into("@qd", self._memory, 24, step, time.monotonic())

    @contextmanager
    def during(self, phase: Phase, step: int) -> Iterator[None]:
        """Inside the ``with`` block the worker is in ``phase``, and in a step afterwards."""
        self.enter(phase, step)
        yield
        self.enter(Phase.STEP, step)


class SharedBlock:
    """The memory, as an open file. It can be sent to a process that is being started."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.page = mmap.mmap(descriptor, PAGE)

    @classmethod
    def create(cls) -> SharedBlock:
        descriptor = os.memfd_create("hpc_train-heartbeat")
        os.ftruncate(descriptor, STACKS_AT)
        return cls(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.descriptor),)

    def close(self) -> None:
        self.page.close()
        os.close(self.descriptor)

    def beat(self) -> Beat:
        """Read until two looks agree: the worker may be writing."""
        before = self.page[: _BEAT.size]
        while (now := self.page[: _BEAT.size]) != before:
            before = now
        step, phase, since, arrived_step, arrived = _BEAT.unpack(now)
        return Beat(step, Phase(phase), since, arrived_step, arrived)

    def ask(self) -> int:
        """Asks the worker for its collectives; returns the number of the question."""
        number: int = _QUESTION.unpack_from(self.page, _QUESTION_AT)[0] + 1
        struct.pack_into("@q", self.page, _QUESTION_AT, number)
        return number

    @property
    def asked(self) -> bool:
        number, _, answered = _QUESTION.unpack_from(self.page, _QUESTION_AT)
        return number > answered

    def answer(self, text: bytes) -> None:
        """The worker's answer to the last question; one that is too long is left empty."""
        text = text if len(text) <= ANSWER_BYTES else b""
        number = _QUESTION.unpack_from(self.page, _QUESTION_AT)[0]
        os.pwrite(self.descriptor, text, PAGE)
        struct.pack_into("@qq", self.page, _QUESTION_AT + 8, len(text), number)

    def answer_to(self, number: int) -> bytes | None:
        """None until it has come."""
        _, length, answered = _QUESTION.unpack_from(self.page, _QUESTION_AT)
        return os.pread(self.descriptor, length, PAGE) if answered >= number else None

    def forget_stacks(self) -> None:
        """The next stacks are written at the beginning: agent and worker share the file's position."""
        os.ftruncate(self.descriptor, STACKS_AT)
        os.lseek(self.descriptor, STACKS_AT, os.SEEK_SET)

    def stacks(self) -> str:
        """What faulthandler has written so far."""
        size = os.fstat(self.descriptor).st_size - STACKS_AT
        return os.pread(self.descriptor, size, STACKS_AT).decode(errors="replace")


def _received(descriptor: Any) -> SharedBlock:
    return SharedBlock(descriptor.detach())
