"""Describes every pipeline schedule and every data-parallel kind in a row of a table. It does not import torch.

A row of ``SCHEDULES`` or ``KINDS`` is the only place that states these facts. A config key may also name a row in a
user's package by its import path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Literal, TypeVar, get_args

from hpc_train.config.extensions import IMPORT_PATH, is_import_path, load_row
from hpc_train.config.schema import Config
from hpc_train.errors import UserError, nearest
from hpc_train.layout import orders
from hpc_train.layout.orders import Action, PipelineShape


@dataclass(frozen=True)
class AttentionKernel:
    """Describes a kernel that ``train.attention`` selects.

    Attributes:
        majors: the major compute capabilities of the GPUs that it supports.
        widest: the most elements of a head.
        registered: its name in ``torch.nn.attention``; empty if it is part of PyTorch.
        package: the module with the kernels; empty if it is part of PyTorch.
    """

    majors: tuple[int, ...]
    widest: int
    registered: str = ""
    package: str = ""


# GPUs of fa3, fa4: the checks of torch/nn/attention/_fa3.py and _fa4.py (torch 2.13). Heads: README and
# flash_attn/cute/interface.py of Dao-AILab/flash-attention; for cuDNN, the width that it supports on all GPUs.
ATTENTION_KERNELS = {
    "fa3": AttentionKernel((9,), 256, "FA3", "flash_attn_interface"),
    "fa4": AttentionKernel((9, 10), 128, "FA4", "flash_attn.cute.interface"),
    "cudnn": AttentionKernel((8, 9, 10, 12), 128),
}


def check_attention_device(name: str, device: str, architecture: str) -> None:
    """Checks that a device has the kernel ``name`` of ``train.attention``.

    Args:
        device: its name in the message.
        architecture: a compute capability such as ``9.0``, an AMD architecture such as ``gfx942``, or ``no GPU``.

    Raises:
        UserError: it does not have the kernel.
    """
    kernel = ATTENTION_KERNELS.get(name)
    if kernel is None or architecture.partition(".")[0] in {str(major) for major in kernel.majors}:
        return
    supported = ", ".join(f"{major}.x" for major in kernel.majors)
    raise UserError(
        f"train.attention={name} needs an NVIDIA GPU of compute capability {supported}, but the device is {device} "
        f"({architecture})",
        where="train.attention",
        fix="train.attention=auto, or a cluster.gpu_type that has it",
    )


Placement = Literal["linear", "looped", "v"]
MicroBatches = Literal["one", "any", "multiple_of_ranks"]
State = Literal["parameters", "gradients", "optimizer"]
Row = TypeVar("Row", "PipelineSchedule", "DataParallelKind")


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """Describes one pipeline schedule. Every fact is required.

    Attributes:
        name: the name in messages.
        torch_class: ``module:attribute`` of a subclass of torch's ``PipelineScheduleSingle`` or
            ``PipelineScheduleMulti``, imported on workers only.
        stages_per_rank: the minimum and the maximum number of stages of a rank.
        placement: ``linear`` (one stage per rank), ``looped`` (stage s on rank s % ranks) or ``v`` (from the first rank
            to the last and back).
        micro_batches: ``one``, ``any`` (at least one per stage), or ``multiple_of_ranks`` (at least one per stage, and
            a multiple of the number of ranks).
        data_parallel: the kinds with which its gradients are correct. The row of a kind may name the schedule instead.
        data_parallel_reason: why gradients are wrong with other kinds, as the end of a sentence.
        in_flight: a function of a shape and a rank. It returns for each stage of the rank, in ascending order, the
            number of micro-batches whose activations the stage keeps when the rank keeps the most.
        bubble: a function of a shape. It returns the share of a step in which a rank is idle, if stages are equal,
            messages take no time, and the gradients of inputs and of weights each take as long as a forward.
        splits_backward: whether the gradients of inputs and of weights are computed at different times.
        compiles: whether it supports ``train.compile``.
        ops_checkpointing: whether it supports ``train.activation_checkpointing=ops``.
        auto: the reason why ``strategy.schedule=auto`` chooses it; None if ``auto`` never does. Later rows of the table
            take precedence.
        order: a function of a shape and a rank. It returns the passes that the rank computes in a step, in order, for
            the planner. If it is None, the planner uses ``bubble``.
    """

    name: str
    torch_class: str
    stages_per_rank: tuple[int, int]
    placement: Placement
    micro_batches: MicroBatches
    data_parallel: tuple[str, ...]
    data_parallel_reason: str
    in_flight: Callable[[PipelineShape, int], tuple[int, ...]]
    bubble: Callable[[PipelineShape], float]
    splits_backward: bool
    compiles: bool
    ops_checkpointing: bool
    auto: str | None
    order: Callable[[PipelineShape, int], tuple[Action, ...]] | None

    def __post_init__(self) -> None:
        least, most = self.stages_per_rank
        one_pass = self.splits_backward and (self.compiles or self.ops_checkpointing)
        shape = PipelineShape(2, least, 1 if self.micro_batches == "one" else 4 * least)
        _refuse(
            self.name,
            {
                f"torch_class is {self.torch_class!r}, not module:attribute": not _is_path(self.torch_class),
                f"placement is {self.placement!r}": self.placement not in get_args(Placement),
                f"micro_batches is {self.micro_batches!r}": self.micro_batches not in get_args(MicroBatches),
                f"stages_per_rank is {self.stages_per_rank}": not 1 <= least <= most,
                "placement linear has one stage per rank": self.placement == "linear" and most > 1,
                "placement v has two stages per rank": self.placement == "v" and (least, most) != (2, 2),
                "data_parallel is empty": not self.data_parallel,
                "compiles and ops_checkpointing must be False if splits_backward is True": one_pass,
            },
        )
        counts = self.in_flight(shape, 0)
        share = self.bubble(shape)
        _refuse(
            self.name,
            {
                f"in_flight returns {counts} for {least} stages of a rank": len(counts) != least or min(counts) < 1,
                f"bubble returns {share}, which is not a share": not 0 <= share < 1,
            },
        )

    def has_room_for(self, stages: int) -> bool:
        """Returns whether the schedule supports ``stages`` stages per rank."""
        least, most = self.stages_per_rank
        return least <= stages <= most

    @property
    def kinds(self) -> str:
        """Returns the data-parallel kinds that the row names, for messages."""
        return " or ".join(self.data_parallel)

    def place(self, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """Returns the pipeline rank of each stage."""
        stages = range(ranks * stages_per_rank)
        if self.placement == "v":
            return tuple(min(stage, 2 * ranks - 1 - stage) for stage in stages)
        return tuple(stage % ranks for stage in stages)


@dataclass(frozen=True, kw_only=True)
class DataParallelKind:
    """Describes one way to synchronize data-parallel ranks. Every fact is required.

    Attributes:
        name: used in messages.
        replicas: ``module:attribute`` of the class with the methods of ``hpc_train.parallel.engine.Replicas``,
            imported on workers only and called as ``make_replicas`` calls it.
        sharder: ``module:attribute`` of the function that shards the model before its parameters get values, with the
            signature of ``hpc_train.parallel.fsdp.shard``; None if nothing is sharded.
        shards: which of ``parameters``, ``gradients`` and ``optimizer`` are sharded between two micro-batches.
        schedules: pipeline schedules with which its gradients are correct, in addition to the schedules whose rows name
            this kind.
        tensor_parallel: whether it reduces the gradients of tensor-parallel parameters.
        compressed_as: the kind that replaces it to sum compressed gradients, possibly itself; None if there is none. A
            kind that shards state supports only ``strategy.compression=bf16``, in its reduce-scatter.
        updated_as: the kind that replaces it to update parameters during the backward (``optim.in_backward``), possibly
            itself; None if there is none.
        debugged_as: the kind that replaces it under ``train.debug``; None if it is not replaced.
        offloads: the values of ``strategy.offload`` that it supports besides ``none``.
        reproducible: whether ``train.reproducible`` may replace its reduction by a tree.
        buckets: whether it reduces gradients in buckets of ``strategy.bucket_cap_mb``.
        waits_in_backward: whether the backward waits for the reduction in C++, where Python cannot measure the time.
    """

    name: str
    replicas: str
    sharder: str | None
    shards: frozenset[State]
    schedules: tuple[str, ...]
    tensor_parallel: bool
    compressed_as: str | None
    updated_as: str | None
    debugged_as: str | None
    offloads: tuple[str, ...]
    reproducible: bool
    buckets: bool
    waits_in_backward: bool

    def __post_init__(self) -> None:
        unknown = {*self.shards} - {*get_args(State)}
        offloaded = "all" in self.offloads and not {"gradients", "optimizer"} <= self.shards
        _refuse(
            self.name,
            {
                f"replicas is {self.replicas!r}, not module:attribute": not _is_path(self.replicas),
                f"sharder is {self.sharder!r}, not module:attribute": self.sharder and not _is_path(self.sharder),
                f"shards contains {', '.join(sorted(unknown))}": unknown,
                "shards and sharder must both be given or both be empty": bool(self.shards) != bool(self.sharder),
                f"offloads is {self.offloads}": {*self.offloads} - {"optimizer", "all"},
                "offloads contains all, but the gradients are not sharded": offloaded,
                "compressed_as must be None or the kind itself if state is sharded": self.shards
                and self.compressed_as not in (None, self.name),
                "reproducible must be False if state is sharded": self.shards and self.reproducible,
            },
        )


def _is_path(text: str) -> bool:
    return IMPORT_PATH.fullmatch(text) is not None


def _refuse(name: str, wrong: dict[str, object]) -> None:
    """Raises ValueError with the first sentence of ``wrong`` whose value is true."""
    for sentence, holds in wrong.items():
        if holds:
            raise ValueError(f"row {name!r}: {sentence}")


_TORCH = "torch.distributed.pipelining.schedules"
_ASSUMED = "where stages are equal and messages between them take no time"

_GPIPE = PipelineSchedule(
    name="gpipe",
    torch_class=f"{_TORCH}:ScheduleGPipe",
    stages_per_rank=(1, 1),
    placement="linear",
    micro_batches="any",
    data_parallel=("ddp", "allreduce", "zero1", "zero2", "zero3"),
    data_parallel_reason="its gradients were not verified with this kind",
    in_flight=lambda shape, _: (shape.micro_batches,),
    bubble=orders.bubble,
    splits_backward=False,
    compiles=True,
    ops_checkpointing=True,
    auto=None,
    order=orders.gpipe,
)
_INTERLEAVED = replace(
    _GPIPE,
    name="interleaved_1f1b",
    torch_class=f"{_TORCH}:ScheduleInterleaved1F1B",
    stages_per_rank=(2, 64),
    placement="looped",
    micro_batches="multiple_of_ranks",
    in_flight=orders.interleaved_in_flight,
    order=orders.interleaved,
    auto=f"several stages per rank make its bubble the smallest, (p - 1) / (v m + p - 1) {_ASSUMED}",
)
# ``auto`` chooses no zero-bubble schedule: torch runs the backward as two graphs, and only a measurement shows whether
# the smaller bubble is worth it. With these schedules, the hooks of DDP and of resharding FSDP silently compute wrong
# gradients. The kind ``allreduce`` does not rely on hooks, so it supports every schedule.
_ZERO_BUBBLE = replace(
    _INTERLEAVED,
    name="interleaved_zero_bubble",
    torch_class=f"{_TORCH}:ScheduleInterleavedZeroBubble",
    data_parallel=("allreduce", "zero1", "zero2"),
    data_parallel_reason="the split backward runs the hooks of DDP and of resharding FSDP at the wrong time "
    "(pytorch#144530)",
    in_flight=lambda shape, _: orders.filled(shape, shape.stages_per_rank * shape.ranks),
    bubble=orders.zero_bubble,
    splits_backward=True,
    compiles=False,
    ops_checkpointing=False,
    auto=None,
    order=orders.interleaved_zero_bubble,
)
_ZBV = replace(
    _ZERO_BUBBLE,
    name="zbv",
    torch_class=f"{_TORCH}:ScheduleZBVZeroBubble",
    stages_per_rank=(2, 2),
    placement="v",
    micro_batches="any",
    in_flight=lambda shape, rank: (2 * shape.ranks - 1 - rank, 1 + rank),
    order=orders.zero_bubble_v,
)

AUTO = "auto"
IN_FLIGHT = 4  # buckets that are sent at the same time; more keep the network busy, but their copies need memory
CARRYING = ("powersgd", "topk")  # compressions that add the unsent part to the gradient of the next step
SCHEDULES: dict[str, PipelineSchedule] = {
    row.name: row
    for row in (
        replace(  # one stage computes at a time
            _GPIPE, name="sequential", micro_batches="one", auto="one micro-batch leaves nothing to overlap"
        ),
        _GPIPE,
        replace(
            _GPIPE,
            name="1f1b",  # Narayanan et al. 2021, arXiv:2104.04473
            torch_class=f"{_TORCH}:Schedule1F1B",
            in_flight=lambda shape, rank: (min(shape.micro_batches, shape.ranks - rank),),
            order=orders.one_forward_one_backward,
            auto=f"the bubble of gpipe, (p - 1) / (m + p - 1) {_ASSUMED}, with the activations of at most p "
            "micro-batches",
        ),
        _INTERLEAVED,
        _ZERO_BUBBLE,
        _ZBV,
        replace(
            _ZBV,
            name="dualpipev",
            torch_class="hpc_train.parallel.pipeline.schedules:DualPipeV",
            in_flight=lambda shape, rank: (2 * shape.ranks - rank, 1 + rank),
            order=orders.dual_pipe_v,
        ),
    )
}

_REPLICAS = "hpc_train.parallel.replicas"
_DDP = DataParallelKind(
    name="ddp",
    replicas=f"{_REPLICAS}:DDPReplicas",
    sharder=None,
    shards=frozenset(),
    schedules=(),
    tensor_parallel=False,
    compressed_as="allreduce",
    updated_as="allreduce",  # with DDP, the buckets would keep the memory of all gradients
    debugged_as="allreduce",  # DDP of torch 2.13 crashes (SIGSEGV) when collectives are compared
    offloads=("optimizer",),
    reproducible=True,
    buckets=True,
    waits_in_backward=True,
)
_ALLREDUCE = replace(  # reduces buckets during the last backward or after it (parallel/reduction.py)
    _DDP,
    name="allreduce",
    replicas=f"{_REPLICAS}:AllReduceReplicas",
    tensor_parallel=True,
    debugged_as=None,
    waits_in_backward=False,
)
_ZERO1 = replace(
    _ALLREDUCE,
    name="zero1",
    replicas=f"{_REPLICAS}:Sharded",
    sharder="hpc_train.parallel.fsdp:shard",
    shards=frozenset({"optimizer"}),
    compressed_as="zero1",
    updated_as=None,  # FSDP provides the gradients of a block only after it has reduced the full block
    reproducible=False,
    buckets=False,
)
_ZERO2 = replace(
    _ZERO1,
    name="zero2",
    shards=frozenset({"gradients", "optimizer"}),
    compressed_as="zero2",
    offloads=("optimizer", "all"),
)
_ZERO3 = replace(
    _ZERO2, name="zero3", shards=frozenset({"parameters", "gradients", "optimizer"}), compressed_as="zero3"
)

KINDS: dict[str, DataParallelKind] = {row.name: row for row in (_DDP, _ALLREDUCE, _ZERO1, _ZERO2, _ZERO3)}
# ``train.reproducible`` replaces the kind of the config by a sum over a tree.
TREE = replace(_ALLREDUCE, name="tree", replicas=f"{_REPLICAS}:LocalReplicas", buckets=False, updated_as=None)


@cache
def find_schedule(name: str) -> PipelineSchedule:
    """Returns the row of ``strategy.schedule=name``, a built-in name or an import path. Raises UserError if the row
    does not exist, or a field is missing or contradictory.
    """
    row = _find("strategy.schedule", name, SCHEDULES, PipelineSchedule, (AUTO,))
    if ":" in name and row.auto is not None:
        raise UserError(
            f"row {row.name!r} sets auto, but strategy.schedule=auto chooses among the built-in schedules only",
            where=f"strategy.schedule={name}",
            fix="auto=None",
        )
    for kind in row.data_parallel:
        _known(row.name, "data_parallel", kind, KINDS, f"strategy.schedule={name}")
    return row


@cache
def find_kind(name: str) -> DataParallelKind:
    """Returns the row of ``strategy.data_parallel=name``, a built-in name or an import path. Raises UserError if the
    row does not exist, or a field is missing or contradictory.
    """
    row = _find("strategy.data_parallel", name, KINDS, DataParallelKind)
    for schedule in row.schedules:
        _known(row.name, "schedules", schedule, SCHEDULES, f"strategy.data_parallel={name}")
    for fact in ("compressed_as", "updated_as", "debugged_as"):
        kind = getattr(row, fact)
        if kind is not None:
            _known(row.name, fact, kind, KINDS, f"strategy.data_parallel={name}")
    return row


def asked_kind(config: Config) -> str:
    """Returns the kind of the config, or the kind that replaces it under ``train.debug``."""
    kind = config.strategy.data_parallel
    return (find_kind(kind).debugged_as if config.train.debug else None) or kind


def supports(schedule: str, kind: str) -> bool:
    """Returns whether the gradients of a data-parallel kind are correct with a pipeline schedule."""
    return kind in find_schedule(schedule).data_parallel or schedule in find_kind(kind).schedules


def _find(key: str, name: str, table: Mapping[str, Row], kind: type[Row], others: tuple[str, ...] = ()) -> Row:
    if name in table:
        return table[name]
    if not is_import_path(name):
        raise UserError(f"{key} is {name!r}", where=key, fix=nearest(name, (*others, *table)))
    row: Row = load_row(name, key, kind)
    return row


def _known(row: str, fact: str, name: str, table: Iterable[str], where: str) -> None:
    if name not in table and not is_import_path(name):
        raise UserError(
            f"row {row!r}: {fact} contains {name!r}, which is unknown", where=where, fix=nearest(name, tuple(table))
        )


def schedules_where(holds: Callable[[PipelineSchedule], bool]) -> str:
    """Returns the names of the built-in schedules for which ``holds`` is true, for messages."""
    return " or ".join(row.name for row in SCHEDULES.values() if holds(row))


def kinds_where(holds: Callable[[DataParallelKind], bool]) -> str:
    """Returns the names of the built-in data-parallel kinds for which ``holds`` is true, for messages."""
    return " or ".join(row.name for row in KINDS.values() if holds(row))


_GRAPHS, _ASYNC = "train.cuda_graphs", "strategy.async_tp"


class CompilerMode(StrEnum):
    """Lists the modes of compiled code: plain, CUDA graphs, or asynchronous tensor parallelism. The last two exclude
    each other because they need different layouts."""

    PLAIN = "plain"
    CUDA_GRAPHS = "cuda_graphs"
    ASYNC_TP = "async_tp"


def compiler_mode(config: Config) -> CompilerMode:
    """Returns the mode in which the config compiles the model."""
    if not config.train.compile:
        return CompilerMode.PLAIN
    if config.train.cuda_graphs:
        return CompilerMode.CUDA_GRAPHS
    return CompilerMode.ASYNC_TP if config.strategy.async_tp else CompilerMode.PLAIN


def check_compiler_device(config: Config, gpus: int) -> None:
    """Checks that the nodes have the GPUs that an option of the compiler needs.

    Args:
        gpus: the GPUs of a node.

    Raises:
        UserError: ``config`` requests an option that needs GPUs, but the nodes have none.
    """
    mode = compiler_mode(config)
    if mode != CompilerMode.PLAIN and gpus == 0:
        key = _GRAPHS if mode == CompilerMode.CUDA_GRAPHS else _ASYNC
        raise UserError(
            f"{key} needs GPUs, and this run trains on CPUs",
            where=key,
            fix=f"{key}=false, or train on GPUs (cluster.gpus_per_node)",
        )
