"""Finds wrong numbers that no error reports (``train.verify``), names the rank, and holds wrong gradients back.

A verified step computes its forward and backward passes more than once, from the same seeds, and compares checksums of
the local gradients before the optimizer uses any. By turns a rank repeats its own pass, or computes the pass of another
replica. Passes other than the last leave no state behind. The weights, the optimizer states and the reduced gradients
of replicas are compared, too, and ``Optimizer.step`` repeats updates.

The first verified step of an attempt is its second step. It also finds out which numbers are comparable here: those of
kernels that are not deterministic differ on several ranks or in most repetitions, and are left out from then on.

If numbers differ later, further ranks compute the same passes. The value that most ranks have computed is the right
one, and a rank that has computed another is a suspect; so is a rank whose own passes differ. If the last pass of every
rank gives the right values, training continues with it. Otherwise the attempt ends before the update.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.checkpoint.agreement import lowest
from hpc_train.config.schema import Config
from hpc_train.data.dataset import Ragged, StepBatch
from hpc_train.machine.allocation import current_allocation
from hpc_train.parallel.checksums import (
    ARRIVED,
    GRADIENT_ARRIVED,
    LEFT,
    PassChecksums,
    data_shards,
    position_checksum,
    shard_index,
)
from hpc_train.parallel.collectives import broadcast_plain, gather_plain
from hpc_train.parallel.engine import Engine, StepResult, WrappedEngine, has_sequence_shards, seed_step
from hpc_train.parallel.mesh import Mesh, all_gather_tensor, largest, synchronize
from hpc_train.preflight.run import rank_facts
from hpc_train.run.exits import Corrupted, UnfitNode
from hpc_train.train.debug import join_names
from hpc_train.train.kept_state import drawn, kept_parameters, kept_state
from hpc_train.train.optimizers.optimizer import Optimizer

TOO_OFTEN = 2  # findings after which the run continues without the node
COST = 0.01  # of the time, with ``train.verify.every=auto``
TIMED = (6, 10, 14)  # the steps of an attempt, from 1, whose verification ``auto`` times
_TAG = 2  # of messages on the control group, on which an agreement may be pending (``train/step.py``)
GRADIENTS, REDUCTION, STATE = "gradients", "reduced gradients", "weights and optimizer state"
UPDATE = "update"
REPETITIONS_ALONE = (
    "train.verify: data-parallel ranks do not compute the passes of each other, so repetitions alone prove checkpoints"
)


@dataclass(frozen=True)
class Suspicion:
    """Describes wrong numbers of one node.

    Attributes:
        step: the number of steps before the verified one.
        since: the number of steps before the first one whose numbers may be wrong.
        check: what differed: ``GRADIENTS``, ``REDUCTION``, ``STATE`` or ``UPDATE``.
        ranks: the suspects on ``node``; empty if the numbers name no rank, and then ``node`` is None.
        parts: names of what differed.
        findings: the number of independent findings: of ranks that agree against the suspect, at most 2.
        corrected: whether a repetition gave the right numbers.
    """

    step: int
    since: int
    check: str
    node: str | None
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    parts: tuple[str, ...]
    findings: int
    corrected: bool

    @property
    def words(self) -> str:
        who = "no rank could be named"
        if self.node is not None:
            who = f"rank {', '.join(map(str, self.ranks))} on {self.node} is suspected"
        end = "a repetition gave the right numbers, with which training continues"
        if not self.corrected:
            end = f"the numbers may be wrong since step {self.since}"
        return f"wrong {self.check} in step {self.step + 1} ({join_names([*self.parts])}): {who}; {end}"


@dataclass(frozen=True)
class _Pass:
    """Holds the checksums of a pass on this rank, ``[entries]`` on the device.

    Attributes:
        shift: the pass was that of the data-parallel rank that is ``shift`` higher, modulo their number.
    """

    shift: int
    sums: Tensor


class Verification:
    """Verifies steps of ``engine``. All methods are collective.

    Args:
        report: called on every rank with each suspicion; returns on the first rank how many findings the run has of
            its node, with those of the suspicion.
        warn: called on every rank with a step and a message.
        beat: called with the step before each pass, since a verified step may take much longer than others.
        may_write: whether a forward pass may write to parameters; discarded passes then restore them.
        clock: returns seconds, from which ``train.verify.every=auto`` chooses N.

    Attributes:
        proved: the number of steps before the newest verified one that passed; checkpoints of at most so many steps are
            proved. None before the first.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        engine: Engine,
        optimizer: Optimizer,
        report: Callable[[Suspicion], int],
        warn: Callable[[int, str], None],
        beat: Callable[[int], object] = lambda step: None,
        may_write: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._engine = engine
        self._inner = engine
        while isinstance(self._inner, WrappedEngine):  # wrappers that observe training would count discarded passes
            self._inner = self._inner._engine
        self._optimizer = optimizer
        self._report = report
        self._warn = warn
        self.proved: int | None = None
        self._every = config.train.verify.every
        self._sequence_shards = has_sequence_shards(engine)
        self._beat = beat
        self._may_write = may_write
        self._clock = clock
        self._began: list[float] = []  # the times at which steps began, until auto has chosen
        self._checksums = PassChecksums(engine.parts, mesh.device)
        self._names: list[str] = []
        self._local = torch.zeros(0, dtype=torch.bool)  # entries that are computed before any reduction
        self._repeats = self._local  # entries that a repetition on the same rank reproduces
        self._calls = 0
        self._seconds = 0.0
        self._verified = 0
        self._left_out: dict[str, Tensor] = {}  # check -> which tensors differ between replicas from the start
        self._compares_updates = True
        allocation = current_allocation()
        device = rank_facts(mesh.rank, allocation.node_name, "", mesh.device).device
        self._may_leave_nodes = allocation.job_id is not None
        self._places: list[list[str]] = gather_plain([allocation.node_name, device], mesh.control)
        devices = {name for _, name in self._places}
        self._may_leave_nodes |= len({name for name, _ in self._places}) > 1
        self._dp = mesh.layout.dp
        self._replica_ranks = mesh.layout.ep  # consecutive data-parallel ranks that compute a pass together
        self._replicas = self._dp // self._replica_ranks
        reasons = {
            f"their devices are {join_names(sorted(devices))}": len(devices) > 1,
            "train.reproducible is set": config.train.reproducible is not None,
            "each holds other experts": self._replicas == 1,
            "batch.balance changes the number of their micro-batches": mesh.layout.dp > 1 and config.batch.balance,
        }
        hindering = [reason for reason, holds in reasons.items() if holds]
        self._can_exchange = self._dp > 1 and not hindering
        if self._dp > 1 and hindering:
            warn(0, f"{REPETITIONS_ALONE}: {'; '.join(hindering)}")

    def is_due(self, step: int) -> bool:
        """Returns whether to verify step ``step``; called once for each step.

        The first step of an attempt is never verified, since it allocates and compiles. The second always is. ``auto``
        verifies three of the steps up to the 14th, and compares their time with that of the others.
        """
        self._calls += 1
        if self._every == "auto":
            synchronize(self._mesh.device)
            self._began.append(self._clock())
            if self._calls > TIMED[-1]:
                self._choose(step)
        if self._calls <= 2:
            return self._calls == 2
        if not isinstance(self._every, int):
            return self._calls in TIMED
        return (step + 1) % self._every == 0

    def _choose(self, step: int) -> None:
        """Chooses N from the medians of the steps that have been timed, so that verification takes ``COST``."""
        seconds = dict(enumerate((end - begin for begin, end in pairwise(self._began)), start=1))
        verified = median(seconds[number] for number in TIMED)
        others = median(seconds[number] for number in range(3, TIMED[-1]) if number not in TIMED)
        cost = largest(verified / others - 1, self._mesh)
        self._every = max(2, math.ceil(cost / COST))
        self._warn(step, f"train.verify.every=auto: verifying every {self._every} steps")

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None) -> StepResult:
        """Runs a verified step, see ``Engine.train_step``.

        Raises:
            UnfitNode: a node has been found twice, and the run can continue without it; raised on every rank.
            Corrupted: numbers are wrong, and a repetition did not correct them; raised on every rank.
        """
        self._compare_state(step)
        is_first = self._verified == 0
        exchanges = self._can_exchange and not isinstance(batch.micro_batches[0].inputs, Ragged)
        if is_first and self._can_exchange and not exchanges:
            self._warn(step, f"{REPETITIONS_ALONE}: the batches are ragged")
        shift = 0
        if exchanges and (is_first or self._verified % 2):
            shift = self._replica_ranks * (1 + self._verified // 2 % (self._replicas - 1))
        shifts = [shift]
        if is_first:
            shifts = [0, 0, shift] if exchanges else [0] * 4
        passes = [self._discarded(step, batch, loss_scale, shift) for shift in shifts]
        result = self._last(step, batch, loss_scale, passes)
        values = self._aligned(passes)
        if is_first:
            self._calibrate(step, values, passes)
            if exchanges and not self._can_exchange:
                exchanges = False
                passes = [pass_ for pass_ in passes if pass_.shift == 0]
                values = self._aligned(passes)
        self._verified += 1
        differing = self._differing(values, passes).any(0).any(0)
        is_unsteady = bool((self._local & ~self._repeats).any())
        late = differing & is_unsteady  # they may depend on others that are not deterministic, and rarely differ
        self._leave_out(step, late)
        if self._any(bool((differing & ~late).any()) | bool(self._unequal_sums(step).any())):
            result = self._resolve(step, batch, loss_scale, passes, exchanges)
        if shift or not exchanges:
            self.proved = step
        return result

    @property
    def turn(self) -> int:
        """Returns a number that increases with each verified step, for ``Optimizer.step``."""
        return self._verified + self._mesh.rank

    def check_updates(self, step: int, differing: Mapping[str, bool]) -> None:
        """Reports updates of a verified step whose repetition has given another result.

        Custom optimizers are not compared any more if their results differ on several ranks, or from each other in all
        of three computations: their kernels are not deterministic.

        Args:
            differing: see ``Optimizer.step``.

        Raises:
            Corrupted, UnfitNode: as ``train_step`` does.
        """
        corrected = all(differing.values())
        reports = gather_plain([bool(differing), corrected, self._optimizer.is_fused], self._mesh.control)
        ranks = sum(differs for differs, _, _ in reports)
        if ranks == 0 or not self._compares_updates:
            return
        is_fused = all(fused for _, _, fused in reports)
        if not is_fused and (ranks > 1 or not all(corrected for _, corrected, _ in reports)):
            self._compares_updates = False
            self._warn_of_any(step, "differ when their update is repeated; updates are not compared", [*differing])
            return
        finding = _Finding(bool(differing), bool(differing), (*differing,), 1, corrected)
        self._conclude(step, UPDATE, finding)

    # passes

    def _last(self, step: int, batch: StepBatch, loss_scale: Tensor | None, passes: list[_Pass]) -> StepResult:
        """Runs the pass whose gradients training may use, and appends its checksums to ``passes``."""
        result, sums = self._run(self._engine, step, batch, loss_scale, 0)
        passes.append(_Pass(0, sums))
        return result

    def _discarded(self, step: int, batch: StepBatch, loss_scale: Tensor | None, shift: int) -> _Pass:
        """Runs a pass and restores the state that it has changed."""
        began = time.monotonic()
        with ExitStack() as restored:
            restored.enter_context(kept_state(self._inner.parts))
            if self._may_write:
                restored.enter_context(kept_parameters(self._inner.named_parameters().values()))
            copied = self._exchanged(batch, shift)
            sums = self._run(self._inner, step, copied, loss_scale, shift)[1]
        synchronize(self._mesh.device)
        self._seconds += time.monotonic() - began
        return _Pass(shift, sums)

    def take_seconds(self) -> float:
        """Returns the seconds of the discarded passes since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def _run(
        self, engine: Engine, step: int, batch: StepBatch, loss_scale: Tensor | None, shift: int
    ) -> tuple[StepResult, Tensor]:
        mesh = self._mesh
        self._beat(step)
        owner = replace(mesh, rank=self._neighbor(shift))
        seed_step(self._config.train.seed, step, owner, self._sequence_shards)
        with self._checksums.recording() as sums:
            result = engine.train_step(step, batch, loss_scale)
        device = mesh.device
        values: dict[str, Tensor] = {"the loss": position_checksum(result.loss_sum)}
        values["the random state"] = torch.tensor(int(drawn(device)[:15], 16), device=device)
        count = len(sums) + len(values)
        for name, buffer in self._inner.named_buffers().items():
            values[f"the buffer {name}"] = position_checksum(buffer)
        for name, parameter in self._inner.named_parameters().items():
            if parameter.requires_grad:
                zero = torch.zeros((), dtype=torch.int64)
                values[f"the sum for {name}"] = zero if parameter.grad is None else position_checksum(parameter.grad)
        if not self._names:
            self._names = [*self._checksums.names, *values]
            self._local = torch.arange(len(self._names)) < count
            self._repeats = torch.ones(len(self._names), dtype=torch.bool)
        return result, torch.cat([sums, torch.stack([value.to(device) for value in values.values()])])

    def _neighbor(self, shift: int) -> int:
        """Returns the rank whose data-parallel index is ``shift`` higher, modulo their number."""
        mesh = self._mesh
        step = mesh.layout.cp * mesh.layout.tp
        return mesh.rank + ((mesh.dp_rank + shift) % self._dp - mesh.dp_rank) * step

    def _exchanged(self, batch: StepBatch, shift: int) -> StepBatch:
        """Returns a copy of the batch of the rank ``_neighbor(shift)``."""

        def received(value: Tensor) -> Tensor:
            if shift == 0 or not value.numel():
                return value.clone()
            group = self._mesh.control
            sent = value.cpu().contiguous()
            arrived = torch.empty_like(sent)
            works = [
                dist.isend(sent, self._neighbor(-shift), group=group, tag=_TAG),
                dist.irecv(arrived, self._neighbor(shift), group=group, tag=_TAG),
            ]
            for work in works:
                assert work is not None
                work.wait()
            return arrived.to(value.device)

        return replace(batch, micro_batches=tuple(micro.map(received) for micro in batch.micro_batches))

    # comparisons

    def _aligned(self, passes: Sequence[_Pass]) -> Tensor:
        """Returns the checksums that all data-parallel ranks have computed, ``[owners, passes, entries]`` on the CPU:
        those of the micro-batches of each owner."""
        local = torch.stack([pass_.sums for pass_ in passes])
        if self._dp == 1:
            return local.unsqueeze(0).cpu()
        gathered = local.new_empty(self._dp * len(passes), local.shape[1])
        all_gather_tensor(gathered, local, group=self._mesh.group("dp"))
        values = gathered.view(self._dp, *local.shape).cpu()
        for index, pass_ in enumerate(passes):
            values[:, index] = values[:, index].roll(pass_.shift, 0)
        return values

    def _differing(self, values: Tensor, passes: Sequence[_Pass]) -> Tensor:
        """Returns which comparable checksums of ``_aligned`` differ from those of the last pass of the owner."""
        local = self._repeats & self._local
        comparable = torch.stack([local if pass_.shift else self._repeats for pass_ in passes])
        return (values != values[:, -1:]) & comparable

    def _calibrate(self, step: int, values: Tensor, passes: Sequence[_Pass]) -> None:
        """Leaves out the numbers that are not comparable here: see the module.

        A single rank can explain the differences of an exchange if each concerns a pass that it has computed.
        """
        repeated = torch.tensor([pass_.shift == 0 for pass_ in passes])
        local = values[:, repeated]
        differs = self._of_replicas((local != local[:, -1:]).any(1))  # [replicas, entries]
        most = (local.unsqueeze(1) == local.unsqueeze(2)).sum(2).amax(1)  # passes with the most common value
        unsteady = (differs.sum(0) > 1) | (most < local.shape[1] - 1).any(0)
        if (differs & self._local).any() and not (unsteady & self._local).any():
            unsteady &= self._local  # sums of the gradients of a rank that has computed wrong ones
        self._leave_out(step, unsteady)
        uncomparable = torch.zeros_like(unsteady)
        for index, pass_ in enumerate(passes):
            differs = self._of_replicas((values[:, index] != values[:, -1]) & self._repeats & self._local)
            owners = {int(owner) for owner in differs.any(1).nonzero()} if pass_.shift else set()
            distance = pass_.shift // self._replica_ranks
            by_one = any(owners <= {number, (number + distance) % self._replicas} for number in range(self._replicas))
            if owners and not (by_one and (self._replicas > 2 or len(owners) == 1)):
                uncomparable |= differs.any(0)
        first = lowest(self._chosen_names(uncomparable) or None, self._mesh.control)
        if first is not None:  # others may differ later
            self._can_exchange = False
            self._warn(step, f"{REPETITIONS_ALONE}: {join_names(first)} differ between ranks")

    def _of_replicas(self, of_ranks: Tensor) -> Tensor:
        """Returns ``[replicas, entries]`` from ``[data-parallel ranks, entries]``: whether any rank of a replica has
        the property."""
        return of_ranks.unflatten(0, (self._replicas, self._replica_ranks)).any(1)

    def _leave_out(self, step: int, entries: Tensor) -> None:
        """Leaves ``entries`` out of all comparisons, and warns. Collective."""
        self._repeats &= ~entries
        self._warn_of_any(step, "differ from pass to pass and are not compared", self._chosen_names(entries))

    def _chosen_names(self, entries: Tensor) -> list[str]:
        return [name for name, is_chosen in zip(self._names, entries.tolist(), strict=True) if is_chosen]

    def _warn_of_any(self, step: int, what: str, names: list[str]) -> None:
        """Warns about the names of the first rank that has any. Collective."""
        first = lowest(names or None, self._mesh.control)
        if first is not None:
            self._warn(step, f"train.verify: {join_names(first)} {what}")

    def _unequal(self, step: int, check: str, tensors: Mapping[str, Tensor | None], wholes: Iterable[Tensor]) -> Tensor:
        """Returns which of ``tensors`` differ from those of the most ranks that hold the same elements: ``[ranks of
        dp_cp, tensors]``, with all ranks of a draw.

        What differs at the first call for ``check`` with no single rank to blame is left out from then on.

        Args:
            wholes: a tensor for each of ``tensors`` that is sharded like it.
        """
        ranks = self._mesh.layout.dp_cp
        if ranks == 1:
            return torch.zeros(1, len(tensors), dtype=torch.bool)
        device = self._mesh.device
        local = torch.zeros(2, len(tensors), dtype=torch.int64, device=device)
        for index, (value, whole) in enumerate(zip(tensors.values(), wholes, strict=True)):
            local[1, index] = shard_index(whole)
            if value is not None:
                local[0, index] = position_checksum(value)
        gathered = local.new_empty(2 * ranks, len(tensors))
        all_gather_tensor(gathered, local, group=self._mesh.group("dp_cp"))
        values, shards = gathered.view(ranks, 2, -1).cpu().unbind(1)
        unequal = torch.zeros_like(values, dtype=torch.bool)
        for shard in shards.unique():
            held = shards == shard
            largest_value = values.where(held, values.new_tensor(-(2**63))).amax(0)
            smallest_value = values.where(held, values.new_tensor(2**63 - 1)).amin(0)
            for column in (held.any(0) & (largest_value != smallest_value)).nonzero().flatten():
                holders = Counter(values[held[:, column], column].tolist())
                most = max(holders.values())
                is_draw = [*holders.values()].count(most) > 1
                right = [value for value, count in holders.items() if count == most and not is_draw]
                unequal[:, column] |= held[:, column] & ~torch.isin(values[:, column], values.new_tensor(right))
        if check not in self._left_out:
            self._left_out[check] = unequal.sum(0) > 1
            names = [name for name, out in zip(tensors, self._left_out[check].tolist(), strict=True) if out]
            self._warn_of_any(step, f"differ between replicas and are not compared ({check})", names)
        return unequal & ~self._left_out[check]

    def _unequal_sums(self, step: int) -> Tensor:
        trained = {name: value for name, value in self._replicated().items() if value.requires_grad}
        return self._unequal(step, REDUCTION, {name: value.grad for name, value in trained.items()}, trained.values())

    def _replicated(self) -> dict[str, nn.Parameter]:
        """Returns the parameters of which several ranks of ``dp_cp`` hold the same elements."""
        ranks = self._mesh.layout.dp_cp
        return {name: value for name, value in self._inner.named_parameters().items() if data_shards(value) < ranks}

    def _compare_state(self, step: int) -> None:
        """Compares weights and optimizer states of replicas.

        Raises:
            Corrupted: they differ; raised on every rank.
        """
        tensors: dict[str, Tensor] = {}
        states = self._optimizer.named_state() if self._optimizer.is_built_in else {}
        for name, parameter in self._replicated().items():
            tensors[name] = parameter
            tensors |= {f"{name} ({key})": value for key, value in states.get(name, {}).items()}
        tensors = {name: value for name, value in tensors.items() if data_shards(value) < self._mesh.layout.dp_cp}
        unequal = self._unequal(step, STATE, tensors, tensors.values())
        if not self._any(bool(unequal.any())):
            return
        parts = [name for name, wrong in zip(tensors, unequal.any(0).tolist(), strict=True) if wrong]
        is_suspect = bool(unequal[self._mesh.dp_cp_rank % len(unequal)].any())
        self._conclude(step, STATE, _Finding(is_suspect, is_suspect, tuple(parts), 1, False))

    def _any(self, flag: bool) -> bool:
        """Returns whether ``flag`` is true on any rank. Collective."""
        return lowest(flag or None, self._mesh.control) is not None

    # verdict

    def _resolve(
        self, step: int, batch: StepBatch, loss_scale: Tensor | None, passes: list[_Pass], exchanges: bool
    ) -> StepResult:
        """Repeats the passes of a step whose numbers differ, and reports the suspects.

        Raises:
            Corrupted, UnfitNode: see ``_conclude``.
        """
        shifts = [0]
        if exchanges:
            shifts += [self._replica_ranks * distance for distance in range(1, min(3, self._replicas))]
        passes = [*passes, *(self._discarded(step, batch, loss_scale, shift) for shift in shifts)]
        result = self._last(step, batch, loss_scale, passes)
        values = self._aligned(passes)
        unequal = self._unequal_sums(step)
        finding = self._gradient_finding(values, passes)
        check = GRADIENTS
        if not self._any(finding.suspect):
            check = REDUCTION
            finding = self._reduction_finding(values, passes, unequal)
        right = finding.corrected and not bool(unequal.any())
        self._conclude(step, check, replace(finding, corrected=not self._any(not right)))
        return result

    def _gradient_finding(self, values: Tensor, passes: Sequence[_Pass]) -> _Finding:
        comparable = self._repeats & self._local
        suspect = False
        corrected = True
        differing: set[int] = set()
        findings = 1
        for owner in range(self._dp):
            computed = values[owner][:, comparable]
            ranks = [(owner - pass_.shift) % self._dp for pass_ in passes]
            ballot = count_votes([*zip(ranks, map(tuple, computed.tolist()), strict=True)])
            corrected &= tuple(computed[-1].tolist()) == ballot.right
            if self._mesh.dp_rank in ballot.suspects:
                suspect = True
                findings = max(findings, ballot.findings)
                differing |= {*(computed != computed[-1]).any(0).nonzero().flatten().tolist()}
        names = self._chosen_names(comparable)
        parts = [names[index] for index in sorted(differing)]
        gets_batch = self._mesh.layout.placement[0] == self._mesh.pp_rank
        return _Finding(suspect, suspect and is_origin(parts, gets_batch), tuple(parts), findings, corrected)

    def _reduction_finding(self, values: Tensor, passes: Sequence[_Pass], unequal: Tensor) -> _Finding:
        """Returns what differs between passes on this rank after a reduction. If it does on all ranks, no rank is
        named."""
        comparable = self._repeats & ~self._local
        local = values[:, torch.tensor([pass_.shift == 0 for pass_ in passes])][:, :, comparable]
        differs = (local != local[:, -1:]).any(2).any(1) if local.numel() else torch.zeros(self._dp, dtype=torch.bool)
        sums = [tuple(value) for value in local[self._mesh.dp_rank].tolist()]
        corrected = count_votes([(0, value) for value in sums]).right == sums[-1]
        names = self._chosen_names(comparable)
        wrong = (local[self._mesh.dp_rank] != local[self._mesh.dp_rank, -1:]).any(0)
        parts = tuple(name for name, is_wrong in zip(names, wrong.tolist(), strict=True) if is_wrong)
        suspect = int(differs.sum()) == 1 and bool(differs[self._mesh.dp_rank])
        suspect |= bool(unequal[self._mesh.dp_cp_rank % len(unequal)].any())
        return _Finding(suspect, suspect, parts, 1, corrected)

    def _conclude(self, step: int, check: str, finding: _Finding) -> None:
        """Reports the suspects of all ranks, by node, and ends the attempt if it must not continue.

        Raises:
            UnfitNode: a node has been found twice, and the run can continue without it.
            Corrupted: the numbers are not corrected.
        """
        reports = gather_plain(
            [finding.suspect, finding.origin, [*finding.parts], finding.findings, finding.corrected], self._mesh.control
        )
        corrected = all(item[4] for item in reports)
        suspects = [rank for rank, item in enumerate(reports) if item[1]]
        suspects = suspects or [rank for rank, item in enumerate(reports) if item[0]]
        by_node: dict[str | None, list[int]] = {}
        for rank in suspects:
            by_node.setdefault(self._places[rank][0], []).append(rank)
        parts = [part for rank in suspects or range(len(reports)) for part in reports[rank][2]]
        words = []
        unfit = False
        for node, ranks in by_node.items() or [(None, [])]:
            suspicion = Suspicion(
                step=step,
                since=self.proved or 0,
                check=check,
                node=node,
                ranks=tuple(ranks),
                devices=tuple(self._places[rank][1] for rank in ranks),
                parts=tuple(dict.fromkeys(parts)),
                findings=max((reports[rank][3] for rank in ranks), default=1),
                corrected=corrected,
            )
            words.append(suspicion.words)
            total = broadcast_plain(self._report(suspicion), self._mesh.control)
            unfit |= node is not None and total >= TOO_OFTEN
        secondary = self._mesh.rank != next(iter(suspects), 0)
        if unfit and self._may_leave_nodes:
            raise UnfitNode("; ".join(words), secondary)
        if not corrected:
            raise Corrupted("; ".join(words), secondary)


@dataclass(frozen=True)
class _Finding:
    """Holds what a rank contributes to a verdict.

    Attributes:
        suspect: whether this rank has computed or holds wrong numbers.
        origin: whether what arrived from other ranks was right.
        parts, findings, corrected: see ``Suspicion``.
    """

    suspect: bool
    origin: bool
    parts: tuple[str, ...]
    findings: int
    corrected: bool


Value = tuple[int, ...]  # the checksums of a pass


@dataclass(frozen=True)
class Ballot:
    """Holds the result of the votes on one pass.

    Attributes:
        right: the value that most ranks have computed; None if it is a draw.
        suspects: the ranks that may have computed wrong values.
        findings: 2 if at least two ranks agree against a rank whose own passes agree, otherwise 1.
    """

    right: Value | None
    suspects: frozenset[int]
    findings: int = 1


def count_votes(votes: Sequence[tuple[int, Value]]) -> Ballot:
    """Returns which value of a pass is right, and which ranks may have computed wrong ones.

    A rank whose own values differ is the only suspect. Its repetitions then decide between values that equally many
    ranks have computed.

    Args:
        votes: a rank and the value that it has computed, for each computation.
    """
    voters: dict[Value, list[int]] = {}
    for rank, value in votes:
        voters.setdefault(value, []).append(rank)
    values_of = Counter(rank for ranks in voters.values() for rank in {*ranks})
    unsteady = frozenset(rank for rank, count in values_of.items() if count > 1)
    support = {value: (len({*ranks}), len(ranks) if unsteady else 0) for value, ranks in voters.items()}
    most = max(support.values())
    winners = [value for value in support if support[value] == most]
    right = winners[0] if len(winners) == 1 else None
    if unsteady:
        return Ballot(right, unsteady)
    if right is None:
        return Ballot(None, frozenset(values_of))
    others = frozenset(values_of) - {*voters[right]}
    return Ballot(right, others, findings=min(2, most[0]) if others else 1)


def is_origin(parts: Sequence[str], gets_batch: bool) -> bool:
    """Returns whether the wrong numbers ``parts`` of a rank were not caused by what another stage has sent it.

    Args:
        gets_batch: whether the first part of the rank is the first stage, at which the batch arrives.
    """
    from_stages = [part for part in parts if part.startswith(ARRIVED)]
    if gets_batch:
        from_stages = [part for part in from_stages if part != f"{ARRIVED} part 0"]
    if from_stages:
        return False
    return any(part.startswith(LEFT) for part in parts) or not any(part.startswith(GRADIENT_ARRIVED) for part in parts)
