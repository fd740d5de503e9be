"""Tar shards give what the class folders give that they were made of, in any order and any process."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpc_train.commands.prepare import main
from hpc_train.config.schema import ImagesDataConfig, ShardsDataConfig
from hpc_train.data.image_shards import ShardsDataset
from hpc_train.data.images import ImagesDataset
from hpc_train.errors import UserError
from tests.doors.schema import check_output


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for split, number in (("train", 5), ("validation", 2)):
        for name in ("cat", "dog", "emu"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                pixels = random.integers(0, 256, (20 + index, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path


def prepare(folder: Path, *arguments: str) -> int:
    return main(["--images", str(folder / "images"), "--out", str(folder / "shards"), *arguments])


def sums(dataset: ShardsDataset, indices: list[int]) -> list[float]:
    return [float(np.abs(dataset.sample(index, 3).inputs).sum()) for index in indices]


def test_shards_hold_what_the_folders_hold(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.commands.prepare.MIB", 1)
    assert prepare(pictures, "--shard-mib", "4000") == 0  # of bytes, here
    assert len(list((pictures / "shards").glob("train-*.tar"))) > 2
    folders = ImagesDataConfig(path=str(pictures / "images"), image_size=16, n_classes=3)
    packed = ShardsDataConfig(path=str(pictures / "shards"), image_size=16, n_classes=3)
    for split, number in (("train", 15), ("validation", 6)):
        one, other = ImagesDataset(folders, split, 1), ShardsDataset(packed, split, 1)
        assert len(one) == len(other) == number and one.classes == other.classes
        for index in np.random.default_rng(0).permutation(number).tolist():
            wanted, found = one.sample(index, 2), other.sample(index, 2)
            assert (wanted.inputs == found.inputs).all() and wanted.targets == found.targets
    assert "train-000000.tar, bytes" in ShardsDataset(packed, "train", 1).source(0)


def test_processes_that_share_an_open_shard_do_not_disturb_each_other(pictures: Path) -> None:
    assert prepare(pictures) == 0
    dataset = ShardsDataset(ShardsDataConfig(path=str(pictures / "shards"), image_size=16, n_classes=3), "train", 0)
    expected = sums(dataset, list(range(15)))  # the shard is open now
    orders = [list(np.random.default_rng(seed).permutation(15)) * 10 for seed in range(3)]
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in orders]
    readers = [
        fork.Process(target=lambda order, to: to.send(sums(dataset, order)), args=(order, pipe[1]))
        for order, pipe in zip(orders, pipes, strict=True)
    ]
    for reader in readers:
        reader.start()
    for order, pipe in zip(orders, pipes, strict=True):
        assert pipe[0].poll(60) and pipe[0].recv() == [expected[index] for index in order]
    for reader in readers:
        reader.join()


def test_the_directory_is_whole_once_and_webdataset_reads_it(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(pictures, "--json") == 0
    printed = capsys.readouterr().out
    check_output(["prepare"], printed)
    first = json.loads(printed)
    shard = pictures / "shards" / "train-000000.tar"
    before = shard.stat().st_mtime_ns
    assert prepare(pictures) == 0 and shard.stat().st_mtime_ns == before
    with tarfile.open(shard) as tar:
        names = tar.getnames()
        label = tar.extractfile("0000014.cls")
        assert names[:2] == ["0000000.png", "0000000.cls"] and len(names) == 30
        assert label is not None and label.read() == b"2"
    assert first["classes"] == ["cat", "dog", "emu"] and first["counts"] == {"train": 15, "validation": 6}
    Image.new("RGB", (8, 8)).save(pictures / "images" / "train" / "cat" / "new.png")
    with pytest.raises(UserError, match="other images"):
        prepare(pictures)


def test_killed_in_the_middle_it_goes_on(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first image is a pipe, at which one of two workers waits while the other finishes the other shards."""
    first, shards = pictures / "images" / "train" / "cat" / "0.png", pictures / "shards"
    first.unlink()
    os.mkfifo(first)
    code = "import sys\nfrom hpc_train.commands import prepare\nprepare.MIB = 1\nprepare.main(sys.argv[1:])"
    arguments = ["--images", str(pictures / "images"), "--out", str(shards), "--shard-mib", "4000"]
    with subprocess.Popen([sys.executable, "-c", code, *arguments, "--workers", "2"]) as process:
        try:
            deadline = time.monotonic() + 60
            while len(list(shards.glob(".image-shards/[tv]*.npy"))) < 4 + 2:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            with pytest.raises(UserError, match=f"process {process.pid} on .* is preparing"):
                prepare(pictures)
        finally:
            process.kill()
    first.unlink()
    first.touch()
    monkeypatch.setattr("hpc_train.commands.prepare.MIB", 1)
    with pytest.raises(UserError, match="other images"):
        prepare(pictures, "--shard-mib", "5000")
    kept = {path: path.stat().st_ino for path in shards.glob("*.tar")}
    assert main(arguments) == 0
    assert kept and all(path.stat().st_ino == inode for path, inode in kept.items())
    assert main([*arguments[:3], str(pictures / "whole"), *arguments[4:], "--workers", "1"]) == 0
    names = sorted(path.name for path in shards.iterdir() if path.is_file())
    assert names == sorted(path.name for path in (pictures / "whole").iterdir() if path.is_file())
    assert all((shards / name).read_bytes() == (pictures / "whole" / name).read_bytes() for name in names)
    assert not (shards / ".image-shards").exists()


def test_damage_is_told(pictures: Path) -> None:
    assert prepare(pictures) == 0
    config = ShardsDataConfig(path=str(pictures / "shards"), image_size=16, n_classes=3)
    shard = pictures / "shards" / "train-000000.tar"
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(OSError, match="ends before byte"):
        ShardsDataset(config, "train", 0).sample(14, 0)
    with pytest.raises(UserError, match="has 3 classes"):
        ShardsDataset(ShardsDataConfig(path=config.path, n_classes=4), "train", 0)
    (pictures / "shards" / "train.index.npy").unlink()
    with pytest.raises(UserError, match=r"train.index.npy cannot be read"):
        ShardsDataset(config, "train", 0)
