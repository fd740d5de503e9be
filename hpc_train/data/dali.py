"""Decodes, crops and resizes images with NVIDIA DALI in the process of the rank, on its GPU if it has one.

Loader processes read the files and compute the crops, so the order and the augmentation of the samples are those of
Pillow; the pixels differ by rounding. A thread runs DALI one step ahead of training. DALI decodes JPEG files only.
Pillow decodes other files in the loader processes, including JPEG files that decoders treat differently: those in CMYK
or with pixels stored as RGB, and those without an end.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hpc_train.config.import_path import install_extra, module_spec
from hpc_train.data.dataset import IGNORED, Batch, Dataset, SampleError
from hpc_train.data.device_copy import DeviceCopy, SentBatches
from hpc_train.data.images import MODES, Crop, DecodedImages, orientation, pillow
from hpc_train.data.loader import LoadRequest, Stacked, StackedSamples
from hpc_train.data.sampler import PADDING
from hpc_train.errors import UserError

PACKAGE = "nvidia.dali"
_END = b"\xff\xd9"  # the last marker of a JPEG file, behind which programs leave some bytes
_BEHIND_END = 64
_YCC = 1  # Adobe's marker for pixels as luma and chroma, which JPEG files without the marker have, too


def decoded_by_dali(dataset: Dataset, device: torch.device) -> DecodedImages | None:
    """Returns ``dataset`` if DALI decodes its images for ``device``; None if it has no images, or Pillow decodes them.

    With ``data.decoder=auto`` DALI decodes on NVIDIA GPUs if it is installed, except with ``train.reproducible``.
    """
    if not isinstance(dataset, DecodedImages) or dataset.collate is not None or dataset.decoder == "pillow":
        return None
    if dataset.decoder == "dali" or (_is_suited(device) and module_spec(PACKAGE) is not None):
        return dataset
    return None


def would_gain_by_dali(dataset: Dataset, device: torch.device) -> bool:
    """Returns whether Pillow decodes images that DALI could decode on the GPU ``device``."""
    if not isinstance(dataset, DecodedImages) or dataset.collate is not None:
        return False
    return _is_suited(device) and decoded_by_dali(dataset, device) is None


def _is_suited(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and not torch.are_deterministic_algorithms_enabled()  # as with train.reproducible


class Encoded(NamedTuple):
    """Holds the bytes of an image file, and the crop of the upright image."""

    content: bytes
    crop: Crop


class EncodedSamples(StackedSamples):
    """Reads the images of a micro-batch without decoding them.

    The inputs are a dict:

    - ``content``: the bytes of the files, one after another;
    - ``ends``: ``[micro]``, the end of each file in ``content``;
    - ``first`` and ``last``: ``[micro, 2]`` float32, the row and column where each crop begins and ends;
    - ``mirrored``: ``[micro]`` int32.
    """

    def __init__(self, images: DecodedImages) -> None:
        super().__init__(images)
        self._images = images

    def __call__(self, request: LoadRequest) -> Stacked:
        indices = [index for index in request.slots if index != PADDING]
        encoded = [self._read(index, request.epoch, self._encoded) for index in indices or [request.template]]
        encoded += [encoded[0]] * (len(request.slots) - len(encoded))
        boxes = [image.crop.box for image in encoded]
        inputs = {
            "content": np.concatenate([np.frombuffer(image.content, np.uint8) for image in encoded]),
            "ends": np.cumsum([len(image.content) for image in encoded], dtype=np.int64),
            "first": np.array([(top, left) for left, top, _, _ in boxes], np.float32),
            "last": np.array([(bottom, right) for _, _, right, bottom in boxes], np.float32),
            "mirrored": np.array([image.crop.mirrored for image in encoded], np.int32),
        }
        targets = torch.full((len(request.slots),), IGNORED)
        for row, index in enumerate(indices):
            targets[row] = int(self._images.labels[index])
        tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
        return Stacked(tensors, targets, {}, len(indices), samples=request.slots)

    def _encoded(self, index: int, epoch: int) -> Encoded:
        file = self._images.file(index)
        content = file.read() if isinstance(file, io.BytesIO) else Path(str(file)).read_bytes()
        shape = _jpeg_size(content)
        if shape is not None:
            return Encoded(content, self._images.crop(index, epoch, *shape))
        pixels = self._images.sample(index, epoch).inputs
        channels, height, width = pixels.shape
        header = f"P{6 if channels == 3 else 5} {width} {height} 255\n".encode()  # the format PPM or PGM
        return Encoded(header + pixels.transpose(1, 2, 0).tobytes(), Crop((0, 0, width, height), False))


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Returns the width and height of the upright image in a JPEG file; None if Pillow has to decode the file."""
    with pillow().open(io.BytesIO(content)) as image:
        if (
            image.format != "JPEG"
            or image.mode not in MODES.values()
            or image.info.get("adobe_transform", _YCC) != _YCC
            or _END not in content[-_BEHIND_END:]
        ):
            return None
        width, height = image.size
        if orientation(image) in range(5, 9):  # turned by 90 degrees
            return height, width
        return width, height


@dataclass(frozen=True)
class DecodedBatches:
    """Holds micro-batches that a thread decodes and sends to the device."""

    sent: Future[SentBatches]

    def receive(self) -> tuple[Batch, ...]:
        """Returns the micro-batches for use in the current stream; see ``SentBatches``. Waits for the decoder, and
        raises SampleError if it has failed."""
        return self.sent.result().receive()


class DaliDecoder:
    """Decodes the micro-batches of ``EncodedSamples`` in a thread, and sends the pixels to the device with ``copy``.

    All JPEG files that the hardware decoder of a GPU supports go to it, so that the pixels of an image should not
    depend on the other images of its batch; this was never measured.

    Args:
        micro_size: the largest number of images in a micro-batch.
        threads: the number of threads of DALI on the host.

    Raises:
        UserError: DALI is not installed, or cannot be loaded.
    """

    def __init__(
        self, images: DecodedImages, device: torch.device, micro_size: int, threads: int, copy: DeviceCopy
    ) -> None:
        self._images = images
        self._copy = copy
        self._pipeline = _pipeline(images, device, micro_size, threads)
        use_device = None  # a new thread would use GPU 0
        if device.type == "cuda":
            use_device = partial(torch.cuda.set_device, device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dali", initializer=use_device)

    def send(self, batches: Iterable[Batch]) -> DecodedBatches:
        """Starts to decode ``batches``; the caller does not wait."""
        return DecodedBatches(self._thread.submit(self._decode, list(batches)))

    def close(self) -> None:
        """Waits for the thread and frees the memory of DALI; further calls do nothing."""
        self._thread.shutdown(cancel_futures=True)
        self._pipeline = None

    def _decode(self, batches: list[Batch]) -> SentBatches:
        decoded = [self._pixels(batch) for batch in batches]
        sent = self._copy.send(decoded)
        if sent.copied is not None:
            sent.copied.synchronize()  # DALI uses the memory of `decoded` again
        return sent

    def _pixels(self, batch: Batch) -> Batch:
        """Returns a micro-batch with the pixels ``[micro, channels, size, size]`` uint8 on the device."""
        inputs = {name: value.numpy() for name, value in batch.inputs.items()}
        files = np.split(inputs["content"], inputs["ends"][:-1])
        crops = {name: inputs[name] for name in ("first", "last", "mirrored")}
        try:
            (pixels,) = self._pipeline.run(content=files, **crops)
        except RuntimeError as error:
            files_text = ", ".join(self._images.describe(index) for index in batch.samples if index != PADDING)
            raise SampleError(f"DALI cannot decode one of {files_text}: {error}") from None
        return replace(batch, inputs=torch.from_dlpack(pixels.as_tensor()))


def _pipeline(images: DecodedImages, device: torch.device, micro_size: int, threads: int) -> Any:
    try:
        from nvidia.dali import Pipeline, fn, types
    except (ImportError, OSError) as error:
        raise UserError(
            f"data.decoder={images.decoder} needs NVIDIA DALI, which cannot be loaded: {error}",
            where="data.decoder",
            fix=f"{install_extra('dali')}, or data.decoder=pillow",
        ) from error
    place = "cpu"
    if device.type == "cuda":
        place = "mixed"  # the input is on the host and the output on the GPU
    # `run` accepts inputs only with a queue of one batch
    pipeline = Pipeline(micro_size, threads, device.index, prefetch_queue_depth=1)
    with pipeline:
        content = fn.external_source(name="content", dtype=types.UINT8, ndim=1)
        first = fn.external_source(name="first", dtype=types.FLOAT, ndim=1)
        last = fn.external_source(name="last", dtype=types.FLOAT, ndim=1)
        mirrored = fn.external_source(name="mirrored", dtype=types.INT32, ndim=0)
        pixels = fn.decoders.image(
            content,
            device=place,
            output_type=types.RGB if images.channels == 3 else types.GRAY,
            jpeg_fancy_upsampling=True,  # as Pillow
            hw_decoder_load=1.0,  # the default decodes some images of a batch by kernels
            affine=False,  # threads of all ranks of a node would share the first cores
        )
        scaled = fn.resize(
            pixels, size=[images.size] * 2, roi_start=first, roi_end=last, interp_type=types.INTERP_LINEAR
        )
        pipeline.set_outputs(fn.crop_mirror_normalize(scaled, mirror=mirrored, dtype=types.UINT8, output_layout="CHW"))
    pipeline.build()
    return pipeline
