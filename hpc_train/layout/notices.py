"""Notices about settings that are valid, but waste a run. They reach the dry run and the log as notes of the layout."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.config.schema import Config, CustomModelConfig, OptimConfig, TextDataConfig


def notices(config: Config) -> Iterator[str]:
    """Yields the notices about the settings of a run."""
    if config.train.steps is not None:
        yield from long_warmup(config.optim, config.train.steps)
    data = config.data
    if isinstance(config.model, CustomModelConfig) and isinstance(data, TextDataConfig) and data.path is None:
        yield "the data is the source of Python's standard library as bytes, because neither data nor data.path is set"


def long_warmup(optim: OptimConfig, steps: int) -> Iterator[str]:
    """Yields a notice if a run of ``steps`` steps ends during the warm-up of the learning rate."""
    if 0 < steps < optim.warmup_steps:
        yield (
            f"the learning rate never reaches optim.lr: optim.warmup_steps={optim.warmup_steps}, but the run has "
            f"{steps} steps"
        )
