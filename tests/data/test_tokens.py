from __future__ import annotations

import json
import mmap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.commands.prepare import main
from hpc_train.config.schema import TextDataConfig, TokensDataConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import IGNORED
from hpc_train.data.tokens import PackedDataset, TokensDataset, pack, pieces_of
from hpc_train.errors import UserError


def write(directory: Path, written: str = "uint16", **changes: object) -> Path:
    tokens = {"train": np.arange(1000) % 500, "validation": np.arange(101) % 500}
    for split, values in tokens.items():
        (directory / f"{split}.bin").write_bytes(values.astype({"uint16": "<u2", "uint32": "<u4"}[written]).tobytes())
    meta = {"dtype": written, "vocab_size": 500, "counts": {"train": 1000, "validation": 101}, "source": {}}
    (directory / "meta.json").write_text(json.dumps(meta | changes))
    return directory


def dataset(directory: Path, split: str = "train", vocab_size: int = 500, sequence_length: int = 10) -> TokensDataset:
    return TokensDataset(
        TokensDataConfig(path=str(directory), sequence_length=sequence_length, vocab_size=vocab_size), split
    )


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows(tmp_path: Path, dtype: str) -> None:
    tokens = dataset(write(tmp_path, dtype))
    assert len(tokens) == 99  # the hundredth has no token behind it
    sample = tokens.sample(98, 0)
    assert sample.inputs.tolist() == list(range(480, 490))
    assert sample.targets.tolist() == list(range(481, 491))
    assert sample.inputs.dtype == sample.targets.dtype == np.int64
    assert len(dataset(tmp_path, "validation")) == 10


def test_the_pages_of_a_sample_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meta.json").write_text(
        json.dumps({"dtype": "uint16", "vocab_size": 500, "counts": {"train": 100_000}, "source": {}})
    )
    (tmp_path / "train.bin").write_bytes((np.arange(100_000) % 500).astype("<u2").tobytes())
    tokens = dataset(tmp_path, sequence_length=1000)
    advised = []

    class Mapped:
        def madvise(self, advice: int, start: int, length: int) -> None:
            assert advice == mmap.MADV_WILLNEED
            advised.append((start, start + length))

    tokens.prefetch(len(tokens) - 1)  # of the file itself
    monkeypatch.setattr(tokens._tokens, "_mmap", Mapped())
    tokens.prefetch(50)
    ((first, end),) = advised
    assert first % mmap.PAGESIZE == 0 and first <= 2 * 50_000 < first + mmap.PAGESIZE and end == 2 * 51_001


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"vocab_size": -1}, "vocab_size -1"),
        ({"counts": {"train": 999, "validation": 101}}, "states 999 tokens"),
        ({"counts": {}}, "states None tokens"),
        ({"counts": 7}, "not a valid description"),
        ({"vocab_size": "many"}, "not a valid description"),
        ({"surprise": 1}, "not a valid description"),
        ({"vocab_size": 501}, "but data.vocab_size is 500"),
    ],
)
def test_bad_meta(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        dataset(write(tmp_path, **changes))  # type: ignore[arg-type]
    assert error.value.fix and error.value.where


def test_no_json(tmp_path: Path) -> None:
    (write(tmp_path) / "meta.json").write_text("{")
    with pytest.raises(UserError, match="not a valid description of token files"):
        dataset(tmp_path)


@pytest.mark.parametrize("missing", ["meta.json", "train.bin"])
def test_missing_files(tmp_path: Path, missing: str) -> None:
    (write(tmp_path) / missing).unlink()
    with pytest.raises(UserError, match=f"{missing} cannot be read"):
        dataset(tmp_path)


def test_other_damage(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory"):
        dataset(tmp_path / "nowhere")
    write(tmp_path)
    with pytest.raises(UserError, match="but one sequence needs"):
        dataset(tmp_path, sequence_length=1000)
    (tmp_path / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match="is empty"):
        dataset(tmp_path)
    (tmp_path / "train.bin").write_bytes(bytes(1999))
    with pytest.raises(UserError, match="has 1999 bytes"):
        dataset(tmp_path)


def test_a_token_outside_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    tokens = dataset(write(tmp_path, vocab_size=495), vocab_size=495)
    with pytest.raises(
        UserError, match=r"train.bin contains token id 499 after token \d+, but the vocabulary has 495 tokens"
    ):
        tokens.sample(49, 0)


@pytest.mark.parametrize("seed", range(5))
def test_every_piece_has_a_place_and_sequences_are_nearly_full(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.geometric(1 / 60, size=2000)
    starts, sizes = pieces_of(lengths, 128)
    assert sizes.sum() == (lengths - 1).sum() and sizes.min() >= 1 and sizes.max() <= 128
    assert len(set(starts.tolist())) == len(starts)
    places = pack(sizes, 128)
    filled = np.bincount(places, weights=sizes)
    assert filled.max() <= 128 and filled.min() >= 1
    assert filled.sum() / (128 * len(filled)) > 0.97
    assert (pack(sizes, 128) == places).all()


def one_by_one(sizes: list[int], sequence_length: int) -> list[int]:
    """Returns what ``pack`` returned in the first versions, which checkpoints rely on: best-fit decreasing, and of
    several sequences with the least sufficient room the one that got it last."""
    sequence_of, with_room, count = [0] * len(sizes), [list[int]() for _ in range(sequence_length + 1)], 0
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        room = next((room for room in range(sizes[piece], sequence_length + 1) if with_room[room]), None)
        if room is None:
            sequence, room, count = count, sequence_length, count + 1
        else:
            sequence = with_room[room].pop()
        sequence_of[piece] = sequence
        if room > sizes[piece]:
            with_room[room - sizes[piece]].append(sequence)
    return sequence_of


@settings(deadline=None, max_examples=300)
@given(length=st.integers(1, 40), data=st.data())
def test_packing_never_changes(length: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, length), max_size=200))
    assert pack(np.array(sizes, np.int64), length).tolist() == one_by_one(sizes, length)


@pytest.mark.parametrize("mean", [3, 60, 400])
def test_packing_of_many_documents_never_changes(mean: int) -> None:
    _, sizes = pieces_of(np.random.default_rng(mean).geometric(1 / mean, size=20_000), 512)
    assert pack(sizes, 512).tolist() == one_by_one(sizes.tolist(), 512)


@pytest.mark.long_form(5)
def test_a_million_documents_are_packed_sooner_than_a_few_one_by_one() -> None:
    """It runs in each rank at each start. Both take processor time of the same machine in the same test."""
    _, sizes = pieces_of(np.random.default_rng(0).lognormal(6.2, 1.0, 1_000_000).astype("<u4") + 2, 4096)
    began = time.process_time()
    pack(sizes, 4096)
    packed = time.process_time()
    one_by_one(sizes[:15_000].tolist(), 4096)
    assert packed - began < time.process_time() - packed


def test_long_documents_are_cut_without_losing_a_target() -> None:
    starts, sizes = pieces_of(np.array([1, 10, 0, 5, 9]), 4)
    assert starts.tolist() == [1, 5, 9, 11, 16, 20] and sizes.tolist() == [4, 4, 1, 4, 4, 4]


def test_prepared_documents_are_found_again(tmp_path: Path) -> None:
    texts = [f"document {number} " + "x" * (number * 7 % 90) for number in range(200)]
    source = tmp_path / "documents.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "out"
    assert main([str(source), "--out", str(out), "--validation-share", "0.1", "--workers", "1"]) == 0
    config = TokensDataConfig(path=str(out), sequence_length=64, vocab_size=256, packing=True)
    found = []
    for split in ("train", "validation"):
        dataset = build_dataset(config, split, 0)
        assert isinstance(dataset, PackedDataset) and 0.8 < dataset.fill <= 1
        for index in range(len(dataset)):
            sample = dataset.sample(index, 0)
            ids, positions = sample.context["document_ids"], sample.context["positions"]
            assert sample.inputs.shape == sample.targets.shape == ids.shape == positions.shape == (64,)
            for number in range(int(ids.max()) + 1):
                own = ids == number
                assert positions[own].tolist() == list(range(own.sum()))
                assert (sample.inputs[own][1:] == sample.targets[own][:-1]).all() and IGNORED not in sample.targets[own]
                found.append(bytes([*sample.inputs[own].tolist(), int(sample.targets[own][-1])]).decode())
            assert (sample.targets[ids == -1] == IGNORED).all()
    short = sorted(text for text in texts if len(text) <= 65)
    assert [text for text in sorted(found) if text in set(short)] == short
    assert sum(len(piece) - 1 for piece in found) == sum(len(text) - 1 for text in texts)
    (out / "train.documents").unlink()
    with pytest.raises(UserError, match=r"train.documents cannot be read"):
        build_dataset(config, "train", 0)


def test_one_document_is_cut_where_validation_begins(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a" * 1000)
    out = tmp_path / "out"
    assert main([str(tmp_path / "one.txt"), "--out", str(out), "--validation-share", "0.1", "--workers", "1"]) == 0
    lengths = {split: np.fromfile(out / f"{split}.documents", "<u4").tolist() for split in ("train", "validation")}
    assert lengths == {"train": [900], "validation": [100]}


def test_files_of_text_are_documents(tmp_path: Path) -> None:
    texts = {f"{number}.py": f"# file {number}\n" + "x" * (number * 11 % 70) for number in range(40)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    config = TextDataConfig(path=str(tmp_path), sequence_length=128, validation_share=0.2, packing=True)
    found = []
    for split in ("train", "validation"):
        dataset = build_dataset(config, split, 0)
        assert isinstance(dataset, PackedDataset) and dataset.lengths is not None
        for index in range(len(dataset)):
            sample = dataset.sample(index, 0)
            ids = sample.context["document_ids"]
            assert dataset.lengths[index] == (ids >= 0).sum()
            for number in range(int(ids.max()) + 1):
                own = ids == number
                found.append(bytes([*sample.inputs[own].tolist(), int(sample.targets[own][-1])]).decode())
            first = bytes(sample.inputs[ids == 0].tolist()).decode()
            assert Path(dataset.source(index)).read_text().startswith(first)
    assert sorted(found) == sorted(texts.values())
