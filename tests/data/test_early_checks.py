"""What is refused before a submission: the signature of a user's dataset, stream or collate, and a wrong mixture.

Nothing is imported from the user's file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.config.schema import Config, MixtureDataConfig
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from tests.config.composing import config_of

FILE = """
raise RuntimeError("imported")

class Good:
    def __init__(self, split, size=3, *, color="red"): ...
    def __len__(self): ...
    def __getitem__(self, index): ...

class NoSplit(Good):
    def __init__(self, size): ...

class Needs(Good):
    def __init__(self, split, root): ...

class NoLength:
    def __init__(self, split): ...
    def __getitem__(self, index): ...

from torch.utils import data
from torch.utils.data import Dataset

class Plain(Dataset[int]):
    def __len__(self): ...
    def __getitem__(self, index): ...

class Heir(Plain): ...

class Made(Dataset):
    def __new__(cls, split): ...

class Other2(data.TensorDataset): ...

class Stream:
    def __init__(self, split, shard, shards): ...
    def __iter__(self): ...

def factory(**options): ...
def collate(items, random): ...
def nothing(): ...
def two(items, width): ...
"""
PACKAGE = {
    "__init__.py": "raise RuntimeError\nfrom .sets import Fake as FakeSet\nfrom .inner import GPT, loop\n",
    "sets.py": "class Fake:\n    def __init__(self, size=3): ...\n    def __len__(self): ...\n"
    "    def __getitem__(self, index): ...\n",
    "inner/__init__.py": "from ..net import *\nfrom ownpkg.net import GPT\nfrom ownpkg import loop\n",
    "net.py": "class OtherConfig: ...\nclass GPTConfig: ...\nclass GPT:\n    def __init__(self, config): ...\n",
}
CUSTOM = ("data=custom", "model=custom", "model._target_=hpc_train.models.resnet.resnet18")
STREAM = ("data=stream", "data.shards=4", *CUSTOM[1:])
MIXTURE = ("data=mixture", "+data@data.sources.one=text", "data.sources.one.path=.", "data.sources.one.pattern=*.py")


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ownlab.py").write_text(FILE)
    (tmp_path / "ownpkg" / "inner").mkdir(parents=True)
    for name, content in PACKAGE.items():
        (tmp_path / "ownpkg" / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def checked(*arguments: str) -> Config:
    config = config_of(*arguments)
    validate(config, 1, 1)
    return config


@pytest.mark.parametrize(
    "arguments",
    [
        (*CUSTOM, "data._target_=ownlab.Good", "+data.args.size=4", "+data.args.color=blue"),
        (*CUSTOM, "data._target_=ownlab.factory", "+data.args.anything=1", "data.collate=ownlab.collate"),
        (*CUSTOM, "data._target_=ownlab.Good.create"),
        (*CUSTOM, "data._target_=ownlab.Made"),
        (*CUSTOM, "data._target_=ownlab.Other2"),
        (*STREAM, "data._target_=ownlab.Stream"),
        (*STREAM, "data._target_=ownlab.factory", "data.repeat=false"),
        (*CUSTOM, "data._target_=ownpkg.loop"),
    ],
)
def test_what_fits_is_accepted_without_an_import(arguments: tuple[str, ...]) -> None:
    checked(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*CUSTOM, "data._target_=nowhere.Data"), "there is no module nowhere"),
        ((*CUSTOM, "data._target_=ownlab.Other"), "ownlab.py defines no Other"),
        ((*CUSTOM, "data._target_=ownlab.NoSplit", "+data.args.size=1"), "ownlab.NoSplit has no parameter split"),
        ((*CUSTOM, "data._target_=ownlab.Plain"), "ownlab.Plain has no parameter split"),
        ((*CUSTOM, "data._target_=ownlab.Heir"), "ownlab.Heir has no parameter split"),
        ((*CUSTOM, "data._target_=ownlab.nothing"), "ownlab.nothing has no parameter split"),
        ((*CUSTOM, "data._target_=ownlab.Needs"), "ownlab.Needs requires root, but is called with split"),
        ((*CUSTOM, "data._target_=ownlab.Good", "+data.args.sise=1"), "ownlab.Good has no parameter sise"),
        ((*CUSTOM, "data._target_=ownlab.NoLength"), "the class ownlab.NoLength has no __len__"),
        ((*CUSTOM, "data._target_=ownlab.Stream"), "ownlab.Stream requires shard, shards"),
        ((*STREAM, "data._target_=ownlab.Good"), "ownlab.Good has no parameter shard, shards"),
        ((*CUSTOM, "data._target_=ownpkg.FakeSet", "+data.args.size=8"), "ownpkg.FakeSet has no parameter split"),
        (
            ("data=synthetic", "model=custom", "model._target_=ownpkg.GPT", "+model.args.n_layer=2"),
            "ownpkg.GPT takes one object, config, and model.args holds only values",
        ),
        (("data=synthetic", "model=custom", "model._target_=ownpkg.inner.GPT"), "GPT takes one object, config"),
        (
            (*CUSTOM, "data._target_=ownlab.Good", "data.collate=ownlab.nothing"),
            "ownlab.nothing does not take 1 positional argument",
        ),
        ((*CUSTOM, "data._target_=ownlab.Good", "data.collate=ownlab.two"), "ownlab.two requires width"),
        (
            (*STREAM, "data._target_=ownlab.Stream", "train.steps=null", "train.epochs=2"),
            "train.epochs is 2, but the l",
        ),
        (
            (*STREAM, "data._target_=ownlab.Stream", "data.repeat=false", "batch.global_size=2"),
            "data.shards is 4, but a global batch of a stream that ends",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        checked(*arguments)
    assert error.value.where and error.value.fix


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        ("ownlab.Plain", "declare the parameter split: def __init__(self, split): ..."),
        ("ownlab.NoSplit", "declare the parameter split: def __init__(self, split, ...): ..."),
        ("ownlab.nothing", "declare the parameter split: def nothing(split): ..."),
    ],
)
def test_the_fix_is_the_line_to_write(target: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        checked(*CUSTOM, f"data._target_={target}")
    assert error.value.fix == fix


def test_a_mixture_takes_defaults_paths_and_sizes_from_its_sources() -> None:
    config = checked(*MIXTURE, "+data@data.sources.two=text", "data.sources.two.path=ownlab.py")
    assert isinstance(config.data, MixtureDataConfig)
    assert config.data.sources["two"]["path"] == str(Path.cwd() / "ownlab.py")
    assert config.data.sources["one"]["validation_share"] == 0.01
    assert (config.data.sequence_length, config.data.vocab_size, config.data.n_classes) == (256, 256, None)
    assert config.model.vocab_size == 256


@pytest.mark.parametrize(
    ("arguments", "message", "where"),
    [
        (("data=mixture", *CUSTOM[1:]), "the mixture has no sources", "data.sources"),
        ((*MIXTURE, "+data.weights.two=1"), "the weights are those of two, but the sources are one", "data.weights"),
        ((*MIXTURE, "+data.weights.one=0"), "the weight of one is 0.0, but must be positive", "data.weights.one"),
        ((*MIXTURE, "data.sources.one.path=gone"), "gone does not exist", "data.sources.one.path"),
        ((*MIXTURE, "data.sources.one.sequence_length=0"), "sequence_length is 0", "data.sources.one.sequence_length"),
        ((*MIXTURE, "data.sources.one.collate=ownlab.collate"), "has its own collate", "data.sources.one"),
        ((*MIXTURE, "+data.sources.two.kind=texts"), "data.sources.two.kind is 'texts'", "data.sources.two"),
        ((*MIXTURE, "+data@data.sources.two=stream", "data.sources.two.shards=2",
          "data.sources.two._target_=ownlab.Stream"), "the source two is a stream", "data.sources.two"),
        ((*MIXTURE, "+data@data.sources.two=text", "data.sources.two.sequence_length=8"),
         "data.sequence_length is 8, but that of the source one is 256", "data.sources.one.sequence_length"),
        ((*MIXTURE, "+data@data.sources.two=synthetic", "data.sources.two.task=images"),
         "the sources give different kinds of samples: one tokens, two images", "data.sources"),
        ((*MIXTURE, "+data@data.sources.two=custom"), "data.sources.two._target_ has no value", "data.sources.two"),
        ((*MIXTURE, "model=vit_tiny"), "requires images as samples", "model, data"),
    ],
)  # fmt: skip
def test_a_wrong_mixture_names_the_source(arguments: tuple[str, ...], message: str, where: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        checked(*arguments)
    assert where in error.value.where and error.value.fix


def test_a_subclass_of_a_model_that_takes_an_object_is_shown() -> None:
    with pytest.raises(UserError) as error:
        checked("data=synthetic", "model=custom", "model._target_=ownpkg.GPT", "+model.args.n_layer=2")
    line = "class OwnGPT(GPT): def __init__(self, **values): super().__init__(GPTConfig(**values))"
    assert line in error.value.fix and "net.py:3" in error.value.where
    heading = "A constructor that takes a config object"
    page = Path(__file__).parents[2] / "docs" / "howto" / "model.md"
    assert heading in error.value.fix and f"## {heading}" in page.read_text(encoding="utf-8")
