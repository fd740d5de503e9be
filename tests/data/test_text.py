from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hpc_train.config.schema import TextDataConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.files import find_text_files
from hpc_train.data.text import TextDataset, split_files
from hpc_train.errors import UserError

CONTENT = {f"{folder}/{name}.txt": f"{folder}-{name} ".encode() * (3 * name) for folder in "ab" for name in range(30)}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "b" / "other.md").write_text("not asked for")
    (tmp_path / "b" / "site-packages").mkdir()
    (tmp_path / "b" / "site-packages" / "package.txt").write_text("not entered")
    return tmp_path


def config(path: Path | str | None, **fields: object) -> TextDataConfig:
    return TextDataConfig(**{"path": str(path), "pattern": "**/*.txt", "sequence_length": 16} | fields)  # type: ignore[arg-type]


def split(texts: Path, name: str, **fields: object) -> TextDataset:
    return TextDataset(config(texts, validation_share=0.3, **fields), name)


def test_files_are_split_without_overlap(texts: Path) -> None:
    train, validation = ({file.name for file in split(texts, name).files} for name in ("train", "validation"))
    assert not train & validation
    assert train | validation == {name for name, content in CONTENT.items() if content}
    assert 8 <= len(validation) <= 30  # 18 expected


def test_a_new_file_moves_no_other(texts: Path) -> None:
    before = {file.name for file in split(texts, "validation").files}
    (texts / "new.txt").write_text("new")
    assert {file.name for file in split(texts, "validation").files} - {"new.txt"} == before


@pytest.mark.parametrize("name", ["train", "validation"])
def test_windows_cover_the_text(texts: Path, name: str) -> None:
    dataset = split(texts, name)
    text = b"".join(CONTENT[file.name] for file in sorted(dataset.files, key=lambda file: file.name))
    samples = [dataset.sample(index, 0) for index in range(len(dataset))]
    assert len(samples) == (len(text) - 1) // 16
    inputs = np.concatenate([sample.inputs for sample in samples])
    targets = np.concatenate([sample.targets for sample in samples])
    assert bytes(inputs.astype(np.uint8)) == text[: len(inputs)]
    assert bytes(targets.astype(np.uint8)) == text[1 : len(inputs) + 1]
    assert {sample.inputs.dtype for sample in samples} == {np.dtype(np.int64)}
    assert {sample.inputs.shape for sample in samples} == {(16,)}


def test_a_sample_knows_its_file(texts: Path) -> None:
    dataset = split(texts, "train")
    for index in range(len(dataset)):
        file = next(file for file in dataset.files if file.path == dataset.source(index))
        assert dataset.sample(index, 0).inputs[0] in CONTENT[file.name]


@pytest.mark.parametrize("pattern", ["a/*.txt", "**/a/*.txt", "a/**/*.txt", "a/[0-9]*.txt", "a/?.txt", "a/[!x]*.txt"])
def test_patterns_are_those_of_pathlib(texts: Path, pattern: str) -> None:
    expected = {path.relative_to(texts).as_posix() for path in texts.glob(pattern) if path.stat().st_size}
    assert {file.name for file in find_text_files(str(texts), pattern)} == expected
    assert {Path(file.path) for file in find_text_files(f"{texts}/{pattern}", "")} == {
        texts / name for name in expected
    }


def test_a_single_file_has_its_end_as_validation(tmp_path: Path) -> None:
    path = tmp_path / "shakespeare.txt"
    path.write_bytes(bytes(range(200)) * 10)
    train, validation = (TextDataset(config(path, validation_share=0.1), name) for name in ("train", "validation"))
    assert (len(train), len(validation)) == (1799 // 16, 199 // 16)
    assert validation.sample(0, 0).inputs[0] == 1800 % 200


def test_no_side_is_empty(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("x" * 100)
    for share in (0.001, 0.999):
        sides = split_files(find_text_files(str(tmp_path), "*.txt"), share)
        assert min(len(files) for files in sides.values()) == 1


def test_the_standard_library_is_the_default() -> None:
    train, validation = (build_dataset(TextDataConfig(), name, seed=0) for name in ("train", "validation"))
    assert len(train) > 10_000 and len(validation) > 100
    assert len(train.sample(len(train) - 1, 0).inputs) == 256
    assert "torch" not in train.source(0)
    assert f"python{sys.version_info.major}.{sys.version_info.minor}" in train.source(0)


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (lambda path: path / "nowhere", {}, "does not exist"),
        (lambda path: path / "nowhere" / "*.txt", {}, "does not exist"),
        (lambda path: path, {"pattern": "*.none"}, "no text in"),
        (lambda path: path, {"sequence_length": 10**6}, "but one sequence needs"),
        (lambda path: path, {"vocab_size": 255}, "vocab_size is 255"),
    ],
)
def test_wrong_input(texts: Path, make, fields: dict[str, object], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=message) as error:
        TextDataset(config(make(texts), **fields), "train")
    assert error.value.fix and error.value.where


def test_an_unreadable_file_is_named(texts: Path) -> None:
    (texts / "a" / "dangling.txt").symlink_to(texts / "nowhere")
    with pytest.raises(UserError, match=r"dangling.txt cannot be read"):
        split(texts, "train")


def test_a_file_that_shrinks_is_named(texts: Path) -> None:
    dataset = split(texts, "train")
    path = Path(dataset.source(len(dataset) // 2))
    path.write_bytes(path.read_bytes()[:3])
    with pytest.raises(UserError, match=f"{path} has become shorter"):
        for index in range(len(dataset)):
            dataset.sample(index, 0)


def test_formats_other_than_text_are_refused_by_name(texts: Path) -> None:
    (texts / "a" / "more.txt.gz").write_bytes(b"compressed")
    assert find_text_files(str(texts), "**/*.txt")
    for path in (texts, texts / "a" / "*", texts / "a" / "more.txt.gz"):
        with pytest.raises(UserError, match=r"more.txt.gz is not text: .gz files are not read"):
            find_text_files(str(path), "**/*")
