"""Decides which layouts a loss supports that compares the samples of a batch, such as a contrastive loss.

Each rank has to hold its whole share of the global batch in one micro-batch, since the loss of a sample depends on all
other samples. Gradient accumulation, pipelines and logical micro-batches compute parts of a batch one after the other.
"""

from __future__ import annotations

from hpc_train.config.schema import Config, CustomModelConfig
from hpc_train.config.source_check import method_parameters
from hpc_train.errors import UserError
from hpc_train.plan.layout import Layout


def check_declared_mixing(config: Config, layout: Layout) -> None:
    """Checks ``layout`` if the source of ``model._target_`` defines a loss with a parameter ``gather``.

    The workers check it again, since a function may return any model.

    Raises:
        UserError: see ``check_mixing``.
    """
    if not isinstance(config.model, CustomModelConfig):
        return
    target = config.model._target_
    if "gather" in method_parameters(target, "loss"):
        check_mixing(layout, f"{target}.loss")


def check_mixing(layout: Layout, loss: str) -> None:
    """Checks that ``layout`` supports a loss that compares the samples of a batch.

    Args:
        loss: the name of the loss, for the message.

    Raises:
        UserError: a rank does not compute all its samples in one micro-batch.
    """
    reason = _reason(layout)
    if reason is not None:
        what, where, fix = reason
        raise UserError(
            f"{loss} compares samples, as its parameter gather declares, so it needs each rank's samples of a step in "
            f"one micro-batch; {what}",
            where=where,
            fix=fix,
        )


def _reason(layout: Layout) -> tuple[str, str, str] | None:
    others = "strategy=single, dp, zero1, zero2, zero3 or hsdp"
    if layout.pp > 1:
        return "a pipeline splits them into several", f"strategy.pp={layout.pp}", others
    if layout.tp > 1:
        return "it is not supported under tensor parallelism", f"strategy.tp={layout.tp}", others
    if layout.cp > 1:
        return "context parallelism splits each of them", f"strategy.cp={layout.cp}", others
    if layout.logical_micro_batches:
        what = "train.reproducible=any_world_size splits them into logical micro-batches"
        return what, "train.reproducible", "train.reproducible=null"
    if layout.micro_batches > 1:
        what = f"this layout splits them into {layout.micro_batches}"
        where = "batch.micro_batches, batch.micro_size"
        return what, where, "batch.micro_batches=1 and batch.micro_size=auto"
    return None
