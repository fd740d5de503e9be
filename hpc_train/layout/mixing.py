"""Decides which layouts a loss supports that is not a sum over the samples of a batch.

A contrastive loss compares samples. Each rank has to hold its whole share of the global batch in one micro-batch, since
the loss of a sample depends on all other samples. Gradient accumulation, pipelines and logical micro-batches compute
parts of a batch one after the other. A load-balancing loss of a mixture of experts is a product of means over a batch,
so one rank has to hold all of it, unless ``model.split_dependent_loss`` accepts another loss.
"""

from __future__ import annotations

from hpc_train.config import hf_config, hf_loss
from hpc_train.config.schema import Config, CustomModelConfig, HFModelConfig
from hpc_train.config.source_check import method_parameters
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout


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


def check_declared_balancing(config: Config, layout: Layout) -> None:
    """Checks ``layout`` if the config.json of a Hugging Face model asks for a load-balancing loss.

    The workers check it again, since config.json may lack a coefficient that has a default.

    Raises:
        UserError: see ``check_balancing``.
    """
    model = config.model
    if not isinstance(model, HFModelConfig):
        return
    accepted = model.split_dependent_loss
    values = hf_config.read(model.name_or_path, model.revision, model.config) or {}
    if hf_loss.balances_experts(values, model.task):
        check_balancing(layout, accepted)


def check_balancing(layout: Layout, accepted: bool) -> str | None:
    """Checks that ``layout`` supports a load-balancing loss, or that its dependence on the split is ``accepted``.

    Returns:
        A warning if the loss depends on the split.

    Raises:
        UserError: several ranks or micro-batches compute the loss, and this is not accepted.
    """
    if layout.dp_cp == 1 and layout.micro_batches == 1 and not layout.logical_micro_batches:
        return None
    several = f"{layout.dp_cp} ranks" if layout.dp_cp > 1 else f"{layout.micro_batches} micro-batches"
    if accepted:
        return (
            f"the load-balancing loss (output_router_logits) is computed for the parts of {several} separately, so the "
            "results depend on their number (model.split_dependent_loss=true)"
        )
    raise UserError(
        f"the config of the model has output_router_logits=true, which adds a load-balancing loss; it is not a sum "
        f"over samples, and {several} compute the loss of a batch in parts, so the result would depend on their number",
        where="model.name_or_path, model.config",
        fix="model.split_dependent_loss=true, which accepts this; +strategy=single batch.micro_batches=1 "
        "batch.micro_size=auto; or +model.config.output_router_logits=false, which trains without that loss",
    )


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
