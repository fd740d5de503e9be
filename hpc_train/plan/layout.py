"""From what was asked for and what was given to the effective layout of one attempt.

The frozen config says ``dp: fill``; the allocation says how many nodes and workers there are. ``resolve_layout`` joins
the two. It is torch-free, so that the submitter can refuse an impossible layout before a queue slot is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_train.config.schema import Config, StrategyConfig
from hpc_train.errors import UserError
from hpc_train.plan.reproducible import check_reproducible, divide
from hpc_train.plan.stages import check_split
from hpc_train.plan.techniques import check_compression

ZERO = ("zero1", "zero2", "zero3")
DATA_PARALLEL = ("ddp", "reduce", *ZERO)
TREE = "tree"  # how replicas are kept in step under train.reproducible

# Which data parallelism each pipeline schedule computes right gradients with. torch's zero-bubble schedules split the
# backward, so DDP's and resharding FSDP's hooks fire at the wrong moment: wrong gradients without an error
# (pytorch#144530). `reduce` is our own reduction, which looks at the stages' backwards, and serves all of them.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "sequential": DATA_PARALLEL,
    "gpipe": DATA_PARALLEL,
    "1f1b": DATA_PARALLEL,
    "interleaved_1f1b": DATA_PARALLEL,
    "interleaved_zero_bubble": ("reduce", "zero1", "zero2"),
    "zbv": ("reduce", "zero1", "zero2"),
}
STAGES_PER_RANK: dict[str, tuple[int, int]] = {  # least and most stages of one rank
    "sequential": (1, 1),
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, 64),
    "interleaved_zero_bubble": (2, 64),
    "zbv": (2, 2),
}

# Schedules that take the gradients of a stage's inputs and of its weights at different times.
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv")

# What ``schedule=auto`` takes the first of that goes with the rest, and why. Zero-bubble schedules are not among them:
# torch's run a backward as two graphs, and whether the smaller bubble pays for that is for a measurement to say.
AUTO = "auto"
_ASSUMED = "where stages are equal and messages between them take no time"
AUTO_SCHEDULES: dict[str, str] = {
    "interleaved_1f1b": f"several stages per rank make its bubble the smallest, (p - 1) / (v m + p - 1) {_ASSUMED}",
    "1f1b": f"the bubble of gpipe, (p - 1) / (m + p - 1) {_ASSUMED}, with the activations of at most p micro-batches",
    "sequential": "one micro-batch leaves nothing to overlap",
}

SPLITS = ("even", "flops", "measured")  # the words of pp_split


@dataclass(frozen=True)
class Layout:
    """The effective split of one attempt. Global rank = (pp_rank * dp + dp_rank) * tp + tp_rank.

    ``shard`` ranks, neighbours within dp, hold one copy of the ZeRO state; dp / shard such groups replicate it. A step
    of one rank is ``micro_batches`` micro-batches of ``micro_size`` samples; where dp x micro_batches x micro_size
    exceeds the global batch the rest is padding.

    ``logical_micro_batches`` of a step, 0 where their number is not fixed (``train.reproducible``): each dp rank has
    consecutive ones.
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

    def logical_of(self, dp_rank: int) -> range:
        """The logical micro-batches that a dp rank computes."""
        logical = self.logical_micro_batches
        return range(dp_rank * logical // self.dp, (dp_rank + 1) * logical // self.dp)

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pp * self.stages_per_rank

    def __str__(self) -> str:
        split = f"dp {self.dp} x pp {self.pp} x tp {self.tp}"
        kind = self.data_parallel if self.dp > 1 else "no replicas"
        schedule = f", {self.schedule}" if self.pp > 1 else ""
        return f"{split} ({kind}{schedule}), {self.micro_batches} micro-batches of {self.micro_size}"


def resolve_layout(config: Config, nodes: int, workers_per_node: int) -> Layout:
    """Derives the layout of ``config`` on ``nodes`` x ``workers_per_node`` ranks.

    Raises:
        UserError: the strategy cannot be laid out there; the message holds the fix.
    """
    strategy = config.strategy
    available = nodes * workers_per_node
    notes: list[str] = []
    tp = _tensor_parallel(strategy, workers_per_node)
    pp = _pipeline(config, nodes, available // tp, notes)
    dp = _data_parallel(strategy, available, pp, tp)
    _check_use(dp * pp * tp, nodes, available, notes)
    stages_per_rank = strategy.stages_per_rank if pp > 1 else 1
    _check_tensor_parallel(config, dp, tp)
    schedule, (micro_batches, micro_size) = _schedule(config, dp, pp, stages_per_rank, notes)
    kind = _kept_in_step_by(config, dp, tp, notes)
    reproducible, logical = config.train.reproducible is not None, 0
    if reproducible:
        check_reproducible(config, pp, tp)
        logical, micro_batches, micro_size = divide(config, dp)
    return Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        shard=_shard(strategy, dp, workers_per_node // tp),
        data_parallel=TREE if reproducible else kind,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        micro_batches=micro_batches,
        micro_size=micro_size,
        notes=tuple(notes),
        logical_micro_batches=logical,
    )


def _tensor_parallel(strategy: StrategyConfig, workers_per_node: int) -> int:
    if strategy.tp < 1 or workers_per_node % strategy.tp:
        raise UserError(
            f"tensor parallelism over {strategy.tp} ranks does not fit a node of {workers_per_node} workers",
            where="strategy.tp",
            fix=f"a divisor of {workers_per_node}: tensor parallelism stays inside a node",
        )
    return strategy.tp


def _pipeline(config: Config, nodes: int, columns: int, notes: list[str]) -> int:
    """``pp: auto`` is one stage per node on several nodes, two stages on one, one where two do not divide."""
    strategy = config.strategy
    if strategy.pp == "fill":
        return _fill_pipeline(config, columns, notes)
    if strategy.pp == "auto":
        pp = nodes if nodes > 1 else 2
        if columns % pp:
            notes.append(
                f"{columns} ranks do not divide into {pp} pipeline ranks: 1 stage x {columns} replicas instead"
            )
            return 1
        return pp
    if not isinstance(strategy.pp, int) or strategy.pp < 1:
        raise UserError(f"pp is {strategy.pp!r}", where="strategy.pp", fix="a number >= 1, auto or fill")
    if strategy.pp > columns:
        raise UserError(
            f"{strategy.pp} pipeline ranks do not fit on {columns} workers",
            where="strategy.pp",
            fix=f"strategy.pp={columns} or fewer, or more workers (cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return strategy.pp


def _fill_pipeline(config: Config, columns: int, notes: list[str]) -> int:
    """``pp: fill`` makes stages of all ranks that dp and tp leave, as far as there are layers to cut."""
    strategy = config.strategy
    if not isinstance(strategy.dp, int):
        raise UserError(
            "dp and pp cannot both be fill", where="strategy.dp, strategy.pp", fix="a number for one of them"
        )
    room = max(1, columns // max(1, strategy.dp))
    layers = getattr(config.model, "n_layers", None)
    most = room if layers is None else max(1, layers // strategy.stages_per_rank)
    if most < room:
        notes.append(f"{layers} layers make {most} pipeline ranks of {strategy.stages_per_rank} stages, not {room}")
    return min(room, most)


def _data_parallel(strategy: StrategyConfig, available: int, pp: int, tp: int) -> int:
    room = available // (pp * tp)
    if strategy.dp == "fill":
        return room
    if not isinstance(strategy.dp, int) or strategy.dp < 1:
        raise UserError(f"dp is {strategy.dp!r}", where="strategy.dp", fix="a number >= 1, or fill")
    if strategy.dp > room:
        raise UserError(
            f"dp {strategy.dp} x pp {pp} x tp {tp} needs {strategy.dp * pp * tp} workers, {available} are there",
            where="strategy.dp",
            fix="strategy.dp=fill, or more workers (cluster.nodes, cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return strategy.dp


def _kept_in_step_by(config: Config, dp: int, tp: int, notes: list[str]) -> str:
    """Compressed gradients go through our own reduction."""
    kind = config.strategy.data_parallel
    if dp > 1:
        check_compression(config, tp)
        if kind == "ddp" and config.strategy.compression != "none":
            notes.append("compressed gradients are summed by our own reduction instead of DDP")
            return "reduce"
    return kind


def _check_use(world_size: int, nodes: int, available: int, notes: list[str]) -> None:
    if world_size == available:
        return
    if nodes > 1:
        raise UserError(
            f"the layout uses {world_size} of {available} workers on {nodes} nodes",
            where="strategy",
            fix="strategy.dp=fill, or fewer nodes: idle nodes would be paid for",
        )
    notes.append(f"the layout uses {world_size} of {available} workers")


def _check_tensor_parallel(config: Config, dp: int, tp: int) -> None:
    if tp > 1 and config.train.compile:
        raise UserError(
            "compiled layers fail in the backward of tensor parallelism (torch 2.13)",
            where="train.compile, strategy.tp",
            fix="train.compile=false, or strategy.tp=1",
        )
    if tp > 1 and dp > 1 and config.strategy.data_parallel == "ddp":
        raise UserError(
            "DDP does not know tensor-parallel parameters",
            where="strategy.data_parallel",
            fix="strategy.data_parallel=reduce or zero2",
        )


def _schedule(config: Config, dp: int, pp: int, stages_per_rank: int, notes: list[str]) -> tuple[str, tuple[int, int]]:
    """The schedule, and micro-batches and samples in each; ``auto`` is the first of ``AUTO_SCHEDULES`` that goes."""
    asked = config.strategy.schedule
    if asked != AUTO or pp == 1:
        schedule = "1f1b" if asked == AUTO else asked
        return schedule, _scheduled(config, schedule, dp, pp, stages_per_rank)
    problems: list[UserError] = []
    for schedule, reason in AUTO_SCHEDULES.items():
        least, most = STAGES_PER_RANK[schedule]
        if not least <= stages_per_rank <= most:
            continue
        try:
            found = _scheduled(config, schedule, dp, pp, stages_per_rank)
        except UserError as problem:
            problems.append(problem)
            continue
        notes.append(f"schedule {schedule}: {reason}")
        return schedule, found
    raise problems[0]


def _scheduled(config: Config, schedule: str, dp: int, pp: int, stages_per_rank: int) -> tuple[int, int]:
    if pp > 1:
        _check_pipeline(config, schedule, pp, dp, stages_per_rank)
    return _micro_batches(config, schedule, dp, pp, pp * stages_per_rank)


def _check_pipeline(config: Config, schedule: str, pp: int, dp: int, stages_per_rank: int) -> None:
    data_parallel = config.strategy.data_parallel
    least, most = STAGES_PER_RANK[schedule]
    if not least <= stages_per_rank <= most:
        raise UserError(
            f"schedule {schedule} with {stages_per_rank} stages per rank",
            where="strategy.stages_per_rank",
            fix=f"strategy.stages_per_rank={least}",
        )
    if dp > 1 and data_parallel not in SCHEDULES[schedule]:
        raise UserError(
            f"schedule {schedule} computes wrong gradients with {data_parallel} (pytorch#144530)",
            where="strategy.data_parallel",
            fix=f"strategy.data_parallel={' or '.join(SCHEDULES[schedule])}",
        )
    _check_backward(config, schedule, dp)
    check_split(config.strategy.pp_split, getattr(config.model, "n_layers", None), pp * stages_per_rank)


def _check_backward(config: Config, schedule: str, dp: int) -> None:
    """What a pipeline's way of running the backward does not go with."""
    strategy = config.strategy
    if config.train.compile and schedule in SPLIT_BACKWARD:
        raise UserError(
            f"schedule {schedule} runs the backward in two parts, and a compiled layer has only one",
            where="train.compile",
            fix="train.compile=false, or strategy.schedule=1f1b or interleaved_1f1b",
        )
    if config.train.activation_checkpointing == "ops" and schedule in SPLIT_BACKWARD:
        raise UserError(
            f"schedule {schedule} runs the backward in two parts, and what ops has kept is taken once",
            where="train.activation_checkpointing",
            fix="full or selective, or strategy.schedule=1f1b or interleaved_1f1b",
        )
    if strategy.static_graph and strategy.data_parallel == "ddp" and dp > 1:
        raise UserError(
            "DDP's static graph expects forward and backward in turns, and a pipeline runs several forwards first",
            where="strategy.static_graph",
            fix="strategy.static_graph=false",
        )


def _shard(strategy: StrategyConfig, dp: int, dp_per_node: int) -> int:
    if strategy.data_parallel not in ZERO:
        return 1
    if strategy.shard == "fill":
        return dp
    shard = min(dp, max(1, dp_per_node)) if strategy.shard == "node" else strategy.shard
    if not isinstance(shard, int) or shard < 1 or dp % shard:
        raise UserError(
            f"{dp} data-parallel ranks do not divide into shard groups of {strategy.shard!r}",
            where="strategy.shard",
            fix=f"fill, node, or a divisor of {dp}",
        )
    return shard


def _micro_batches(config: Config, schedule: str, dp: int, pp: int, stages: int) -> tuple[int, int]:
    """Micro-batches per step and rank, and samples per micro-batch."""
    batch = config.batch
    if batch.global_size < dp:
        raise UserError(
            f"a global batch of {batch.global_size} leaves some of {dp} data-parallel ranks without a sample",
            where="batch.global_size",
            fix=f"batch.global_size={dp} or more, or fewer data-parallel ranks",
        )
    local = math.ceil(batch.global_size / dp)
    if isinstance(batch.micro_size, int) and isinstance(batch.micro_batches, int):
        raise UserError(
            "micro_size and micro_batches are both set, and one follows from the other",
            where="batch.micro_size, batch.micro_batches",
            fix="leave one of them auto",
        )
    if isinstance(batch.micro_size, int):
        size = min(batch.micro_size, local)
        count = math.ceil(local / size)
    elif isinstance(batch.micro_batches, int):
        count = batch.micro_batches
        size = math.ceil(local / count)
    elif pp == 1 or schedule == "sequential":
        return 1, local
    else:
        count = _least_padding(local, stages, schedule)
        size = math.ceil(local / count)
    _check_micro_batches(schedule, pp, stages, count)
    return count, size


def _least_padding(local: int, stages: int, schedule: str) -> int:
    """Four micro-batches per stage, or the number between one and four that pads least (the more the better)."""
    step = stages if schedule.startswith("interleaved") else 1
    candidates = range(stages, 4 * stages + 1, step)
    return min(candidates, key=lambda count: (count * math.ceil(local / count), -count))


def _check_micro_batches(schedule: str, pp: int, stages: int, count: int) -> None:
    if pp == 1:
        return
    if schedule == "sequential" and count != 1:
        raise UserError(
            f"schedule sequential takes one micro-batch per step, not {count}",
            where="batch.micro_batches",
            fix="strategy.schedule=gpipe or 1f1b, or leave batch.micro_size and batch.micro_batches auto",
        )
    if schedule != "sequential" and count < stages:
        raise UserError(
            f"{count} micro-batches cannot fill {stages} pipeline stages",
            where="batch.micro_batches",
            fix=f"at least {stages} micro-batches per step: a smaller batch.micro_size or a larger batch.global_size",
        )
    if schedule.startswith("interleaved") and count % pp:
        raise UserError(
            f"schedule {schedule} over {pp} ranks with {count} micro-batches",
            where="batch.micro_batches",
            fix=f"a multiple of {pp}",
        )
