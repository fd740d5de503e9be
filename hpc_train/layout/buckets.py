"""States how gradients are put into buckets and how many of them are sent at once. Imports no torch."""

from __future__ import annotations

from hpc_train.config.schema import StrategyConfig

DEFAULT_CAP_MB = 25.0  # DDP's default size in MiB, with which bucket_cap_mb=auto starts
IN_FLIGHT = 4  # buckets that are sent at once; they keep the network busy, and their copies need memory


def first_cap(strategy: StrategyConfig) -> float:
    """Returns the size of the gradient buckets in the first steps, in MiB."""
    return DEFAULT_CAP_MB if isinstance(strategy.bucket_cap_mb, str) else float(strategy.bucket_cap_mb)


def bucket_bytes(strategy: StrategyConfig) -> float:
    """Returns the size of the gradient buckets in the first steps, in bytes."""
    return first_cap(strategy) * 2**20
