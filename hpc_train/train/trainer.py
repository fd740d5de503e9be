"""Implements the training loop; the engine hides how the model is distributed.

In each iteration, the ranks read the agreement that they posted one step ago, post the agreement for the next step, and
compute. They stop together at the same step, after a checkpoint.

On GPUs, the line of metrics of a step is completed after the next step has been launched (``report.Line``).
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NoReturn

import torch

from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.restoring import RestoredState
from hpc_train.checkpoint.store import PROVED
from hpc_train.config.evaluation import best_metric
from hpc_train.config.schema import Config, GPTConfig, TrainConfig
from hpc_train.data.dataset import StepBatch
from hpc_train.data.feed import NOTHING, LocalBatch, TrainFeed
from hpc_train.data.sampler import Skipped
from hpc_train.data.stream import States
from hpc_train.models.moe import load_metrics
from hpc_train.parallel.collectives import gather_plain
from hpc_train.parallel.compile import KeptArtifacts
from hpc_train.parallel.engine import Engine, add_up, add_up_choices
from hpc_train.parallel.local_replicas import across_replicas
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.agent_worker import Heartbeat, Phase
from hpc_train.run.exits import Corrupted, Diverged, Exit, UnfitNode
from hpc_train.run.requests import StopFlag
from hpc_train.train.data_progress import Length, has_ended, positions, restored_positions, skipped_data
from hpc_train.train.evaluation import Evaluation
from hpc_train.train.hold import Holds
from hpc_train.train.hooks import Hooks
from hpc_train.train.report import SKIPPED, SUMS, Line, Readback, Report, name_attention, weights_sha256
from hpc_train.train.saving import BestSoFar, LastSave, SaveSchedule
from hpc_train.train.step import (
    CHANGED,
    DATA,
    HARDWARE,
    NESTED,
    UNKNOWN,
    Agreement,
    Control,
    Replay,
    SkippedSteps,
    StepOutcome,
    TrainStep,
)
from hpc_train.train.watch.measures import Measures, Meter
from hpc_train.train.watch.memory import report_memory
from hpc_train.train.watch.profiler import Profiler
from hpc_train.train.watch.replica_balance import ReplicaBalance

NO_TARGETS = (
    "no target counts in {}, so its loss is 0; targets of -100 do not count. Check the data, for example for prompts "
    "that fill the full sequence"
)


@dataclass
class Trainer:
    """Trains from ``step`` (completed steps) to ``length.total_steps``. All methods are collective.

    Attributes:
        open_feed: (first step, data to skip, positions of streams) -> feed.
        open_checkpoints: mesh -> the checkpoints of the run, for its ranks. Collective.
        artifacts: the graphs of torch.compile that later attempts reuse; None without torch.compile.
        tokens: the number of targets that counted since step 0, over all ranks.
        missing: the number of samples since step 0 that are missing because a stream had no more items.
        skipped: the data that is skipped after rollbacks.
        has_begun: whether the hooks have been started.
        left_out: the samples of each step that lost replicas would have computed (``go_on``).
    """

    config: Config
    mesh: Mesh
    engine: Engine
    take_step: TrainStep
    feed: TrainFeed
    evaluation: Evaluation
    checkpoints: CheckpointManager
    stop: StopFlag
    length: Length
    meter: Meter
    measures: Measures
    balance: ReplicaBalance
    profiler: Profiler
    report: Report
    schedule: SaveSchedule
    heartbeat: Heartbeat
    last_save: LastSave
    open_feed: Callable[[int, Skipped, States], TrainFeed]
    open_checkpoints: Callable[[Mesh], CheckpointManager]
    hooks: Hooks
    holds: Holds
    artifacts: KeptArtifacts | None
    step: int = 0
    tokens: int = 0
    missing: int = 0
    skipped: Skipped = NOTHING
    rollbacks: int = 0
    has_begun: bool = False
    left_out: int = 0
    _line: Line | None = field(default=None, init=False)
    _divergence: tuple[int, Divergence] | None = field(default=None, init=False)  # (step, divergence)
    _not_finite: int | None = field(default=None, init=False)  # a logged step that was skipped and not replayed yet
    _replay: Replay | None = field(default=None, init=False)  # of the last steps, which were all skipped
    _spike: tuple[int, int] | None = field(default=None, init=False)  # the last step before it and its last one
    _bad_end: Divergence | None = field(default=None, init=False)
    _save_due: bool = field(default=False, init=False)
    _saved: int | None = field(default=None, init=False)  # the step of the newest checkpoint if it is not proved
    _has_moved: bool = field(default=False, init=False)  # micro-batches, from the step after the next one on
    _is_first_step: bool = field(default=True, init=False)
    _evaluated: tuple[int, dict[str, float | None]] = field(default=(-1, {}), init=False)  # step, metrics
    _saved_hooks: Mapping[str, Any] = field(default_factory=dict, init=False)  # states in the loaded checkpoint
    _uncounted: Agreement | None = field(default=None, init=False)  # of a step that was taken, before it is counted

    def __post_init__(self) -> None:
        self.watch = DivergenceWatch(self.config.train, self.config.precision.name)
        self.garbage = GarbageCollection()
        self.best = BestSoFar(best_metric(self.config.checkpoint.keep_best, self.config.checkpoint.best_mode))
        self._control = Control(self.mesh)
        self._end = self.length.total_steps  # the step after which the run ends; a hook may end it earlier

    def resume(self, restored: RestoredState) -> None:
        """Restores the state that is not stored in tensors, such as the step and the values of the hooks."""
        extra = restored.extra
        self.step = restored.step
        self.tokens = extra["tokens"]
        self.missing = extra.get("missing", 0)
        self.take_step.load_state(extra)
        if "losses" in extra:
            self.watch.load_state(extra["losses"])
        self.skipped = skipped_data(restored)
        self.rollbacks = extra.get("rollbacks", 0)
        of_run = {} if restored.forked else extra
        self.best.load_state(of_run.get("best"))
        self._saved_hooks = of_run.get("hooks", {})
        self.hooks.end_reason = self.hooks.same_end(of_run.get("ended_early"))
        self._end = self.length.total_steps
        if self.hooks.end_reason is not None:
            self._end = self.step
        self._saved = None
        if self.take_step.verification is not None:
            self.take_step.verification.proved = None
            proved = self.checkpoints.run_store.proved() if self.mesh.rank == 0 else None
            if proved is not None and proved > self.step:  # the steps since then are repeated
                self.report.events.record(self.report.run, **{PROVED: self.step})
        self._bad_end = None
        if extra.get("bad_end") is not None:
            self._bad_end = Divergence(self.step, extra["bad_end"], fatal=False)

    @property
    def can_go_on(self) -> bool:
        """Returns whether training can continue without a restart after other replicas are lost. The positions of a
        stream would be lost with them, and the last save of a run is not repeated."""
        steps = self.step + (self._uncounted is not None)
        return not self.feed.may_end and steps < self._end

    def go_on(self, mesh: Mesh) -> Trainer:
        """Returns the trainer of the replicas of ``mesh``, which continues after others were lost. Collective.

        The replicas agree on the furthest step. One that was a step behind leaves it out.
        """
        with suppress(RuntimeError):  # of a save in the background, whose group is broken
            self.checkpoints.wait()
        if self._uncounted is not None:
            self.step += 1
            self.tokens += self._uncounted.target_count
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "missing": self.missing,
            "losses": self.watch.state(),
            "best": self.best.state(),
            "end": self._end,
        }
        furthest = max(gather_plain(state, mesh.control), key=lambda state: state["step"])
        step = furthest["step"]
        if self.take_step.outer is not None:
            self.take_step.outer.go_on(mesh, step, last=step == furthest["end"])
        share = self.config.batch.global_size // self.mesh.layout.replicas
        left = replace(
            self,
            mesh=mesh,
            take_step=self.take_step.go_on(mesh),
            feed=self.open_feed(step, self.skipped, {}),
            evaluation=self.evaluation.go_on(mesh),
            checkpoints=self.open_checkpoints(mesh),
            measures=self.measures.go_on(mesh),
            balance=ReplicaBalance(mesh.layout, moves=False),
            last_save=replace(self.last_save, mesh=mesh),
            step=step,
            tokens=furthest["tokens"],
            missing=furthest["missing"],
            left_out=self.left_out + share * (self.mesh.layout.replicas - mesh.layout.replicas),
        )
        if self.hooks.context is not None:
            self.hooks.context = replace(self.hooks.context, mesh=mesh)
        self.report.world_size = mesh.layout.world_size
        if self.meter.peak is not None:
            self.meter.peak = self.meter.peak.times(mesh.layout.world_size / self.mesh.layout.world_size)
        left.watch.load_state(furthest["losses"])
        left.best.load_state(furthest["best"])
        left._end = furthest["end"]
        left._saved_hooks = self._saved_hooks
        left._is_first_step = self._is_first_step
        left._save_due = self._save_due or self.schedule.falls_on(step)
        return left

    def run(self) -> Exit:
        """Trains to the end (``DONE``) or until a stop request (``STOPPED``) and saves a checkpoint in both cases.

        Raises:
            Diverged: the run has diverged, or its final result is not finite; raised on every rank.
            SaveFailed: the last save failed; raised on every rank.
            ReplicaLost: see ``across_replicas``; ``go_on`` continues.
        """
        if self.step >= self._end:
            if self._bad_end is not None:
                self._fail(self._bad_end.reason)
            self.report.nothing_to_do(self.step, self._weights_sha256(), self.hooks.end_reason)
            return Exit.DONE
        with self.measures.watching(self.engine.parts), self.garbage.scheduled():
            try:
                return self._run()
            except BaseException:
                self._rescue_line()
                raise

    def _run(self) -> Exit:
        self._begin_hooks()
        first = self._next_batch()
        if has_ended(self.feed, first, self.step, self.mesh):
            self.report.stream_ended(self.step)
            self.report.nothing_to_do(self.step, self._weights_sha256(), None)
            return Exit.DONE
        self._announce(first)
        if self._is_first_step:
            name_attention(self.config, self.mesh, self.engine, first)
        phase = Phase.FIRST_STEP
        batch: LocalBatch | None = first
        while batch is not None:
            self.heartbeat.enter(phase, self.step)
            self.profiler.begin(self.step + 1, self.meter.waited_s)
            agreement = self._control.read(self.stop)
            if agreement.holds and not agreement.stop:
                with self.meter.pausing():
                    self.holds.hold(agreement.holds, self.step, sys._getframe())
                self.heartbeat.enter(phase, self.step)
            phase = Phase.STEP
            self.checkpoints.poll()
            self._save_due |= agreement.save
            if agreement.stop:
                self._complete_line()
                if self._divergence is not None:
                    self._announce(batch)
                    batch = self._roll_back() or batch
                    continue
                self.profiler.end(self.step, self.meter.waited_s, last=True)
                self.stop.request("another rank was asked to stop")  # keeps an earlier request of this rank
                self._save(final=True)
                self.report.stopped(self.step, self.meter.read())
                return Exit.STOPPED
            if agreement.end:
                self._end = self.step + 1
            following = self._following()
            self._announce(following, self.step + 1)
            batch = self._train(batch, agreement) or following
            if self.step >= self._end:
                break
        return self._finish()

    def _finish(self) -> Exit:
        """Saves the last checkpoint of the run and reports its result."""
        self.heartbeat.enter(Phase.STEP, self.step)
        self._control.read()  # completes the last all-reduce before any rank exits
        self.profiler.end(self.step, self.meter.waited_s, last=True)
        if self._bad_end is None or not self._bad_end.fatal:  # otherwise the previous checkpoint is not replaced
            self._save(final=True)
        if self._bad_end is not None:
            self._fail(self._bad_end.reason)
        self.heartbeat.enter(Phase.STOPPING, self.step)  # the ``end`` of a hook may take long
        self.hooks.end(self.step)
        memory = report_memory(self.config, self.mesh, self.engine, self.take_step.optimizer)
        rates = self.meter.read()
        sha256 = self._weights_sha256()
        self.report.finished(self.step, self.meter.mean_tokens_per_s, rates, sha256, memory, self._ended_early)
        return Exit.DONE

    @property
    def _ended_early(self) -> str | None:
        """Returns the reason why a hook ended the run before its last step, or None."""
        if self.step >= self.length.total_steps or self.step < self._end:
            return None
        return self.hooks.end_reason or "a hook on another rank asked to end the run"

    def _fail(self, reason: str) -> NoReturn:
        with self.heartbeat.during(Phase.CHECKPOINT, self.step):
            self.checkpoints.wait()  # a background save is from before the divergence; exiting would lose it
        raise Diverged(reason, secondary=self.mesh.rank != 0)

    def _weights_sha256(self) -> str | None:
        """Returns the hash of the weights on rank 0 with ``train.reproducible``; otherwise None."""
        if self.mesh.rank != 0 or self.config.train.reproducible is None:
            return None
        return weights_sha256(self.engine)

    def _announce(self, batch: LocalBatch | None, step: int | None = None) -> None:
        """Posts the message of this rank before the step with ``batch``, which follows ``step``, by default
        ``self.step``."""
        if step is None:
            step = self.step
        count = items = 0
        if batch is not None:
            count = batch.local_count
            items = batch.items
        saves = self.schedule.ask(before_evaluation=step + 2 == self._end and self._evaluated[0] < 0)
        ends = self.hooks.end_reason is not None
        self._control.post(self.stop.requested, count, saves, ends, items, self.holds.ask())
        self.heartbeat.arrive(self.step)

    def _next_batch(self) -> LocalBatch:
        with self.meter.waiting():
            return next(self.feed)

    def _following(self) -> LocalBatch | None:
        """Returns the batch of the next step; None at the end of the run, which a stream may shorten."""
        if self.step + 1 >= self._end:
            return None
        if self._has_moved:  # the batch of this step was read and announced before
            with self.heartbeat.during(Phase.FIRST_STEP, self.step):  # the loaders start again, which may take long
                self._open_feed(self.step + 1, {})
                batch = self._next_batch()
        else:
            batch = self._next_batch()
        if not has_ended(self.feed, batch, self.step + 1, self.mesh):
            return batch
        self.length = replace(self.length, total_steps=self.step + 1)
        self._end = self.step + 1
        self.report.stream_ended(self.step + 1)
        return None

    def _train(self, batch: LocalBatch, agreement: Agreement) -> LocalBatch | None:
        """Takes a step; returns the next batch after a rollback, otherwise None."""
        began = time.monotonic()
        step = self.step
        target_count = agreement.target_counts[self.mesh.replica_rank]
        step_batch = StepBatch(batch.micro_batches, target_count, batch.numbers)
        self._uncounted = agreement  # only the outer step, which follows the update, may lose a replica
        with self._going_back(), self.measures.step():
            outcome = self.take_step(step, step_batch)
        if self.take_step.verification is not None:
            self.meter.verified(self.take_step.verification.take_seconds())
        self._record_proof()
        if self._is_first_step:
            self._is_first_step = False
            self._report_first_step(self.step + 1, began)
            self.checkpoints.prepare(self.step + 1, self.hooks.state_tensors)
            has_own_count = any(getattr(part, "own_count", False) for part in self.engine.parts)
            if agreement.target_count == 0 and not has_own_count:
                self.report.warning(self.step + 1, NO_TARGETS.format(f"the batch of step {self.step + 1}"))
        self.garbage.after(self.step + 1)
        self._complete_line()
        self._replay_if_due(step, step_batch, outcome)
        rolled_back = self._roll_back()
        if rolled_back is not None:  # the step was taken with weights that had diverged
            self._uncounted = None
            return rolled_back
        self._count(outcome, agreement)
        self.profiler.end(self.step, self.meter.waited_s)
        self._replay_if_due(step, step_batch, outcome)
        return self._roll_back()

    @contextmanager
    def _going_back(self) -> Iterator[None]:
        """Lets the next attempt begin with the newest proved checkpoint if numbers are wrong."""
        try:
            yield
        except (Corrupted, UnfitNode):
            self.checkpoints.keep_proved(self._proved)
            raise

    def _replay_if_due(self, step: int, batch: StepBatch, outcome: StepOutcome) -> None:
        """Replays ``step``, the newest one, if the first of several skipped steps was logged."""
        if self._not_finite is None:
            return
        logged = self._not_finite
        self._not_finite = None
        with self._going_back(), self.meter.pausing():
            self._replay = self.take_step.replay(step, batch, outcome)
        if self._replay.verdict != UNKNOWN:
            logged = step + 1
        self.report.replayed(logged, f"the gradient of step {logged} is not finite; {self._replay.words}", self._replay)

    @property
    def _proved(self) -> int | None:
        return None if self.take_step.verification is None else self.take_step.verification.proved

    def _record_proof(self) -> None:
        """Records in ``run.json`` that the checkpoints of this attempt are proved, if a verification has passed since
        the last one."""
        if self._proved is not None and self._saved is not None and self._proved >= self._saved:
            self._saved = None
            if self.mesh.rank == 0:
                self.report.events.record(self.report.run, **{PROVED: self._proved})

    def _report_first_step(self, step: int, began: float) -> None:
        """Reports the seconds since ``began`` if the attempt is a restart or compiles, and saves the graphs."""
        if self.artifacts is None and self.report.events.attempt == 0 and step == 1:
            return
        if self.mesh.device.type != "cpu":
            torch.accelerator.synchronize(self.mesh.device)
        self.report.first_step(step, time.monotonic() - began, self.artifacts)
        self._keep_artifacts()

    def _keep_artifacts(self) -> None:
        if self.artifacts is not None:
            with self.meter.pausing():
                self.artifacts.save()

    @property
    def _samples(self) -> int:
        """Returns the number of samples since step 0."""
        return self.length.samples(self.step) - self.missing

    def _count(self, outcome: StepOutcome, agreement: Agreement) -> None:
        """Counts a step that was taken, and logs, evaluates and saves if due."""
        before = self._samples
        self._uncounted = None
        self.step += 1
        self.tokens += agreement.target_count
        self.missing += self.left_out
        if self.feed.may_end:
            self.missing += self.length.global_size - agreement.items
        self.meter.count(self._samples - before, agreement.target_count)
        self.hooks.after_step(self.step)
        evaluates = self.step == self._end or _falls_on(self.step, self.config.train.eval_every)
        if evaluates or self.step == 1 or _falls_on(self.step, self.config.telemetry.log_every):
            self._begin_line(outcome)
            if evaluates or self.mesh.device.type != "cuda":
                self._complete_line(evaluates)
        self._save_due |= self.schedule.falls_on(self.step)
        if not self._save_due:  # otherwise the host waits for the device
            return
        self._complete_line()
        has_diverged = self._bad_end is not None and self._bad_end.fatal
        if self.watch.calm and self.take_step.skipped_in_a_row <= 1 and not has_diverged:
            self._save()  # otherwise the save waits until the loss is stable

    def _roll_back(self) -> LocalBatch | None:
        """Rolls back to the newest checkpoint before a divergence, if there was one, and skips the batches since then.

        Returns:
            The batch of the next step. None if training continues without a rollback, because there is no divergence,
            or because the loss has jumped and there is no such checkpoint.

        Raises:
            Diverged: the divergence is fatal and there is no such checkpoint, or ``train.max_rollbacks`` is exceeded;
                raised on every rank.
        """
        if self._divergence is None:
            return None
        step, divergence = self._divergence
        self._divergence = None
        bad = range(divergence.since, step)
        rollbacks = self.rollbacks + 1
        reason = divergence.reason
        spike = None
        if divergence.fatal:
            reason += "" if self._replay is None else f"; {self._replay.words}"
        elif self.take_step.verification is None:
            reason += f"; {CHANGED} (with train.verify.every, it is replayed from a checkpoint)"
        elif self._spike is None:
            spike = divergence.since, step
            bad = range(step, step)
            rollbacks = self.rollbacks
        else:
            replay = Replay(DATA, "it repeats in the replay, so the cause is the data or the optimization")
            reason += f"; {replay.words}"
            self.report.replayed(step, reason, replay)
        if rollbacks > self.watch.max_rollbacks:
            self._fail(f"{reason} (after {self.rollbacks} rollbacks, the limit of train.max_rollbacks)")
        with self.meter.pausing(), self.heartbeat.during(Phase.CHECKPOINT, self.step):
            restored = self.checkpoints.roll_back(divergence.since)
        if restored is None:
            if divergence.fatal:
                self._fail(f"{reason} (and there is no checkpoint of step {divergence.since} or earlier)")
            self.report.warning(step, f"{reason}; continuing, as there is no earlier checkpoint")
            return None
        self._spike = spike
        if spike is not None:
            reason += "; replaying the steps since the last checkpoint"
        self._not_finite = None
        self._replay = None
        self._save_due |= self._control.read().save  # the agreement for a batch that is now dropped
        skipped = self.skipped.without(bad) if bad else self.skipped
        self.resume(restored)
        self.skipped = skipped  # the checkpoint does not include this rollback
        self.rollbacks = rollbacks
        self._begin_hooks()
        self._open_feed(self.step, restored_positions(restored))
        self.report.rolled_back(bad, self.step, skipped, reason)
        batch = self._next_batch()
        self._announce(batch)
        return batch

    def _open_feed(self, step: int, states: States) -> None:
        """Opens the feed again, with the micro-batches that this replica computes from ``step`` on."""
        self._has_moved = False
        self.balance.begin(step)
        self.feed.close()
        self.feed = self.open_feed(step, self.skipped, states)

    def _begin_line(self, outcome: StepOutcome) -> None:
        """Begins the line of metrics of a step. The loss covers only this step, so a resume does not change it.

        The host does not wait for a GPU.
        """
        scalars = dict(zip(SUMS, add_up(outcome.result, self.mesh), strict=True)) | {"grad_norm": outcome.grad_norm}
        scalars |= dict(zip(SKIPPED, self.take_step.take_skipped(), strict=True))
        if self.take_step.loss_scale is not None:
            scalars["loss_scale"] = self.take_step.loss_scale.value
        model = self.config.model
        if isinstance(model, GPTConfig) and model.moe.experts is not None:
            choices = add_up_choices(outcome.result, model.n_layers, model.moe.experts, self.mesh)
            scalars |= load_metrics(choices[model.moe.dense_layers :])
        totals = {"samples": self._samples, "tokens": self.tokens}
        epoch = self.feed.epoch_of(self.step - 1)
        self.measures.clock.cut()
        self._line = Line(self.step, epoch, outcome.learning_rate, totals, Readback(scalars, self.mesh.device))

    def _complete_line(self, evaluates: bool = False) -> None:
        """Completes and writes the pending line, if there is one, and checks for a divergence. Collective."""
        if self._line is None:
            return
        line, skipped = self._line.content()
        self._line = None
        step = line["step"]
        loss = line["loss"]
        divergence = self.watch.check(step, loss, skipped.in_a_row)
        self._divergence = (step, divergence) if divergence is not None else None
        if skipped.in_a_row == 0:
            self._replay = None
        elif self._replay is None and (self.take_step.loss_scale is None or divergence is not None):
            self._not_finite = step
        if self._spike is not None and divergence is None and step >= self._spike[1]:
            text = f"the loss jumped after step {self._spike[0]}; it does not in the replay, so the hardware erred"
            self.report.replayed(step, text, Replay(HARDWARE, text))
            self._spike = None
        if step == 1 and loss == 0:
            self.report.warning(step, NO_LOSS)
        line |= self.meter.read()
        self.last_save.warn_of_slow_steps(step, line["step_s"])
        line |= self.measures.over_ranks(self.meter.interval)
        self._balance_replicas(step)
        if evaluates:
            self._evaluate(line, skipped)
        else:
            self.report.line(line, skipped)
            self.hooks.metrics = line
        self._bad_end = None
        if step == self._end:
            self._bad_end = self.watch.at_end(step, loss, line["val_loss"], skipped.in_a_row, "loss_scale" in line)

    def _balance_replicas(self, step: int) -> None:
        """Moves micro-batches between replicas if that makes the steps shorter, or advises it."""
        seconds = self.balance.look(step, self.measures.rows)
        if seconds is None:
            return
        if not self.balance.moves:
            self.report.uneven_replicas(step, self.balance.cost(seconds))
            return
        move = self.balance.decide(seconds)
        if move is not None:
            self._has_moved = True
            self.report.moved(step, move)

    def _rescue_line(self) -> None:
        """Writes the pending line after an error, without the metrics of other ranks, which may not exist any more."""
        begun = self._line
        self._line = None
        with suppress(Exception):  # only the error of training is reported
            if begun is not None and begun.scalars.ready:
                line, skipped = begun.content()
                self.report.line(line | self.meter.read(), skipped)

    def _evaluate(self, line: dict[str, Any], skipped: SkippedSteps) -> None:
        """Evaluates, reports ``line`` with the metrics, and calls the hooks. Any hook may end the run at this step.

        A stop request interrupts the evaluation, except at the end of the run.
        """
        began = time.monotonic()
        control = Control(self.mesh, NESTED) if self.step < self._end else None
        self.report.evaluation_started(self.step)
        outer = self.take_step.outer
        with (
            self.meter.pausing(),
            self.heartbeat.during(Phase.EVALUATION, self.step),
            nullcontext() if outer is None else outer.anchored(),
            self.hooks.evaluating(self.step),
        ):
            metrics = self.evaluation.run(self.engine, control, self.stop)
            line |= (metrics or {}) | {"eval_s": time.monotonic() - began}
            self.report.line(line, skipped)
            self.hooks.metrics = line
            if metrics is None:
                return
            if self._evaluated[0] < 0:
                self._warn_of_evaluation(metrics)
            self._evaluated = self.step, metrics
            self._save_due |= self.best.improves(metrics)
            if self.hooks.after_evaluation(self.step):
                self._end = self.step

    def _warn_of_evaluation(self, metrics: Mapping[str, float | None]) -> None:
        """Warns, at the first evaluation of an attempt, about sets without targets and about a missing metric."""
        for name in self.evaluation.without_targets:
            which = f"the evaluation set {name}" if name else "the validation data"
            self.report.warning(self.step, NO_TARGETS.format(which))
        best = self.best.metric
        if best is not None and metrics.get(best.name) is None:
            names = ", ".join(name for name, value in metrics.items() if value is not None)
            self.report.warning(
                self.step,
                f"checkpoint.keep_best={best.name} keeps no checkpoint, because evaluations of this model only have "
                f"the metrics {names}",
            )

    def _begin_hooks(self) -> None:
        """Starts the hooks with the weights and states of the loaded checkpoint, if any, unless they have been."""
        if self.has_begun:
            return
        self.has_begun = True
        for message in self.hooks.begin(self.step, self._saved_hooks, self.checkpoints.load_hook):
            self.report.warning(self.step, message)

    def _save(self, final: bool = False) -> None:
        self._keep_artifacts()  # an evaluation may have compiled additional graphs
        began = time.monotonic()
        self._save_due = False
        with self.meter.saving(), self.heartbeat.during(Phase.CHECKPOINT, self.step):
            self.hooks.before_save(self.step)
            extra = {
                "tokens": self.tokens,
                "missing": self.missing,
                "losses": self.watch.state(),
                "skipped_windows": self.skipped.windows,
                "rollbacks": self.rollbacks,
                "bad_end": self._bad_end.reason if self._bad_end is not None else None,
                "best": self.best.state(),
                "ended_early": self.hooks.as_end(self._ended_early),
                "hooks": self.hooks.values,
                **self.take_step.state(),
                **positions(self.feed, self.step, self.mesh),
            }
            metrics = {}
            if self._evaluated[0] == self.step:
                metrics = {name: value for name, value in self._evaluated[1].items() if value is not None}

            def save(**how: bool) -> None:
                with across_replicas(self.mesh):
                    self.checkpoints.save(self.step, extra, metrics, tensors=self.hooks.tensors, **how)

            if final:
                self.report.data_seen(self.step, self.feed.seen(self.step))
                self.last_save.run(lambda again: save(final=True, again=again), self.step)
            else:
                save()
        self._saved = self.step
        self.schedule.saved(max(time.monotonic() - began, self.checkpoints.copied_s), self.checkpoints.durable_s)


def _falls_on(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


EVERY = 100  # steps between two collections


class GarbageCollection:
    """Collects Python's garbage on all ranks after the same steps, while their devices still compute.

    A collection takes up to hundreds of milliseconds in a process with many objects, and all ranks wait for the rank
    that collects. Automatic collection, which happens at different moments on each rank, is therefore off in
    ``scheduled``. Objects that exist after the first step stay for the entire run, so they are frozen, and later
    collections skip them.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._frozen = False

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """Disables automatic collection in this context if it is enabled."""
        if not gc.isenabled():
            yield
            return
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            gc.unfreeze()

    def after(self, step: int) -> None:
        """Collects if ``step`` is due; called after each step with the number of steps of the run."""
        if gc.isenabled():
            return
        if not self._frozen:
            self._frozen = True
            gc.collect()
            gc.freeze()
        elif step % self._every == 0:
            gc.collect()


WINDOW, LEAST = 64, 16  # the largest and the smallest number of logged losses for the median
IN_A_ROW = 3  # consecutive high losses, or skipped steps at the end of the run


NO_LOSS = (
    "the loss of the first step is exactly 0, so the model does not learn: all targets may be ignored, or the loss may "
    "not fit the model, such as the cross-entropy of a single class, which is always 0"
)


@dataclass(frozen=True)
class Divergence:
    """Describes a divergence.

    Attributes:
        since: the number of steps before the first step that may be bad.
        fatal: whether training cannot continue without a rollback.
    """

    since: int
    reason: str
    fatal: bool


class DivergenceWatch:
    """Checks every logged step for divergence, from values that are the same on every rank.

    A run has diverged if its last ``train.nonfinite_limit`` steps were all skipped or, with ``train.spike_mads``, if
    three consecutive logged losses exceed the median of the earlier losses by that many median absolute deviations. A
    single bad batch does not trigger either rule. Rolling back and skipping the data follows PaLM (Chowdhery et al.
    2022, arXiv:2204.02311, section 5.1). ``at_end`` repeats the check at the end of the run with fewer steps.
    """

    def __init__(self, config: TrainConfig, precision: str = "fp32") -> None:
        self._is_fp16 = precision == "fp16"
        self._limit = config.nonfinite_limit
        self._mads = config.spike_mads
        self.max_rollbacks = config.max_rollbacks
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._high = 0  # consecutive high losses
        self._calm_at = 0  # the last logged step without a high loss
        self._finite_at = 0  # the last logged step with a finite loss and a finite gradient

    @property
    def calm(self) -> bool:
        """Returns whether the last logged loss was not a spike."""
        return self._high == 0

    def check(self, step: int, loss: float, skipped: int) -> Divergence | None:
        """Returns a divergence after ``step`` steps, the last ``skipped`` of which were skipped. Each divergence is
        returned once."""
        if skipped >= self._limit:
            reason = (
                f"no gradient was finite in the last {skipped} steps: training has diverged; try a smaller "
                "optim.lr or more optim.warmup_steps"
            )
            if self._is_fp16:
                reason += ", or precision=bf16"
            return Divergence(step - skipped, reason, fatal=True)
        if skipped or not math.isfinite(loss):
            return None
        self._finite_at = step
        is_spike = False
        if self._mads > 0 and len(self._losses) >= LEAST:
            middle = median(self._losses)
            spread = median(abs(value - middle) for value in self._losses)
            is_spike = loss > middle + self._mads * max(spread, 1e-3 * abs(middle))  # the losses may be almost equal
        if not is_spike:
            self._losses.append(loss)
            self._high = 0
            self._calm_at = step
            return None
        self._high += 1
        if self._high < IN_A_ROW:
            return None
        reason = f"the loss jumped after step {self._calm_at}, from {median(self._losses):.4g} to {loss:.4g}"
        self._losses.clear()
        self._high = 0
        return Divergence(self._calm_at, reason, fatal=False)

    def at_end(self, step: int, loss: float, validation: float, skipped: int, scaled: bool) -> Divergence | None:
        """Checks the end of the run, after ``check``. A single bad last step with a finite validation loss is accepted.

        Args:
            validation: the loss of the final evaluation.
            scaled: whether fp16 loss scaling is in use, since skipped steps then do not prove a divergence.

        Returns:
            None, or a divergence, which is ``fatal`` if the weights are not worth saving.
        """
        last = f"the last logged step with a finite loss and gradient is step {self._finite_at}"
        if not math.isfinite(loss) and (skipped > 1 or not math.isfinite(validation)):
            reason = f"the run has diverged: the loss of its last step, {step}, is not finite; {last}"
            return Divergence(self._finite_at, reason, fatal=True)
        if skipped >= IN_A_ROW and not scaled:
            reason = f"the run has diverged: no gradient was finite in its last {skipped} steps; {last}"
            return Divergence(self._finite_at, reason, fatal=True)
        if not math.isfinite(validation):
            reason = f"the validation loss after the last step, {step}, is not finite; the training loss is {loss:.4g}"
            return Divergence(step, reason, fatal=False)
        return None

    def state(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint."""
        return {
            "losses": list(self._losses),
            "high": self._high,
            "calm_at": self._calm_at,
            "finite_at": self._finite_at,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._high = state["high"]
        self._calm_at = state["calm_at"]
        self._finite_at = state.get("finite_at", 0)
