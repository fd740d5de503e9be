"""Decides which layouts support a load-balancing loss of a mixture of experts.

It is a product of means over a batch, so one rank has to hold all of it, unless ``model.split_dependent_loss`` accepts
another loss.
"""

from __future__ import annotations

from hpc_train.config import hf_config
from hpc_train.config.schema import Config, HFModelConfig
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout


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
    if hf_config.balances_experts(values, model.task):
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
        f"the config of the model has output_router_logits=true, which adds a load-balancing loss; it is no sum over "
        f"samples, and {several} compute the loss of a batch in parts, so the result would depend on their number",
        where="model.name_or_path, model.config",
        fix="model.split_dependent_loss=true, which accepts this; +strategy=single batch.micro_batches=1 "
        "batch.micro_size=auto; or +model.config.output_router_logits=false, which trains without that loss",
    )
