"""Feeds a rank with the micro-batches of each step, which are on its device one step before their use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from hpc_train.config.schema import BatchConfig
from hpc_train.data.dataset import Batch, Dataset, SampleError
from hpc_train.data.loader import LoadRequest, MicroBatchReader, Stacked
from hpc_train.data.sampler import Order, Skipped, TokenBalance
from hpc_train.errors import UserError
from hpc_train.plan.layout import Layout

NOTHING = Skipped()
MOST_LOADER_WORKERS = 4  # of "auto"


@dataclass(frozen=True)
class LocalBatch:
    """One rank's share of a step.

    Attributes:
        micro_batches: on the device; the copy of page-locked memory may still be under way on the current stream.
        local_count: targets that count among them, known without a look at the device.
    """

    micro_batches: tuple[Batch, ...]
    local_count: int


def loader_workers(batch: BatchConfig, dataset: Dataset, local_ranks: int) -> int:
    """Loader processes of this rank.

    ``auto``: none where reading a sample costs next to nothing, else this rank's share of the cores that it may run
    on, four at most.
    """
    chosen = batch.loader_workers
    if chosen == "auto":
        if dataset.loads_cheaply:
            return 0
        return min(MOST_LOADER_WORKERS, len(os.sched_getaffinity(0)) // local_ranks)
    if not isinstance(chosen, int) or chosen < 0:
        raise UserError(f"{chosen!r} loader processes", where="batch.loader_workers", fix="a number >= 0, or auto")
    return chosen


def example_micro_batch(dataset: Dataset, layout: Layout, device: torch.device) -> Batch:
    """A micro-batch as a step has them, of the first samples: for measurements before the first step."""
    slots = tuple(index % len(dataset) for index in range(layout.micro_size))
    balance = _balance(dataset, layout)
    request = LoadRequest(slots, 0, 0, None if balance is None else balance.widest)
    inputs, targets, context, _ = next(MicroBatchReader(dataset, [request], workers=0, ahead=1, pin=False))
    return Batch(inputs, targets, context).to(device)


class TrainFeed:
    """The training data of one data-parallel rank from ``start_step`` on, without end: the trainer counts the steps.

    Args:
        batch: the global batch, whether the last one of an epoch is dropped, and the loader processes.
        seed: of the order of the samples.
        local_ranks: ranks that share this process's cores (1 where each rank is bound to its own).
        skipped: what of the sequence of batches is passed over.

    Raises:
        UserError: the dataset is too small for one global batch, or the data itself is wrong (also from ``next``).
        SampleError: from ``next``: a sample could not be read; the message names its index and file.
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
        self._ahead: LocalBatch | Exception | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        return self._order.epoch_of(self._skipped.position(step))

    def __iter__(self) -> Iterator[LocalBatch]:
        return self

    def __next__(self) -> LocalBatch:
        """The next step's batch. The copy of the one after it is on its way to the device when this returns."""
        current = self._ahead if self._ahead is not None else self._load()
        if isinstance(current, Exception):
            raise current
        self._ahead = self._load()
        return current

    def close(self) -> None:
        """Ends the loader processes; idempotent."""
        self._steps.close()

    def _load(self) -> LocalBatch | Exception:
        """An error of the step ahead waits for its step: the one before it is whole."""
        try:
            return next(self._steps)
        except (UserError, SampleError) as error:
            return error


class EvalFeed:
    """The validation data of one data-parallel rank: all ranks together see each sample once, then padding.

    Every iteration starts anew; every rank gets the same number of equally shaped batches. The order is the dataset's.
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
                yield ahead
                ahead = following
            yield ahead
        finally:
            steps.close()


class _Steps:
    """Gathers micro-batches into steps and sends them to the device."""

    def __init__(
        self, dataset: Dataset, requests: Iterator[LoadRequest], micro_batches: int, workers: int, device: torch.device
    ) -> None:
        self._micro_batches, self._device = micro_batches, device
        pin = device.type == "cuda"
        self._reader = MicroBatchReader(dataset, requests, workers, ahead=2 * micro_batches, pin=pin)
        self._even = dataset.lengths is None
        self._shapes: tuple[torch.Size, ...] | None = None

    def __iter__(self) -> Iterator[LocalBatch]:
        return self

    def __next__(self) -> LocalBatch:
        stacked = [next(self._reader) for _ in range(self._micro_batches)]
        for one in stacked if self._even else ():
            self._check_shapes(one)
        batches = tuple(Batch(inputs, targets, context).to(self._device) for inputs, targets, context, _ in stacked)
        return LocalBatch(batches, sum(number for *_, number in stacked))

    def close(self) -> None:
        self._reader.close()

    def _check_shapes(self, stacked: Stacked) -> None:
        inputs, targets, context, _ = stacked
        shapes = tuple(value.shape for value in (inputs, targets, *context.values()))
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            raise SampleError(f"micro-batches of the shapes {self._shapes} and {shapes}: all samples need the same")


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
