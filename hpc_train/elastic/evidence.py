"""What the workers of a node are at, at this moment: stacks, collectives, and the states that the kernel knows.

Nothing of it needs a worker's main thread, nor the lock of its interpreter for the stacks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.elastic.culprit import RankState, group_states
from hpc_train.elastic.worker_process import SHOW_STACKS
from hpc_train.elastic.workers import Worker, Workers
from hpc_train.run.heartbeat import Beat, Phase
from hpc_train.run.process_state import process_state

ANSWER_S = 5.0  # a worker looks for questions twice per second
SETTLED_S = 0.1  # stacks that have not grown for so long are whole


@dataclass(frozen=True)
class Evidence:
    """Of one rank; ``collectives`` is the JSON of torch's flight recorder, None without an answer."""

    state: RankState
    pid: int
    stacks: str
    collectives: bytes | None

    def text(self) -> str:
        """For people."""
        state = self.state
        words = (
            f"{state.phase} after step {state.step}, for {state.seconds:.1f} s, process state {state.process or '-'}"
        )
        return f"--- rank {state.rank} on {state.node}, pid {self.pid}: {words} ---\n{self.stacks.rstrip()}\n"


@dataclass(frozen=True)
class _Question:
    worker: Worker
    number: int
    beat: Beat  # before the signal, which wakes some system calls
    silent: float

    @property
    def answered(self) -> bool:
        return self.worker.block.answer_to(self.number) is not None and bool(self.worker.block.stacks())


def collect(workers: Workers, node: str, limit_s: float = ANSWER_S) -> list[Evidence]:
    """Of all workers that are alive, in the order of rank; takes ``limit_s`` where one does not answer."""
    questions = [_ask(worker) for worker in sorted(workers.alive, key=lambda worker: worker.rank)]
    _wait(workers, questions, time.monotonic() + limit_s)
    return [_of(question, node) for question in questions if not question.worker.gone]


def _ask(worker: Worker) -> _Question:
    beat = worker.block.beat()
    question = _Question(worker, worker.block.ask(), beat, time.monotonic() - beat.since)
    worker.block.forget_stacks()
    if worker.ready:  # until then it has no handler, and the signal would end it
        worker.signal(SHOW_STACKS)
    return question


def _wait(workers: Workers, questions: Sequence[_Question], until: float) -> None:
    sizes: list[int] = []
    while time.monotonic() < until:
        workers.wait(SETTLED_S)  # also empties their pipes
        waited = [one for one in questions if not one.worker.gone and process_state(one.worker.pid) != "T"]
        before, sizes = sizes, [len(one.worker.block.stacks()) for one in waited]
        if sizes == before and all(one.answered for one in waited):
            return


def _of(question: _Question, node: str) -> Evidence:
    worker, beat = question.worker, question.beat
    answer, pid = worker.block.answer_to(question.number), worker.pid
    state = RankState(
        rank=worker.rank,
        node=node,
        step=beat.step,
        phase=beat.phase.name.lower(),
        seconds=round(question.silent, 3),
        arrived_step=beat.arrived_step,
        process=process_state(pid),
        answered=answer is not None,
        groups=group_states(answer or b"", saves=beat.phase is Phase.CHECKPOINT),
    )
    return Evidence(state, pid, worker.block.stacks() or "(no stacks)", answer)
