"""An extension that lacks or contradicts a fact is refused before anything is submitted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from hpc_train.config.extensions import load_family, load_row, load_source
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from hpc_train.models.contract import disagreement
from tests.config.composing import config_of
from tests.extensions.model_and_data import overrides, write_package

NUMBERS = count()
Change = tuple[str, str, str]
PLAN = 'TensorParallel(plan="PACKAGE.mixer:plan", divisible=("ffn_dim",), shards_sequence=False)'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns a function that writes a package with these changes and returns its name."""

    def write(*changes: Change) -> str:
        name = f"refused_{next(NUMBERS)}"  # rows are loaded once per process
        write_package(tmp_path, name, *changes)
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


def composed(name: str, *more: str) -> Config:
    return config_of("+strategy=single", *overrides(name), *more)


@pytest.mark.parametrize(
    ("file", "text", "replacement", "words"),
    [
        ("mixer_family", "    schema=MixerConfig,\n", "", "does not state schema"),
        ("mixer_family", '    learns_from="tokens",\n', "", "does not state learns_from"),
        ("mixer_family", "    parameters=parameters,\n", "", "does not state parameters"),
        ("mixer_family", "    activations=activations,\n", "", "does not state activations"),
        ("mixer_family", "    flops_per_sample=flops_per_sample,\n", "", "does not state flops_per_sample"),
        ("mixer_family", "    tensor_parallel=", "    chunked_loss=False) if 0 else dict(x=", "must be a ModelFamily"),
        ("mixer_family", "n_layers: int", "depth: int", "has no key n_layers"),
        ("mixer_family", "PACKAGE.mixer:Mixer", "PACKAGE.mixer:Blender", "defines no Blender"),
        ("mixer_family", "PACKAGE.mixer:plan", "PACKAGE.absent:plan", "there is no module"),
        ("mixer_family", "from dataclasses", "import torch\nfrom dataclasses", "imports torch"),
        ("mixer_family", "activations=activations", "activations=None", "needs both parameters and activations"),
        ("mixer_family", '"ffn_dim",)', '"heads",)', "has no key heads"),
        ("mixer", "def plan(model)", "def plan(model, ranks)", "requires ranks, but is called with one argument"),
        ("counting_source", '    gives="tokens",\n', "", "does not state gives"),
        ("counting_source", "    check_inputs=check_inputs,\n", "", "does not state check_inputs"),
        ("counting_source", "vocab_size: int", "size: int", "has no key vocab_size"),
        ("counting_source", '"tokens"', '"images"', "has no key image_size, channels, n_classes"),
        ("counting", "config, split, seed", "config", "does not take 3 positional arguments"),
    ],
)
def test_a_missing_or_contradictory_fact_is_refused(
    file: str, text: str, replacement: str, words: str, package: Callable[..., str], tmp_path: Path
) -> None:
    name = package((file, text, replacement))
    with pytest.raises(UserError) as error:
        load_source(f"{name}.counting_source:SOURCE")
        load_family(f"{name}.mixer_family:FAMILY")
    message = str(error.value)
    assert words in message
    assert str(tmp_path) in message


@pytest.mark.parametrize("question", ["torch.nn", "importlib.util\n\nimportlib.util.find_spec('torch')"])
def test_a_package_that_looks_for_torch_does_not_stay_loaded_without_it(
    question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"looks_for_torch_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(f"import {question}\n", encoding="utf-8")
    (tmp_path / f"row_of_{name}.py").write_text(f"import {name}\n\nROW = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [module for module in sys.modules if module.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UserError, match=f"row_of_{name}:ROW imports torch"):
        load_row(f"row_of_{name}:ROW", "model.kind", int)
    assert not {name, f"row_of_{name}"} & sys.modules.keys()


CONTRADICTIONS = [
    ("mixer_family", "return model.n_layers *", "return 1 + model.n_layers *", "but the model has"),
    ("mixer", "return flops_per_sample(self.config, inputs.shape[1:])", "return 1.0", "flops_per_sample is"),
    ("mixer_family", '"mixer." + name', "{}[name]", "has no name for"),
    ("mixer", '        "norm": ReplicatedStyle(),\n', "", "omits layers.0.norm.weight"),
]


def test_a_description_that_contradicts_the_model_is_refused(package: Callable[..., str]) -> None:
    for file, text, replacement, words in CONTRADICTIONS:
        shards = ("mixer_family", "shards_sequence=False", f"shards_sequence={words.startswith('omits')}")
        name = package((file, text, replacement), shards)
        family, source = load_family(f"{name}.mixer_family:FAMILY"), load_source(f"{name}.counting_source:SOURCE")
        kinds = {"model": f"{name}.mixer_family:FAMILY", "data": f"{name}.counting_source:SOURCE"}
        model = family.schema(kind=kinds["model"], vocab_size=16, n_layers=2)
        assert words in disagreement(model, source.schema(kind=kinds["data"]))


@pytest.mark.long_form(15)  # the comparison itself above
def test_a_contradiction_is_found_in_another_process(package: Callable[..., str]) -> None:
    name = package(CONTRADICTIONS[0][:3])
    with pytest.raises(UserError, match="but the model has") as refused:
        validate(composed(name), 1, 2)
    assert "mixer_family.py" in str(refused.value)


def test_what_does_not_fit_the_config_is_refused(package: Callable[..., str]) -> None:
    name = package()
    without_plan = package(("mixer_family", f"tensor_parallel={PLAN}", "tensor_parallel=None"))
    audio = package(("counting_source", '"tokens"', '"audio"'))
    for arguments, words in [
        ((name, "+model.dim=0"), "model.dim"),
        ((name, "+model.width=3"), "model.width is not a config key"),
        ((name, "+data.start=99"), "data.start is 99"),
        ((without_plan, "strategy.tp=2"), "has no tensor-parallel plan"),
        ((audio,), "requires tokens as samples, but"),
    ]:
        with pytest.raises(UserError, match=words):
            validate(composed(*arguments), 1, 2)


def test_a_size_that_the_data_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size refers to data\.vocab_size"):
        config_of("data=custom", "data._target_=package.Data")


def test_a_kind_that_cannot_be_found_is_refused() -> None:
    assert "absent_package" not in sys.modules
    with pytest.raises(UserError, match=r"absent_package\.file:FAMILY cannot be found"):
        config_of("model=extension", "model.kind=absent_package.file:FAMILY")
