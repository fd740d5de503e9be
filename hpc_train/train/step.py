"""Runs one training step: forward, backward, clipping and update, without synchronizing host and device.

For fp16, the loss is scaled dynamically on the device, so that small gradients do not underflow. A step whose gradients
overflow is skipped and halves the scale; ``growth_every`` consecutive finite steps double it (Micikevicius et al. 2018,
arXiv:1710.03740). The decision depends on the global gradient norm, so it is the same on all ranks.

Once per step, all ranks agree on a stop, a save, a hold, the end of the run, and the number of targets in the next
batch. The agreement is a small asynchronous all-reduce on a CPU group. It is posted before a step and read before the
next step, so no rank waits for it, and all ranks see a stop request at the same step. A request that arrives after its
rank has posted would take effect a step later. After a slow step, the ranks therefore agree once more before the next
step begins.

The all-reduce of gloo is a ring, in which 2 (n - 1) messages wait for each other: at 1,024 ranks it takes longer than a
short step. Many ranks exchange the messages in ceil(log2(n)) rounds instead, in a thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.config.schema import Config
from hpc_train.data.dataset import StepBatch
from hpc_train.machine.allocation import current_allocation
from hpc_train.parallel.collectives import gather_plain
from hpc_train.parallel.engine import (
    Engine,
    StepResult,
    WrappedEngine,
    changed_training,
    has_sequence_shards,
    seed_step,
)
from hpc_train.parallel.local_replicas import across_replicas, sum_over_replicas
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.requests import StopFlag
from hpc_train.train.debug import join_names
from hpc_train.train.kept_state import kept_state
from hpc_train.train.optimizers.learning_rate import learning_rates
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.optimizers.outer import OuterSteps
from hpc_train.train.verify import Verification


@dataclass(frozen=True)
class StepOutcome:
    """Holds the results of one step; tensors are scalars on the device.

    Attributes:
        grad_norm: the global norm before clipping, the same on every rank.
        loss_scale: the scale of its loss, or None.
    """

    result: StepResult
    grad_norm: Tensor
    learning_rate: float
    loss_scale: Tensor | None = None


@dataclass(frozen=True)
class Replay:
    """Holds the result of computing a step again, the same on every rank.

    Attributes:
        verdict: ``HARDWARE`` if the result differs, ``DATA`` if it repeats, and ``UNKNOWN`` if there was no replay.
        words: the reason of the verdict.
        nodes: the ranks whose loss differs -> their nodes.
    """

    verdict: str
    words: str
    nodes: Mapping[int, str] = field(default_factory=dict)


HARDWARE, DATA, UNKNOWN = "hardware", "data or optimization", "unknown"
SAME_LOSS = 1e-3  # relative; kernels that are not deterministic differ by less
CHANGED = "it cannot be replayed, because the weights have changed since"


@dataclass(frozen=True)
class SkippedSteps:
    """Counts steps that were skipped because of non-finite gradients.

    Attributes:
        in_a_row: consecutive skipped steps up to the logged one.
        since_last: skipped steps since the previous call of ``TrainStep.take_skipped``.
    """

    in_a_row: int
    since_last: int


class TrainStep:
    """Runs the steps of a run of ``total_steps`` with ``engine`` and ``optimizer``.

    Attributes:
        optimizer: the optimizer of the engine's parameters.
        verification: verifies steps (``train.verify``); None without it.
        outer: the outer steps of ``strategy.local_steps``; None without them.
        loss_scale: the loss scale for precision fp16; otherwise None.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        engine: Engine,
        optimizer: Optimizer,
        total_steps: int,
        verification: Verification | None = None,
        outer: OuterSteps | None = None,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._engine = engine
        self._sequence_shards = has_sequence_shards(engine)
        self.optimizer = optimizer
        self.verification = verification
        self.outer = outer
        self._total_steps = total_steps
        self._trains = {name: parameter.requires_grad for name, parameter in engine.named_parameters().items()}
        self._rate = learning_rates(config.optim, config.batch.global_size, total_steps)
        self._skipped = torch.zeros(2, dtype=torch.int64, device=mesh.device)  # (in_a_row, since_last)
        self.loss_scale = LossScale(mesh.device) if config.precision.name == "fp16" else None

    def __call__(self, step: int, batch: StepBatch) -> StepOutcome:
        """Runs step ``step`` in [0, total_steps); skips the update if a gradient is not finite.

        Raises:
            UserError: ``requires_grad`` of a parameter has changed.
            Corrupted, UnfitNode: see ``Verification``.
        """
        seed_step(self._config.train.seed, step, self._mesh, self._sequence_shards)
        scale = self.loss_scale.value if self.loss_scale is not None else None
        learning_rate = self._rate(step)
        updates = self._engine.updates
        if updates is not None:
            updates.begin(partial(self.optimizer.step_some, learning_rate))
        verification = self.verification
        if verification is not None and not verification.is_due(step):
            verification = None
        if verification is None:
            result = self._engine.train_step(step, batch, scale)
        else:
            result = verification.train_step(step, batch, scale)
        for name, parameter in self._engine.named_parameters().items():
            if parameter.requires_grad is not self._trains[name]:  # the optimizer would not notice the change
                raise changed_training(name, parameter.requires_grad)
        norm = self._engine.clip_grad_norm_(self._config.optim.clip_norm, scale)
        finite = norm.isfinite()
        self._engine.commit(finite)
        if updates is None:
            differing = self.optimizer.step(learning_rate, finite, verification.turn if verification else None)
            if verification is not None:
                verification.check_updates(step, differing)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        self._skipped[0] = torch.where(finite, 0, self._skipped[0] + 1)
        self._skipped[1] += ~finite
        if self.outer is not None:
            self.outer.after(step + 1, last=step + 1 == self._total_steps)
        return StepOutcome(result, norm, learning_rate, scale)

    def replay(self, step: int, batch: StepBatch, outcome: StepOutcome) -> Replay:
        """Computes the gradients of the newest step again if its update was skipped: with the same weights, inputs and
        seeds. Collective.

        Raises:
            Corrupted, UnfitNode: the passes of replicas differ (``train.verify``).
        """
        # a replica may have updated its weights where another has skipped the step
        is_updated = self._engine.updates is not None or self.outer is not None
        if is_updated or bool(outcome.grad_norm.isfinite()):
            return Replay(UNKNOWN, CHANGED)
        engine = self._engine
        while isinstance(engine, WrappedEngine):  # wrappers that observe training would count the replay
            engine = engine._engine
        with kept_state(engine.parts):
            if self.verification is not None:
                for _ in range(2):  # a repetition, and a pass of another replica
                    self.verification.train_step(step, batch, outcome.loss_scale)
            seed_step(self._config.train.seed, step, self._mesh, self._sequence_shards)
            again = engine.train_step(step, batch, outcome.loss_scale)
            norm = engine.clip_grad_norm_(0.0, outcome.loss_scale)
        first = outcome.result.loss_sum
        differs = not torch.allclose(first, again.loss_sum, rtol=SAME_LOSS, atol=0.0, equal_nan=True)
        names = gather_plain(current_allocation().node_name if differs else None, self._mesh.control)
        nodes = {rank: name for rank, name in enumerate(names) if name is not None}
        if not nodes and not bool(norm.isfinite()):
            return Replay(DATA, "its replay is not finite either, so the cause is the data or the optimization")
        who = f" on {join_names([f'rank {rank} of {name}' for rank, name in nodes.items()])}" if nodes else ""
        return Replay(
            HARDWARE, f"its replay from the same weights, inputs and seeds differs{who}, so the hardware erred", nodes
        )

    def go_on(self, mesh: Mesh) -> TrainStep:
        """Returns the steps of the replicas that are left, which ``mesh`` has."""
        left = copy(self)
        left._mesh = mesh
        return left

    def take_skipped(self) -> Tensor:
        """Returns the values of ``SkippedSteps``, ``[2]`` int64 on the device, and resets ``since_last``. Collective;
        of several replicas these are the largest values."""
        values = self._skipped_anywhere()
        self._skipped[1] = 0
        return values

    def _skipped_anywhere(self) -> Tensor:
        values = self._skipped.clone()
        sum_over_replicas([values], self._mesh, operation=dist.ReduceOp.MAX)
        return values

    @property
    def skipped_in_a_row(self) -> int:
        """Returns the number of consecutive skipped steps up to now; waits for the device. Collective."""
        return int(self._skipped_anywhere()[0].item())

    def state(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint; waits for the device. Collective."""
        scale = self.loss_scale.state() if self.loss_scale is not None else None
        return {"loss_scale": scale, "skipped_steps": self.skipped_in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint, which may come from a run with another precision."""
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state(state["loss_scale"])
        self._skipped[0] = state.get("skipped_steps", 0)
        self._skipped[1] = 0


FIRST = 2.0**16
GROWTH_EVERY = 2000
GROWTH, BACKOFF = 2.0, 0.5
SMALLEST, LARGEST = 2.0**-14, 2.0**24  # bounds of the scale; beyond them, fp16 gradients underflow or overflow


class LossScale:
    """Holds the loss scale, a scalar fp32 tensor on ``device``, and adapts it after each step.

    Args:
        first: the scale of the first step.
        growth_every: the number of finite steps in a row after which the scale doubles.
    """

    def __init__(self, device: torch.device, first: float = FIRST, growth_every: int = GROWTH_EVERY) -> None:
        self._growth_every = growth_every
        self.value = torch.tensor(first, dtype=torch.float32, device=device)
        self._finite_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, finite: Tensor) -> None:
        """Adapts the scale after a step.

        Args:
            finite: whether all gradients were finite: a bool scalar on the device, the same on every rank.
        """
        counted = torch.where(finite, self._finite_steps + 1, 0)
        grows = counted >= self._growth_every
        factor = torch.where(finite, torch.where(grows, GROWTH, 1.0), BACKOFF)
        self.value = (self.value * factor).clamp(SMALLEST, LARGEST)
        self._finite_steps = torch.where(grows, 0, counted)

    def state(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint; waits for the device."""
        return {"scale": self.value.item(), "finite_steps": int(self._finite_steps.item())}

    def load_state(self, state: dict[str, Any]) -> None:
        self.value.fill_(state["scale"])
        self._finite_steps.fill_(state["finite_steps"])


@dataclass(frozen=True)
class Agreement:
    """Holds the combined messages of all ranks.

    Attributes:
        stop: whether a rank has received a stop request.
        target_counts: the number of targets that count in the announced global batch, for each replica.
        save: whether to save a checkpoint after the announced step.
        end: whether a hook of any rank has requested that the announced step is the last one.
        items: the number of stream items in the announced global batch; 0 for other data.
        holds: the number of ranks that a person wants to look into, before the announced step.
    """

    stop: bool
    target_counts: tuple[int, ...]
    save: bool
    end: bool
    items: int
    holds: int

    @property
    def target_count(self) -> int:
        """Returns the number of targets that count in the announced global batch."""
        return sum(self.target_counts)


SLOW_S = 5.0  # seconds between two messages; a synchronous all-reduce on the hosts takes much less time
NESTED = 1  # the tag of messages that are posted and read while a message about a step may be pending
RING_RANKS = 64  # the largest world that agrees over gloo's ring, whose 126 messages take a few milliseconds


class Control:
    """Posts and reads the message of each step. Each ``post`` is followed by one ``read`` on every rank.

    Args:
        tag: distinguishes its messages from those of another Control that has posted and not read.
    """

    def __init__(self, mesh: Mesh, tag: int = 0) -> None:
        self._mesh = mesh
        self._tag = tag
        self._rounds: ThreadPoolExecutor | None = None
        if mesh.layout.world_size > RING_RANKS:
            self._rounds = ThreadPoolExecutor(1, "agreement")
        self._replicas = mesh.layout.replicas
        self._replica_rank = mesh.replica_rank
        self._counts = mesh.pp_rank == mesh.cp_rank == mesh.tp_rank == 0  # one rank per batch reports its targets
        self._pending: tuple[Tensor, Callable[[], object]] | None = None  # the message and what waits for its sum
        self._posted = deque[float](maxlen=2)  # time.monotonic() of the newest messages

    def post(
        self,
        stop: bool,
        local_count: int,
        save: bool = False,
        end: bool = False,
        items: int = 0,
        hold: bool = False,
    ) -> None:
        """Starts the agreement without blocking.

        Args:
            stop: whether this rank has received a stop request.
            local_count: the number of targets that count in the next batch of this data-parallel rank; 0 without one.
            save: whether this rank requests a checkpoint after the step with that batch.
            end: whether a hook of this rank has requested the end of the run.
            items: the number of stream items in that batch.
            hold: whether a person wants to look into this rank before the step with that batch.
        """
        assert self._pending is None, "the previous message was not read"
        now = time.monotonic()
        # the duration of a step is unknown for the first two messages, which precede the end of the first step
        is_slow = len(self._posted) < 2 or now - self._posted[-1] > SLOW_S
        self._posted.append(now)
        counts = [0] * self._replicas
        if self._counts:
            counts[self._replica_rank] = local_count
        else:
            items = 0
        message = torch.tensor([int(stop), items, int(save), int(end), int(hold), int(is_slow), *counts])
        self._pending = message, self._sum(message)

    def read(self, flag: StopFlag | None = None) -> Agreement:
        """Returns the agreement; waits for the ``post`` of the slowest rank.

        Args:
            flag: the stop flag of this rank, which is read again after the first step and after slow steps. It must be
                None on all ranks or on none.

        Raises:
            ReplicaLost: see ``across_replicas``.
        """
        assert self._pending is not None, "nothing was posted"
        message, wait = self._pending
        self._pending = None
        with across_replicas(self._mesh):
            wait()
        stop, items, save, end, holds, slow, *counts = message.tolist()
        if flag is not None and slow and not stop:
            late = torch.tensor([int(flag.requested)])
            with across_replicas(self._mesh):
                self._sum(late)()
            stop = late.item()
        return Agreement(stop > 0, tuple(counts), save > 0, end > 0, items, holds)

    def _sum(self, message: Tensor) -> Callable[[], object]:
        """Starts to sum ``message`` over all ranks in place, and returns the function that waits for the sum."""
        if self._rounds is not None:
            return self._rounds.submit(sum_in_rounds, message, self._mesh.control, self._tag).result
        work = dist.all_reduce(message, group=self._mesh.control, async_op=True)
        assert work is not None
        return work.wait


def sum_in_rounds(message: Tensor, group: dist.ProcessGroup, tag: int) -> None:
    """Sums ``message``, a vector on the CPU, over the n ranks of ``group`` in place, in ceil(log2(n)) rounds.

    This is the all-gather of Bruck et al. 1997 (doi:10.1109/71.642949): in each round, a rank receives as many messages
    as it has from a higher rank. Every rank adds them up.
    """
    rank = group.rank()
    ranks = group.size()
    messages = message.new_empty(ranks, len(message))  # of this rank and the following ones
    messages[0] = message
    distances = [2**number for number in range((ranks - 1).bit_length())]
    # posted before the rounds, in each of which this thread may wait for the interpreter's lock
    parts = [messages[distance : 2 * distance] for distance in distances]
    received = [
        dist.irecv(part, group=group, group_src=(rank + distance) % ranks, tag=tag)
        for part, distance in zip(parts, distances, strict=True)
    ]
    sent = []
    for part, distance, work in zip(parts, distances, received, strict=True):
        sent.append(dist.isend(messages[: len(part)], group=group, group_dst=(rank - distance) % ranks, tag=tag))
        assert work is not None
        work.wait()
    for work in sent:
        assert work is not None
        work.wait()
    message.copy_(messages.sum(0))
