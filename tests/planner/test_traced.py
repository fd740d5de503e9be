"""Models that are counted by running them without values: every built-in family, models of one's own, Hugging Face."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.commands import plan
from hpc_train.config.compose import typed
from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.counted import Counts, counted, key_of, read_counts, sample_shape
from hpc_train.layout.memory import estimate, state_bytes
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.sizes import parameter_count
from hpc_train.models import counting
from hpc_train.models.build import build_model
from hpc_train.planner import work as planner_work
from hpc_train.planner.work import count_model, count_work
from tests.config.composing import compose

BUILT_IN = (  # one of each structure; test_sizes.py has the parameters of all
    "gpt_tiny", "llama_7b", "mistral_7b", "qwen2_7b", "qwen3_8b", "gemma_7b", "gemma2_9b", "gemma3_1b", "vit_tiny",
)  # fmt: skip
IMAGES = ["data=synthetic", "data.task=images"]


def config_of(*overrides: str) -> Config:
    return typed(compose(["+strategy=single", *overrides]))


def total(counts: Counts, *names: str) -> float:
    return sum(getattr(block, name) for block in counts.blocks for name in names)


@pytest.mark.long_form(5, cases=[name for name in BUILT_IN if name not in ("gpt_tiny", "gemma2_9b", "vit_tiny")])
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_facts_of_a_family_are_what_its_model_computes_and_keeps(name: str) -> None:
    data = (
        [*IMAGES, "data.image_size=224"] if name.startswith("vit") else ["data=synthetic", "data.sequence_length=128"]
    )
    config = config_of(f"model={name}", "model.n_layers=2", *data)
    counts, work, family = counting.count(config), count_work(config), family_of(config.model)
    assert work.parameters == total(counts, "parameters") == parameter_count(config.model)
    forward = sum(block.products + block.attention for block in work.blocks)
    assert forward == pytest.approx(total(counts, "products", "attention"), rel=0.01)
    images = counts.blocks[0].products  # the formula also counts their gradient, which nothing needs
    assert work.sample_flops == pytest.approx(total(counts, "products", "attention", "backward") + images, rel=0.01)
    assert family.activations is not None
    kept = family.activations(config.model, config.data)
    elements = kept.tokens * (kept.norm_inputs + kept.layer + 2 * kept.scores)
    last = counts.blocks[-2]  # the first layer also keeps what all layers share
    assert 4 * elements == pytest.approx(last.wide_bytes, rel=0.01)


@pytest.mark.parametrize("target", ["hpc_train.models.resnet.resnet18", "examples.own_pipeline_model.ResidualNet"])
def test_kept_bytes_are_those_that_autograd_keeps_of_real_values(target: str) -> None:
    config = config_of("model=custom", f"model._target_={target}", *IMAGES)
    counts = counting.count(config)
    model = build_model(config.model, 0)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu")
    own = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        losses = model(torch.zeros(2, *sample_shape(config.data)), {}, torch.zeros(2, dtype=torch.int64))
    assert losses
    found = sum(storage.nbytes() for address, storage in kept.items() if address not in own)
    assert 2 * total(counts, "wide_bytes") == pytest.approx(found, rel=0.01)
    assert total(counts, "parameters") == sum(value.numel() for value in model.parameters())
    assert total(counts, "narrow_bytes") < total(counts, "wide_bytes")


def test_frozen_weights_that_a_module_holds_in_bf16_are_counted_apart() -> None:
    overrides = ("model=custom", "model._target_=tests.parallel.module.RoundedTiny", "+model.args.classes=10", *IMAGES)
    counts = counting.count(config_of(*overrides, "data.n_classes=10"))
    assert total(counts, "narrow") == total(counts, "parameters") - total(counts, "trained") == 2 * 6 + 7 * 6


OWN = """
import torch
from torch import nn

print("the user's code prints")


class Layer(nn.Linear):
    def forward(self, hidden):
        return hidden + torch.relu(super().forward(hidden))


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.stem = nn.Linear(3 * 32 * 32, width)
        self.blocks = nn.ModuleList(Layer(width, width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, pixels):
        hidden = self.stem(pixels.flatten(1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)
"""
WIDTH = 64
PARAMETERS = (3 * 32 * 32 + 1) * WIDTH + 3 * (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    read_counts.cache_clear()
    return tmp_path


@pytest.mark.long_form(15)
def test_an_own_model_is_counted_once_until_its_code_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "counted_net.py").write_text(OWN)
    words = ["model=custom", "model._target_=counted_net.Net", *IMAGES, "optim=adamw"]
    config = config_of(*words)
    layout = resolve_layout(config, 1, 1)
    assert estimate(config, layout) is None and state_bytes(config) is None

    assert plan.main([*words, "--gpus", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows and all(row["memory_bytes"] > 0 and "pp 1" in row["layout"] for row in rows)

    needed = estimate(config, layout)
    assert needed is not None and needed.parameters == 4 * PARAMETERS and state_bytes(config) == 12 * PARAMETERS
    work = count_work(config)
    weights = 3 * 32 * 32 * WIDTH + 3 * WIDTH**2 + 10 * WIDTH
    assert sum(block.products for block in work.blocks) == 2 * weights and len(work.blocks) == 5
    assert work.sample_flops == 2 * (3 * weights - 3 * 32 * 32 * WIDTH)  # without a gradient of the images
    with monkeypatch.context() as without:
        without.setattr(subprocess, "run", None)
        count_model(config)  # from the cache

    (folder / "counted_net.py").write_text("print('looking for weights')\nraise SystemExit('there is no weights.pt')\n")
    read_counts.cache_clear()  # in another process
    assert estimate(config, layout) is None
    with pytest.raises(UserError, match=r"cannot be counted: there is no weights\.pt") as error:
        count_model(config)
    assert "ModelFamily" in error.value.fix and not list((folder / "cache/hpc_train/counts").glob("tmp*"))


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Counts in this process, which has torch already."""
    monkeypatch.setattr(planner_work, "_answer", lambda config, file: asdict(counting.count(config)))
    return folder


@pytest.mark.long_form(6)  # the short form counts a model of Hugging Face in test_float8_layers.py
def test_a_model_of_hugging_face_without_facts_is_counted(here: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=256).save_pretrained(here / "gpt2")
    overrides = [f"model.name_or_path={here / 'gpt2'}", "model.task=causal_lm", "model.pretrained=false"]
    config = config_of("model=hf", *overrides, "data=synthetic", "data.sequence_length=32", "precision=bf16")
    layout = resolve_layout(config, 1, 1)
    assert estimate(config, layout) is None
    count_model(config)
    model: Any = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config.from_pretrained(here / "gpt2"))
    found = counted(config).model
    assert parameter_count(found) == sum(value.numel() for value in model.parameters())
    assert estimate(config, layout) is not None
    work = count_work(config)
    layer, head = work.blocks[1], work.blocks[-1]
    assert layer.products == 2 * 32 * 12 * 16**2 and layer.attention == 4 * 32**2 * 16 and len(work.blocks) == 4
    assert head.products == 2 * 32 * 16 * 256 and work.tokens == 32
    longer = config_of("model=hf", *overrides, "data=synthetic", "data.sequence_length=64", "precision=bf16")
    assert key_of(longer) != key_of(config)
    halved = config_of("model=hf", *overrides, "data=synthetic", "data.sequence_length=32")
    assert key_of(halved) == key_of(config)  # counts hold for every format of numbers


VALUES = (
    OWN
    + """

class Routed(Net):
    def forward(self, pixels):
        return super().forward(pixels) if (pixels == 0).all().item() else pixels.flatten(1)[:, :10]
"""
)


def test_a_model_whose_operations_depend_on_values_is_run_with_values(here: Path) -> None:
    (here / "valued_net.py").write_text(VALUES)
    plain, routed = (
        counting.count(config_of("model=custom", f"model._target_=valued_net.{name}", *IMAGES))
        for name in ("Net", "Routed")
    )
    assert plain.blocks[1:] == routed.blocks[1:]
    assert plain.blocks[0].parameters == routed.blocks[0].parameters


def test_what_cannot_be_counted_is_refused_with_the_reason(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("model=custom", "model._target_=torch.nn.Linear", *IMAGES)
    with pytest.raises(UserError, match="in_features"):
        count_model(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="which is not installed here"):
        count_model(config)
