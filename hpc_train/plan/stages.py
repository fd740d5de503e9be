"""How many layers each pipeline stage has where no profile says it. No torch."""

from __future__ import annotations

from typing import Any

from hpc_train.errors import UserError


def layer_counts(n_layers: int, stages: int, split: Any = "even") -> list[int]:
    """The number of layers of each stage.

    ``even`` gives every stage ``n_layers // stages``. What remains goes to the middle stages, then to the first and
    only then to the last: the ends also carry the stem and the head, and the head (a product with the whole vocabulary)
    weighs more than the stem (a lookup).

    Args:
        split: ``strategy.pp_split``. Of ``flops`` and ``measured`` nobody knows before the profile: as ``even``.
    """
    if not isinstance(split, str):
        return [int(count) for count in split]
    counts = [n_layers // stages] * stages
    middle = sorted(range(1, stages - 1), key=lambda stage: abs(2 * stage - (stages - 1)))
    for stage in [*middle, 0, stages - 1][: n_layers % stages]:
        counts[stage] += 1
    return counts


def check_split(split: Any, layers: int | None, stages: int) -> None:
    """Checks that ``strategy.pp_split`` can cut a model of ``layers`` layers (None: not known) into ``stages`` stages.

    A stage may hold no layer where it holds the stem or the head: the first and the last may.

    Raises:
        UserError: it cannot.
    """
    if isinstance(split, str):
        most = None if layers is None else layers if split == "even" else layers + 2
        if most is not None and most < stages:
            raise UserError(
                f"{layers} layers cannot be cut into {stages} stages",
                where="strategy.pp",
                fix=f"at most {most} stages (pp x stages_per_rank), or a deeper model",
            )
        return
    counts = [*split]
    named = len(counts) == stages and min(counts) >= 0 and all(counts[1:-1])
    if not named or (layers is not None and sum(counts) != layers):
        raise UserError(
            f"pp_split {counts} does not name {stages} stages of {layers} layers in all",
            where="strategy.pp_split",
            fix="even, flops, measured, or one number of layers per stage (0 at most in the first and the last)",
        )
