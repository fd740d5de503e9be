"""Feeds a rank with the micro-batches of each step and copies them to its device one step before their use."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch

from hpc_train.config.schema import BatchConfig
from hpc_train.data.dali import DaliDecoder, DecodedBatches, EncodedSamples, decoded_by_dali
from hpc_train.data.dataset import Batch, Dataset, SampleError, leaves
from hpc_train.data.device_copy import DeviceCopy, SentBatches
from hpc_train.data.loader import LoadRequest, MicroBatchReader, Request, Stacked
from hpc_train.data.mixture import MixedOrder, MixtureDataset, SourceSeen
from hpc_train.data.sampler import Order, Skipped, SpacedOrder, StreamOrder, TokenBalance, processes_for
from hpc_train.data.stream import States, StreamDataset, StreamReader
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout

NOTHING = Skipped()
MOST_LOADER_WORKERS = 4  # upper limit of batch.loader_workers=auto
STATES_RETAINED = 8  # steps of a stream; the trainer reads two batches ahead of the step that it saves


@dataclass(frozen=True)
class LocalBatch:
    """Holds one rank's share of a step.

    Attributes:
        micro_batches: the micro-batches on the device, for use in the current stream.
        local_count: the number of targets that count in them, which the host knows without a synchronization.
        ended: whether a stream had no more items for this rank.
        items: the number of items of a stream in them; 0 for other data.
        numbers: see ``StepBatch``.
    """

    micro_batches: tuple[Batch, ...]
    local_count: int
    ended: bool = False
    items: int = 0
    numbers: tuple[int, ...] = ()


def loader_workers(batch: BatchConfig, dataset: Dataset, local_ranks: int) -> int:
    """Returns the number of loader processes of this rank, of ``local_ranks`` that share this process's cores.

    ``auto`` uses none for a dataset that loads cheaply or has opened a file that they would share, and otherwise this
    rank's share of the cores, at most ``MOST_LOADER_WORKERS``. Raises UserError if loader processes would share an open
    file.
    """
    chosen = batch.loader_workers
    if chosen == "auto":
        if dataset.loads_cheaply or dataset.shared_file:
            return 0
        return min(MOST_LOADER_WORKERS, len(os.sched_getaffinity(0)) // local_ranks)
    assert isinstance(chosen, int)
    if chosen and dataset.shared_file:
        raise UserError(
            f"the constructor of the dataset opens {dataset.shared_file}, and {chosen} loader processes would share "
            "the position in it, so they would read each other's items",
            where="batch.loader_workers, data._target_",
            fix="open the file at the first read in each process (docs/howto/data.md), or batch.loader_workers=0",
        )
    return chosen


def example_micro_batch(dataset: Dataset, layout: Layout, device: torch.device, first: int = 0) -> Batch:
    """Returns a micro-batch of the samples from ``first`` on, for measurements before the first step."""
    slots = tuple((first + index) % len(dataset) for index in range(layout.micro_size))
    balance = _balance(dataset, layout)
    request = LoadRequest(slots, 0, 0, None if balance is None else balance.widest)
    stacked = next(MicroBatchReader(dataset, [request], workers=0, ahead=1, pin=False))
    copy = DeviceCopy(device, dataset.scale, dataset.floats)
    (batch,) = copy.send([Batch(*stacked[:3], samples=stacked.samples)]).receive()
    return batch


class TrainFeed:
    """Iterates over the training data of one data-parallel rank from ``start_step`` on, without an end.

    Args:
        seed: the seed of the order of the samples.
        local_ranks: see ``loader_workers``.
        skipped: the windows of batches to skip.
        states: where the shards of a stream continue; see ``state``.
        counts: the micro-batches of each replica under ``batch.balance``; see ``Layout.micro_batches_of``.

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
        states: States | None = None,
        counts: Sequence[int] = (),
    ) -> None:
        self._dataset = dataset
        self._skipped = skipped
        steps = map(skipped.position, count(start_step))
        workers = loader_workers(batch, dataset, local_ranks)
        self._order: Order | None = None
        if isinstance(dataset, StreamDataset):
            workers = processes_for(workers, layout)
            order = StreamOrder(batch.global_size, layout, dp_rank, max(1, workers))
            read = StreamReader(dataset, states or {}, order.lanes)
            self._steps = _Steps(dataset, order.requests(steps), layout, workers, device, read)
        else:
            self._order = _order(dataset, batch, seed)
            held = layout.micro_batches_of(dp_rank, counts)
            requests = _requests(self._order, layout, held, steps, _balance(dataset, layout))
            numbers = tuple(rank * layout.micro_batches + number for rank, number in held) if counts else ()
            self._steps = _Steps(dataset, requests, layout, workers, device, numbers=numbers)
        self._ahead: _SentStep | Exception | None = None
        self._loaded = start_step
        self._states: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=STATES_RETAINED)

    @property
    def steps_per_epoch(self) -> int | None:
        """Returns the steps of an epoch; None for a stream, whose length is unknown."""
        if self._order is None:
            return None
        return self._order.steps_per_epoch

    @property
    def samples_per_epoch(self) -> int | None:
        if self._order is None:
            return None
        return self._order.samples_per_epoch

    @property
    def may_end(self) -> bool:
        """Returns whether batches without samples may follow, at the end of a stream."""
        return isinstance(self._dataset, StreamDataset) and not self._dataset.shards.config.repeat

    def epoch_of(self, step: int) -> int:
        if self._order is None:
            return 0
        return self._order.epoch_of(self._skipped.position(step))

    def seen(self, steps: int) -> dict[str, SourceSeen]:
        """Returns by name how much of each source of a mixture the first ``steps`` steps use; empty for other data."""
        if not isinstance(self._dataset, MixtureDataset) or not isinstance(self._order, MixedOrder):
            return {}
        return self._dataset.seen(self._order, steps, self._skipped)

    @property
    def identity(self) -> dict[str, Any]:
        return self._dataset.identity

    def state(self, step: int) -> dict[str, Any] | None:
        """Returns where the shards that this rank reads continue after ``step`` steps of a stream; None for other data,
        which needs no state. Only the states of the newest steps are available."""
        if self._order is not None:
            return None
        texts = next((texts for after, texts in self._states if after == step), ())
        return {shard: state for text in texts for shard, state in json.loads(text).items()}

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
            loaded = next(self._steps)
        except (UserError, SampleError) as error:
            return error
        self._loaded += 1
        self._states.append((self._loaded, loaded.states))
        return loaded


class EvalFeed:
    """Iterates over the validation data of one data-parallel rank, in the order of the dataset.

    The ranks together read each sample once. Every rank gets the same number of equally shaped batches, with padding
    where samples are missing. The feed reads ``samples`` samples: the full dataset unless ``limited``.
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
        self.dataset = dataset
        self._layout = layout
        self._dp_rank = dp_rank
        self._device = device
        self._order = Order(len(dataset), batch.global_size, drop_last=False, seed=None)
        self._workers = loader_workers(batch, dataset, local_ranks)

    @property
    def samples(self) -> int:
        return self._order.samples

    def for_rank(self, layout: Layout, dp_rank: int) -> EvalFeed:
        """Returns a feed of the same data for a rank of a layout with another number of replicas, whose micro-batches
        have the same size."""
        feed = copy(self)
        feed._layout = layout
        feed._dp_rank = dp_rank
        feed._order = replace(self._order, global_size=self._order.global_size * layout.dp // self._layout.dp)
        return feed

    def limited(self, samples: int) -> EvalFeed:
        """Returns a feed that reads at most ``samples`` samples, evenly spaced over the dataset.

        The choice depends only on the size of the dataset and on ``samples``, so that runs of equal length evaluate the
        same samples under any layout.
        """
        if samples >= len(self.dataset):
            return self
        feed = copy(self)
        feed._order = SpacedOrder(samples, self._order.global_size, False, None, len(self.dataset))
        return feed

    def __len__(self) -> int:
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[LocalBatch]:
        balance = _balance(self.dataset, self._layout)
        held = self._layout.micro_batches_of(self._dp_rank)
        requests = _requests(self._order, self._layout, held, iter(range(len(self))), balance)
        steps = _Steps(self.dataset, requests, self._layout, self._workers, self._device)
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

    sent: SentBatches | DecodedBatches
    local_count: int
    ended: bool
    items: int
    states: tuple[str, ...]
    numbers: tuple[int, ...]

    def receive(self) -> LocalBatch:
        return LocalBatch(self.sent.receive(), self.local_count, self.ended, self.items, self.numbers)


class _Steps:
    def __init__(
        self,
        dataset: Dataset,
        requests: Iterator[Request],
        layout: Layout,
        workers: int,
        device: torch.device,
        read: Callable[[Any], Stacked] | None = None,
        numbers: tuple[int, ...] = (),
    ) -> None:
        self._micro_batches = len(numbers) or layout.micro_batches
        self._numbers = numbers
        self._copy = DeviceCopy(device, dataset.scale, dataset.floats)
        images = decoded_by_dali(dataset, device)
        if images is not None:
            read = EncodedSamples(images)
        self._reader = MicroBatchReader(dataset, requests, workers, 2 * self._micro_batches, _pins(device), read)
        self._decoder = None
        if images is not None:  # after the loader processes were forked
            self._decoder = DaliDecoder(images, device, layout.micro_size, max(1, workers), self._copy)
        self._collated = dataset.collate is not None
        self._pipeline = layout.pp > 1
        self._even = dataset.lengths is None and images is None and (not self._collated or self._pipeline)
        self._shapes: list[list[int]] | None = None

    def __iter__(self) -> Iterator[_SentStep]:
        return self

    def __next__(self) -> _SentStep:
        stacked = [next(self._reader) for _ in range(self._micro_batches)]
        for micro_batch in stacked if self._even else ():
            parts = (micro_batch.inputs, micro_batch.targets, micro_batch.context)
            shapes = [list(value.shape) for part in parts for value in leaves(part)]
            if self._shapes is None:
                self._shapes = shapes
            if shapes != self._shapes:
                where = "data"
                fix = "make the samples equal in shape, give the dataset an attribute `lengths`, or set data.collate"
                if self._collated:
                    where = "data.collate"
                    fix = "pad to one length in data.collate, or use a strategy without pipeline"
                equal = "all micro-batches of a pipeline" if self._pipeline else "all samples"
                raise UserError(
                    f"two micro-batches have the shapes {self._shapes} and {shapes}, but {equal} need equal shapes",
                    where=where,
                    fix=fix,
                )
        batches = [Batch(*micro_batch[:3], samples=micro_batch.samples) for micro_batch in stacked]
        sent = (self._decoder or self._copy).send(batches)
        states = tuple(micro_batch.state for micro_batch in stacked if micro_batch.state)
        targets = sum(micro_batch.target_count for micro_batch in stacked)
        items = sum(micro_batch.items for micro_batch in stacked)
        ended = all(micro_batch.ended for micro_batch in stacked)
        return _SentStep(sent, targets, ended, items, states, self._numbers)

    def close(self) -> None:
        self._reader.close()
        if self._decoder is not None:
            self._decoder.close()


def _order(dataset: Dataset, batch: BatchConfig, seed: int) -> Order:
    if isinstance(dataset, MixtureDataset):
        return dataset.order(batch.global_size, batch.drop_last, seed)
    return Order(len(dataset), batch.global_size, batch.drop_last, seed)


def _requests(
    order: Order, layout: Layout, held: Sequence[tuple[int, int]], steps: Iterator[int], balance: TokenBalance | None
) -> Iterator[LoadRequest]:
    """Yields the requests of the micro-batches ``held`` of each step; see ``Layout.micro_batches_of``."""
    for step in steps:
        template = order.template(step)
        epoch = order.epoch_of(step)
        rows: dict[int, list[LoadRequest]] = {}  # data-parallel rank -> its micro-batches if all have equally many
        for rank in {rank for rank, _ in held}:
            if balance is None:
                batch = order.rank_batch(step, layout, rank)
                rows[rank] = [LoadRequest(tuple(slots.tolist()), template, epoch) for slots in batch]
            else:
                rows[rank] = [
                    LoadRequest(tuple(row.slots.tolist()), template, epoch, row.width)
                    for row in balance.rank_batch(order, step, rank)
                ]
        for rank, number in held:
            yield rows[rank][number]


def _balance(dataset: Dataset, layout: Layout) -> TokenBalance | None:
    if dataset.lengths is None:
        return None
    return TokenBalance(np.asarray(dataset.lengths), layout)
