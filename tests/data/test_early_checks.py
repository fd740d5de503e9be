"""What is refused before a submission: the signature of a user's dataset, stream or collate, and a wrong mixture.

Nothing is imported from the user's file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hpc_train.config.compose import typed
from hpc_train.config.schema import (
    BatchConfig,
    Config,
    CustomDataConfig,
    CustomModelConfig,
    MixtureDataConfig,
    StreamDataConfig,
    SyntheticDataConfig,
    TrainConfig,
)
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from tests.config.composing import compose, config_of

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
    "lazy.py": "import typing\nif typing.TYPE_CHECKING:\n    from .net import *\n",  # as in transformers
    "net.py": "class OtherConfig: ...\nclass GPTConfig: ...\nclass GPT:\n    def __init__(self, config): ...\n",
}
VISION = CustomModelConfig(_target_="hpc_train.models.resnet.resnet18")
MIXTURE = ("data=mixture", "+data@data.sources.one=text", "data.sources.one.path=.", "data.sources.one.pattern=*.py")


@pytest.fixture(autouse=True, scope="module")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The files of a user in the working directory."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "ownlab.py").write_text(FILE)
    (folder / "ownpkg" / "inner").mkdir(parents=True)
    for name, content in PACKAGE.items():
        (folder / "ownpkg" / name).write_text(content)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.syspath_prepend(str(folder))
        yield


def custom(target: str, collate: str | None = None, **args: Any) -> Config:
    data = CustomDataConfig(_target_=target, args=args, collate=collate)
    return Config(data=data, model=VISION, train=TrainConfig(steps=5))


def stream(target: str, repeat: bool = True, global_size: int = 8, epochs: float | None = None) -> Config:
    return Config(
        data=StreamDataConfig(_target_=target, shards=4, repeat=repeat),
        model=VISION,
        batch=BatchConfig(global_size=global_size),
        train=TrainConfig(steps=5 if epochs is None else None, epochs=epochs),
    )


def model(target: str, **args: Any) -> Config:
    custom = CustomModelConfig(_target_=target, args=args)
    return Config(data=SyntheticDataConfig(), model=custom, train=TrainConfig(steps=5))


def mixture(one: dict[str, Any] | None = None, model: str = "gpt_tiny", **others: dict[str, Any]) -> Config:
    """Returns the config of a mixture of ``one``, a text with changes, and ``others``."""
    text = {"kind": "text", "path": ".", "pattern": "*.py"}
    node = compose(["data=mixture", f"model={model}"]).copy()
    OmegaConf.set_struct(node, False)
    node.data.sources = {"one": text | (one or {})} | others
    return typed(node)


@pytest.mark.parametrize(
    "config",
    [
        custom("ownlab.Good", size=4, color="blue"),
        custom("ownlab.factory", "ownlab.collate", anything=1),
        custom("ownlab.Good.create"),
        custom("ownlab.Made"),
        custom("ownlab.Other2"),
        stream("ownlab.Stream"),
        stream("ownlab.factory", repeat=False),
        custom("ownpkg.loop"),
        custom("ownpkg.lazy.GPT"),
    ],
)
def test_what_fits_is_accepted_without_an_import(config: Config) -> None:
    validate(config, 1, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (custom("nowhere.Data"), "there is no module nowhere"),
        (custom("ownlab.Other"), "ownlab.py defines no Other"),
        (custom("ownpkg.FakeSett", size=8), "ownpkg/__init__.py defines no FakeSett"),
        (custom("ownpkg.lazy.GTP"), "ownpkg/lazy.py defines no GTP"),
        (model("torch.nn.Liner"), "torch/nn/__init__.py defines no Liner"),
        (custom("ownlab.NoSplit", size=1), "ownlab.NoSplit has no parameter split"),
        (custom("ownlab.Plain"), "ownlab.Plain has no parameter split"),
        (custom("ownlab.Heir"), "ownlab.Heir has no parameter split"),
        (custom("ownlab.nothing"), "ownlab.nothing has no parameter split"),
        (custom("ownlab.Needs"), "ownlab.Needs requires root, but is called with split"),
        (custom("ownlab.Good", sise=1), "ownlab.Good has no parameter sise"),
        (custom("ownlab.NoLength"), "the class ownlab.NoLength has no __len__"),
        (custom("ownlab.Stream"), "ownlab.Stream requires shard, shards"),
        (stream("ownlab.Good"), "ownlab.Good has no parameter shard, shards"),
        (custom("ownpkg.FakeSet", size=8), "ownpkg.FakeSet has no parameter split"),
        (model("ownpkg.GPT", n_layer=2), "ownpkg.GPT takes one object, config, and model.args holds only values"),
        (model("ownpkg.inner.GPT"), "GPT takes one object, config"),
        (custom("ownlab.Good", "ownlab.nothing"), "ownlab.nothing does not take 1 positional argument"),
        (custom("ownlab.Good", "ownlab.two"), "ownlab.two requires width"),
        (stream("ownlab.Stream", epochs=2), "train.epochs is 2, but the l"),
        (
            stream("ownlab.Stream", repeat=False, global_size=2),
            "data.shards is 4, but a global batch of a stream that ends",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(config: Config, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        validate(config, 1, 1)
    assert error.value.where and error.value.fix


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("ownlab.Plain", "def __init__(self, split): ..."),
        ("ownlab.NoSplit", "def __init__(self, split, ...): ..."),
        ("ownlab.nothing", "def nothing(split): ..."),
    ],
)
def test_the_fix_is_the_line_to_write(target: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        validate(custom(target), 1, 1)
    assert error.value.fix == f"declare the parameter split: {line}"


def test_a_mixture_takes_defaults_paths_and_sizes_from_its_sources() -> None:
    config = config_of(*MIXTURE, "+data@data.sources.two=text", "data.sources.two.path=ownlab.py")
    validate(config, 1, 1)
    assert isinstance(config.data, MixtureDataConfig)
    assert config.data.sources["two"]["path"] == str(Path.cwd() / "ownlab.py")
    assert config.data.sources["one"]["validation_share"] == 0.01
    assert (config.data.sequence_length, config.data.vocab_size, config.data.n_classes) == (256, 256, None)
    assert config.model.vocab_size == 256


TWO = {"kind": "text", "path": "ownlab.py"}


@pytest.mark.parametrize(
    ("sources", "message", "where"),
    [
        ({"one": {"path": "gone"}}, "gone does not exist", "data.sources.one.path"),
        ({"one": {"sequence_length": 0}}, "sequence_length is 0", "data.sources.one.sequence_length"),
        ({"one": {"collate": "ownlab.collate"}}, "has its own collate", "data.sources.one"),
        ({"two": {"kind": "texts"}}, "data.sources.two.kind is 'texts'", "data.sources.two"),
        ({"two": {"kind": "stream", "shards": 2, "_target_": "ownlab.Stream"}}, "the source two is a stream",
         "data.sources.two"),
        ({"two": TWO | {"sequence_length": 8}}, "data.sequence_length is 8, but that of the source one is 256",
         "data.sources.one.sequence_length"),
        ({"two": {"kind": "synthetic", "task": "images"}},
         "the sources give different kinds of samples: one tokens, two images", "data.sources"),
        ({"two": {"kind": "custom"}}, "data.sources.two._target_ has no value", "data.sources.two"),
    ],
)  # fmt: skip
def test_a_wrong_source_of_a_mixture_is_named(sources: dict[str, Any], message: str, where: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        validate(mixture(**sources), 1, 1)
    assert where in error.value.where and error.value.fix


@pytest.mark.parametrize(
    ("weights", "message", "where"),
    [
        ({"two": 1.0}, "data.weights names two, but the sources are one", "data.weights"),
        ({"one": 0.0}, "the weight of one is 0.0, but must be positive", "data.weights.one"),
    ],
)
def test_weights_are_those_of_the_sources(weights: dict[str, float], message: str, where: str) -> None:
    config = mixture()
    assert isinstance(config.data, MixtureDataConfig)
    config.data.weights = weights
    with pytest.raises(UserError, match=message) as error:
        validate(config, 1, 1)
    assert where in error.value.where and error.value.fix


def test_a_mixture_needs_sources_and_a_model_of_their_kind() -> None:
    with pytest.raises(UserError, match="the mixture has no sources"):
        validate(Config(data=MixtureDataConfig(), model=VISION, train=TrainConfig(steps=5)), 1, 1)
    with pytest.raises(UserError, match="requires images as samples") as error:
        mixture(model="vit_tiny")
    assert error.value.where == "model, data" and error.value.fix


def test_a_subclass_of_a_model_that_takes_an_object_is_shown() -> None:
    with pytest.raises(UserError) as error:
        validate(model("ownpkg.GPT", n_layer=2), 1, 1)
    line = "class OwnGPT(GPT): def __init__(self, **values): super().__init__(GPTConfig(**values))"
    assert line in error.value.fix and "net.py:3" in error.value.where
    heading = "A constructor that takes a config object"
    page = Path(__file__).parents[2] / "docs" / "howto" / "model.md"
    assert heading in error.value.fix and f"## {heading}" in page.read_text(encoding="utf-8")
