"""Datasets that open files in their constructor, whose position forked loader processes would share."""

from __future__ import annotations

import mmap
import os
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_train.config.schema import BatchConfig, CustomDataConfig, MixtureDataConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.feed import TrainFeed, loader_workers
from hpc_train.errors import UserError
from tests.data.layouts import replicas

ROWS, WIDTH = 64, 4096  # larger than the buffers of Python


class Records:
    """Item k is k, read from a file in one of several ways."""

    def __init__(self, split: str, how: str, path: str) -> None:
        self.how, self.file = how, Path(path)
        self.opened: Any = None if how == "lazy" else self.open(how)

    def open(self, how: str) -> Any:
        openers: dict[str, Callable[[], Any]] = {
            "zip": lambda: zipfile.ZipFile(self.file.with_suffix(".zip")),
            "npz": lambda: np.load(self.file.with_suffix(".npz")),
            "sqlite": lambda: sqlite3.connect(self.file.with_suffix(".sqlite")),
            "memmap": lambda: np.memmap(self.file, dtype=np.int64, mode="r").reshape(ROWS, -1),
            "mmap": self.mapped,
            "log": lambda: self.file.with_suffix(".log").open("a"),
        }
        return openers.get(how, lambda: self.file.open("rb"))()

    def mapped(self) -> mmap.mmap:
        with self.file.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        value = np.frombuffer(self.read(index)[:8], np.int64)
        return value.copy(), value.copy()

    def read(self, index: int) -> bytes:
        query = "select content from items where k = ?"
        readers: dict[str, Callable[[], Any]] = {
            "zip": lambda: self.opened.read(f"{index}"),
            "npz": lambda: memoryview(self.opened["items"][index]),
            "sqlite": lambda: self.opened.execute(query, (index,)).fetchone()[0],
            "memmap": lambda: memoryview(self.opened[index]),
            "mmap": lambda: self.opened[index * WIDTH : (index + 1) * WIDTH],
            "pread": lambda: os.pread(self.opened.fileno(), WIDTH, index * WIDTH),
        }
        return bytes(readers.get(self.how, lambda: self.sought(index))())

    def sought(self, index: int) -> bytes:
        if self.how == "log":
            self.opened.write("item\n")
        file = self.open("lazy") if self.how in ("lazy", "log") else self.opened
        file.seek(index * WIDTH)
        return bytes(file.read(WIDTH))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [np.full(WIDTH // 8, index, np.int64).tobytes() for index in range(ROWS)]
    (tmp_path / "rows.bin").write_bytes(b"".join(rows))
    (tmp_path / "rows.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    np.savez(tmp_path / "rows.npz", items=np.arange(ROWS).repeat(2).reshape(ROWS, 2))
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        for index, row in enumerate(rows):
            archive.writestr(f"{index}", row)
    database = sqlite3.connect(tmp_path / "rows.sqlite")
    database.execute("create table items (k integer, content blob)")
    database.executemany("insert into items values (?, ?)", enumerate(rows))
    database.commit()
    database.close()
    return tmp_path / "rows.bin"


def config(path: Path, how: str) -> CustomDataConfig:
    return CustomDataConfig(_target_=f"{__name__}.Records", args={"how": how, "path": str(path)})


@pytest.mark.parametrize(("how", "suffix"), [("seek", ".bin"), ("zip", ".zip"), ("npz", ".npz"), ("sqlite", ".sqlite")])
def test_a_file_that_loader_processes_would_share_is_found(path: Path, how: str, suffix: str) -> None:
    file = str(path.with_suffix(suffix))
    dataset = build_dataset(config(path, how), "train", 0)
    assert dataset.shared_file == file
    assert loader_workers(BatchConfig(loader_workers="auto"), dataset, 1) == 0
    assert loader_workers(BatchConfig(loader_workers=0), dataset, 1) == 0
    with pytest.raises(UserError, match="would share the position") as error:
        loader_workers(BatchConfig(loader_workers=2), dataset, 1)
    assert file in str(error.value) and "batch.loader_workers=0" in error.value.fix
    batch = BatchConfig(global_size=16, loader_workers="auto")
    feed = TrainFeed(dataset, batch, replicas(1, 16), 0, 0, torch.device("cpu"), 0)
    micro_batches = [micro for _ in range(4) for micro in next(feed).micro_batches]
    samples = [index for micro in micro_batches for index in micro.samples]
    assert [int(value) for micro in micro_batches for value in micro.inputs[:, 0]] == samples and len(samples) == ROWS
    feed.close()


def test_the_format_tells_which_files_must_not_be_used_after_a_fork(path: Path) -> None:
    dataset = build_dataset(config(path.with_suffix(".h5"), "pread"), "train", 0)
    assert dataset.shared_file == str(path.with_suffix(".h5"))


@pytest.mark.parametrize("how", ["lazy", "memmap", "mmap", "pread", "log"])
def test_files_that_are_not_shared_are_no_false_alarm(path: Path, how: str) -> None:
    dataset = build_dataset(config(path, how), "train", 0)
    assert dataset.shared_file == ""
    assert loader_workers(BatchConfig(loader_workers=2), dataset, 1) == 2


def test_a_mixture_has_the_shared_files_of_its_sources(path: Path) -> None:
    sources = {
        how: {"kind": "custom", "_target_": f"{__name__}.Records", "args": {"how": how, "path": str(path)}}
        for how in ("lazy", "seek")
    }
    assert build_dataset(MixtureDataConfig(sources=sources), "train", 0).shared_file == str(path)


def test_an_item_that_fails_is_reported_by_the_loader(path: Path) -> None:
    path.with_suffix(".zip").write_bytes(b"")
    with pytest.raises(Exception, match="zip"):
        build_dataset(config(path, "zip"), "train", 0)
    os.truncate(path, WIDTH)  # most items are missing
    assert build_dataset(config(path, "seek"), "train", 0).shared_file == str(path)
