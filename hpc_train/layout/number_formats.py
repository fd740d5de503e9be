"""Checks ``precision.fp8`` and ``precision.weights`` against the model and the layout, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config, PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.layout.float8 import MULTIPLES, OFF, WHERE
from hpc_train.layout.hooks import averages_of_weights
from hpc_train.layout.layout import Layout
from hpc_train.layout.optimizers import own_targets
from hpc_train.layout.peak.sizes import trained_share


def check_skip(precision: PrecisionConfig) -> None:
    """Checks that ``precision.fp8_skip`` holds regular expressions.

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
    """Checks that the rest of the config supports ``precision.fp8``, if that is set.

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
        _check_shards(config, layout.tp)


def _check_shards(config: Config, tp: int) -> None:
    recipe, model = str(config.precision.fp8), config.model
    if config.strategy.async_tp:
        raise UserError(
            "precision.fp8 does not support strategy.async_tp, which joins products with the collectives of their "
            "operands: casts to fp8 are between the two",
            where=f"{WHERE}, strategy.async_tp",
            fix=f"strategy.async_tp=false, or {OFF}",
        )
    if config.precision.fp8_skip:
        return  # the workers know the names of the matrices
    head = getattr(model, "head_dim", None) or getattr(model, "dim", 0) // getattr(model, "n_heads", 1)
    plan = family_of(model).tensor_parallel
    for key in plan.divisible if plan is not None else ():
        width = getattr(model, key) * (head if key.endswith("heads") else 1)
        if width % MULTIPLES[recipe] == 0 and width % (tp * MULTIPLES[recipe]):
            raise refused_shard(recipe, f"a matrix of model.{key}", width, tp)


def refused_shard(recipe: str, what: str, width: int, tp: int) -> UserError:
    """Returns the error for a matrix whose ``width`` the ``tp`` ranks share, and whose shards cannot be in fp8."""
    why = "a block would cross shards" if recipe == "mxfp8" else "GPUs multiply no other sizes in fp8"
    return UserError(
        f"precision.fp8={recipe} needs shards of a multiple of {MULTIPLES[recipe]}, but {what} has a width of {width}, "
        f"which {tp} ranks share: {why}",
        where=f"{WHERE}, strategy.tp",
        fix=f"a smaller strategy.tp, a width of a multiple of {tp * MULTIPLES[recipe]}, precision.fp8_skip, or {OFF}",
    )


def check_weights(config: Config, layout: Layout) -> None:
    """Checks that the rest of the config supports ``precision.weights=bf16``, if that is set.

    Raises:
        UserError: something in the config needs weights or gradients in fp32.
    """
    if config.precision.weights == "fp32":
        return
    for where, why, instead in _against_bf16_weights(config, layout):
        raise UserError(
            f"precision.weights=bf16 does not support {where}: {why}",
            where=f"precision.weights, {where.partition('=')[0]}",
            fix=f"precision.weights=fp32{f', or {instead}' if instead else ''}",
        )


def _against_bf16_weights(config: Config, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """Yields a setting, why it needs weights in fp32, and what else can be set."""
    precision, strategy = config.precision, config.strategy
    if precision.name != "bf16":
        yield f"precision.name={precision.name}", "products are not computed in bf16", "precision=bf16"
    if layout.tp > 1:
        why = "the ranks would add up gradients of norms in bf16"
        yield f"strategy.tp={layout.tp}", why, "strategy.tp=1"
    if layout.logical_micro_batches:
        why = "it adds up the gradients of many small micro-batches, for which bf16 is too coarse"
        yield f"train.reproducible={config.train.reproducible}", why, "train.reproducible=null"
    if strategy.offload == "all":
        why = "masters would be a second copy of the weights in host memory"
        yield "strategy.offload=all", why, "strategy.offload=optimizer, which keeps the masters there"
    if strategy.compression != "none" and layout.dp_cp > 1 and not layout.shards_state:
        instead = "strategy.compression=none"
        yield f"strategy.compression={strategy.compression}", "gradients are in bf16 already", instead
    if averages_of_weights(config):
        yield "hooks.ema", "weights in bf16 change too coarsely to be averaged", "no hook that averages weights"
    for target in own_targets(config.optim):
        if not target.elementwise:
            yield f"{target.where}._target_={target.path}", "it updates whole parameters, not shards of masters", ""
    if trained_share(config.model) < 1:
        yield "model.lora", "the frozen weights have no masters", ""
