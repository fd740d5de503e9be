"""Evaluates the model on one or several sets. The results are exact means over all samples and do not depend on how the
samples are divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from hpc_train.config.evaluation import MAIN, eval_set_configs, metric_name
from hpc_train.config.schema import Config, TrainConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import StepBatch
from hpc_train.data.feed import EvalFeed, LocalBatch
from hpc_train.parallel.engine import Engine, StepNumbers, StepResult, over_replicas
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.requests import StopFlag
from hpc_train.train.metrics import MetricSums
from hpc_train.train.step import Control

TRAINED_PER_EVALUATED = 2  # with train.eval_samples=auto; a forward pass takes about a third of the time of a step


@dataclass(frozen=True)
class Evaluation:
    """Holds the data and the metrics of an evaluation.

    Attributes:
        feeds: the data of each set by its name; ``MAIN`` is the validation split of ``data``.
        mesh: the ranks that evaluate together.
        without_targets: the sets without any target that counts, in the last ``run``.
    """

    feeds: Mapping[str, EvalFeed]
    metrics: MetricSums
    mesh: Mesh
    without_targets: list[str] = field(default_factory=list, init=False)

    def go_on(self, mesh: Mesh) -> Evaluation:
        """Returns the evaluation by the replicas that are left, which ``mesh`` has."""
        feeds = {name: feed.for_rank(mesh.layout, mesh.dp_rank) for name, feed in self.feeds.items()}
        return replace(self, feeds=feeds, metrics=self.metrics.go_on(mesh), mesh=mesh)

    def limited(self, train: TrainConfig, trained: int) -> Evaluation:
        """Returns the evaluation of a run that trains on ``trained`` samples, limited by ``train.eval_samples``."""
        if train.eval_samples == "all":
            return self
        if train.eval_samples == "auto":
            most = max(1, trained // TRAINED_PER_EVALUATED)
        else:
            most = int(train.eval_samples)
        return replace(self, feeds={name: feed.limited(most) for name, feed in self.feeds.items()})

    def extent(self) -> str | None:
        """Returns text such as ``320 of 1,248 samples`` for the sets that are not read completely; None if all are."""
        parts = [
            f"{feed.samples:,} of {len(feed.dataset):,} samples" + (f" of eval_sets.{name}" if name else "")
            for name, feed in self.feeds.items()
            if feed.samples < len(feed.dataset)
        ]
        return ", ".join(parts) or None

    def run(
        self, engine: Engine, control: Control | None = None, stop: StopFlag | None = None
    ) -> dict[str, float | None] | None:
        """Returns the loss, the accuracy (None if the model does not count correct predictions) and the metrics of each
        set, by their keys in a line of metrics. Returns None if a stop request interrupted the evaluation. Collective;
        see ``evaluate``."""
        values: dict[str, float | None] = {}
        self.without_targets.clear()
        for name, feed in self.feeds.items():
            with self.metrics.watching(engine.parts):
                numbers = evaluate(engine, feed, control, stop, self.mesh)
            if numbers is None:
                return None
            if numbers.target_count == 0:
                self.without_targets.append(name)
            of_set = {"loss": numbers.loss, "accuracy": numbers.accuracy, **self.metrics.read()}
            values |= {metric_name(name, metric): value for metric, value in of_set.items()}
        return values


def build_evaluation(config: Config, mesh: Mesh, local_ranks: int) -> Evaluation:
    """Returns the evaluation of ``config``: the validation split of ``data`` and ``eval_sets``, with ``metrics``.

    Args:
        local_ranks: see ``loader_workers``.

    Raises:
        UserError: a data set or a metric cannot be built.
    """
    sets = {MAIN: config.data} | eval_set_configs(config.data, config.eval_sets)
    feeds = {}
    for name, data in sets.items():
        dataset = build_dataset(data, "validation", config.train.seed, config.precision.name)
        feeds[name] = EvalFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, mesh.device, local_ranks)
    return Evaluation(feeds, MetricSums(config.metrics, mesh), mesh)


def evaluate(
    engine: Engine,
    feed: Iterable[LocalBatch],
    control: Control | None = None,
    stop: StopFlag | None = None,
    mesh: Mesh | None = None,
) -> StepNumbers | None:
    """Computes the exact mean loss (and accuracy) over all targets of ``feed`` on all ranks. Collective.

    The sums over batches and ranks are in fp64 and are divided once, so padding and short batches do not distort the
    mean.

    Args:
        control: lets the ranks agree on a stop request after each batch; None ignores stop requests.
        stop: the stop flag of this rank.
        mesh: all ranks, if there are several replicas.

    Returns:
        The means, or None if a stop request interrupted the evaluation.
    """
    total: StepResult | None = None
    for batch in feed:
        if control is not None:
            control.post(stop is not None and stop.requested, 0)
        result = engine.eval_step(StepBatch(batch.micro_batches, max(1, batch.local_count)))
        loss_sum = result.loss_sum.to(torch.float64)
        target_count = result.target_count.to(torch.float64)
        correct = result.correct
        if total is not None:
            loss_sum = total.loss_sum + loss_sum
            target_count = total.target_count + target_count
            correct = total.correct + correct if total.correct is not None and correct is not None else None
        total = StepResult(loss_sum, target_count, correct)
        if control is not None and control.read().stop:
            return None
    if total is None:
        raise ValueError("the evaluation set has no batches")
    if mesh is not None:
        total = over_replicas(total, mesh)
    return engine.reduce(total)
