"""Plain gradient descent on the batches of a feed, for comparisons between layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_train.data.dataset import StepBatch
from hpc_train.data.feed import LocalBatch, TrainFeed
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.train.data_progress import has_ended
from hpc_train.train.step import Control
from tests.parallel.oracle import whole

Weights = dict[str, NDArray[np.float64]]


def descent(
    engine: Engine, feed: TrainFeed, mesh: Mesh, steps: Iterable[int], rate: float
) -> Iterator[tuple[LocalBatch, float]]:
    """Yields this rank's batch and the loss of each of ``steps``, until the data end. Collective."""
    control = Control(mesh)
    for step in steps:
        batch = next(feed)
        if has_ended(feed, batch, step, mesh):
            return
        control.post(False, batch.local_count)
        result = engine.train_step(step, StepBatch(batch.micro_batches, control.read().target_count))
        loss = engine.reduce(result).loss
        with torch.no_grad():
            for value in engine.named_parameters().values():
                assert value.grad is not None
                value.add_(value.grad, alpha=-rate)
        yield batch, loss


def weights_of(engine: Engine) -> Weights:
    """Returns all parameters, unsharded. Collective."""
    return {name: whole(value.detach()).numpy() for name, value in engine.named_parameters().items()}


def tensors_of(weights: Weights) -> dict[str, Any]:
    return {name: torch.from_numpy(value) for name, value in weights.items()}
