"""Batches on their way to a device: a separate stream, pixels in 8 bits, and loader processes without CUDA."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_train.config.schema import BatchConfig
from hpc_train.data import cifar100, images
from hpc_train.data.dataset import Batch, Dataset, Ragged, Sample
from hpc_train.data.device_copy import DeviceCopy
from hpc_train.data.feed import EvalFeed, TrainFeed
from tests.data.layouts import replicas
from tests.data.stand_ins import Numbers

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MEANS = [(images.MEAN, images.STD), (images.MEAN.mean(), images.STD.mean()), (cifar100.MEAN, cifar100.STD)]


@pytest.mark.parametrize(("mean", "std"), MEANS)
def test_normalized_pixels_are_bitwise_those_of_numpy(mean: NDArray[np.float32], std: NDArray[np.float32]) -> None:
    pixels = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256), (2, mean.size, 3, 1))
    between = pixels.astype(np.float32) + np.float32(1 / 3)  # as of an image that was resized in float32
    copy = DeviceCopy(CPU, images.pixel_scale(mean, std))
    for values in (pixels, between):
        wanted = ((values.astype(np.float32) / np.float32(255) - mean) / std).astype(np.float32)
        (batch,) = copy.send([Batch(torch.from_numpy(values), torch.zeros(2))]).receive()
        assert np.array_equal(batch.inputs.numpy().view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize("floats", ["float32", "float64"])
def test_floats_get_the_dtype_of_the_model(floats: str) -> None:
    values = [np.ones((2, 3), dtype) for dtype in (np.float16, np.float32, np.float64)]
    inputs = {str(index): torch.from_numpy(value) for index, value in enumerate(values)}
    batch = Batch(inputs, torch.ones(2, dtype=torch.float64), {"ids": torch.ones(2, dtype=torch.int64)})
    (found,) = DeviceCopy(CPU, None, floats).send([batch]).receive()
    assert {value.dtype for value in (*found.inputs.values(), found.targets)} == {getattr(torch, floats)}
    assert found.context["ids"].dtype == torch.int64
    pixels = Batch(torch.ones(2, 3, 1, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    (found,) = DeviceCopy(CPU, images.pixel_scale(images.MEAN, images.STD), floats).send([pixels]).receive()
    assert found.inputs.dtype == getattr(torch, floats) and found.targets.dtype == torch.int64


class Pixels(Dataset):
    """Sample i is an image of the value i."""

    scale = images.pixel_scale(images.MEAN, images.STD)

    def __len__(self) -> int:
        return 32

    def sample(self, index: int, epoch: int) -> Sample:
        return Sample(np.full((3, 2, 2), index, dtype=np.uint8), np.array(index))


class Streams:
    """Stands in for CUDA's streams and events, and records what happens in which order; tensors stay on the CPU."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "compute"
        self.copied: list[torch.dtype | None] = []
        streams = self

        class Stream:
            def __init__(self, device: torch.device | None = None) -> None:
                self.name = "compute" if device is None else "copy"

            def wait_event(self, event: Any) -> None:
                streams.log.append(f"{self.name} waits")

        class Event:
            def record(self, stream: Stream) -> None:
                streams.log.append(f"event in {stream.name}")

        self.Stream, self.Event = Stream, Event

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.now = stream.name
        yield
        self.now = "compute"

    def current_stream(self, device: torch.device) -> Any:
        return self.Stream()

    def to(self, batch: Batch, device: torch.device) -> Batch:
        self.copied.append(getattr(batch.inputs, "dtype", None))
        self.log.append(f"copy in {self.now}")
        return batch

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.log.append(f"kept for {stream.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    fake = Streams()
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(Batch, "to", lambda *arguments: fake.to(*arguments))  # noqa: PLW0108
    monkeypatch.setattr(Tensor, "record_stream", lambda *arguments: fake.record_stream(*arguments))  # noqa: PLW0108
    monkeypatch.setattr("hpc_train.data.device_copy._channels", lambda values, _: torch.tensor(values).view(-1, 1, 1))
    monkeypatch.setattr("hpc_train.data.feed._pins", lambda _: False)
    return fake


SENT = ["copy in copy", "copy in copy", "event in copy"]
RECEIVED = ["compute waits", *["kept for compute"] * 4]  # inputs and targets of two micro-batches


def test_the_next_step_is_copied_in_another_stream_and_waited_for_by_the_device(streams: Streams) -> None:
    layout = replicas(1, 8, 2)
    feed = TrainFeed(Pixels(), BatchConfig(global_size=8, loader_workers=0), layout, 0, 5, GPU, 0)
    next(feed)
    assert streams.log == [*SENT, *SENT, *RECEIVED], "the copy for the second step begins before the first is used"
    del streams.log[:]
    next(feed)
    assert streams.log == [*SENT, *RECEIVED]
    assert set(streams.copied) == {torch.uint8}
    feed.close()


def test_evaluation_copies_one_step_ahead_too(streams: Streams) -> None:
    batches = iter(EvalFeed(Pixels(), BatchConfig(global_size=8, loader_workers=0), replicas(1, 8, 2), 0, GPU))
    next(batches)
    assert streams.log == [*SENT, *SENT, *RECEIVED]
    assert sum(1 for _ in batches) == 3


class Graphs:
    """Records in which stream it is moved."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def to(self, device: torch.device) -> str:
        self.streams.log.append(f"moved in {self.streams.now}")
        return f"on {device}"


def test_a_ragged_batch_is_copied_in_the_stream_that_uses_it(streams: Streams) -> None:
    """Its tensors are not known, so that their memory could not be kept for another stream."""
    ragged = Ragged(Graphs(streams), items=2)
    sent = DeviceCopy(GPU, None).send([Batch(ragged, ragged)])
    (batch,) = sent.receive()
    assert streams.log[-2:] == ["compute waits", "moved in compute"]
    assert batch.inputs is batch.targets and batch.inputs.targets == "on cuda:0" and batch.inputs.items == 2


class WithoutCuda(Numbers):
    """Its samples tell whether Python collects garbage by itself where they are read."""

    def sample(self, index: int, epoch: int) -> Sample:
        return Sample(np.array([gc.isenabled()]), np.array(index))


def test_loader_processes_never_touch_cuda_and_collect_their_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader processes are forked with every function of ``torch.cuda`` replaced by one that raises."""

    def touched(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"torch.cuda.{name} is called")

        return refuse

    for name, value in vars(torch.cuda).copy().items():
        if inspect.isroutine(value):
            monkeypatch.setattr(torch.cuda, name, touched(name))
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # as after a fork of a process that uses CUDA
    with pytest.raises(AssertionError, match="is called"):
        torch.cuda.device_count()
    gc.disable()
    try:
        feed = TrainFeed(WithoutCuda(64), BatchConfig(global_size=8, loader_workers=2), replicas(1, 8, 2), 0, 5, CPU, 0)
    finally:
        gc.enable()
    for _ in range(6):
        assert all(bool(micro.inputs.all()) for micro in next(feed).micro_batches)
    feed.close()
