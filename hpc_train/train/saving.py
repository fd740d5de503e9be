"""Schedules saves by steps, by time or automatically, and retries the last save of an attempt.

``auto`` uses the interval of ``checkpoint/failures.py`` and the seconds for which a save blocks training.

If the last save fails, no later save can replace it, so it is retried for a limited time, for example until the disk
has free space. Rank 0 decides for all ranks whether to retry.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_train.checkpoint.failures import PRIOR_PER_GPU_HOUR, best_interval
from hpc_train.checkpoint.space import LEAVING_S
from hpc_train.checkpoint.writer import SaveFailed
from hpc_train.config.evaluation import BestMetric
from hpc_train.config.schema import Config
from hpc_train.config.values import SaveEvery, parse_save_every
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.agent_worker import Heartbeat, Phase
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import PASSING, Failure
from hpc_train.run.requests import StopFlag
from hpc_train.train.report import Report
from hpc_train.train.step import NESTED, Control
from hpc_train.units import format_duration

FIRST_S = 300.0  # with auto, the time until the first save, which measures the cost of a save
LAST_S = 60.0  # the training that may be lost by an error in a first evaluation that follows the last step


def failure_rate(run: RunDirectory) -> float:
    """Returns the run's failures per GPU-hour, at least the prior. Failures that the user caused do not count."""
    failed = set()
    for event in run.read_events():
        if event.kind.is_failure and not event.kind.ends and event.failure not in (Failure.USER_ERROR, Failure.REFUSED):
            failed.add(event.attempt)
    spans: dict[int, list[tuple[float, int]]] = {}
    for line in run.read_metrics():
        spans.setdefault(line.attempt, []).append((line.time, line["world_size"]))
    hours = sum((max(span)[0] - min(span)[0]) * span[0][1] for span in spans.values()) / 3600
    if hours <= 0:
        return PRIOR_PER_GPU_HOUR
    return max(PRIOR_PER_GPU_HOUR, len(failed) / hours)


@dataclass
class SaveSchedule:
    """Decides when to save. All ranks count steps; only the rank with ``keeps_time`` reads the clock."""

    every: SaveEvery
    gpus: int
    keeps_time: bool
    failures_per_gpu_hour: float = PRIOR_PER_GPU_HOUR
    clock: Callable[[], float] = time.monotonic
    _interval: float = field(init=False)
    _since: float = field(init=False)
    _asked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._interval = self.every.seconds
        if self.every.auto:
            self._interval = FIRST_S
        self._since = self.clock()

    def falls_on(self, step: int) -> bool:
        """Returns whether ``checkpoint.every`` as a number of steps requires a save after ``step`` steps."""
        return self.every.steps > 0 and step % self.every.steps == 0

    def ask(self, before_evaluation: bool = False) -> bool:
        """Returns whether a save is due according to the clock; returns True only once before the next ``saved``.

        Args:
            before_evaluation: whether the save would follow the second to last step, and the first evaluation follows
                the last step. An error in this evaluation, for example in a custom metric, must not lose the training.
                The final save comes only afterwards, because it contains the metrics.
        """
        if self._asked or not self.keeps_time:
            return False
        passed = self.clock() - self._since
        self._asked = 0 < self._interval <= passed or (before_evaluation and passed >= LAST_S)
        return self._asked

    def saved(self, cost_s: float, durable_s: float | None) -> None:
        """Starts the next interval. With ``auto``, its length depends on the cost of this save.

        Args:
            cost_s: seconds for which the save blocked training.
            durable_s: seconds until a save was committed; None before the first commit.
        """
        self._since = self.clock()
        self._asked = False
        if not self.every.auto or durable_s is None:
            return
        before = self._interval
        self._interval = best_interval(cost_s, durable_s, self.failures_per_gpu_hour, self.gpus)
        if self.keeps_time and not 0.8 < self._interval / before < 1.25:
            print(
                f"checkpoint.every=auto: saving every {self._interval / 60:.0f} minutes, for {cost_s:.3g} s per save "
                f"and {self.failures_per_gpu_hour:.2g} failures per GPU-hour on {self.gpus} GPUs",
                flush=True,
            )


def save_schedule(config: Config, run: RunDirectory, mesh: Mesh) -> SaveSchedule:
    """Returns the schedule of an attempt; rank 0 reads the clock and the failures of the run."""
    every = parse_save_every(config.checkpoint.every)
    rate = PRIOR_PER_GPU_HOUR
    if mesh.rank == 0 and every.auto:
        rate = failure_rate(run)
    return SaveSchedule(every, mesh.layout.world_size, mesh.rank == 0, rate)


@dataclass
class BestSoFar:
    """Determines the evaluations after which to save a checkpoint, because they are the best so far.

    Attributes:
        value: the best value so far.
    """

    metric: BestMetric | None
    value: float | None = None

    def improves(self, metrics: Mapping[str, float | None]) -> bool:
        """Returns whether an evaluation with these ``metrics`` is the best so far, and records it."""
        if self.metric is None:
            return False
        value = metrics.get(self.metric.name)
        if value is None or not self.metric.is_better(value, self.value):
            return False
        self.value = value
        return True

    def state(self) -> dict[str, Any]:
        """Returns the value and the name of its metric, for a checkpoint."""
        described = asdict(self.metric) if self.metric is not None else {}
        return {"value": self.value, **described}

    def load_state(self, state: Any) -> None:
        """Continues with the value of a checkpoint, unless it belongs to another metric or mode.

        The state in checkpoints of earlier versions is a number without a metric and is ignored.
        """
        self.value = None
        if self.metric is not None and isinstance(state, Mapping) and state.items() >= asdict(self.metric).items():
            self.value = state["value"]


# errors that may pass: a user may free space, a server may recover, a file system may be mounted, a ticket be renewed
TRANSIENT = {errno.ENOSPC, errno.EDQUOT, *PASSING}
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
SIGN_OF_LIFE_S = 1.0


@dataclass
class LastSave:
    """Retries the last save of an attempt. All methods are collective.

    Attributes:
        wait_s: the seconds for which the save is retried if there is no stop request.
        stop_grace_s: seconds from a stop request until the agent kills the workers.
    """

    mesh: Mesh
    heartbeat: Heartbeat
    stop: StopFlag
    report: Report
    wait_s: float
    stop_grace_s: float
    _is_first_line: bool = field(default=True, init=False)
    _has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._stopping_s = self.stop_grace_s - min(LEAVING_S, self.stop_grace_s / 4)  # time until ranks must leave

    def warn_of_slow_steps(self, step: int, step_s: float) -> None:
        """Warns once if a stop request leaves no time for a full step.

        Args:
            step_s: seconds per step since the last call. The value of the first call is ignored, since it may include a
                compilation.
        """
        if self._is_first_line:
            self._is_first_line = False
            return
        if step_s <= self._stopping_s or self._has_warned:
            return
        self._has_warned = True
        needed = math.ceil(2 * step_s + LEAVING_S)
        self.report.warning(
            step,
            f"a step takes {format_duration(step_s)}, but a stop request leaves {format_duration(self._stopping_s)} "
            "for the current step and a save, so the steps since the newest checkpoint would be lost: set "
            f"elastic.stop_grace_s, which is {self.stop_grace_s:g} s, to {needed} or more",
        )

    def run(self, save: Callable[[bool], None], step: int) -> None:
        """Calls ``save`` until it succeeds or the time is over.

        Args:
            save: saves a checkpoint. Its argument is whether the call is a retry.

        Raises:
            SaveFailed: the save failed until the deadline or with an error that is not transient.
        """
        began = time.monotonic()
        pause = FIRST_PAUSE_S
        reported = 0.0  # the deadline that was reported last
        retry = False
        while True:
            try:
                save(retry)
                return
            except SaveFailed as error:
                deadline = began + self.wait_s
                if self.stop.requested:
                    deadline = min(deadline, self.stop.since + self._stopping_s)
                now = time.monotonic()
                may_succeed = not error.codes.isdisjoint(TRANSIENT) and now + pause < deadline
                control = Control(self.mesh, NESTED)
                control.post(False, 0, save=may_succeed and self.mesh.rank == 0)  # rank 0 decides
                if not control.read().save:
                    raise
                if deadline != reported:  # a stop request has moved it
                    reported = deadline
                    self.report.save_deferred(step, str(error), deadline - now)
            until = time.monotonic() + pause
            was_requested = self.stop.requested
            while (left := until - time.monotonic()) > 0 and self.stop.requested == was_requested:
                time.sleep(min(left, SIGN_OF_LIFE_S))
                self.heartbeat.enter(Phase.CHECKPOINT, step)
            retry = True
            pause = min(2 * pause, LONGEST_PAUSE_S)
