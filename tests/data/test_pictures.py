from __future__ import annotations

import builtins
import hashlib
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpc_train.config.schema import CIFAR100DataConfig, ImagesDataConfig, ShardsDataConfig
from hpc_train.data.cifar100 import MEAN, OFFICIAL_MD5, STD, CIFAR100Dataset
from hpc_train.data.dataset import Array
from hpc_train.data.files import SUFFIXES, image_names
from hpc_train.data.image_shards import ShardsDataset, make_shards
from hpc_train.data.images import (
    ImagesDataset,
    generator,
    open_image,
    pixel_scale,
    random_box,
    shifted_crop,
)
from hpc_train.data.sources import IMAGE_FOLDERS
from hpc_train.errors import UserError

COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def write_cifar(directory: Path, numbers: dict[str, int]) -> dict[str, str]:
    """Small files in the official format (pickles of protocol 2); returns their md5s."""
    folder = directory / "cifar-100-python"
    folder.mkdir()
    contents: dict[str, dict[str, Any]] = {"meta": {"fine_label_names": [f"class {i}" for i in range(100)]}}
    for name, number in numbers.items():
        pixels = np.random.default_rng(0).integers(0, 256, (number, 3072), dtype=np.uint8)
        labels = [index % 100 for index in range(number)]
        contents[name] = {"data": pixels, "fine_labels": labels, "filenames": [f"{i}.png" for i in range(number)]}
    for name, content in contents.items():
        written_today = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(written_today.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    return {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in contents}


@pytest.fixture
def cifar(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    return tmp_path, write_cifar(tmp_path, {"train": 20, "test": 7})


def cifar_dataset(cifar: tuple[Path, dict[str, str]], split: str, seed: int = 0, **fields: Any) -> CIFAR100Dataset:
    return CIFAR100Dataset(CIFAR100DataConfig(path=str(cifar[0]), **fields), split, seed, md5=cifar[1])


def test_cifar100_in_the_official_format(cifar: tuple[Path, dict[str, str]]) -> None:
    train, validation = (cifar_dataset(cifar, split, augment=False) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (20, 7)
    sample = validation.sample(3, 0)
    pixels = pickle.loads((cifar[0] / "cifar-100-python" / "test").read_bytes())["data"][3].reshape(3, 32, 32)
    assert np.array_equal(sample.inputs, pixels) and sample.inputs.dtype == np.uint8 and sample.targets == 3
    resized = cifar_dataset(cifar, "validation", image_size=48)
    assert resized.scale == validation.scale == pixel_scale(MEAN, STD)
    doubled = cifar_dataset(cifar, "validation", image_size=64).sample(3, 0).inputs
    assert resized.sample(3, 0).inputs.dtype == doubled.dtype == np.float32
    corners = pixels[:, :2, :2].astype(np.float32)  # edges are aligned: a pixel between two is a weighted mean of them
    np.testing.assert_allclose(doubled[:, 0, 1], 0.75 * corners[:, 0, 0] + 0.25 * corners[:, 0, 1], rtol=1e-6)
    assert validation.class_names[99] == "class 99"
    assert cifar_dataset((cifar[0] / "cifar-100-python", cifar[1]), "train").sample(0, 0).inputs.shape == (3, 32, 32)
    assert cifar_dataset(cifar, "train", image_size=48).sample(0, 0).inputs.shape == (3, 48, 48)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_augmentation_is_a_function_of_seed_epoch_and_index(cifar: tuple[Path, dict[str, str]], split: str) -> None:
    one, again, other = (cifar_dataset(cifar, split, seed) for seed in (1, 1, 2))
    same = [np.array_equal(one.sample(i, 3).inputs, again.sample(i, 3).inputs) for i in (5, 0, 5)]
    epochs = [np.array_equal(one.sample(i, 3).inputs, one.sample(i, 4).inputs) for i in range(7)]
    seeds = [np.array_equal(one.sample(i, 3).inputs, other.sample(i, 3).inputs) for i in range(7)]
    assert all(same)
    assert all(epochs) == all(seeds) == (split == "validation")


def test_wrong_md5_is_refused_before_anything_is_loaded(cifar: tuple[Path, dict[str, str]]) -> None:
    with pytest.raises(UserError, match=f"meta has md5 .*, but the official file has {OFFICIAL_MD5['meta']}") as error:
        CIFAR100Dataset(CIFAR100DataConfig(path=str(cifar[0])), "train", 0)
    assert "cifar-100-python.tar.gz" in error.value.fix


class _Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return builtins.print, ("code was run",)


def test_a_pickle_with_code_is_refused(cifar: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    path = cifar[0] / "cifar-100-python" / "train"
    path.write_bytes(pickle.dumps({"data": _Intruder()}, protocol=2))
    md5 = cifar[1] | {"train": hashlib.md5(path.read_bytes()).hexdigest()}
    with pytest.raises(UserError, match=r"the file refers to \w+.print"):
        cifar_dataset((cifar[0], md5), "train")
    assert "code was run" not in capsys.readouterr().out


def test_wrong_cifar_input(cifar: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory"):
        cifar_dataset((tmp_path / "nowhere", cifar[1]), "train")
    with pytest.raises(UserError, match="n_classes is 10"):
        cifar_dataset(cifar, "train", n_classes=10)
    (cifar[0] / "cifar-100-python" / "test").unlink()
    with pytest.raises(UserError, match="test cannot be read"):
        cifar_dataset(cifar, "validation")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for split, number in (("train", 4), ("validation", 2)):
        for name, color in COLORS.items():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                Image.new("RGB", (40 + index, 30), color).save(folder / f"{index}.{'png' if index % 2 else 'jpg'}")
    return tmp_path


def images(path: Path, split: str = "train", seed: int = 0, **fields: Any) -> ImagesDataset:
    return ImagesDataset(
        ImagesDataConfig(**{"path": str(path), "image_size": 16, "n_classes": 3} | fields), split, seed
    )


@pytest.mark.parametrize("split", ["train", "validation"])
def test_images(pictures: Path, split: str) -> None:
    dataset = images(pictures, split)
    assert len(dataset) == (12 if split == "train" else 6)
    labels = Counter(int(dataset.sample(index, 0).targets) for index in range(len(dataset)))
    assert set(labels) == {0, 1, 2} and len(set(labels.values())) == 1
    for index in range(len(dataset)):
        sample = dataset.sample(index, 0)
        brightest = sample.inputs.mean(axis=(1, 2)).argmax()
        assert sample.inputs.shape == (3, 16, 16) and sample.inputs.dtype == np.uint8
        assert sorted(COLORS)[int(sample.targets)] == ("red", "green", "blue")[brightest]
    assert images(pictures, split, channels=1).sample(0, 0).inputs.shape == (1, 16, 16)


def test_image_augmentation_is_a_function_of_seed_epoch_and_index(pictures: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(pictures / "train" / "blue" / "0.png")
    dataset, again = images(pictures), images(pictures)
    index = next(i for i in range(len(dataset)) if dataset.source(i).endswith("blue/0.png"))
    assert np.array_equal(dataset.sample(index, 1).inputs, again.sample(index, 1).inputs)
    assert not np.array_equal(dataset.sample(index, 1).inputs, dataset.sample(index, 2).inputs)
    assert not np.array_equal(dataset.sample(index, 1).inputs, images(pictures, seed=9).sample(index, 1).inputs)


def test_images_keep_their_order(pictures: Path) -> None:
    """Checkpoints hold positions in the order that the first versions had: all paths of a class, sorted as text."""
    folder = pictures / "train" / "blue"
    for name in (
        "b/0.PNG",
        "b-1.png",
        "b.d/x.Tiff",
        "é.jpg",
        "\udcff.jpg",
        "z/y/x.webp",
        ".jpg",
        "._a.jpg",
        "notes.txt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "link.jpg").symlink_to(folder / "0.jpg")
    (folder / "linked").symlink_to(pictures / "train" / "red")
    expected = [
        str(path)
        for name in sorted(COLORS)
        for path in sorted(map(str, (pictures / "train" / name).rglob("*")))
        if Path(path).suffix.lower() in SUFFIXES and not Path(path).name.startswith(".")
    ]
    dataset = images(pictures)
    assert [dataset.source(index) for index in range(len(dataset))] == expected
    in_folder = [str(folder / name) for name in image_names(folder)]
    assert in_folder == expected[: len(in_folder)] and len(dataset) == 12 + 7
    assert [int(dataset.sample(index, 0).targets) for index in range(11, 19)] == [1] * 4 + [2] * 4


def labels_of(dataset: ImagesDataset | ShardsDataset) -> list[int]:
    return [int(dataset.sample(index, 0).targets) for index in range(len(dataset))]


@pytest.mark.parametrize("empty", [(0,), (1, 2), (0, 3)])
def test_a_class_without_images_has_no_samples(tmp_path: Path, empty: tuple[int, ...]) -> None:
    counts = {label: 0 if label in empty else (3, 2, 1, 1)[label] for label in range(4)}
    for split in ("train", "validation"):
        for label, count in counts.items():
            (tmp_path / split / f"c{label}").mkdir(parents=True)
            for index in range(count):
                Image.new("L", (8, 8), 50 * label).save(tmp_path / split / f"c{label}" / f"{index}.png")
    (tmp_path / "validation" / f"c{empty[0]}").rmdir()
    labels = [label for label, count in counts.items() for _ in range(count)]
    make_shards(tmp_path, tmp_path / "shards", 1 << 20, 1, lambda done, total: None)
    for split in ("train", "validation"):
        dataset = images(tmp_path, split, n_classes=4, channels=1)
        shards = ShardsDataset(ShardsDataConfig(path=str(tmp_path / "shards"), n_classes=4), split, 0)
        assert labels_of(dataset) == labels_of(shards) == labels
        assert [int(dataset.sample(index, 0).inputs[0, 0, 0]) for index in range(len(labels))] == [
            50 * n for n in labels
        ]
        notice = f"{len(empty)} of 4 classes have no training images: {', '.join(f'c{label}' for label in empty)}"
        assert dataset.notice == shards.notice == (notice if split == "train" else "")


def test_submission_and_worker_have_the_same_classes(pictures: Path) -> None:
    assert IMAGE_FOLDERS.check_inputs is not None
    for name in (".ipynb_checkpoints", "@eaDir", "__MACOSX", "lost+found", ".git"):
        (pictures / "train" / name).mkdir()
        (pictures / "validation" / "red" / name).mkdir()
        (pictures / "validation" / "red" / name / "0.png").touch()
    (pictures / "validation" / "red" / "._0.png").touch()
    IMAGE_FOLDERS.check_inputs(ImagesDataConfig(path=str(pictures), n_classes=3))
    assert len(images(pictures)) == 12 and len(images(pictures, "validation")) == 6
    (pictures / "train" / "violet").mkdir()
    for check in (IMAGE_FOLDERS.check_inputs, lambda config: ImagesDataset(config, "train", 0)):
        with pytest.raises(UserError, match=r"has 4 class directories, but data.n_classes is 3"):
            check(ImagesDataConfig(path=str(pictures), n_classes=3))


RAMP = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257  # 0 to 65535
CORNER = np.zeros((4, 6, 3), np.uint8)
CORNER[0, 0] = 255


def pixels_of(path: Path, mode: str = "L") -> Array:
    return np.asarray(open_image(str(path), path.name, mode))


def test_16_bits_are_scaled(tmp_path: Path) -> None:
    for name in ("deep.png", "deep.tif"):
        Image.fromarray(RAMP).save(tmp_path / name)
    (tmp_path / "deep.ppm").write_bytes(b"P5\n16 16\n65535\n" + RAMP.astype(">u2").tobytes())
    for name in ("deep.png", "deep.tif", "deep.ppm"):
        assert pixels_of(tmp_path / name).ravel().tolist() == list(range(256)), name
        assert np.array_equal(pixels_of(tmp_path / name, "RGB")[..., 2], pixels_of(tmp_path / name)), name
    Image.fromarray(RAMP).save(tmp_path / "hole.png", transparency=257)
    assert pixels_of(tmp_path / "hole.png")[0, :3].tolist() == [0, 255, 2]


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_without_a_range_are_refused_by_name(pictures: Path, dtype: type) -> None:
    path = pictures / "train" / "red" / "1.tif"
    Image.fromarray(np.ones((8, 8), dtype)).save(path)
    dataset = images(pictures)
    (index,) = [index for index in range(len(dataset)) if dataset.source(index) == str(path)]
    with pytest.raises(UserError, match=f"{path} contains"):
        dataset.sample(index, 0)
    with pytest.raises(UserError, match=f"{path} contains"):
        make_shards(pictures, pictures / "shards", 1 << 20, 1, lambda done, total: None)


def test_transparent_pixels_are_white(tmp_path: Path) -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[..., 0], pixels[0, :, 3] = 200, 255  # red, and transparent in the second row
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "rgba.png")
    picture.quantize(4).save(tmp_path / "palette.png")
    picture.convert("LA").save(tmp_path / "gray.png")
    Image.new("RGB", (2, 2), (200, 0, 0)).save(tmp_path / "key.png", transparency=(200, 0, 0))
    for name in ("rgba.png", "palette.png"):
        assert pixels_of(tmp_path / name, "RGB")[:, 0].tolist() == [[200, 0, 0], [255, 255, 255]], name
    assert pixels_of(tmp_path / "gray.png")[:, 0].tolist() == [60, 255]
    assert pixels_of(tmp_path / "key.png").tolist() == [[255, 255], [255, 255]]


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_images_are_upright(tmp_path: Path, suffix: str) -> None:
    corners = {1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (0, -1), 7: (-1, -1), 8: (-1, 0)}
    for orientation, corner in corners.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"lossless": True} if suffix == "webp" else {}
        Image.fromarray(CORNER).save(tmp_path / f"a.{suffix}", exif=exif, **options)
        found = pixels_of(tmp_path / f"a.{suffix}")
        assert found.shape == ((4, 6) if orientation < 5 else (6, 4))
        assert found[corner] == 255 and found.sum() == 255, orientation


def test_colors_of_print_become_rgb(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), (250, 120, 10)).convert("CMYK").save(tmp_path / "a.jpg", quality=100)
    assert np.abs(pixels_of(tmp_path / "a.jpg", "RGB").astype(int) - (250, 120, 10)).max() <= 3
    Image.new("LAB", (8, 8)).save(tmp_path / "lab.tif")
    with pytest.raises(UserError, match=r"lab\.tif contains LAB colors"):
        pixels_of(tmp_path / "lab.tif", "RGB")


def private_memory() -> int:
    """Returns the bytes that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


def growth(read: Callable[[int], str], indices: range) -> int:
    """Returns by how many bytes the private memory of a forked process grows while it reads the names."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        before = private_memory()
        for index in indices:
            read(index)
        os.write(sending, str(private_memory() - before).encode())
        os._exit(0)
    os.close(sending)
    grown = int(os.read(receiving, 100))
    os.close(receiving)
    assert os.waitpid(child, 0)[1] == 0
    return grown


@pytest.mark.long_form(6)
def test_loader_processes_share_the_names_of_the_files(pictures: Path) -> None:
    for number in range(40_000):
        (pictures / "train" / "red" / f"n01440764_{number:07d}.JPEG").touch()
    dataset = images(pictures)
    indices = range(0, len(dataset), 8)
    as_objects = [dataset.source(index) for index in range(len(dataset))]  # reading one changes its reference count
    assert growth(dataset.source, indices) < growth(as_objects.__getitem__, indices) / 2


def test_a_directory_that_cannot_be_read_is_named(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pictures / "train" / "red" / "more").mkdir()
    scan = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="red/more cannot be read: Permission denied"):
        images(pictures)


def test_wrong_images(pictures: Path, tmp_path: Path) -> None:
    for path, fields, message in (
        (tmp_path / "nowhere", {}, "is not a directory"),
        (pictures, {"n_classes": 4}, "has 3 class directories, but data.n_classes is 4"),
        (pictures, {"channels": 2}, "data.channels is 2"),
    ):
        with pytest.raises(UserError, match=message) as error:
            images(path, **fields)
        assert error.value.fix
    (pictures / "validation" / "violet").mkdir()
    with pytest.raises(UserError, match="train/ lacks: violet"):
        images(pictures, "validation")
    for file in (pictures / "train").rglob("*.*"):
        file.unlink()
    with pytest.raises(UserError, match="contains no images"):
        images(pictures)


def test_pillow_is_an_extra(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UserError, match="needs Pillow") as error:
        images(pictures)
    assert "[images]" in error.value.fix


def test_crops_stay_inside() -> None:
    pixels = np.arange(3 * 8 * 8).reshape(3, 8, 8)
    places = set()
    for index in range(200):
        cropped = shifted_crop(pixels, 2, generator(0, 0, index))
        assert cropped.shape == (3, 8, 8)
        places.add(cropped.tobytes())
        left, top, right, bottom = random_box(100, 7, generator(0, 0, index))
        assert 0 <= left < right <= 100 and 0 <= top < bottom <= 7
    assert len(places) == 25
