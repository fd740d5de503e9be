"""Describes the effective layout of one attempt: how its ranks divide the model and the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hpc_train.layout.orders import PipelineShape
from hpc_train.layout.techniques import TREE, DataParallelKind, PipelineSchedule, State, find_kind, find_schedule
from hpc_train.units import counted


@dataclass(frozen=True)
class Layout:
    """Describes the effective layout of one attempt. The global rank is ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp
    + tp_rank. With ``strategy.local_steps`` this is the rank in a replica, and the ranks of a replica are consecutive.

    In a step each rank computes ``micro_batches`` micro-batches of ``micro_size`` samples. If dp x micro_batches x
    micro_size exceeds the global batch, the rest is padding. For custom code (``run.entry``, ``run.command``) the
    number of micro-batches is 0.

    Attributes:
        shard: the number of consecutive ranks of dp x cp that share one copy of the ZeRO state; dp x cp / shard groups
            replicate it.
        notes: reasons for automatic choices.
        logical_micro_batches: the logical micro-batches of a step under ``train.reproducible``; otherwise 0.
        cp: the number of ranks that share the tokens of each sample.
        ring: the number of these ranks that pass keys and values around a ring; cp / ring consecutive ranks exchange
            heads.
        ep: the number of consecutive ranks of a pipeline stage that share the experts of a layer; other groups of ep
            ranks replicate them.
        replicas: the number of equal parts of dp, each of which trains a copy of the model, and which exchange weights
            in outer steps only (``strategy.local_steps``); otherwise 1.
    """

    dp: int
    pp: int
    tp: int
    shard: int
    data_parallel: str
    schedule: str
    stages_per_rank: int
    micro_batches: int
    micro_size: int
    notes: tuple[str, ...] = ()
    logical_micro_batches: int = 0
    cp: int = 1
    ep: int = 1
    ring: int = 1
    replicas: int = 1

    @property
    def replica(self) -> Layout:
        """Returns the layout of one of ``replicas``."""
        return replace(self, dp=self.dp // self.replicas, replicas=1)

    @property
    def first_ranks(self) -> range:
        """Returns the first rank at each position of the pipeline of the first replica."""
        replica = self.replica
        return range(0, replica.world_size, replica.stage_ranks)

    def logical_of(self, dp_rank: int) -> range:
        """Returns the logical micro-batches that a dp rank computes."""
        logical = self.logical_micro_batches
        return range(dp_rank * logical // self.dp, (dp_rank + 1) * logical // self.dp)

    @property
    def lockstep_ranks(self) -> int:
        """Returns the number of consecutive data-parallel ranks that share collectives inside a micro-batch, so that
        they compute equally many: one, or those that exchange shards of parameters or gradients."""
        if self.shards_between_passes & {"parameters", "gradients"}:
            return math.lcm(self.shard, self.cp) // self.cp
        return 1

    def possible_counts(self) -> range:
        """Returns the numbers of micro-batches that a replica may compute in a step with ``batch.balance``: at least
        one, or as many as the schedule of a pipeline needs."""
        replicas = self.dp // self.lockstep_ranks
        least = self.stages if self.pp > 1 else 1
        step = self.pp if self.pp > 1 and self.pipeline.micro_batches == "multiple_of_ranks" else 1
        return range(least, replicas * self.micro_batches - (replicas - 1) * least + 1, step)

    def micro_batches_of(self, dp_rank: int, counts: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Returns the micro-batches that a data-parallel rank computes in a step, each as (rank, number).

        Args:
            counts: the number of micro-batches of each replica. A replica with fewer than ``micro_batches`` hands its
                last ones to the others; empty if all have ``micro_batches``.
        """
        counts = counts or (self.micro_batches,) * (self.dp // self.lockstep_ranks)
        replica, place = divmod(dp_rank, self.lockstep_ranks)
        moved = [(other, number) for other, count in enumerate(counts) for number in range(count, self.micro_batches)]
        before = sum(max(0, count - self.micro_batches) for count in counts[:replica])
        taken = moved[before : before + max(0, counts[replica] - self.micro_batches)]
        first = [(replica, number) for number in range(min(counts[replica], self.micro_batches))]
        return [(other * self.lockstep_ranks + place, number) for other, number in first + taken]

    @property
    def world_size(self) -> int:
        return self.pp * self.stage_ranks

    @property
    def dp_cp(self) -> int:
        """Returns the number of ranks that hold the same parameters. Gradients are summed over those of a replica."""
        return self.dp * self.cp

    @property
    def token_unit(self) -> int:
        """Returns a number that divides the tokens of each sample if cp and tp split them. A rank of a ring holds two
        chunks."""
        return self.cp * self.tp * (2 if self.ring > 1 else 1)

    @property
    def stage_ranks(self) -> int:
        """Returns the number of ranks at one position of the pipeline. Those of a replica are consecutive."""
        return self.dp_cp * self.tp

    @property
    def stages(self) -> int:
        """Returns the number of pipeline stages over all ranks."""
        return self.pp * self.stages_per_rank

    @property
    def expert_sizes(self) -> tuple[int, int, int]:
        """Returns how the ranks of a pipeline stage divide the experts of a layer: the number of copies of the ZeRO
        state of an expert, the ranks that share one copy, and ``ep``.

        A copy is divided over the ranks that also share the state of other parameters: ``shard`` x ``tp``, which divide
        ``ep`` or are a multiple of it. If ``ep`` is 1, tensor-parallel ranks have copies.
        """
        if self.ep == 1:
            return self.stage_ranks // self.shard, self.shard, 1
        block = max(self.shard * self.tp, self.ep) if self.shards_state else self.ep
        return self.stage_ranks // block, block // self.ep, self.ep

    @property
    def communicators(self) -> int:
        """Returns how many process groups of more than one rank a rank joins on its device (``parallel/mesh.py``)."""
        replica = self.replica
        sizes_and_strides = {
            (self.world_size, 1),
            (replica.world_size, 1),
            (self.pp, replica.stage_ranks),
            (replica.dp, self.cp * self.tp),
            (replica.dp_cp, self.tp),
            (replica.dp_cp // self.shard, self.shard * self.tp),
            (self.shard, self.tp),
            (self.tp, 1),
        }
        if self.ep > 1:
            copies, shards, _ = replica.expert_sizes
            sizes_and_strides |= {(copies, self.ep * shards), (shards, self.ep)}
        links = 2 if self.pp > 2 else 0
        apart = (self.cp > 1) + (self.ep > 1) + 2 * (1 < self.ring < self.cp)
        return sum(size > 1 for size, _ in sizes_and_strides) + apart + links

    @property
    def kind(self) -> DataParallelKind:
        return TREE if self.logical_micro_batches else find_kind(self.data_parallel)

    @property
    def shards_state(self) -> bool:
        """Returns whether the ranks of dp x cp share the state of the model."""
        return self.dp_cp > 1 and bool(self.kind.shards)

    @property
    def shards_between_passes(self) -> frozenset[State]:
        """Returns the state that is sharded between the micro-batches of a step: none in a pipeline, since torch's
        stages keep parameters and gradients whole until the last micro-batch (``backward_maybe_with_nosync``)."""
        if self.shards_state and self.pp == 1:
            return self.kind.shards
        return frozenset()

    @property
    def pipeline(self) -> PipelineSchedule:
        return find_schedule(self.schedule)

    @property
    def splits_backward(self) -> bool:
        """Returns whether the gradients of inputs and of weights are computed at different times."""
        return self.pp > 1 and self.pipeline.splits_backward

    @property
    def placement(self) -> tuple[int, ...]:
        """Returns the pipeline rank of each stage."""
        return self.pipeline.place(self.pp, self.stages_per_rank)

    @property
    def bubble_share(self) -> float:
        """Returns the share of a step in which a rank is idle, according to the schedule's row."""
        return self.pipeline.bubble(self._shape) if self.pp > 1 else 0.0

    def in_flight(self, stage: int) -> int:
        """Returns the number of micro-batches whose activations ``stage`` keeps when its rank keeps the most."""
        if self.pp == 1:
            return 1
        placement = self.placement
        rank = placement[stage]
        held = [number for number, owner in enumerate(placement) if owner == rank]
        return min(self.micro_batches, self.pipeline.in_flight(self._shape, rank)[held.index(stage)])

    @property
    def _shape(self) -> PipelineShape:
        return PipelineShape(self.pp, self.stages_per_rank, self.micro_batches)

    def __str__(self) -> str:
        ring = f" (ring {self.ring})" if self.ring > 1 else ""
        context = f" x cp {self.cp}{ring}" if self.cp > 1 else ""
        split = f"dp {self.dp} x pp {self.pp}{context} x tp {self.tp}" if self.world_size > 1 else "one process"
        if not self.micro_batches:
            return f"{split} (custom code)"
        kinds = [self.data_parallel] if self.dp_cp > 1 else []
        if self.ep > 1:
            kinds.append(f"ep {self.ep}")
        if self.pp > 1:
            kinds.append(self.schedule)
        if self.replicas > 1:
            kinds.append(f"{self.replicas} local replicas")
        batches = f"{counted(self.micro_batches, 'micro-batch', 'micro-batches')} of {self.micro_size}"
        return f"{split} ({', '.join(kinds)}), {batches}" if kinds else f"{split}, {batches}"


class Place(StrEnum):
    """Where a job runs."""

    FOREGROUND = "the foreground"
    MACHINE = "this machine"  # as a process that ``-m`` starts
    ALLOCATION = "this allocation"  # as steps of the Slurm job in which the command runs
    QUEUE = "a queue"  # as a separate job of a scheduler, or as the job of the batch script that runs the command


@dataclass(frozen=True)
class JobShape:
    """Describes the resources of a job, and where it runs.

    Attributes:
        nodes: the largest number of nodes that train, without spares.
        fewest_nodes: the smallest number on which the run must fit, at its start or after it loses nodes.
        gpus: the number of GPUs per node; 0 trains on CPUs.
        workers: the number of workers per node.
        place: where the job runs.
        in_job: whether it runs inside a Slurm job.
        device_bytes: the memory of the smallest GPU of a job on several nodes; None if it is unknown.
        gpu_types: the types of GPUs that the job may get, if the config depends on them; empty if they are unknown.
        components: the shapes of the components of ``run.roles``; GPUs and workers of the job are those of the first.
    """

    nodes: int
    fewest_nodes: int
    gpus: int
    workers: int
    place: Place = Place.FOREGROUND
    in_job: bool = False
    device_bytes: float | None = None
    gpu_types: frozenset[str] = frozenset()
    components: tuple[JobShape, ...] = ()

    @classmethod
    def on_slurm(cls, nodes: int, gpus: int, workers: int) -> JobShape:
        """Returns the shape of a job that is not submitted, on ``nodes`` Slurm nodes with ``workers`` workers each."""
        return cls(nodes, nodes, gpus, workers, Place.QUEUE, in_job=True)
