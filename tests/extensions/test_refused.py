"""An extension that lacks or contradicts a fact is refused before anything is submitted."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from tests.config.composing import config_of
from tests.extensions.model_and_data import overrides, write_package

NUMBERS = count()
FAMILY_FACTS = ["schema", "learns_from", "parameters", "activations", "flops_per_sample"]


def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str, str], more: str = "") -> str:
    """The message for a package with these mistakes."""
    name = f"refused_{next(NUMBERS)}"
    write_package(folder, name, *changes)
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(UserError) as error:
        validate(config_of("+strategy=single", *overrides(name), *more.split()), 1, 2)
    return str(error.value)


@pytest.mark.parametrize("fact", FAMILY_FACTS)
def test_a_family_without_a_fact_is_refused_by_its_name_and_file(
    fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"schema": "    schema=MixerConfig,\n", "learns_from": '    learns_from="tokens",\n'}
    message = refusal(tmp_path, monkeypatch, ("mixer_family", line.get(fact, f"    {fact}={fact},\n"), ""))
    assert f"does not state {fact}" in message and "mixer_family.py" in message


@pytest.mark.parametrize(
    ("file", "text", "replacement", "words"),
    [
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
        ("counting_source", '"tokens"', '"audio"', "requires tokens as samples, but"),
    ],
)
def test_a_missing_or_contradictory_fact_is_refused(
    file: str, text: str, replacement: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal(tmp_path, monkeypatch, (file, text, replacement))
    assert words in message
    assert str(tmp_path) in message or "set in: model, data" in message


@pytest.mark.parametrize(
    ("text", "replacement", "words"),
    [
        ("return model.n_layers *", "return 1 + model.n_layers *", "but the model has"),
        pytest.param(
            "return 6.0 *", "return 3.0 * len(shape) +", "flops_per_sample is", marks=pytest.mark.long_form(10)
        ),
        pytest.param('"mixer." + name', '{}[name]', "has no name for", marks=pytest.mark.long_form(10)),
    ],
)  # fmt: skip
def test_a_description_that_contradicts_the_model_is_refused(
    text: str, replacement: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [("mixer_family", text, replacement)]
    if "flops" in words:
        changes.append(("mixer", "return flops_per_sample(self.config, inputs.shape[1:])", "return 1.0"))
    message = refusal(tmp_path, monkeypatch, *changes)
    assert words in message and "mixer_family.py" in message


def test_a_plan_that_shards_the_sequence_and_omits_a_module_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [
        ("mixer_family", "shards_sequence=False", "shards_sequence=True"),
        ("mixer", '        "norm": ReplicatedStyle(),\n', ""),
    ]
    assert "omits layers.0.norm.weight" in refusal(tmp_path, monkeypatch, *changes, more="strategy.tp=2")


def test_values_outside_the_range_and_unknown_keys_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "model.dim" in refusal(tmp_path, monkeypatch, more="+model.dim=0")
    assert "model.width is not a config key" in refusal(tmp_path, monkeypatch, more="+model.width=3")
    assert "data.start is 99" in refusal(tmp_path, monkeypatch, more="+data.start=99")


def test_a_family_without_a_tensor_parallel_plan_is_refused_under_tp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = 'tensor_parallel=TensorParallel(plan="PACKAGE.mixer:plan", divisible=("ffn_dim",), shards_sequence=False)'
    change = ("mixer_family", line, "tensor_parallel=None")
    assert "has no tensor-parallel plan" in refusal(tmp_path, monkeypatch, change, more="strategy.tp=2")


def test_a_size_that_the_data_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size refers to data\.vocab_size"):
        config_of("data=custom", "data._target_=package.Data")


def test_a_kind_that_cannot_be_found_is_refused() -> None:
    assert "absent_package" not in sys.modules
    with pytest.raises(UserError, match=r"absent_package\.file:FAMILY cannot be found"):
        config_of("model=extension", "model.kind=absent_package.file:FAMILY")
