"""Checks the options that save memory against the model and the layout: chunks of the loss, a budget of
activations, offload, small moments, updates inside the backward."""

from __future__ import annotations

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.errors import UserError, check_all
from hpc_train.layout.activation_offload import check_activation_offload
from hpc_train.layout.in_backward import check_in_backward
from hpc_train.layout.layout import Layout
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.layout.optimizers import own_targets
from hpc_train.layout.recomputation import check_budget
from hpc_train.layout.techniques import kinds_where


def check_savers(config: Config, layout: Layout) -> None:
    """Checks that the model and the layout support the options that save memory.

    Raises:
        UserError: they do not. The message reports all such options.
    """
    check_all(
        lambda: _check_loss_chunks(config, layout),
        lambda: check_budget(config, layout),
        lambda: check_activation_offload(config),
        lambda: _check_offload(config, layout),
        lambda: _check_whole_updates(config),
        lambda: _check_moments(config),
        lambda: check_in_backward(config, layout),
    )


def _check_moments(config: Config) -> None:
    if config.optim.moments != "fp32" and config.optim.name != "adamw":
        raise UserError(
            f"optim.moments is {config.optim.moments}, but {config.optim.name} has no such moments",
            where="optim.moments",
            fix="optim.moments=fp32, or optim=adamw",
        )


def _check_loss_chunks(config: Config, layout: Layout) -> None:
    chunks, length = config.train.loss_chunks, getattr(config.data, "sequence_length", None)
    if isinstance(chunks, str):
        return
    if chunks > 1 and not family_of(config.model).chunks_loss(config.model):
        raise UserError(
            f"train.loss_chunks is {chunks}, but this model of kind {config.model.kind} computes its loss in one piece",
            where="train.loss_chunks",
            fix="train.loss_chunks=1, or a language model, such as model=gpt_tiny",
        )
    fused = loss_form(config, layout).fused  # which cuts all tokens of a micro-batch
    tokens = (length or 0) * layout.micro_size // layout.cp if fused else (length or 0) // (layout.cp * layout.tp)
    most = tokens if length else chunks  # another check refuses a length of 0
    if chunks > most:
        whole = "micro-batch" if fused else "sequence"
        raise UserError(
            f"train.loss_chunks is {chunks}, but a rank has only {most} tokens of a {whole}",
            where="train.loss_chunks",
            fix=f"train.loss_chunks={most} or fewer",
        )


def _check_offload(config: Config, layout: Layout) -> None:
    offload, kind = config.strategy.offload, layout.kind
    if offload == "none":
        return
    if offload == "optimizer":
        if layout.dp_cp > 1 and offload not in kind.offloads:
            raise UserError(
                f"strategy.data_parallel={kind.name} does not support an optimizer state in host memory",
                where="strategy.offload",
                fix="strategy.offload=none",
            )
        return
    others = kinds_where(lambda row: offload in row.offloads)
    fix = f"strategy.offload=optimizer, which every strategy supports, or strategy={others}"
    if layout.dp_cp == 1 or offload not in kind.offloads:
        raise UserError(
            f"strategy.offload=all requires {others} on several ranks, which gather parameters in each step",
            where="strategy.offload",
            fix=fix,
        )
    if layout.pp > 1 or layout.tp > 1:
        raise UserError(
            "strategy.offload=all does not support tensor or pipeline parallelism, which exchange gradients on devices",
            where="strategy.offload",
            fix=fix,
        )


def _check_whole_updates(config: Config) -> None:
    whole = [target for target in own_targets(config.optim) if not target.elementwise]
    if config.strategy.offload == "all" and whole:
        raise UserError(
            f"{whole[0].path} updates whole parameters, which strategy.offload=all cannot gather: their shards are in "
            "host memory",
            where=f"strategy.offload, {whole[0].where}._target_",
            fix=f"strategy.offload=optimizer, or {whole[0].where}.elementwise=true if it computes each element alone",
        )
