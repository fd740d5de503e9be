"""Reads samples and stacks them into micro-batches, in this process or in loader processes, in the requested order.

``torch.utils.data.DataLoader`` forks the loader processes. They exit with the process that reads from them and use one
thread. They ignore signals, because a signal to the process group must not stop the data of a worker that is still
saving a checkpoint.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from hpc_train.data.dataset import IGNORED, Array, Dataset, Sample, SampleError
from hpc_train.data.sampler import PADDING, pad_or_truncate
from hpc_train.errors import UserError
from hpc_train.run.processes import die_with_parent

Stacked = tuple[Tensor, Tensor, dict[str, Tensor], int]  # inputs, targets, context, number of targets that count

_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class LoadRequest:
    """Describes one micro-batch to read.

    Attributes:
        slots: sample indices or ``PADDING``.
        template: the sample that defines the shapes of padding if no slot has a sample.
        width: the number of tokens to which samples of different lengths are padded.
    """

    slots: tuple[int, ...]
    template: int
    epoch: int
    width: int | None = None


class MicroBatchReader:
    """Iterates over the micro-batches of ``requests``.

    Args:
        workers: the number of loader processes; 0 reads in this process on demand.
        ahead: the number of micro-batches that all loader processes together read ahead.
        pin: whether to use page-locked memory, from which copies do not block.

    Raises:
        UserError: raised by ``next`` if the data is invalid.
        SampleError: raised by ``next`` if a sample cannot be read or a loader process has died.
    """

    def __init__(self, dataset: Dataset, requests: Iterable[LoadRequest], workers: int, ahead: int, pin: bool) -> None:
        self._dataset, self._workers = dataset, workers
        self._requested: deque[LoadRequest] = deque()
        loader: DataLoader[Stacked | Exception] = DataLoader(
            _MicroBatches(dataset),
            batch_size=None,
            sampler=_RecordedRequests(requests, self._requested),
            num_workers=workers,
            collate_fn=_identity,
            pin_memory=pin,
            prefetch_factor=max(2, -(-ahead // workers)) if workers else None,
            worker_init_fn=partial(_init_loader_process, os.getpid()) if workers else None,
            multiprocessing_context="fork" if workers else None,
            generator=torch.Generator(),  # a generator of its own keeps the process's random state unchanged
        )
        before = set(multiprocessing.active_children())
        self._iterator: Iterator[Stacked | Exception] | None = iter(loader)
        processes = tuple(set(multiprocessing.active_children()) - before)
        self._stop = Finalize(self, _stop, args=(self._iterator, processes), exitpriority=100)

    def __iter__(self) -> Iterator[Stacked]:
        return self

    def __next__(self) -> Stacked:
        if self._iterator is None:
            raise StopIteration
        death = ""
        try:
            stacked = next(self._iterator)
        except RuntimeError as error:
            death = self._death_notice(error)
        if death:  # outside the handler, since the error's frames keep the dead iterator alive
            self.close()
            raise SampleError(death)
        self._requested.popleft()
        if isinstance(stacked, Exception):
            raise stacked
        return stacked

    def close(self) -> None:
        """Stops the loader processes; further calls do nothing."""
        self._iterator = None
        self._stop()

    def _death_notice(self, error: RuntimeError) -> str:
        if not self._workers:
            return str(error)
        samples = [index for index in self._requested[0].slots if index != PADDING] if self._requested else []
        files = sorted({source for index in samples[:8] if (source := self._dataset.source(index))})
        return (
            f"a data loader process died while it read the samples {samples[:8]}{' …' if samples[8:] else ''}"
            f"{' from ' + ', '.join(files) if files else ''}: {error} "
            "(set batch.loader_workers=0 to read in the training process and see the error itself)"
        )


class _RecordedRequests:
    """Iterates over the requests and records those that were sent to loader processes."""

    def __init__(self, requests: Iterable[LoadRequest], asked: deque[LoadRequest]) -> None:
        self._requests, self._requested = requests, asked

    def __iter__(self) -> Iterator[LoadRequest]:
        for request in self._requests:
            self._requested.append(request)
            yield request


class _MicroBatches(TorchDataset[Stacked | Exception]):
    """Reads and stacks one micro-batch per request; returns errors, so that they reach the parent unchanged."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(self, request: LoadRequest) -> Stacked | Exception:
        try:
            return self._stack(request)
        except (UserError, SampleError) as error:
            return error

    def _stack(self, request: LoadRequest) -> Stacked:
        indices = [index for index in request.slots if index != PADDING]
        samples = [self._read(index, request.epoch, request.width) for index in indices]
        template = samples[0] if samples else self._read(request.template, request.epoch)
        padding = Sample(template.inputs, np.full_like(_wide(template.targets), IGNORED), template.context)
        if request.width is not None:
            padding = pad_or_truncate(padding, request.width)
        self._check_shapes(indices, samples)
        samples += [padding] * (len(request.slots) - len(samples))
        targets = torch.from_numpy(np.stack([_wide(sample.targets) for sample in samples]))
        inputs = torch.from_numpy(np.stack([sample.inputs for sample in samples]))
        context = {
            name: torch.from_numpy(np.stack([sample.context[name] for sample in samples])) for name in padding.context
        }
        return inputs, targets, context, int((targets != IGNORED).sum())

    def _read(self, index: int, epoch: int, width: int | None = None) -> Sample:
        try:
            sample = self._dataset.sample(index, epoch)
            if width is None:
                return sample
            return pad_or_truncate(Sample(sample.inputs, _wide(sample.targets), sample.context), width)
        except UserError:
            raise
        except Exception as error:
            raise SampleError(f"{self._name(index)}: {error!r}\n{traceback.format_exc()}") from None

    def _check_shapes(self, indices: list[int], samples: list[Sample]) -> None:
        for index, sample in zip(indices, samples, strict=True):
            if _shapes(sample) != _shapes(samples[0]):
                raise SampleError(
                    f"{self._name(index)} has the shapes {_shapes(sample)}, but sample {indices[0]} has "
                    f"{_shapes(samples[0])}; all samples need equal shapes"
                )

    def _name(self, index: int) -> str:
        try:
            source = self._dataset.source(index)
        except Exception:  # the error of the sample is more important
            source = ""
        return f"sample {index}{f' ({source})' if source else ''}"


def _shapes(sample: Sample) -> dict[str, tuple[int, ...]]:
    own = {"inputs": sample.inputs.shape, "targets": sample.targets.shape}
    return own | {name: value.shape for name, value in sample.context.items()}


def _wide(targets: Array) -> Array:
    """Converts integers to int64, so that ``IGNORED`` can be represented."""
    targets = np.asarray(targets)
    return targets.astype(np.int64, copy=False) if targets.dtype.kind in "biu" else targets


def _identity(stacked: Any) -> Any:
    return stacked


def _init_loader_process(parent: int, number: int) -> None:
    die_with_parent(parent)
    gc.enable()  # the training process, from which this one is forked, collects at chosen steps
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]
    for name in _IGNORED_SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    torch.set_num_threads(1)


def _stop(iterator: Iterator[Stacked | Exception], processes: tuple[BaseProcess, ...]) -> None:
    """Stops loader processes and kills those that do not exit.

    They ignore SIGTERM, so multiprocessing would wait for them forever at the exit of this process. The iterator shuts
    down first, because it would report the exit of a loader process as an error.
    """
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _send_error(queue: Queue[Any], error: Exception, lost: Any) -> None:
    """Sends an error for a micro-batch that does not fit into shared memory; the reader would wait for it forever."""
    words = (
        f"a loader process cannot send a micro-batch through shared memory: {error} (batch.loader_workers=0 needs none)"
    )
    queue.put((lost[0], SampleError(words)))
