"""The agent's eyes on the workers of its node: hangs are found and told, stragglers named, stacks shown on request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_train.config.schema import Config
from hpc_train.config.values import parse_hang_timeout
from hpc_train.elastic.culprit import culprit
from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.hangs import COLD_S, LEAST_S, Evidence, Hang, HangWatch, collect
from hpc_train.elastic.stragglers import StragglerWatch
from hpc_train.elastic.workers import Workers
from hpc_train.plan.layout import Layout
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.exits import Failure
from hpc_train.run.requests import answer_stacks_request, stacks_requested

REQUESTS_EVERY_S = 2.0
# Slow steps that are told one after the other, and the pause before further ones: all nodes write their stacks, maybe
# to the very file system that is slow.
SLOW_STEPS, SLOW_EVERY_S = 3, 600.0


@dataclass
class Watch:
    """Of one node, attempt after attempt."""

    run: RunDirectory
    node: str
    hangs: HangWatch
    stragglers: StragglerWatch = field(default_factory=StragglerWatch)
    _events: EventLog | None = field(default=None, init=False)
    _next_request: float = field(default=0.0, init=False)
    _slow_told: deque[float] = field(default_factory=lambda: deque(maxlen=SLOW_STEPS), init=False)
    _answered: int = field(default=0, init=False)
    _workers: Workers | None = field(default=None, init=False)

    @classmethod
    def of(cls, run: RunDirectory, node: str, config: Config) -> Watch:
        timeout = parse_hang_timeout(config.elastic.hang_timeout_s)
        least = COLD_S if config.train.compile else LEAST_S  # a change of shapes compiles again, in the middle
        watch = cls(run, node, HangWatch(timeout, least))
        watch._answered = stacks_requested(run)
        return watch

    def begin(self, events: EventLog, layout: Layout, patience_s: float) -> None:
        """A new attempt, which tells what happens in ``events``; ``patience_s`` as of ``HangWatch``."""
        self._events = events
        self.hangs.patience_s = patience_s
        self.hangs.begin()
        self.stragglers.begin(pipeline=layout.pp > 1)

    def look(self, workers: Workers) -> None:
        """Called a few times per second while workers run; a hang becomes a failure among those of ``workers``."""
        now, self._workers = time.monotonic(), workers
        if not workers.failures:
            beats = {worker.rank: worker.block.beat() for worker in workers.alive}
            hang = self.hangs.look(beats, now)
            if hang is not None and hang.only_slow and self._enough_told(now):
                hang = None
            found = [] if hang is None else collect(workers, self.node)
            if hang is not None and not hang.only_slow:
                if found:  # else they have ended meanwhile, and tell why themselves
                    workers.fail(self._tell_hang(hang, found))
                return
            if hang is not None and found:
                self._slow_told.append(now)
                self._tell_slow_step(hang, found)
            for straggler in self.stragglers.look(workers.alive, now):
                self._event("straggler", rank=straggler.rank, **straggler.details())
        if now >= self._next_request:
            self._next_request = now + REQUESTS_EVERY_S
            self._show_stacks(workers)

    def _enough_told(self, now: float) -> bool:
        """Whether enough slow steps have been reported recent."""
        return len(self._slow_told) == SLOW_STEPS and now - self._slow_told[0] < SLOW_EVERY_S

    def keep_stacks(self) -> None:
        """Of this node, for a hang that another node has told."""
        if self._workers is not None and not self._workers.failures:
            self._keep("hang", collect(self._workers, self.node))

    def _show_stacks(self, workers: Workers) -> None:
        number = stacks_requested(self.run)
        if number != self._answered and workers.alive:
            self._answered = number
            found = collect(workers, self.node)
            with suppress(OSError):
                answer_stacks_request(self.run, number, self.node, "\n".join(one.text() for one in found))

    def _tell_slow_step(self, slow: Hang, found: Sequence[Evidence]) -> None:
        """Nobody is killed. The file of an attempt holds its last slow step."""
        state = next((one.state for one in found if one.state.rank == slow.rank), found[0].state)
        message = (
            f"no sign of life for {slow.seconds:.1f} s in {state.phase} after step {state.step} (usual: at most "
            f"{slow.bound:.1f} s); after {self.hangs.bound(slow.phase):.1f} s it is a hang (elastic.hang_timeout_s)"
        )
        path = self._keep("slow", found, collectives=False)
        self._event(
            "slow_step", step=state.step, rank=culprit([one.state for one in found])[0], phase=state.phase,
            seconds=round(slow.seconds, 1), message=message, stacks=str(path),
        )  # fmt: skip

    def _tell_hang(self, hang: Hang, found: Sequence[Evidence]) -> WorkerFailure:
        states = [one.state for one in found]
        rank, reason = culprit(states)
        of = next((one for one in found if one.state.rank == rank), found[0])
        seconds = f"{hang.seconds:.1f} s in {of.state.phase} after step {of.state.step}"
        message = f"no sign of life for {seconds} (elastic.hang_timeout_s allows {hang.bound:.1f}); " + (
            reason if rank is None else f"rank {rank} {reason}"
        )
        path, plain = self._keep("hang", found), tuple(asdict(state) for state in states)
        self._event(
            "hang_detected", step=of.state.step, rank=rank, phase=of.state.phase, seconds=round(hang.seconds, 1),
            message=message, stacks=str(path), ranks=plain,
        )  # fmt: skip
        text = f"{message}\nthe stacks of all ranks of this node: {path}\n{of.text()}"
        return WorkerFailure(
            of.state.rank, Failure.HANG, message, text, time.time(), waits=rank is None, states=plain
        )  # fmt: skip

    def _keep(self, what: str, found: Sequence[Evidence], collectives: bool = True) -> Path:
        folder = self.run.logs / "stacks"
        attempt = 0 if self._events is None else self._events.attempt
        path = folder / f"{what}-{self.node}-{attempt:03d}.txt"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(one.text() for one in found))
            for one in found if collectives else ():
                name = f"collectives-{attempt:03d}-rank-{one.state.rank:04d}.json"
                (folder / name).write_bytes(one.collectives or b"")
        return path

    def _event(self, event: str, *, step: int | None = None, **details: object) -> None:
        if self._events is not None:
            self._events.write(event, step=step, node=self.node, **details)
