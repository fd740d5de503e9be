"""Feeds a rank with the micro-batches of each step and copies them to its device one step before their use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from hpc_train.config.schema import BatchConfig
from hpc_train.data.dataset import Batch, Dataset, SampleError
from hpc_train.data.device_copy import DeviceCopy, SentBatches
from hpc_train.data.loader import LoadRequest, MicroBatchReader, Stacked
from hpc_train.data.sampler import Order, Skipped, TokenBalance
from hpc_train.errors import UserError
from hpc_train.plan.layout import Layout

NOTHING = Skipped()
MOST_LOADER_WORKERS = 4  # upper limit of batch.loader_workers=auto


@dataclass(frozen=True)
class LocalBatch:
    """Holds one rank's share of a step.

    Attributes:
        micro_batches: the micro-batches on the device, for use in the current stream.
        local_count: the number of targets that count in them, which the host knows without a synchronization.
    """

    micro_batches: tuple[Batch, ...]
    local_count: int


def loader_workers(batch: BatchConfig, dataset: Dataset, local_ranks: int) -> int:
    """Returns the number of loader processes of this rank.

    ``auto`` uses none for a dataset that loads cheaply, else this rank's share of its cores, at most
    ``MOST_LOADER_WORKERS``.
    """
    chosen = batch.loader_workers
    if chosen == "auto":
        if dataset.loads_cheaply:
            return 0
        return min(MOST_LOADER_WORKERS, len(os.sched_getaffinity(0)) // local_ranks)
    if not isinstance(chosen, int) or chosen < 0:
        raise UserError(
            f"batch.loader_workers is {chosen!r}, but must be auto or at least 0",
            where="batch.loader_workers",
            fix="batch.loader_workers=auto",
        )
    return chosen


def example_micro_batch(dataset: Dataset, layout: Layout, device: torch.device) -> Batch:
    """Returns a micro-batch of the first samples, for measurements before the first step."""
    slots = tuple(index % len(dataset) for index in range(layout.micro_size))
    balance = _balance(dataset, layout)
    request = LoadRequest(slots, 0, 0, None if balance is None else balance.widest)
    inputs, targets, context, _ = next(MicroBatchReader(dataset, [request], workers=0, ahead=1, pin=False))
    (batch,) = DeviceCopy(device, dataset.scale).send([Batch(inputs, targets, context)]).receive()
    return batch


class TrainFeed:
    """Iterates over the training data of one data-parallel rank from ``start_step`` on, without an end.

    Args:
        seed: the seed of the order of the samples.
        local_ranks: the number of ranks that share this process's cores; 1 if each rank is bound to its own.
        skipped: the windows of batches to skip.

    Raises:
        UserError: the dataset is too small for one global batch; ``next`` also raises it for invalid data.
        SampleError: raised by ``next`` if a sample cannot be read; the message names its index and file.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: BatchConfig,
        layout: Layout,
        dp_rank: int,
        seed: int,
        device: torch.device,
        start_step: int,
        local_ranks: int = 1,
        skipped: Skipped = NOTHING,
    ) -> None:
        self._order = Order(len(dataset), batch.global_size, batch.drop_last, seed)
        self._skipped = skipped
        steps = map(skipped.position, count(start_step))
        requests = _requests(self._order, layout, dp_rank, steps, _balance(dataset, layout))
        workers = loader_workers(batch, dataset, local_ranks)
        self._steps = _Steps(dataset, requests, layout.micro_batches, workers, device)
        self._ahead: _SentStep | Exception | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        return self._order.epoch_of(self._skipped.position(step))

    def __iter__(self) -> Iterator[LocalBatch]:
        return self

    def __next__(self) -> LocalBatch:
        """Returns the next step's batch, and starts to copy the one after it to the device."""
        current = self._ahead if self._ahead is not None else self._load()
        if isinstance(current, Exception):
            raise current
        self._ahead = self._load()
        return current.receive()

    def close(self) -> None:
        """Stops the loader processes; further calls do nothing."""
        self._steps.close()

    def _load(self) -> _SentStep | Exception:
        """Returns the next batch, or its error, which is raised one step later because the current batch is valid."""
        try:
            return next(self._steps)
        except (UserError, SampleError) as error:
            return error


class EvalFeed:
    """Iterates over the validation data of one data-parallel rank, in the order of the dataset.

    The ranks together read each sample once. Every rank gets the same number of equally shaped batches, with padding
    where samples are missing.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: BatchConfig,
        layout: Layout,
        dp_rank: int,
        device: torch.device,
        local_ranks: int = 1,
    ) -> None:
        self._dataset, self._layout, self._dp_rank, self._device = dataset, layout, dp_rank, device
        self._order = Order(len(dataset), batch.global_size, drop_last=False, seed=None)
        self._workers = loader_workers(batch, dataset, local_ranks)

    def __len__(self) -> int:
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[LocalBatch]:
        balance = _balance(self._dataset, self._layout)
        requests = _requests(self._order, self._layout, self._dp_rank, iter(range(len(self))), balance)
        steps = _Steps(self._dataset, requests, self._layout.micro_batches, self._workers, self._device)
        try:
            ahead = next(steps)
            for following in steps:
                yield ahead.receive()
                ahead = following
            yield ahead.receive()
        finally:
            steps.close()


def _pins(device: torch.device) -> bool:
    """Returns whether batches are read into page-locked memory, from which a copy to ``device`` is asynchronous."""
    return device.type == "cuda"


@dataclass(frozen=True)
class _SentStep:
    """Holds one rank's share of a step, which may still be on its way to the device."""

    sent: SentBatches
    local_count: int

    def receive(self) -> LocalBatch:
        return LocalBatch(self.sent.receive(), self.local_count)


class _Steps:
    """Gathers micro-batches into steps and sends them to the device."""

    def __init__(
        self, dataset: Dataset, requests: Iterator[LoadRequest], micro_batches: int, workers: int, device: torch.device
    ) -> None:
        self._micro_batches = micro_batches
        self._copy = DeviceCopy(device, dataset.scale)
        self._reader = MicroBatchReader(dataset, requests, workers, ahead=2 * micro_batches, pin=_pins(device))
        self._even = dataset.lengths is None
        self._shapes: tuple[torch.Size, ...] | None = None

    def __iter__(self) -> Iterator[_SentStep]:
        return self

    def __next__(self) -> _SentStep:
        stacked = [next(self._reader) for _ in range(self._micro_batches)]
        for one in stacked if self._even else ():
            self._check_shapes(one)
        sent = self._copy.send(Batch(inputs, targets, context) for inputs, targets, context, _ in stacked)
        return _SentStep(sent, sum(number for *_, number in stacked))

    def close(self) -> None:
        self._reader.close()

    def _check_shapes(self, stacked: Stacked) -> None:
        inputs, targets, context, _ = stacked
        shapes = tuple(value.shape for value in (inputs, targets, *context.values()))
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            raise SampleError(
                f"micro-batches have the shapes {self._shapes} and {shapes}, but all samples need equal shapes"
            )


def _requests(
    order: Order, layout: Layout, dp_rank: int, steps: Iterator[int], balance: TokenBalance | None
) -> Iterator[LoadRequest]:
    for step in steps:
        template, epoch = order.template(step), order.epoch_of(step)
        if balance is None:
            for slots in order.rank_batch(step, layout, dp_rank):
                yield LoadRequest(tuple(slots.tolist()), template, epoch)
        else:
            for row in balance.rank_batch(order, step, dp_rank):
                yield LoadRequest(tuple(row.slots.tolist()), template, epoch, row.width)


def _balance(dataset: Dataset, layout: Layout) -> TokenBalance | None:
    return None if dataset.lengths is None else TokenBalance(np.asarray(dataset.lengths), layout)
