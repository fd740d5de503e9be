"""Metrics of evaluations: sums over samples that are added up over all ranks and divided once."""

from hpc_train.train.metrics.metric import Metric

__all__ = ["Metric"]
