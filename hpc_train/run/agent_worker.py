"""Defines the interface between an agent and its workers: the worker's specification, and shared memory with the
heartbeat and answers.

The shared memory is anonymous (memfd), is accessed without locks, system calls or files, and disappears with the two
processes. Its first page holds the heartbeat. The answers of a hanging worker follow: its collectives, and its stacks,
which faulthandler writes even if the GIL is never released.
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

from hpc_train.layout.layout import Layout


@dataclass(frozen=True)
class WorkerSpec:
    """Describes one worker of one attempt. ``layout`` is the effective layout, derived by the agent of node 0.

    ``environment`` and ``cpus`` are applied right after the fork; with ``cpus`` None the worker is not bound.
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
    gpus_per_node: int  # 0: the attempt runs on CPUs with gloo
    threads: int  # intra-op CPU threads
    cuda_device: int = 0  # index among the devices that the worker sees
    environment: dict[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] | None = None
    store_prefix: str = "attempt"  # prefix of this attempt's keys in the store
    stop_grace_s: float = 60.0  # time from a stop request until the agent kills this worker
    checked: bool = False  # a preflight of this start of the job has checked all of these nodes
    config: bytes | None = field(default=None, repr=False)  # pickled, as the agent has read it; None: read the file
    heartbeat: int | None = None  # in the worker: the file descriptor of its shared memory

    @property
    def ranks_on_cores(self) -> int:
        """Returns how many ranks share the CPUs of this process: only this one if it is bound to separate CPUs."""
        if self.cpus is not None and os.sched_getaffinity(0) <= set(self.cpus):
            return 1
        return self.local_world_size


PAGE = 4096
ANSWER_BYTES = 16 << 20
STACKS_AT = PAGE + ANSWER_BYTES  # sparse: pages that are never written take no memory
_BEAT = struct.Struct("@qqdqd")  # step, phase, since, arrived_step, arrived
_QUESTION = struct.Struct("@qqq")  # number of the newest question (agent); length and number of the answer (worker)
_QUESTION_AT = 512
_HOLD_AT = 768  # the time of the newest request to hold this rank
_LOST_AT = 1024  # one bit for each replica, to the end of the page


class Phase(IntEnum):
    """Names the phase of work of a worker."""

    STARTING = 0  # imports, rendezvous, model construction, restore
    FIRST_STEP = 1  # first step of the attempt, which may compile
    STEP = 2
    EVALUATION = 3
    CHECKPOINT = 4
    STOPPING = 5
    RUNNING = 6  # ``run.command``, whose phases are not known
    HELD = 7  # between two steps, while a person looks into the process of a rank (``debug``)


@dataclass(frozen=True)
class Beat:
    """Holds the state of a worker. Times are on the monotonic clock, which all processes of a node share.

    Attributes:
        step: steps completed when the worker entered ``phase``.
        since: the time when it entered ``phase``.
        arrived_step: the step before which it last posted its message to the other ranks (``train/step.py``).
        arrived: the time when it posted that message; 0 before the first.
    """

    step: int
    phase: Phase
    since: float
    arrived_step: int
    arrived: float


class Heartbeat:
    """Writes the heartbeat of a worker; it does nothing without a shared block."""

    def __init__(self, block: SharedBlock | None = None) -> None:
        self._memory: Any = bytearray(PAGE) if block is None else block.page
        self.enter(Phase.STARTING, 0)

    @classmethod
    def of(cls, descriptor: int | None) -> Heartbeat:
        """Creates the heartbeat on the block that the agent passed as a file descriptor."""
        return cls(None if descriptor is None else SharedBlock(descriptor))

    def enter(self, phase: Phase, step: int) -> None:
        struct.pack_into("@qqd", self._memory, 0, step, phase, time.monotonic())

    def arrive(self, step: int) -> None:
        """Records that this rank has posted its message before ``step``."""
        struct.pack_into("@qd", self._memory, 24, step, time.monotonic())

    @contextmanager
    def during(self, phase: Phase, step: int) -> Iterator[None]:
        """Marks the worker as in ``phase`` inside the ``with`` block, and in a step afterwards."""
        self.enter(phase, step)
        yield
        self.enter(Phase.STEP, step)


class SharedBlock:
    """Wraps the shared memory as an open file, which can be sent to a process that is being started."""

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
        """Reads the heartbeat until two reads agree, because the worker may be writing."""
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
        """Writes the worker's answer to the newest question; an answer that is too long is left empty."""
        if len(text) > ANSWER_BYTES:
            text = b""
        number = _QUESTION.unpack_from(self.page, _QUESTION_AT)[0]
        os.pwrite(self.descriptor, text, PAGE)
        struct.pack_into("@qq", self.page, _QUESTION_AT + 8, len(text), number)

    def answer_to(self, number: int) -> bytes | None:
        """Returns the answer to question ``number``; None while it is missing."""
        _, length, answered = _QUESTION.unpack_from(self.page, _QUESTION_AT)
        if answered < number:
            return None
        return os.pread(self.descriptor, length, PAGE)

    @property
    def hold_requested(self) -> float:
        """The time of the newest request to hold this rank, in seconds since 1970; 0 before the first."""
        requested: float = struct.unpack_from("@d", self.page, _HOLD_AT)[0]
        return requested

    @hold_requested.setter
    def hold_requested(self, requested: float) -> None:
        struct.pack_into("@d", self.page, _HOLD_AT, requested)

    @property
    def lost_replicas(self) -> frozenset[int]:
        """The numbers of the replicas that are lost (``strategy.local_steps``), as counted at the start of the
        attempt."""
        bits = int.from_bytes(self.page[_LOST_AT:PAGE], "little")
        return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)

    @lost_replicas.setter
    def lost_replicas(self, numbers: frozenset[int]) -> None:
        bits = sum(1 << number for number in numbers)
        self.page[_LOST_AT:PAGE] = bits.to_bytes(PAGE - _LOST_AT, "little")

    def clear_stacks(self) -> None:
        """Truncates the stacks, so that the next ones start at the beginning; agent and worker share the file's
        position.
        """
        os.ftruncate(self.descriptor, STACKS_AT)
        os.lseek(self.descriptor, STACKS_AT, os.SEEK_SET)

    def stacks(self) -> str:
        """Returns the text that faulthandler has written so far."""
        size = os.fstat(self.descriptor).st_size - STACKS_AT
        return os.pread(self.descriptor, size, STACKS_AT).decode(errors="replace")


def _received(descriptor: Any) -> SharedBlock:
    return SharedBlock(descriptor.detach())
