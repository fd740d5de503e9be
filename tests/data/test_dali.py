"""Images that DALI decodes: the samples, crops and order of Pillow, its pixels up to rounding, and an exact resume.

Tests that run DALI are skipped where it is not installed: ``pip install -e '.[dali]'``.
"""

from __future__ import annotations

import io
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hpc_train.config.schema import BatchConfig, ImagesDataConfig, MixtureDataConfig, ShardsDataConfig
from hpc_train.data.dali import EncodedSamples, decoded_by_dali, would_gain_by_dali
from hpc_train.data.dataset import IGNORED, SampleError
from hpc_train.data.feed import EvalFeed, LocalBatch, TrainFeed
from hpc_train.data.image_shards import ShardsDataset, make_shards
from hpc_train.data.images import MEAN, STD, DecodedImages, ImagesDataset
from hpc_train.data.loader import LoadRequest
from hpc_train.data.sampler import PADDING
from hpc_train.data.sources import MIXTURE
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from tests.checkpoint.tensors import assert_same_bits
from tests.config.composing import config_of
from tests.data.layouts import replicas
from tests.faults.test_numbers import in_step
from tests.train.runs import run_attempt

needs_dali = pytest.mark.skipif(
    not find_spec("nvidia") or not find_spec("nvidia.dali"), reason="needs DALI: pip install -e '.[dali]'"
)
CPU = torch.device("cpu")
PNG = (10, 22)  # the samples of ``photos`` that are PNG files
ORIENTATION = 0x0112  # a tag of EXIF


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Returns smooth colors with some edges and noise, as a photograph has them."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32)
    pixels[height // 3 :, width // 2 :] = 255 - pixels[height // 3 :, width // 2 :]
    pixels += random.normal(0, 4, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, number in (("train", 12), ("validation", 5)):
        for label, name in enumerate(("a", "b")):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                image = picture(100 * label + index, 90 + 7 * index, 64 + 5 * (index % 4))
                exif = Image.Exif()
                exif[ORIENTATION] = index % 8 + 1
                options: dict[str, Any] = {"quality": 90, "subsampling": index % 3, "progressive": index % 5 == 4}
                if index == 10:
                    image.save(folder / f"{index:02}.png")
                elif index == 11:
                    image.convert("L").save(folder / f"{index:02}.jpg", **options)
                else:
                    image.save(folder / f"{index:02}.jpg", exif=exif, **options)
    return tmp_path / "photos"


def dataset(path: Path, split: str = "train", decoder: str = "dali", **fields: Any) -> ImagesDataset:
    given = {"path": str(path), "image_size": 48, "n_classes": 2, "decoder": decoder} | fields
    return ImagesDataset(ImagesDataConfig(**given), split, 7)


def feed(images: DecodedImages, start: int = 0, dp: int = 1, rank: int = 0, workers: int = 0) -> TrainFeed:
    batch = BatchConfig(global_size=8, loader_workers=workers)
    return TrainFeed(images, batch, replicas(dp, 8, 2), rank, 5, CPU, start)


def taken(steps: TrainFeed, number: int) -> list[LocalBatch]:
    batches = [next(steps) for _ in range(number)]
    steps.close()
    return batches


def inputs_of(batches: list[LocalBatch]) -> Tensor:
    return torch.cat([micro.inputs for batch in batches for micro in batch.micro_batches])


def targets_of(batches: list[LocalBatch]) -> list[int]:
    return torch.cat([micro.targets for batch in batches for micro in batch.micro_batches]).tolist()


def levels(inputs: Tensor) -> Tensor:
    """Returns normalized pixels in levels of 8 bits."""
    std = torch.from_numpy(STD)
    mean = torch.from_numpy(MEAN)
    if inputs.shape[1] == 1:
        return (inputs * std.mean() + mean.mean()).mul(255).round()
    return (inputs * std + mean).mul(255).round()


def test_the_loader_reads_bytes_and_crops(photos: Path) -> None:
    images = dataset(photos)
    read = EncodedSamples(images)
    stacked = read(LoadRequest((3, 10, PADDING, 0), 0, epoch=2))
    inputs = {name: value.numpy() for name, value in stacked.inputs.items()}
    files = np.split(inputs["content"], inputs["ends"][:-1])
    assert [files[row].tobytes() for row in (0, 2)] == [Path(images.source(index)).read_bytes() for index in (3, 0)]
    assert files[3].tobytes() == files[0].tobytes()
    assert stacked.targets.tolist() == [0, 0, 0, IGNORED] and stacked.target_count == 3
    height, width = 64 + 5 * 3, 90 + 7 * 3  # the fourth image, with orientation 4
    left, top, right, bottom = images.crop(3, 2, width, height).box
    assert inputs["first"][0].tolist() == [top, left] and inputs["last"][0].tolist() == [bottom, right]
    assert inputs["mirrored"][0] == images.crop(3, 2, width, height).mirrored
    turned = images.crop(4, 2, 64, 90 + 7 * 4)  # orientation 5
    assert read(LoadRequest((4,), 0, 2)).inputs["last"][0].tolist() == [turned.box[3], turned.box[2]]
    finished = np.asarray(Image.open(io.BytesIO(files[1].tobytes()))).transpose(2, 0, 1)
    assert np.array_equal(finished, images.sample(10, 2).inputs), "Pillow decodes PNG"
    assert inputs["last"][1].tolist() == [48, 48] and not inputs["mirrored"][1]


def test_pillow_decodes_what_decoders_treat_differently(photos: Path) -> None:
    images = dataset(photos, channels=1)
    path = Path(images.source(0))
    content = path.read_bytes()
    image = picture(1, 60, 50)
    for write in (
        lambda: image.convert("CMYK").save(path),
        lambda: image.save(path, "JPEG", keep_rgb=True),
        lambda: image.save(path, "WEBP"),
    ):
        write()
        assert EncodedSamples(images)(LoadRequest((0,), 0, 0)).inputs["content"][:2].numpy().tobytes() == b"P5"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SampleError, match=r"sample 0 \(.*00\.jpg\).*truncated"):
        EncodedSamples(images)(LoadRequest((0,), 0, 0))


@needs_dali
@pytest.mark.parametrize(("channels", "largest"), [(3, 1), (1, 3)])
def test_the_pixels_are_those_of_pillow_up_to_rounding(photos: Path, channels: int, largest: int) -> None:
    """Over three epochs of random crops; PNG files, which Pillow decodes, are equal."""
    found, wanted = (
        taken(feed(dataset(photos, decoder=decoder, channels=channels)), 9) for decoder in ("dali", "pillow")
    )
    assert targets_of(found) == targets_of(wanted)
    difference = (levels(inputs_of(found)) - levels(inputs_of(wanted))).abs()
    samples = np.array([index for batch in found for micro in batch.micro_batches for index in micro.samples])
    of_image = difference.flatten(1).max(1).values
    assert of_image[np.isin(samples, PNG)].max() == 0
    assert 1 <= of_image.max() <= largest and difference.mean() < 0.25


@needs_dali
@pytest.mark.parametrize("workers", [0, 2])
def test_a_feed_continues_in_the_middle_of_an_epoch_under_any_number_of_ranks(photos: Path, workers: int) -> None:
    images = dataset(photos)
    whole = taken(feed(images), 8)  # an epoch has three steps
    resumed = taken(feed(images, start=4, workers=workers), 4)
    assert torch.equal(inputs_of(resumed), inputs_of(whole[4:])) and targets_of(resumed) == targets_of(whole[4:])
    of_ranks = [taken(feed(images, start=4, dp=2, rank=rank), 4) for rank in range(2)]
    steps = [torch.cat([inputs_of([batches[step]]) for batches in of_ranks]) for step in range(4)]
    assert torch.equal(torch.cat(steps), inputs_of(whole[4:]))


@needs_dali
def test_shards_and_evaluations(photos: Path, tmp_path: Path) -> None:
    make_shards(photos, tmp_path / "shards", 20_000, 1, lambda done, total: None)
    config = ShardsDataConfig(path=str(tmp_path / "shards"), image_size=48, n_classes=2, decoder="dali")
    layout = replicas(1, 8, 2)
    feeds = [
        EvalFeed(images, BatchConfig(global_size=8, loader_workers=0), layout, 0, CPU)
        for images in (ShardsDataset(config, "validation", 7), dataset(photos, "validation"))
    ]
    of_shards, of_folders = (list(evaluated) for evaluated in feeds)
    assert torch.equal(inputs_of(of_shards), inputs_of(of_folders))
    assert targets_of(of_folders) == [0] * 5 + [1] * 5 + [IGNORED] * 6


@needs_dali
def test_a_file_that_dali_cannot_decode_is_named(photos: Path) -> None:
    images = dataset(photos)
    path = Path(images.source(3))
    content = bytearray(path.read_bytes())
    table = content.index(b"\xff\xc4")  # a Huffman table
    content[table + 5 : table + 21] = b"\xff" * 16  # the numbers of codes of each length
    path.write_bytes(content)
    with pytest.raises(SampleError, match=r"DALI cannot decode one of .*sample 3 \(.*03\.jpg\)"):
        taken(feed(images), 3)


RUN = [
    "+strategy=dp", "model=vit_tiny", "model.n_layers=1", "model.dim=16", "model.mlp_dim=32", "model.n_heads=2",
    "model.patch_size=16", "data=images", "data.n_classes=2", "data.image_size=48", "data.decoder=dali",
    "batch.global_size=8", "train.steps=8", "checkpoint.every=2", "train.eval_every=4", "telemetry.log_every=1",
    "telemetry.wandb.mode=disabled",
]  # fmt: skip


def frozen(path: Path, photos: Path) -> RunDirectory:
    run = RunDirectory(path)
    freeze(config_of(*RUN, f"data.path={photos}"), run)
    return run


@needs_dali
@pytest.mark.long_form(10)  # a feed that continues, above
def test_a_killed_run_continues_with_the_same_batches(photos: Path, tmp_path: Path) -> None:
    whole = frozen(tmp_path / "whole", photos)
    assert run_attempt(whole, 2) == [0, 0]
    run = frozen(tmp_path / "run", photos)
    with pytest.raises(AssertionError, match="died without a word"):
        run_attempt(run, 2, partial(in_step, 5, True))
    assert run_attempt(run, 2) == [0, 0]
    assert [event["step"] for event in run.read_events() if event["event"] == "resumed"] == [4]
    assert run.record()["image_decoder"] == "DALI in the process of each rank, on cpu"
    assert_same_bits(run.checkpoints / "step-00000008", whole.checkpoints / "step-00000008")


def test_dali_is_an_extra(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(UserError, match="needs NVIDIA DALI") as error:
        feed(dataset(photos))
    assert "[dali]" in error.value.fix and "data.decoder=pillow" in error.value.fix


def test_auto_is_pillow_on_a_cpu(photos: Path) -> None:
    images = dataset(photos, decoder="auto")
    assert decoded_by_dali(images, CPU) is None and not would_gain_by_dali(images, CPU)


def test_a_mixture_is_decoded_by_pillow(photos: Path) -> None:
    source = {"kind": "images", "path": str(photos), "n_classes": 2, "image_size": 48, "decoder": "dali"}
    mixture = MixtureDataConfig(sources={"photos": source}, image_size=48, channels=3, n_classes=2)
    with pytest.raises(UserError, match="the source photos decodes with DALI") as error:
        MIXTURE.check_inputs(mixture)
    assert error.value.fix == "data.sources.photos.decoder=pillow"
