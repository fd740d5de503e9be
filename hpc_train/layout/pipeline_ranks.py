"""Chooses the number of pipeline ranks: ``strategy.pp`` as a number, ``auto`` or ``fill``. It imports no torch.

On several nodes ``auto`` takes the fewest ranks, at least two, whose stages fit into the memory of a GPU. More stages
enlarge the pipeline bubble; the ranks that are left are replicas. Because ranks of a stage are consecutive, the stages
of one replica are on different nodes as long as there are at least as many nodes as stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpc_train.config.schema import Config, StrategyConfig
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import estimate, needed_bytes
from hpc_train.units import format_bytes


@dataclass(frozen=True)
class Ranks:
    """The ranks of an attempt. A tensor-parallel group has ``tp`` of them, and a context-parallel group ``cp``."""

    nodes: int
    per_node: int
    tp: int
    cp: int = 1

    @property
    def available(self) -> int:
        return self.nodes * self.per_node

    @property
    def columns(self) -> int:
        """Ranks that pipeline and data parallelism divide."""
        return self.available // (self.cp * self.tp)


def pipeline_ranks(
    config: Config, ranks: Ranks, lay_out: Callable[[int], Layout], device_bytes: float | None, notes: list[str]
) -> int:
    """Returns the number of pipeline ranks.

    Args:
        lay_out: returns the layout with a number of pipeline ranks; raises UserError if there is none.
        device_bytes: the memory of the smallest GPU; None if unknown.
        notes: receives the reasons for an automatic choice.

    Raises:
        UserError: ``strategy.pp`` is wrong, or needs more ranks than there are.
    """
    pp, columns = config.strategy.pp, ranks.columns
    if pp == "fill":
        return _fill(config, columns, notes)
    if pp == "auto":
        if ranks.nodes > 1:
            return _fewest_that_fit(config, columns, lay_out, device_bytes, notes)
        return 1 if _indivisible(2, columns, notes) else 2
    if not isinstance(pp, int) or pp < 1:
        raise UserError(f"strategy.pp is {pp!r}", where="strategy.pp", fix="a number from 1, auto, or fill")
    if pp > columns:
        raise UserError(
            f"{pp} pipeline ranks{_times(ranks)} need more than the {ranks.available} available workers",
            where="strategy.pp",
            fix=f"strategy.pp={columns} or fewer, or more workers (cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return pp


def _times(ranks: Ranks) -> str:
    """Returns by how many ranks of the other axes that share a model the pipeline ranks are multiplied."""
    return f" x cp {ranks.cp} x tp {ranks.tp}" if ranks.cp * ranks.tp > 1 else ""


def stages_of_rank(strategy: StrategyConfig) -> int:
    """Returns ``strategy.stages_per_rank``. Raises UserError if it is not a number."""
    if not isinstance(strategy.stages_per_rank, int):
        raise UserError(
            f"strategy.stages_per_rank is {strategy.stages_per_rank!r}",
            where="strategy.stages_per_rank",
            fix="a number from 1",
        )
    return strategy.stages_per_rank


def _indivisible(pp: int, columns: int, notes: list[str]) -> bool:
    if columns % pp == 0:
        return False
    notes.append(f"{pp} pipeline ranks do not divide {columns} ranks: {columns} replicas of 1 stage are used instead")
    return True


def _fewest_that_fit(
    config: Config,
    columns: int,
    lay_out: Callable[[int], Layout],
    device_bytes: float | None,
    notes: list[str],
) -> int:
    """Returns the fewest pipeline ranks from 2 whose stages fit; those with the smallest stages if none do."""
    layers = getattr(config.model, "n_layers", None)
    most = columns if layers is None else layers // stages_of_rank(config.strategy)
    candidates = [pp for pp in range(2, min(columns, most) + 1) if columns % pp == 0]
    if not candidates:
        divisor = next((pp for pp in range(2, columns + 1) if columns % pp == 0), 2)
        if not _indivisible(divisor, columns, notes):
            notes.append(f"{layers} layers are too few for {divisor} pipeline ranks: 1 stage is used instead")
        return 1
    needed: dict[int, float] = {}
    for pp in candidates:
        try:
            memory = estimate(config, lay_out(pp))
        except UserError:  # such as fewer samples than replicas
            continue
        if memory is None or device_bytes is None:
            notes.append(_unknown(pp, "of the model" if memory is None else "of a rank's device"))
            return pp
        needed[pp] = needed_bytes(memory.total)
        if needed[pp] <= device_bytes:
            notes.append(_fit(pp, needed, device_bytes))
            return pp
    if not needed:
        return candidates[0]  # its error explains why there is no layout
    best = min(needed, key=lambda pp: needed[pp])
    notes.append(
        f"the stages of no number of pipeline ranks fit: {best} are used, whose stages need about "
        f"{format_bytes(needed[best])} of the {format_bytes(device_bytes or 0)} of a GPU"
    )
    return best


def _unknown(pp: int, whose: str) -> str:
    number = f"{pp} pipeline ranks are used, the fewest possible"
    return f"{number}, because the memory {whose} is unknown here; strategy.pp=N sets another number"


def _fit(pp: int, needed: dict[int, float], device_bytes: float) -> str:
    """Describes the choice of ``pp``, the last one in ``needed``."""
    small = [f"{fewer} need {format_bytes(size)}" for fewer, size in needed.items() if fewer != pp]
    more = f" ({', '.join(small)})" if small else ""
    return (
        f"{pp} pipeline ranks are the fewest whose stages fit: about "
        f"{format_bytes(needed[pp])} of the {format_bytes(device_bytes)} of a GPU{more}"
    )


def _fill(config: Config, columns: int, notes: list[str]) -> int:
    """Returns the pipeline ranks of ``pp: fill``: all ranks that dp, cp and tp leave, but at most one per layer."""
    strategy = config.strategy
    if not isinstance(strategy.dp, int):
        raise UserError(
            "strategy.dp and strategy.pp cannot both be fill",
            where="strategy.dp, strategy.pp",
            fix="a number for one of them",
        )
    room = max(1, columns // max(1, strategy.dp))
    layers = getattr(config.model, "n_layers", None)
    most = room if layers is None else max(1, layers // stages_of_rank(strategy))
    if most < room:
        notes.append(
            f"{layers} layers suffice for {most} pipeline ranks of {stages_of_rank(strategy)} stages, not for {room}"
        )
    return min(room, most)
