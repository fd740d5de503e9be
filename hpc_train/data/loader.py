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
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from hpc_train.data.custom import target_count
from hpc_train.data.dataset import IGNORED, Array, Dataset, Nested, Sample, SampleError
from hpc_train.data.sampler import PADDING, StreamRequest, pad_or_truncate
from hpc_train.errors import UserCodeError, UserError
from hpc_train.run.processes import die_with_parent

Read = TypeVar("Read")
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Stacked(NamedTuple):
    """Holds one micro-batch on the host; see ``Batch``.

    Attributes:
        state: where the shards of a stream continue after the step, as JSON.
        ended: whether a stream had no item for this micro-batch.
        items: the number of items of a stream in the micro-batch.
        samples: see ``Batch``.
    """

    inputs: Nested
    targets: Nested
    context: dict[str, Nested]
    target_count: int
    state: str = ""
    ended: bool = False
    items: int = 0
    samples: tuple[int, ...] = ()


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


Request = LoadRequest | StreamRequest


class MicroBatchReader:
    """Iterates over the micro-batches of ``requests``.

    Args:
        read: reads and stacks one micro-batch; it runs in the loader processes.
        workers: the number of loader processes; 0 reads in this process on demand.
        ahead: the number of micro-batches that all loader processes together read ahead.
        pin: whether to use page-locked memory, from which copies do not block.

    Raises:
        UserError: raised by ``next`` if the data is invalid.
        SampleError: raised by ``next`` if a sample cannot be read or a loader process has died.
    """

    def __init__(
        self,
        dataset: Dataset,
        requests: Iterable[Request],
        workers: int,
        ahead: int,
        pin: bool,
        read: Callable[[Any], Stacked] | None = None,
    ) -> None:
        self._dataset = dataset
        self._workers = workers
        self._requested: deque[Request] = deque()
        if not workers and read is None:
            requests = _prefetched(requests, dataset, ahead)
        loader: DataLoader[Stacked | Exception] = DataLoader(
            _MicroBatches(StackedSamples(dataset) if read is None else read),
            batch_size=None,
            sampler=_recorded(requests, self._requested),
            num_workers=workers,
            collate_fn=lambda stacked: stacked,  # which is a batch already
            pin_memory=pin,
            prefetch_factor=max(2, -(-ahead // workers)) if workers else None,
            worker_init_fn=partial(_init_loader_process, os.getpid()) if workers else None,
            multiprocessing_context="fork" if workers else None,
            generator=torch.Generator(),  # a separate generator keeps the process's random state unchanged
        )
        before = set(multiprocessing.active_children())
        with _on_exit_of_a_child(signal.SIG_DFL):  # without the handler that torch installs
            self._iterator: Iterator[Stacked | Exception] | None = begun(loader)
        self._processes = tuple(set(multiprocessing.active_children()) - before)
        self._stop = Finalize(self, _stop, args=(self._iterator, self._processes), exitpriority=100)

    def __iter__(self) -> Iterator[Stacked]:
        return self

    def __next__(self) -> Stacked:
        if self._iterator is None:
            raise StopIteration
        death = ""
        try:
            with _on_exit_of_a_child(self._find_death):
                self._find_death()
                stacked = next(self._iterator)
        except (RuntimeError, ConnectionError, EOFError) as error:  # connections end before the process has exited
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

    def _find_death(self, *_: object) -> None:
        for process in self._processes:
            if process.exitcode:
                ended = "failed"
                if process.exitcode < 0:
                    ended = f"was killed by {signal.Signals(-process.exitcode).name}"
                raise RuntimeError(f"process {process.pid} {ended}")

    def _death_notice(self, error: Exception) -> str:
        if not self._workers:
            return str(error)
        samples = []
        if self._requested:
            samples = [index for index in self._requested[0].slots if index != PADDING]
        files = sorted({source for index in samples[:8] if (source := self._dataset.source(index))})
        return (
            f"a data loader process died while it read the samples {samples[:8]}{' …' if samples[8:] else ''}"
            f"{' from ' + ', '.join(files) if files else ''}: {error} "
            "(set batch.loader_workers=0 to read in the training process and see the error itself)"
        )


def _prefetched(requests: Iterable[Request], dataset: Dataset, ahead: int) -> Iterator[Request]:
    """Yields ``requests``, each after ``dataset`` has started to read the samples of the ``ahead`` following ones."""
    following: deque[Request] = deque()
    for request in requests:
        for slot in request.slots:
            if slot != PADDING:
                dataset.prefetch(slot)
        following.append(request)
        if len(following) > ahead:
            yield following.popleft()
    yield from following


def _recorded(requests: Iterable[Request], requested: deque[Request]) -> Iterator[Request]:
    for request in requests:
        requested.append(request)  # it was sent to a loader process
        yield request


class _MicroBatches(TorchDataset[Stacked | Exception]):
    """Reads one micro-batch per request; returns errors, so that they reach the parent unchanged."""

    def __init__(self, read: Callable[[Any], Stacked]) -> None:
        self._read = read

    def __getitem__(self, request: Request) -> Stacked | Exception:
        try:
            return self._read(request)
        except UserError as error:
            return error
        except UserCodeError as error:
            if isinstance(error, SampleError):
                return error
            return SampleError(str(error))


class StackedSamples:
    """Reads the samples of a micro-batch and stacks them, or passes the items to the dataset's ``collate``."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __call__(self, request: LoadRequest) -> Stacked:
        indices = [index for index in request.slots if index != PADDING]
        if self._dataset.collate is not None:
            items = [self._read(index, request.epoch, self._dataset.item) for index in indices or [request.template]]
            batch = self._dataset.collate(self._dataset, items, indices, request.epoch, len(request.slots))
            count = target_count(batch.targets)
            return Stacked(batch.inputs, batch.targets, dict(batch.context), count, samples=request.slots)
        samples = [self._fitted(index, request) for index in indices]
        if samples:
            template = samples[0]
        else:
            template = self._read(request.template, request.epoch, self._dataset.sample)
        padding = padding_like(template)
        if request.width is not None:
            padding = pad_or_truncate(padding, request.width)
        check_shapes(indices, samples, self._dataset.describe)
        return stacked(samples, padding, len(request.slots))._replace(samples=request.slots)

    def _fitted(self, index: int, request: LoadRequest) -> Sample:
        def fitted(index: int, epoch: int) -> Sample:
            sample = self._dataset.sample(index, epoch)
            if request.width is None:
                return sample
            return pad_or_truncate(Sample(sample.inputs, _wide(sample.targets), sample.context), request.width)

        return self._read(index, request.epoch, fitted)

    def _read(self, index: int, epoch: int, read: Callable[[int, int], Read]) -> Read:
        try:
            return read(index, epoch)
        except UserError:
            raise
        except Exception as error:
            raise SampleError.of(self._dataset.describe(index), error) from None


def padding_like(template: Sample) -> Sample:
    """Returns a sample in the shape of ``template`` without targets."""
    return Sample(template.inputs, np.full_like(_wide(template.targets), IGNORED), template.context)


def stacked(samples: list[Sample], padding: Sample, size: int) -> Stacked:
    """Returns the micro-batch of ``samples``, filled up to ``size`` with ``padding``."""
    filled = samples + [padding] * (size - len(samples))
    targets = torch.from_numpy(np.stack([_wide(sample.targets) for sample in filled]))
    inputs = torch.from_numpy(np.stack([sample.inputs for sample in filled]))
    context = {
        name: torch.from_numpy(np.stack([sample.context[name] for sample in filled])) for name in padding.context
    }
    return Stacked(inputs, targets, context, int((targets != IGNORED).sum()))


def check_shapes(indices: list[int], samples: list[Sample], describe: Callable[[int], str]) -> None:
    """Raises UserError if the samples cannot be stacked. ``describe`` returns the name of a sample for the message."""
    for index, sample in zip(indices, samples, strict=True):
        if _shapes(sample) != _shapes(samples[0]):
            shape_text = describe_shapes(_shapes(sample))
            first_text = describe_shapes(_shapes(samples[0]))
            raise UserError(
                f"{describe(index)} has {shape_text}, but {describe(indices[0])} has {first_text}",
                where="data",
                fix="make all samples equal in shape, give the dataset an attribute `lengths` (tokens per sample), "
                "which pads them, or build the batch in data.collate",
            )


def describe_shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} of shape {list(shape)}" for name, shape in shapes.items())


def _shapes(sample: Sample) -> dict[str, tuple[int, ...]]:
    shapes = {"inputs": sample.inputs.shape, "targets": sample.targets.shape}
    return shapes | {name: value.shape for name, value in sample.context.items()}


def _wide(targets: Array) -> Array:
    """Converts integers to int64, so that ``IGNORED`` can be represented."""
    targets = np.asarray(targets)
    if targets.dtype.kind in "biu":
        return targets.astype(np.int64, copy=False)
    return targets


def begun(loader: DataLoader[Stacked | Exception]) -> Iterator[Stacked | Exception]:
    """Returns the iterator of ``loader``, whose processes it starts; an OSError names the place of the semaphores."""
    try:
        return iter(loader)
    except OSError as error:  # the message of a semaphore, which the C library creates in /dev/shm, names no file
        error.strerror = f"{error.strerror}: a semaphore for the loader processes in /dev/shm"
        raise


def _init_loader_process(parent: int, number: int) -> None:
    die_with_parent(parent)
    gc.freeze()  # what the training process has left, such as decoders with threads, is not freed here
    gc.enable()  # the training process, from which this one is forked, collects at chosen steps
    Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]
    for name in _IGNORED_SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    torch.set_num_threads(1)


@contextmanager
def _on_exit_of_a_child(handler: Callable[..., None] | signal.Handlers) -> Iterator[None]:
    """Handles SIGCHLD with ``handler`` inside the ``with`` block, if this is the main thread.

    A handler that raises must not remain installed: it would interrupt the process at any point, for example within a
    save.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGCHLD, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous or signal.SIG_DFL)


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
