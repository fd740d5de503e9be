from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpc_train.config.schema import TokensDataConfig
from hpc_train.data.tokens import TokensDataset
from hpc_train.errors import UserError


def write(directory: Path, written: str = "uint16", **changes: object) -> Path:
    tokens = {"train": np.arange(1000) % 500, "validation": np.arange(101) % 500}
    for split, values in tokens.items():
        (directory / f"{split}.bin").write_bytes(values.astype({"uint16": "<u2", "uint32": "<u4"}[written]).tobytes())
    meta = {"dtype": written, "vocab_size": 500, "counts": {"train": 1000, "validation": 101}, "source": {}}
    (directory / "meta.json").write_text(json.dumps(meta | changes))
    return directory


def dataset(directory: Path, split: str = "train", vocab_size: int = 500, sequence_length: int = 10) -> TokensDataset:
    return TokensDataset(TokensDataConfig("tokens", str(directory), sequence_length, vocab_size), split)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows(tmp_path: Path, dtype: str) -> None:
    tokens = dataset(write(tmp_path, dtype))
    assert len(tokens) == 99  # the hundredth has no token behind it
    sample = tokens.sample(98, 0)
    assert sample.inputs.tolist() == list(range(480, 490))
    assert sample.targets.tolist() == list(range(481, 491))
    assert sample.inputs.dtype == sample.targets.dtype == np.int64
    assert len(dataset(tmp_path, "validation")) == 10


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
