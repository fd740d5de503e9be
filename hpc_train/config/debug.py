"""``train.debug=true``: what of a config gives way, so that a mistake shows itself soon and where it is."""

from __future__ import annotations

from dataclasses import replace

from hpc_train.config.schema import Config

DEBUG_STEPS = 20  # from where the run stands: learning rate and data are those of the whole run


def for_debugging(config: Config) -> Config:
    """Every step logged; nothing compiled, read in other processes, saved on the way or sent to W&B.

    Our own reduction instead of DDP, with the same gradients: torch 2.13's DDP dies of a SIGSEGV when collectives are
    compared over the ranks.
    """
    if not config.train.debug:
        return config
    kind = config.strategy.data_parallel
    return replace(
        config,
        strategy=replace(config.strategy, data_parallel="reduce" if kind == "ddp" else kind, static_graph=False),
        train=replace(config.train, compile=False),
        batch=replace(config.batch, loader_workers=0),
        checkpoint=replace(config.checkpoint, every="0", asynchronous=False),
        telemetry=replace(config.telemetry, log_every=1, wandb=replace(config.telemetry.wandb, mode="disabled")),
    )
