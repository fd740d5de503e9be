"""The hash by which a run recognizes its data: that of a copy is equal, that of other files is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpc_train.commands.prepare import main
from hpc_train.config.schema import (
    DataConfig,
    ImagesDataConfig,
    SFTDataConfig,
    ShardsDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from hpc_train.data.build import build_dataset
from tests.data.chats import chats, write_jsonl, write_tokenizer


def write_texts(folder: Path) -> None:
    for number in range(20):
        (folder / f"{number:02d}.py").write_text(f"a text of some words {number:02d}\n" * 9)


def write_tokens(folder: Path) -> None:
    write_texts(folder)
    assert main([*map(str, folder.glob("*.py")), "--out", str(folder / "out"), "--workers", "1"]) == 0


def write_pictures(folder: Path) -> None:
    for split in ("train", "validation"):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (8, 8)).save(folder / split / name / f"{number}.png")


def write_shards(folder: Path) -> None:
    write_pictures(folder)
    assert main(["--images", str(folder), "--out", str(folder / "out")]) == 0


def write_chats(folder: Path) -> None:
    pytest.importorskip("transformers")
    write_tokenizer(folder / "tokenizer")
    write_jsonl(folder / "chats.jsonl", chats(9))


def change_chats(folder: Path) -> None:
    lines = (folder / "chats.jsonl").read_text().splitlines()
    (folder / "chats.jsonl").write_text("\n".join(reversed(lines)))


def change_tokens(folder: Path) -> None:
    shutil.rmtree(folder / "out")
    (folder / "05.py").write_text("a text of some words 05\n" * 9 + "x")
    assert main([*map(str, folder.glob("*.py")), "--out", str(folder / "out"), "--workers", "1"]) == 0


Change = Callable[[Path], object]
Config = Callable[[Path], DataConfig]
KINDS: dict[str, tuple[Change, Change, Config]] = {
    "text": (
        write_texts,
        lambda folder: (folder / "05.py").rename(folder / "25.py"),
        lambda folder: TextDataConfig(path=str(folder), sequence_length=8),
    ),
    "packed": (
        write_texts,
        lambda folder: (folder / "05.py").rename(folder / "25.py"),
        lambda folder: TextDataConfig(path=str(folder), sequence_length=8, packing=True),
    ),
    "tokens": (
        write_tokens,
        change_tokens,
        lambda folder: TokensDataConfig(path=str(folder / "out"), sequence_length=8, vocab_size=256),
    ),
    "images": (
        write_pictures,
        lambda folder: (folder / "train/cat/1.png").rename(folder / "train/cat/9.png"),
        lambda folder: ImagesDataConfig(path=str(folder), image_size=8, n_classes=2),
    ),
    "shards": (
        write_shards,
        lambda folder: np.save(folder / "out/train.index.npy", np.load(folder / "out/train.index.npy")[::-1]),
        lambda folder: ShardsDataConfig(path=str(folder / "out"), image_size=8, n_classes=2),
    ),
    "sft": (
        write_chats,
        change_chats,
        lambda folder: SFTDataConfig(
            path=str(folder / "chats.jsonl"),
            tokenizer=str(folder / "tokenizer"),
            cache=str(folder / "cache"),
            vocab_size=300,
            sequence_length=512,
        ),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_the_same_data_and_another_file_is_not(tmp_path: Path, kind: str) -> None:
    write, change, config = KINDS[kind]
    (tmp_path / "one").mkdir()
    write(tmp_path / "one")
    before = build_dataset(config(tmp_path / "one"), "train", 0).identity
    shutil.copytree(tmp_path / "one", tmp_path / "copy", copy_function=shutil.copy)
    assert build_dataset(config(tmp_path / "copy"), "train", 0).identity == before and before["fingerprint"]
    change(tmp_path / "copy")
    changed = build_dataset(config(tmp_path / "copy"), "train", 0).identity
    assert changed["fingerprint"] != before["fingerprint"]
