"""Checks which models can have a z-loss, without torch; ``parallel.build`` checks those of a user."""

from __future__ import annotations

from hpc_train.config.extensions import IMAGES, family_of
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout


def check_z_loss(config: Config, layout: Layout) -> None:
    """Checks that the model supports ``train.z_loss``, if that is set.

    Raises:
        UserError: ``train.z_loss`` is set, and the model is not a language model.
    """
    if not config.train.z_loss:
        return
    model, task = config.model, getattr(config.model, "task", "causal_lm")
    kind = f"model kind {model.kind}" if family_of(model).learns_from == IMAGES else f"model.task={task}"
    if family_of(model).learns_from == IMAGES or task != "causal_lm":
        raise UserError(
            f"train.z_loss is {config.train.z_loss:g}, but {kind} predicts no next token, and a z-loss is for the "
            "vocabulary of a language model",
            where="train.z_loss, model",
            fix="train.z_loss=0",
        )
