"""Checks ``precision.fp8`` and ``precision.weights`` against the model and the layout, without torch."""

from __future__ import annotations

import re

from hpc_train.config.schema import Config, PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.plan.layout import Layout
from hpc_train.plan.techniques import schedules_where

WHERE = "precision.fp8"
OFF = "precision.fp8=null"
MULTIPLES = {"tensorwise": 16, "rowwise": 16, "mxfp8": 32}  # of which both sizes of a matrix must be one
NOT_PREDICTED = "times are those of bf16: machine files have no rate of fp8, so its gain is not predicted"


def check_skip(precision: PrecisionConfig) -> None:
    """
    Raises:
        UserError: ``precision.fp8_skip`` has something that is not a regular expression.
    """
    for pattern in precision.fp8_skip:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"precision.fp8_skip has {pattern!r}, which is not a regular expression: {error}",
                where="precision.fp8_skip",
                fix="precision.fp8_skip=[attention] leaves all matrices in bf16 whose names contain attention",
            ) from None


def check_float8(config: Config, layout: Layout) -> None:
    """
    Raises:
        UserError: the precision or the layout does not support products in fp8.
    """
    if config.precision.fp8 is None:
        return
    if config.precision.name != "bf16":
        raise UserError(
            f"precision.fp8 is {config.precision.fp8}, which replaces products in bf16, but precision.name is "
            f"{config.precision.name}",
            where=f"{WHERE}, precision.name",
            fix=f"precision=bf16, or {OFF}",
        )
    if layout.tp > 1:
        raise UserError(
            "precision.fp8 does not support tensor parallelism: each rank would scale its shard of a matrix alone, and "
            "the results would depend on the number of ranks",
            where=f"{WHERE}, strategy.tp",
            fix=f"strategy.tp=1, or {OFF}",
        )
    if layout.pp > 1 and layout.pipeline.splits_backward:
        raise UserError(
            f"the schedule {layout.pipeline.name} computes the gradients of inputs and of weights at different times, "
            "but torchao's fp8 products compute both together, so each would be computed twice",
            where=f"{WHERE}, strategy.schedule",
            fix=f"strategy.schedule={schedules_where(lambda row: not row.splits_backward)}, or {OFF}",
        )
