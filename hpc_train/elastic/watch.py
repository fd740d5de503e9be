"""The agent's watch over the workers of its node: reports hangs, slow steps and stragglers, and answers stack
requests.
"""

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
# Slow steps reported per interval: all nodes write their stacks, possibly to the file system that is slow.
SLOW_STEPS, SLOW_EVERY_S = 3, 600.0


@dataclass
class Watch:
    """Watches the workers of one node over all attempts."""

    run: RunDirectory
    node: str
    hangs: HangWatch
    stragglers: StragglerWatch = field(default_factory=StragglerWatch)
    _events: EventLog | None = field(default=None, init=False)
    _next_request: float = field(default=0.0, init=False)
    _slow_reported_at: deque[float] = field(default_factory=lambda: deque(maxlen=SLOW_STEPS), init=False)
    _answered: int = field(default=0, init=False)
    _workers: Workers | None = field(default=None, init=False)

    @classmethod
    def of(cls, run: RunDirectory, node: str, config: Config) -> Watch:
        timeout = parse_hang_timeout(config.elastic.hang_timeout_s)
        least = COLD_S if config.train.compile else LEAST_S  # a change of shapes recompiles in the middle of training
        watch = cls(run, node, HangWatch(timeout, least))
        watch._answered = stacks_requested(run)
        return watch

    def begin(self, events: EventLog, layout: Layout, patience_s: float) -> None:
        """Begins an attempt, whose events go to ``events``; ``patience_s`` is that of ``HangWatch``."""
        self._events = events
        self.hangs.patience_s = patience_s
        self.hangs.begin()
        self.stragglers.begin(pipeline=layout.pp > 1)

    def look(self, workers: Workers) -> None:
        """Called a few times per second while workers run; adds a hang to the failures of ``workers``."""
        now, self._workers = time.monotonic(), workers
        if not workers.failures:
            beats = {worker.rank: worker.block.beat() for worker in workers.alive}
            hang = self.hangs.look(beats, now)
            if hang is not None and hang.only_slow and self._slow_steps_throttled(now):
                hang = None
            found = [] if hang is None else collect(workers, self.node)
            if hang is not None and not hang.only_slow:
                if found:  # otherwise they have ended meanwhile and report the reason themselves
                    workers.fail(self._report_hang(hang, found))
                return
            if hang is not None and found:
                self._slow_reported_at.append(now)
                self._report_slow_step(hang, found)
            for straggler in self.stragglers.look(workers.alive, now):
                self._event("straggler", rank=straggler.rank, **straggler.details())
        if now >= self._next_request:
            self._next_request = now + REQUESTS_EVERY_S
            self._show_stacks(workers)

    def _slow_steps_throttled(self, now: float) -> bool:
        """Returns whether enough slow steps have been reported recently."""
        return len(self._slow_reported_at) == SLOW_STEPS and now - self._slow_reported_at[0] < SLOW_EVERY_S

    def keep_stacks(self) -> None:
        """Saves the stacks of this node for a hang that another node reported."""
        if self._workers is not None and not self._workers.failures:
            self._write_evidence("hang", collect(self._workers, self.node))

    def _show_stacks(self, workers: Workers) -> None:
        number = stacks_requested(self.run)
        if number != self._answered and workers.alive:
            self._answered = number
            found = collect(workers, self.node)
            with suppress(OSError):
                answer_stacks_request(self.run, number, self.node, "\n".join(one.text() for one in found))

    def _report_slow_step(self, slow: Hang, found: Sequence[Evidence]) -> None:
        """Reports a slow step without killing anything. The file of an attempt holds its last slow step."""
        state = next((one.state for one in found if one.state.rank == slow.rank), found[0].state)
        message = (
            f"no sign of life for {slow.seconds:.1f} s in {state.phase} after step {state.step} (usually at most "
            f"{slow.bound:.1f} s); it counts as a hang after {self.hangs.bound(slow.phase):.1f} s "
            "(elastic.hang_timeout_s)"
        )
        path = self._write_evidence("slow", found, collectives=False)
        self._event(
            "slow_step", step=state.step, rank=culprit([one.state for one in found])[0], phase=state.phase,
            seconds=round(slow.seconds, 1), message=message, stacks=str(path),
        )  # fmt: skip

    def _report_hang(self, hang: Hang, found: Sequence[Evidence]) -> WorkerFailure:
        states = [one.state for one in found]
        rank, reason = culprit(states)
        evidence = next((one for one in found if one.state.rank == rank), found[0])
        seconds = f"{hang.seconds:.1f} s in {evidence.state.phase} after step {evidence.state.step}"
        message = f"no sign of life for {seconds} (elastic.hang_timeout_s allows {hang.bound:.1f}); " + (
            reason if rank is None else f"rank {rank} {reason}"
        )
        path = self._write_evidence("hang", found)
        plain = tuple(asdict(state) for state in states)
        self._event(
            "hang_detected", step=evidence.state.step, rank=rank, phase=evidence.state.phase,
            seconds=round(hang.seconds, 1), message=message, stacks=str(path), ranks=plain,
        )  # fmt: skip
        text = f"{message}\nthe stacks of all ranks of this node: {path}\n{evidence.text()}"
        return WorkerFailure(
            evidence.state.rank, Failure.HANG, message, text, time.time(), waits=rank is None, states=plain
        )  # fmt: skip

    def _write_evidence(self, what: str, found: Sequence[Evidence], collectives: bool = True) -> Path:
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
