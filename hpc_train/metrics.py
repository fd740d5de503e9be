"""Exports the public name for metrics."""

from hpc_train.train.metrics import Metric

__all__ = ["Metric"]
